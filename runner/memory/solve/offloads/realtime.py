"""The offload strategy by which ranks above their limit lend micro-batches to ranks with room."""

from __future__ import annotations

from runner.memory.solve.offload import Offload

__all__ = ["OFFLOAD"]


OFFLOAD = Offload(
    "realtime",
    lambda chain, program: program,
    source="Kim et al. 2023, BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models",
    about="ranks above memory_limit lend what they save of some micro-batches to ranks with room",
    alone=True,
    lends=True,
)
