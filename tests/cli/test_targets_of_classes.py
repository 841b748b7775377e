"""A target may be a function of a class, such as the class method by which a library makes its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import LossConfig
from runner.errors import RequestError
from runner.model.data import load_loss
from runner.model.make import load_layers
from runner.targets import import_target

LIBRARY = """
from torch import nn

class Net(nn.Sequential):
    @classmethod
    def from_name(cls, name, **more):
        return cls(nn.Linear(more["width"], 2), nn.Tanh())
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net_library.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("library")
def test_a_model_is_made_by_a_class_method() -> None:
    words = ["model.target=net_library:Net.from_name", "+model.kwargs.name=small", "+model.kwargs.width=3"]
    config = resolve([*words, "data=random_regression", "loss=mse"])
    layers = load_layers(config.model, seed=0)
    assert [layer.name for layer in layers] == ["0", "1"]
    first = layers[0].build()
    assert [tuple(each.shape) for each in first.parameters()] == [(2, 3), (2,)]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("target", ["net_library:Net.from_nmae", "net_library:Nte.from_name", "net_library:Net.a.b"])
def test_what_a_class_does_not_have_is_refused(target: str) -> None:
    with pytest.raises(RequestError, match="must name a function of that module"):
        import_target("model.target", target)


@pytest.mark.parametrize("target", ["net:Net.", "net:.from_name", "net:Net:from_name"])
def test_other_spellings_are_refused(target: str) -> None:
    told = [problem.line() for problem in rules(resolve([f"model.target={target}", "model=custom"]))]
    assert any(f"model.target = {target}: must be package.module:function" in line for line in told)


def test_an_unknown_argument_of_a_loss_is_told_with_the_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def loss(output, target, delta=1.0): return output.mean()\ndef free(output, target, **more): return 0"
    (tmp_path / "loss_library.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError) as refused:
        load_loss(LossConfig(target="loss_library:loss", kwargs={"deltta": 2.0}))
    assert str(refused.value) == (
        "loss.kwargs.deltta = 2.0: is no argument of loss. Its arguments are output, target, delta. "
        "Try loss.kwargs.delta=2.0."
    )
    assert load_loss(LossConfig(target="loss_library:free", kwargs={"deltta": 2.0}))(0, 0) == 0
