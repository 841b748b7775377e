"""Makes the digests of what the corpus's requests give, and compares them with those that are kept."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corpus_requests import PLANS, RUNS, WRONG, request, wrong
from in_this_process import quietly
from whole_runs import train

from runner.cli.request import checked
from runner.errors import RequestError, RunnerError
from runner.launch.run.measured_plan import measured_plan
from runner.plan.rules.zero import shares_by_itself
from runner.plan.values import RunPlan
from runner.schedule.render import to_json
from runner.schedule.simulation.clock import Costs

FILE = Path(__file__).with_name("digests.json")
_CORES = 2  # of the machine that is planned for
_ROUNDING = 1e-3
_WITHOUT_TENSORS = ("schedule", "program", "refused", "failed", "crashed")
Entry = dict[str, Any]


def names() -> list[str]:
    """The names of all entries: ``plan 7``, ``run 7``, ``wrong 7``."""
    counts = {"plan": PLANS, "run": RUNS, "wrong": WRONG}
    return [f"{kind} {number}" for kind, count in counts.items() for number in range(count)]


def words_of(name: str) -> list[str]:
    """The request of an entry."""
    kind, _, number = name.partition(" ")
    return wrong(int(number)) if kind == "wrong" else request(int(number))


def entry(name: str) -> Entry:
    """What an entry's request gives, as digests and a few numbers."""
    words = words_of(name)
    make = _run if name.startswith("run") else _plan
    with quietly():
        try:
            given = make(words)
        except RequestError as error:
            given = {"refused": [f"{problem.path}: {_digest(problem.line())}" for problem in error.problems]}
        except RunnerError as error:
            given = {"failed": _digest(str(error))}
        except Exception as error:  # no request may end so; it is kept, so that the others are compared
            given = {"crashed": f"{type(error).__name__}: {error}"[:200]}
    return {"words": _digest(words), **given}


def _planned(words: list[str]) -> RunPlan:
    return measured_plan(checked(words), cores=_CORES)


def _plan(words: list[str]) -> Entry:
    plan = _planned(words)
    document = plan.to_json()
    return {
        "plan": {key: _digest(value) for key, value in document.items()},
        "schedule": _digest(to_json(plan.schedule, Costs())),
        "program": _digest(str(plan.program)),
        "peaks": list(plan.peak_memory_bytes),
        "seconds": f"{plan.time.step_seconds:.6g}",
    }


def _run(words: list[str]) -> Entry:
    config = checked(words)
    if config.zero.stage and not shares_by_itself(config, _planned(words).schedule):
        return {"needs": "processes"}
    place, threads = Path(tempfile.mkdtemp(prefix="runner-corpus-")), torch.get_num_threads()
    torch.set_num_threads(1)  # products of matrices of 16 bits are summed in another order with more
    try:
        with mock.patch("runner.plan.cores.num_cores", return_value=_CORES):
            run = train(config, place)
        weights = {name: tensors[0] for name, tensors in sorted(run.weights.items())}
        record = run.record
        return {
            "weights": _digest([(name, each.tolist()) for name, each in weights.items()]),
            "norm": float(sum(each.double().pow(2).sum() for each in weights.values())) ** 0.5,
            "loss": record.loss,
            "counted": record.peak_memory_bytes["measured"],
            "record": _digest(sorted(record.to_json())),
        }
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(place)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:10]


_AND = " and "  # between versions that give the same


def version() -> str:
    """The version of torch by which digests are kept."""
    return ".".join(torch.__version__.split(".")[:2])


def processor() -> str:
    """The processor with its instructions, on which the last bits of products depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, instructions = told.get("model name", platform.machine()), sorted(told.get("flags", "").split())
    return f"{name}, instructions {_digest(instructions)}"


def kept() -> dict[str, Any]:
    """The file: by versions of torch, the processor, the reason of the last writing, and the entries by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _ours(file: Mapping[str, Any]) -> Any:
    """The part of this version of torch, or None."""
    return next((part for versions, part in file.items() if version() in versions.split(_AND)), None)


def entries() -> dict[str, Entry]:
    """The kept entries by name, of this version of torch if there are any."""
    file = kept()
    found: dict[str, Entry] = (_ours(file) or next(iter(file.values()), {"entries": {}}))["entries"]
    return found


def write(made: Mapping[str, Entry], reason: str, *, runs: bool = True) -> None:
    """Keep these entries for this version of torch, one line each; versions with the same entries share them.

    Args:
        made: the entries by name.
        reason: why they are kept anew.
        runs: whether the runs were made here; else their weights stay those of the processor that is kept.
    """
    before: dict[str, Any] = _ours(kept()) or next(iter(kept().values()), {})
    of_runs = processor() if runs else before.get("processor", processor())
    file: dict[str, Any] = {}
    for versions, part in kept().items():
        others = [each for each in versions.split(_AND) if each != version()]
        if others and part["entries"] == made:
            others.append(version())
        if others:
            file[_AND.join(others)] = part
    if _ours(file) is None:
        file[version()] = {"processor": of_runs, "reason": reason, "entries": dict(made)}
    parts = []
    for torch_version, part in file.items():
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(each)}" for name, each in part["entries"].items())
        head = ", ".join(f"{json.dumps(key)}: {json.dumps(part[key])}" for key in ("processor", "reason"))
        parts.append(f' {json.dumps(torch_version)}: {{{head}, "entries": {{\n{lines}\n }}}}')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def changes(chosen: Iterable[str]) -> Iterator[str]:
    """A text for each of these entries that gives something else than what is kept.

    On another processor, weights and losses may be rounded differently. With another version of torch, only what no
    tensor has part in is compared: schedules, programs and refusals.
    """
    file = kept()
    ours = _ours(file)
    part = ours or next(iter(file.values()))
    for name in chosen:
        now, before = entry(name), part["entries"].get(name)
        if before is None:
            yield f"{name}: not kept yet"
            continue
        found = [*_changed(before, now, same_machine=part["processor"] == processor(), same_torch=ours is not None)]
        if found:
            yield f"{name}: {' '.join(words_of(name))}\n  " + "\n  ".join(found)


def _changed(before: Entry, now: Entry, *, same_machine: bool, same_torch: bool) -> Iterator[str]:
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if key == "words" and old != new:
            yield "another request is drawn here, as after a new option: what follows says nothing until --write"
        elif key == "words" or not (same_torch or key in _WITHOUT_TENSORS):
            continue
        elif key in ("weights", "norm", "loss") and not (same_machine and same_torch):
            if key != "weights" and not _near(old, new):
                yield f"{key}: {old} -> {new}"
        elif key == "plan" and old is not None and new is not None:
            if moved := [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]:
                yield f"plan: other {', '.join(moved)}"
        elif old != new:
            yield f"{key}: {old} -> {new}"


def _near(old: Any, new: Any) -> bool:
    pairs = list(zip(old, new, strict=False)) if isinstance(old, list) and isinstance(new, list) else [(old, new)]
    return all(a is not None and b is not None and abs(a - b) <= _ROUNDING * max(1.0, abs(a)) for a, b in pairs)
