"""The requests of the corpus: a seed and a generator, of which only digests of what they give are kept."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

from draws import STEPS, Reach, draw

import runner
from runner.config.schema import RunConfig

PLANS, WRONG = 220, 300
RUNS = 60  # of the plans, the first ones
FIXED = (
    "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null",
    f"trainer.max_steps={STEPS}",
)  # fmt: skip
_SEED = "corpus"
_STEADY = Reach(steady=True)
_CONF = Path(runner.__file__).parent / "conf"


def request(number: int) -> list[str]:
    """The words of a request of which most can be planned."""
    return [*draw(f"{_SEED}:{number}", _STEADY).overrides, *FIXED]


def wrong(number: int) -> list[str]:
    """The words of a request with a mistake or two."""
    rng = random.Random(f"{_SEED}:wrong:{number}")
    words = request(rng.randrange(PLANS))
    for _ in range(rng.choice((1, 1, 2))):
        words = rng.choice((_misspelt, _of_wrong_type, _out_of_range, _unknown_option, _met))(words, rng)
    return words


def _fields(section: type, path: str = "") -> Iterator[tuple[str, object]]:
    """Every key of the schema with its default, as an override names it."""
    for each in dataclasses.fields(section):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if dataclasses.is_dataclass(default):
            yield from _fields(type(default), f"{path}{each.name}.")
        else:
            yield f"{path}{each.name}", default


KEYS = [(key, default) for key, default in _fields(RunConfig) if not key.startswith(("launcher", "goes_with"))]


def _misspelt(words: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(words))
    key, _, value = words[place].partition("=")
    at = rng.randrange(max(1, len(key) - 1))
    typed = f"{key[:at]}{key[at + 1 : at + 2]}{key[at : at + 1]}{key[at + 2 :]}={value}"
    return [*words[:place], typed, *words[place + 1 :]]


def _of_wrong_type(words: list[str], rng: random.Random) -> list[str]:
    key, _ = rng.choice([each for each in KEYS if isinstance(each[1], int | float)])
    return [*words, f"{key}={rng.choice(('many', '[1,2]', '1.5.2', '{a: 1}'))}"]


def _out_of_range(words: list[str], rng: random.Random) -> list[str]:
    key, _ = rng.choice([each for each in KEYS if isinstance(each[1], int | float | None)])
    return [*words, f"{key}={rng.choice(('-1', '0', '-0.5', '1000000'))}"]


def _unknown_option(words: list[str], rng: random.Random) -> list[str]:
    group = rng.choice(sorted(path.name for path in _CONF.iterdir() if path.is_dir()))
    name = rng.choice(sorted(path.stem for path in (_CONF / group).glob("*.yaml")))
    return [*words, f"{group}={name[:-1] or 'x'}{rng.choice('xyz')}"]


def _met(words: list[str], rng: random.Random) -> list[str]:
    """An option of any group beside whatever else is asked for."""
    groups = ("activation_checkpoint", "offload", "optimizer", "precision", "schedule", "compression", "zero")
    group = rng.choice(groups)
    return [*words, f"{group}={rng.choice(sorted(path.stem for path in (_CONF / group).glob('*.yaml')))}"]
