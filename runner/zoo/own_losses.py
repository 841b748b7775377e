"""Refuses losses that a model of ``transformers`` computes in its own forward, because a run's loss sees logits alone.

A mixture's router loss, a z-loss or a loss of several predicted tokens is a field of the configuration there. It would
be left out without a word, so that another function would be trained than the configuration asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["refuse_own_losses"]

_SWITCH = "output_router_logits"
_OF_ROUTERS = re.compile(r"(router_)?(aux|z)_loss_(coef|alpha|weight)|router_loss_coef|moe_loss_weight|aux_loss_alpha")
_OF_ALL = re.compile(r"z_loss_coefficient|mtp_loss_\w+|label_smoothing(_factor)?")
_OTHER_PROBLEMS = ("regression", "multi_label_classification")


def refuse_own_losses(config: Any, given: Mapping[str, Any], task: str) -> None:
    """Refuse a configuration whose model adds something to the loss of its logits.

    Args:
        config: a configuration of ``transformers``.
        given: the fields that the request sets itself.
        task: the name of the task, of :func:`runner.zoo.huggingface.build`.

    Raises:
        ValueError: it does; the message names the field, and the values with which the model can be trained.
    """
    for problem in _problems(config.to_dict(), given, task):
        raise ValueError(problem)


def _problems(fields: Mapping[str, Any], given: Mapping[str, Any], task: str) -> Iterator[str]:
    named = dict(_numbers_and_words("", fields))
    of_routers = {name: value for name, value in named.items() if _is_set(_OF_ROUTERS, name, value)}
    for switch, value in named.items():
        if _last(switch) == _SWITCH and value is True and of_routers:
            asked = " and ".join(f"{name}={value}" for name, value in of_routers.items())
            yield _told(f"{switch}=true with {asked}", "a loss of its routers", f"{switch}=false")
    for name, value in _numbers_and_words("", given):
        if _is_set(_OF_ROUTERS, name, value):
            yield _told(f"{name}={value}", "a loss of its routers", f"{name}=0")
    for name, value in named.items():
        if _is_set(_OF_ALL, name, value):
            yield _told(f"{name}={value}", "a term of its own", f"{name}=0")
    if named.get("disable_ngram_loss") is False and named.get("ngram", 1) > 1:
        yield _told(f"ngram={named['ngram']}", "the losses of later tokens", "disable_ngram_loss=true")
    if fields.get("loss_type") is not None:
        yield _told(f"loss_type={fields['loss_type']}", "a loss of this name", "loss_type=null")
    if task == "image" and fields.get("problem_type") in _OTHER_PROBLEMS:
        yield _told(f"problem_type={fields['problem_type']}", "another loss than the request", "problem_type=null")


def _numbers_and_words(path: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a configuration and of the configurations in it, by its name with dots."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers_and_words(f"{path}{name}.", value)
        else:
            yield f"{path}{name}", value


def _is_set(pattern: re.Pattern[str], name: str, value: object) -> bool:
    return pattern.fullmatch(_last(name)) is not None and isinstance(value, int | float) and value != 0


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _told(asked: str, adds: str, fix: str) -> str:
    why = "a run's loss is a function of the logits alone and would leave it out"
    return f"{asked} asks transformers to compute {adds}, and {why}: set model.kwargs.{fix}"
