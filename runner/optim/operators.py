"""Compiles DeepSpeed's operators once per machine, before a run needs them.

By itself, DeepSpeed compiles an operator at its first use: on every rank, in the middle of a run, with a lock file of
torch that a killed build never removes (torch/utils/file_baton.py). Here one process compiles and others wait for a
lock that the kernel releases when its owner dies; ranks then load a finished file and compile nothing.

``python -m runner.optim.operators PART...`` is the compiling process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.errors import Problem, RequestError

__all__ = [
    "OPERATORS",
    "BuildError",
    "build_operator",
    "has_ninja",
    "load_operators",
    "needed_operators",
    "ready_operators",
]

logger = logging.getLogger(__name__)

# For each operator: DeepSpeed's builder of each of its parts, in the order of loading.
_PARTS = {
    "async_io": {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"},
    "cpu_adam": {"cpu_adam": "CPUAdamBuilder"},
    "fused_adam": {"fused_adam": "FusedAdamBuilder"},
}
OPERATORS = tuple(_PARTS)
_BUILDERS = {part: builder for parts in _PARTS.values() for part, builder in parts.items()}
_SHOWN_LINES = 3


class BuildError(Exception):
    """Raised if an operator cannot be compiled.

    Attributes:
        said: the compiler's first errors, one line each.
        log: the file with the compiler's whole output.
    """

    def __init__(self, said: Sequence[str], log: Path) -> None:
        super().__init__(f"Compiling it failed, see {log}: {' | '.join(said)}")
        self.said, self.log = tuple(said), log


def needed_operators(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The operators that a run with this DeepSpeed configuration uses, except that of its optimizer."""
    zero = settings.get("zero_optimization", {})
    places = [zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")]
    return ("async_io",) if "nvme" in places else ()


def ready_operators(names: Sequence[str], *, accelerator: str) -> None:
    """Compile missing operators; return when all exist. Processes may call it at the same time: only one compiles.

    Args:
        names: operators from :func:`needed_operators`, and that of the optimizer.
        accelerator: ``cpu`` or ``cuda``; DeepSpeed compiles differently for each.

    Raises:
        RequestError: the compiler failed; the problem has its first errors and the name of the file with all output.
    """
    for name in names:
        try:
            build_operator(name, accelerator=accelerator)
        except BuildError as error:
            raise RequestError([_refusal(name, error)]) from error


def build_operator(name: str, *, accelerator: str) -> Path | None:
    """Compile one of :data:`OPERATORS` if it is missing; return its folder, or None if DeepSpeed was installed with it.

    Raises:
        BuildError: the compiler failed.
    """
    folder = _folder(name, accelerator)
    if folder.exists():
        return folder
    if _came_with_deepspeed(name):
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")) as lock:
        if not folder.exists():  # another process may have made it meanwhile
            logger.info("compiling DeepSpeed's %s operator (once on this machine, a minute or two)", name)
            _compile(name, folder, accelerator, lock)
    return folder


def load_operators(names: Sequence[str], *, accelerator: str) -> None:
    """Import DeepSpeed and give it the compiled operators, so that it compiles none."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    ready_operators(names, accelerator=accelerator)
    for name in names:
        if _came_with_deepspeed(name):
            continue
        for part in _PARTS[name]:
            if part not in OpBuilder._loaded_ops:
                OpBuilder._loaded_ops[part] = _import(part, _folder(name, accelerator) / f"{part}.so")
            _builder(part).load(verbose=False)  # this makes the symbols of pin_memory global


def _folder(name: str, accelerator: str) -> Path:
    """The folder of an operator, next to torch's extensions; its name has a hash of all that the file depends on."""
    from torch.utils import cpp_extension

    versions = [metadata.version(package) for package in ("deepspeed", "torch")]
    depends = [*versions, str(sys.implementation.cache_tag), accelerator, platform.machine(), _processor_features()]
    key = hashlib.sha256("\n".join(depends).encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / "runner" / f"{name}-{key}"


def _processor_features() -> str:
    """The processor's features; operators are compiled for it (``-march=native``), but machines may share folders."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _came_with_deepspeed(name: str) -> bool:
    """Whether DeepSpeed was installed with its operators compiled (``DS_BUILD_AIO=1 pip install deepspeed``)."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    ops = Path(spec.origin).parent / "ops"
    return all(any(ops.glob(f"*/{part}_op.*so")) for part in _PARTS[name])


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    """Lock out other processes; yields the lock's file descriptor, so that a child can hold the lock too."""
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that compiles %s", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _compile(name: str, folder: Path, accelerator: str, lock: int) -> None:
    """Compile in a new folder, and put the result in its place in one move."""
    log = folder.with_suffix(".log")
    prefix = f"{folder.name}-unfinished-"
    for left in folder.parent.glob(f"{prefix}*"):  # left by killed processes: this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as made:
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": made, "DS_ACCELERATOR": accelerator}
        environment["PATH"] = _search_path()
        command = [sys.executable, "-m", "runner.optim.operators", *_PARTS[name]]
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,), check=False
            )
        if done.returncode != 0:
            raise BuildError(_compilers_words(log), log)
        finished = Path(made) / "finished"
        finished.mkdir()
        for part in _PARTS[name]:
            shutil.move(Path(made) / part / f"{part}.so", finished / f"{part}.so")
        finished.rename(folder)


def has_ninja() -> bool:
    """Whether ninja, with which torch compiles, is found."""
    return shutil.which("ninja", path=_search_path()) is not None


def _search_path() -> str:
    """The search path for commands, this environment first: pip puts ninja there, but it may not be activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _refusal(name: str, error: BuildError) -> Problem:
    if name == "async_io":
        return Problem("offload", "nvme", f"needs DeepSpeed's {name} operator", str(error), "offload=optimizer_cpu")
    return Problem("optimizer", name, f"needs DeepSpeed's {name} operator", str(error), "optimizer=adamw")


def _compilers_words(log: Path) -> Sequence[str]:
    """The output for the first file that failed, without its command; else the reason why compilation did not start."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    failed = next((number for number, line in enumerate(lines) if line.startswith("FAILED:")), None)
    if failed is None:
        return lines[-1:]
    said = list(itertools.takewhile(lambda line: not line.startswith(("[", "ninja:")), lines[failed + 2 :]))
    return ([line for line in said if "error" in line] or said)[:_SHOWN_LINES] or [lines[failed]]


def _builder(part: str) -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(_BUILDERS[part])


def _import(part: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(part, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(parts: Sequence[str]) -> None:
    """Compile with DeepSpeed's own builders, into ``TORCH_EXTENSIONS_DIR``."""
    for part in parts:
        builder = _builder(part)
        arguments = [argument for argument in builder.cxx_args() if argument != "-g"]  # takes half of the time
        builder.cxx_args = arguments.copy
        builder.load(verbose=True)


if __name__ == "__main__":
    main(sys.argv[1:])
