"""``python -m tests.corpus``: see corpus_command.py."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("corpus", "property")]

from corpus_command import main  # noqa: E402

sys.exit(main())
