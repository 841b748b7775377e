"""Several training runs in ranks that are forked from one process, because the import of DeepSpeed takes seconds.

``python zero_ranks.py FILE`` is that process. FILE is JSON: groups of a number of ranks and runs, which are a name to
overrides. Every run goes the way of every run (:func:`runner.training.run.run_rank`) and leaves its record and weights
in a directory of its name beside FILE.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from warm import WarmZero

from runner.optim.operators import ready_operators
from runner.optim.states.delayed import DELAYED

HERE = Path(__file__).resolve()
ALWAYS = (
    "model.target=user_code:model", "data.target=user_code:points", "loss.target=user_code:mean", "device=cpu",
    "trainer.max_steps=4", "data.batch_size=8", "data.shuffle=false", "logger=none", "trainer.progress=false",
)  # fmt: skip


def train_all(
    directory: Path, runs: Mapping[str, Sequence[str]], ranks: int = 2, seconds: float = 280
) -> dict[str, Result]:
    """Train every run on so many ranks, which must end well. Their time runs when what they need is compiled."""
    return train_groups(directory, [(ranks, runs)], seconds)


def train_groups(
    directory: Path, groups: Sequence[tuple[int, Mapping[str, Sequence[str]]]], seconds: float = 280
) -> dict[str, Result]:
    """As :func:`train_all`, with groups of a number of ranks and their runs, one after the other."""
    runs = {name: list(overrides) for _, group in groups for name, overrides in group.items()}
    if any("nvme" in override for overrides in runs.values() for override in overrides):
        ready_operators(("async_io",), accelerator="cpu")
    file = directory / "runs.json"
    file.write_text(json.dumps(groups), encoding="utf-8")
    folders = ("support", "property")  # with models of theirs
    paths = os.pathsep.join(
        [str(HERE.parents[2]), *(str(HERE.parents[1] / each) for each in folders), str(HERE.parent)]
    )
    environment = {
        **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "test", "RUNNER_CACHE": str(directory / "cache"),
    }  # fmt: skip
    with (directory / "log").open("w", encoding="utf-8") as log:
        process = WarmZero(
            [sys.executable, str(HERE), str(file)],
            env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.wait()
    assert status == 0, (directory / "log").read_text(encoding="utf-8")[-6000:]
    return {name: Result(directory / name) for name in runs}


class Result:
    """What a run left."""

    def __init__(self, run_dir: Path) -> None:
        self.record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        self.weights = load_file(run_dir / "weights.safetensors")
        self.run_dir = run_dir

    @property
    def loss(self) -> list[float]:
        made: list[float] = self.record["loss"]
        return made


def live_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    sizes = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.layout is torch.strided and one.device.type == "cpu":
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(sizes.values())


class LiveBytes(Callback):
    """Live bytes just before the last update and after it, above those before the run."""

    def __init__(self) -> None:
        self._earlier = live_bytes()  # DeepSpeed lets an engine of an earlier run go never
        self.found: dict[Any, Any] = {}

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.found["gradients are there"] = live_bytes() - self._earlier

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found["between steps"] = live_bytes() - self._earlier
        states = [state.items() for state in trainer.optimizers[0].state.values()]
        tensors = [value for state in states for key, value in state if key not in DELAYED]
        self.found["state elements"] = sum(tensor.numel() for tensor in tensors if tensor.dim())


def main(file: Path) -> None:
    """Import once, then fork the ranks of one group after the other."""
    for module in ("deepspeed", "runner.training.run", "runner.launch.run.prepare"):
        importlib.import_module(module)
    for ranks, runs in json.loads(file.read_text(encoding="utf-8")):
        with contextlib.closing(socket.socket()) as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
                _train_as_rank(file.parent, runs)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)


def _train_as_rank(directory: Path, runs: Mapping[str, Sequence[str]]) -> NoReturn:
    status = 1
    try:
        _train_runs(directory, runs)
        status = 0
    except BaseException:
        traceback.print_exc()
        os.killpg(0, signal.SIGTERM)  # the others would wait for this one
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # Gloo's threads now and then abort in the interpreter's own teardown


def _train_runs(directory: Path, runs: Mapping[str, Sequence[str]]) -> None:
    import torch.distributed as dist

    from runner.training.run import run_rank

    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    for name, overrides in runs.items():
        run_dir = directory / name
        print(f"== {name}", flush=True)
        config = _written(run_dir, [*ALWAYS, *overrides])
        watchers = [LiveBytes()] if name.startswith("bytes") else []
        run_rank(config, run_dir, watchers=watchers)
        if watchers and _rank() == 0:
            (run_dir / "live.json").write_text(json.dumps(watchers[0].found), encoding="utf-8")
        _meet()


def _rank() -> int:
    return int(os.environ["RANK"])


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _written(run_dir: Path, overrides: Sequence[str]) -> Any:
    """The request, from the file that rank 0 makes: to compose it takes longer than to read it."""
    from runner.config.compose.resolve import load, resolve
    from runner.launch.run.prepare import CONFIG_FILE, prepare, write_request

    if _rank() == 0:
        config = resolve([*overrides, f"run_dir={run_dir}"])
        run_dir.mkdir()
        write_request(config, prepare(config, place_is_made=True), run_dir, command="test")
    _meet()
    return load(run_dir / CONFIG_FILE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
