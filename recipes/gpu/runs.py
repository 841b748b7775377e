"""The runs of this recipe, as the overrides of ``runner train``: what is measured, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PARTS", "Part", "malevich", "plain_words"]

_STEPS = 30
_SIZE = {"layers": 8, "width": 1024, "sequence_length": 512, "vocab_size": 8192, "heads": 16}
_SAMPLES = 16


def _gpt(*words: str) -> list[str]:
    own = [f"model.kwargs.{name}={value}" for name, value in _SIZE.items()]
    own += [f"data.kwargs.{name}={_SIZE[name]}" for name in ("sequence_length", "vocab_size")]
    shared = [f"trainer.max_steps={_STEPS}", f"data.batch_size={_SAMPLES}", "trainer.progress=false", "logger=none"]
    return ["model=gpt", *own, *shared, *words]


def plain_words() -> list[str]:
    """The arguments of the hand-written loop on the same GPT and the same batches."""
    return [str(value) for value in (*_SIZE.values(), _SAMPLES, _STEPS)]


def malevich(layers: int) -> list[str]:
    """Malevich at full width with this many layers, one micro-batch of one sample, for a few steps."""
    words = ["recipe=rudalle_malevich", "hardware=auto", "parallelism=single", "partition=auto", "schedule=gpipe"]
    words += ["schedule.microbatches=1", "data.batch_size=1", f"model.kwargs.layers={layers}", "report=null"]
    return [
        *words,
        "trainer.max_steps=6",
        "lr_scheduler=constant",
        "trainer.val_every=null",
        "trainer.progress=false",
        "logger=none",
    ]


def _table5(optimizer: str) -> list[str]:
    words = ["recipe=rudalle_table5", "parallelism=single", "sweep={}", "sweep_without=[]", "sweep_report=null"]
    return [
        *words,
        f"optimizer={optimizer}",
        "zero.stage=0",
        "report=null",
        f"trainer.max_steps={_STEPS}",
        "lr_scheduler=constant",
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """Runs that stand in one table.

    Args:
        title: what the table shows.
        runs: the overrides of each run, by its name.
    """

    title: str
    runs: Mapping[str, list[str]]


PARTS = {
    "precision": Part(
        "One process, beside a hand-written loop in fp32; and in half precision",
        {name: _gpt(f"precision={name}") for name in ("fp32", "bf16", "bf16_mixed", "fp16", "fp16_mixed")},
    ),
    "malevich": Part("Malevich at full width: memory predicted and measured", {}),  # as many layers as fit
    "table5": Part(
        "Table 5's first column on one device",
        {name: _table5(name) for name in ("adam", "adam8bit", "fused_adam", "onebit_adam")},
    ),
    "shared": Part(
        "Ranks that share the device: their messages go through the host",
        {
            "one process": _gpt("schedule=1f1b", "schedule.microbatches=4"),
            "two stages": _gpt("schedule=1f1b", "schedule.microbatches=4", "parallelism.pipeline=2"),
            "two replicas": _gpt("schedule.microbatches=2", "parallelism.data=2"),
        },
    ),
    "offload": Part(
        "Activations on the host",
        {name: _gpt(f"offload={name}") for name in ("none", "activations_save_on_cpu")},
    ),
    "checkpoints": Part(
        "Checkpoints beside training",
        {
            "at the end": _gpt(),
            "every 5 steps": _gpt("checkpoint.every=5"),
            "every 5 steps, asynchronous": _gpt("checkpoint=asynchronous", "checkpoint.every=5"),
        },
    ),
    "schedules": Part(
        "Four stages on one device, timed by CUDA events: they share it, so that a bubble is another rank's compute",
        {
            name: _gpt(f"schedule={name}", "schedule.microbatches=8", "parallelism.pipeline=4")
            for name in ("gpipe", "1f1b", "zb_h1")
        },
    ),
}
