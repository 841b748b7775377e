"""The arguments of the text data, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FORMS", "LAYOUTS", "TOO_LONG", "TextRequest"]

FORMS = ("text", "completion", "chat", "alpaca")
LAYOUTS = ("packed", "padded")
TOO_LONG = ("split", "cut", "leave_out", "refuse")


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What the data is made of.

    Args:
        path: a file of JSON lines or Parquet, a text file, or a folder of files of one of these kinds.
        tokenizer: a folder with a tokenizer's files, such as that of the model.
        form: ``text``: the loss is on all tokens; ``completion``: on those of the completion after a prompt; ``chat``:
            on those of the assistant's messages, written by the tokenizer's chat template; ``alpaca``: on those of the
            column ``output`` after Alpaca's prompt of ``instruction`` and, where there is one, ``input``.
        text, prompt, completion, messages: the columns that hold these. A message has a role and a content.
        length: the most positions of a row.
        layout: ``packed``: several sequences to a row, each with its own positions and attention; ``padded``: one
            sequence to a row, padded to the longest of a batch.
        too_long: what becomes of a longer sequence: ``split`` into several, ``cut`` at its end, ``leave_out``,
            ``refuse``; None: split for the form text, else refuse.
        validation: the same as ``path``, for validation.
        val_samples: documents at the end of ``path`` that are taken for validation instead.
    """

    path: str | None = None
    tokenizer: str | None = None
    form: str = "text"
    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    length: int = 512
    layout: str = "packed"
    too_long: str | None = None
    validation: str | None = None
    val_samples: int = 0

    def __post_init__(self) -> None:
        for name, known in (("form", FORMS), ("layout", LAYOUTS), ("too_long", (None, *TOO_LONG))):
            if getattr(self, name) not in known:
                shown = ", ".join(each for each in known if each is not None)
                raise ValueError(f"data.kwargs.{name} = {getattr(self, name)} must be one of {shown}")
        if self.length < 1 or self.val_samples < 0:
            raise ValueError("data.kwargs.length must be at least 1, and data.kwargs.val_samples at least 0")
        if self.path is None:
            raise ValueError("data.kwargs.path must name a file or a folder of text")
        if self.tokenizer is None:
            raise ValueError("data.kwargs.tokenizer must name a folder with a tokenizer, such as the model's")
        if self.validation is not None and self.val_samples:
            raise ValueError("data.kwargs.validation and data.kwargs.val_samples both make a validation set: leave one")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the form reads."""
        of_forms = {"text": (self.text,), "completion": (self.prompt, self.completion), "chat": (self.messages,)}
        return of_forms.get(self.form, ("instruction", "output"))

    @property
    def fate_of_long(self) -> str:
        """What becomes of a sequence that is too long."""
        return self.too_long or ("split" if self.form == "text" else "refuse")

    @property
    def folder(self) -> Path:
        """The tokenizer's folder."""
        assert self.tokenizer is not None
        return Path(self.tokenizer).expanduser()
