"""Plans a chain of very many layers in groups of consecutive layers, for solvers whose time grows with a power of them.

A group is kept or run again as a whole. What it costs is added up from its layers; programs are priced by the layers
themselves afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from runner.memory.solve.build import equal_parts
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, StageChain
from runner.profile import LayerProfile

__all__ = ["in_groups"]


def in_groups(
    candidates: Callable[[StageChain], Iterable[Candidate]], chain: StageChain, most: int
) -> Iterator[Candidate]:
    """The candidates of a chain, or those of its groups of layers if it has more than ``most`` layers.

    Args:
        candidates: makes those of a chain; they are chain programs.
        chain: the stage.
        most: the most layers, or groups, of a chain that ``candidates`` is given.
    """
    if len(chain.layers) <= most:
        yield from candidates(chain)
        return
    groups = equal_parts(chain.first, chain.last, most)
    profile = chain.profile
    rows = [_merged(profile.layers[first : last + 1]) for first, last in groups]
    layers = (*profile.layers[: chain.first], *rows, *profile.layers[chain.last + 1 :])
    merged = replace(chain, profile=replace(profile, layers=layers, shared=()), last=chain.first + most - 1)
    for each in candidates(merged):
        assert isinstance(each.program, tuple)
        yield each._replace(program=_of_layers(each.program, groups, chain.first))


def _of_layers(program: ChainProgram, groups: Sequence[tuple[int, int]], start: int) -> ChainProgram:
    """The program of the layers in the groups of a program; the first group has the index ``start``."""
    return tuple(
        replace(
            each,
            first=groups[each.first - start][0],
            last=groups[each.last - start][1],
            inside=_of_layers(each.inside, groups, start),
        )
        for each in program
    )


def _merged(rows: Sequence[LayerProfile]) -> LayerProfile:
    """One row for consecutive layers, with what a solver for chains reads of it."""
    before, forward, unsaved, backward = 0, 0, 0, 0
    for row in rows:
        kept = before + row.saved_bytes
        forward = max(forward, kept + row.forward_transient_bytes)
        alone = row.saved_bytes + row.forward_transient_bytes if row.unsaved_forward_bytes is None else 0
        unsaved = max(unsaved, row.unsaved_forward_bytes or alone)
        backward = max(backward, kept + row.gradient_of_output_bytes + row.inner_backward_bytes)
        before = kept
    peak = backward - before - rows[-1].gradient_of_output_bytes
    return replace(
        rows[-1].with_backward(peak, peak),
        saved_bytes=before,
        forward_transient_bytes=forward - before,
        unsaved_forward_bytes=unsaved + max(row.output_bytes for row in rows[:-1] or rows),
        forward_flops=sum(row.forward_flops for row in rows),
        backward_flops=sum(row.backward_flops for row in rows),
        forward_seconds=sum(row.forward_seconds for row in rows),
        backward_seconds=sum(row.backward_seconds for row in rows),
    )
