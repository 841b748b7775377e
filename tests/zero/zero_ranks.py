"""Several training runs in one pair of processes, because a rank's import of DeepSpeed takes seconds.

``python zero_ranks.py FILE`` is one rank. FILE is JSON: name of a run to its overrides. Every run goes the way of every
run (:func:`runner.training.run.run_rank`) and leaves its record and weights in a directory of its name beside FILE.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file

from runner.optim.operators import ready_operators

HERE = Path(__file__).resolve()
ALWAYS = (
    "model.target=user_code:model", "data.target=user_code:points", "loss.target=user_code:mean", "device=cpu",
    "trainer.max_steps=4", "data.batch_size=8", "data.shuffle=false", "logger=none", "trainer.progress=false",
)  # fmt: skip


def train_all(
    directory: Path, runs: Mapping[str, Sequence[str]], ranks: int = 2, seconds: float = 280
) -> dict[str, Result]:
    """Train every run on so many ranks, which must end well. Their time runs when what they need is compiled."""
    if any("nvme" in override for overrides in runs.values() for override in overrides):
        ready_operators(("async_io",), accelerator="cpu")
    file = directory / "runs.json"
    file.write_text(json.dumps({name: list(overrides) for name, overrides in runs.items()}), encoding="utf-8")
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE.parent)])
    common = {
        **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "RUNNER_CACHE": str(directory / "cache"),
    }  # fmt: skip
    logs = [(directory / f"rank_{rank}.log").open("w", encoding="utf-8") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE), str(file)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=directory,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        statuses = [process.wait(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
        for log in logs:
            log.close()
    told = [(directory / f"rank_{rank}.log").read_text(encoding="utf-8")[-3000:] for rank in range(ranks)]
    assert statuses == [0] * ranks, "\n".join(told)
    return {name: Result(directory / name) for name in runs}


class Result:
    """What a run left."""

    def __init__(self, run_dir: Path) -> None:
        self.record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
        self.weights = load_file(run_dir / "weights.safetensors")
        self.run_dir = run_dir

    @property
    def loss(self) -> list[float]:
        return self.record["loss"]


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
        self.found = {}

    def on_before_optimizer_step(self, *args) -> None:
        self.found["gradients are there"] = live_bytes() - self._earlier

    def on_train_batch_end(self, trainer, *args) -> None:
        self.found["between steps"] = live_bytes() - self._earlier
        tensors = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.found["state elements"] = sum(tensor.numel() for tensor in tensors if tensor.dim())


def main(file: Path) -> None:
    import torch.distributed as dist

    from runner.training.run import run_rank

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, overrides in json.loads(file.read_text(encoding="utf-8")).items():
        run_dir = file.parent / name
        print(f"== {name}", flush=True)
        config = _written(run_dir, [*ALWAYS, *overrides])
        watchers = [LiveBytes()] if name.startswith("bytes") else []
        run_rank(config, run_dir, watchers=watchers)
        if watchers and dist.get_rank() == 0:
            (run_dir / "live.json").write_text(json.dumps(watchers[0].found), encoding="utf-8")
        dist.barrier()
    os._exit(0)  # Gloo's threads now and then abort in the interpreter's own teardown


def _written(run_dir: Path, overrides: Sequence[str]):
    import torch.distributed as dist

    from runner.config.resolve import resolve
    from runner.launch.prepare import prepare, write_request

    config = resolve([*overrides, f"run_dir={run_dir}"])
    if dist.get_rank() == 0:
        run_dir.mkdir()
        write_request(config, prepare(config, place_is_made=True), run_dir, command="test")
    dist.barrier()
    return config


if __name__ == "__main__":
    main(Path(sys.argv[1]))
