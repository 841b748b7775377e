"""Trains what a request names in one process, a thread for each stage: its model, data and loss as ranks load them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from layouts import make_engine, part_of
from torch import nn

from runner.config.compose.resolve import resolve
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.data import Datasets, collated, load_datasets
from runner.model.load import load_model
from runner.model.ties import find_ties, with_all_names

SGD = partial(torch.optim.SGD, lr=0.1)


def trained(
    words: list[str],
    *,
    pipeline: int,
    microbatches: int,
    steps: int,
    schedule: str = "1f1b",
    optimizer: Any = SGD,
    validates: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the steps, and the weights and buffers after them, each under all of its names.

    Args:
        words: overrides that name model, data and ``data.batch_size``.
        pipeline: the number of stages.
        microbatches: of each step.
        steps: the number of steps, which take the samples in their order.
        schedule: the name of the schedule.
        optimizer: makes one of a stage's parameters.
        validates: whether each step's batch is evaluated before the step, too.
    """
    config = resolve([*words, f"parallelism.pipeline={pipeline}", "device=cpu"])
    given = list(batches(words, steps))
    models = [load_model(config, filled=True) for _ in range(pipeline)]  # threads share the random generator

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = models[transport.rank]
        engine = make_engine(
            model.layers, model.loss, transport, schedule=schedule, pipeline=pipeline, data=1, count=microbatches,
            optimizer=optimizer,
        )  # fmt: skip
        losses = []
        for part in (part_of(batch, transport, pipeline, 1) for batch in given):
            if validates:
                engine.evaluate(part)
            losses += [finished.loss for finished in engine.submit(part)]
        losses += [finished.loss for finished in engine.drain()]
        return losses, {name: value for stage in engine.stages.values() for name, value in stage.global_state().items()}

    results = run_ranks(pipeline, run)
    state = {name: value for _, own in results for name, value in own.items()}
    return results[0][0], with_all_names(state, find_ties(models[0].layers))


def in_plain_pytorch(model: nn.Module, loss: Callable[..., Any], given: Iterable[tuple[Any, Any]]) -> list[float]:
    """The losses of a plain loop over whole batches, which trains the model in place with :data:`SGD`.

    Args:
        model: it takes the inputs; a dict or a tuple of them is its arguments by name or by place.
        loss: makes the mean of the output and the targets.
        given: the inputs and the targets of each step.
    """
    optimizer, losses = SGD(model.parameters()), []
    for inputs, targets in given:
        named = inputs if isinstance(inputs, dict) else {}
        placed = inputs if isinstance(inputs, tuple) else () if named else (inputs,)
        optimizer.zero_grad()
        value = loss(model(*placed, **named), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def batches(words: list[str], steps: int) -> Iterator[tuple[Any, Any]]:
    """The steps' batches of the request's data, whose samples are taken in their order."""
    config = resolve([*words, "device=cpu"])
    data: Datasets = load_datasets(config.data, config.seed)
    size = config.data.batch_size
    for step in range(steps):
        yield collated([data.train[index] for index in range(step * size, (step + 1) * size)], data.collate)
