"""Losses that a model of transformers adds in its forward, beside that of its logits: refused, not dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.cli.main import main
from runner.zoo.huggingface import build

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
ROUTED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "output_router_logits": True}
T5: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2}

ASKING: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({**ROUTED, "num_local_experts": 2}, "output_router_logits=true with router_aux_loss_coef=0.001"),
    "qwen2_moe": ({**ROUTED, "num_experts": 2, "router_aux_loss_coef": 3.0}, "router_aux_loss_coef=3.0"),
    "qwen3_moe": ({**ROUTED, "num_experts": 2}, "output_router_logits=true with router_aux_loss_coef"),
    "olmoe": ({**ROUTED, "num_experts": 2}, "output_router_logits=true with router_aux_loss_coef"),
    "gpt_oss": ({**ROUTED, "num_local_experts": 2, "head_dim": 8}, "output_router_logits=true with router_aux_loss"),
    "jetmoe": ({"vocab_size": 32, "hidden_size": 16, "output_router_logits": True}, "true with aux_loss_coef=0.01"),
    "dbrx": ({"vocab_size": 32, "d_model": 16, "output_router_logits": True}, "ffn_config.moe_loss_weight=0.01"),
    "switch_transformers": ({**T5, "router_z_loss_coef": 0.5}, "router_z_loss_coef=0.5"),
    "nllb-moe": ({"vocab_size": 32, "d_model": 16, "output_router_logits": True}, "router_z_loss_coef=0.001"),
    "bamba": ({"vocab_size": 32, "z_loss_coefficient": 0.1}, "z_loss_coefficient=0.1"),
    "prophetnet": ({"vocab_size": 32, "hidden_size": 16}, "ngram=2"),
    "vit": ({"hidden_size": 16, "problem_type": "multi_label_classification"}, "problem_type=multi_label"),
}
TASK = {"switch_transformers": "seq2seq", "nllb-moe": "seq2seq", "prophetnet": "seq2seq", "vit": "image"}


@pytest.mark.parametrize("model_type", ASKING)
def test_a_configuration_asks_for_another_loss(model_type: str) -> None:
    """Each family names its losses in its own way; the message has the field, its value and the way out."""
    fields, told = ASKING[model_type]
    with pytest.raises(ValueError, match=r"would leave it out: set model\.kwargs\.\w") as raised:
        build(TASK.get(model_type, "causal"), model_type, **fields)
    assert told in str(raised.value)


def test_what_transformers_leaves_out_itself_is_taken() -> None:
    """A mixture whose configuration asks for no router loss is trained as transformers does."""
    off = {**ROUTED, "output_router_logits": False, "num_local_experts": 2}
    for fields in (off, {**off, "router_aux_loss_coef": 0.0}, {**ROUTED, "router_aux_loss_coef": 0.0}):
        assert build("causal", "mixtral", **fields)
    with pytest.raises(ValueError, match=r"coef=1\.5 asks .* set model\.kwargs\.router_aux_loss_coef=0"):
        build("causal", "mixtral", **{**off, "router_aux_loss_coef": 1.5})


def test_a_folder_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fields of config.json count as those of the request, which may set them otherwise."""
    fields = {**ROUTED, "num_local_experts": 2, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = ["plan", "model=huggingface", f"model.pretrained={tmp_path}", "data.kwargs.vocab_size=32", "device=cpu"]
    assert main(asked) == 2
    assert "set model.kwargs.output_router_logits=false" in capsys.readouterr().err
    assert build(pretrained=str(tmp_path), output_router_logits=False)
