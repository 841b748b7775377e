"""A hostile checkpoint gets no advice that would let it run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_zoo import OVERRIDES

from runner.checkpoint.file import admitted
from runner.cli.main import main
from runner.errors import RequestError


class _Calls:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def _of_no_module() -> None:
    """Renamed below so that advice which repeats the name would allow eval."""


_of_no_module.__module__, _of_no_module.__qualname__ = "strangers", "Thing,builtins:eval"

HOSTILE = {
    "eval": _Calls(eval, "__import__('pathlib').Path('trace').touch()"),
    "system": _Calls(__import__("os").system, "touch trace"),
    "run": _Calls(__import__("subprocess").check_call, ["touch", "trace"]),
    "import": _Calls(__import__("importlib").import_module, "antigravity"),
    "two": [_Calls(eval, "1"), _Calls(torch.nn.functional.relu, 1)],
}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "resume"), [("eval", "run/checkpoints/step-6.ckpt"), *((kind, "auto") for kind in HOSTILE)]
)
def test_nothing_is_advised(
    kind: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step-6.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {}, "global_step": 6, "callbacks": HOSTILE[kind]}, path)
    assert main(["train", *OVERRIDES, f"resume={resume}", f"run_dir={'run' if resume == 'auto' else 'new'}"]) == 2
    assert main(["export", str(path), "model.safetensors"]) == 2
    told = capsys.readouterr().err
    assert "which nothing allows" in told
    assert "allow_pickle=[" not in told
    assert "--allow-pickle" not in told
    assert not Path("trace").exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins:eval",
        "os:system",
        "os.path:join",
        "subprocess:run",
        "commands:getoutput",
        "__builtin__:eval",
        "a:b,builtins:eval",
    ],
)
def test_the_standard_library_cannot_be_allowed(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be allowed"), admitted([name]):
        pass
