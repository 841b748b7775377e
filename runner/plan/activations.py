"""The activation policies of a request in its plan: their programs, rules that need the model's layers, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from runner.config.guests import find_offload, offload_of
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import Problem
from runner.memory.solve.adjust import adjusted, host_bytes
from runner.memory.solve.offload import Offload
from runner.memory.solve.policies import Choose, policy_problems, solve, strategy_of
from runner.memory.solve.program import DEEPEST, depth
from runner.memory.solve.values import ActivationPlan, PolicyOptions
from runner.plan.choice_notes import choice_notes
from runner.profile import ModelProfile
from runner.targets import with_environment

__all__ = [
    "activation_notes",
    "activation_problems",
    "has_peers",
    "lends",
    "moves_boundaries",
    "plan_activations",
    "plans_arena",
    "program_problems",
    "reads_budget",
    "searches",
    "searches_programs",
    "shares_by_lifetime",
]

Partition = Sequence[tuple[int, int]]

_NOTHING = Offload("none", lambda chain, program: program)


def plan_activations(
    config: RunConfig,
    profile: ModelProfile,
    partition: Partition,
    *,
    on_accelerator: bool,
    in_flight: Sequence[int] | None = None,
    between: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    choose: Choose | None = None,
    copy_seconds: Callable[[float], float] = lambda num_bytes: 0.0,
) -> tuple[ActivationPlan, ModelProfile]:
    """Make the policies' plan for these stages, and the profile with the plan's costs.

    On a CPU, ``save_on_cpu`` moves nothing, and the profile shows this. What an offload strategy moves counts as the
    host's memory there, too.

    Args:
        config: the request.
        profile: the profile for the step's largest micro-batch.
        partition: first and last layer of each stage, inclusive.
        on_accelerator: whether the host's memory is separate from the device's.
        in_flight, between: for each stage, see :class:`runner.memory.solve.values.StageChain`; None if they are not
            known.
        budgets: see :func:`runner.plan.budgets.equal_budgets`; None if they are not known.
        choose: chooses among the candidates of a policy.
        copy_seconds: see :class:`runner.memory.solve.values.StageChain`.
    """
    to_host, options = config.offload.activations == "save_on_cpu", _options(config)
    plan = solve(
        profile,
        partition,
        options,
        to_host=to_host,
        offload=offload_of(config.offload),
        budgets=budgets,
        in_flight=in_flight,
        between=between,
        choose=choose,
        copy_seconds=copy_seconds,
        may_run_graphs=_may_run_graphs(config),
    )
    plan = replace(plan, host_apart=on_accelerator)
    return plan, adjusted(profile, plan)


def activation_problems(config: RunConfig, layer_names: Sequence[str]) -> list[Problem]:
    """Problems of a policy with the model, such as layers that it names and the model does not have."""
    return policy_problems(_options(config), layer_names)


def reads_budget(config: RunConfig) -> bool:
    """Whether the programs, or what is moved, depend on the memory that is left to a stage."""
    return strategy_of(_options(config)).reads_budget or _chooses_moves(config)


def _offload(config: RunConfig) -> Offload:
    """The strategy that moves activations; one that moves nothing where none was asked for."""
    return find_offload(config.offload) or _NOTHING


def shares_by_lifetime(config: RunConfig) -> bool:
    """Whether the stages of a rank share its memory by how long their tensors live."""
    return _offload(config).by_lifetime


def plans_arena(config: RunConfig) -> bool:
    """Whether the plan tells how large an arena is in which everything of a stage has its place."""
    return _offload(config).plans_arena


def lends(config: RunConfig) -> bool:
    """Whether ranks above their limit lend activations to other ranks."""
    return _offload(config).lends


def has_peers(config: RunConfig) -> bool:
    """Whether a rank may lend activations to another one instead of what its program does."""
    return _offload(config).peers


def searches(config: RunConfig) -> bool:
    """Whether it may take seconds or minutes to find the programs or what is moved, for each plan."""
    return _offload(config).searches or searches_programs(config)


def searches_programs(config: RunConfig) -> bool:
    """Whether it may take minutes to find the activation policy's programs, for each plan."""
    return strategy_of(_options(config)).searches


def moves_boundaries(config: RunConfig) -> bool:
    """Whether ``partition=auto`` moves layers between stages together with the choice of what they keep."""
    return _offload(config).recuts


def _chooses_moves(config: RunConfig) -> bool:
    return _offload(config).candidates is not None


def _may_run_graphs(config: RunConfig) -> bool:
    """Whether graph programs can be run: as the rules say of the policies that offer nothing else.

    Ranks that divide layers must run them again together, and a program that decides in the run may differ on each.
    """
    if config.parallelism.tensor > 1:
        return False
    return not config.compile and config.offload.activations == "none" and config.offload.weights == "none"


def program_problems(config: RunConfig, plan: ActivationPlan) -> list[Problem]:
    """Reasons why a plan's programs cannot be run."""
    return [*_depth_problems(config, plan), *_operator_problems(config, plan)]


def _depth_problems(config: RunConfig, plan: ActivationPlan) -> Iterator[Problem]:
    for number, program in enumerate(plan.stages):
        if depth(program) > DEEPEST:
            section = config.activation_checkpoint
            rule = f"must put at most {DEEPEST} segments inside of each other"
            why = f"Stage {number} has more, each of them a call that waits for the ones inside"
            fix = "a policy that keeps more, or more stages"
            yield Problem("activation_checkpoint", section.target or section.name, rule, why, fix)


def _operator_problems(config: RunConfig, plan: ActivationPlan) -> Iterator[Problem]:
    """Problems of a user's own program that keeps operators' outputs; own rules check policies of this package."""
    target, where = config.activation_checkpoint.target, config.offload.activations
    moved = where != "none"
    chains = (program for program in plan.stages if isinstance(program, tuple))
    picks = any(segment.save_ops is not None for program in chains for segment in program)
    if target is not None and picks and (moved or config.compile):
        path, value, needed = ("offload.activations", where, "none") if moved else ("compile", True, "false")
        why = f"{target} keeps the outputs of single operators, which are not seen there"
        yield Problem(path, value, f"must be {needed}", why, f"{path}={needed}")


def activation_notes(
    config: RunConfig, profile: ModelProfile, plan: ActivationPlan, in_flight: Sequence[int], *, on_accelerator: bool
) -> tuple[str, ...]:
    """Notes for a reader of the plan about its figures."""
    notes = []
    if config.compile:
        notes.append("compile=true: bytes and seconds are those of layers that are not compiled, which save more")
    if plan.to_host and on_accelerator:
        sizes = [n * host_bytes(profile, stage) for n, stage in zip(in_flight, plan.stages, strict=True)]
        notes.append(
            f"offload.activations=save_on_cpu: up to {format_bytes(max(sizes))} of saved tensors of one stage wait in "
            "the host's memory; weights that autograd saves are copied besides; the copies' seconds are not in the step"
        )
    elif plan.to_host:
        notes.append(
            "offload.activations=save_on_cpu: the device is the CPU, so that nothing moves and no memory is saved"
        )
    chooser = f"activation_checkpoint={config.activation_checkpoint.name}"
    if _chooses_moves(config):
        chooser = f"offload.activations={config.offload.activations}"
    return (*notes, *choice_notes(chooser, plan.choices))


def _options(config: RunConfig) -> PolicyOptions:
    section = config.activation_checkpoint
    return PolicyOptions(section.name, section.target, **with_environment(section.given))
