"""What the command line does with a request: resolve, start, show problems, exit."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from runner.config.compose.resolve import resolve, resolve_sweep, save
from runner.config.schema import RunConfig
from runner.errors import RunnerError
from runner.launch.local.ranks import Launch, run_ranks
from runner.launch.processes.stops import exit_status_of, listen_for_stops, signal_of
from runner.launch.start import train
from runner.launch.sweep.run import sweep


def main(action: str, entry: str, *overrides: str) -> int:
    listen_for_stops()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = f"runner train {' '.join(overrides)}"
    try:
        if action == "sweep":
            return sweep(resolve_sweep(overrides), command=words, entry=entry)
        if action == "ranks":
            return start_ranks(resolve(overrides), entry)
        return train(resolve(overrides), command=words, entry=entry)
    except RunnerError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt as error:
        return exit_status_of(signal_of(error))


def start_ranks(config: RunConfig, entry: str) -> int:
    """The ranks alone, without the checks and the plan that come before them."""
    run_dir = Path(str(config.run_dir)).absolute()
    run_dir.mkdir()
    world_size = config.parallelism.pipeline
    file = save(config, run_dir / "config.yaml")
    outcome = run_ranks(Launch(file, run_dir, world_size, 1, lambda rank: f"stage {rank}, layers 4..7", entry))
    for message in outcome.lines:
        print(message, file=sys.stderr)
    return outcome.exit_status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
