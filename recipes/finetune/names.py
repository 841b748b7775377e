"""The names of emoji in several languages as prompts and completions, and a tokenizer of them.

Names are those of Unicode's CLDR, as the package ``emoji`` ships them. A prompt is an emoji's name in one language and
the sign of another one; the completion is its name there. The emoji that are held out are held out in every language.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BASE", "NEW", "completion_of", "held_out", "names", "prompt_of", "write_files"]

BASE = ("en", "es", "fr", "de", "pt")
"""Languages of the base model."""

NEW = "it"
"""The language that it is fine-tuned to."""

_FULLY_QUALIFIED = 2
_HELD_OUT = 10  # one of so many emoji is for validation
_SEED = 42
_VOCABULARY = 1024
_SKIN_TONES = re.compile("[\U0001f3fb-\U0001f3ff]")


def names() -> dict[str, dict[str, str]]:
    """The name of each emoji by language, without emoji that differ in skin tone alone."""
    import emoji

    emoji.config.load_language([*BASE, NEW])
    return {
        symbol: {language: entry[language].strip(":").replace("_", " ").lower() for language in (*BASE, NEW)}
        for symbol, entry in sorted(emoji.EMOJI_DATA.items())
        if entry["status"] == _FULLY_QUALIFIED and not _SKIN_TONES.search(symbol)
    }


def held_out(symbols: Iterable[str]) -> frozenset[str]:
    """The emoji for validation."""
    listed = sorted(symbols)
    return frozenset(random.Random(_SEED).sample(listed, len(listed) // _HELD_OUT))


def prompt_of(named: Mapping[str, str], source: str, target: str) -> str:
    """What the model reads, such as ``en: red heart`` and, on the next line, ``it:``."""
    return f"{source}: {named[source]}\n{target}:"


def completion_of(named: Mapping[str, str], target: str) -> str:
    """What it is to write after it."""
    return f" {named[target]}"


def write_files(folder: Path) -> None:
    """Write ``base.jsonl`` and ``new.jsonl``, each with its ``_held_out.jsonl``, and a tokenizer of the first alone."""
    every = names()
    held = held_out(every)
    directions = {
        "base": list(itertools.permutations(BASE, 2)),
        "new": [(source, NEW) for source in BASE],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in directions.items():
        for suffix, is_held in (("", False), ("_held_out", True)):
            chosen = [named for symbol, named in every.items() if (symbol in held) == is_held]
            _write(folder / f"{name}{suffix}.jsonl", chosen, pairs)
    learned = [named for symbol, named in every.items() if symbol not in held]
    _write_tokenizer(folder, (text for named in learned for text in _texts(named)))


def _write(file: Path, chosen: Sequence[Mapping[str, str]], pairs: Sequence[tuple[str, str]]) -> None:
    rows = (
        {"prompt": prompt, "completion": completion, "text": prompt + completion}
        for named in chosen
        for source, target in pairs
        for prompt, completion in [(prompt_of(named, source, target), completion_of(named, target))]
    )
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _texts(named: Mapping[str, str]) -> Iterator[str]:
    return (f"{language}: {named[language]}\n" for language in BASE)


def _write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """A byte-level BPE, which has a token for every byte, so that it can spell any language."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    wrapped: Any = PreTrainedTokenizerFast  # transformers' class has no types
    wrapped(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(str(folder))
