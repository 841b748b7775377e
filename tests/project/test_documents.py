"""Every code block of the README and the docs, run as somebody would who copies it.

What cannot be typed everywhere is marked in the document, for one of the reasons in ``documents.REASONS``; its requests
are resolved all the same. The long stories are run where tests marked full are.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from documents import LANGUAGES, PAGES, REASONS, ROOT, Block, blocks, stories, type_in, write_files

from runner.config.compose.groups import groups
from runner.config.compose.resolve import resolve_sweep
from runner.launch.hydra.settings import split_words
from runner.launch.run.largest_batch import MAX
from runner.plan.requested_schedule import resolve_request

ALL = [block for page in PAGES for block in blocks(page)]
STORIES = [(page, section) for page in PAGES for section in stories(page)]


def lines_of(block: Block) -> list[list[str]]:
    """The words of each line of a shell block, comments left out."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def test_every_block_says_what_it_is() -> None:
    for block in ALL:
        assert block.language in LANGUAGES, block
        assert block.mark in {"", *REASONS}, block
        assert bool(block.file) == (block.language in ("python", "yaml")), block
        assert (block.language == "text") == (block.mark in ("output", "diagram")), block


def test_marks_are_honest() -> None:
    """A mark stands where its reason does, and nowhere else."""
    assert {block.mark for block in ALL} == {"", *REASONS}
    for block in ALL:
        if block.language == "sh":
            assert ("pip install" in block.text) == (block.mark == "install"), block.text
        if block.mark == "cluster":
            assert re.search(r"slurm|srun|ssh|--host|--nnodes", block.text), block.text


@pytest.mark.parametrize("block", [each for each in ALL if each.file], ids=lambda each: f"{each.page}-{each.file}")
def test_files_can_be_read(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
    else:
        assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("page", PAGES)
def test_requests_are_good(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that only a cluster can run."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.language != "sh" or block.mark == "repository":
            continue
        write_files(page, tmp_path, until=block)
        for words in lines_of(block):
            if "runner" not in words or words[words.index("runner") + 1] not in ("train", "plan", "verify", "schedule"):
                continue
            overrides = [word for word in words[words.index("runner") + 2 :] if "=" in word]
            plain = [word for word in split_words(overrides)[1] if not re.search(r"=(tag|interval)\(", word)]
            plain = [word for word in plain if word != MAX]  # the size that it finds is a plan's
            for job in resolve_sweep(plain)[:2]:
                resolve_request(job)


@pytest.mark.full
@pytest.mark.parametrize(("page", "section"), STORIES)
def test_a_story(page: str, section: str, tmp_path: Path) -> None:
    for block in stories(page)[section]:
        write_files(page, tmp_path, until=block)
        done = type_in(block.text, tmp_path)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.full
def test_what_changes_the_repository(tmp_path: Path) -> None:
    """In a copy of it."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".git", "__pycache__", "outputs", "*.egg-info")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    marked = [block for block in ALL if block.mark == "repository"]
    for block in marked:
        if block.file:
            (copy / block.file).write_text(block.text, encoding="utf-8")
    for block in marked:
        if block.language == "sh":
            done = type_in(block.text, copy, root=copy)
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    done = type_in("runner schedule --list", copy, root=copy)
    assert "pairs" in done.stdout


def test_every_group_has_a_place_in_the_documents() -> None:
    """The table of docs/configuration.md names each group once, and the headings to which it leads are there."""
    folder = ROOT / "docs"
    page = (folder / "configuration.md").read_text(encoding="utf-8")
    table = page.split("## Where each group is told\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[0])) == sorted(groups())
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", table):
        text = (folder / target).read_text(encoding="utf-8") if target else page
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, heading
