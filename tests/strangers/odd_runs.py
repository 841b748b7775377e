"""Trains a model of odd tensors: in a plain loop over whole batches, in stages that are threads, and with a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import odd_layers
import torch
from layouts import make_engine, part_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import fit
from torch import Tensor, nn

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch
from runner.memory.apply.recompute import Recompute
from runner.model.layers import Part, StageModule, layers_of
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers

BATCH, STEPS, RATE = 8, 4, 0.05
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=RATE),
    "momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=RATE, weight_decay=0.01),
}
WORDS = {
    "sgd": ["optimizer=sgd"],
    "momentum": ["optimizer=sgd", "optimizer.momentum=0.9"],
    "adamw": ["optimizer=adamw", "optimizer.weight_decay=0.01"],
}


@dataclass(frozen=True)
class Trained:
    """The losses of the steps, a validation's after them, and the tensors that are left, saved or not."""

    losses: list[float]
    validation: float
    tensors: dict[str, Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = [odd_layers.Rows()[index] for index in range(step * BATCH, (step + 1) * BATCH)]
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def in_plain_pytorch(kinds: Sequence[str], optimizer: str = "sgd", clip: float | None = None) -> Trained:
    """The model as its function makes it, one whole batch after the other."""
    model = odd_layers.model(kinds)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    stepper = OPTIMIZERS[optimizer](weights)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        stepper.zero_grad()
        value = odd_layers.loss(model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(weights, clip)
        stepper.step()
        losses.append(value.item())
    model.eval()
    inputs, targets = batch(STEPS)
    with torch.no_grad():
        return Trained(losses, float(odd_layers.loss(model(inputs), targets)), tensors_of(model))


def recomputed(stage: StageModule, number: int) -> None:
    """Let every layer of a stage run again in the backward."""
    layers = enumerate(stage.layers, stage.first_layer)
    stage.wrap([Part(index, index, Recompute([layer])) for index, layer in layers])


def in_stages(
    kinds: Sequence[str],
    stages: int,
    microbatches: int,
    *,
    again: bool = False,
    optimizer: str = "sgd",
    schedule: str = "1f1b",
    **options: Any,
) -> Trained:
    """The same with the runner's engine, of which each stage is a thread; the first step is rehearsed before."""
    models = [odd_layers.model(kinds) for _ in range(stages)]

    def run(transport: ThreadTransport) -> tuple[list[float], float, dict[str, Tensor]]:
        engine = make_engine(
            models[transport.rank], odd_layers.loss, transport, schedule=schedule, pipeline=stages, data=1,
            count=microbatches, optimizer=lambda own: OPTIMIZERS[optimizer]([w for w in own if w.requires_grad]),
            prepare=recomputed if again else None, **options,
        )  # fmt: skip
        given = [part_of(batch(step), transport, stages, 1) for step in range(STEPS + 1)]
        engine.rehearse(given[0], 2)
        losses = [step.loss for part in given[:STEPS] for step in engine.submit(part)]
        losses += [step.loss for step in engine.drain()]
        total, weight = engine.evaluate(given[STEPS])
        own = {
            stage.global_name(name): value
            for stage in engine.stages.values()
            for name, value in tensors_of(stage).items()
        }
        return losses, total / weight, own

    results = run_ranks(stages, run)
    return Trained(results[0][0], results[0][1], {name: value for part in results for name, value in part[2].items()})


def words_of(kinds: Sequence[str], *words: str) -> list[str]:
    """The request of a model with these kinds."""
    named = ",".join(f"'{kind}'" for kind in kinds)
    return [
        "model.target=odd_layers:model", f"+model.kwargs.kinds=[{named}]", "data.target=odd_layers:data",
        "loss.target=odd_layers:loss", f"data.batch_size={BATCH}", "data.shuffle=false", "device=cpu", *words,
    ]  # fmt: skip


def with_a_resume(
    kinds: Sequence[str], microbatches: int, directory: Path, *words: str, optimizer: str = "sgd"
) -> Trained:
    """The same with a plan and the strategy: a run to the middle, and another one that continues its checkpoint."""
    cut = f"schedule.microbatches={microbatches}"
    asked = words_of(kinds, *WORDS[optimizer], f"optimizer.lr={RATE}", "lr_scheduler=constant", cut, *words)
    profile, half = profile_of(kinds, -(-BATCH // microbatches)), STEPS // 2
    saves = ModelCheckpoint(directory, "{step}", every_n_train_steps=half, save_top_k=-1)
    _, _, first = fit(*asked, f"trainer.max_steps={half}", callbacks=[saves], profile=profile)
    (saved,) = directory.iterdir()
    later = [*asked, f"trainer.max_steps={STEPS}", f"+data.kwargs.start={half * BATCH}"]
    trainer, _, losses = fit(*later, ckpt_path=saved, profile=profile)
    total, weight = trainer.strategy.evaluate(StepBatch(*batch(STEPS), BATCH))
    return Trained([*first, *losses], total / weight, named(trainer.strategy.engine.stages.values()))


def profile_of(kinds: Sequence[str], samples: int) -> ModelProfile:
    """A profile on real tensors, as of a model that fake ones cannot run; every layer takes as long."""
    inputs, targets = (value[:samples] for value in batch(0))
    made = profile_layers(layers_of(odd_layers.model(kinds), 0), inputs, targets, odd_layers.loss, torch.float32)
    return replace(made, layers=tuple(replace(row, forward_seconds=1e-3, backward_seconds=2e-3) for row in made.layers))


def named(stages: Iterable[StageModule]) -> dict[str, Tensor]:
    return {stage.global_name(name): value for stage in stages for name, value in tensors_of(stage).items()}


def assert_equal(found: Trained, expected: Trained, *, losses: float = 2e-6) -> None:
    """Losses are equal to rounding; of tensors the names, formats and layouts, and their values to rounding."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=losses, atol=0.0)
    torch.testing.assert_close(found.validation, expected.validation, rtol=1e-5, atol=0.0)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        own = found.tensors[name]
        assert (own.dtype, own.layout, own.shape) == (value.dtype, value.layout, value.shape), name
        torch.testing.assert_close(own, value, rtol=2e-4, atol=2e-6, msg=f"{name}: {own} for {value}")
