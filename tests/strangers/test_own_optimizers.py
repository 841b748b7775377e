"""Optimizers that a run cannot use as one process does are refused by a plan, and no others."""

from __future__ import annotations

import pytest

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.profiling.model import profile_model
from runner.profiling.try_optimizer import try_optimizer

DATA = ["data.target=own_optimizers:data", "data.batch_size=8", "device=cpu"]
BY_ALL = r"must update each weight by itself in a run with parallelism.{} above 1. ByAll changes a weight otherwise"
TWO_SETS = r"must have one set of weights. TwoSets has others for evaluation"
REFUSED = {
    ("by_all", "pipeline=2"): BY_ALL.format("pipeline"),
    ("by_all", "tensor=2"): BY_ALL.format("tensor"),
    ("two_sets", "pipeline=1"): TWO_SETS,
    ("by_closure", "pipeline=1"): r"must take a step from the gradients that are there. LBFGS.step needs a closure",
}
TAKEN = [("by_all", "pipeline=1"), ("by_all", "data=2"), *((kind, "pipeline=2") for kind in ("by_each", "adafactor"))]


def words(kind: str, layout: str) -> list[str]:
    own = ["optimizer=custom", "optimizer.target=own_optimizers:make", f"optimizer.kwargs.kind={kind}"]
    return ["model.target=own_optimizers:build", *DATA, "loss=mse", *own, f"parallelism.{layout}"]


@pytest.mark.parametrize(("kind", "layout"), REFUSED)
def test_it_is_refused(kind: str, layout: str) -> None:
    with pytest.raises(RequestError, match=REFUSED[kind, layout]):
        try_optimizer(resolve(words(kind, layout)))


@pytest.mark.parametrize(("kind", "layout"), [*TAKEN, ("rprop", "pipeline=2")])
def test_it_is_taken(kind: str, layout: str) -> None:
    try_optimizer(resolve(words(kind, layout)))


@pytest.mark.parametrize(
    ("kind", "said"), [("by_all", BY_ALL.format("pipeline")), ("two_sets", TWO_SETS), ("by_each", "")]
)
def test_a_module_s_own_is_tried_too(kind: str, said: str) -> None:
    config = resolve(
        ["model.target=own_optimizers:Module", f"model.kwargs.kind={kind}", *DATA, "loss=auto", "optimizer=auto",
         "parallelism.pipeline=2", "schedule.microbatches=2", "profile.refresh=true"]
    )  # fmt: skip
    if not said:
        profile_model(config)
        return
    with pytest.raises(RequestError, match=said):
        profile_model(config)
