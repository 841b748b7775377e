"""Tables of weights in the host's memory, and of how large a GPT one device trains, in one command.

python -m runner.recipes.offloading.weights [--links …] [--steps N] [--budget BYTES] [--write-readme]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from runner.config.compose.resolve import resolve
from runner.config.units import format_bytes
from runner.errors import RequestError
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import LayerProfile, ModelProfile
from runner.profiling.model import profile_model
from runner.recipes.finetune.commands import train
from runner.recipes.offloading.measure import FLOPS_PER_SECOND
from runner.recipes.schedules.tables import markdown_table, replace_block

__all__ = ["largest_width", "main", "sizes", "strategies"]

_LINKS = (0.5e9, 1e9, 4e9, 16e9)
_BLOCKS = 8
_STAGES = _BLOCKS + 2  # with the embedding and the head, each a layer
_COUNTED_STEPS = 3  # of a run whose bytes are counted; only the first ones have no optimizer states yet
_PROFILED = ("model", "data", "device", "adapter", "schedule.microbatches")  # words on which a profile depends
_STEP_OF_WIDTH = 16  # widths are multiples of it, as every head has a quarter

Words = tuple[str, ...]

_GPT: Words = (
    "model=gpt", f"model.kwargs.layers={_BLOCKS}", "model.kwargs.vocab_size=128", "model.kwargs.sequence_length=32",
    "data.kwargs.vocab_size=128", "data.kwargs.sequence_length=32", "data.batch_size=8", "schedule.microbatches=4",
    "device=cpu", "logger=none",
)  # fmt: skip
_L2L: Words = (
    "offload=weights_l2l", "schedule=looped_bfs", f"schedule.chunks={_STAGES}", "activation_checkpoint=full",
)  # fmt: skip
_LORA: Words = ("adapter=lora", "adapter.targets=[query_key_value,up,down]")
_FROZEN: Words = (*_LORA, "offload=weights_blockswap", f"offload.blocks={_BLOCKS}", "offload.frozen_only=true")
_BOTH: Words = ("offload=activations_greedy", "offload.scope=all")

STRATEGIES: Mapping[str, Words] = {
    "none": (),
    "none, layers run again": ("activation_checkpoint=full",),
    "granular, half": ("offload=weights_granular", "offload.fraction=0.5"),
    "granular, all": ("offload=weights_granular", "offload.fraction=1.0"),
    "blockswap, 2 blocks": ("offload=weights_blockswap", "offload.blocks=2"),
    "blockswap, all blocks": ("offload=weights_blockswap", f"offload.blocks={_BLOCKS}"),
    "l2l": _L2L,
    "activations and weights, 6 MB": (*_BOTH, "memory_limit=6000000"),
}
SIZES: Mapping[str, Words] = {
    "none": (),
    "layers run again (`activation_checkpoint=auto`)": ("activation_checkpoint=auto",),
    "activations moved (`offload=activations_pofo`)": ("offload=activations_pofo",),
    "both (`offload=auto`)": ("offload=auto",),
    "ZeRO-Offload (`zero=offload`)": ("zero=offload",),
    "weights moved (`offload=weights_granular`)": ("offload=weights_granular",),
    "activations and weights moved (`offload=activations_greedy offload.scope=all`)": _BOTH,
    "the same, layers run again (`activation_checkpoint=full`)": (*_BOTH, "activation_checkpoint=full"),
    "`offload=weights_l2l`": _L2L,
    "frozen weights moved, LoRA trained (`offload=weights_blockswap`)": _FROZEN,
}


def strategies(
    links: Sequence[float], steps: int, options: Mapping[str, Words] = STRATEGIES, model: Words = _GPT
) -> list[dict[str, Any]]:
    """A row for each strategy and link: predicted and counted bytes, and the time as a part of that without moves.

    Args:
        links: bytes per second.
        steps: steps that are timed with each link; 0: none, and bytes alone are counted.
        options: overrides by the strategy's name; those without ``offload`` move nothing, and have one row.
        model: the overrides of all.
    """
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for name, words in options.items():
        moves = any(word.startswith("offload") for word in words)
        counted = _counted(*model, *words)
        for link in links if moves else [None]:
            slow = () if link is None else (f"offload.bytes_per_second={link:g}",)
            plan = _planned(*model, *words, *slow)
            row = {"strategy": name, "link": link, **_bytes(plan, counted), "seconds": plan.time.step_seconds}
            if steps:
                row["measured"] = _counted(*model, *words, *slow, steps=steps)["step_seconds"]["median"]
            if not rows:
                alone = {key: row[key] for key in ("seconds", "measured") if key in row}
            rows.append(row | {key: row[key] / base for key, base in alone.items()})
    return rows


def sizes(budget: int, options: Mapping[str, Words] = SIZES, model: Words = _GPT) -> list[dict[str, Any]]:
    """For each option the largest width whose plan fits, and the peak of a run with it.

    Args:
        budget: bytes that the device has.
        options: overrides by the option's name.
        model: the overrides of all.

    Raises:
        RuntimeError: a run needed more than the budget.
    """
    rows = []
    for name, words in options.items():
        limited = (*model, *words, f"memory_limit={budget}")
        width = largest_width(lambda each, asked=limited: _fits(*asked, _wide(each)), _STEP_OF_WIDTH)  # type: ignore[misc]
        if not width:
            rows.append({"option": name, "width": 0})
            continue
        plan = _planned(*limited, _wide(width))
        # The run's own plan has measured seconds, with which a policy may choose another program.
        predicted, counted = (max(peaks) for peaks in _peaks(_counted(*limited, _wide(width))))
        if counted > budget:
            raise RuntimeError(f"{name}: width {width} needs {counted} bytes, and {budget} are there")
        parameters = sum(layer.num_parameters for layer in plan.profile.layers)
        row = {"option": name, "width": width, "parameters": parameters, "predicted": predicted, "counted": counted}
        rows.append(row)
    return rows


def _peaks(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The predicted and the measured peaks of a run's ranks."""
    peaks = record["peak_memory_bytes"]
    return peaks["predicted"], peaks["measured"]


def largest_width(fits: Callable[[int], bool], step: int) -> int:
    """The largest multiple of ``step`` that fits, if all smaller ones do; 0 if none does."""
    if not fits(step):
        return 0
    good, bad = 1, 2
    while fits(bad * step):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    return good * step


def _wide(width: int) -> str:
    return f"model.kwargs.width={width}"


def _fits(*words: str) -> bool:
    try:
        return _planned(*words).fits
    except RequestError:  # no program fits, and the plan says so at once
        return False


def _planned(*words: str) -> RunPlan:
    profiled = (word for word in words if word.startswith(_PROFILED))
    return make_plan(resolve(list(words)), _profile(*profiled))


@cache
def _profile(*words: str) -> ModelProfile:
    """The model's profile on a device of a given speed: seconds are in proportion to FLOPs."""
    profile = profile_model(resolve(list(words)))

    def timed(layer: LayerProfile) -> LayerProfile:
        forward, backward = layer.forward_flops / FLOPS_PER_SECOND, layer.backward_flops / FLOPS_PER_SECOND
        return replace(layer, forward_seconds=forward, backward_seconds=backward)

    return replace(profile, layers=tuple(map(timed, profile.layers)), loss=timed(profile.loss))


def _counted(*words: str, steps: int = _COUNTED_STEPS) -> dict[str, Any]:
    """The record of a run."""
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder) / "run", *words, f"trainer.max_steps={steps}").record


def _bytes(plan: RunPlan, record: Mapping[str, Any]) -> dict[str, Any]:
    moved = record["bytes_moved"]
    return {
        "predicted_bytes": max(plan.peak_memory_bytes),
        "counted_bytes": max(record["peak_memory_bytes"]["measured"]),
        "predicted_moved": round(sum(plan.host_weight_bytes) + 2 * plan.host_activation_bytes),
        "counted_moved": round(sum(num_bytes for kind, num_bytes in moved.items() if kind.startswith("host_"))),
    }


def _strategies_table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["strategy", "peak, predicted", "counted", "moved, predicted", "counted", "link", "time, predicted"]
    timed = ["measured"] if "measured" in rows[0] else []
    keys = ("predicted_bytes", "counted_bytes", "predicted_moved", "counted_moved")
    return markdown_table(
        [*header, *timed],
        [
            [
                row["strategy"],
                *(f"{row[key]:,}" for key in keys),
                "-" if row["link"] is None else f"{row['link'] / 1e9:g} GB/s",
                *(f"{row[key]:.3f}" for key in ("seconds", *timed)),
            ]
            for row in rows
        ],
    )


def _sizes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = ("width", "parameters", "predicted", "counted")
    header = ["option", "largest width", "parameters", "peak, predicted", "counted"]
    return markdown_table(header, [[row["option"], *(f"{row.get(key, 0):,}" for key in keys)] for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan and run, and print the tables or write them."""
    parser = argparse.ArgumentParser(prog="python -m runner.recipes.offloading.weights")
    parser.add_argument("--links", nargs="+", type=float, default=list(_LINKS), help="bytes per second")
    parser.add_argument("--steps", type=int, default=0, help="steps that are timed; 0: bytes alone are counted")
    parser.add_argument("--budget", type=int, default=16_000_000, help="bytes of the device in the second table")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into the recipe's README")
    asked = parser.parse_args(arguments)
    found = {"strategies": strategies(asked.links, asked.steps), "sizes": sizes(asked.budget)}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    tables = {
        "weights": _strategies_table(found["strategies"]),
        "sizes": f"The device has {format_bytes(asked.budget)}.\n\n{_sizes_table(found['sizes'])}",
    }
    for name, table in tables.items():
        if asked.write_readme:
            replace_block(Path(__file__).parent / "README.md", name, table)
        else:
            print(table, end="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
