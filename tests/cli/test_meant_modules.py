"""A module that is not there, by a slip, is told with the file that was meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.errors import RequestError
from runner.targets import import_target

MEANT = [
    ("mien:build", "Try model.target=mine:build."),
    ("mine.py:build", "Try model.target=mine:build."),
    ("stranger:build", None),
    ("needs:build", None),  # it is there, and imports what is not
]


@pytest.mark.parametrize(("target", "advice"), MEANT)
def test_the_file_that_was_meant_is_advised(
    target: str, advice: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "needs.py").write_text("import need")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(RequestError) as caught:
        import_target("model.target", target)
    told = str(caught.value)
    assert "must name a module that imports" in told
    assert advice is None or told.endswith(advice)
    assert ("Try" in told) == (advice is not None)
    sys.modules.pop("mine", None)  # "mine.py:build" has imported it, and other tests have modules of that name
