"""The plan of a model of published sizes, of which there is no weight, has the bytes that follow from its shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main

pytest.importorskip("transformers")

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "vocab_size": 32000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
"""The sizes of Llama 2 with 7 billion parameters."""
_COMMON = (
    "hardware=a100_80gb", "precision=bf16_master", "data=random_tokens", "data.kwargs.sequence_length=1024",
    "parallelism.tensor=2",
)  # fmt: skip
_ANGLES = 64 * 4
"""Bytes of the frequencies of rotary positions, a buffer in the stage of the first layers."""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        (("parallelism.data=8", "data.batch_size=8"), [3_369_340_928]),
        (
            (
                "parallelism.pipeline=2", "partition=manual", "partition.boundaries=[17]", "data.batch_size=4",
                "schedule.microbatches=4",
            ),
            [1_684_668_416, 1_684_672_512],
        ),
    ],
    ids=["replicas", "stages"],
)  # fmt: skip
def test_two_ranks_divide_llama_2(
    layout: tuple[str, ...],
    weights: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of 6,738,415,616 weights and of their 16 bytes each, and the norms whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(_LLAMA))
    status = main(["plan", "model=huggingface", "model.pretrained=llama", *_COMMON, *layout, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (status, found["fits"]) == (0, True)
    of_ranks = [count for count in weights for _ in range(len(found["state_bytes"]) // len(weights))]
    assert [each["gradients"] for each in found["state_bytes"]] == [2 * count for count in of_ranks]
    states = [sum(each.values()) for each in found["state_bytes"]]
    assert states[0] == 16 * of_ranks[0] + _ANGLES
    assert states[-1] == 16 * of_ranks[-1] + (_ANGLES if len(weights) == 1 else 0)
    assert found["parameters"] == 6_738_415_616
