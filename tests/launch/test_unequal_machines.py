"""Ranks on machines that are not alike run one plan, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from user_project import make_directory, record, train

import runner.plan.memory.limits
from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.launch.run.prepare import prepare, write_request
from runner.training.agreed_plan import differing, digests
from runner.training.run_plan import planned

REQUEST = ("model=gpt", "model.kwargs.layers=6", "parallelism.pipeline=2", "schedule.microbatches=4", "device=cpu",
           "trainer.max_steps=1")  # fmt: skip
PLENTY = 64 << 30


def seen_from(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, run_dir: Path, memory: int, cores: int
) -> dict[str, str]:
    """The digests of a rank whose machine has so much memory, which its two ranks share, and so many cores."""
    monkeypatch.setattr(runner.plan.memory.limits, "machine_memory_bytes", lambda: memory)
    monkeypatch.setattr("runner.training.run_plan.num_cores", lambda: cores)
    return digests(config, planned(config, run_dir))


@pytest.fixture(name="request_of")
def _request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunConfig, Path]]:
    def make(*words: str) -> tuple[RunConfig, Path]:
        monkeypatch.setattr(runner.plan.memory.limits, "machine_memory_bytes", lambda: PLENTY)
        config = resolve([*REQUEST, *words, f"run_dir={tmp_path}"])
        write_request(config, prepare(config, place_is_made=True), tmp_path, command="")
        return config, tmp_path

    return make


@pytest.mark.parametrize(
    ("words", "differs"),
    [(("activation_checkpoint=rotor",), "activation checkpoints"), (("partition=memory",), None), ((), None)],
)
def test_a_machine_with_less_memory_has_another_digest(
    words: tuple[str, ...],
    differs: str | None,
    request_of: Callable[..., tuple[RunConfig, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, run_dir = request_of(*words)
    first = seen_from(monkeypatch, config, run_dir, PLENTY, 8)
    assert seen_from(monkeypatch, config, run_dir, PLENTY + (1 << 20), 1) == first  # cores and a little memory
    peak = max(planned(config, run_dir).memory.peak_bytes)
    less = seen_from(monkeypatch, config, run_dir, int(2 * 0.8 * peak), 8)
    assert [name for name in first if first[name] != less[name]] == ([differs] if differs else [])
    ranks = [
        {"host": "large", "digests": first},
        {"host": "large", "digests": first},
        {"host": "small", "digests": less},
    ]
    said = differing(ranks)
    if differs is None:
        assert said is None
    else:
        assert said is not None
        assert "rank 2 on small" in said
        assert first[differs][:12] in said
        assert less[differs][:12] in said


UNEQUAL = """
import os

import runner.plan.memory.limits as limits

whole = limits.machine_memory_bytes
limits.machine_memory_bytes = lambda: {memory} if os.environ.get("RANK") == "1" else whole()
"""


def test_two_ranks_that_would_run_two_plans_run_none(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    code = directory / "mine.py"
    words = ("activation_checkpoint=rotor", "parallelism.pipeline=2", "schedule.microbatches=4", "partition=uniform")
    assert train(directory, *words).returncode == 0
    peak = max(record(tmp_path / "run")["peak_memory_bytes"]["predicted"])
    code.write_text(code.read_text(encoding="utf-8") + UNEQUAL.format(memory=int(1.1 * peak)), encoding="utf-8")
    done = train(directory, *words, "run_dir=again")
    assert done.returncode == 1
    assert "rank 1 on" in done.stderr
    assert "the digest of its activation checkpoints is" in done.stderr
    assert record(tmp_path / "again")["steps"] == 0
