"""Damages files of a run that was killed: cut short, or one bit changed."""

from __future__ import annotations

import random
from pathlib import Path

from runner.checkpoint.file import checkpoint_files
from runner.recipes.faults.kinds import Kind

__all__ = ["damage"]


def damage(run_dir: Path, kind: Kind, chance: random.Random) -> int | None:
    """Damage the file that a kind names.

    Returns:
        for a checkpoint, the step of the one before it, or 0; else None.
    """
    if kind.file != "checkpoint":
        path = run_dir / kind.file
        if path.exists():
            _change(path, kind, chance)
        return None
    files = checkpoint_files(run_dir / "checkpoints")
    if not files:
        return None
    *earlier, newest = files
    path = files[newest]
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    if parts:
        _change(chance.choice(parts), kind, chance)
    return earlier[-1] if earlier else 0


def _change(path: Path, kind: Kind, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if kind.damage == "truncated":
        path.write_bytes(content[: chance.randrange(len(content))] if content else b"")
    elif content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
