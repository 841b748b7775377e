"""Two machines, as nearly as one can stand for them: each has its own network, name, clock, processes and /tmp.

They share the cores, the Python installation and the tests' directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import pytest
import torch
from safetensors.torch import load_file
from user_project import OVERRIDES, assert_same_weights, environment, make_directory, plain_result, record

_IN_MACHINE = """
hostname $0
mount -t tmpfs none /dev/shm
mount -t tmpfs none "$OWN"
mount --bind "$HOSTS" /etc/hosts
exec "$@"
"""
_SECONDS_OF_A_DAY = 86400  # the second machine was started that much earlier

pytestmark = [pytest.mark.costly, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the ranks: with more, an update of AdamW rounds otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Machine:
    """Runs commands on one of two machines, whose number is 1 or 2."""

    def __init__(self, number: int, directory: Path) -> None:
        self.name, self.space = f"n{number}", f"runner-{os.getpid()}-{number}"
        self._clock = str(number * _SECONDS_OF_A_DAY)
        own = directory / f"own-{number}"
        own.mkdir()
        places = {"TMPDIR": str(own), "OWN": str(own), "RUNNER_CACHE": str(own / "cache")}
        self._environment = environment(directory, HOSTS=str(directory / "hosts"), **places)

    def start(self, command: list[str], directory: Path) -> subprocess.Popen[str]:
        inside = ["bash", "-c", _IN_MACHINE, self.name, *command]
        apart = ["unshare", "--time", "--monotonic", self._clock, "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
        line = ["ip", "netns", "exec", self.space, *apart, *inside]
        return subprocess.Popen(line, cwd=directory, env=self._environment, stdout=PIPE, stderr=STDOUT, text=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines that are joined by a cable."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n")
    both = [Machine(number, tmp_path) for number in (1, 2)]
    first, second = (machine.space for machine in both)
    lines = [f"ip netns add {first}", f"ip netns add {second}"]
    lines += [f"ip link add wire1 netns {first} type veth peer name wire2 netns {second}"]
    for number, space in enumerate((first, second), start=1):
        lines += [f"ip -n {space} addr add 10.77.0.{number}/24 dev wire{number}"]
        lines += [f"ip -n {space} link set wire{number} up", f"ip -n {space} link set lo up"]
    try:
        try:
            for line in lines:
                subprocess.run(line.split(), check=True, capture_output=True)
            assert both[0].start(["true"], tmp_path).wait(60) == 0
        except (OSError, AssertionError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no other machine can be made here: {error}")
        yield both
    finally:
        for machine in both:
            subprocess.run(["ip", "netns", "delete", machine.space], check=False, stderr=DEVNULL)


def train(machines: list[Machine], directory: Path, *overrides: str) -> list[tuple[int, str]]:
    """Exit status and output of torchrun on each machine, with one rank on each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--master-addr=n1", "--master-port=29500"]
    words = ["-m", "runner", "train", *OVERRIDES, "logger=none", *overrides]
    started = [
        machine.start([*launcher, f"--node-rank={rank}", *words], directory) for rank, machine in enumerate(machines)
    ]
    told = [each.communicate(timeout=1500)[0] for each in started]
    return [(each.returncode, said) for each, said in zip(started, told, strict=True)]


def test_a_pipeline_over_two_machines_equals_a_plain_loop_and_measures_one_time(
    machines: list[Machine], tmp_path: Path
) -> None:
    directory = make_directory(tmp_path)
    for status, said in train(machines, directory, "parallelism.pipeline=2", "schedule.microbatches=1"):
        assert status == 0, said
    made = record(directory / "run")
    assert made["hardware"]["host"] == "n1"
    losses, weights = plain_result()
    assert made["loss"] == losses
    assert_same_weights(load_file(directory / "run" / "weights.safetensors"), weights)
    assert 0 < made["bubble_ratio"]["measured"] < 0.999, "two clocks were taken for one"
    events = json.loads((directory / "run" / "timeline.json").read_text())["traceEvents"]
    moments = [event["ts"] / 1e6 for event in events if "ts" in event]
    assert max(moments) - min(moments) < _SECONDS_OF_A_DAY / 2
