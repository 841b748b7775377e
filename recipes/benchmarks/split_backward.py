"""What splitting the backward costs: I and then W against one full backward, on one thread.

    python -m runner.recipes.benchmarks.split_backward [--rounds 15]

The model is a GPT (8 blocks, width 256, 128 tokens, 4 samples). The two ways take turns; a round's figure is the ratio
of its times, and the median over the rounds is printed, with the first and third quartile. Times are the process's
processor time, which on one thread is that of the work, whoever else uses the machine.

What waits for W is memory that a full backward does not hold. By default the C library gives such memory back to the
system when it is freed and asks for it again, page by page, in the next I. So the measurement runs as the runner's
ranks do, with glibc told to keep freed memory; --default-allocator shows the cost without that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from runner.launch.local.allocator import allocator_variables
from runner.model.layers import build_stage, layers_of
from runner.model.split.backward import PendingWeights, backward_input, backward_weight
from runner.zoo import gpt

VOCABULARY, TOKENS, WIDTH, BLOCKS, HEADS, SAMPLES = 512, 128, 256, 8, 4, 4


def make_stage(first: bool) -> tuple[nn.Module, torch.Tensor]:
    """A first stage (embedding and blocks) or a middle one (blocks), with gradients in place, and its input."""
    sources = layers_of(gpt.build(VOCABULARY, TOKENS, WIDTH, BLOCKS, HEADS), 0)
    stage = build_stage(sources, 0 if first else 1, BLOCKS)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if first:
        return stage, torch.randint(VOCABULARY, (SAMPLES, TOKENS))
    return stage, torch.randn(SAMPLES, TOKENS, WIDTH)


def timed(function: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def one_round(stage: nn.Module, value: torch.Tensor, gradient: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of a full backward, of I, and of W."""

    def forward() -> tuple[list[torch.Tensor], torch.Tensor]:
        leaf = value.detach().requires_grad_(value.is_floating_point())
        return [leaf] if leaf.requires_grad else [], stage(leaf)

    _, output = forward()
    full, _ = timed(lambda: torch.autograd.backward([output], [gradient]))
    leaves, output = forward()
    in_i, made = timed(lambda: backward_input([output], [gradient], leaves))
    assert isinstance(made, tuple)
    pending = made[1]
    assert isinstance(pending, PendingWeights)
    in_w, _ = timed(lambda: backward_weight(pending))
    return full, in_i, in_w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--default-allocator", action="store_true")
    options = parser.parse_args()
    if not options.default_allocator and (wanted := allocator_variables(os.environ)):
        os.execve(sys.executable, [*sys.orig_argv], os.environ | wanted)  # read by an interpreter as it starts
    rounds = options.rounds
    torch.set_num_threads(1)
    for name, first in (("first stage", True), ("middle stage", False)):
        torch.manual_seed(0)
        stage, value = make_stage(first)
        gradient = torch.randn(SAMPLES, TOKENS, WIDTH)
        one_round(stage, value, gradient)
        times = [one_round(stage, value, gradient) for _ in range(rounds)]
        low, middle, high = statistics.quantiles([(i + w) / full for full, i, w in times], n=4)
        full, in_i, in_w = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{name}: (I + W) / B = {middle:.3f} (quartiles {low:.3f} .. {high:.3f}); "
            f"B {full:.1f} ms, I {in_i:.1f} ms, W {in_w:.1f} ms"
        )


if __name__ == "__main__":
    main()
