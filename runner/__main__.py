"""``python -m runner`` is the command ``runner``."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from runner.cli.main import main
except ModuleNotFoundError as error:  # a clone that is not installed; later imports are told by the command itself
    sys.exit(f"{error.name} is not installed. `pip install -e {Path(__file__).parents[1]}` installs what runner needs")

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
