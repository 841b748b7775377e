"""Names, aliases, files and what is refused, each with its message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from runner.errors import Problem, RequestError
from runner.schedule import ALIASES, NAMES, SPECS, Costs, Schedule, build, check, problems_of, simulate
from runner.schedule.render import to_csv


def test_alias() -> None:
    assert ALIASES["dapple"] == "1f1b"
    assert build("dapple", ranks=3, microbatches=4) == build("1f1b", ranks=3, microbatches=4)
    assert set(NAMES) == {*SPECS, *ALIASES}


@pytest.mark.parametrize(
    ("request_", "path", "says"),
    [
        ({"name": "gpip"}, "schedule", "Did you mean gpipe. Try schedule=gpipe."),
        ({"name": "zzz"}, "schedule", f"must be one of {', '.join(NAMES)}."),
        ({"name": "avgpipe", "pipes": 3}, "schedule.microbatches", "must be a multiple of schedule.pipes. Each of 3"),
        ({"name": "avgpipe", "variant": "halving"}, "schedule.variant", "must be one of easgd, updates"),
        (
            {"name": "hetpipe", "wave": 3, "microbatches": 1},
            "schedule.wave",
            "must be at least 1 + (D - 1) / T, rounded up",
        ),
        ({"name": "1f1b", "ranks": 0}, "parallelism.pipeline", "parallelism.pipeline = 0: must be at least 1."),
        ({"name": "1f1b", "microbatches": -1}, "schedule.microbatches", "must be at least 1. Try schedule.microb"),
        ({"name": "1f1b", "chunks": 0}, "schedule.chunks", "must be at least 1"),
        (
            {"name": "1f1b", "chunks": 2},
            "schedule.chunks",
            "must be 1 or null. There is no other 1f1b of 4 ranks",
        ),
        ({"name": "dapple", "file": "x.csv"}, "schedule.file", "applies to schedule=from_file only"),
        ({"name": "from_file"}, "schedule.file", "schedule.file = null: must name a file"),
        (
            {"name": "zb_v", "ranks": 1},
            "parallelism.pipeline",
            "naive, gpipe, 1f1b, looped_bfs, auto mean accumulation there. Try",
        ),
        ({"name": "zb_h2", "microbatches": 3}, "schedule.microbatches", "nearest is 7. Try schedule.microbatches=7."),
        ({"name": "dualpipe_v", "microbatches": 7}, "schedule.microbatches", "must be at least 2 D. There is no other"),
        ({"name": "hanayo", "chunks": 3}, "schedule.chunks", "must be even or null, two for each wave. There is no "),
        ({"name": "hanayo", "chunks": 1}, "schedule.chunks", "nearest is 2. Try schedule.chunks=2."),
        (
            {"name": "dualpipe", "ranks": 5, "microbatches": 10},
            "parallelism.pipeline",
            "nearest are 4 and 6. Try paral",
        ),
        ({"name": "chimera", "microbatches": 6}, "schedule.microbatches", "nearest are 4 and 8. Try schedule.micro"),
        ({"name": "chimera", "pipes": 3}, "schedule.pipes", "must be 2 f, where f divides D / 2. As many pipelines"),
        ({"name": "chimera", "variant": "x"}, "schedule.variant", "must be one of concatenation, doubling, halving."),
        (
            {"name": "chimera", "variant": "doubling", "microbatches": 12},
            "schedule.microbatches",
            "must be a multiple of 2 D for schedule.variant=doubling. A unit is 2 D micro-batches",
        ),
        ({"name": "bpipe", "ranks": 3}, "parallelism.pipeline", "must be even. There is no bpipe of 3 ranks"),
        (
            {"name": "pipefisher", "base": "chimera"},
            "schedule.base",
            "hold each stage twice, and each copy sees a part",
        ),
        ({"name": "pipefisher", "base": "zb_h1"}, "schedule.base", "must be one of 1f1b, gpipe. Its work needs whole"),
        ({"name": "pipefisher", "ranks": 1}, "parallelism.pipeline", "must be at least 2 for schedule=pipefisher"),
        ({"name": "1f1b", "base": "gpipe"}, "schedule.base", "applies to schedule=pipefisher only"),
        ({"name": "1f1b", "variant": "x"}, "schedule.variant", "applies to schedule=chimera or avgpipe only"),
        (
            {"name": "zb_h1", "memory_limit": 3},
            "schedule.memory_limit",
            "schedule=zb_auto or varuna or auto only",
        ),
    ],
)
def test_refusals(request_: dict[str, object], path: str, says: str) -> None:
    asked: dict[str, Any] = {"ranks": 4, "microbatches": 8, **request_}
    name = asked.pop("name")
    problems = problems_of(name, **asked)
    assert [problem.path for problem in problems] == [path]
    assert says in problems[0].line()
    with pytest.raises(RequestError) as caught:
        build(name, **asked)
    assert caught.value.problems == tuple(problems)


def test_all_problems_at_once() -> None:
    found = problems_of("gpipe", ranks=0, microbatches=0, chunks=0)
    assert {problem.path for problem in found} == {"parallelism.pipeline", "schedule.microbatches", "schedule.chunks"}


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_has_each_stage_on_one_rank(tmp_path: Path) -> None:
    file = _file(tmp_path, to_csv(build("pipefb", ranks=4, microbatches=2)))
    found = problems_of("from_file", ranks=4, microbatches=2, file=file)
    assert "stage 0 must be on one rank, but ranks 0 and 3 both have it" in found[0].line()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, spec in SPECS.items()
        if name not in ("from_file", "pipefb", "pipefisher") and spec.kind == "synchronous"
    ],
)
def test_csv_round_trip(name: str, tmp_path: Path) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    again = build("from_file", ranks=4, microbatches=8, file=_file(tmp_path, to_csv(schedule)))
    assert again.chunks == schedule.chunks
    assert again.actions == schedule.compute, "a file says nothing of moves"
    assert again.placement == schedule.placement
    assert again.pipeline_of_microbatch == schedule.pipeline_of_microbatch
    assert to_csv(again) == to_csv(schedule)


def test_blanks_and_torchs_other_cells_say_nothing(tmp_path: Path) -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,,0RECV_B0, 0B0 ,0REDUCE_GRAD\n\n,1RECV_F0,1F0,1I0,1SEND_B0,1W0,1RESHARD\n"
    schedule = build("from_file", ranks=2, microbatches=1, file=_file(tmp_path, text))
    assert [" ".join(map(str, row)) for row in schedule.actions] == ["0F0 0B0", "1F0 1I0 1W0"]
    assert simulate(schedule, Costs()).makespan == 5  # the weight gradient runs beside the first rank's backward


def test_several_stages_per_rank(tmp_path: Path) -> None:
    text = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"
    schedule = build("from_file", ranks=2, microbatches=1, file=_file(tmp_path, text))
    assert schedule.placement == ((0, 1, 0, 1),)
    assert schedule.chunks == 2
    assert check(schedule) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0\n1F0,1B0\n", "rank 0, cell 1 (0X0): must be <stage><op><micro-batch>"),
        ("0F0,0B0garbage\n1F0,1B0\n", "rank 0, cell 1 (0B0garbage): must be <stage><op><micro-batch>"),
        ("0F0,0STEP\n1F0,1B0\n", "rank 0, cell 1 (0STEP): must be a compute action"),
        (
            "(0F0;0B1)OVERLAP_F_B\n1F0,1B0\n",
            "rank 0, cell 0 ((0F0;0B1)OVERLAP_F_B): overlapped pairs are not available",
        ),
        ("0F0,,0B0\n1F0,,0SEND_B0,1X0\n", "rank 1, cell 1 (1X0): must be <stage><op><micro-batch>"),
        ("0F0,0B0\n,1B0,1F0\n", "rank 1, cell 0 (1B0): must come after 1F0 (cell 1)"),
        ("", "must hold at least one action"),
        (",,\n,\n", "must hold at least one action"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 must be on one rank, but ranks 0 and 1 both have it"),
        ("0F0,0B0\n2F0,2B0\n", "stages must be numbered from 0 without gaps, but 1 is in no cell"),
        ("0F0,0B0\n1F999999999,1B0\n", "micro-batches must be numbered from 0 without gaps, but 1 is in no cell"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "every rank must have the same number of stages, but the ranks have 2, 1"),
        ("0F0,0B0\n1F0\n", "rank 1, stage 1, micro-batch 0: no backward (1B0)"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "rank 0, cell 1 (0B0): hangs, because it waits for 1B0"),
    ],
)
def test_wrong_files(text: str, says: str, tmp_path: Path) -> None:
    problems = problems_of("from_file", ranks=2, microbatches=1, file=_file(tmp_path, text))
    assert any(says in problem.line() for problem in problems), problems
    counted = "Ranks and cells count from 0, without blank cells"
    assert all((counted in problem.line()) == (", cell " in problem.line()) for problem in problems)
    assert {problem.path for problem in problems} == {"schedule.file"}


def test_a_file_for_another_layout(tmp_path: Path) -> None:
    file = _file(tmp_path, to_csv(build("1f1b", ranks=2, microbatches=3)))
    problems = problems_of("from_file", ranks=4, microbatches=1, chunks=2, file=file)
    assert [problem.fix for problem in problems] == [
        "parallelism.pipeline=2",
        "schedule.microbatches=3",
        "schedule.chunks=1",
    ]


def test_unreadable_files(tmp_path: Path) -> None:
    _file(tmp_path, "0F0")
    (problem,) = problems_of("from_file", ranks=2, microbatches=1, file=str(tmp_path / "mime.csv"))
    assert "must be a readable file. No such file or directory." in problem.line()
    assert problem.fix == f"schedule.file={tmp_path / 'mine.csv'}"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (problem,) = problems_of("from_file", ranks=2, microbatches=1, file=str(tmp_path / "binary"))
    assert "must be a CSV text file" in problem.line()


def test_torch_accepts_our_csv(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    mine = build("1f1b", ranks=3, microbatches=5)
    loader = schedules._PipelineScheduleRuntime.__new__(schedules._PipelineScheduleRuntime)
    loader.pipeline_order, loader.pp_group_size = {}, 3
    loader._num_stages, loader._n_microbatches, loader._stages = 3, 5, []
    schedules.PipelineScheduleMulti._load_csv(loader, _file(tmp_path, to_csv(mine)))
    assert loader.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2}
    for rank, row in enumerate(mine.actions):
        assert [str(action) for action in loader.pipeline_order[rank]] == [str(action) for action in row]


def test_importing_is_light() -> None:
    code = (
        "import sys, runner.schedule, runner.schedule.render; "
        "heavy = {'torch', 'numpy', 'lightning', 'hydra', 'omegaconf'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "span"), [("1f1b", (256 + 31) * 3), ("zb_v", 256 * 3 + 15.5)])
def test_large_schedules_are_simulated(name: str, span: float) -> None:
    assert simulate(build(name, ranks=32, microbatches=256), Costs()).makespan == span


def test_a_simulation_is_linear_in_the_micro_batches() -> None:
    """Counted in executed lines, which no other process can make more; a walk that is quadratic would take 16 times."""
    few, many = (_lines_run(build("zb_v", ranks=4, microbatches=count)) for count in (16, 64))
    assert many < 4.5 * few


def _lines_run(schedule: Schedule) -> int:
    count = 0

    def traced(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        simulate(schedule, Costs())
    finally:
        sys.settrace(before)
    return count


def test_of_one_value_the_first_eight_are_told() -> None:
    many = [Problem("schedule.file", "my.csv", f"defect {number}") for number in range(20)]
    error = RequestError([*many, Problem("seed", -1, "must not be negative")])
    lines = str(error).splitlines()
    assert lines[:8] == [f"schedule.file = my.csv: defect {number}." for number in range(8)]
    assert lines[8:] == ["schedule.file = my.csv: and 12 more problems.", "seed = -1: must not be negative."]
    assert len(error.problems) == 21


def test_nine_are_eight_and_one_more() -> None:
    error = RequestError([Problem("a", 1, f"defect {number}") for number in range(9)])
    assert str(error).splitlines()[8:] == ["a = 1: and 1 more problem."]
