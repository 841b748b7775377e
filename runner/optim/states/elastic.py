"""Several pipelines that train weights of their own, and the average that draws them together after each step.

Let z be the average of a weight, x_p the weight of pipeline p of P, and a the elasticity. A step makes the optimizer's
update of each x_p from its own gradient, and one of two forms of averaging:

- ``easgd``: d_p = x_p - z before the update; x_p <- x_p - a d_p, then the update; z <- z + a sum of the d_p;
- ``updates``: the update first; z <- z + mean over p of (x_p - x_p before the update); then x_p <- (1 - a) x_p + a z.

With a = 0, ``easgd`` is P independent runs, and z stays as it was. Where no update moves a weight, ``easgd`` keeps the
sum of z and all x_p, and ``updates`` keeps z.

Sources: Zhang et al., "Deep Learning with Elastic Averaging SGD", 2015, equations 5 and 6. ``updates`` is the form of
Chen et al., "Elastic Averaging for Efficient Pipelined DNN Training", 2023, as remembered: the paper was not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.optim.states.settings import apply_settings
from runner.optim.states.whole_norms import as_divided
from runner.plan.averaging import Averaging

__all__ = ["ElasticAverage"]

_WEIGHT = "weight"


class ElasticAverage(Optimizer):
    """An optimizer over the averages; its state holds the weights of each pipeline and the wrapped optimizer's states.

    Its ``param_groups`` are the model's own parameters, which are the averages, so that learning-rate schedulers and
    checkpoints by parameter name need not know about pipelines: ``state[z]`` is ``{"pipeline0.weight": x_0, ...}``. The
    weights of the pipelines take their gradients from :attr:`copies`; those of the averages are not read.

    Args:
        parameters: the averages, which are also the pipelines' first weights.
        build: makes the wrapped optimizer over the weights of all pipelines, in groups like those over ``parameters``.
        averaging: the number of pipelines, the elasticity, and the form.
    """

    def __init__(
        self, parameters: Sequence[Tensor], build: Callable[[list[Tensor]], Optimizer], averaging: Averaging
    ) -> None:
        self._averaging = averaging
        self._copies = {
            average: [as_divided(Parameter(average.detach().clone()), average) for _ in range(averaging.pipes)]
            for average in parameters
        }
        average_of = {weight: average for average, weights in self._copies.items() for weight in weights}
        self._inner = build(list(average_of))
        groups = [
            {**group, "params": list(dict.fromkeys(average_of[weight] for weight in group["params"]))}
            for group in self._inner.param_groups
        ]
        super().__init__(groups, dict(self._inner.defaults))
        self._publish()

    @property
    def copies(self) -> Mapping[Tensor, Sequence[Parameter]]:
        """For each average, the weight of each pipeline."""
        return self._copies

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights of all pipelines from their own ``grad``, and draw them and the averages together."""
        result = closure() if closure is not None else None
        apply_settings(self._inner, self.param_groups)
        if self._averaging.form == "easgd":
            self._attract()
            self._inner.step()
        else:
            self._add_means(-1.0)
            self._inner.step()
            self._add_means(1.0)
            self._follow()
        self._publish()
        return result

    def _attract(self) -> None:
        """Move each weight and its average towards each other, by parts of the distance between them."""
        share = self._averaging.elasticity
        for average, weights in self._copies.items() if share else ():
            moved = torch.zeros_like(average)
            for weight in weights:
                move = (weight - average).mul_(share)
                weight.sub_(move)
                moved.add_(move)
                del move  # before the next one is made: the plan counts two
            average.add_(moved)
            del moved

    def _add_means(self, sign: float) -> None:
        """Add the mean of the pipelines' weights to each average, or take it away, without another copy of them."""
        for average, weights in self._copies.items():
            for weight in weights:
                average.add_(weight, alpha=sign / len(weights))

    def _follow(self) -> None:
        """Move each weight towards its average."""
        share = self._averaging.elasticity
        for average, weights in self._copies.items():
            for weight in weights:
                weight.mul_(1 - share).add_(average, alpha=share)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's; a state of another optimizer's run, without pipelines, becomes that of each pipeline."""
        apply_settings(self, state_dict["param_groups"])
        apply_settings(self._inner, self.param_groups)
        held = [average for group in self.param_groups for average in group["params"]]
        number_of = {weight: number for number, weight in enumerate(self._inner_weights())}
        inner: dict[int, dict[str, Any]] = {}
        for number, entries in state_dict["state"].items():
            for pipe, weight in enumerate(self._copies[held[number]]):
                own = _of_pipe(entries, pipe)
                if _WEIGHT in own:
                    weight.copy_(own.pop(_WEIGHT))
                if own:
                    inner[number_of[weight]] = own
        self._inner.load_state_dict({"state": inner, "param_groups": self._inner.state_dict()["param_groups"]})
        self._publish()

    def _inner_weights(self) -> Iterator[Parameter]:
        for group in self._inner.param_groups:
            yield from group["params"]

    def _publish(self) -> None:
        for average, weights in self._copies.items():
            self.state[average] = {
                f"pipeline{pipe}.{key}": value
                for pipe, weight in enumerate(weights)
                for key, value in {_WEIGHT: weight.detach(), **self._inner.state.get(weight, {})}.items()
            }


def _of_pipe(entries: Mapping[str, Any], pipe: int) -> dict[str, Any]:
    """The entries of one pipeline without its prefix; copies of all entries if they belong to no pipeline."""
    prefix = f"pipeline{pipe}."
    if any(key.startswith("pipeline") for key in entries):
        return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
