"""Small models of transformers, saved in shards as their authors would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

TOKENS, LENGTH, CLASSES = 64, 8, 5
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
HALF = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}


def tokens(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, TOKENS, (samples, LENGTH), generator=generator)


def images(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(samples, 3, 16, 16, generator=generator)


def classes(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, CLASSES, (samples,), generator=generator)


@dataclass(frozen=True)
class Architecture:
    """An architecture with its classes' names in transformers.

    Args:
        config, kind: its configuration and its model.
        sizes: the configuration's fields.
        inputs, targets: a batch of so many samples.
    """

    config: str
    kind: str
    sizes: dict[str, Any]
    inputs: Callable[[int, torch.Generator], Any] = tokens
    targets: Callable[[int, torch.Generator], torch.Tensor] = tokens

    def make(self) -> Any:
        torch.manual_seed(5)
        return getattr(transformers, self.kind)(getattr(transformers, self.config)(**self.sizes))

    def save(self, folder: Path) -> Path:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.make().save_pretrained(folder, max_shard_size="30KB")
        return folder

    def open(self, folder: Path) -> Any:
        """The model that transformers itself makes of a folder, without a cache of keys and values.

        It caches them in training, too, unless it is told not to. Cached ones lie otherwise in memory, so that T5's
        attention rounds otherwise.
        """
        model = getattr(transformers, self.kind).from_pretrained(folder, dtype=torch.float32)
        for part in model.modules():
            if hasattr(getattr(part, "config", None), "use_cache"):
                part.config.use_cache = False
        return model

    def logits(self, model: Any, inputs: Any) -> torch.Tensor:
        """What transformers' own model returns for a batch."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        names = ("input_ids", "decoder_input_ids") if len(given) > 1 else (model.main_input_name,)
        logits: torch.Tensor = model(**dict(zip(names, given, strict=True))).logits
        return logits


def pairs(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(samples, generator), tokens(samples, generator)


of = partial(Architecture)
ARCHITECTURES = {
    "llama": of("LlamaConfig", "LlamaForCausalLM", HALF),
    "llama_tied": of("LlamaConfig", "LlamaForCausalLM", {**HALF, "tie_word_embeddings": True}),
    "qwen3": of("Qwen3Config", "Qwen3ForCausalLM", {**HALF, "head_dim": 8}),
    "gemma2": of("Gemma2Config", "Gemma2ForCausalLM", {**HALF, "head_dim": 8}),
    "mixtral": of("MixtralConfig", "MixtralForCausalLM", {**HALF, "num_local_experts": 4}),
    "mamba": of("MambaConfig", "MambaForCausalLM", {**SIZES, "state_size": 4}),
    "gpt_neox": of("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 64}),
    "gpt2": of("GPT2Config", "GPT2LMHeadModel", {**SIZES, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}),
    "opt": of("OPTConfig", "OPTForCausalLM", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "t5": of(
        "T5Config", "T5ForConditionalGeneration",
        {
            "vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0,
        },
        inputs=pairs,
    ),
    "bert": of(
        "BertConfig", "BertForMaskedLM",
        {**SIZES, "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "vit": of(
        "ViTConfig", "ViTForImageClassification",
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "image_size": 16, "patch_size": 8, "num_labels": CLASSES,
        },
        inputs=images, targets=classes,
    ),
}  # fmt: skip
