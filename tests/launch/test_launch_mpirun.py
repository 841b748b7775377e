"""``mpirun -n 4 runner train``: its processes become the ranks, and equal one process."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import OVERRIDES, Started

from runner.errors import RequestError
from runner.launch.mpi import become_rank, num_ranks
from runner.record import RunRecord

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
RUNNER = (sys.executable, "-m", "runner", "train", *OVERRIDES, "logger=none", "trainer.progress=false")
pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"),
]


def test_the_variables_of_a_rank() -> None:
    started = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "17"}
    started |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert (num_ranks({}), num_ranks(started)) == (0, 8)
    with pytest.raises(RequestError, match="MASTER_ADDR = null: must be set"):
        become_rank(dict(started))
    ports = set()
    for rank in "5", "6":
        found = started | {"MASTER_ADDR": "n1", "OMPI_COMM_WORLD_RANK": rank}
        become_rank(found)
        assert [found[key] for key in ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")] == [rank, "1", "1", "8"]
        assert found["MASTER_ADDR"] == "n1"
        ports.add(found["MASTER_PORT"])
    assert len(ports) == 1


def test_a_variable_of_mpirun_alone_is_refused() -> None:
    with pytest.raises(RequestError, match="OMPI_COMM_WORLD_LOCAL_SIZE = null: must be set"):
        become_rank({f"OMPI_COMM_WORLD_{name}": "2" for name in ("RANK", "SIZE", "LOCAL_RANK")})


def test_the_variables_of_hydra() -> None:
    started = {"PMI_RANK": "5", "PMI_SIZE": "8"}
    assert num_ranks(started) == 0, "srun sets these, too"
    started |= {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert num_ranks(started) == 8
    for name, fix in ("MASTER_ADDR", "-genv MASTER_ADDR NODE"), ("MASTER_PORT", "-genv MASTER_PORT 29500"):
        with pytest.raises(RequestError, match=f"{name} = null: must be set.*Try mpirun {fix} "):
            become_rank(dict(started))
        started[name] = "12345"
    become_rank(started)
    assert [started[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["5", "1", "8", "4"]


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="no mpiexec.hydra: apt-get install mpich")
@pytest.mark.costly
def test_hydras_processes_are_one_run(tmp_path: Path) -> None:
    words = [*RUNNER, "parallelism.pipeline=2", "run_dir=hydra"]
    script = tmp_path / "between.sh"  # a process of its own between Hydra and the rank
    script.write_text('"$@"\nexit $?\n')
    status, out, err = Started(["mpiexec.hydra", "-n", "2", "sh", str(script), *words], tmp_path).finish()
    assert status == 0, err
    assert out.count("predicted | measured") == 1
    assert RunRecord.load(tmp_path / "hydra").status == "ok"


@pytest.mark.costly
def test_two_ranks_train_as_in_a_local_run_and_save_at_a_signal(tmp_path: Path) -> None:
    two = ("parallelism.pipeline=2", "trainer.max_steps=100000", "run_dir=two")
    started = Started([*MPIRUN, "-n", "2", *RUNNER, *two], tmp_path)
    steps = tmp_path / "two" / "steps.jsonl"
    while not steps.exists() or not steps.stat().st_size:
        assert started.process.poll() is None, started.finish()
        time.sleep(0.05)
    time.sleep(0.2)
    started.process.send_signal(signal.SIGUSR1)
    status, out, err = started.finish(timeout=1500)
    assert status == 75, err + out
    assert started.left_behind() == []
    record = RunRecord.load(tmp_path / "two")
    assert (record.status, record.reason) == (
        "preempted",
        f"stopped by SIGUSR1, saved after step {record.steps}; resume=auto continues",
    )
    status, _, err = Started([*RUNNER, "parallelism.pipeline=2", "run_dir=local"], tmp_path).finish(timeout=1500)
    assert status == 0, err
    local = RunRecord.load(tmp_path / "local").loss
    assert local == record.loss[: len(local)]
