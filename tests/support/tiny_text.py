"""A tokenizer that is trained on the spot, and files of text for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["the cat sat on the mat", "a dog ran over the hill", "birds sing when the sun is up", "fish swim"]
TEXTS = [" and ".join(WORDS[(number + step) % 4] for step in range(1 + number % 3)) for number in range(24)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_folder(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A byte-level BPE of 300 tokens in ``folder``, as ``save_pretrained`` writes it; </s> ends a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    marks = ["</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(WORDS, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")  # type: ignore[no-untyped-call]
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text_file(folder: Path, texts: list[str] = TEXTS) -> Path:
    """JSON lines with a column ``text``."""
    return json_lines(folder / "text.jsonl", [{"text": text} for text in texts])
