"""Turns rows into token ids, each with whether the loss counts it as a target."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.zoo.text.request import TextRequest

__all__ = ["Sequence1d", "alpaca_prompt", "encoder", "load_tokenizer", "pieces", "tokenizer_files"]

Sequence1d = tuple[list[int], list[bool]]
"""Token ids, and for each whether the loss counts it where it is to be predicted."""

_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "spiece*", "special_tokens_map.json", "added_tokens.json")
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # a template that says itself what the assistant writes
_OF_TEMPLATES = ("chat_template*", "additional_chat_templates/*")


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that make its tokenizer, by name.

    Raises:
        ValueError: there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"data.kwargs.tokenizer = {folder} must be a local folder; nothing is downloaded")
    found = {path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}
    if not found:
        raise ValueError(f"data.kwargs.tokenizer = {folder} has no tokenizer files, such as tokenizer.json")
    return sorted(found | {path for pattern in _OF_TEMPLATES for path in folder.glob(pattern) if path.is_file()})


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local folder.

    Raises:
        ValueError: it cannot be loaded.
    """
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {first[0] if first else ''}".rstrip(": ")
        raise ValueError(f"data.kwargs.tokenizer = {folder} cannot be loaded: {why}") from error
    loaded.model_max_length = sys.maxsize  # no warning of long documents, which are split or refused here
    return loaded


def encoder(request: TextRequest, tokenizer: Any) -> Callable[[Mapping[str, Any]], Sequence1d]:
    """The function from a row to its sequence, for the form that is asked.

    Raises:
        ValueError: the tokenizer lacks what the form needs.
    """
    if request.form == "text":
        return lambda row: _of_text(tokenizer, str(row[request.text]))
    if not tokenizer.is_fast:
        raise ValueError(
            f"data.kwargs.form = {request.form} needs a tokenizer that tells the place of each token in the text: "
            "its folder must have tokenizer.json"
        )
    if request.form == "alpaca":
        return lambda row: _of_completion(tokenizer, alpaca_prompt(row), str(row["output"]))
    if request.form == "completion":
        return lambda row: _of_completion(tokenizer, str(row[request.prompt]), str(row[request.completion]))
    if not tokenizer.chat_template:
        raise ValueError(f"data.kwargs.form = chat needs a tokenizer with a chat template: {request.folder} has none")
    of_chat = _of_marked_chat if _MARKED.search(tokenizer.get_chat_template()) else _of_chat
    return lambda row: of_chat(tokenizer, _shown(row[request.messages]))


def alpaca_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of an instruction, with or without an input, as Stanford's Alpaca was trained (Taori et al., 2023)."""
    instruction, given = str(row["instruction"]), str(row.get("input") or "")
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if given else ""
    wish = "Write a response that appropriately completes the request."
    parts = [f"{task}{more}. {wish}", f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{given}"] if given else []
    return "\n\n".join([*parts, "### Response:\n"])


def _of_text(tokenizer: Any, text: str) -> Sequence1d:
    ids = _ended(tokenizer, list(tokenizer(text)["input_ids"]))
    return ids, [True] * len(ids)


def _of_completion(tokenizer: Any, prompt: str, completion: str) -> Sequence1d:
    """A token that has a part of the completion counts, and so does whatever ends the sequence."""
    found = tokenizer(prompt + completion, return_offsets_mapping=True)
    ends = [end for _, end in found["offset_mapping"]]
    first = next((number for number, end in enumerate(ends) if end > len(prompt)), len(ends))
    ids = _ended(tokenizer, list(found["input_ids"]))
    return ids, [number >= first for number in range(len(ids))]


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _shown(messages: Any) -> list[dict[str, Any]]:
    """The messages without what a table's columns add to them.

    Raises:
        ValueError: they have no roles, so that none would be the assistant's.
    """
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError("a conversation must be a list of messages, each with a role and content")
    shown = [{key: value for key, value in each.items() if value is not None} for each in messages]
    for number, each in enumerate(shown):
        if "role" not in each:
            keys = ", ".join(each) or "nothing"
            raise ValueError(f"message {number + 1} of a conversation has no role (user, assistant): it has {keys}")
    return shown


def _of_marked_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> Sequence1d:
    """A token counts if it begins or ends in what the template marks as the assistant's."""
    found = _templated(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]


def _templated(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # of the template, which is code of the folder
        raise ValueError(f"the chat template refuses a conversation: {type(error).__name__}: {error}") from error


def _of_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> Sequence1d:
    """A token that has a part of what the assistant writes counts: also the end of its turn, but not the beginning."""
    text, spans = _written(tokenizer, messages)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = [any(start < last and end > first for first, last in spans) for start, end in found["offset_mapping"]]
    return list(found["input_ids"]), counted


def _written(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and where in it the assistant writes."""

    def write(count: int, *, asks: bool = False) -> str:
        return str(_templated(tokenizer, messages[:count], tokenize=False, add_generation_prompt=asks))

    text, spans = write(len(messages)), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = write(number, asks=True), write(number + 1)
        if not (text.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template writes message {number + 1} of a conversation otherwise when others follow, so "
                "that it is not known which tokens are the assistant's; data.kwargs.form=completion needs no template"
            )
        spans.append((len(before), len(after)))
    return text, spans


def pieces(sequence: Sequence1d, request: TextRequest) -> Iterator[Sequence1d]:
    """The sequences that one document becomes; those in which no target counts are left out.

    Each has at most ``length`` + 1 tokens, because the last one is a target alone. Pieces of a split document share
    this token with the next piece, so that every token is a target once.

    Raises:
        ValueError: it is too long and must not be.
    """
    ids, counted = sequence
    most, fate = request.length, request.fate_of_long
    starts = range(0, max(1, len(ids) - 1), most)
    if len(starts) > 1 and fate == "refuse":
        raise ValueError(
            f"a document has {len(ids) - 1} positions, data.kwargs.length = {most}: take a larger one, or "
            "data.kwargs.too_long = split, cut or leave_out"
        )
    if len(starts) > 1 and fate == "leave_out":
        return
    for start in starts if fate == "split" else starts[:1]:
        part = slice(start, start + most + 1)
        if any(counted[part][1:]):
            yield ids[part], counted[part]
