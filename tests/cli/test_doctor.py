"""``runner doctor``: one row per thing, with a fix where it is missing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.config.compose.container import fingerprint
from runner.config.links import links_file
from runner.launch.doctor import builds as doctor_builds
from runner.launch.doctor import collectives
from runner.launch.doctor import rows as doctor
from runner.launch.doctor.builds import builds
from runner.launch.doctor.link_fit import fit_link
from runner.launch.doctor.rows import PYTHON, VERSIONS, Check, examine
from runner.optim.operators import BuildError
from runner.plan.requested_schedule import resolve_request
from runner.plan.values import Link

ROOT = Path(__file__).resolve().parents[2]
MORE = {"shared memory", "ports", "submitit", "mpirun"}


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_the_versions_are_the_packages_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == PYTHON
    for package, supported in VERSIONS.items():
        assert f"{package}{supported}" in project["dependencies"]


@pytest.mark.costly
def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    rows = {row["name"]: row for row in document["checks"]}
    assert {
        "python",
        *VERSIONS,
        "cpu",
        "memory",
        "disk",
        "gloo",
        "cuda",
        "deepspeed",
        "libaio",
        "slurm",
    } | MORE <= rows.keys()
    assert rows["gloo"]["status"] == "ok"
    for row in rows.values():
        assert row["found"]
        assert bool(row["fix"]) is (row["status"] == "missing")
        assert "\n" not in row["fix"]


def test_what_is_missing_is_told_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: {"torch": "2.10.0", "lightning": "2.6.6"}.get(package))
    monkeypatch.setattr(doctor, "_gloo", lambda: [])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    monkeypatch.setattr(doctor, "_cgroup_limit", lambda: 1_000_000_000)
    found = by_name(examine(tmp_path))
    assert found["lightning"].ok
    assert (found["torch"].ok, found["torch"].fix) == (False, 'pip install "torch>=2.11,<2.16"')
    assert found["torch"].found == "2.10.0, supported is >=2.11,<2.16"
    assert found["omegaconf"].found.startswith("not installed")
    assert not found["disk"].ok
    assert found["memory"].found == "1.0 GB (limit of the control group)"
    assert found["default recipe"].fix == "pip install emoji emosvg resvg-py pillow"
    assert found["deepspeed"].fix
    assert main(["doctor"]) == 1
    assert "something that training needs, or that was asked for, is missing" in capsys.readouterr().out


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RANK", "import sys; sys.exit('RuntimeError: no route to host')")
    (row,) = doctor._gloo()
    assert (row.ok, row.found) == (False, "RuntimeError: no route to host")
    assert "GLOO_SOCKET_IFNAME" in row.fix


@pytest.mark.costly
def test_collectives_are_right_timed_and_kept_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "examine", lambda outputs: [])
    plain = resolve_request(["model=mlp"])
    assert plain.hardware.link_bytes_per_second is None
    assert main(["doctor", "--collectives", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send and receive", "link"} == rows.keys()
    assert all(row["status"] == "ok" for row in rows.values())
    assert all("over 12 sizes" in row["found"] for row in rows.values())
    kept = json.loads(links_file().read_text(encoding="utf-8"))
    found = resolve_request(["model=mlp"])
    assert found.hardware.link_bytes_per_second == kept["bytes_per_second"] > 0
    assert found.hardware.link_latency_seconds == kept["latency_seconds"] >= 0
    assert {len(kept["sizes"])} == {len(each) for each in kept["seconds"].values()} == {12}
    (typed,) = shlex.split(rows["link"]["fix"])
    (link,) = resolve_request(["model=mlp", typed]).hardware.links
    assert link.ranks == "all"
    assert link.bytes_per_second == pytest.approx(kept["bytes_per_second"], rel=1e-3)
    assert "runner doctor --collectives" in found.hardware.source
    assert fingerprint(found) == fingerprint(plain)
    named = resolve_request(["model=mlp", "hardware.link_bytes_per_second=5"])
    assert (named.hardware.link_bytes_per_second, named.hardware.link_latency_seconds) == (5, 0)


def test_a_line_is_fitted_to_what_messages_took() -> None:
    """Seconds of a known link, of a ring's collective over it, with errors of 5 % in turns, and without a latency."""
    sizes = [8 << 2 * step for step in range(11)]
    told = fit_link([(size, 2e-5 + size / 3e9) for size in sizes])
    assert (told.latency_seconds, told.bytes_per_second) == pytest.approx((2e-5, 3e9))
    assert (told.holds_from_bytes, told.sizes, told.residual < 1e-9) == (8, 11, True)
    ring = fit_link([(size, 6 * (2e-5 + size / 4 / 3e9)) for size in sizes], messages=6, share=6 / 4)
    assert (ring.latency_seconds, ring.bytes_per_second) == pytest.approx((2e-5, 3e9))
    noisy = fit_link([(size, (2e-5 + size / 3e9) * (1.05 if at % 2 else 0.95)) for at, size in enumerate(sizes)])
    held_out = [2 * size for size in sizes]
    line = Link(noisy.latency_seconds, noisy.bytes_per_second)
    assert all(line.seconds(size) == pytest.approx(2e-5 + size / 3e9, rel=0.1) for size in held_out)
    assert noisy.residual == pytest.approx(0.05, rel=0.1)
    assert told.left_out == pytest.approx(0.0, abs=1e-9)
    assert noisy.left_out == pytest.approx(1 - 0.95 / 1.05, rel=0.1)  # the others are all too short
    assert "10% off at sizes that are left out)" in noisy.told()
    late = fit_link([(8, 3e-5), *((size, 2e-5 + size / 3e9) for size in sizes[1:])])
    assert late.holds_from_bytes is not None
    assert late.holds_from_bytes > 8
    below = fit_link([(8, 1.0), (16, 3.0), (32, 9.0)])  # a line would begin below 0
    assert (below.latency_seconds, below.left_out) == (0.0, None)


def test_a_collective_that_is_wrong_or_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    wrong = {"right": {"all_reduce": False}, "bus_bytes_per_second": {"all_reduce": 1e9}}
    wrong |= {"fits": {"send and receive": fit_link([(8, 1.0), (16, 1.1)]).to_json()}}
    monkeypatch.setattr(doctor, "measure_collectives", lambda ranks, device: wrong)
    (row,) = doctor.collectives("cpu", 2)
    assert (row.name, row.ok, row.found) == ("all_reduce", False, "wrong values")
    monkeypatch.setattr(collectives, "start_together", lambda lines, seconds: [(1, "", "a\nRuntimeError: no route")])
    with pytest.raises(RuntimeError, match="no route"):
        collectives.measure_collectives(2, "cpu")
    assert not links_file().exists()


# Installed in every rank: the second one changes a number of what it has gathered.
CORRUPTING = """
import torch.distributed as dist
gather = dist.all_gather
def corrupt(parts, own, *args, **kwargs):
    made = gather(parts, own, *args, **kwargs)
    if dist.get_rank() == 1 and len(parts[0]) > 3:
        parts[0][3] += 1
    return made
dist.all_gather = corrupt
"""


@pytest.mark.costly
def test_a_rank_that_gets_wrong_numbers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real rank, whose numbers are wrong in one collective only; no link is kept for plans."""
    (tmp_path / "sitecustomize.py").write_text(CORRUPTING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "examine", lambda outputs: [])
    assert main(["doctor", "--collectives", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["all_gather"]["found"] == "wrong values"
    assert {name for name, row in rows.items() if row["status"] != "ok"} == {"all_gather"}
    assert not links_file().exists()


def test_what_compiling_lacks_is_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *, accelerator: str) -> None:
        raise BuildError(["sh: no such file"], Path("build.log"))

    monkeypatch.setattr(doctor_builds, "build_operator", fail)
    monkeypatch.setattr(doctor_builds, "has_libaio", lambda: False)
    monkeypatch.setenv("CXX", "no_such_compiler -O2")
    (row,) = builds(["async_io"])
    assert (row.ok, row.needed, row.found) == (False, True, "sh: no such file")
    assert row.fix == "there is no compiler no_such_compiler: apt-get install g++, or set CXX"
    monkeypatch.setenv("CXX", "sh")
    assert [row.fix for row in builds(["async_io"])] == ["apt-get install libaio-dev"]
    assert [row.fix for row in builds(["cpu_adam"])] == ["all that was said is in build.log"]
    monkeypatch.setattr(doctor_builds, "build_operator", lambda name, *, accelerator: Path("made", name, accelerator))
    (row,) = builds(["cpu_adam"])
    assert row.ok
    assert not row.fix


def test_an_unknown_operator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--build", "cpu_adam,asyncio"]) == 2
    assert "--build = asyncio: is no operator" in capsys.readouterr().err
