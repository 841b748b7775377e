"""Experts that ranks divide, in models of transformers as they are: what transformers itself gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from whole_runs import Run, require_peaks, train

from runner.config.compose.resolve import resolve
from runner.errors import RequestError

transformers = pytest.importorskip("transformers")

_STEPS, _WORDS = 3, 19
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_experts_per_tok": 2, "vocab_size": _WORDS, "max_position_embeddings": 8,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "num_local_experts": 5, "intermediate_size": 48},
    "qwen3_moe": {**_SIZES, "num_experts": 3, "moe_intermediate_size": 32, "intermediate_size": 40},
}
_COMMON = (
    "model=huggingface", "data=custom", "data.target=tensor_models:data", f"+data.kwargs.tokens={_WORDS}",
    "loss=token_cross_entropy", "data.batch_size=8", "data.shuffle=false", "optimizer=sgd", "optimizer.lr=0.5",
    "device=cpu", "hardware=laptop_cpu", "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null",
    f"trainer.max_steps={_STEPS}", "seed=3",
)  # fmt: skip


def run(folder: Path, kind: str, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    sizes = [f"+model.kwargs.{key}={value}" for key, value in {**_KINDS[kind], "model_type": kind}.items()]
    return train(resolve([*_COMMON, *sizes, *overrides]), folder)


def plain(kind: str, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    config = transformers.AutoConfig.for_model(kind, **_KINDS[kind])
    model: Any = transformers.AutoModelForCausalLM.from_config(config).float().train()
    model.load_state_dict(start)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for step in range(_STEPS):
        samples = [tensor_models.data(_WORDS)[8 * step + at] for at in range(8)]
        tokens, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        logits = model(tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "ranks"), [("mixtral", 2), ("qwen3_moe", 4)])
def test_experts_are_divided(kind: str, ranks: int, tmp_path: Path) -> None:
    run(tmp_path / "start", kind, "optimizer.lr=1e-30", "trainer.max_steps=1")
    losses, weights = plain(kind, load_file(tmp_path / "start" / "weights.safetensors"))
    made = run(tmp_path / "parts", kind, f"parallelism.tensor={ranks}")
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in load_file(tmp_path / "parts" / "weights.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=2e-6, msg=name)
    whole = sum(value.numel() for name, value in weights.items() if "norm" in name or name.endswith("mlp.gate.weight"))
    known = sum(value.numel() for value in weights.values())
    padding = -_WORDS % ranks * 2 * 32  # rows of the embedding and of the head
    parts = (known - whole + padding) * (ranks - 1) // ranks - padding * (ranks - 1) // ranks
    assert abs(made.plan.profile.parameters_elsewhere - parts) <= padding
    require_peaks(made)
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("{model.layers.*.mlp.experts:'experts'}", "Its 48 hidden features cannot be divided by 5"),
        ("{model.layers.*.mlp:'experts'}", "It is a MixtralSparseMoeBlock, and experts have two weights"),
    ],
)
def test_what_is_no_such_mixture_is_refused(rules: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, "mixtral", "parallelism.tensor=5", f"parallelism.sharding={rules}")
