from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.plan.memory.limits import machine_memory_bytes, memory_limit_bytes


def machine(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\n"}


def test_without_control_groups_the_whole_memory_counts(tmp_path: Path) -> None:
    assert machine_memory_bytes(machine(tmp_path, MEMINFO)) == 1000 * 1024


def test_the_tightest_ancestor_of_a_v2_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.max": "5000\n",
    }
    assert machine_memory_bytes(machine(tmp_path, MEMINFO | files)) == 5000


def test_a_container_that_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../somewhere/else\n", "sys/fs/cgroup/memory.max": "7000\n"}
    assert machine_memory_bytes(machine(tmp_path, MEMINFO | files)) == 7000


def test_v1_groups_count_up_to_what_the_machine_has(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n4:freezer:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "300000\n",
    }
    assert machine_memory_bytes(machine(tmp_path, MEMINFO | files)) == 300000


def test_what_was_asked_for_wins_then_the_hardware_then_the_device_then_this_machine() -> None:
    config = RunConfig(memory_limit="2KiB")
    config.hardware.memory_bytes = 80e9
    assert memory_limit_bytes(config, local_ranks=4, device_bytes=5) == 2048
    config.memory_limit = None
    assert memory_limit_bytes(config, local_ranks=4, device_bytes=5) == 80_000_000_000
    config.hardware.memory_bytes = None
    assert memory_limit_bytes(config, local_ranks=4, device_bytes=5) == 5
    assert memory_limit_bytes(config, local_ranks=4) == machine_memory_bytes() // 4


def test_a_gpu_is_asked_for_its_memory_and_the_smallest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81920\necho 40960\n", encoding="ascii")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert memory_limit_bytes(RunConfig(device="cuda"), local_ranks=2) == 40960 * 2**20


def test_a_gpu_that_nobody_knows_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="memory_limit = null: must be given with device=cuda. The memory"):
        memory_limit_bytes(RunConfig(device="cuda"), local_ranks=1)
