"""Whisper of transformers trains in one and in two stages as transformers' own model does in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from requests_in_threads import trained
from torch.nn import functional

TOKENS, BATCH, STEPS = 30, 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "num_mel_bins": 6, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_source_positions": 7, "max_target_positions": 12, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


class Recordings(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        self.sounds = torch.randn(BATCH * STEPS, 6, 14, generator=generator)
        self.tokens = torch.randint(4, TOKENS, (BATCH * STEPS, 7), generator=generator)

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, index: int) -> Any:
        return (self.sounds[index], self.tokens[index, :-1]), self.tokens[index, 1:]


def data() -> Recordings:
    return Recordings()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", [1, 2])
def test_whisper_trains(tmp_path: Path, pipeline: int) -> None:
    """From a folder, whose config.json names the architecture; the sinusoids are frozen, as its constructor does."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(3)
    made = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES))
    made.save_pretrained(tmp_path)
    held = made.state_dict()
    here = "test_speech_of_transformers"
    words = [
        "model=huggingface",
        f"model.pretrained={tmp_path}",
        f"data.target={here}:data",
        f"loss.target={here}:loss",
    ]
    losses, state = trained([*words, f"data.batch_size={BATCH}"], pipeline=pipeline, microbatches=2, steps=STEPS)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES)).train()
    model.load_state_dict(held)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    rows = Recordings()
    for step in range(STEPS):
        at = slice(step * BATCH, (step + 1) * BATCH)
        given = {"input_features": rows.sounds[at], "decoder_input_ids": rows.tokens[at, :-1]}
        found = loss(model(**given, use_cache=False).logits, rows.tokens[at, 1:])
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(found.item())
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6, msg=name)
