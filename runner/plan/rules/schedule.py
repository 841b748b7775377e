"""Rules between a request and the properties of its schedule. A new rule is one more row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from runner.config.guests import find_offload
from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.rules.values import another_schedule
from runner.errors import Problem
from runner.optim.catalogue.registry import OPTIMIZERS, find_optimizer
from runner.plan.activations import lends
from runner.plan.prediction import kind_asked
from runner.plan.rules.facts import OrderFacts
from runner.schedule.traits import ScheduleTraits

__all__ = [
    "ASYNCHRONOUS",
    "AVERAGED",
    "COMPRESSION",
    "FILLED",
    "LENDING",
    "LENT",
    "NEWEST",
    "OFFLOADED",
    "OPTIMIZERS_ON_ORDERS",
    "POST_VALIDATION",
    "SPLIT",
    "SWAPPED",
    "TWINS",
    "UNLIKE",
    "WAVES",
    "statistics_problems",
]


def _default(path: str, needed: object, why: str, fix: str = "") -> Row[OrderFacts]:
    """The rule that a key has its default value with such a schedule."""
    shown = "null" if needed is None else str(needed).lower()
    breaks: Callable[[OrderFacts], bool] = lambda f: value_at(f, path) != needed  # noqa: E731
    return Row(path, breaks, f"must be {shown} with schedule={{order.name}}", why, fix=fix or f"{path}={shown}")


def _no_prediction(why: str) -> Row[OrderFacts]:
    """The rule that weights are not predicted."""
    return Row(
        "weight_prediction",
        lambda f: kind_asked(f.config, f.order.name) is not None,
        "must be none with schedule={order.name}",
        why,
        fix="weight_prediction=none",
        value=lambda f: f.config.weight_prediction.name,
    )


def _no_masters(why: str) -> Row[OrderFacts]:
    """The rule that weights are kept in fp32, not as rounded copies of fp32 masters."""
    return Row(
        "precision",
        lambda f: PRECISIONS[f.config.precision.name].master_weights,
        "must keep weights in fp32 with schedule={order.name}",
        why,
        fix="precision=bf16_mixed",
        value=lambda f: f.config.precision.name,
    )


_BY_ITSELF = "Each stage is updated by itself, at a moment when the other stages are at other steps"


def _steps_as_a_whole(facts: OrderFacts) -> bool:
    kind = find_optimizer(facts.config.optimizer)
    return kind is not None and (kind.compresses or kind.watch is not None)


ASYNCHRONOUS: Table[OrderFacts] = Table(
    "Asynchronous schedules, whose windows overlap",
    (
        _default(
            "trainer.grad_clip_norm",
            None,
            f"{_BY_ITSELF}, so that the gradients of the whole model are never there together",
            "trainer.grad_clip_value=1.0",
        ),
        _default(
            "trainer.on_nonfinite",
            "stop",
            f"{_BY_ITSELF}; some have been updated when another is not finite",
        ),
        _default(
            "schedule.post_validation", False, f"{_BY_ITSELF}: no rank waits for another before the optimizer step"
        ),
        _default("trainer.ema_decay", None, f"{_BY_ITSELF}, and an average would mix the stages' steps"),
        _default("zero.stage", None, "DeepSpeed keeps one version of each weight, and updates a rank's together"),
        _default("compile", False, "A compiled layer keeps to the weights that it was compiled with"),
        Row(
            "precision",
            lambda f: PRECISIONS[f.config.precision.name].loss_scaling,
            "must not scale the loss with schedule={order.name}",
            f"An overflow skips the step on every rank. {_BY_ITSELF}",
            fix="precision=bf16_mixed",
            value=lambda f: f.config.precision.name,
        ),
        Row(
            "optimizer",
            _steps_as_a_whole,
            "must be another with schedule={order.name}",
            f"It works on all weights of a rank, or of the replicas, in one step. {_BY_ITSELF}",
            fix="optimizer=adamw",
            value=lambda f: f.config.optimizer.name,
        ),
    ),
    applies=lambda f: f.order.is_asynchronous,
)


AVERAGED: Table[OrderFacts] = Table(
    "Schedules whose pipelines train weights of their own",
    (
        _default(
            "trainer.grad_clip_norm",
            None,
            "A rank holds gradients of several models, and their common norm is that of none",
            "trainer.grad_clip_value=1.0",
        ),
        _default("zero.stage", None, "DeepSpeed keeps one copy of each weight"),
        _default("compile", False, "A compiled layer keeps to the weights that it was compiled with"),
        _default("schedule.post_validation", False, "A step would be taken back with its average"),
        _default("offload.delay_from", None, "The average would be of other steps than the weights"),
        _default("compression.name", "none", "A compressor keeps one error for each weight, not one per pipeline"),
        _no_prediction("The optimizer's states are those of several pipelines, which lead to several predictions"),
        _no_masters("The weights that are averaged would be rounded copies of fp32 masters"),
        Row(
            "optimizer",
            _steps_as_a_whole,
            "must be another with schedule={order.name}",
            "It must be made over the weights of all pipelines, and update each of them from its own gradient",
            fix="optimizer=adamw",
            value=lambda f: f.config.optimizer.name,
        ),
    ),
    applies=lambda f: f.order.own_weights,
)


WAVES: Table[OrderFacts] = Table(
    "Schedules whose replicas exchange changes of weights",
    (
        _default("compression.name", "none", "Replicas exchange changes of weights, and no gradients"),
        _default("offload.delay_from", None, "A step's changes would be those of the step before"),
        _no_prediction("The optimizer's states do not say how the other workers will move a weight"),
        _no_masters("Small changes are lost when weights are rounded to 16 bits, and fp32 masters are not exchanged"),
    ),
    applies=lambda f: f.order.exchanges_waves,
)


NEWEST: Table[OrderFacts] = Table(
    "Schedules whose backwards read newer weights than their forwards",
    (
        Row(
            "activation_checkpoint",
            lambda f: f.config.activation_checkpoint.name != "none",
            "must be none with schedule={order.name}",
            "A forward that runs again in a backward would read the weights of the backward",
            fix="activation_checkpoint=none",
            value=lambda f: f.config.activation_checkpoint.name,
        ),
    ),
    applies=lambda f: f.order.reads_newest,
)


SPLIT: Table[OrderFacts] = Table(
    "Schedules that split backwards or run forwards again",
    (
        Row(
            "compile",
            lambda f: f.config.compile,
            "must be false",
            "The schedule {order.name} splits the backward, and a compiled layer's backward is one piece",
            fix="compile=false",
            when=lambda f: f.order.splits_backward,
        ),
        Row(
            "activation_checkpoint",
            lambda f: f.config.activation_checkpoint.name != "none",
            "must be none",
            "The schedule {order.name} runs whole stages forward again by itself",
            fix="activation_checkpoint=none",
            when=lambda f: f.order.recomputes,
        ),
    ),
    first_of_each_key=True,
)


def _lent(path: str, needed: object, because: str) -> Row[OrderFacts]:
    """The rule that a key has its default value if other ranks keep saved tensors."""
    shown = "null" if needed is None else str(needed).lower()
    why = f"{{order.name}} sends what autograd saved in a forward to another rank, {because}"
    return Row(path, lambda f: value_at(f, path) != needed, f"must be {shown}", why, fix=f"{path}={shown}")


LENT: Table[OrderFacts] = Table(
    "Schedules that lend activations to other ranks",
    (
        _lent("activation_checkpoint", "none", "which these policies make anew"),
        _lent("offload.activations", "none", "which is then in the host's memory"),
        _lent("compile", False, "of layers that run as they are written"),
        _lent("zero.stage", None, "and DeepSpeed runs the forward itself"),
    ),
    applies=lambda f: f.order.moves_activations,
)


OFFLOADED: Table[OrderFacts] = Table(
    "Activations that are moved while the device computes",
    (
        Row(
            "offload.activations",
            lambda f: f.order.recomputes,
            "must be none or save_on_cpu with schedule={order.name}",
            "Its ranks run forwards again just before their backward, which needs what they save at once",
            fix="offload=none",
        ),
        Row(
            "offload.activations",
            lambda f: f.order.is_asynchronous,
            "must be none or save_on_cpu with schedule={order.name}",
            "The host's buffers are counted for windows that end one after the other",
            fix="offload=none",
        ),
    ),
    applies=lambda f: find_offload(f.config.offload) is not None,
)


def _lends(path: str, needed: object, why: str) -> Row[OrderFacts]:
    """The rule that a key has its default value if ranks lend activations."""
    shown = "null" if needed is None else str(needed).lower()
    rule = f"must be {shown} with offload.activations={{config.offload.activations}}"
    return Row(path, lambda f: value_at(f, path) != needed, rule, why, fix=f"{path}={shown}")


_not_lent = partial(another_schedule, "offload.activations={config.offload.activations}")

LENDING: Table[OrderFacts] = Table(
    "Activations that are lent where memory_limit asks for it",
    (
        _not_lent("{order.name} lends activations by itself", lambda order: order.moves_activations),
        _not_lent("What a rank lends is chosen for one stage", lambda order: not order.one_stage_per_rank),
        _not_lent(
            "What comes back is there for a whole backward, and a backward in two parts needs it longer",
            lambda order: order.splits_backward,
        ),
        _not_lent("When tensors leave and come back must be known before", lambda order: order.leaves_its_order),
        _not_lent("Work in bubbles reads tensors that may be away", lambda order: order.filling is not None),
        _lends("zero.stage", None, "DeepSpeed runs the forward itself, and what it saves could not leave"),
        _lends("schedule.post_validation", False, "What another rank keeps could not be taken back"),
        Row(
            "optimizer",
            lambda f: (kind := find_optimizer(f.config.optimizer)) is not None and kind.watch is not None,
            "must be another with offload.activations={config.offload.activations}",
            "{config.optimizer.name} keeps inputs of layers, which would stay",
            fix="optimizer=adamw",
            value=lambda f: f.config.optimizer.name,
        ),
    ),
    applies=lambda f: lends(f.config),
    first_of_each_key=True,
)


def _refused(path: str, rule: str, fix: str) -> Callable[[str, Callable[[ScheduleTraits], bool]], Row[OrderFacts]]:
    """What makes the rules of one key, of which each has its reason and says which schedules break it."""
    return lambda why, breaks: Row(path, lambda f: breaks(f.order), rule, why, fix=fix)


_no_swap = _refused("offload.weights", "must be none with schedule={order.name}", fix="{order.one_copy}")


SWAPPED: Table[OrderFacts] = Table(
    "Weights that are at home in the host's memory",
    (
        _no_swap("Its windows overlap, and read weights of several steps", lambda order: order.is_asynchronous),
        _no_swap(
            "It splits backwards, and gradients of weights come when these may have left again",
            lambda order: order.splits_backward,
        ),
        _no_swap("It runs whole stages forward again by itself", lambda order: order.recomputes),
        _no_swap("It sends what autograd saves to another rank", lambda order: order.moves_activations),
        _no_swap("The order in which weights are used must be known before", lambda order: order.leaves_its_order),
        _no_swap(
            "Several ranks would hold a stage's weights, each at a home of its own", lambda order: order.has_copies
        ),
    ),
    applies=lambda f: f.config.offload.weights != "none",
    first_of_each_key=True,
)


def _does_the_work(facts: OrderFacts) -> bool:
    kind = find_optimizer(facts.config.optimizer)
    return kind is not None and facts.order.filling is not None and kind.fills == facts.order.filling.key


FILLED: Table[OrderFacts] = Table(
    "Schedules whose bubbles are filled",
    (
        Row(
            "optimizer.name",
            lambda f: not _does_the_work(f),
            "must be {order.filling.optimizer} with schedule={order.name}",
            "The bubbles of {order.name} are filled with {order.filling.description}",
            fix="optimizer={order.filling.optimizer}",
        ),
    ),
    applies=lambda f: f.order.filling is not None,
)


def _own_tables() -> Iterator[Table[OrderFacts]]:
    """The rules of this package's optimizers about schedules; a table that several optimizers share comes once."""
    tables = {table.title: table for kind in OPTIMIZERS.values() for table in kind.order_rules}
    yield from (replace(table, applies=_has(title)) for title, table in tables.items())


def _has(title: str) -> Callable[[OrderFacts], bool]:
    def has(facts: OrderFacts) -> bool:
        kind = find_optimizer(facts.config.optimizer)
        return kind is not None and any(table.title == title for table in kind.order_rules)

    return has


OPTIMIZERS_ON_ORDERS: tuple[Table[OrderFacts], ...] = tuple(_own_tables())
"""The rules of optimizers about schedules."""


COMPRESSION: Table[OrderFacts] = Table(
    "Schedules under which gradients cannot be compressed",
    (
        another_schedule(
            "compression={config.compression.name}",
            "Several ranks of {order.name} hold a stage, and sum the gradients of its copies",
            lambda order: order.has_copies,
        ),
    ),
    applies=lambda f: f.config.compression.name != "none",
    first_of_each_key=True,
)


def statistics_problems(schedule: str, names: Iterable[str], fix: str = "schedule=1f1b") -> list[Problem]:
    """Problems of layers with running statistics whose stages are on several ranks of one pipeline.

    Args:
        schedule: the schedule's name.
        names: the names of these layers.
        fix: an override with which each of these stages is on one rank.
    """
    first = next(iter(names), None)
    if first is None:
        return []
    rule = f"must be a schedule of one pipeline, because layer {first} keeps running statistics"
    return [Problem("schedule.name", schedule, rule, _OTHER_AVERAGES, fix)]


_OTHER_AVERAGES = "The copies of a stage would each see a part of the micro-batches, and remember other averages"

_not_unlike = partial(another_schedule, "hardware.devices")

UNLIKE: Table[OrderFacts] = Table(
    "Schedules on unlike devices",
    (
        _not_unlike(
            "Several ranks of {order.name} hold a stage, which takes another time on each of their devices",
            lambda order: order.has_copies,
        ),
        _not_unlike(
            "What fills its bubbles was measured on one device, and would not fill those of others",
            lambda order: order.filling is not None,
        ),
        _not_unlike(
            "The cuts of many orders are played at once, and its ranks leave their order",
            lambda order: order.leaves_its_order,
        ),
    ),
    applies=lambda f: bool(f.config.hardware.devices),
    first_of_each_key=True,
)


TWINS: Table[OrderFacts] = Table(
    "Schedules with copies of a stage",
    (
        Computed(
            "schedule.name",
            lambda f: statistics_problems(f.order.name, f.statistics, f.order.one_copy),
            "must be a schedule of one pipeline where layers keep running statistics",
            _OTHER_AVERAGES,
        ),
    ),
    applies=lambda f: f.order.has_copies,
)


_not_taken_back = _refused("schedule.post_validation", "must be false", fix="schedule.post_validation=false")


POST_VALIDATION: Table[OrderFacts] = Table(
    "Schedules whose steps cannot be taken back",
    (
        _not_taken_back(
            "Several ranks of {order.name} hold a stage, and its copies would have to be taken back together",
            lambda order: order.has_copies,
        ),
        _not_taken_back(
            "What a rank has begun of the next step when one is taken back must be known before",
            lambda order: order.leaves_its_order,
        ),
        _not_taken_back(
            "{order.name} sends what autograd saved in a forward to another rank, and could not take that back",
            lambda order: order.moves_activations,
        ),
        _not_taken_back(
            "{order.name} runs forwards again before their backwards, and the forwards of the next step that a rank "
            "begins early would not know of it",
            lambda order: order.recomputes,
        ),
    ),
    applies=lambda f: f.config.schedule.post_validation,
    first_of_each_key=True,
)
