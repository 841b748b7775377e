"""Time to a number of steps while ranks are killed: the runner beside Lightning and torchrun, at the same steps.

    python -m runner.recipes.faults.compare --steps 400 --every 20 --kills 6 --seed 0

Each trains the same model on the same data, with copies of it on all ranks, and saves every few steps. Lightning's
script is started again by a loop until it succeeds, as in a shell; torchrun restarts its ranks (``--max-restarts``),
and so does the runner (``launcher.max_restarts``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.recipes.faults.compare import callback, race, with_lightning, with_torchrun
from runner.recipes.faults.compare.race import BATCH, RATE, Race, done_twice, kills, recoveries

__all__ = ["CONTENDERS", "Outcome", "main", "markdown", "run"]

_GRACE_SECONDS = 5.0
_STARTS_PER_KILL = 3


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train.

    Args:
        command: the words of its command.
        is_repeated: whether it is started again from outside when it fails.
    """

    command: Callable[[Race, Path], list[str]]
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a contender.

    Args:
        name: its name.
        seconds: from the first start to the end of the last step and all processes; None if it did not get there.
        starts: how often its command was started.
        steps: different steps that it did.
        twice: how often it did a step again.
        recovery: median seconds from the death of a rank to the end of the next step; None if nobody died.
    """

    name: str
    seconds: float | None
    starts: int
    steps: int
    twice: int
    recovery: float | None = None


def _runner(given: Race, path: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "runner", "train", "model=custom", f"model.target={race.__name__}:model"),
        *(f"+model.kwargs.seconds={given.seconds}", "data=custom", f"data.target={race.__name__}:data", "loss=mse"),
        *(f"data.batch_size={BATCH * given.ranks}", f"parallelism.data={given.ranks}", "schedule.microbatches=1"),
        *(f"optimizer.lr={RATE}", f"trainer.max_steps={given.steps}", "trainer.progress=false", "logger=none"),
        *(f"checkpoint.every={given.every}", "checkpoint.keep=1", "device=cpu", "resume=auto"),
        f"+callbacks.kills={{target:{callback.__name__}:Kills,kwargs:{{race:{path}}}}}",
        *(f"launcher.max_restarts={len(given.kills)}", f"run_dir={given.folder}/run"),
    ]


def _torchrun(given: Race, path: Path) -> list[str]:
    # After a kill it may start ranks that look for one that is gone, and which fail, too.
    restarts = f"--max-restarts={_STARTS_PER_KILL * len(given.kills)}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", restarts),
        *("-m", with_torchrun.__name__, str(path)),
    ]


def _lightning(given: Race, path: Path) -> list[str]:
    return [sys.executable, with_lightning.__file__, str(path)]


CONTENDERS = {
    "the runner": Contender(_runner),
    "Lightning in a loop": Contender(_lightning, is_repeated=True),
    "torchrun": Contender(_torchrun),
}


def run(name: str, given: Race, limit: float) -> Outcome:
    """Let a contender train.

    Args:
        given: its folder is emptied.
        limit: seconds after which it is ended.
    """
    folder, contender = Path(given.folder), CONTENDERS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = contender.command(given, given.save())
    begun, starts, status = time.monotonic(), 0, None
    with (folder / "output.txt").open("ab") as output:
        while starts == 0 or (contender.is_repeated and status and starts <= len(given.kills)):
            starts += 1
            status = _start(command, output.fileno(), limit - (time.monotonic() - begun))
    seconds = time.monotonic() - begun
    waited = recoveries(given)
    recovery = statistics.median(waited) if waited else None
    return Outcome(name, seconds if status == 0 else None, starts, *done_twice(given), recovery)


def _start(command: Sequence[str], output: int, limit: float) -> int | None:
    """The exit status of a command; None if it was ended after its limit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        return process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command: ranks of a loop's earlier start must not disturb the next one."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def markdown(outcomes: Sequence[Outcome], title: str) -> str:
    """The table as Markdown."""
    lines = [
        f"# {title}\n",
        "| with | seconds | from a death to the next step | starts of its command | steps | steps done twice |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        seconds = f"{each.seconds:.1f}" if each.seconds is not None else "not finished"
        recovery = f"{each.recovery:.1f} s" if each.recovery is not None else ""
        lines.append(f"| {each.name} | {seconds} | {recovery} | {each.starts} | {each.steps} | {each.twice} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare from the command line; the exit status is 1 if somebody did not get to the last step."""
    options = _options().parse_args(argv)
    killed = kills(options.kills, options.steps, options.ranks, options.seed)
    out = options.out.absolute()
    outcomes = []
    for name in options.only or CONTENDERS:
        folder = str(out / name.replace(" ", "_"))
        given = Race(folder, options.steps, options.every, options.step_seconds, options.ranks, killed)
        outcomes.append(run(name, given, options.limit))
        print(f"{name}: {outcomes[-1]}", flush=True)
    told = ", ".join(f"rank {rank} at step {step}" for step, rank in killed) or "nobody"
    words = " ".join(["python -m runner.recipes.faults.compare", *(sys.argv[1:] if argv is None else argv)])
    table = markdown(outcomes, f"{words}: killed {told}")
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    return int(any(each.seconds is None for each in outcomes))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the steps and ranks that are killed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="that a forward sleeps")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of each contender")
    parser.add_argument("--only", nargs="*", choices=tuple(CONTENDERS), default=[])
    parser.add_argument("--out", type=Path, default=Path("outputs/faults/compare"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
