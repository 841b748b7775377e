"""Makes the text data sets of a request."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.zoo.text.cache import cached, content_key
from runner.zoo.text.files import files_of, read_rows
from runner.zoo.text.request import TextRequest
from runner.zoo.text.rows import Rows, TokenFile, pack
from runner.zoo.text.tokens import Sequence1d, encoder, load_tokenizer, pieces, tokenizer_files

__all__ = ["build", "spec"]

logger = logging.getLogger(__name__)

_FORMAT = 2  # of the cached files; another number writes them anew


def build(**kwargs: Any) -> tuple[Rows, Rows | None]:
    """(train, val) of :class:`runner.zoo.text.request.TextRequest`'s arguments; val is None if none is asked.

    Raises:
        ValueError: an argument, a file or the tokenizer is not as it must be.
    """
    request = TextRequest(**kwargs)
    assert request.path is not None
    tokens = _tokens(request, request.path)
    documents = np.unique(tokens.documents)
    _check_enough(request, len(documents))
    first_of_val = documents[-request.val_samples] if request.val_samples else documents[-1] + 1
    parts = tokens.documents < first_of_val, tokens.documents >= first_of_val
    train, val = (_rows(tokens, np.flatnonzero(part), request) for part in parts)
    if request.validation is not None:
        held = _tokens(request, request.validation)
        val = _rows(held, np.arange(len(held)), request)
    return train, val if len(val) else None


def spec(**kwargs: Any) -> tuple[Any, torch.Tensor]:
    """The longest row, in shapes and types; of the files a few rows are read, and the first is made into tokens.

    Raises:
        ValueError: these rows alone show that :func:`build` would raise it.
    """
    request = TextRequest(**kwargs)
    tokenizer_files(request.folder)
    encode = encoder(request, load_tokenizer(request.folder))
    for path in (request.path, request.validation):
        if path is not None:
            few = 1 + (request.val_samples if path == request.path else 0)
            rows = list(islice(read_rows(files_of(Path(path).expanduser()), request.columns), few))
            if rows:
                encode(rows[0])
                if path == request.path:
                    _check_enough(request, len(rows))
    row = torch.zeros(request.length, dtype=torch.long)
    packed = {"input_ids": row, "position_ids": torch.zeros(request.length, dtype=torch.long)}
    return packed if request.layout == "packed" else row, torch.zeros(request.length, dtype=torch.long)


def _check_enough(request: TextRequest, documents: int) -> None:
    if documents <= request.val_samples:
        why = f"of {documents} documents leaves none for the training"
        raise ValueError(f"data.kwargs.val_samples = {request.val_samples} {why}")


def beside_weights(**kwargs: Any) -> list[Path]:
    """The tokenizer's files, which belong into a folder with the weights that were trained on its tokens.

    Raises:
        ValueError: there are none any more.
    """
    folder = TextRequest(**kwargs).folder
    return [file for file in tokenizer_files(folder) if file.parent == folder]


build.spec = spec  # type: ignore[attr-defined]  # so that a plan tokenizes nothing
build.beside_weights = beside_weights  # type: ignore[attr-defined]  # so that an exported folder has the tokenizer
_OF_REQUEST: tuple[Any, ...] = (build, spec, beside_weights)
for _function in _OF_REQUEST:  # so that messages name the arguments that there are
    _function.__signature__ = inspect.signature(TextRequest)


def _rows(tokens: TokenFile, numbers: Any, request: TextRequest) -> Rows:
    """The rows of some sequences, by their numbers."""
    if request.layout == "padded":
        return Rows(tokens, numbers[:, None].tolist(), None)
    packed = pack(tokens.positions[numbers].tolist(), request.length)
    return Rows(tokens, [numbers[row].tolist() for row in packed], request.length)


def _tokens(request: TextRequest, path: str) -> TokenFile:
    files, own = files_of(Path(path).expanduser()), tokenizer_files(request.folder)
    facts = (_FORMAT, request.form, request.columns, request.length, request.fate_of_long)
    made_by = [_version(name) for name in ("tokenizers", "transformers")]
    names = [each.name for each in own]
    return TokenFile(cached(content_key([*files, *own], facts, made_by, names), lambda at: _write(request, files, at)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(request: TextRequest, files: list[Path], folder: Path) -> None:
    """Tokenize the files into ``folder``, a sequence after the other.

    Raises:
        ValueError: no sequence has a target that counts.
    """
    encode = encoder(request, load_tokenizer(request.folder))
    ends, documents, at, document = [], [], 0, -1
    with (folder / "ids").open("wb") as ids_file, (folder / "counted").open("wb") as counted_file:
        for document, found in enumerate(_sequences(request, files, encode)):
            for ids, counted in found:
                np.asarray(ids, dtype=np.int32).tofile(ids_file)
                np.asarray(counted, dtype=np.uint8).tofile(counted_file)
                at += len(ids)
                ends.append(at)
                documents.append(document)
    if not ends:
        raise ValueError(f"{files[0].parent} gives no sequence with a token to learn")
    _as_array(folder, "ids", np.int32)
    _as_array(folder, "counted", np.uint8)
    np.save(folder / "ends.npy", np.asarray(ends, dtype=np.int64))
    np.save(folder / "documents.npy", np.asarray(documents, dtype=np.int64))
    left_out = document + 1 - len(set(documents))
    note = (
        f"; {left_out} of them {'have' if left_out > 1 else 'has'} nothing to learn, and are left out"
        if left_out
        else ""
    )
    logger.info("%d tokens in %d sequences of %d documents%s", at, len(ends), document + 1, note)


def _sequences(request: TextRequest, files: list[Path], encode: Any) -> Iterator[list[Sequence1d]]:
    """The sequences of each document, of which there may be none."""
    for document, row in enumerate(read_rows(files, request.columns)):
        try:
            yield list(pieces(encode(row), request))
        except ValueError as error:
            raise ValueError(f"document {document + 1}: {error}") from error


def _as_array(folder: Path, name: str, dtype: Any) -> None:
    """Turn a file of bare numbers into one of numpy's."""
    np.save(folder / f"{name}.npy", np.memmap(folder / name, dtype=dtype, mode="r"))
    (folder / name).unlink()
