"""Activations that another rank keeps for a while: as many bytes move and stay as the plan says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layouts import make_engine, part_of
from torch import nn
from torch.nn import functional

from runner.engine.actions.saved_tensors import Stash
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.layers import layers_of
from runner.plan.memory.held import held_microbatches
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profiling.model import profile_layers
from runner.schedule import build, lower
from runner.schedule.values import Op, Payload, Schedule

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
WIDTH = 12


def make_model(layers: int = 12) -> nn.Sequential:
    torch.manual_seed(5)
    wide = 4 * WIDTH
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Dropout(0.0), nn.Linear(wide, WIDTH)
            )
            for _ in range(layers)
        )
    )


def make_batches(samples: int, steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, samples, WIDTH, generator=generator)) for _ in range(steps)]


@pytest.mark.costly
def test_what_is_sent_is_what_the_plan_counts() -> None:
    """Per micro-batch that moves, there and back: what autograd saves of it, and the stage's input and output."""
    ranks, count = 4, 8
    schedule = build("bpipe", ranks=ranks, microbatches=count)
    plain = build("1f1b", ranks=ranks, microbatches=count)
    (batch,) = make_batches(2 * count, steps=1)
    sent = {}
    for order in (schedule, plain):
        models = [make_model() for _ in range(ranks)]

        def run(transport: ThreadTransport, order: Schedule = order, models: list[nn.Sequential] = models) -> int:
            engine = make_engine(
                models[transport.rank], functional.mse_loss, transport, schedule=order, pipeline=ranks, data=1,
                count=count, optimizer=adamw,
            )  # fmt: skip
            engine.submit(part_of(batch, transport, ranks, 1, order))
            engine.drain()
            return engine.bytes_sent["activation"]

        sent[order.name] = run_ranks(ranks, run)
    inputs, targets = (part[:2] for part in batch)
    profile = profile_layers(layers_of(make_model(), 0), inputs, targets, functional.mse_loss, torch.float32)
    figures = stage_figures(profile, [(3 * stage, 3 * stage + 2) for stage in range(ranks)])
    each = [figures[stage].saved_bytes + figures[stage].input_bytes for stage in range(ranks)]
    moved = sum(each[move.stage] for move in schedule.moves)
    more = [own - base for own, base in zip(sent["bpipe"], sent["1f1b"], strict=True)]
    assert more == [moved, 0, 0, moved]


@pytest.mark.costly
def test_the_plans_peak_is_that_of_half_the_pipeline_and_one() -> None:
    """The fullest rank keeps D / 2 - 1 micro-batches less than with 1f1b, and no host more than it."""
    ranks, count = 8, 16
    (batch,) = make_batches(2, steps=1)
    profile = profile_layers(layers_of(make_model(24), 0), *batch, functional.mse_loss, torch.float32)
    figures = stage_figures(profile, [(3 * stage, 3 * stage + 2) for stage in range(ranks)])
    peaks = {}
    for name in ("1f1b", "bpipe"):
        program = lower(build(name, ranks=ranks, microbatches=count))
        parts = predict_memory(program, profile, figures, MemoryNeeds(2 * count)).parts
        peaks[name] = [part.activations + part.buffers for part in parts]
    assert peaks["bpipe"][0] == peaks["1f1b"][0] - (ranks // 2 - 1) * figures[0].saved_bytes
    assert max(peaks["bpipe"]) == peaks["bpipe"][0]


def test_the_search_for_stages_knows_what_is_lent() -> None:
    held = held_microbatches(build("bpipe", ranks=8, microbatches=16))
    assert [max(each.saved for each in moments) for moments in held] == [5, 5, 5, 5, 4, 3, 2, 1]


def test_a_stash_gives_back_what_it_took() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    value = torch.randn(3, 4, requires_grad=True)
    gradients = []
    for moves in (False, True):
        stash = Stash([weight])
        with torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack):
            output = torch.tanh(value @ weight).exp()
        if moves:
            memories = stash.leave([value, output])
            assert value.numel() == output.numel() == 0
            assert sum(memory.nbytes for memory in memories) == 3 * value.new_empty(3, 4).nbytes
            stash.come_back([memory.clone() for memory in memories])
        gradients.append(torch.autograd.grad(output.sum(), [value, weight]))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_only_first_half_lends() -> None:
    program = lower(build("bpipe", ranks=4, microbatches=8))
    sends = [sum(a.op is Op.SEND and a.payload is Payload.STASH for a in row) for row in program.actions]
    assert sends == [3, 0, 0, 3]
