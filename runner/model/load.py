"""The layers of a request's model: as the model lists them, or from a trace if a pipeline must cut another module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.model.adapter import adapted, adapted_layers, names_of_base
from runner.model.apart import ApartError, apart
from runner.model.approximate.layers import Approximation
from runner.model.boundary import map_tensors
from runner.model.data import LossFunction, example_batch, load_loss
from runner.model.embeddings import with_tensor_trains, with_tensor_trains_later
from runner.model.fake import fake_tensors
from runner.model.freeze import frozen
from runner.model.kernels.choice import Kernels, kernels_of
from runner.model.layers import LayerSource, StageModule, build_stage, layers_of
from runner.model.lightning_module import (
    OwnStep,
    is_lightning_module,
    lightning_problems,
    loss_of_step,
    traces_its_step,
)
from runner.model.make import make_model
from runner.model.metrics import KeptLogs
from runner.model.modes import in_training
from runner.model.own_methods import brings
from runner.model.precision import cast_module, dtype_of, to_precision
from runner.model.pretrained.fill import filled as with_weights
from runner.model.pretrained.weights import PretrainedWeights
from runner.model.seeds import seeded_with
from runner.model.ties import sharing_problems
from runner.model.traced.cuts import cut_before, cuts_before, good_cuts
from runner.model.traced.kept import kept_or_traced
from runner.model.traced.operators import Program, trace
from runner.model.traced.segments import split
from runner.optim.catalogue.registry import optimizer_of
from runner.plan.requested_schedule import num_stages

if TYPE_CHECKING:
    from runner.model.sharded.plan import Division

__all__ = [
    "LoadedModel",
    "ask_whole_model",
    "load_model",
    "model_layers",
    "of_whole_model",
    "segments_of",
    "tensor_shapes",
    "trace_layers",
]

T = TypeVar("T")

_TRACED_SAMPLES = 3  # more than two, because torch treats sizes of 0 and 1 as constants


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model.

    Args:
        layers: the layers, in order.
        loss: applied to the last layer's output.
        module: the LightningModule from which they came, if any.
        step: the module's own training step, if that is the only layer.
        approximation: what is approximated in the backward of the layers; None: nothing.
        kernels: the means by which operators of the layers are computed; None: torch chooses.
        made: what the model function returned.
        division: how its weights are divided among ranks; None: they are whole.
        has_own_loss: whether the loss is the module's own, and not the one that the request names.
        logs: what its steps log, where they are traced.
    """

    layers: list[LayerSource]
    loss: LossFunction
    module: Any | None = None
    step: OwnStep | None = None
    approximation: Approximation | None = None
    kernels: Kernels | None = None
    made: Any = None
    division: Division | None = None
    has_own_loss: bool = False
    logs: KeptLogs = KeptLogs()


def model_layers(config: RunConfig, logits: str = "") -> list[LayerSource]:
    """The layers of which stages are made; where ranks divide them, those of the first part.

    Args:
        config: the request.
        logits: see :func:`load_model`.
    """
    return load_model(config, shard=0 if config.parallelism.tensor > 1 else None, logits=logits).layers


def load_model(
    config: RunConfig, *, cut: bool = True, filled: bool = False, shard: int | None = None, logits: str = ""
) -> LoadedModel:
    """The model of ``config``; a module without layers is traced if the pipeline has more than one rank.

    Under a fake tensor mode, the model and the traced batch are fake and nothing is allocated.

    Args:
        cut: whether to trace such a module; without it, the module stays whole, for one process.
        filled: whether layers get the weights of ``model.pretrained``, if there are any, when they are built.
        shard: the number of the part that layers have of weights which ranks divide; None: they have the whole.
        logits: the name of the layer whose divided logits the loss takes by parts; empty: it takes all.

    Raises:
        RequestError: the model cannot be loaded or traced, layers share what stages cannot share, or the pretrained
            weights are not those of the model.
    """
    pretrained = filled and config.model.pretrained is not None
    with seeded_with(config.seed):
        made = make_model(config.model, initialise=not (pretrained and config.model.pretrained_strict))
        weights = PretrainedWeights(config.model, made) if pretrained else None
        made = with_tensor_trains(made, config.embedding)
        division = _division_of(config, made, shard)
        if division is not None:
            division.logits = logits
        loaded = _load(adapted(made, config.adapter), config, cut=cut, division=division)
    layers = with_tensor_trains_later(loaded.layers, config.embedding, config.seed)
    layers = frozen(adapted_layers(layers, config.adapter, config.seed), config.trainer.freeze)
    if weights is not None:
        layers = with_weights(layers, weights, names_of_base(config.adapter), division.shards if division else {})
    if division is not None:
        layers = _of_tokens(division.of_later(layers), config, division)
    approximation = approximation_of(config)
    if approximation is not None:
        layers = [replace(layer, around=approximation.around) for layer in layers]
    kernels = loaded.kernels
    if kernels is not None:
        layers = kernels.of_layers(layers)
    loss = loaded.loss if kernels is None else kernels.loss(loaded.loss, config.loss)
    if logits and division is not None:
        from runner.model.sharded.logits import loss_of_parts

        loss = loss_of_parts(loss, config.loss, division)
    return replace(loaded, layers=layers, loss=loss, approximation=approximation, made=made, division=division)


def _division_of(config: RunConfig, made: Any, shard: int | None) -> Division | None:
    if shard is None or config.parallelism.tensor == 1:
        return None
    from runner.model.sharded.plan import division_of  # with operators that most runs do without

    return division_of(config, made, shard)


def _of_tokens(layers: list[LayerSource], config: RunConfig, division: Division) -> list[LayerSource]:
    """The layers, between which values are divided by tokens if that is asked for; of a trace they are already."""
    if not division.sequence or division.divides_tokens:
        return layers
    if layers[0].step is not None:
        rule, why = "must be false for a model with a training_step of its own", "It has no layers that could be traced"
        raise RequestError([Problem("parallelism.sequence", True, rule, why, "parallelism.sequence=false")])
    from runner.model.sharded.sequence_layers import sequenced_layers

    inputs, dtype = _traced_inputs([layer.given for layer in layers], config), dtype_of(config.precision.name)
    return sequenced_layers(layers, inputs, dtype, config.model.target, division)


def approximation_of(config: RunConfig) -> Approximation | None:
    """What the request approximates in the backward of layers, or None."""
    asked, precision = config.approximate_backward, PRECISIONS[config.precision.name]
    if asked.name == "none" and not precision.four_bits:
        return None
    return Approximation(asked.bits, asked.ratio, precision.four_bits)


def _load(made: Any, config: RunConfig, *, cut: bool, division: Division | None) -> LoadedModel:
    kernels = kernels_of(config, own_loss=is_lightning_module(made))
    if not is_lightning_module(made):
        return LoadedModel(_layers(made, config, cut, division, kernels), load_loss(config.loss), kernels=kernels)
    raise_problems(lightning_problems(made, config))
    if config.parallelism.pipeline > 1 and cut and traces_its_step(made):
        return replace(_cut_step(made, config, division, kernels), kernels=kernels)
    if traces_its_step(made) or (config.parallelism.pipeline == 1 and brings(made, "training_step")):
        step = OwnStep(made)
        if division is not None:
            division.apply([("", made)])
        layers = [LayerSource(0, "", lambda: made, made, step=step)]
        return LoadedModel(layers, loss_of_step, made, step, kernels=kernels)
    own = getattr(made, "loss", None)
    loss, layers = own if callable(own) else load_loss(config.loss), _layers(made, config, cut, division, kernels)
    return LoadedModel(layers, loss, made, kernels=kernels, has_own_loss=callable(own))


def _cut_step(made: Any, config: RunConfig, division: Division | None, kernels: Kernels | None) -> LoadedModel:
    """A LightningModule whose ``training_step`` is all that it says: its trace is cut into layers and a loss."""
    from runner.model.traced.step import traced_step

    raise_problems(_untraceable(config))
    batch = _traced_inputs([made], config), _traced_targets(made, config)
    programs, loss = traced_step(made, batch, config.model.target)
    layers = _segments(made, programs, config, division, kernels)
    raise_problems(sharing_problems(layers, config.model.target))
    return LoadedModel(layers, loss, made, has_own_loss=True, logs=loss.logs)


def tensor_shapes(config: RunConfig) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the whole model's parameters and buffers by global name.

    They are found without allocating memory. Only a model whose constructor cannot run on fake tensors (one that calls
    ``item()``, for example) is made for a moment, as profiling does, too.

    Returns:
        the shapes, or None if the model cannot be made here at all.
    """
    return of_whole_model(config, _shapes)


def _shapes(_: LoadedModel, stage: StageModule) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in stage.global_state().items()}


def of_whole_model(config: RunConfig, question: Callable[[LoadedModel, StageModule], T]) -> T | None:
    """What a function says of the model and all of its layers as one stage, in a process of their own.

    They are made of fake tensors where the model's constructor can run on them.

    Returns:
        the function's value, or None if the model cannot be made here at all.

    Raises:
        RequestError: see :func:`load_model`; or the function raised it.
    """
    for kind in (fake_tensors, nullcontext):
        with suppress(ApartError):  # a user's code may do anything that fake tensors cannot
            return apart(ask_whole_model, config, question, kind)
    return None


def ask_whole_model(
    config: RunConfig,
    question: Callable[[LoadedModel, StageModule], T],
    kind: Callable[[], AbstractContextManager[Any]],
) -> T:
    """Like :func:`of_whole_model` in this process, with tensors of the given kind."""
    with kind():
        loaded = load_model(config, cut=False)
        return question(loaded, build_stage(loaded.layers, 0, len(loaded.layers) - 1))


def _layers(
    made: Any, config: RunConfig, cut: bool, division: Division | None, kernels: Kernels | None
) -> list[LayerSource]:
    sources = layers_of(made, config.seed, config.model.target)
    if division is not None:
        division.of_given(sources)
    searched = division is not None and not division.divides  # its operators tell what can be divided
    whole = sources[0].given if sources[0].spread else None
    needs_trace = division is not None and (searched or division.sequence)
    if searched and cut and whole is None and division is not None:
        from runner.model.sharded.traced import divided_layers

        inputs = _traced_inputs([source.given for source in sources], config)
        sources = divided_layers(sources, inputs, config.model.target, division)
    if cut and (config.parallelism.pipeline > 1 or (needs_trace and whole is not None)):
        if whole is not None:
            raise_problems(_untraceable(config))
            sources = trace_layers(whole, config, division, kernels)
        elif config.model.split_points:
            rule = "applies to a module without layers, which is traced"
            why = f"{config.model.target} lists {len(sources)} layers"
            fix = "partition=manual partition.boundaries=[…]"
            raise RequestError([Problem("model.split_points", config.model.split_points, rule, why, fix)])
        raise_problems(sharing_problems(sources, config.model.target))
    return sources


def trace_layers(
    model: nn.Module, config: RunConfig, division: Division | None = None, kernels: Kernels | None = None
) -> list[LayerSource]:
    """The segments of ``model``, traced on a small batch of the request's data.

    Args:
        model: the model, whole.
        config: the request.
        division: the ranks that divide the model, and is told what they divide; None: it stays whole.
        kernels: put some of its operators together; None: they stay as they are.

    Raises:
        RequestError: it cannot be traced, or cannot be cut at ``model.split_points``.
    """
    raise_problems(_untraceable_slices(config))
    inputs = _traced_inputs([model], config)
    divided = division is not None and division.divides
    form = (division.group.degree, division.logits, division.sequence) if division is not None and divided else None
    mode = detect_fake_mode(list(model.parameters()))  # tensors of two modes cannot meet
    programs = kept_or_traced((mode, form), division, lambda: trace(model, inputs, config.model.target))
    return _segments(in_training(model), programs, config, division, kernels)  # which a kept trace has not seen


def _segments(
    model: nn.Module,
    programs: dict[bool, Program],
    config: RunConfig,
    division: Division | None,
    kernels: Kernels | None,
) -> list[LayerSource]:
    if division is not None:
        from runner.model.sharded.sequence_layers import sequenced_programs
        from runner.model.sharded.traced import divided_programs, whole_between_layers

        if not division.divides:  # its operators tell what can be divided
            programs = divided_programs(model, programs, division)
        else:
            programs = whole_between_layers(programs, division.shards.keys())
        programs = sequenced_programs(model, programs, division)
    if kernels is not None:
        programs = kernels.of_programs(programs)
    return segments_of(model, programs, config.model.split_points, wanted=num_stages(config) - 1)


def _traced_inputs(modules: Sequence[nn.Module | None], config: RunConfig) -> Any:
    """A small batch in the format of the weights, for modules that get it, too; fake if they are."""
    inputs, _ = _traced_batch(config)
    there, dtype = [module for module in modules if module is not None], dtype_of(config.precision.name)
    mode = detect_fake_mode([parameter for module in there for parameter in module.parameters()])
    if mode is not None:
        inputs = map_tensors(mode.from_tensor, inputs)
    for module in there:
        cast_module(module, dtype)
    return to_precision(inputs, dtype)


def _traced_batch(config: RunConfig) -> tuple[Any, Any]:
    """A small batch of real tensors, whose values the code of a dataset may ask for."""
    with unset_fake_temporarily():
        return example_batch(config.data, _TRACED_SAMPLES, config.seed)


def _traced_targets(module: nn.Module, config: RunConfig) -> Any:
    _, targets = _traced_batch(config)
    mode = detect_fake_mode(list(module.parameters()))
    return targets if mode is None else map_tensors(mode.from_tensor, targets)


def segments_of(
    model: nn.Module, programs: dict[bool, Program], split_points: list[str] | None, *, wanted: int
) -> list[LayerSource]:
    """``model`` as a chain of segments, cut before the named modules.

    If none are named, it is cut before those that its method ``cut_points()`` names, or else where few bytes cross.

    Args:
        wanted: the smallest number of cuts that is useful.
    """
    cuts = few = _named_cuts(model, programs, split_points) if split_points else _own_cuts(model, programs)
    if not split_points and len(cuts) < max(1, wanted):
        cuts = good_cuts(programs[True], programs[False], wanted)
        few = few or (good_cuts(programs[True], programs[False], 1) if wanted > 1 else cuts)
    found = split(model, programs, cuts)
    return [
        LayerSource(index, "", lambda segment=segment: segment, segment, label, is_fine=cuts != few)  # type: ignore[misc]
        for index, (label, segment) in enumerate(found)
    ]


def _own_cuts(model: nn.Module, programs: dict[bool, Program]) -> list[int]:
    """The cuts that the model asks for itself, without those that its trace does not allow."""
    points = getattr(model, "cut_points", None)
    return cuts_before(programs[True], programs[False], points()) if callable(points) else []


def _named_cuts(model: nn.Module, programs: dict[bool, Program], split_points: list[str]) -> list[int]:
    names = [name for name, _ in model.named_modules() if name]
    cuts, problems = set(), []
    for point in split_points:
        cut = cut_before(programs[True], programs[False], point)
        if isinstance(cut, int):
            cuts.add(cut)
            continue
        near = did_you_mean(point, names) if point not in names else None
        fix = f"model.split_points=[{near}]" if near else ""
        problems.append(Problem("model.split_points", point, "must name modules before which to cut", cut, fix))
    raise_problems(problems)
    return sorted(cuts)


def _untraceable_slices(config: RunConfig) -> Iterator[Problem]:
    """A problem with modules that run for a part of the batch, if the batch is one that ranks can divide."""
    if config.parallelism.batch_sliced and config.parallelism.tensor > 1:
        pipeline = config.parallelism.pipeline > 1
        rule = (
            f"needs {'parallelism.pipeline=1' if pipeline else 'rules for what is divided'} for a model without layers"
        )
        why = "Else it is traced, and a trace is of one number of samples: divided or not"
        fix = (
            "parallelism.pipeline=1" if pipeline else "'parallelism.sharding={classifier.0: column, classifier.2: row}'"
        )
        yield Problem("parallelism.batch_sliced", config.parallelism.batch_sliced, rule, why, fix)


def _untraceable(config: RunConfig) -> Iterator[Problem]:
    """Settings that need modules, which a traced model no longer has."""
    name = config.optimizer.name
    if optimizer_of(config.optimizer).watch is not None:
        why = f"{config.model.target} has no layers, and is traced into operators: there is no nn.Linear to watch"
        yield Problem("optimizer.name", name, "must be another for a traced model", why, "optimizer=adamw")
