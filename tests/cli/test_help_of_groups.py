"""``runner help GROUP``: every option of a group with what it does, and its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.help import topics
from runner.cli.main import main
from runner.config.compose.groups import groups, options, shipped_conf


@pytest.mark.parametrize("group", sorted(groups()))
def test_a_group_tells_its_options(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["help", group]) == 0
    text = capsys.readouterr().out
    assert [name for name in options(group, (shipped_conf(),)) if f"  {name}" not in text] == []


def test_a_section_without_options_tells_its_keys_and_own_options_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "trainer" in topics() - set(groups())
    assert main(["help", "trainer"]) == 0
    assert "trainer.max_steps=" in capsys.readouterr().out
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "mine.yaml").write_text("# Samples of my own.\nname: mine\n")
    assert main(["help", "data"]) == 0
    assert "Samples of my own." in capsys.readouterr().out


def test_what_is_no_topic_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "ofload"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("command = ofload: there is no such command. The commands are train, plan,")
    assert "; there is also help for activation_checkpoint," in told
    assert told.endswith("Try runner help offload.\n")
