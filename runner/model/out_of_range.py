"""Says which id or target is too large for which table, where torch says only that an index is out of range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

from torch import Tensor, nn

__all__ = ["out_of_range"]

# Functions of torch by what they look up: the names of their arguments for the numbers and for the table.
_LOOKUPS = {
    "embedding": ("input", "weight"),
    "embedding_bag": ("input", "weight"),
    "nll_loss": ("target", "input"),
    "cross_entropy": ("target", "input"),
}
_OPERATORS = {"aten::embedding": (1, 0)}  # a traced model calls operators; positions of the numbers and of the table
_FUNCTIONAL = nn.functional.cross_entropy.__code__.co_filename


def out_of_range(error: BaseException, module: nn.Module | None = None) -> str | None:
    """``its largest id is 127, the table of 0 (Embedding) has 64 rows``; None if the error is another one.

    torch's error has no numbers. They are read from the arguments of the call that raised it.

    Args:
        error: what a forward or a loss raised.
        module: where the table's name is looked up; without it, the table has no name.
    """
    if not isinstance(error, IndexError):
        return None
    frames = list(_frames(error.__traceback__))
    found = next((found for found in map(_lookup, reversed(frames)) if found is not None), None)
    if found is None:
        return None
    return _told(*found, _name_of_table(frames, module) or _name_of_weight(found[1], module))


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _lookup(frame: FrameType) -> tuple[Tensor, Tensor, bool] | None:
    """The numbers, the table, and whether it is an embedding's, if ``frame`` looks numbers up in a table."""
    values, name = frame.f_locals, frame.f_code.co_name
    if frame.f_code.co_filename == _FUNCTIONAL and name in _LOOKUPS:
        numbers, table = (values.get(each) for each in _LOOKUPS[name])
    else:
        operator = getattr(values.get("self"), "_name", None) if name == "__call__" else None
        positions = _OPERATORS.get(str(operator).partition(".")[0])
        arguments = values.get("args", ())
        if positions is None or len(arguments) <= max(positions):
            return None
        numbers, table = (arguments[position] for position in positions)
    if not isinstance(numbers, Tensor) or not isinstance(table, Tensor) or not numbers.numel():
        return None
    return (numbers, table, "embedding" in name or name == "__call__")


def _name_of_table(frames: Sequence[FrameType], module: nn.Module | None) -> str:
    """`` of 0.tokens (Embedding)``; empty where no module with a name of its own holds the table."""
    owners = [frame.f_locals.get("self") for frame in frames]
    tables = [owner for owner in owners if isinstance(owner, nn.Embedding | nn.EmbeddingBag)]
    inside = module.named_modules() if module is not None and tables else ()
    path = next((name for name, each in inside if each is tables[-1] and name), "")
    return f" of {path} ({type(tables[-1]).__name__})" if path else ""


def _name_of_weight(table: Tensor, module: nn.Module | None) -> str:
    """`` tokens.weight``, for a traced model, whose operators have no modules; empty if the table has no such name."""
    weights = module.named_parameters() if module is not None else ()
    return next((f" {name}" for name, each in weights if each is table and "." in name), "")


def _told(numbers: Tensor, table: Tensor, is_embedding: bool, name: str) -> str:
    smallest, largest = int(numbers.min()), int(numbers.max())
    if is_embedding:
        size, number, has = table.shape[0], "id", f"the table{name} has {table.shape[0]} rows"
    else:
        size = table.shape[1] if table.dim() > 1 else table.shape[0]
        number, has = "target", f"the output has {size} classes"
    which = f"largest {number} is {largest}" if largest >= size else f"smallest {number} is {smallest}"
    return f"its {which}, {has}"
