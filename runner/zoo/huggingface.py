"""Models of ``transformers``, built from a configuration or from a folder's ``config.json``; nothing is downloaded.

A model says itself how its tensors are made of a folder's, because ``transformers`` renames and joins some when it
reads them (the experts of a layer, for example), and before which of its modules a pipeline cuts it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is not installed: pip install -e '.[huggingface]'") from error
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18):  # its masks cannot be those of a real run
    raise ImportError(f"transformers {transformers.__version__} is older than 5.18: pip install -U transformers")

from runner.zoo.own_losses import refuse_own_losses
from runner.zoo.packing import one_sequence_a_row, telling_apart

__all__ = ["build", "configuration"]

Made = tuple[tuple[str, ...], Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]

_TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
}

_POSITIONS = "max_position_embeddings"


def build(
    task: str | None = None,
    model_type: str | None = None,
    config_class: str | None = None,
    pretrained: str | None = None,
    initialise: bool = True,
    **config: Any,
) -> nn.Module:
    """A model that returns logits; its parameters have the names that they have in ``transformers``.

    A language model takes token ids [batch, seq] and returns logits [batch, seq, vocabulary]; ``seq2seq`` takes two of
    them, the encoder's and the decoder's; ``speech`` takes features of sound [batch, bins, frames] and the decoder's
    token ids; ``image`` takes pixels [batch, channels, height, width] and returns logits
    [batch, classes].

    Args:
        task: ``causal``, ``masked``, ``seq2seq``, ``image`` or ``speech``; None: what the folder names, else the first.
        model_type: the name of the architecture in ``transformers``, e.g. ``gpt2``, ``bert``, ``llama``; or
        config_class: its configuration class, e.g. ``GPT2Config``; or
        pretrained: a folder whose ``config.json`` says all this.
        initialise: whether the weights get initial values; without them their memory is not touched.
        config: the configuration's fields, e.g. ``hidden_size`` or the architecture's own names. Where positions have
            no limit, as in Bloom and T5, ``max_position_embeddings`` is left out.

    Raises:
        ValueError: there is no such architecture, task or field, a field would load trained weights, or one asks for
            a loss of the model's own.
    """
    from transformers.initialization import no_init_weights

    made = configuration(model_type, config_class, pretrained, config)
    task, base = _class_of(made, task, from_folder=pretrained is not None)
    refuse_own_losses(made, config, task)
    kind = _giving_logits(task, base)
    usual_cache = getattr(made, "use_cache", None)
    _use_cache(made, False)  # cached keys and values serve generation, not training
    with nullcontext() if initialise else no_init_weights():
        built: Any = kind(made)
    if not initialise:
        built.tie_weights(recompute_mapping=False)  # left out with the initial values
    built.usual_cache, built.own_names = usual_cache, dict.fromkeys(built.state_dict(), True)
    model: nn.Module = built
    return model


def _use_cache(config: Any, value: bool | None) -> None:
    if hasattr(config, "use_cache"):
        config.use_cache = value


def _class_of(config: Any, task: str | None, *, from_folder: bool) -> tuple[str, Any]:
    """The task, and the architecture's class for it."""
    known = {name: getattr(transformers, mapping) for name, mapping in _TASKS.items()}
    if task is not None and task not in known:
        raise ValueError(f"task = {task} must be one of {', '.join(known)}")
    named = (config.architectures or [None])[0] if task is None and from_folder else None
    for each, mapping in known.items():
        kind = mapping.get(type(config), None)
        if named is not None and kind is not None and kind.__name__ == named:
            return each, kind
    if named is not None:
        why = "a function of your own, model.target=package.module:function, may make it"
        tasks = ", ".join(f"model.kwargs.task={each}" for each, mapping in known.items() if type(config) in mapping)
        other = f"; {tasks} makes another model of its weights" if tasks else ""
        raise ValueError(f"config.json names {named}, which is of none of the tasks {', '.join(known)}: {why}{other}")
    task = task or "causal"
    if type(config) not in known[task]:
        raise ValueError(f"transformers has no {task} {_noun(task)} for {type(config).__name__}")
    return task, known[task][type(config)]


def _noun(task: str) -> str:
    return "model" if task in ("image", "speech") else "language model"


def configuration(
    model_type: str | None = None,
    config_class: str | None = None,
    pretrained: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """The configuration of :func:`build`'s model.

    Raises:
        ValueError: see :func:`build`.
    """
    fields = dict(fields or {})
    if pretrained is not None and (model_type or config_class):
        raise ValueError("the folder's config.json names the architecture: leave model_type and config_class out")
    loaded = [name for name in fields if "pretrained" in name or name.endswith("name_or_path")]
    if loaded:
        why = "model.pretrained=FOLDER names a folder of trained ones"
        raise ValueError(f"{', '.join(loaded)} would load trained weights: {why}")
    if pretrained is None:
        kind = _configuration_class(model_type, config_class)
        if not hasattr(kind(), _POSITIONS):  # rows may be of any length
            fields.pop(_POSITIONS, None)
        _refuse_unknown(kind(), fields)
        made = kind(**fields)
    else:
        made = _configuration_of(Path(pretrained))
        _refuse_unknown(made, fields)
        made.update(fields)
    return made


def _configuration_of(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, which names the architecture")
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)


def _configuration_class(model_type: str | None, config_class: str | None) -> Any:
    if (model_type is None) == (config_class is None):
        raise ValueError("name the architecture by model_type or by config_class")
    if config_class is not None:
        kind = getattr(transformers, config_class, None)
        if kind is None:
            near = _nearest(config_class, (name for name in dir(transformers) if name.endswith("Config")))
            raise ValueError(f"transformers has no config_class = {config_class}{near}")
        return kind
    if model_type is None or model_type not in transformers.CONFIG_MAPPING:
        near = _nearest(str(model_type), transformers.CONFIG_MAPPING)
        raise ValueError(f"transformers has no model_type = {model_type}{near}")
    return transformers.CONFIG_MAPPING[str(model_type)]


def _refuse_unknown(made: Any, fields: Mapping[str, Any]) -> None:
    known = {*made.to_dict(), *made.attribute_map}
    unknown = [name for name in fields if name not in known]
    if unknown:
        near = ", ".join(name + _nearest(name, known) for name in unknown)
        raise ValueError(f"{type(made).__name__} has no {near}")
    given: dict[str, str] = {}
    for name, value in fields.items():
        other = given.setdefault(made.attribute_map.get(name, name), name)
        if fields[other] != value:
            both = f"{other} = {fields[other]} and {name} = {value} are two names of one field"
            raise ValueError(f"{both} of {type(made).__name__}: set {other} alone, as in model.kwargs.{other}={value}")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1, cutoff=0.75)
    return f" (did you mean {found[0]}?)" if found else ""


def _giving_logits(task: str, base: Any) -> Any:
    """A subclass of ``base`` with the same name that returns only logits, and knows how files name its tensors."""
    kinds = {"seq2seq": _of_sequences, "image": _of_images, "speech": _of_sounds}
    own = kinds.get(task, _of_tokens)(base)
    methods: dict[str, Any] = {"forward": own, "save_pretrained": _saving(base), "__module__": base.__module__}
    methods |= {"tensors_from": _tensors_from, "may_be_absent": _may_be_absent, "cut_points": _cut_points}
    methods |= {"untie": _untie, "untied": ()}
    return type(base.__name__, (base,), methods)


def _of_tokens(base: Any) -> Callable[..., Tensor]:
    def forward(
        self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> torch.Tensor:
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        logits: Tensor
        if position_ids is None:
            with one_sequence_a_row():
                logits = base.forward(self, **given).logits
            return logits
        with telling_apart(base):
            logits = base.forward(self, **given, position_ids=position_ids).logits
        return logits

    return forward


_TAKES_PAIRS = (
    "an encoder and a decoder take two inputs: give it data (data.target=package.module:function) whose samples are "
    "(({}, decoder_input_ids), target)"
)


def _of_sequences(base: Any) -> Callable[..., Tensor]:
    def forward(
        self: Any, input_ids: Tensor, decoder_input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> torch.Tensor:
        if decoder_input_ids is None:
            raise ValueError(_TAKES_PAIRS.format("input_ids"))
        given = {"input_ids": input_ids, "decoder_input_ids": decoder_input_ids, "attention_mask": attention_mask}
        with one_sequence_a_row():
            logits: Tensor = base.forward(self, **given).logits
        return logits

    return forward


def _of_images(base: Any) -> Callable[..., Tensor]:
    def forward(self: Any, pixel_values: Tensor) -> torch.Tensor:
        logits: Tensor = base.forward(self, pixel_values=pixel_values).logits
        return logits

    return forward


def _of_sounds(base: Any) -> Callable[..., Tensor]:
    def forward(self: Any, input_features: Tensor, decoder_input_ids: Tensor | None = None) -> torch.Tensor:
        if decoder_input_ids is None:
            raise ValueError(_TAKES_PAIRS.format("input_features"))
        with one_sequence_a_row():
            given = {"input_features": input_features, "decoder_input_ids": decoder_input_ids}
            logits: Tensor = base.forward(self, **given).logits
        return logits

    return forward


def _saving(base: Any) -> Callable[..., None]:
    """The method of ``base``, which saves the configuration as a model for generation has it."""

    def save_pretrained(self: Any, folder: Any, **options: Any) -> None:
        _use_cache(self.config, self.usual_cache)
        try:
            base.save_pretrained(self, folder, **options)
        finally:
            _use_cache(self.config, False)

    return save_pretrained


def _cut_points(self: Any) -> list[str]:
    """The modules that stages may begin with, as the architecture's ``base_model_pp_plan`` names them; often none."""
    modules = dict(self.named_modules())
    of_base = getattr(self.config, "base_model_pp_plan", None) or ()
    own = getattr(self, "_pp_plan", None) or ()
    found: list[str] = []
    for name in (*(f"{self.base_model_prefix}.{each}" for each in of_base), *own):
        module = modules.get(name)
        blocks = module.named_children() if isinstance(module, nn.ModuleList) else None
        found += [name] if blocks is None else [f"{name}.{each}" for each, _ in blocks]
    return found


def _untie(self: Any, name: str) -> None:
    """Give a tied weight a parameter of its own, still to be set, as ``from_pretrained`` does if a folder has two."""
    place, _, own = name.rpartition(".")
    module = self.get_submodule(place)
    tied = getattr(module, own)
    setattr(module, own, nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad))
    self.all_tied_weights_keys.pop(name, None)  # what transformers saves
    self.untied = (*self.untied, name)


def _may_be_absent(self: Any, name: str) -> bool:
    """Whether ``transformers`` makes this buffer itself, so that files may lack it."""
    patterns = self._keys_to_ignore_on_load_missing or ()
    return name in dict(self.named_buffers()) and any(re.search(pattern, name) for pattern in patterns)


def _tensors_from(self: Any, names: Sequence[str]) -> list[Made]:
    """How the model's tensors are made of those that files hold under ``names``.

    Returns:
        (names in the files, a function from these tensors to the model's tensors, by name) for each group of tensors.
        Tensors that ``transformers`` passes over are in none.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(self)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own, passed = self.own_names, self._keys_to_ignore_on_load_unexpected or ()
    groups: dict[str, list[tuple[str, str]]] = {}
    found: list[Made] = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, self.base_model_prefix, own)
        if pattern is not None:
            groups.setdefault(target, []).append((name, pattern))
        elif target in own or not any(re.search(each, target) for each in passed):
            found.append(((name,), partial(_renamed, name, target)))
    for target, members in groups.items():
        sources = tuple(name for name, _ in members)
        found.append((sources, _converted(self, of_pattern[members[0][1]], target, members)))
    return found


def _renamed(name: str, target: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {target: given[name]}


def _converted(
    model: Any, converter: Any, target: str, members: Sequence[tuple[str, str]]
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that makes tensors of the model as one of ``transformers``'s converters does."""

    def make(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = deepcopy(converter)
        for name, pattern in members:
            own.add_tensor(target, name, pattern, given[name])
        made = own.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    return make
