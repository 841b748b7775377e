"""Language models of ``transformers``, built from a configuration with fresh weights; nothing is downloaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is not installed: pip install -e '.[huggingface]'") from error

__all__ = ["build"]


def build(
    task: str = "causal", model_type: str | None = None, config_class: str | None = None, **config: Any
) -> nn.Module:
    """A language model from token ids [batch, seq] to logits [batch, seq, vocabulary].

    Its parameters have the names that they have in ``transformers``.

    Args:
        task: ``causal`` or ``masked``.
        model_type: the name of the architecture in ``transformers``, e.g. ``gpt2``, ``bert``, ``llama``; or
        config_class: its configuration class, e.g. ``GPT2Config``.
        config: the configuration's fields, e.g. ``hidden_size`` or the architecture's own names.

    Raises:
        ValueError: there is no such architecture, task or field, or a field would load trained weights.
    """
    made = _configuration(model_type, config_class, config)
    classes = {
        "causal": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        "masked": transformers.MODEL_FOR_MASKED_LM_MAPPING,
    }
    if task not in classes:
        raise ValueError(f"task = {task} must be one of {', '.join(classes)}")
    if type(made) not in classes[task]:
        raise ValueError(f"transformers has no {task} language model for {type(made).__name__}")
    model: nn.Module = _giving_logits(classes[task][type(made)])(made)
    return model


def _configuration(model_type: str | None, config_class: str | None, fields: dict[str, Any]) -> Any:
    if (model_type is None) == (config_class is None):
        raise ValueError("name the architecture by model_type or by config_class")
    if config_class is not None:
        kind = getattr(transformers, config_class, None)
        if kind is None:
            near = _nearest(config_class, (name for name in dir(transformers) if name.endswith("Config")))
            raise ValueError(f"transformers has no config_class = {config_class}{near}")
    else:
        if model_type is None or model_type not in transformers.CONFIG_MAPPING:
            near = _nearest(str(model_type), transformers.CONFIG_MAPPING)
            raise ValueError(f"transformers has no model_type = {model_type}{near}")
        kind = transformers.CONFIG_MAPPING[str(model_type)]
    loaded = [name for name in fields if "pretrained" in name or name.endswith("name_or_path")]
    if loaded:
        why = "the weights are fresh; a model function of your own can load trained ones"
        raise ValueError(f"{', '.join(loaded)} would load trained weights: {why}")
    known = {*kind().to_dict(), *kind.attribute_map}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(name + _nearest(name, known) for name in unknown)}")
    made = kind(**fields)
    if "use_cache" in known:
        made.use_cache = False  # cached keys and values serve generation, not training
    return made


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1, cutoff=0.75)
    return f" (did you mean {found[0]}?)" if found else ""


def _giving_logits(base: Any) -> Any:
    """A subclass of ``base`` with the same name whose forward returns only the logits."""

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> torch.Tensor:
        logits: Tensor = base.forward(self, input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
