"""Lightning callbacks that a request names, and how all ranks end a run together when one of them asks for it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping

from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.model.own_callbacks import callback_problems
from runner.model.targets import explained
from runner.strategy.pipeline import EngineStrategy
from runner.targets import import_target

__all__ = ["EndTogether", "build_callbacks", "monitor_problems"]

logger = logging.getLogger(__name__)

_LOGGED = ("loss", "lr", "samples_per_second", "bubble", "grad_norm", "loss_scale")  # by the run itself


def build_callbacks(config: RunConfig) -> list[Callback]:
    """The callbacks of a request, in its order; each rank makes its own.

    Raises:
        RequestError: one cannot be made, is no callback, or does not work with stages on several ranks.
    """
    return [_made(name, config) for name in config.callbacks]


def _made(name: str, config: RunConfig) -> Callback:
    asked, path = config.callbacks[name], f"callbacks.{name}"
    make = import_target(f"{path}.target", asked.target)
    try:
        made = make(**asked.kwargs)
    except Exception as error:
        rule = f"must be arguments of {asked.target}"
        raise RequestError([Problem(f"{path}.kwargs", dict(asked.kwargs), rule, explained(error))]) from error
    if not isinstance(made, Callback):
        why = f"It made a {type(made).__name__}"
        raise RequestError([Problem(f"{path}.target", asked.target, "must make a callback of lightning.pytorch", why)])
    raise_problems(_problems(made, path, config))
    return made


def _problems(made: Callback, path: str, config: RunConfig) -> Iterator[Problem]:
    target = config.callbacks[path.partition(".")[2]].target
    yield from callback_problems(made, f"{path}.target", target)
    if isinstance(made, EarlyStopping) and config.trainer.val_every is None:
        why = "It looks at validations, and there is one, at the end only"
        yield Problem(f"{path}.target", target, "needs trainer.val_every", why, "trainer.val_every=100")
    for name, hook in _slips_of_hooks(type(made)):
        why = f"Lightning calls no method {name}, so that it would do nothing"
        yield Problem(f"{path}.target", target, f"must have its hook as {hook}", why)


def _slips_of_hooks(kind: type[Callback]) -> Iterator[tuple[str, str]]:
    """Methods of a callback that nothing calls, each with the hook of which its name is a slip of as many letters.

    A longer name, such as that of a hook with a word more, and a method that the callback calls itself are its own.
    """
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    methods = [method for each in kind.__mro__ for method in vars(each).values() if inspect.isfunction(method)]
    called = {name for method in methods for name in method.__code__.co_names}
    for name in dir(kind):
        if name.startswith("on_") and name not in hooks and name not in called:
            hook = did_you_mean(name, hooks)
            if hook is not None and abs(len(hook) - len(name)) <= 1:
                yield name, hook


def monitor_problems(config: RunConfig, made: Sequence[Callback], *, validates: bool) -> Iterator[Problem]:
    """Problems with what callbacks monitor, for a run that logs only what the runner itself logs.

    Args:
        config: the request.
        made: its callbacks, see :func:`build_callbacks`.
        validates: whether there is a validation set.
    """
    known = [*_LOGGED, *(["val_loss", *(f"val_{name}" for name in config.metrics)] if validates else [])]
    for name, callback in zip(config.callbacks, made, strict=True):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor not in known:
            path, why = f"callbacks.{name}.kwargs.monitor", f"The run logs {', '.join(known)}"
            yield Problem(path, monitor, "must be logged", why)


class EndTogether(Callback):
    """Lets all ranks end the run after the same step when a callback of some rank has set ``trainer.should_stop``.

    At the end of a validation the ranks decide at once. Within training no rank waits for another, so that the ask
    travels with the next step, after which all end.

    Args:
        ended: called when all callbacks after a step have returned.

    Attributes:
        is_asked: whether a callback of this rank has asked.
    """

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        self.is_asked = False
        self._ended = ended

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand behind all other callbacks, also those of ``configure_callbacks``."""
        own: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # it is the Trainer's list
        trainer.callbacks = [*(each for each in own if each is not self), self]  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy = _strategy(trainer)
        if trainer.should_stop and not strategy.stopped and trainer.global_step < trainer.max_steps:
            assert strategy.engine is not None
            trainer.should_stop = False
            self.is_asked = True
            strategy.engine.request_stop()
        self._ended()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy(trainer)
        if strategy.stopped or trainer.global_step >= trainer.max_steps:
            return
        trainer.should_stop = strategy.reduce_boolean_decision(trainer.should_stop, all=False)
        self.is_asked = self.is_asked or trainer.should_stop

    def ended(self, strategy: EngineStrategy) -> bool:
        """Whether a callback has ended the run; the same on every rank, and all of them must ask."""
        return any(strategy.all_gather_objects(self.is_asked))


def _strategy(trainer: pl.Trainer) -> EngineStrategy:
    assert isinstance(trainer.strategy, EngineStrategy)
    return trainer.strategy
