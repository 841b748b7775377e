"""Starts the ranks of one run on this machine from its configuration file, watches them and reports how they ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from runner.config.compose.resolve import load
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_WRONG_REQUEST
from runner.launch.failure import RankFailure, error_file, log_file, status_of
from runner.launch.local.allocator import allocator_variables
from runner.launch.local.forked import Forked, Spare, Template
from runner.launch.local.grace import grace_seconds
from runner.launch.local.template import Orders, imports_of
from runner.launch.processes.handed_over import HandedOver
from runner.launch.processes.meeting import TOKEN_VARIABLE
from runner.launch.processes.overdue import Watch, limits_of
from runner.launch.processes.stops import exit_status_of, name_of_signal
from runner.launch.processes.supervise import Ending, ProcessSpec, supervise
from runner.launch.rank import ENDINGS, TRAIN_ENTRY, rank_variables, uses_cuda
from runner.pulse import NO_PROGRESS, Phase, Pulses
from runner.record import RECORD_FILE, RunRecord, Status, finish_failed, hang_file

__all__ = ["Launch", "Outcome", "import_ahead", "run_ranks", "stopped_by_another", "stopped_early", "stopped_reason"]

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start.

    Args:
        config_file: the resolved configuration; every rank reads it.
        run_dir: the run's directory; it exists.
        world_size: number of ranks.
        threads: CPU threads of each rank.
        place: describes for messages what a rank holds, e.g. ``stage 3, layers 12..15``.
        entry: ``module:function`` that every rank calls with the configuration and the run's directory.
        to_stderr: whether the output of the ranks goes to standard error, as logs do.
    """

    config_file: Path
    run_dir: Path
    world_size: int
    threads: int
    place: Callable[[int], str]
    entry: str = TRAIN_ENTRY
    to_stderr: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Args:
        messages: lines for the user: why, and what explains it further.
        consequences: lines about other ranks, which failed because the first one had.
    """

    exit_status: int
    status: Status
    messages: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """The first message, which becomes the ``reason`` of the record."""
        return self.messages[0] if self.messages else None

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines as they are printed: the reason is the last one, because people read the end of a log.

        The problems of a wrong request are reasons alike, and keep their order.
        """
        if self.exit_status == EXIT_WRONG_REQUEST:
            return self.messages
        return (*self.consequences, *self.messages[1:], *self.messages[:1])


class _Shared:
    """What the ranks share with this process, and with nobody else."""

    def __init__(self, world_size: int) -> None:
        self.reports = HandedOver()
        self.pulses = Pulses(world_size)
        self.token = secrets.token_hex(16)
        self.descriptors = (self.reports.fileno(), self.pulses.fileno())

    def close(self) -> None:
        self.reports.close()
        self.pulses.close()


@dataclass(frozen=True, slots=True)
class _Left:
    """What is known of failed ranks besides their files.

    Args:
        reports: failures that they could write into no file, by rank.
        said: for each failed rank why it was ended, by the supervisor or by its own watchdog; empty if it was not.
    """

    reports: Mapping[int, RankFailure]
    said: Mapping[int, str]

    @classmethod
    def of(cls, ending: Ending, shared: _Shared) -> _Left:
        told = {rank: shared.pulses.said_by(rank).partition("\n")[0] for rank in ending.failed}
        return cls(shared.reports.read(), told | dict(ending.overdue))


@contextlib.contextmanager
def import_ahead(config: RunConfig, entry: str) -> Iterator[Template | None]:
    """While the block plans a request, have a template process import what its ranks will need, if they are forked.

    A single rank is forked, too: its imports then take place while this process plans. Yields None if the ranks are not
    forked, or if only an import could tell. :func:`run_ranks` then starts the template of several ranks, and it ends a
    template that was started here if it finds a GPU that was not seen here.
    """
    may_use_cuda = config.device == "cuda" or (config.device == "auto" and _NVIDIA_DRIVER.exists())
    if sys.platform != "linux" or may_use_cuda or any(rules(config)):
        yield None
        return
    with Template(_template(config, entry, to_stderr=False)) as template:
        yield template


def run_ranks(launch: Launch, template: Template | None = None, spare: Spare | None = None) -> Outcome:
    """Run all ranks to their end. The record in ``run_dir`` is completed here if the ranks could not do so.

    Args:
        template: a process that has already imported what the ranks need; it ends in this call.
        spare: gets a template for the next start while the ranks run.
    """
    (launch.run_dir / "logs").mkdir(exist_ok=True)
    for rank in range(launch.world_size):
        error_file(launch.run_dir, rank).unlink(missing_ok=True)
    kills_before = _kills_for_memory()
    with socket.socket() as listener, contextlib.closing(_Shared(launch.world_size)) as shared:
        listener.bind(("127.0.0.1", 0))
        listener.listen(launch.world_size)
        specs = [_spec(launch, rank, listener, shared) for rank in range(launch.world_size)]
        may_fork, config = _may_fork(launch), load(launch.config_file)
        if template is not None and not may_fork:
            template.end()
        forks = may_fork and (launch.world_size > 1 or template is not None)  # else it would only import elsewhere
        together = partial(_fork, launch, listener, shared, template) if forks else None
        prepare_next = partial(_keep, spare, launch, shared) if spare is not None and may_fork else None
        # Rank 0 has inherited the socket. If it stayed open here, ranks would wait for a dead rank 0, not be refused.
        ending = supervise(
            specs,
            start_together=together,
            after_start=listener.close,
            endings=ENDINGS,
            grace_seconds=partial(grace_seconds, config.launcher),
            watch=Watch(shared.pulses, limits_of(config)),
            each_poll=prepare_next,
        )
        left = _Left.of(ending, shared)
    outcome = _outcome(launch, ending, left, killed_for_memory=_kills_for_memory() > kills_before)
    if outcome.exit_status != EXIT_OK:
        try:
            finish_failed(launch.run_dir, outcome.status, outcome.reason or outcome.status)
        except OSError as error:  # the cause is reported all the same
            said = f"{launch.run_dir / RECORD_FILE} could not be written: {error}"
            return replace(outcome, consequences=(*outcome.consequences, said))
    return outcome


def _keep(spare: Spare, launch: Launch, shared: _Shared) -> None:
    """Give a spare its template when all ranks have begun their steps, which its imports would delay before."""
    if all(shared.pulses.of(rank)[0] is not Phase.START for rank in range(launch.world_size)):
        spare.keep(lambda: _template_of(launch))


def _template_of(launch: Launch) -> Template:
    return Template(_template(load(launch.config_file), launch.entry, to_stderr=launch.to_stderr))


def _may_fork(launch: Launch) -> bool:
    """Whether the ranks can be forked: CUDA does not survive a fork."""
    return sys.platform == "linux" and not uses_cuda(load(launch.config_file))


def _fork(
    launch: Launch,
    listener: socket.socket,
    shared: _Shared,
    template: Template | None,
    is_told_to_stop: Callable[[], bool],
) -> Sequence[Forked]:
    orders = Orders(
        str(launch.config_file),
        str(launch.run_dir),
        launch.entry,
        launch.world_size,
        _environment(launch, listener, shared),
    )
    if template is None:
        template = _template_of(launch)
    descriptors = (listener.fileno(), *shared.descriptors)
    limit = load(launch.config_file).launcher.start_timeout_seconds or math.inf
    return template.fork(asdict(orders), descriptors, launch.world_size, is_told_to_stop, limit)


def _template(config: RunConfig, entry: str, *, to_stderr: bool) -> ProcessSpec:
    command = [sys.executable, "-m", "runner.launch.local.template", json.dumps(imports_of(config, entry))]
    return ProcessSpec(command, _process_variables(config.trainer.threads), to_stderr=to_stderr)


def _spec(launch: Launch, rank: int, listener: socket.socket, shared: _Shared) -> ProcessSpec:
    return ProcessSpec(
        [sys.executable, "-m", "runner.launch.rank", str(launch.config_file), str(launch.run_dir), launch.entry],
        _environment(launch, listener, shared) | rank_variables(rank, listener.fileno(), *shared.descriptors),
        log=None if rank == 0 else log_file(launch.run_dir, rank),
        pass_fds=(*shared.descriptors, *((listener.fileno(),) if rank == 0 else ())),
        to_stderr=launch.to_stderr,
    )


def _environment(launch: Launch, listener: socket.socket, shared: _Shared) -> dict[str, str]:
    """The environment variables that are the same for all ranks."""
    return {
        TOKEN_VARIABLE: shared.token,
        # By default, Gloo listens at the address of the machine's name.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        **_process_variables(launch.threads),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
    }


def _process_variables(threads: int) -> dict[str, str]:
    """The environment variables that a process of a rank reads when it starts."""
    return {**allocator_variables(os.environ), "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def _outcome(launch: Launch, ending: Ending, left: _Left, *, killed_for_memory: bool) -> Outcome:
    if ending.interrupted_by is not None and not ending.failed:
        return stopped_early(launch.run_dir, ending.interrupted_by)
    if not ending.failed:
        return Outcome(EXIT_OK, "ok")
    reports = {
        rank: left.reports.get(rank) or RankFailure.load(error_file(launch.run_dir, rank)) for rank in ending.failed
    }
    ordered = _without_repetitions(_first_cause_first(ending, reports), reports, left.said)
    first = reports[ordered[0]]
    if first is not None and first.exit_status == EXIT_WRONG_REQUEST:  # the rank that found it does not matter
        return Outcome(EXIT_WRONG_REQUEST, "unsupported", tuple(first.message.splitlines()))
    messages = [_message(launch, rank, ending.returncodes[rank], reports[rank], left.said[rank]) for rank in ordered]
    if first is None and killed_for_memory:
        why = f"{messages[0]} (the system was out of memory)"
        return Outcome(EXIT_DOES_NOT_FIT, "out_of_memory", (why,), tuple(messages[1:]))
    # The whole message of an explained failure, e.g. the schedule with the failing cell.
    further = first.message.strip().splitlines()[1:] if first is not None and first.explained else []
    exit_status = first.exit_status if first is not None else EXIT_FAILED
    return Outcome(exit_status, status_of(exit_status), (messages[0], *further), tuple(messages[1:]))


def stopped_early(run_dir: Path, number: int) -> Outcome:
    """The outcome of a run after a signal, unless the run was complete: then it is a success.

    The ranks may have reached the end of a step, saved and recorded it themselves.
    """
    try:
        record = RunRecord.load(run_dir)
    except (FileNotFoundError, ValueError):
        record = RunRecord()
    if record.status == "ok":
        return Outcome(EXIT_OK, "ok")
    exit_status = exit_status_of(number)
    saved = record.steps if record.status == "interrupted" else None
    status: Status = "preempted" if exit_status == EXIT_PREEMPTED else "interrupted"
    return Outcome(exit_status, status, (stopped_reason(number, saved),))


def stopped_reason(number: int | None, saved: int | None) -> str:
    """The reason in the record of a run that a signal has stopped and that can be resumed.

    Args:
        number: the signal, if it is known.
        saved: the step after which the ranks saved; None if they could not, or had not begun.
    """
    how = f"saved after step {saved}" if saved is not None else "before it could save"
    return f"{_stopped_by(number)}, {how}; resume=auto continues"


def stopped_by_another(reason: str, number: int) -> str:
    """A reason of :func:`stopped_reason` for SIGTERM, which a sweep sends its job, with the signal of the sweep."""
    return reason.replace(_stopped_by(signal.SIGTERM), _stopped_by(number))


def _stopped_by(number: int | None) -> str:
    name = name_of_signal(number) if number is not None else "a signal"
    return f"stopped by {name}" + (" (Ctrl-C)" if number == signal.SIGINT else "")


def _first_cause_first(ending: Ending, reports: dict[int, RankFailure | None]) -> Sequence[int]:
    """The failed ranks, most likely cause first.

    A rank that left no report was killed, so its end is not a consequence of another rank's end; one that was killed
    because it did nothing comes first; the others follow by time, those last that lost a connection.
    """

    def order(rank: int) -> tuple[bool, bool, bool, float]:
        report = reports[rank]
        when = report.time if report is not None else ending.failed.index(rank)
        return (report is not None, rank not in ending.overdue, report is not None and report.follows, when)

    return sorted(ending.failed, key=order)


def _without_repetitions(
    ordered: Sequence[int], reports: Mapping[int, RankFailure | None], said: Mapping[int, str]
) -> Sequence[int]:
    """The ranks without those that say what a rank before them says, or only that another rank has ended.

    Some checks fail on all ranks together, and a rank that ends because nothing happens tells of all ranks.
    """
    heard: dict[object, int] = {}
    for rank in ordered:
        report = reports[rank]
        if heard and report is not None and report.follows:
            continue
        key = report.message if report is not None and report.explained else rank
        heard.setdefault(NO_PROGRESS if report is None and said[rank].startswith(NO_PROGRESS) else key, rank)
    return list(heard.values())


def _message(launch: Launch, rank: int, returncode: int, report: RankFailure | None, said: str) -> str:
    """The line for the user about a failed rank; ``said`` is what it, or who has ended it, has left to say of it."""
    who = f"rank {rank} ({launch.place(rank)})"
    if report is None and said.startswith(NO_PROGRESS):
        return _of_hang(launch.run_dir, rank, said)
    if report is None and said:
        return f"{who} was ended: {said}"
    if report is None and returncode < 0:
        return f"{who} died: {name_of_signal(-returncode)}"
    log = log_file(launch.run_dir, rank)
    hint = f"; see {log}" if log.exists() else ""
    if report is None:
        early = " before its work was complete" if returncode == EXIT_OK else ""
        return f"{who} ended with status {returncode}{early}{hint}"
    said = report.summary()
    action, at, what = said.partition(f" failed on {who}: ")  # of a step's action, which names its rank for torchrun
    told = f"{who} failed in {action}: {what}" if at else f"{who} failed: {said}"
    return f"{told}{'' if report.explained else hint}"


def _of_hang(run_dir: Path, rank: int, said: str) -> str:
    """The line about a run that a rank has ended because nothing happened: its file's first line names all ranks.

    The file to look into is that of the rank which the line names first, if that could write one.
    """
    own = hang_file(run_dir, rank)
    if own.exists():
        said = own.read_text(encoding="utf-8").partition("\n")[0]
    first = re.search(r"\brank (\d+) ", said)
    named = hang_file(run_dir, int(first[1])) if first is not None else own
    see = next((file for file in (named, own) if file.exists()), None)
    return f"{said}; see {see}" if see is not None else said


def _kills_for_memory() -> int:
    """How many processes of this control group the kernel has killed for lack of memory; 0 if it does not say."""
    try:
        for line in Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except OSError:
        pass
    return 0
