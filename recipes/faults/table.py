"""The table of a campaign: what it covered, what it found, and the bound that this gives."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from runner.recipes.faults.array import FACTORS, Row, possible_pairs
from runner.recipes.faults.campaign import Result
from runner.recipes.faults.kinds import KINDS
from runner.recipes.faults.layouts import LAYOUTS
from runner.recipes.faults.places import PLACES
from runner.recipes.faults.values import Fault, counted, listed

__all__ = ["bound", "markdown"]

_CONFIDENCE = 0.95


def bound(faults: int) -> float:
    """The largest share of failures that ``faults`` without a failure leave possible, with 95 % confidence.

    A share p of failures lets n faults pass with probability (1 - p) ** n.
    """
    return 1.0 - (1.0 - _CONFIDENCE) ** (1.0 / faults) if faults else 1.0


def markdown(results: Sequence[Result], title: str) -> str:
    """The table as Markdown."""
    rows = [(fault, result) for result in results for fault in result.chain.faults[: result.happened]]
    asked = sum(len(result.chain.faults) for result in results)
    failed = sum(len(result.failed) for result in results)
    seconds = [each for result in results for each in result.seconds]
    lines = [
        f"{counted(len(rows), 'fault')} in {counted(len(results), 'run')}; of {asked} that were asked for, "
        f"{asked - len(rows)} were not reached before the run was complete.",
        f"As promised: {len(rows) - failed}; not as promised: {failed}."
        + (f" 0 of {len(rows)} bounds the share of failures by {bound(len(rows)):.2%}." if not failed else ""),
        f"A command took {statistics.median(seconds):.1f} s in the median, all together {sum(seconds):.0f} s."
        if seconds
        else "No command was started.",
    ]
    parts = [
        f"# {title}\n",
        listed(lines),
        _coverage(results),
        _by("kind", results, lambda fault, _: fault.kind, KINDS),
    ]
    parts.append(_by("layout", results, lambda _, result: result.chain.layout, LAYOUTS))
    parts.append(_by("checkpoint", results, lambda _, result: result.chain.form))
    parts.append(_by("place", results, lambda fault, _: fault.place, PLACES))
    parts.append(_by("failed ranks are started by", results, lambda _, result: _starter(result)))
    return "\n".join([*parts, *_findings(results)])


def _starter(result: Result) -> str:
    return "the command" if result.chain.restarts else "the next command"


def _coverage(results: Sequence[Result]) -> str:
    """How many of all pairs of values of two factors occurred."""
    possible = Counter(_names(pair) for pair in possible_pairs())
    met: set[tuple[tuple[int, str | int], ...]] = set()
    for result in results:
        for fault in result.chain.faults[: result.happened]:
            met |= Row(fault, result.chain.layout, result.chain.form).pairs
    found = Counter(_names(pair) for pair in met)
    lines = ["| pairs of | covered | possible |", "|---|---|---|"]
    lines += [f"| {name} | {found[name]} | {count} |" for name, count in sorted(possible.items())]
    return "\n".join(lines) + "\n"


def _names(pair: tuple[tuple[int, str | int], ...]) -> str:
    return " x ".join(FACTORS[index] for index, _ in pair)


def _by(what: str, results: Sequence[Result], of: Callable[[Fault, Result], str], order: Iterable[str] = ()) -> str:
    injected: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for result in results:
        for index, fault in enumerate(result.chain.faults):
            (injected if index < result.happened else missed)[of(fault, result)] += 1
        for fault in result.failed:
            failed[of(fault, result)] += 1
    names = list(dict.fromkeys([*order, *sorted(injected.keys() | missed.keys())]))
    lines = [f"| {what} | injected | not as promised | not reached |", "|---|---|---|---|"]
    lines += [f"| {name} | {injected[name]} | {failed[name]} | {missed[name]} |" for name in names]
    return "\n".join(lines) + "\n"


def _findings(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        for number, line in result.findings:
            chain = result.chain
            after = f", after {chain.faults[number - 1]}" if number and chain.faults else ""
            yield f"- chain {chain.name} ({chain.layout}, {chain.form}){after}: {line}"
