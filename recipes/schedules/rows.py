"""The table's rows: what is compared, and what the survey prints of it.

The survey is Guan et al., Advances of Pipeline Model Parallelism for Deep Learning Training: An Overview, 2024; its
Table 3 compares pipelines by bubble ratio, weights and activations. D ranks, T micro-batches, v chunks per rank, Mw a
rank's share of the weights, Ma its activations of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from runner.schedule.catalogue.registry import build
from runner.schedule.values import Schedule

__all__ = ["ROWS", "Row"]

_SPLIT = "F = I = W"
_NOTHING = (False, False, False)


@dataclass(frozen=True)
class Row:
    """One schedule of the table.

    Args:
        schedule: its name.
        chunks: per rank.
        printed: bubble ratio and activations in the survey's table; empty where it has no such row.
        condition: when the printed or the closed form holds, or why there is none; the table prints it, so that it must
            not be empty.
        variant: ``schedule.variant``.
        ticks: where the survey's table sees extra memory (besides activations), computation, communication; None
            where it has no such row.
        undecided: the ticks on which these measurements say nothing: ``weights``, ``flops`` or ``sent``.
    """

    schedule: str
    chunks: int
    printed: tuple[str, str] | tuple[()] = ()
    condition: str = ""
    variant: str | None = None
    ticks: tuple[bool, bool, bool] | None = None
    undecided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.condition:
            raise ValueError(
                f"the row {self.label} must have its condition, which the table prints: when its form holds, or why it "
                f'has none, as in Row("{self.schedule}", {self.chunks}, condition="Greedy: no closed form.")'
            )

    @property
    def label(self) -> str:
        """Name, with the variant, and with the chunks where there are several."""
        name = f"{self.schedule} {self.variant}" if self.variant else self.schedule
        return name + (f", v = {self.chunks}" if self.chunks > 1 else "")

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule itself."""
        return build(self.schedule, ranks=ranks, microbatches=microbatches, chunks=self.chunks, variant=self.variant)


ROWS = (
    Row("naive", 1, ("(D-1)/D", "Ma"), "The survey's baseline: one micro-batch at a time; holds for any F : B."),
    Row("gpipe", 1, ("(D-1)/(T+D-1)", "T Ma"), "Exact for any F : B where messages take no time.", ticks=_NOTHING),
    Row(
        "1f1b",
        1,
        ("(D-1)/(D+T-1)", "[Ma, D Ma]"),
        "DAPPLE's row. Exact for any F : B, also for T < D; rank r holds min(T, D-r) Ma, so that the printed range is "
        "over the ranks where T >= D.",
        ticks=_NOTHING,
    ),
    Row(
        "bpipe",
        1,
        (),
        "1f1b's order; with T >= D no rank keeps more than D/2 + 1 micro-batches: ranks of the first half lend some to "
        "their partners, and take each back one action before its backward.",
    ),
    Row("1f1b_eager", 1, (), "DAPPLE's policy B; the same bubble as 1f1b, less of it where messages take time."),
    Row(
        "interleaved_1f1b",
        2,
        ("(D-1)/(vT)", "T Ma"),
        "Megatron's row. The printed ratio is idle / ideal, unlike the other rows; as idle / total it is "
        "(D-1)/(vT+D-1). The printed T Ma is right for T = D alone; else rank 0 holds (D + (D-1)/v) Ma. The schedule "
        "is in Megatron's paper of 2021, the survey cites that of 2019.",
        ticks=(False, False, True),
    ),
    Row("looped_bfs", 2, (), "(D-1)/(vT+D-1) for T >= D; T Ma on every rank."),
    Row("zb_h1", 1, (), "T >= D, W <= F and W <= I; 1f1b's peak on rank 0."),
    Row(
        "zb_h2",
        1,
        ("~0 %", "(2D-1) Ma"),
        f"The printed 0 needs {_SPLIT}, T >= 2D-1 and no barrier before the optimizer step (the columns of steps in a "
        "row); with a barrier it takes zb_h1's time with almost twice its memory. Activations exact on rank 0. "
        "The computation that the survey ticks is that of steps which are taken back; no step of this run is, and an "
        "optimizer's update is no matrix product, so that the counted products neither confirm nor contradict it.",
        ticks=(False, True, False),
        undecided=("flops",),
    ),
    Row("zb_auto", 1, (), "Found by search under a limit of D micro-batches per rank: no closed form."),
    Row("zb_v", 2, (), f"{_SPLIT}, B = I + W and T >= 2D-1; no idle time between a rank's first and last action."),
    Row("v_half", 2, (), f"{_SPLIT}, B = I + W and T > D; D // 2 + 1 is exact, the paper's bubble is approximate."),
    Row("v_min", 2, (), f"{_SPLIT}, B = I + W and T >= D; suffers most where the three differ."),
    Row("dualpipe_v", 2, (), f"{_SPLIT}, B = I + W and T >= 2D; pairs of F and B run one after the other."),
    Row("hanayo", 2, (), "One wave; the order is greedy: no closed form."),
    Row("hanayo", 4, (), "Two waves; the order is greedy: no closed form."),
    Row(
        "gems",
        1,
        ("~(D-1)/(D+1/2)", "Ma"),
        "Micro-batches down and up in turn, one at a time; weights 2 Mw. The printed ratio is the limit for many "
        "micro-batches and B = 2 F; with B = F it is (D-1)/(D+1).",
        ticks=(True, False, True),
    ),
    Row(
        "chimera",
        1,
        ("(D-2)/(2T+D-2)", "[(D/2+1) Ma, D Ma]"),
        "Two pipelines, T / D units one after the other; weights 2 Mw. The printed ratio is that of B = F; with "
        "B = 2 F the units leave gaps between them, (T/D + 1) (D-2) F in all. Activations exact.",
        ticks=(True, False, True),
    ),
    Row(
        "chimera",
        1,
        (),
        "Where B = 2 F, forwards of two micro-batches close the gaps between units: (D-2)/(1.5T+D-2), for twice the "
        "activations.",
        "doubling",
    ),
    Row(
        "chimera",
        1,
        (),
        "Where B = 2 F, backwards of half a micro-batch do the same without more activations: (D-2)/(3T+D-2).",
        "halving",
    ),
    Row("dualpipe", 1, (), f"{_SPLIT} and B = I + W; weights 2 Mw; pairs of F and B run one after the other."),
    Row("bitpipe", 2, (), "Two Vs; weights 2 Mw. Half of chimera's bubble, between its units too."),
    Row(
        "pipefb",
        1,
        (),
        "A reconstruction. Backwards on other ranks, recomputed; weights (2 D - 1) / D Mw; found by list scheduling.",
    ),
    Row("varuna", 1, (), "Recomputation counts as work, not as idle time; no closed form here."),
)
