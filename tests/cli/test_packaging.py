"""A wheel carries the option files and the recipes, and works without the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc")


@pytest.mark.costly
def test_a_wheel_is_complete(tmp_path: Path) -> None:
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    for folder in ("runner", "conf", "recipes"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=UNWANTED)
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source / file)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=1500)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
        archive.extractall(unpacked)
    for folder in ("runner", "conf", "recipes"):
        prefix = "" if folder == "runner" else "runner/"
        for path in (source / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md", ".png", ".typed"):
                assert prefix + path.relative_to(source).as_posix() in carried
    command = [sys.executable, "-m", "runner", "schedule", "recipe=rudalle_tiny", "--json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert '"ranks": 2' in done.stdout
