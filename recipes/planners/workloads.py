"""What the planners are asked: requests of four models, each on machines that are named and not at hand."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """A request that leaves its layout open.

    Args:
        name: how tables call it.
        told: what it is.
        words: the request without its layout.
    """

    name: str
    told: str
    words: tuple[str, ...]


def _gpt(layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> tuple[str, ...]:
    sizes = {"layers": layers, "width": width, "heads": heads, "sequence_length": tokens, "vocab_size": vocabulary}
    data = {key: sizes[key] for key in ("sequence_length", "vocab_size")}
    of_model = (f"model.kwargs.{key}={value}" for key, value in sizes.items())
    return "model=gpt", *of_model, *(f"data.kwargs.{key}={value}" for key, value in data.items())


_ON_A100 = "hardware=a100_80gb", "precision=bf16_mixed"

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "GPT",
        "12 blocks of 768, 1,024 tokens, 32 samples on 4 A100",
        (*_gpt(12, 768, 12, 1024, 50304), "data.batch_size=32", "parallelism.ranks=4", *_ON_A100),
    ),
    Workload(
        "VGG",
        "13 convolutions and 3 linear layers, 256 images on 4 V100",
        (
            "model=custom",
            "model.target=runner.recipes.planners.models:convolutional",
            "data=custom",
            "data.target=runner.recipes.planners.models:images",
            "data.batch_size=256",
            "loss=cross_entropy",
            "parallelism.ranks=4",
            "hardware=v100_32gb",
        ),
    ),
    Workload(
        "ruDALL-E",
        "Malevich, 24 blocks of 2,048 with eager attention, 64 pictures of 1,152 tokens on 8 V100",
        (
            "model=rudalle_malevich",
            "data.kwargs.image_size=256",
            "data.kwargs.grid=32",
            "data.kwargs.codes=8192",
            "data.kwargs.text_length=128",
            "data.kwargs.text_vocab=16384",
            "data.batch_size=64",
            "parallelism.ranks=8",
            "precision=fp16_mixed",
            "hardware=v100_32gb",
        ),
    ),
    Workload(
        "7B",
        "32 blocks of 4,096, 2,048 tokens, 512 samples on 8 A100",
        (*_gpt(32, 4096, 32, 2048, 32000), "data.batch_size=512", "parallelism.ranks=8", *_ON_A100),
    ),
    Workload(
        "70B",
        "80 blocks of 8,192, 2,048 tokens, 512 samples on 8 nodes of 8 A100",
        (
            *_gpt(80, 8192, 64, 2048, 32000),
            "data.batch_size=512",
            "parallelism.ranks=64",
            "launcher=slurm",
            "launcher.nodes=8",
            *_ON_A100,
        ),
    ),
)
