"""Requests of every command drawn at random: what is wrong ends in lines, never in a traceback."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import user_code
from answers import answered_within

from runner.cli.main import main
from runner.config.compose.groups import config_roots, groups, options
from runner.config.compose.shape import key_paths, type_at

SECONDS = 60  # of the machine's worst day; a request is answered in one, a training in ten
STATUSES = {  # the documented ones that need no signal
    "train": {0, 1, 2, 3},
    "plan": {0, 1, 2, 3},  # 1: a checkpoint that cannot be read now
    "schedule": {0, 2},
    "report": {0, 1, 2},
    "export": {0, 1, 2},
    "help": {0, 2},
}
COMMANDS = ["plan"] * 10 + ["schedule"] * 4 + ["train"] * 2 + ["report"] * 2 + ["export"] * 2 + ["help"]
KEYS = sorted(path for path in key_paths() if "kwargs" not in path)
GROUPS = sorted(groups())
OPTIONS = {group: options(group, config_roots(Path.cwd())) for group in GROUPS}
TINY = ("model=mlp", "data.batch_size=8", "logger=none", "trainer.max_steps=1")
OWN = [
    "model.target=user_code:model",
    "data.target=user_code:points",
    "loss.target=user_code:mean",
    "device=cpu",
    "trainer.max_steps=1",
]
FUNCTIONS = [
    "raising",
    "leaving",
    "nothing",
    "number",
    "empty_sequential",
    "frozen",
    "giving_none",
    "giving_text",
    "ListsNumbers",
    "triples",
    "dicts",
]
FUNCTIONS += [
    "empty_stream",
    "texts",
    "loss_text",
    "loss_number",
    "loss_raising",
    "loss_detached",
    "loss_nan",
    "collate_one",
    "points",
]
TYPES = {
    "int": ["-1", "0", "1", "2", "3", "7", "1000", "1000000000", "1.5", "two"],
    "float": ["-1", "0", "0.5", "1e300", ".inf", ".nan", "1,5", "x"],
    "bool": ["true", "false", "yes", "3"],
    "str": [
        "none",
        "auto",
        "user_code:raising",
        "os:getcwd",
        "cuda",
        "cpu",
        "zb_v",
        "0",
        "/proc",
        "''",
        "é",
        "${seed}",
    ],
    "list": ["[]", "[0]", "[3,2]", "[-1]", "[a]", "[[1]]", "3", "[1,"],
}
FILES = {  # a name and what is in it
    "empty": b"",
    "text": b"hello\n",
    "broken.json": b'{"steps": [',
    "record.json": b'{"format": 99}',
    "noise.safetensors": bytes(range(256)) * 8,
    "order.csv": b"0F0,0B0\n1F0,",
    "pickle.pt": b"\x80\x04cposix\nsystem\n.",
    "config.yaml": b"model: [1, 2\n",
    "directory/record.json": b"null",
    "run/checkpoints/step_1.ckpt": b"PK\x03\x04 not an archive",
}
FILE_KEYS = [
    key for key in KEYS if key.rsplit(".", 1)[-1] in {"resume", "run_dir", "file", "directory", "path", "profile"}
]


def _typed(draw: random.Random) -> str:
    """A key with a value of its type, or of another one."""
    key = draw.choice(KEYS)
    near = [name for name in TYPES if name in str(type_at(key))] or list(TYPES)
    kind = draw.choice(near) if draw.random() < 0.7 else draw.choice(list(TYPES))
    return f"{key}={draw.choice(TYPES[kind])}"


def _misspelt(draw: random.Random) -> str:
    key = draw.choice(KEYS)
    place = draw.randrange(len(key))
    return f"{draw.choice(['', '+', '~', '++', '--'])}{key[:place]}{key[place + 1 :]}={draw.choice(['1', 'none', ''])}"


def _option(draw: random.Random) -> str:
    group = draw.choice(GROUPS)
    of = group if draw.random() < 0.7 else draw.choice(GROUPS)
    return f"{group}={draw.choice(sorted(OPTIONS[of]) or ['none'])}"


def _function(draw: random.Random) -> str:
    key = draw.choice(["model.target", "data.target", "loss.target", "data.collate", "optimizer.target"])
    return f"{key}=user_code:{draw.choice(FUNCTIONS)}"


def _file(draw: random.Random) -> str:
    return f"{draw.choice(FILE_KEYS)}={draw.choice([*FILES, 'directory', 'run', 'absent', '/proc/1/mem'])}"


def _noise(draw: random.Random) -> str:
    return "".join(draw.choice("abz=.,[]{}'\"$~+-/\\ :é\n\t0") for _ in range(draw.randrange(1, 12)))


_COMMON: list[Callable[[random.Random], str]] = [_typed, _typed, _typed, _option, _option, _function, _file]
_RARE: list[Callable[[random.Random], str]] = [_misspelt, _noise]  # they end a request before it is looked at


def request(seed: int) -> list[str]:
    """The words of one request; the same ones for the same seed."""
    draw = random.Random(seed)
    command = draw.choice(COMMANDS)
    words = [draw.choice(_RARE if draw.random() < 0.1 else _COMMON)(draw) for _ in range(draw.randrange(1, 4))]
    if command in {"plan", "train"}:
        words = [*draw.choice([TINY, OWN]), *words, *(["trainer.max_steps=1"] if command == "train" else [])]
    if command in {"report", "export"}:
        paths = [*FILES, "directory", "run", "absent", "/proc/1/mem", "."]
        words = [draw.choice(paths), *(["out.safetensors"] if command == "export" else []), *words[: draw.randrange(2)]]
    return [command, *words]


def _complaint(words: list[str], capfd: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with the answer to a request, or None."""
    with answered_within(SECONDS, words):
        status = main(words)
    shown = capfd.readouterr()
    if status not in STATUSES[words[0]]:
        return f"status {status}: {shown.err[-400:]}"
    if "Traceback" in shown.err + shown.out:
        return f"a traceback: {shown.err[-400:]}"
    if status and not shown.err.strip():
        return f"status {status} without a word"
    return None


def _check(seeds: range, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(user_code.__file__, place)  # where the ranks of a run find it, too
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    found = {seed: _complaint(request(seed), capfd) for seed in seeds}
    assert [(seed, request(seed), complaint) for seed, complaint in found.items() if complaint] == []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("runner"), "handlers", [])  # they write to an earlier test's standard error
    return tmp_path


@pytest.mark.costly
def test_some_of_them(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _check(range(24), place, capfd)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(5))
def test_five_hundred(part: int, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _check(range(100 * part, 100 * (part + 1)), place, capfd)
