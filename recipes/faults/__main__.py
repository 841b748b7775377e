"""The fault campaign: breaks runs in every way that we know, resumes them, and compares them with unbroken ones.

    python -m runner.recipes.faults --faults 1000 --seed 0
    python -m runner.recipes.faults --faults 60 --broken "directory sync"
    python -m runner.recipes.faults --faults 6 --kinds "hang with the lock" --layouts single --deadline 45 \\
        --broken heartbeat
    python -m runner.recipes.faults --faults 1000 --seed 0 --chain 17   # again, and keep its folder

The exit status is 0 if everything was as promised, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.recipes.faults.array import chains, rows
from runner.recipes.faults.campaign import Result, Settings, run_chain, run_unbroken
from runner.recipes.faults.commands import IMPORTS
from runner.recipes.faults.figures import draw
from runner.recipes.faults.inside import BROKEN
from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.layouts import LAYOUTS
from runner.recipes.faults.table import markdown
from runner.recipes.faults.values import Chain

__all__ = ["campaign", "main"]


def campaign(asked: Sequence[Chain], settings: Settings, lanes: int = 1) -> list[Result]:
    """Run chains, ``lanes`` at a time, each lane in a process of its own.

    Raises:
        RuntimeError: a run without a fault failed, or a lane died.
    """
    for module in IMPORTS:
        importlib.import_module(module)
    if any(LAYOUTS[chain.layout].words[-1].startswith("zero") for chain in asked):
        importlib.import_module("runner.launch.local.template").import_deepspeed()
    settings.out.mkdir(parents=True, exist_ok=True)
    results = settings.out / "results.jsonl"
    results.unlink(missing_ok=True)
    runs = sorted({(chain.layout, chain.form) for chain in asked})
    _in_lanes(lanes, lambda lane: _unbroken(runs[lane::lanes], settings))
    _in_lanes(lanes, lambda lane: _lane(asked[lane::lanes], settings, results))
    if not results.exists():
        return []
    found = [Result.from_json(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda result: (result.chain.number, result.chain.first))


def _unbroken(runs: Sequence[tuple[str, str]], settings: Settings) -> None:
    for layout, form in runs:
        if problems := run_unbroken(layout, form, settings):
            raise RuntimeError(f"{layout}, {form}: the run without a fault failed: {problems}")


def _lane(asked: Sequence[Chain], settings: Settings, results: Path) -> None:
    for result in itertools.chain.from_iterable(run_chain(chain, settings) for chain in asked):
        with results.open("a", encoding="utf-8") as file:
            file.write(result.to_json() + "\n")
        chain = result.chain
        name = f"chain {chain.name} ({chain.layout}, {chain.form})"
        told = f"{name}: {result.happened} of {len(chain.faults)} faults, {sum(result.seconds):.1f} s"
        print(told, *(f"  after fault {number}: {line}" for number, line in result.findings), sep="\n", flush=True)


def _in_lanes(lanes: int, work: Callable[[int], None]) -> None:
    """Call ``work`` in forked processes, which have one thread each, as processes that fork must."""
    children = []
    for lane in range(lanes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(lane)
                status = 0
            except BaseException as error:
                print(f"lane {lane}: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise RuntimeError("a lane of the campaign failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign from the command line."""
    options = _options().parse_args(argv)
    kinds = [kind for kind in KINDS if any(word in kind for word in options.kinds)] if options.kinds else []
    asked = chains(rows(options.faults, options.seed, kinds, options.layouts), options.seed)
    if options.chain is not None:
        asked = [asked[options.chain]]
    out = options.out.absolute()
    keep = options.chain is not None
    settings = Settings(out, options.patience, options.broken, keep=keep, deadline=options.deadline)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and so would the commands and their ranks
    begun = time.monotonic()
    results = campaign(asked, settings, min(options.lanes, len(asked)))
    words = itertools.chain(["python -m runner.recipes.faults"], sys.argv[1:] if argv is None else argv)
    title = f"{' '.join(words)}: {(time.monotonic() - begun) / 60:.1f} minutes"
    table = markdown(results, title)
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    draw(out / "table.svg", results)
    print(table)
    return int(any(result.findings for result in results))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=2, help="runs at a time")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on limits of time, on a busy machine")
    parser.add_argument("--deadline", type=float, help="seconds of a command, in place of those of its faults' answers")
    parser.add_argument("--broken", choices=("", *BROKEN), default="", help="switch off what the campaign must miss")
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds with one of these words in their names")
    parser.add_argument("--layouts", nargs="*", choices=tuple(LAYOUTS), default=[])
    parser.add_argument("--chain", type=int, help="only this one, and keep its folder")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
