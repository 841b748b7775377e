"""The documents taken apart into their code blocks, and run as somebody would who copies them.

The line that opens a block says what it is: its language, the file that it is the content of, and a mark where it
cannot be run everywhere. `sh` blocks are typed in a folder that holds the files of all blocks before them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

REASONS = {
    "output": "it is what a command prints",
    "diagram": "it is a drawing",
    "install": "it installs packages: .ci/run does so on every fresh machine",
    "cluster": "it needs SLURM, or several machines",
    "repository": "it changes the repository: it is run in a copy",
}
"""Every mark that a block may have, with the reason why it is not typed as it stands."""

LANGUAGES = ("python", "yaml", "sh", "text")
_BLOCK = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, under a heading. ``file`` and ``mark`` are empty where it has none."""

    page: str
    section: str
    language: str
    file: str
    mark: str
    text: str

    @property
    def is_typed(self) -> bool:
        return self.language == "sh" and not self.mark


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    bare = _BLOCK.sub(lambda match: " " * len(match[0]), text)  # a comment in a block is no heading
    headings = [(match.start(), match[1]) for match in _HEADING.finditer(bare)]
    found = []
    for match in _BLOCK.finditer(text):
        language, *words = match[1].split(" ")
        file = next((word for word in words if "." in word), "")
        mark = " ".join(word for word in words if word != file)
        section = [name for at, name in headings if at < match.start()][-1]
        found.append(Block(page, section, language, file, mark, match[2]))
    return found


def stories(page: str) -> dict[str, list[Block]]:
    """The blocks that are typed together, by section; the README is one story."""
    found: dict[str, list[Block]] = {}
    for block in blocks(page):
        if block.is_typed:
            found.setdefault("all" if page == "README.md" else block.section, []).append(block)
    return found


def write_files(page: str, directory: Path, until: Block | None = None) -> None:
    """Write the files of a page's blocks; where two have one name, the last before ``until`` stays."""
    for block in blocks(page):
        if block == until:
            return
        if block.file and not block.mark:
            (directory / block.file).parent.mkdir(parents=True, exist_ok=True)
            (directory / block.file).write_text(block.text, encoding="utf-8")


def type_in(text: str, directory: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Type the lines of a block in a shell that has ``runner``; it ends at the first line that fails."""
    programs = directory / ".programs"
    programs.mkdir(exist_ok=True)
    for name, command in {
        "runner": "-m runner",
        "python": "",
        "pytest": "-m pytest",
        "torchrun": "-m torch.distributed.run",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (programs / name).chmod(0o755)
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        # Open MPI refuses these unless it is told that they are meant: root, and more ranks than cores.
        **{f"OMPI_ALLOW_RUN_AS_ROOT{each}": "1" for each in ("", "_CONFIRM")},
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
