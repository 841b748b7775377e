"""A configuration as plain values, as a file, and as a fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.config.compose.shape import build
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.files import write_atomically

__all__ = ["config_from_container", "fingerprint", "load", "save", "to_container"]

# Keys that change no weight: what a run shows, where it writes and how long it waits.
_WITHOUT_EFFECT = (
    ("name",),
    ("run_dir",),
    ("resume",),
    ("report",),
    ("sweep",),
    ("sweep_most",),
    ("sweep_without",),
    ("sweep_report",),
    ("sweep_retry",),
    ("sweep_on_failure",),
    ("checkpoint",),
    ("cost",),
    ("launcher",),
    ("logger",),
    ("profile",),
    ("profiler",),
    ("metrics",),
    ("data", "workers"),
    ("data", "goes_with"),
    ("data", "needs"),
    ("model", "goes_with"),
    ("parallelism", "goes_with"),
    ("parallelism", "free"),
    ("model", "needs"),
    ("hardware", "link_bytes_per_second"),  # a new measurement does not change the identity of a job
    ("hardware", "link_latency_seconds"),
    ("hardware", "links"),
    ("hardware", "source"),
    ("schedule", "steps"),
    ("trainer", "log_every"),
    ("trainer", "progress"),
)


def to_container(config: RunConfig) -> dict[str, Any]:
    """``config`` as nested dictionaries, lists and plain values, which JSON can hold."""
    return asdict(config)


def config_from_container(container: dict[str, Any]) -> RunConfig:
    """The configuration from a plain container; absent keys take the schema's defaults.

    Raises:
        RequestError: there are unknown keys or wrong types; the error contains all of them.
    """
    config, problems = build(RunConfig, container)
    raise_problems(problems)
    assert config is not None
    return config


def fingerprint(config: RunConfig) -> str:
    """SHA-256 in hexadecimal over all that determines the result; equal for runs that must agree."""
    container = to_container(config)
    for *sections, key in _WITHOUT_EFFECT:
        inner = container
        for section in sections:
            inner = inner[section]
        del inner[key]
    canonical = json.dumps(container, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def save(config: RunConfig, file: Path | str) -> Path:
    """Write ``config`` to ``file``, atomically: JSON if the name ends in .json, else YAML."""
    path = Path(file)
    container = to_container(config)
    if path.suffix == ".json":
        text = json.dumps(container, indent=2) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(container, sort_keys=False, allow_unicode=True)
    write_atomically(path, text)
    return path


def load(file: Path | str) -> RunConfig:
    """Read the configuration that :func:`save` wrote.

    Raises:
        RequestError: the file is missing, is not a mapping, or does not fit the schema.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        container = json.loads(text) if path.suffix == ".json" else _read_yaml(text)
    except (OSError, ValueError) as error:
        raise RequestError([Problem(str(path), "", f"cannot be read: {error}")]) from error
    if not isinstance(container, dict):
        raise RequestError([Problem(str(path), "", "must hold a mapping of sections")])
    return config_from_container(container)


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
