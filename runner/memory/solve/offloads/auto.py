"""The offload strategy that takes, for each stage, the fastest program of all strategies under memory_limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.memory.solve.offload import Offload, chain_program, move_all, moving
from runner.memory.solve.strategies.auto import STRATEGY as AUTO
from runner.memory.solve.strategy import Candidate
from runner.memory.solve.values import ChainProgram, Program, Segment, StageChain

__all__ = ["OFFLOAD"]


def _candidates(chain: StageChain, program: ChainProgram) -> Iterable[Candidate]:
    """Each program once, under the name of the first strategy that offers it."""
    found: dict[Program, Candidate] = {}
    for each in _offers(chain):
        found.setdefault(each.program, each)
    return found.values()


def _offers(chain: StageChain) -> Iterator[Candidate]:
    """What every offload strategy offers that does not search for long, and every activation policy, moved or not."""
    from runner.memory.solve.offloads import OFFLOADS  # the package imports this module first

    kept = (Segment(chain.first, chain.last),)
    for offload in OFFLOADS.values():
        if offload is not OFFLOAD and offload.candidates is not None and not offload.searches:
            yield from offload.candidates(chain, kept)
    assert AUTO.candidates is not None
    for name, again in AUTO.candidates(chain):
        yield Candidate(name, again)
        yield Candidate(f"async+{name}", moving(chain_program(again), chain.indices))


OFFLOAD = Offload(
    "auto",
    move_all,
    source="the strategies among which it chooses",
    about="for each stage the fastest program of all offload strategies and activation policies under memory_limit",
    candidates=_candidates,
    alone=True,
)
