"""Ranks on machines that are not alike run one plan, which is made for the smallest of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in its __all__
from user_project import make_directory, record, train

import runner.launch.run.machines as machines
from runner.config.compose.resolve import resolve
from runner.launch.run.machines import MachineFacts, smallest_machine
from runner.launch.run.prepare import prepare, write_request
from runner.plan.values import RunPlan
from runner.training.agreed_plan import differing, digests

REQUEST = ("model=gpt", "model.kwargs.layers=6", "parallelism.pipeline=2", "schedule.microbatches=4", "device=cpu",
           "trainer.max_steps=1", "activation_checkpoint=rotor")  # fmt: skip
PLENTY = 64 << 30


def test_the_least_of_all_machines_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    config, store = resolve(list(REQUEST)), HashStore()
    facts = [MachineFacts(PLENTY, 16 << 30, 8), MachineFacts(2 << 30, None, 16), MachineFacts(PLENTY, 8 << 30, 2)]

    def of(rank: int) -> MachineFacts:
        return smallest_machine(config, store, rank, len(facts), timedelta(seconds=60))

    given = iter(facts)  # each rank asks its own machine first
    monkeypatch.setattr(machines, "this_machine", lambda _: next(given))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(of, 0)
        while not store.check(["runner/machine/0"]):
            pass
        others = [of(1), of(2)]
    assert others == facts[1:]
    assert first.result() == MachineFacts(2 << 30, 8 << 30, 2)


@pytest.mark.costly
def test_a_smaller_machine_has_its_way(tmp_path: Path) -> None:
    config = resolve([*REQUEST, f"run_dir={tmp_path}"])
    large = prepare(config, place_is_made=True, machine=MachineFacts(PLENTY, None, 2))
    less = int(2 * 0.8 * max(large.memory.peak_bytes))  # two ranks share it
    small = prepare(config, place_is_made=True, machine=MachineFacts(less, None, 2))
    assert max(small.memory.peak_bytes) <= small.memory_limit_bytes == less // 2 < max(large.memory.peak_bytes)
    first, other = digests(config, large), digests(config, small)
    assert [name for name in first if first[name] != other[name]] == ["activation checkpoints"]
    said = differing([{"host": "large", "digests": first}] * 2 + [{"host": "small", "digests": other}])
    assert said is not None
    assert "rank 2 on small" in said
    assert first["activation checkpoints"][:12] in said
    assert other["activation checkpoints"][:12] in said
    write_request(config, small, tmp_path, command="")
    read = RunPlan.load(tmp_path)
    assert read == small
    assert differing([{"host": "one", "digests": digests(config, each)} for each in (small, read)]) is None


UNEQUAL = """
import os

import runner.plan.memory.limits as limits

whole = limits.machine_memory_bytes
limits.machine_memory_bytes = lambda: {memory} if os.environ.get("RANK") == "1" else whole()
"""


@pytest.mark.costly
def test_no_rank_plans(tmp_path: Path) -> None:
    """One whose own machine has less memory runs what was planned; each planned for itself before, and none ran."""
    directory = make_directory(tmp_path)
    code = directory / "mine.py"
    words = ("activation_checkpoint=rotor", "parallelism.pipeline=2", "schedule.microbatches=4", "partition=uniform")
    assert train(directory, *words).returncode == 0
    before = record(tmp_path / "run")
    memory = int(1.1 * max(before["peak_memory_bytes"]["predicted"]))
    code.write_text(code.read_text(encoding="utf-8") + UNEQUAL.format(memory=memory), encoding="utf-8")
    done = train(directory, *words, "run_dir=again")
    assert done.returncode == 0, done.stderr
    assert record(tmp_path / "again")["loss"] == before["loss"]
