"""A user's own strategy: a module and an option file in a folder of theirs, nothing in the runner."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plan_profiles import layer, model
from programs import chains

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.solve.values import Segment
from runner.plan.make import make_plan

MODULE = """
from runner.memory.solve.strategy import Strategy
from runner.options import Option
from runner.memory.solve.values import Segment

SEEN = []


def twice(chain):
    SEEN.append(chain)
    inside = (Segment(chain.first, chain.first, recompute=True), Segment(chain.first + 1, chain.last))
    return [Segment(chain.first, chain.last, recompute=True, inside=inside)]


def at(chain):
    cut = chain.first + chain.options["cut"]
    return [Segment(chain.first, cut, recompute=True), Segment(cut + 1, chain.last)]


def operators(chain):
    return [Segment(each, each, recompute=True, save_ops="matmuls") for each in chain.indices]


def short(chain):
    return [Segment(chain.first, chain.first)]


def raises(chain):
    raise ValueError("no budget")


CUT = Option("cut", int, "the last layer that is run again", "1", "must be at least 0", lambda cut: cut < 0, "0")
STRATEGY = Strategy("at", at, options=(CUT,))
NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with ``own_strategy.py``."""
    (tmp_path / "own_strategy.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "conf" / "activation_checkpoint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("own_strategy", None)


def request(folder: Path, option: str, *overrides: str) -> RunConfig:
    """A request with ``activation_checkpoint=mine``."""
    path = folder / "conf" / "activation_checkpoint" / "mine.yaml"
    path.write_text(f"# Mine.\n{option}\n", encoding="utf-8")
    return resolve(["model=mlp", "activation_checkpoint=mine", *overrides], working_directory=folder)


def planned(config: RunConfig) -> tuple[tuple[Segment, ...], ...]:
    assert rules(config) == []
    return chains(make_plan(config, model([layer()] * 4)).activations)


def test_a_plain_function_is_a_strategy(folder: Path) -> None:
    config = request(folder, "target: own_strategy:twice", "memory_limit=2000")
    inside = (Segment(0, 0, recompute=True), Segment(1, 3))
    assert planned(config) == ((Segment(0, 3, recompute=True, inside=inside),),)
    chain = sys.modules["own_strategy"].SEEN[-1]
    assert chain.in_flight == 1
    states = 4 * (40 + 40 + 80)  # weights, gradients and two moments of each layer
    assert 0 < chain.budget_bytes < 2000 - states
    assert (config.activation_checkpoint.name, len(chain.layers), chain.loss) == ("mine", 4, chain.profile.loss)


def test_an_object_says_what_it_takes(folder: Path) -> None:
    config = request(folder, "name: mine\ntarget: own_strategy:STRATEGY\nkwargs: {cut: 1}")
    assert config.activation_checkpoint.name == "mine"
    assert planned(config) == ((Segment(0, 1, recompute=True), Segment(2, 3)),)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("target: own_strategy:STRATEGY", "kwargs.cut = null: must be given. The policy at needs it. Try "),
        ("target: own_strategy:STRATEGY\nkwargs: {cut: -1}", "kwargs.cut = -1: must be at least 0. Try "),
        ("target: own_strategy:STRATEGY\nkwargs: {cut: 1, cat: 2}", "kwargs.cat = 2: is no option of the policy at."),
        ("target: own_strategy:STRATEGY\nkwargs: {cut: one}", "kwargs.cut = one: must be of type int. Try "),
        ("target: own_strategy:short", "target = own_strategy:short: must return segments that are the layers 0 .. 3"),
        ("target: own_strategy:raises", "target = own_strategy:raises: must make a program of a stage. ValueError: no"),
        ("target: own_strategy:NUMBER", "target = own_strategy:NUMBER: must name a function of that module."),
        ("target: own_strategy:twise", "Try activation_checkpoint.target=own_strategy:twice."),
        ("target: own_strateg:twice", "target = own_strateg:twice: must name a module that imports."),
    ],
)
def test_what_is_wrong_with_it_is_one_line(folder: Path, option: str, line: str) -> None:
    config = request(folder, option)
    with pytest.raises(RequestError) as caught:
        planned(config)
    (problem,) = caught.value.problems
    assert problem.path.startswith("activation_checkpoint.")
    assert line in problem.line()
    assert "\n" not in problem.line()


def test_operators_that_are_kept_are_refused_where_they_are_not_seen(folder: Path) -> None:
    config = request(folder, "target: own_strategy:operators", "offload=activations_save_on_cpu")
    with pytest.raises(RequestError, match=r"offload.activations = save_on_cpu: must be none. own_strategy:operators"):
        planned(config)


def test_a_nest_that_no_stack_holds_is_refused(folder: Path) -> None:
    text = "def deep(chain):\n    from runner.memory.solve.values import Segment\n    inside = ()\n"
    text += "    for _ in range(70):\n        inside = (Segment(chain.first, chain.last, True, inside=inside),)\n"
    (folder / "own_strategy.py").write_text(text + "    return inside\n", encoding="utf-8")
    with pytest.raises(RequestError, match="must put at most 64 segments inside of each other. Stage 0 has more"):
        planned(request(folder, "target: own_strategy:deep"))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["activation_checkpoint=custom"], "activation_checkpoint.target = ???: must be given."),
        (["activation_checkpoint=full", "+activation_checkpoint.kwargs.a=1"], "kwargs = {'a': 1}: belong to a target."),
        (
            ["activation_checkpoint=full", "activation_checkpoint.target=a:b"],
            "belongs to a policy of your own. full is one of the runner's. Try activation_checkpoint=custom.",
        ),
        (["activation_checkpoint.target=a.b"], "must be package.module:function."),
        (
            ["activation_checkpoint.target=a:b", "activation_checkpoint.every=2"],
            "activation_checkpoint.every = 2: belongs to activation_checkpoint=periodic.",
        ),
    ],
)
def test_the_section_alone_tells(overrides: list[str], line: str) -> None:
    (problem,) = rules(resolve(["model=mlp", *overrides]))
    assert line in problem.line()
