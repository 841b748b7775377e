"""Which modules of the runner no rank imports."""

from __future__ import annotations

OF_THE_COMMAND = tuple(
    f"runner.{name}" for name in ("plan.make", "plan.draft", "plan.search", "plan.planners", "profiling.")
)
"""Rooms and files that only a command needs, which makes the plan that ranks read."""
OF_BOTH = ("runner.profiling.saved_scan",)
"""Ranks name operators as it does, where they run them again."""
