"""A token of the environment reaches the user's function, and no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose.resolve import load, resolve, save
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.targets import call_target
from runner.record import RunRecord
from runner.targets import with_environment

SECRET = "s3cr3t-of-the-environment"
NAMED = "${oc.env:RUNNER_TEST_TOKEN}"
OVERRIDES = ["model=custom", "model.target=keeper:make", f"+model.kwargs.token='{NAMED}'", "data=random_regression"]


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_TEST_TOKEN", SECRET)


def _files_with_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_request_keeps_the_name_of_the_variable(tmp_path: Path) -> None:
    config = resolve(
        [*OVERRIDES, "+data.kwargs.again='${model.kwargs.token}'", "+data.kwargs.deep=[{a: '" + NAMED + "'}]"]
    )
    assert config.model.kwargs == {"token": NAMED}
    assert config.data.kwargs["again"] == NAMED
    assert with_environment(config.data.kwargs["deep"]) == [{"a": SECRET}]
    assert load(save(config, tmp_path / "config.yaml")) == config
    assert _files_with_secret(tmp_path) == []


def test_other_interpolations_are_resolved_at_once() -> None:
    assert resolve([*OVERRIDES, "+data.kwargs.seed=${seed}", "seed=7"]).data.kwargs["seed"] == 7


def test_a_number_of_the_environment_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_TEST_WIDTH", "12")
    config = resolve([*OVERRIDES, "+data.kwargs.width='${oc.decode:${oc.env:RUNNER_TEST_WIDTH}}'"])
    assert with_environment(config.data.kwargs)["width"] == 12


def test_a_missing_variable_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNNER_TEST_TOKEN")
    with pytest.raises(RequestError, match="RUNNER_TEST_TOKEN"):
        resolve(OVERRIDES)


def test_a_wrong_argument_is_told_without_the_secret() -> None:
    with pytest.raises(RequestError) as caught:
        call_target("model", "runner.zoo.mlp:mlp", {"no_such_argument": NAMED})
    assert SECRET not in str(caught.value)


@pytest.mark.costly
def test_a_run_gets_the_value_and_writes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.launch.start import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "keeper.py").write_text(
        "import torch\n\n\ndef make(token):\n"
        f"    assert token == {SECRET[::-1]!r}[::-1]\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))\n"
        "\n\ndef data(token):\n"
        "    x = torch.randn(64, 8)\n    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))\n"
    )
    overrides = [*OVERRIDES[:3], "data=custom", "data.target=keeper:data", f"+data.kwargs.token='{NAMED}'", "loss=mse"]
    config: RunConfig = resolve([*overrides, "trainer.max_steps=2", "run_dir=run", "logger=csv"])
    assert train(config, command="a test") == 0
    assert RunRecord.load(tmp_path / "run").config["model"]["kwargs"] == {"token": NAMED}
    assert _files_with_secret(tmp_path) == []
