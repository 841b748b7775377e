"""The hand-written loop on one device.

    python -m runner.recipes.gpu.plain LAYERS WIDTH LENGTH VOCAB HEADS SAMPLES STEPS

It prints the median seconds of a step as JSON, without the first five steps.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
from torch import nn

from runner.recipes.benchmarks.workload import GptSize, cross_entropy, gpt_batches, gpt_layers, make_adamw

__all__ = ["main"]

_WARM = 5


def main(layers: int, width: int, length: int, vocab: int, heads: int, samples: int, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    size = GptSize(layers, width, length, vocab, heads)
    model = nn.Sequential(*gpt_layers(size, 0)).to(device)
    optimizer = make_adamw(list(model.parameters()))
    seconds = []
    for inputs, targets in gpt_batches(size, samples, steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        last = loss.item()  # waits for the device, as the runner does once per step
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": median(seconds[_WARM:]), "loss": last}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:8]))
