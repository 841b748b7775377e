"""Every model of the zoo trains in a pipeline as in one process: losses, weights, buffers and validation loss."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from layouts import make_engine, part_of
from reference import in_fp32
from small_models import ZOO, Case

from runner.engine.transport_threads import run_ranks
from runner.engine.window import split_microbatches
from runner.model.boundary import call_arguments, num_samples
from runner.model.chain import segments_of
from runner.model.layers import mix_seed
from runner.model.ties import find_ties, with_all_names
from runner.model.trace import trace

STEPS, COUNT, SAMPLES, SEED = 5, 3, 8, 11
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SAMPLED = {
    ("tied_gpt", "1f1b", 3), ("unet", "gpipe", 2), ("unet", "1f1b", 3), ("resnet", "1f1b", 2), ("mixture", "1f1b", 3),
    ("encoder_decoder", "1f1b", 3), ("dropout", "gpipe", 3), ("embedding_bag", "1f1b", 2), ("shared_block", "gpipe", 2),
    ("frozen_backbone", "1f1b", 3), ("gpt2", "1f1b", 2), ("bert", "1f1b", 3), ("mlp", "gpipe", 3),
}  # fmt: skip


def batch_of(case: Case, samples: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return case.inputs(samples, generator), case.targets(samples, generator)


def made(case: Case):
    torch.manual_seed(7)
    return case.make()


def parts(batch, count: int):
    samples = num_samples(batch[0])
    return list(zip(*(split_microbatches(value, samples, count) for value in batch), strict=True))


def in_one_process(case: Case, batches, validation, count: int = COUNT):
    """Losses, the trained model and its validation loss, by plain PyTorch and autograd."""
    model = made(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = sgd(trained)
    losses = []

    def call(value):
        args, kwargs = call_arguments(value)
        return as_loss_gets_it(model(*args, **kwargs))

    for step, batch in enumerate(batches):
        stepper.zero_grad(set_to_none=False)
        total = weight = 0.0
        for number, (x, y) in enumerate(parts(batch, count)):
            if not len(y):
                continue
            torch.manual_seed(mix_seed(SEED, step, number, 0))
            part, part_weight = loss_and_weight_of(case, call(x), y)
            part.backward()
            total += float(part.detach().double())
            weight += part_weight
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        stepper.step()
        losses.append(total / weight)
    model.eval()
    with torch.no_grad():
        sums = [loss_and_weight_of(case, call(x), y) for x, y in parts(validation, count) if len(y)]
    return losses, model, sum(float(s.double()) for s, _ in sums) / sum(w for _, w in sums)


def as_loss_gets_it(output):
    return {k: v.float() for k, v in output.items()} if isinstance(output, dict) else in_fp32(output)


def loss_and_weight_of(case: Case, output, target):
    return case.loss(output, target) * len(target), float(len(target))


def copied(chain):
    """A rank's own copy of all layers; what is tied in the one is tied in the other."""
    modules = deepcopy([layer.given for layer in chain])
    return [
        replace(layer, build=lambda module=module: module, given=module)
        for layer, module in zip(chain, modules, strict=True)
    ]


def in_a_pipeline(case: Case, batches, validation, schedule: str, pipeline: int, count: int = COUNT):
    """Losses by rank, all weights under all their names, and the validation loss."""
    model = made(case)
    chain = segments_of(model, trace(model, batch_of(case, 3, 99)[0], "zoo"), None, wanted=pipeline - 1)
    chains = [copied(chain) for _ in range(pipeline)]

    def run(transport):
        engine = make_engine(
            chains[transport.rank], case.loss, transport,
            schedule=schedule, pipeline=pipeline, data=1, count=count, optimizer=sgd, seed=SEED,
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


def check(case: Case, schedule: str, pipeline: int, batches, validation, count: int = COUNT):
    expected, model, expected_validation = in_one_process(case, batches, validation, count)
    losses, weights, found_validation = in_a_pipeline(case, batches, validation, schedule, pipeline, count)
    assert all(rank == losses[0] for rank in losses)
    made(case).load_state_dict(weights)  # every name of the user's module, and no other
    state = model.state_dict()
    if case.bitwise:
        assert losses[0] == expected
        assert [name for name in state if not torch.equal(weights[name], state[name])] == []
        assert found_validation == expected_validation
        return
    torch.testing.assert_close(losses[0], expected, rtol=1e-6, atol=1e-7)
    for name, value in state.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert found_validation == pytest.approx(expected_validation, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "schedule", "pipeline"),
    [
        pytest.param(name, schedule, pipeline, marks=() if (name, schedule, pipeline) in SAMPLED else pytest.mark.full)
        for name in ZOO
        for schedule in ("gpipe", "1f1b")
        for pipeline in (2, 3)
    ],
)
def test_a_pipeline_equals_one_process(name, schedule, pipeline):
    case = ZOO[name]
    batches = [batch_of(case, SAMPLES, seed) for seed in range(STEPS)]
    check(case, schedule, pipeline, batches, batch_of(case, 7, 50))


def test_batches_and_lengths_that_change():
    """A last short batch, micro-batches of one sample or none, and another sequence length in every batch."""
    case = ZOO["dropout"]
    batches = []
    for step, (samples, length) in enumerate([(8, 6), (8, 5), (3, 9), (2, 6), (8, 5)]):
        generator = torch.Generator().manual_seed(step)
        batches.append(tuple(torch.randint(0, 13, (2, samples, length), generator=generator)))
    check(case, "1f1b", 3, batches, batch_of(case, 7, 50))
