"""Whether this process's engine rehearses now; the machine decides how many forwards a rehearsal takes."""

from __future__ import annotations

from typing import Any

from runner.engine.engine import Engine


class Watch:
    """Looks at every rehearsal of this process from when it is made."""

    def __init__(self) -> None:
        self.rehearses = False
        rehearse = Engine.rehearse

        def rehearsed(engine: Engine, *args: Any) -> Any:
            self.rehearses = True
            try:
                return rehearse(engine, *args)
            finally:
                self.rehearses = False

        Engine.rehearse = rehearsed  # type: ignore[assignment,method-assign]
