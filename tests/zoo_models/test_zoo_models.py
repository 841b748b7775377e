"""Every model of the zoo trains in a pipeline as in one process: losses, weights, buffers and validation loss."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypedDict

import pytest
import torch
from layouts import EngineFormat, make_engine, part_of
from narrow import present
from precisions import PLAIN, train, validate
from small_models import ZOO, Case
from torch import nn

from runner.engine.loss_scale import LossScaling
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import LayerSource
from runner.model.load import segments_of
from runner.model.precision import cast_module, to_precision
from runner.model.seeds import mix_seed
from runner.model.ties import find_ties, with_all_names
from runner.model.traced.operators import trace

STEPS, COUNT, SAMPLES, SEED = 3, 3, 8, 11
SCALING = LossScaling(initial_scale=2.0**10, samples=SAMPLES)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

ENGINE: dict[str, EngineFormat] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16_master": {"dtype": torch.bfloat16, "masters": True},
    "bf16_mixed": {"autocast": torch.bfloat16},
    "fp16": {"dtype": torch.float16, "masters": True, "scaling": SCALING},
    "fp16_mixed": {"autocast": torch.float16, "scaling": SCALING},
}
ALWAYS = [("bf16_master", "unet", 2), ("fp16_mixed", "dropout", 3), ("fp32", "encoder_decoder", 3)]
CASES = [("fp32", name, 3) for name in ZOO if name not in ("unet", "dropout", "encoder_decoder")]


class Tolerance(TypedDict):
    rtol: float
    atol: float


# What the order of a weight's gradients, in two stages apart, may change: steps of the format it is summed in.
TOLERANCE: dict[str, Tolerance] = {
    "fp32": {"rtol": 1e-4, "atol": 1e-6},
    "bf16_mixed": {"rtol": 1e-2, "atol": 2e-3},
    "fp16_mixed": {"rtol": 1e-2, "atol": 2e-3},
    "bf16": {"rtol": 5e-2, "atol": 2e-2},
    "bf16_master": {"rtol": 5e-2, "atol": 2e-2},
    "fp16": {"rtol": 1e-2, "atol": 2e-3},
}


def batch_of(case: Case, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return case.inputs(samples, generator), case.targets(samples, generator)


def made(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.make()


def in_one_process(
    case: Case,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    validation: tuple[torch.Tensor, torch.Tensor],
    precision: str,
    count: int = COUNT,
) -> tuple[list[float], nn.Module, float]:
    """Losses, the trained model and its validation loss, by plain PyTorch and autograd."""
    model, plain = made(case), PLAIN[precision]
    losses = train(
        plain, model, case.loss, batches, count=count, optimizer=sgd, scales=[SCALING.initial_scale] * len(batches),
        seed=lambda step, microbatch: torch.manual_seed(mix_seed(SEED, step, microbatch, 0)),
    )  # fmt: skip
    return losses, model, validate(plain, model, case.loss, validation, count)


@cache
def traced(case: Case, dtype: torch.dtype, pipeline: int) -> list[LayerSource]:
    """The model's segments as a request of this precision has them."""
    model = made(case)
    programs = trace(cast_module(model, dtype), to_precision(batch_of(case, 3, 99)[0], dtype), "zoo")
    return segments_of(model, programs, None, wanted=pipeline - 1)


def copied(chain: list[LayerSource]) -> list[LayerSource]:
    """A rank's own copy of all layers; what is tied in the one is tied in the other."""
    modules = deepcopy([present(layer.given) for layer in chain])
    return [holding(layer, module) for layer, module in zip(chain, modules, strict=True)]


def holding(layer: LayerSource, module: nn.Module) -> LayerSource:
    return replace(layer, build=lambda: module, given=module)


def in_a_pipeline(
    case: Case,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    validation: tuple[torch.Tensor, torch.Tensor],
    precision: str,
    schedule: str,
    pipeline: int,
    count: int = COUNT,
    **options: Any,
) -> tuple[list[list[float]], dict[str, torch.Tensor], float]:
    """Losses by rank, all weights under all their names, and the validation loss."""
    chain = traced(case, ENGINE[precision].get("dtype", torch.float32), pipeline)
    chains = [copied(chain) for _ in range(pipeline)]

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, torch.Tensor], float]:
        engine = make_engine(
            chains[transport.rank], case.loss, transport, schedule=schedule, pipeline=pipeline, data=1, count=count,
            optimizer=sgd, seed=SEED, **ENGINE[precision], **options,
        )  # fmt: skip
        losses = [f.loss for batch in batches for f in engine.submit(part_of(batch, transport, pipeline, 1))]
        total, weight = engine.evaluate(part_of(validation, transport, pipeline, 1))
        engine.drain()
        state = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        return losses, state, total / weight

    results = run_ranks(pipeline, run)
    weights = {}
    for _, state, _ in results:
        weights.update(state)
    return [losses for losses, _, _ in results], with_all_names(weights, find_ties(chains[0])), results[0][2]


def check(
    case: Case,
    precision: str,
    schedule: str,
    pipeline: int,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    validation: tuple[torch.Tensor, torch.Tensor],
    **options: Any,
) -> None:
    expected, model, expected_validation = in_one_process(case, batches, validation, precision)
    found = in_a_pipeline(case, batches, validation, precision, schedule, pipeline, **options)
    losses, weights, found_validation = found
    assert all(rank == losses[0] for rank in losses)
    assert all(math.isfinite(loss) for loss in losses[0])
    made(case).load_state_dict(weights)  # every name of the user's module, and no other
    state = model.state_dict()
    assert {name: value.dtype for name, value in state.items()} == {name: v.dtype for name, v in weights.items()}
    if case.bitwise:
        assert losses[0] == expected
        assert [name for name in state if not torch.equal(weights[name], state[name])] == []
        assert found_validation == expected_validation
        return
    tolerance = TOLERANCE[precision]
    loss_tolerance = 1e-6 if precision == "fp32" else tolerance["rtol"]
    assert losses[0] == pytest.approx(expected, rel=loss_tolerance)
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, **tolerance, msg=f"{name}: {{}}".format)
    assert found_validation == pytest.approx(expected_validation, rel=loss_tolerance)


@pytest.mark.parametrize(
    ("precision", "name", "pipeline"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.costly) for case in CASES)]
)
def test_a_pipeline_equals_one_process(precision: str, name: str, pipeline: int) -> None:
    case = ZOO[name]
    batches = [batch_of(case, SAMPLES, seed) for seed in range(STEPS)]
    check(case, precision, "1f1b", pipeline, batches, batch_of(case, 7, 50))


@pytest.mark.costly
def test_batches_and_lengths_that_change() -> None:
    """A last short batch, micro-batches of one sample or none, and another sequence length in every batch."""
    case = ZOO["dropout"]
    batches = []
    for step, (samples, length) in enumerate([(8, 6), (8, 5), (3, 9), (2, 6), (8, 5)]):
        generator = torch.Generator().manual_seed(step)
        batches.append(tuple(torch.randint(0, 13, (2, samples, length), generator=generator)))
    check(case, "fp32", "1f1b", 3, batches, batch_of(case, 7, 50))
