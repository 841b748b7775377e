"""``runner doctor``: what this machine can run."""

from __future__ import annotations

import json

from runner.cli.arguments import Arguments
from runner.errors import EXIT_FAILED, EXIT_OK, Problem, raise_problems

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Print the checks.

    Returns:
        1 where something that training needs is missing.

    Raises:
        RequestError: there is no such flag or word.
    """
    why = "`runner doctor` takes no overrides"
    words = [Problem("word", word, "is not understood", why) for word in arguments.words]
    raise_problems([*arguments.problems, *words])
    from runner.launch.doctor import collectives, examine
    from runner.launch.run_directory import OUTPUTS

    checks = examine(OUTPUTS)
    if arguments.switch("collectives"):
        checks += collectives(*_ranks())
    good = all(check.ok for check in checks if check.needed)
    if arguments.switch("json"):
        print(json.dumps({"ok": good, "checks": [check.to_json() for check in checks]}, indent=2))
    else:
        for check in checks:
            print(f"{'ok' if check.ok else 'missing':<8} {check.name:<15} {check.found}")
            if check.fix:
                print(f"{'':<24} {check.fix}")
        print("this machine can train" if good else "something that training needs is missing")
    return EXIT_OK if good else EXIT_FAILED


def _ranks() -> tuple[str, int]:
    """Where collectives are timed: over the GPUs where there are two or more, else over two ranks on the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    return ("cuda", gpus) if gpus > 1 else ("cpu", 2)
