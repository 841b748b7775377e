"""What sbatch itself makes of the lines of a batch script: names that need quotes, setup, and a prefix."""

from __future__ import annotations

from pathlib import Path

from cluster_runs import run
from slurm_cluster import Cluster

from runner.config.schema import LauncherConfig, RunConfig
from runner.launch.slurm.script import batch_script

SAYS = r'printf "%s, %s, %s\n" "$SETTING" "$GIVEN" "$SLURM_JOB_NAME"'


def test_sbatch_reads_what_is_meant(cluster: Cluster, tmp_path: Path) -> None:
    place = tmp_path / """it's a "b" # $(touch broken)"""
    (place / "logs").mkdir(parents=True)
    launcher = LauncherConfig(name="slurm", setup=["export SETTING='x y'"], prefix="env 'GIVEN=1 2'")
    text = batch_script(
        RunConfig(name='a "b"\n\\c', launcher=launcher), place, ["sh", "-c", SAYS], working_directory=place
    )
    (tmp_path / "job.sh").write_text(text)
    run(cluster, tmp_path, "sbatch", "--wait", "--parsable", "job.sh")
    assert (place / "logs" / "slurm.log").read_text() == 'x y, 1 2, a "b" \\c\n'
    assert not list(tmp_path.rglob("broken"))
