"""Rules of activation checkpoints, offloaded activations and compiled layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.config.guests import MOVERS, find_offload, is_own, target_problems
from runner.config.precision import PRECISIONS
from runner.config.rules.table import Computed, Row, Table, value_at, where
from runner.config.rules.values import is_given, not_negative, one_of, positive, rule_of
from runner.config.schema import RunConfig
from runner.memory.solve.offload import Offload
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import OPTIONS, STRATEGIES
from runner.memory.solve.strategy import SECTION, Strategy
from runner.options import Option, shown

__all__ = ["MEMORY", "POLICIES", "TO_HOST", "moves_to_host"]

POLICIES = (*STRATEGIES, "custom")
"""Names of this package's strategies, and ``custom`` for a user's own; with a target, other names are allowed."""

TO_HOST = [name for name, offload in OFFLOADS.items() if not offload.lends]
"""Names of the strategies that move saved tensors to the host's memory."""


def _offload(config: RunConfig) -> Offload:
    """The strategy that moves activations; one without traits if there is none, or it is not known."""
    return find_offload(config.offload) or Offload("none", lambda chain, program: program)


def _moves(config: RunConfig) -> bool:
    return find_offload(config.offload) is not None


def _chooses(config: RunConfig) -> bool:
    offload = _offload(config)
    return offload.candidates is not None and not offload.alone


def moves_to_host(config: RunConfig) -> bool:
    """Whether a strategy moves saved tensors to the host's memory."""
    return _moves(config) and not _offload(config).lends


def _of_option(owners: Mapping[str, Option]) -> Iterator[Row[RunConfig]]:
    """The rules of an option: its strategies need it with a valid value, other strategies must not have it."""
    option = next(iter(owners.values()))
    path = f"{SECTION}.{option.key}"
    if option.required:
        yield Row(
            path,
            lambda c: not is_given(c, path),
            "must be given",
            "The policy {activation_checkpoint.name} needs it",
            fix=f"{path}={option.example}",
            when=lambda c: c.activation_checkpoint.target is None and c.activation_checkpoint.name in owners,
        )
    yield Row(
        path,
        lambda c: is_given(c, path),
        f"belongs to {SECTION}={' or '.join(owners)}",
        "The policy {activation_checkpoint.name} has no use for it",
        fix=f"{path}=null",
        value=lambda c: shown(value_at(c, path)),
        when=lambda c: _is_own(c) or c.activation_checkpoint.name in set(STRATEGIES) - set(owners),
    )
    yield from rule_of(SECTION, option)


def _is_own(config: RunConfig) -> bool:
    """Whether the strategy is a user's own."""
    return config.activation_checkpoint.target is not None


def _strategy(config: RunConfig) -> Strategy:
    """This package's strategy that a request names; one without traits if it is a user's own, or not known."""
    plain = STRATEGIES["none"]
    return plain if _is_own(config) else STRATEGIES.get(config.activation_checkpoint.name, plain)


def _decides_too(config: RunConfig) -> bool:
    """Whether an activation policy is chosen beside an offload strategy that takes its place."""
    name = config.activation_checkpoint.name
    return _is_own(config) or name not in ("none", *(["auto"] if config.offload.activations == "auto" else []))


def _autocasts(config: RunConfig) -> bool:
    precision = PRECISIONS.get(config.precision.name)
    return precision is not None and precision.autocast is not None


def _slows_moves(path: str, default: str) -> Row[RunConfig]:
    """The rule that a key which slows moves of activations down needs such moves."""
    return Row(
        path,
        lambda c: bool(value_at(c, path)) and not moves_to_host(c),
        f"belongs to offload.activations={' or '.join(TO_HOST)}, or offload.weights",
        "Other moves are not slowed down",
        fix=f"{path}={default}",
        when=lambda c: c.offload.weights == "none",
    )


MEMORY: Table[RunConfig] = Table(
    "Activations",
    (
        *(row for owners in OPTIONS.values() for row in _of_option(owners)),
        Row(
            f"{SECTION}.target",
            lambda c: _is_own(c) and c.activation_checkpoint.name in STRATEGIES,
            "belongs to a policy of your own",
            "{activation_checkpoint.name} is one of the runner's",
            fix=f"{SECTION}=custom",
            when=lambda c: c.activation_checkpoint.name != "none",
        ),
        Row(
            f"{SECTION}.kwargs",
            lambda c: bool(c.activation_checkpoint.kwargs),
            "belong to a target",
            "The policy {activation_checkpoint.name} is no function of yours",
            fix=lambda c: f"{SECTION}.kwargs={{}}",  # braces in a plain text would name a fact
            when=lambda c: not _is_own(c) and c.activation_checkpoint.name in STRATEGIES,
        ),
        *where(lambda c: not is_own(c.offload, "activations"), one_of("offload.activations", MOVERS)),
        Row(
            "offload.target",
            lambda c: c.offload.activations == c.offload.weights == "none",
            "must be named by offload.activations, or by offload.weights",
            "These say whether it chooses what layers save, or weights",
            fix="offload.activations=mine",
            when=lambda c: c.offload.target is not None,
        ),
        Row(
            "offload.kwargs",
            lambda c: bool(c.offload.kwargs),
            "belong to a target",
            "{offload.name} is no function of yours",
            fix=lambda c: "offload.kwargs={}",  # braces in a plain text would name a fact
            when=lambda c: c.offload.target is None,
        ),
        Computed("offload.target", lambda c: target_problems(c.offload), "must be what its own key says"),
        Row(
            "offload.activations",
            lambda c: _strategy(c).picks_operators and c.offload.activations != "none",
            "must not meet activation_checkpoint={activation_checkpoint.name}",
            "The hooks that move saved tensors do not see what such a policy keeps: it would stay on the device",
            fix="activation_checkpoint=full or offload=none",
        ),
        Row(
            "offload.activations",
            lambda c: _chooses(c) and _strategy(c).reads_budget,
            "must not meet activation_checkpoint={activation_checkpoint.name}",
            "Each of the two fills memory_limit as if the other did nothing",
            fix="activation_checkpoint=none or offload=activations_async",
        ),
        Row(
            "offload.activations",
            lambda c: _offload(c).alone and _decides_too(c),
            "must not meet activation_checkpoint={activation_checkpoint.name}",
            "It decides itself what is kept, moved or computed again",
            fix="activation_checkpoint=none",
        ),
        Row(
            "offload.activations",
            lambda c: _moves(c) and c.compile,
            "must be none or save_on_cpu with compile=true",
            "What a compiled layer saves is not what the plan has measured, and the host's buffers would not suffice",
            fix="compile=false",
        ),
        Row(
            "offload.activations",
            lambda c: _moves(c) and _autocasts(c),
            "must be none or save_on_cpu with precision={precision.name}",
            "Autocast's copies of weights would be moved with the activations, and the plan does not count them",
            fix="precision=bf16",
        ),
        not_negative("offload.delay_seconds"),
        positive("offload.bytes_per_second", "1e9"),
        _slows_moves("offload.delay_seconds", "0"),
        _slows_moves("offload.bytes_per_second", "null"),
        Row(
            "compile",
            lambda c: _strategy(c).picks_operators and c.compile,
            "must be false with activation_checkpoint={activation_checkpoint.name}",
            "It keeps the outputs of single operators, and a compiled layer has none that it could see",
            fix="activation_checkpoint=full or compile=false",
        ),
        Row(
            "compile",
            lambda c: _strategy(c).compiles and not c.compile,
            "must be true with activation_checkpoint={activation_checkpoint.name}",
            "The compiler of layers decides what their backward is given; other layers keep what autograd saves",
            fix="compile=true or activation_checkpoint=auto",
        ),
        Row(
            "offload.activations",
            lambda c: _strategy(c).runs_graphs and c.offload.activations != "none",
            "must not meet activation_checkpoint={activation_checkpoint.name}",
            "Both replace what autograd saves, and would take it from each other",
            fix="activation_checkpoint=auto or offload=none",
        ),
        Row(
            "compile",
            lambda c: _strategy(c).runs_graphs and c.compile,
            "must be false with activation_checkpoint={activation_checkpoint.name}",
            "It drops single tensors that layers save, and a compiled layer saves others than those that were profiled",
            fix="activation_checkpoint=auto or compile=false",
        ),
    ),
)
