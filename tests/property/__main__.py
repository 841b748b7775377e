"""``python -m tests.property``: see property_command.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what drawn requests name is imported by its bare name

from property_command import main  # noqa: E402

sys.exit(main())
