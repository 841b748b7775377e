"""Text for fine-tuning: local files become sequences of token ids, which are packed into rows or padded.

Files are read by the library ``datasets`` and tokenized once, by the tokenizer of a local folder, into a cache that is
named by the contents of both. Nothing is downloaded.
"""

from __future__ import annotations

from runner.zoo.text.prepare import build
from runner.zoo.text.rows import collate

__all__ = ["build", "collate"]
