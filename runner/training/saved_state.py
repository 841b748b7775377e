"""What users' code adds to a checkpoint: a failure of it costs no weights, and is found before the first step."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from runner.checkpoint.parts import encoded
from runner.checkpoint.plain import Lost, Plain, as_plain
from runner.config.schema import CheckpointConfig
from runner.errors import Problem, raise_problems
from runner.model.targets import explained
from runner.strategy.pipeline import EngineStrategy
from runner.training.random_state import random_state, set_random_state

__all__ = ["check_states", "guarded_hooks", "try_save"]

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
_FIELDS = {"callbacks": "callbacks", "optimizer_states": "optimizer", "lr_schedulers": "lr_scheduler"}
_HOOKS = ("on_save_checkpoint", "state_dict")
_Content = dict[str, Any]


@contextmanager
def guarded_hooks(trainer: pl.Trainer, lose: Callable[[Lost], None]) -> Iterator[None]:
    """Within the block, an error of a user's hook that saves a state is given to ``lose``, and raises nothing.

    All ranks save together; one that left the save at an error would leave the others waiting.
    """
    users = [one for one in _callbacks(trainer) if not _is_own(one)]
    with ExitStack() as replaced:
        for one in [*users, trainer.lightning_module]:
            replaced.enter_context(_guarded(one, lose, has_state=one in users))
        for number, each in enumerate(trainer.lr_scheduler_configs):
            own = partial(_state_of, each.scheduler, f"lr_schedulers/{number}", lose)
            replaced.enter_context(_replaced(each, scheduler=SimpleNamespace(state_dict=own)))
        yield


@contextmanager
def _guarded(owner: Any, lose: Callable[[Lost], None], *, has_state: bool) -> Iterator[None]:
    """Within the block, the hooks of a callback or module are guarded; they themselves do not see that.

    An object may save all of its attributes, which must not have the guards among them.
    """

    earlier = {name: vars(owner)[name] for name in _HOOKS if name in vars(owner)}

    @contextmanager
    def unguarded() -> Iterator[None]:
        with _replaced(owner, **guards):  # which puts the guards back
            for name in guards:
                del vars(owner)[name]
            vars(owner).update(earlier)
            yield

    def save(trainer_or_checkpoint: Any, *more: Any) -> None:
        checkpoint: _Content = more[-1] if more else trainer_or_checkpoint
        before = dict(checkpoint)
        try:
            with unguarded():
                owner.on_save_checkpoint(trainer_or_checkpoint, *more)
        except Exception as error:
            checkpoint.clear()
            checkpoint.update(before)
            lose(Lost(f"{type(owner).__name__}.on_save_checkpoint", _raised("on_save_checkpoint", error)))

    def state() -> Any:
        with unguarded():
            return _state_of(owner, f"callbacks/{owner.state_key}", lose)

    guards: dict[str, Any] = {"on_save_checkpoint": save} | ({"state_dict": state} if has_state else {})
    with _replaced(owner, **guards):
        yield


def _state_of(owner: Any, place: str, lose: Callable[[Lost], None]) -> Any:
    try:
        return owner.state_dict()
    except Exception as error:
        lose(Lost(place, _raised("state_dict", error)))
        return {}


def _raised(hook: str, error: Exception) -> str:
    return f"its {hook} raised {explained(error)}"


def try_save(trainer: pl.Trainer, config: CheckpointConfig, target: str | None, path: Path) -> None:
    """Make all of a checkpoint as a save does, and see that it could be read again; nothing is written.

    Every rank must call it before the first step. Random numbers that users' code draws in it are drawn again.

    Args:
        trainer, config: the run's.
        target: the function that makes the model.
        path: the name of the checkpoint.

    Raises:
        RequestError: something cannot be saved.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    random = random_state()

    def try_whole(found: Plain, path: Path) -> None:
        if found.told:
            told = ", ".join(f"{place} ({what})" for place, what in found.told.items())
            logger.info("kept in checkpoints as plain values: %s", told)
        file = io.BytesIO()
        torch.save(_hollow(found.content), file)
        _must_be_whole(torch.load(io.BytesIO(file.getvalue()), weights_only=True))

    def try_part(content: _Content) -> None:
        encoded(content)
        _must_be_whole(content)

    parts = strategy.in_parts(try_part) if config.asynchronous else strategy.written_by(try_whole)
    with parts, guarded_hooks(trainer, strategy.lose):
        trainer.save_checkpoint(path, weights_only=False)
    set_random_state(random)
    raise_problems(_problem(one, target) for one in strategy.take_lost())


def check_states(trainer: pl.Trainer, target: str | None) -> None:
    """See after the first step of this process whether the states that it has made can be saved.

    It is by itself on every rank: optimizers of the runner and of torch are known, and callbacks are asked here.

    Raises:
        RequestError: something cannot be saved.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, EngineStrategy)
    foreign = [one for one in trainer.optimizers if not type(one).__module__.startswith(("runner.", "torch."))]
    with guarded_hooks(trainer, strategy.lose):
        content = {
            "callbacks": {one.state_key: one.state_dict() for one in _callbacks(trainer) if not _is_own(one)},
            "optimizer_states": [list(one.state.values()) for one in foreign],
            "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        }
    lost = (*strategy.take_lost(), *as_plain(content).lost)
    raise_problems(_problem(one, target) for one in lost)


def _problem(lost: Lost, target: str | None) -> Problem:
    top, _, rest = lost.place.partition("/")
    field, value = (_FIELDS[top], rest) if top in _FIELDS else ("model.target", target)
    fix = f"'checkpoint.allow_pickle=[{','.join(lost.names)}]'" if lost.names else "checkpoint.try_first=false"
    rule = "must be such that its state can be saved, which is tried at the first step"
    return Problem(field, value, rule, lost.why, fix)


def _must_be_whole(content: Mapping[str, Any]) -> None:
    if not {"state_dict", "global_step"} <= content.keys():
        why = "on_save_checkpoint has removed state_dict or global_step"
        raise_problems([Problem("model.target", "on_save_checkpoint", "must leave the checkpoint whole", why)])


def _hollow(value: Any) -> Any:
    """``value`` with large tensors made empty: whether a tensor can be saved does not depend on its size."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.layout is torch.strided:
        return value.detach().reshape(-1)[:0].clone() if value.nbytes > _SMALL_BYTES else value
    if isinstance(value, dict):
        return {key: _hollow(one) for key, one in value.items()}
    return type(value)(_hollow(one) for one in value) if type(value) in (list, tuple) else value


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # it is the Trainer's list
    return found


def _is_own(callback: Any) -> bool:
    return type(callback).__module__.startswith("runner.")


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within the block, an object's own attributes have these values."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)
