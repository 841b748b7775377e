"""Rules of weights that are at home in the host's memory, ``offload.weights``."""

from __future__ import annotations

from collections.abc import Callable

from runner.config.guests import find_weights, is_own
from runner.config.precision import PRECISIONS
from runner.config.rules.memory import TO_HOST, moves_to_host
from runner.config.rules.table import Row, Table, value_at, where
from runner.config.rules.values import at_least, belongs, is_given, one_of
from runner.config.schema import RunConfig
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.weights import WEIGHT_STRATEGIES
from runner.optim.catalogue.registry import find_optimizer

__all__ = ["WEIGHTS"]

_WEIGHTS = "offload.weights"
_SCOPE = "offload.scope"
_SCOPES = ("activations", "weights", "all")
_ON_WEIGHTS = [name for name, offload in OFFLOADS.items() if offload.choose_weights is not None]


def _moves(config: RunConfig) -> bool:
    return find_weights(config.offload) is not None


def _is_layer_by_layer(config: RunConfig) -> bool:
    strategy = find_weights(config.offload)
    return strategy is not None and strategy.layer_by_layer


def _runs_graphs_or_reads_budget(config: RunConfig) -> bool:
    strategy = STRATEGIES.get(config.activation_checkpoint.name)
    own = config.activation_checkpoint.target is not None
    return own or (strategy is not None and (strategy.runs_graphs or strategy.reads_budget))


def _watches_or_compresses(config: RunConfig) -> bool:
    kind = find_optimizer(config.optimizer)
    return kind is not None and (kind.watch is not None or kind.compresses)


def _must_be_none(breaks: Callable[[RunConfig], bool], meeting: str, why: str, fix: str) -> Row[RunConfig]:
    return Row(_WEIGHTS, breaks, f"must be none with {meeting}", why, fix=fix, when=_moves)


def _belongs(key: str, strategy: str, default: str) -> Row[RunConfig]:
    """The rule that a key is read by one strategy alone."""
    return belongs(
        f"offload.{key}",
        f"offload.weights={strategy}",
        "Nothing else reads it",
        fix=f"offload.{key}={default}",
        when=lambda c: c.offload.weights != strategy,
    )


WEIGHTS: Table[RunConfig] = Table(
    "Weights in the host's memory",
    (
        *where(lambda c: not is_own(c.offload, "weights"), one_of(_WEIGHTS, ("none", *WEIGHT_STRATEGIES))),
        _must_be_none(
            lambda c: c.zero.stage is not None,
            "zero.stage={zero.stage}",
            "DeepSpeed updates flat copies of a rank's weights, from which no layer's part can leave; with "
            "zero.stage=3, offload=parameters_cpu does it",
            "zero.stage=null",
        ),
        _must_be_none(
            lambda c: c.offload.activations != "none" and c.offload.scope != "all",
            "offload.activations={offload.activations}",
            "A strategy moves activations, unless offload.scope says that it moves weights, too",
            "offload.activations=none",
        ),
        Row(
            _WEIGHTS,
            lambda c: c.offload.activations != c.offload.weights,
            "must be none, or {offload.activations}, with offload.scope=all",
            "One strategy chooses among both",
            fix="offload.weights=none",
            when=lambda c: c.offload.scope == "all" and c.offload.activations in _ON_WEIGHTS and _moves(c),
        ),
        _must_be_none(
            lambda c: c.compile,
            "compile=true",
            "A compiled layer keeps weights that autograd does not show",
            "compile=false",
        ),
        _must_be_none(
            lambda c: (named := PRECISIONS.get(c.precision.name)) is not None and named.autocast is not None,
            "precision={precision.name}",
            "Autocast keeps copies of all weights on the device until the backward",
            "precision=bf16",
        ),
        Row(
            _WEIGHTS,
            lambda c: (named := PRECISIONS.get(c.precision.name)) is not None and named.master_weights,
            "must be none, or offload.frozen_only=true, with precision={precision.name}",
            "The plan does not count fp32 masters that are updated in the host's memory",
            fix="precision=fp32 or precision=bf16",
            when=lambda c: _moves(c) and not c.offload.frozen_only,
        ),
        _must_be_none(
            _runs_graphs_or_reads_budget,
            "activation_checkpoint={activation_checkpoint.name}",
            "It runs layers in an order of its own, or fills memory_limit as if all weights stayed on the device",
            "activation_checkpoint=none or activation_checkpoint=full",
        ),
        _must_be_none(
            _watches_or_compresses,
            "optimizer={optimizer.name}",
            "It reads gradients where the layers run, or where replicas meet, and not in the host's memory",
            "optimizer=adamw",
        ),
        _must_be_none(
            lambda c: c.weight_prediction.name not in (None, "none"),
            "weight_prediction={weight_prediction.name}",
            "Predicted weights are further copies on the device",
            "weight_prediction=none",
        ),
        _must_be_none(
            lambda c: c.schedule.post_validation,
            "schedule.post_validation=true",
            "A step would be taken back in the host while its weights are on the device again",
            "schedule.post_validation=false",
        ),
        Row(
            "parallelism.data",
            lambda c: c.parallelism.data > 1 and c.device != "cpu",
            "must be 1 with offload.weights={offload.weights}, but with device=cpu or offload.frozen_only=true",
            "Replicas sum gradients between devices, and these are in the host's memory",
            fix="parallelism.data=1",
            when=lambda c: _moves(c) and not c.offload.frozen_only,
        ),
        Row(
            "schedule.name",
            lambda c: c.schedule.name != "looped_bfs",
            "must be looped_bfs with offload.weights={offload.weights}",
            "All micro-batches go through a stage before its weights leave; other orders would fetch them for each",
            fix="schedule=looped_bfs",
            when=_is_layer_by_layer,
        ),
        Row(
            "activation_checkpoint",
            lambda c: c.activation_checkpoint.name != "full",
            "must be full with offload.weights={offload.weights}",
            "Between forward and backward a stage keeps its input alone",
            fix="activation_checkpoint=full",
            value=lambda c: value_at(c, "activation_checkpoint.name"),
            when=_is_layer_by_layer,
        ),
        one_of(_SCOPE, _SCOPES),
        Row(
            _SCOPE,
            lambda c: c.offload.scope != "activations" and c.offload.activations not in (*_ON_WEIGHTS, "none"),
            "must be activations with offload.activations={offload.activations}",
            f"It chooses by what layers save; {', '.join(_ON_WEIGHTS)} choose among weights, too",
            fix="offload.scope=activations",
        ),
        Row(
            _SCOPE,
            lambda c: c.offload.activations == "none" and not (c.offload.scope == "weights" and _moves(c)),
            "belongs to offload.activations=" + ", ".join(_ON_WEIGHTS),
            "No strategy is named that could choose",
            fix="offload.scope=activations",
            when=lambda c: c.offload.scope in ("weights", "all"),
        ),
        at_least("offload.blocks", 1),
        Row(
            "offload.blocks",
            lambda c: not is_given(c, "offload.blocks"),
            "must be given with offload.weights=blockswap",
            "It says how many blocks of each stage move",
            fix="offload.blocks=1",
            when=lambda c: c.offload.weights == "blockswap",
        ),
        _belongs("blocks", "blockswap", "null"),
        Row(
            "offload.fraction",
            lambda c: not 0 < (c.offload.fraction or 0) <= 1,
            "must lie in (0, 1]",
            "It is the share of each stage's layers that moves",
            fix="offload.fraction=0.5",
            when=lambda c: is_given(c, "offload.fraction"),
        ),
        _belongs("fraction", "granular", "null"),
        Row(
            "offload.drive",
            lambda c: not _moves(c) and not moves_to_host(c),
            f"belongs to offload.weights, or to offload.activations={' or '.join(TO_HOST)}",
            "Nothing else is moved to files",
            fix="offload.drive=null",
            when=lambda c: is_given(c, "offload.drive"),
        ),
        Row(
            "offload.frozen_only",
            lambda c: c.offload.frozen_only and c.offload.weights == "none",
            "belongs to offload.weights",
            "No weights move",
            fix="offload.frozen_only=false",
        ),
    ),
)
