"""Makes a :class:`runner.profile.ModelProfile`: bytes and FLOPs from fake tensors, seconds from a clock.

Each layer runs forward and backward on fake tensors under the live tracker, which sees the same allocations as a real
run, so a model of any size can be profiled on a laptop. A model whose code cannot run on fake tensors is run for real
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from runner.config.approximations import APPROXIMATIONS
from runner.config.precision import PRECISIONS
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.model.apart import ApartError, apart
from runner.model.boundary import flatten, map_tensors, num_samples
from runner.model.check_pretrained import pattern_problems
from runner.model.data import LossFunction, example_batch, example_of, loss_sum
from runner.model.device import device_is_here, device_memory_bytes
from runner.model.embeddings import has_tensor_trains
from runner.model.fake import fake_tensors, import_fake_tensors
from runner.model.layers import LayerSource, StageModule
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.model.load import LoadedModel, of_whole_model
from runner.model.modes import num_evaluating
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, for_loss, to_precision
from runner.model.seeds import seeded
from runner.model.ties import find_ties, tied_parameters, tied_places
from runner.model.traced.segments import Segment
from runner.optim.catalogue.registry import compression_of
from runner.plan.collector import collector_paused
from runner.plan.layout.batches import largest_microbatch
from runner.plan.memory.limits import on_accelerator
from runner.plan.rules.tensors import other_format_problem
from runner.plan.time.estimate import with_estimated_seconds
from runner.profile import ModelProfile, SharedWeight
from runner.profiling.alike import AlikeLayers
from runner.profiling.cache import cached_profile
from runner.profiling.changed_states import ChangedStates
from runner.profiling.compression import compression_bytes
from runner.profiling.fills import FillProfiler
from runner.profiling.fused_dropout import FusedDropout
from runner.profiling.layer import num_bytes, profile_call
from runner.profiling.layer_error import about_layer, about_loss, refusing
from runner.profiling.logits import load_part
from runner.profiling.meet import is_tried_here
from runner.profiling.odd_tensors import OddTensors
from runner.profiling.optimizer_figures import fill_profiler_of, optimizer_figures, state_bytes_of
from runner.profiling.parts import part_problems
from runner.profiling.real_sizes import RealSizes
from runner.profiling.sizes import FormWatch, with_other_sizes
from runner.profiling.timing import can_be_timed, with_measured_seconds
from runner.profiling.try_loss import try_loss
from runner.profiling.try_optimizer import try_optimizer
from runner.profiling.try_prediction import try_prediction

__all__ = [
    "FakedProfiler",
    "checked_loss",
    "dtype_of",
    "example_microbatch",
    "faked",
    "faked_profile",
    "profile_layers",
    "profile_model",
    "samples_of",
    "telling_model_problems",
]

logger = logging.getLogger(__name__)


FakedProfiler: TypeAlias = Callable[[RunConfig, Any, Any], ModelProfile]
"""Profiles the model of a request on fake tensors for a micro-batch: its inputs and targets."""


def profile_model(config: RunConfig, on_fake_tensors: FakedProfiler | None = None) -> ModelProfile:
    """Profile the model of a request for its largest micro-batch.

    Seconds are measured if this machine is the one planned for and the model is small enough to run here. Otherwise
    they are estimated from FLOPs and ``hardware``.

    Args:
        config: the request.
        on_fake_tensors: profiles bytes and FLOPs; None: :func:`faked_profile` in a process of its own.

    Raises:
        RequestError: the model, data or loss cannot be loaded, or a layer does not accept the output of the one before.
    """
    with telling_model_problems(config), _telling_another_format(config):
        try_optimizer(config)
        compression_of(config.compression).try_reducer(config.compression)
        profile = cached_profile(config, partial(_profile_model, on_fake_tensors or _apart))
        try_prediction(config, profile)
        return profile


def _apart(config: RunConfig, inputs: Any, targets: Any) -> ModelProfile:
    return apart(faked_profile, config, inputs, targets)


@contextmanager
def telling_model_problems(config: RunConfig) -> Iterator[None]:
    """Add to a refusal in the block what refuses the model by itself: who has mistakes in both meets both at once."""
    try:
        yield
    except RequestError as error:
        further = [problem for problem in _model_problems(config) if problem not in error.problems]
        raise RequestError([*error.problems, *further]) from error


@contextmanager
def _telling_another_format(config: RunConfig) -> Iterator[None]:
    """Refuse a model that does not take its data for the format of its weights, if that is not the run's."""
    try:
        yield
    except RequestError as error:
        if any(problem.path != "model.target" for problem in error.problems):
            raise
        problem: Problem | None = None
        with suppress(RequestError):
            problem = of_whole_model(config, partial(_format_problem, config))
        raise_problems([] if problem is None else [problem])
        raise


def _format_problem(config: RunConfig, _: LoadedModel, stage: StageModule) -> Problem | None:
    """The problem of the first trained weight that is not in the format in which the run trains it."""
    for name, weight in stage.named_parameters():
        if weight.requires_grad and weight.is_floating_point():
            dtype = str(weight.dtype).removeprefix("torch.")
            if (problem := other_format_problem(config, stage.global_name(name), dtype)) is not None:
                return problem
    return None


def _profile_model(on_fake_tensors: FakedProfiler, config: RunConfig) -> ModelProfile:
    if config.hardware.name == "auto" and not device_is_here(config):
        why = "It is this machine, which has no GPU to measure and to ask for its memory"
        rule = "must name the machine that the ranks run on"
        raise RequestError([Problem("hardware", config.hardware.name, rule, why, "hardware=a100_80gb")])
    import_fake_tensors()
    raise_problems(pattern_problems(config))
    inputs, targets, looked_at = example_of(config.data, samples_of(config), config.seed)
    try:
        profile = on_fake_tensors(config, inputs, targets)
    except ApartError as error:  # a user's code may do anything that fake tensors cannot
        profile, inputs, targets = _on_largest_samples(config, inputs, targets)
        logger.info("profiled on real tensors, because fake tensors cannot run the model: %s", str(error))
    raise_problems(_without_trains(config))
    try_loss(config, profile)
    if not any(row.gradient_bytes for row in profile.layers):
        raise RequestError([_nothing_trained(config, profile)])
    profile = replace(
        profile,
        samples=samples_of(config),
        largest_of_samples=looked_at,
        **optimizer_figures(config, profile),
        **_compression_figures(config, profile),
    )
    if can_be_timed(config, profile):
        with refusing(config):
            return with_measured_seconds(config, profile, inputs, targets)
    return with_estimated_seconds(profile, config.hardware, PRECISIONS[config.precision.name].arithmetic)


def samples_of(config: RunConfig) -> int:
    """The samples of the largest micro-batch of a request."""
    return largest_microbatch(config.data.batch_size, config.parallelism.data, config.schedule.parts)


def example_microbatch(config: RunConfig) -> tuple[Any, Any]:
    """The inputs and targets of a micro-batch for which a request is profiled."""
    return example_batch(config.data, samples_of(config), config.seed)


def _compression_figures(config: RunConfig, profile: ModelProfile) -> dict[str, Any]:
    """What the profile says of the bytes of the request's compressor, by field."""
    shapes = [shape for layer in profile.layers for shape in layer.trained_shapes]
    if compression_of(config.compression).compress is None or not any(map(prod, shapes)):
        return {}
    try:
        return apart(compression_bytes, config, shapes)
    except ApartError as error:  # of a user's own, which the ranks tell
        logger.info("what the compressor needs is an estimate: it cannot be tried: %s", error)
        return {}


def _model_problems(config: RunConfig) -> Sequence[Problem]:
    """What refuses the model by itself, before it has met any data."""
    try:
        of_whole_model(config, _nothing)
    except RequestError as error:
        return error.problems
    return ()


def _nothing(*_: object) -> None:
    """Ask nothing of a model but that it can be made."""


def _nothing_trained(config: RunConfig, profile: ModelProfile) -> Problem:
    if config.adapter.name != "none":
        why = "No layer of the model has been given an adapter"
        return Problem("adapter.targets", config.adapter.targets, "must name layers", why)
    if config.trainer.freeze:
        return Problem(
            "trainer.freeze", config.trainer.freeze, "must leave a weight to train", "It matches all of them"
        )
    why = "None of its parameters requires a gradient" if any(row.num_parameters for row in profile.layers) else ""
    return Problem("model.target", config.model.target, "must have parameters to train", why)


@contextmanager
def faked(
    config: RunConfig, inputs: Any, targets: Any, *, by_values: bool = True, mode: Any = None
) -> Iterator[tuple[LoadedModel, Any, Any]]:
    """The model and a micro-batch without memory, computed as on the device that is planned for.

    Args:
        config: the request.
        inputs, targets: a real micro-batch.
        by_values: whether sizes may depend on values of tensors, for which torch imports a whole compiler.
        mode: the mode of fake tensors; None: one of its own.
    """
    dropout = FusedDropout() if on_accelerator(config, device_memory_bytes(config)) else nullcontext()
    with mode or fake_tensors(_shapes(by_values)), dropout:
        faked_inputs, faked_targets = (map_tensors(_empty_like, each) for each in (inputs, targets))
        model = load_part(config, faked_inputs, faked_targets)
        with RealSizes():  # a trace, which load_part may make, has no sizes
            yield model, faked_inputs, faked_targets


def _empty_like(tensor: Tensor) -> Tensor:
    """A fake tensor like a real one; the mode's own conversion imports a whole compiler."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _shapes(by_values: bool) -> Any:
    if not by_values:
        return None
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def faked_profile(config: RunConfig, inputs: Any, targets: Any, mode: Any = None) -> ModelProfile:
    """The bytes and FLOPs of a request's model, on fake tensors.

    Args:
        config: the request.
        inputs, targets: a real micro-batch.
        mode: the mode of fake tensors, without sizes that depend on values; None: one of its own.

    Raises:
        RequestError: the model refuses the batch, or cannot be trained as it is asked for.
        Exception: the model's code cannot run on fake tensors.
    """
    # Layers that are skipped by chance are the same ones in each plan, and tensors in cycles are there until the end.
    with seeded(config.seed, "profile"), collector_paused():
        try:
            return _faked_profile(config, inputs, targets, by_values=False, mode=mode)
        except RequestError:
            raise
        except Exception:  # most models do without, and are then profiled a second sooner
            return _faked_profile(config, inputs, targets, by_values=True)


def _faked_profile(config: RunConfig, inputs: Any, targets: Any, *, by_values: bool, mode: Any = None) -> ModelProfile:
    with faked(config, inputs, targets, by_values=by_values, mode=mode) as (model, fake_inputs, fake_targets):
        dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
        states = state_bytes_of(config, dtype)
        profile = profile_layers(
            model.layers, fake_inputs, fake_targets, model.loss, dtype, autocast, states, fill_profiler_of(config)
        )
        profile = _with_parts(profile, model, config)
        if model.division is not None and model.division.divides:  # what is found in traces is checked there
            raise_problems(part_problems(config, model, fake_inputs))
    raise_problems(_without_effect(config, model))
    return profile


def _with_parts(profile: ModelProfile, model: LoadedModel, config: RunConfig) -> ModelProfile:
    """The profile of one rank's parts of the layers with the weights that other ranks have.

    Raises:
        RequestError: the request asks for parts, and no layer has been divided.
    """
    if model.kernels is not None:
        notes, made = tuple(model.kernels.notes()), model.kernels.substituted()
        profile = replace(profile, own_kernels=notes, substituted=made)
    if model.division is None:
        return profile
    raise_problems(model.division.problems(config.model.target))
    all_elements, trained = model.division.elements_elsewhere()
    left = [] if model.division.divides else model.division.left  # what nothing says how to divide was searched
    whole, together = (tuple(dict.fromkeys(each)) for each in (left, model.division.together))
    return replace(
        profile,
        parameters_elsewhere=all_elements,
        trained_elsewhere=trained,
        divided_shapes=model.division.trained_shapes(),
        whole_weights=whole,
        whole_tokens=together,
        divided_logits=model.division.logits,
        gathered_logits=model.division.gathered,
    )


def _on_real_tensors(config: RunConfig, inputs: Any, targets: Any) -> ModelProfile:
    """Profile with real tensors, as in the run itself: what fails here would fail there."""
    dtype, autocast = dtype_of(config.precision.name), autocast_of(config.precision.name)
    model = load_part(config, inputs, targets)
    with refusing(config):
        states = state_bytes_of(config, dtype)
        profiler = fill_profiler_of(config)
        profile = profile_layers(model.layers, inputs, targets, model.loss, dtype, autocast, states, profiler)
        profile = _with_parts(profile, model, config)
        if model.division is not None and model.division.divides:
            raise_problems(part_problems(config, model, inputs))
    raise_problems(_without_effect(config, model))
    return replace(profile, sizes_vary=True)


def _on_largest_samples(config: RunConfig, inputs: Any, targets: Any) -> tuple[ModelProfile, Any, Any]:
    """Profile with real tensors: the given ones, or others of the data if layers give these other sizes."""
    profile = _on_real_tensors(config, inputs, targets)
    others = with_other_sizes(config, profile) if is_tried_here(config, profile) else None
    if others is None:
        return profile, inputs, targets
    return replace(_on_real_tensors(config, *others), sizes_were_seen_to_vary=True), *others


def _without_effect(config: RunConfig, model: LoadedModel) -> Iterator[Problem]:
    """Problems if no layer has called what the request approximates, or wants to be computed otherwise."""
    if model.kernels is not None:
        yield from model.kernels.problems()
    approximation = model.approximation
    if approximation is None:
        return
    what = {"bits": "activation function of torch", "ratio": "linear map of torch", "four_bits": "linear map of torch"}
    keys = dict.fromkeys(APPROXIMATIONS[config.approximate_backward.name], "approximate_backward")
    if approximation.four_bits:
        keys["four_bits"] = "precision"
    for key, group in keys.items():
        if key not in approximation.found:
            rule, why = f"must find a differentiable {what[key]}", "The model calls none, so that nothing would change"
            fix = "precision=fp32" if group == "precision" else "approximate_backward=none"
            yield Problem(f"{group}.name", getattr(config, group).name, rule, why, fix)


def _without_trains(config: RunConfig) -> Iterator[Problem]:
    """A problem if no layer has become a tensor train."""
    if config.embedding.name == "dense":
        return
    if of_whole_model(config, lambda _, stage: has_tensor_trains(stage)) is False:
        rule, why = "must name embeddings or linear layers", f"No layer of {config.model.target} has such a name"
        if not config.embedding.targets:
            why = f"No embedding of {config.model.target} has fewer numbers as cores of rank {config.embedding.rank}"
        yield Problem("embedding.targets", list(config.embedding.targets), rule, why, "embedding=dense")


def profile_layers(
    sources: Sequence[LayerSource],
    inputs: Any,
    targets: Any,
    loss: LossFunction,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    state_bytes: Callable[[torch.Size], int] | None = None,
    profiler: FillProfiler | None = None,
) -> ModelProfile:
    """Bytes and FLOPs of each layer for the given batch; the seconds are zero.

    Args:
        sources: the layers.
        inputs, targets: one micro-batch, real or fake.
        loss: the loss function.
        dtype: dtype of weights and, without ``autocast``, activations.
        autocast: format of the matrix products in forwards, or None.
        state_bytes: shape of a parameter to the bytes of its optimizer states; None = use the profile's ratio.
        profiler: profiles the work that the optimizer does for layers besides its update; None: it does none.
    """
    given = (inputs, targets) if sources[0].step is not None else inputs
    value = to_precision(given, dtype)
    cast = [made for made, own in zip(flatten(value)[0], flatten(given)[0], strict=True) if made is not own]
    device_type = next((tensor.device.type for tensor in flatten(inputs)[0]), "cpu")
    samples = num_samples(inputs)
    rows, sizes_vary, in_evaluation = [], False, 0
    tied, places = tied_parameters(sources) if profiler is not None else [], tied_places(sources)
    owners = WeakIdKeyDictionary()
    numbers = StorageNumbers()
    with LiveTracker() as tracker:
        alike = AlikeLayers(tracker, numbers)
        odd, changed = OddTensors(), ChangedStates()
        for source in sources:
            module = source.build()
            odd.see(source, module)
            module = cast_module(module, dtype)
            _refuse_hidden_ties(source, module, owners)
            function = FormWatch(autocasting(source.calling(module), device_type, autocast))
            before = value
            with about_layer(source.index, module, value):
                value, row = alike.profile(source.label or source.name or "model", function, value, module)
                _refuse_no_tensor(source.index, module, value)
            odd.changed(source, module)
            changed.see(source, module, function, before)
            states = _states_of(module, state_bytes)
            if profiler is not None and states is not None:
                states += profiler.state_bytes(module, tied)
                row = replace(row, fills=profiler.fills(module, tied, function, before))
            unreached = _never_reached(row.unreached, source, module, places)
            rows.append(replace(row, optimizer_bytes=states, unreached=unreached))
            in_evaluation += num_evaluating([module])
            sizes_vary = sizes_vary or function.varies
        lose = partial(checked_loss, loss, targets, samples)
        with about_loss((value, targets)):
            _, loss_row = profile_call("loss", lose, value, tracker, numbers)
    return ModelProfile(
        layers=tuple(rows),
        loss=loss_row,
        sizes_vary=sizes_vary,
        samples=samples,
        input_bytes=num_bytes(inputs),
        target_bytes=num_bytes(targets),
        cast_bytes=num_bytes(cast),
        seconds_source="estimated",
        optimizer_bytes_per_gradient_byte=0.0,
        optimizer_seconds_per_byte=0.0,
        tokens_per_sample=_tokens_per_sample(targets),
        shared=_shared_weights(sources, dtype, state_bytes),
        sample_shapes=tuple(tuple(int(size) for size in tensor.shape[1:]) for tensor in flatten(inputs)[0]),
        odd_weights=tuple(odd.weights),
        changed_buffers=odd.changed_buffers(),
        shared_buffers=odd.shared_buffers(),
        unsaved_buffers=odd.unsaved_buffers(),
        changed_states=tuple(changed.found),
        in_evaluation=in_evaluation,
        cut_finely=any(source.is_fine for source in sources),
    )


def checked_loss(loss: LossFunction, targets: Any, samples: int, output: Any) -> Tensor:
    """The loss as a sum over samples; it must have a gradient."""
    total = loss_sum(loss(for_loss(output), targets), samples)[0]
    if not total.requires_grad and any(tensor.requires_grad for tensor in flatten(output)[0]):
        why = "Its gradient by the output is cut off (detach, no_grad): nothing would be trained"
        raise RequestError([Problem("loss.target", "no gradient", "must be differentiable", why)])
    return total


def _never_reached(
    unreached: Sequence[int], source: LayerSource, module: nn.Module, places: set[tuple[int, str]]
) -> tuple[int, ...]:
    """The unreached ones of a layer's trained parameters that no step of a run reaches either.

    Only of a traced model is that known: its program is the run's, whatever the data are. Code that runs anew in each
    step may take another way, for a smaller batch or once a hook has said so, and may use weights of another layer;
    weights that several segments use are reached if one of them reaches them.
    """
    if not isinstance(module, Segment) or source.step is not None:
        return ()
    named = module.named_parameters(remove_duplicate=False)
    shared = {id(parameter) for name, parameter in named if (source.index, source.full_name(name)) in places}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return tuple(at for at in unreached if id(trained[at]) not in shared)


def _states_of(module: nn.Module, state_bytes: Callable[[torch.Size], int] | None) -> int | None:
    if state_bytes is None:
        return None
    return sum(state_bytes(parameter.shape) for parameter in module.parameters() if parameter.requires_grad)


def _shared_weights(
    sources: Sequence[LayerSource], dtype: torch.dtype, state_bytes: Callable[[torch.Size], int] | None
) -> tuple[SharedWeight, ...]:
    given = {source.index: source for source in sources if source.given is not None}
    found = []
    for tie in find_ties(sources):
        source = given[tie.layers[0]]
        assert source.given is not None
        weight = next(
            p for name, p in source.given.named_parameters(remove_duplicate=False) if source.full_name(name) == tie.name
        )
        nbytes = weight.numel() * (dtype.itemsize if weight.is_floating_point() else weight.element_size())
        states = state_bytes(weight.shape if weight.requires_grad else torch.Size([0])) if state_bytes else None
        gradient_bytes = nbytes if weight.requires_grad else 0
        found.append(SharedWeight(tie.layers, nbytes, gradient_bytes, states, weight.numel(), tuple(weight.shape)))
    return tuple(found)


def _refuse_no_tensor(index: int, module: nn.Module, output: Any) -> None:
    if not flatten(output)[0]:
        what = f"layer {index} ({type(module).__name__})"
        raise RequestError([Problem("model.target", what, f"must return tensors, not a {type(output).__name__}")])


def _refuse_hidden_ties(source: LayerSource, module: nn.Module, owners: WeakIdKeyDictionary) -> None:
    """Refuse a weight shared by layers that are built one by one: no rank sees them together to keep it equal."""
    for name, parameter in module.named_parameters():
        full_name = source.full_name(name)
        index, held = owners.setdefault(parameter, (source.index, full_name))  # type: ignore[no-untyped-call]
        if source.given is None and index != source.index:
            shown, rule = f"{held} is {full_name}", "layers() must not give callables that share a weight"
            why = "Ranks build only their own layers, and would not see it"
            raise RequestError([Problem("model.target", shown, rule, why, "modules in their place")])


def _tokens_per_sample(targets: Any) -> int | None:
    """Length of the sequences: integer targets with two axes are taken as sequences of tokens."""
    tensors, _ = flatten(targets)
    if len(tensors) == 1 and tensors[0].dim() == 2 and not tensors[0].is_floating_point():
        return int(tensors[0].shape[1])
    return None
