"""What two ranks send for an AlexNet: as replicas, by one weird trick, and with all layers divided.

    python -m runner.recipes.tensor.trick [--out FOLDER] [--write-readme]

A net of an eighth of the channels is trained two steps in each way; of the whole one, plans are made. Runs that are
already in the folder are not repeated.

Source: Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks; Krizhevsky, Sutskever and
Hinton 2012 (the net, without its dropout).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runner.config.compose.resolve import resolve
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.recipes.finetune.commands import train
from runner.recipes.schedules.tables import replace_block
from runner.record import RunRecord

__all__ = ["WAYS", "Net", "Size", "build", "counted", "data", "formula_bytes", "main", "markdown", "planned"]

_CLASSES, _FP32 = 1000, 4
_TARGETS = {"model": "build", "data": "data"}
_MAPS = "classifier.0: {first}, classifier.2: {second}, classifier.4: {third}"
_TRICK = f"{{{_MAPS.format(first='column', second='row', third='column_gathered')}}}"
_ALL = (
    "{features.0: column, features.3: row, features.6: column, features.8: row, features.10: column, "
    f"{_MAPS.format(first='row', second='column', third='row')}}}"
)
WAYS: Mapping[str, tuple[str, ...]] = {
    "replicas": ("parallelism.data=2",),
    "one weird trick": ("parallelism=weird_trick", f"parallelism.sharding={_TRICK}"),
    "all divided": ("parallelism.tensor=2", f"parallelism.sharding={_ALL}"),
}
"""The overrides of each way."""


@dataclass(frozen=True)
class Size:
    """The net's channels, as a fraction 1 / scale; the side of its square images; and the samples of a step."""

    scale: int = 1
    side: int = 224
    samples: int = 8


class Net(nn.Module):
    """Images [samples, 3, side, side] to logits [samples, 1000]."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        first, second, third, last, hidden = (each // scale for each in (64, 192, 384, 256, 4096))
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(second, third, 3, padding=1), nn.ReLU(),
            nn.Conv2d(third, last, 3, padding=1), nn.ReLU(),
            nn.Conv2d(last, last, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(last * 36, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, _CLASSES)
        )

    def forward(self, images: Tensor) -> Any:
        return self.classifier(torch.flatten(self.features(images), 1))


def build(scale: int = 1) -> Net:
    """The model of a request."""
    return Net(scale)


def data(side: int = 224, samples: int = 32) -> TensorDataset:
    """Random images and classes; few, which a step may take several times."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, side, side, generator=draws).expand(samples, -1, -1, -1)
    return TensorDataset(images, torch.randint(_CLASSES, (samples,), generator=draws))


def formula_bytes(size: Size, way: str) -> int:
    """What both ranks together send in a step; of n bytes that two ranks sum, each sends n, of n gathered ones n / 2.

    Replicas sum all gradients. By the trick, they sum those of the convolutions; what these make is gathered for the
    maps, and its gradient shared out; the first map's output is divided, the second one's summed, and so is the
    gradient of what the third one reads; the loss takes parts of the logits and exchanges three numbers for a sample.
    With all divided, what every second convolution or map makes is summed, and the gradient of what the others read.
    """
    net = Net(size.scale)
    made = dict(_elements(net, size.side))
    convolutions = sum(each.numel() for each in net.features.parameters())
    first: Any = net.classifier[0]
    flat, hidden = first.in_features, first.out_features
    elements: int
    if way == "replicas":
        elements = 2 * sum(each.numel() for each in net.parameters())
    elif way == "one weird trick":
        elements = 2 * convolutions + size.samples * (2 * flat + 4 * hidden + 6)
    else:
        sums = made["features.3"] + made["features.8"] + hidden + _CLASSES
        gradients = made["features.5"] + made["features.8"] + hidden
        elements = 2 * size.samples * (sums + gradients)
    return elements * _FP32


def _elements(net: Net, side: int) -> Iterator[tuple[str, int]]:
    """The elements that each of the features makes of one image."""
    with torch.device("meta"):
        value, shadow = torch.empty(1, 3, side, side), net.features.to("meta")
    for name, each in shadow.named_children():
        value = each(value)
        yield f"features.{name}", value.numel()


def _words(size: Size, way: str) -> tuple[str, ...]:
    targets = (f"{section}.target=runner.recipes.tensor.trick:{name}" for section, name in _TARGETS.items())
    kwargs = f"+model.kwargs.scale={size.scale}", f"+data.kwargs.side={size.side}"
    samples = f"+data.kwargs.samples={size.samples}", f"data.batch_size={size.samples}"
    return (
        "model=custom",
        "data=custom",
        "loss=cross_entropy",
        *targets,
        *kwargs,
        *samples,
        "optimizer=sgd",
        "device=cpu",
        *WAYS[way],
    )


def planned(size: Size, way: str) -> int:
    """What the plan of a request says that both ranks send in a step."""
    config = resolve([*_words(size, way), "hardware=laptop_cpu", "memory_limit=4TB"])
    plan = make_plan(config, profile_model(config))
    return int((plan.tensor_bytes_sent or 0) + (plan.gradient_bytes_sent or 0))


def counted(size: Size, way: str, folder: Path) -> int:
    """What both ranks have sent in a step of a run of two."""
    if not (folder / "record.json").exists():
        quiet = ("trainer.max_steps=2", "logger=none", "trainer.progress=false", "checkpoint=none")
        train(folder, *_words(size, way), *quiet)
    moved = RunRecord.load(folder).bytes_moved
    return int(moved["tensor"] + moved["weight_gradients"])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = ["| channels | samples | way | sent in a step | | by formula |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        sent = f"{row['sent']:,} | {row['by']} | {row['formula']:,}"
        lines.append(f"| 1/{row['scale']} | {row['samples']} | {row['way']} | {sent} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/tensor"))
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    asked = parser.parse_args(arguments)
    rows = []
    for size in (Size(8, 96), Size(samples=128), Size(samples=4096)):
        for way in WAYS:
            small = size.scale > 1
            folder = asked.out / f"trick_{way.replace(' ', '_')}"
            sent = counted(size, way, folder) if small else planned(size, way)
            about = {"scale": size.scale, "samples": size.samples, "way": way, "by": "counted" if small else "planned"}
            rows.append({**about, "sent": sent, "formula": formula_bytes(size, way)})
    print(markdown(rows))
    if asked.write_readme:
        replace_block(Path(__file__).parent / "README.md", "trick", markdown(rows))


if __name__ == "__main__":
    main()
