from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def emoji_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this session alone, so that the data is really built once here."""
    folder = tmp_path_factory.mktemp("emoji")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_CACHE", str(folder))
        yield folder


@pytest.fixture
def small() -> dict[str, Any]:
    """Arguments of a model that runs in milliseconds: 6 text tokens, 4 x 4 image tokens."""
    return {
        "text_vocab": 20,
        "image_vocab": 16,
        "text_length": 6,
        "grid": 4,
        "width": 16,
        "layers": 4,
        "heads": 2,
        "kernel": 3,
        "init": "scratch",
        "attention": "sdpa",
    }


@pytest.fixture
def small_ids() -> torch.Tensor:
    """Two inputs of the small model, the captions padded."""
    generator = torch.Generator().manual_seed(1)
    text = torch.tensor([[2, 7, 3, 0, 0, 0], [2, 9, 11, 4, 3, 0]])
    return torch.cat([text, torch.randint(16, (2, 15), generator=generator)], dim=1)
