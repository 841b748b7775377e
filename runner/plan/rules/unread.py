"""Keys that a request sets and that nothing of it reads: told, each with the way out.

A rule of the sections refuses a key that contradicts another (``belongs to …``). The keys of this table do not
contradict anything: they wait for another layout or another command, so that a sweep over layouts may name them.
A user who sets one for a single run should know that it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from runner.config.compose.shape import MISSING
from runner.config.rules.sections import CONFIG_TABLES
from runner.config.rules.table import Row, filled, value_at
from runner.config.schema import CostConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.plan.requested_schedule import is_chosen_by_plan, num_stages, schedule_of
from runner.schedule.catalogue.registry import find_spec

__all__ = ["UNREAD", "Unread", "unread_keys"]

_RULE = "is not read"
_ONE_RANK = "The run has one rank, which sends nothing"
_ONE_STAGE = "The run has one stage, which holds all layers"


@dataclass(frozen=True)
class Unread:
    """Keys that nothing reads under a condition.

    Args:
        keys: keys, or sections, which stand for all keys in them.
        when: whether nothing reads them, by the request and the command.
        why: the reason.
        fix: an override with which they are read; empty if they had better be left out.
        typed: whether it is told of keys on the command line alone: a file may be made for several commands.
    """

    keys: tuple[str, ...]
    when: Callable[[RunConfig, str], bool]
    why: str
    fix: str = ""
    typed: bool = False


def _one_rank(config: RunConfig, command: str) -> bool:
    return config.parallelism.pipeline * config.parallelism.data * config.parallelism.tensor == 1


def _one_stage(config: RunConfig, command: str) -> bool:
    return num_stages(config) == 1


def _spec_is(config: RunConfig, name: str) -> bool:
    try:
        spec = find_spec(config.schedule.name, config.schedule.target)
    except RequestError:
        return True
    return spec is None or bool(getattr(spec, name))


def _has_twins(config: RunConfig) -> bool:
    if is_chosen_by_plan(config):
        return False
    return len(schedule_of(config).rows) > 1


_SHORT_LINKS = ("link_bytes_per_second", "link_latency_seconds", "network_bytes_per_second")
_OF_A_RUN = ("run_dir", "resume", "report", "checkpoint", "logger", "profiler", "metrics", "callbacks")

UNREAD: tuple[Unread, ...] = (
    Unread(("partition",), _one_stage, _ONE_STAGE, "parallelism.pipeline=2"),
    Unread(
        ("model.split_points",),
        lambda c, _: c.parallelism.pipeline == 1,
        "One rank holds the whole model, which is not cut",
        "parallelism.pipeline=2",
    ),
    Unread(
        ("parallelism.search",),
        lambda c, _: c.parallelism.name != "auto",
        "The layout is named, and not looked for",
        "parallelism=auto",
    ),
    Unread(("transport", "data.check_every"), _one_rank, _ONE_RANK, "parallelism.pipeline=2"),
    Unread(
        tuple(f"hardware.{key}" for key in _SHORT_LINKS),
        lambda c, _: bool(c.hardware.links),
        "hardware.links has the latency and the speed of each class of links",
        typed=True,
    ),
    Unread(
        tuple(f"hardware.{key}" for key in (*_SHORT_LINKS[:2], "devices_per_node", "links")),
        _one_rank,
        _ONE_RANK,
        "parallelism.pipeline=2",
    ),
    Unread(
        ("hardware.network_bytes_per_second",),
        lambda c, command: _one_rank(c, command) or c.hardware.devices_per_node is None,
        "All ranks are in one machine, as far as hardware.devices_per_node says",
        "hardware.devices_per_node=8",
    ),
    Unread(
        ("zero.bucket_elements",),
        lambda c, _: c.zero.stage is None,
        "Replicas are not reduced by DeepSpeed, whose buckets it sizes",
        "zero=1",
    ),
    Unread(
        ("schedule.twin_check_every",),
        lambda c, _: not _has_twins(c),
        "No stage has copies on several ranks of a pipeline",
        "schedule=chimera",
    ),
    Unread(
        ("schedule.steps",),
        lambda c, command: command != "schedule",
        "It is the number of windows that `runner schedule` draws",
        "trainer.max_steps=100",
    ),
    Unread(
        tuple(f"cost.{key}" for key in CostConfig.__dataclass_fields__),
        lambda c, command: command != "schedule" and not _spec_is(c, "by_costs") and not _spec_is(c, "by_plan"),
        "A plan takes the seconds of the model's layers, and this schedule's order does not depend on costs",
    ),
    Unread(
        ("checkpoint.keep",),
        lambda c, _: c.checkpoint.every is None and c.checkpoint.every_seconds is None,
        "Only the last step is saved",
        "checkpoint.every=100",
    ),
    Unread(
        ("logger.kwargs", "trainer.log_every"),
        lambda c, _: c.logger.name == "none",
        "No logger is called; steps.jsonl has every step",
        "logger=csv",
    ),
    Unread(
        ("model.config_file",),
        lambda c, _: c.model.pretrained is None,
        "It names a file of the folder model.pretrained",
        "model.pretrained=FOLDER",
    ),
    Unread(
        ("sweep_without", "sweep_most", "sweep_report", "sweep_retry", "sweep_on_failure", "plan_report"),
        lambda c, command: not command.endswith(" -m"),
        "It belongs to a sweep, and this command is about one run",
        "-m",
        typed=True,
    ),
    Unread(
        (*_OF_A_RUN, "trainer.val_every", "trainer.progress"),
        lambda c, command: command == "verify",
        "`runner verify` trains a few steps twice, writes nothing and starts from the first step",
        typed=True,
    ),
    Unread(
        tuple(each for each in vars(RunConfig()) if each not in ("schedule", "parallelism", "cost", "name")),
        lambda c, command: command == "schedule",
        "A schedule is drawn from schedule, parallelism and cost alone",
        typed=True,
    ),
)
"""Which keys a request may set in vain; all others are read by every request, or refused where nothing reads them."""


def unread_keys(config: RunConfig, given: Mapping[str, bool], command: str) -> list[Problem]:
    """A line for each key that was set and that nothing reads.

    Args:
        config: the resolved request, which has no other problems.
        given: the keys and groups that the user has set, and whether on the command line, not in a file of their own.
        command: the command's name, with `` -m`` for a sweep.
    """
    found: dict[str, Problem] = {}
    for key, is_typed in sorted(given.items()):
        meant = (each for each in UNREAD if _holds(each.keys, key) and (is_typed or not each.typed))
        entry = next((each for each in meant if each.when(config, command)), None)
        if entry is not None:
            found[key] = Problem(key, _value(config, key), _RULE, entry.why, entry.fix)
    return [*found.values(), *(each for each in _belonging(config, given) if each.path not in found)]


def _holds(keys: Collection[str], key: str) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _value(config: RunConfig, key: str) -> object:
    try:
        return value_at(config, key)
    except AttributeError:  # an entry of a dictionary, or of a list
        value = value_at(config, key.rpartition(".")[0]) if "." in key else MISSING
        return value.get(key.rpartition(".")[2]) if isinstance(value, dict) else value


def _belonging(config: RunConfig, given: Iterable[str]) -> Iterator[Problem]:
    """Keys that are refused where nothing reads them, and have been given the value that they have anyway."""
    for table in CONFIG_TABLES:
        if table.applies is not None and not table.applies(config):
            continue
        for row in table.rules:
            if not isinstance(row, Row) or not row.is_owned or not any(_holds((row.path,), key) for key in given):
                continue
            if (row.when is None or row.when(config)) and not row.breaks(config):
                fix = row.fix if isinstance(row.fix, str) else row.fix(config)
                rule, why = f"{_RULE}: it {filled(row.rule, config)}", filled(row.why, config)
                yield Problem(row.path, value_at(config, row.path), rule, why, filled(fix, config))
