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
)  # fmt: skip
_BLOOM = (
    "model.kwargs.model_type=bloom", "model.kwargs.hidden_size=14336", "model.kwargs.num_hidden_layers=70",
    "model.kwargs.num_attention_heads=112", "model.kwargs.vocab_size=250880", "data.kwargs.vocab_size=250880",
    "model.kwargs.max_position_embeddings=null", "parallelism.tensor=4", "parallelism.pipeline=12",
    "parallelism.data=8", "schedule.microbatches=256", "data.batch_size=2048", "activation_checkpoint=full",
)  # fmt: skip
"""The sizes of BLOOM with 176 billion parameters, on 384 devices."""
_ANGLES = 64 * 4
"""Bytes of the frequencies of rotary positions, a buffer in the stage of the first layers."""


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The status and the document of the plan of Llama 2."""
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(_LLAMA))
    return told(capsys, "model.pretrained=llama", *words)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["plan", "model=huggingface", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


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
    status, found = planned(tmp_path, capsys, *_COMMON, "parallelism.tensor=2", *layout)
    assert (status, found["fits"]) == (0, True)
    of_ranks = [count for count in weights for _ in range(len(found["state_bytes"]) // len(weights))]
    assert [each["gradients"] for each in found["state_bytes"]] == [2 * count for count in of_ranks]
    states = [sum(each.values()) for each in found["state_bytes"]]
    assert states[0] == 16 * of_ranks[0] + _ANGLES
    assert states[-1] == 16 * of_ranks[-1] + (_ANGLES if len(weights) == 1 else 0)
    assert found["parameters"] == 6_738_415_616


@pytest.mark.costly
def test_sixteen_whole_copies_of_llama_2_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 bytes for each of 6,738,415,616 weights are 107.8 GB, and a device has 80."""
    monkeypatch.chdir(tmp_path)
    status, found = planned(tmp_path, capsys, *_COMMON, "parallelism.data=16", "data.batch_size=16")
    assert (status, found["fits"]) == (3, False)
    assert {sum(each.values()) for each in found["state_bytes"]} == {107_814_649_856 + _ANGLES}


@pytest.mark.costly
@pytest.mark.parametrize(("zero", "status"), [pytest.param("zero=2", 0, marks=pytest.mark.full), ("zero=none", 3)])
def test_twelve_stages_of_four_parts_hold_bloom(zero: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each block the feed-forward layers are divided; the tied table is whole in the first and the last stage."""
    found_status, found = told(capsys, *_BLOOM, *_COMMON, "data.kwargs.sequence_length=2048", zero)
    assert (found_status, found["fits"]) == (status, status == 0)
    assert found["parameters"] == 176_247_271_424
    if zero == "zero=none":
        width, layers, vocabulary = 14336, 70, 250880
        held = layers * (6 * width**2 + 10 * width) + 4 * width + 2 * vocabulary * width
        assert sum(sum(each.values()) for each in found["state_bytes"][:: 8 * 4]) == 16 * held
