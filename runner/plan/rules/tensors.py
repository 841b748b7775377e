"""Rules between a request and weights or buffers that not every option can handle; they name the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.config.guests import find_offload, is_own
from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.schema import OffloadConfig, RunConfig
from runner.errors import Problem
from runner.optim.catalogue.registry import OPTIMIZERS, find_optimizer
from runner.plan.prediction import kind_asked
from runner.plan.rules.facts import OrderFacts

__all__ = ["TENSOR_TABLES", "other_format_problem"]

_TAKE_COMPLEX = tuple(name for name, kind in OPTIMIZERS.items() if kind.takes_complex)
_STAGE_3 = 3
_AS_MADE = "float32"
_OTHERWISE_MADE = "The model's function made it so, and trained in fp32 it would become another model without a word"
_FORMATS = {"bfloat16": "precision=bf16", "float16": "precision=fp16"}


def _trains_in_fp32(facts: OrderFacts) -> bool:
    return PRECISIONS[facts.config.precision.name].weights == _AS_MADE


def _default(path: str, needed: object, why: str) -> Row[OrderFacts]:
    """The rule that a key has its default value with a complex weight."""
    shown = "null" if needed is None else str(needed)
    return Row(
        path,
        lambda f: value_at(f, path) != needed,
        f"must be {shown} with a weight of complex numbers, {{complex_weight}}",
        why,
        fix=f"{path.removesuffix('.name')}={shown}",
    )


_COMPLEX: Table[OrderFacts] = Table(
    "Trained weights of complex numbers",
    (
        Row(
            "precision.name",
            lambda f: not _trains_in_fp32(f) or PRECISIONS[f.config.precision.name].four_bits,
            "must be fp32, bf16_mixed or fp16_mixed with a weight of complex numbers, {complex_weight}",
            "There are no complex numbers of fewer bits that could be trained",
            fix="precision=fp32",
        ),
        Row(
            "optimizer.name",
            lambda f: (kind := find_optimizer(f.config.optimizer)) is None or not kind.takes_complex,
            f"must be one of {', '.join(_TAKE_COMPLEX)} with a weight of complex numbers, {{complex_weight}}",
            "Others would compute with its real part, or as if its parts were one number",
            fix="optimizer=adamw",
        ),
        _default("trainer.grad_clip_value", None, "Complex numbers have no order by which they could be clipped"),
        _default("zero.stage", None, "DeepSpeed puts all weights into one flat tensor of real numbers"),
        _default("compression.name", "none", "Compressors compute with real numbers"),
        _default("approximate_backward.name", "none", "Its formulas are those of real numbers"),
        Row(
            "weight_prediction",
            lambda f: kind_asked(f.config, f.order.name) is not None,
            "must be none with a weight of complex numbers, {complex_weight}",
            "Its formulas are those of real numbers",
            fix="weight_prediction=none",
            value=lambda f: f.config.weight_prediction.name,
        ),
    ),
    applies=lambda f: f.complex_weight is not None,
)


def other_format_problem(config: RunConfig, name: str, dtype: str) -> Problem | None:
    """The problem of a trained weight of real numbers that was made in another format than fp32, if the run's is fp32.

    Args:
        config: the request.
        name: the name of the weight.
        dtype: its format, as torch calls it.
    """
    precision = config.precision.name
    if PRECISIONS[precision].weights != _AS_MADE or dtype == _AS_MADE:
        return None
    rule = f"must be the format of the weights, and {name} is {dtype}"
    fix = _FORMATS.get(dtype, "float() of the model in its function")
    return Problem("precision.name", precision, rule, _OTHERWISE_MADE, fix)


def _of_other_format(facts: OrderFacts) -> Iterator[Problem]:
    weight = facts.other_weight
    if weight is not None and (problem := other_format_problem(facts.config, weight.name, weight.dtype)) is not None:
        yield problem


_OTHER: Table[OrderFacts] = Table(
    "Trained weights of another format",
    (
        Computed(
            "precision.name",
            _of_other_format,
            "must be the format of the weights, and {other_weight.name} is {other_weight.dtype}",
            _OTHERWISE_MADE,
        ),
    ),
    applies=lambda f: f.other_weight is not None and _trains_in_fp32(f),
)

_FROZEN: Table[OrderFacts] = Table(
    "Frozen weights of another format",
    (
        Row(
            "zero.stage",
            lambda f: f.config.zero.stage is not None,
            "must be null with a weight of another format, {frozen_weight.name} of {frozen_weight.dtype}",
            "DeepSpeed takes weights of the run's format alone, also if they are not trained",
            "deepspeed/runtime/engine.py: __check_params",
            "zero=none",
        ),
    ),
    applies=lambda f: f.frozen_weight is not None and _trains_in_fp32(f),
)

_EMPTY: Table[OrderFacts] = Table(
    "Weights without elements",
    (
        Row(
            "zero.stage",
            lambda f: f.config.zero.stage == _STAGE_3,
            "must be at most 2 with a weight without elements, {empty_weight}",
            "A weight that is shared out into nothing is never complete, and its forward waits for that",
            "deepspeed/runtime/zero/partitioned_param_coordinator.py: fetch_sub_module",
            "zero.stage=2",
        ),
    ),
    applies=lambda f: f.empty_weight is not None,
)

_CHANGED: Table[OrderFacts] = Table(
    "Buffers that a forward changes",
    (
        Row(
            "schedule.name",
            lambda f: f.order.has_copies,
            "must be a schedule of one pipeline, because a forward changes {changed_buffer}",
            "The copies of a stage would each see a part of the micro-batches, and change it otherwise",
            fix="{order.one_copy}",
        ),
    ),
    applies=lambda f: f.changed_buffer is not None and not f.statistics,
)

_SHARED: Table[OrderFacts] = Table(
    "Buffers of several layers that a forward changes",
    (
        Row(
            "parallelism.pipeline",
            lambda f: f.config.parallelism.pipeline > 1,
            "must be 1, because a forward changes {shared_buffer}",
            "Several layers use it, and stages in different processes would have one each",
            fix="parallelism.pipeline=1",
        ),
    ),
    applies=lambda f: f.shared_buffer is not None,
)

_AGAIN = "It would run again in a backward, and change it twice"
_ORDER = "Forwards would run more than once, or not in the order of the micro-batches, and change it in another way"
_RUN_AGAIN = ("auto", "pofo", "superneurons", "swapadvisor")


def _runs_again(section: OffloadConfig) -> bool:
    """Whether a user's own strategy may run layers again."""
    own = find_offload(section) if is_own(section, "activations") else None
    return own is not None and own.alone


def _unchanged(path: str, wrong: Callable[[OrderFacts], bool], why: str, fix: str, *, needed: str) -> Row[OrderFacts]:
    """The rule that a key is as ``needed`` where a forward changes what is no buffer."""
    return Row(path, wrong, f"must be {needed}, because a forward changes {{changed_state}}", why, fix=fix)


_REMEMBERED: Table[OrderFacts] = Table(
    "What forwards change besides buffers",
    (
        _unchanged(
            "activation_checkpoint.name",
            lambda f: f.config.activation_checkpoint.name != "none",
            _AGAIN,
            "activation_checkpoint=none",
            needed="none",
        ),
        _unchanged(
            "offload.activations",
            lambda f: f.config.offload.activations in _RUN_AGAIN or _runs_again(f.config.offload),
            _AGAIN,
            "offload.activations=none",
            needed="one that runs no layer again",
        ),
        _unchanged(
            "schedule.name",
            lambda f: f.order.recomputes or f.order.has_copies or f.order.leaves_its_order,
            _ORDER,
            "{order.one_copy}",
            needed="one that runs each forward once, in one place",
        ),
        _unchanged(
            "schedule.post_validation",
            lambda f: f.config.schedule.post_validation,
            "Forwards that have begun are taken back, and what they have changed is not",
            "schedule.post_validation=false",
            needed="false",
        ),
    ),
    applies=lambda f: f.changed_state is not None,
)


def _has_masters(facts: OrderFacts) -> bool:
    return bool(PRECISIONS[facts.config.precision.name].master_weights)


_WRITTEN: Table[OrderFacts] = Table(
    "Weights that forwards change",
    (
        Row(
            "schedule.microbatches",
            lambda f: (
                f.config.schedule.computed_microbatches > 1
                and (f.config.parallelism.pipeline > 1 or f.order.name != "1f1b")
            ),
            "must be 1 here, because a forward changes the weight {written_weight}",
            "Backwards of earlier micro-batches would read what later forwards have written",
            fix="schedule.microbatches=1",
        ),
        Row(
            "schedule.name",
            lambda f: f.order.is_asynchronous or f.order.own_weights,
            "must be a schedule with one version of the weights, because a forward changes {written_weight}",
            "The change would be made in one version of it alone",
            fix="schedule=1f1b",
        ),
        Row(
            "zero.stage",
            lambda f: f.config.zero.stage is not None,
            "must be null, because a forward changes the weight {written_weight}",
            "DeepSpeed keeps weights of its own, from which it writes this one anew in every step",
            fix="zero=none",
        ),
        Row(
            "precision.name",
            lambda f: _has_masters(f) and f.written_trained is not None,
            "must be one without fp32 masters, because a forward changes the weight {written_trained}",
            "The optimizer would write it anew from its master in every step",
            fix="precision=fp32",
        ),
    ),
    applies=lambda f: f.written_weight is not None,
)

TENSOR_TABLES = (_COMPLEX, _OTHER, _FROZEN, _EMPTY, _CHANGED, _SHARED, _REMEMBERED, _WRITTEN)
"""The tables of this file."""
