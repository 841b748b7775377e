"""What tests of the text of ``runner plan`` share: a small model, and a place of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["gpt", "in_own_place"]


def gpt(layers: int) -> tuple[str, ...]:
    """A model of some blocks for a machine that is not at hand, so that nothing is timed."""
    sizes = (f"model.kwargs.layers={layers}", "model.kwargs.width=16", "model.kwargs.heads=2")
    return ("model=gpt", *sizes, "data.kwargs.samples=64", "data.kwargs.val_samples=0", "hardware=a100_80gb")


def in_own_place(factory: pytest.TempPathFactory, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with lines of 80 columns; profiles are kept for the whole session."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RUNNER_CACHE", str(factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
