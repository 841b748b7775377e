"""From a policy by name, or a user's own, to the program of every stage."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import Problem, RequestError
from runner.memory.solve.program import check_program
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.strategy import SECTION, Strategy
from runner.memory.solve.values import ActivationPlan, ChainProgram, PolicyOptions, Segment, StageChain
from runner.profile import ModelProfile
from runner.targets import import_target

__all__ = ["policy_problems", "solve", "strategy_of"]

_TARGET = f"{SECTION}.target"


def strategy_of(options: PolicyOptions) -> Strategy:
    """The strategy that is asked for.

    A user's own is a :class:`Strategy`, or a function of a :class:`StageChain` that returns segments.

    Raises:
        RequestError: the target does not import, or is nothing that can be called.
    """
    if options.target is None:
        return STRATEGIES[options.name]
    found = import_target(_TARGET, options.target)
    return found if isinstance(found, Strategy) else Strategy(options.name, found, reads_budget=True, any_options=True)


def solve(
    profile: ModelProfile,
    partition: Sequence[tuple[int, int]],
    options: PolicyOptions,
    *,
    to_host: bool = False,
    budgets: Sequence[int | None] | None = None,
    in_flight: Sequence[int] | None = None,
) -> ActivationPlan:
    """The policy's program for every stage.

    Args:
        profile: of the whole model.
        partition: first and last layer of each stage, inclusive.
        options: the policy; it must have no :func:`policy_problems`.
        to_host: see :class:`ActivationPlan`.
        budgets, in_flight: per stage, see :class:`StageChain`; default: not known, one.

    Raises:
        RequestError: a user's own strategy raises, or returns no program of the stage.
    """
    strategy = strategy_of(options)
    budgets, in_flight = budgets or [None] * len(partition), in_flight or [1] * len(partition)
    programs = []
    for (first, last), budget, count in zip(partition, budgets, in_flight, strict=True):
        chain = StageChain(profile, first, last, options.values, budget, count)
        programs.append(_solve_users(strategy, chain, options.target) if options.target else strategy(chain))
    return ActivationPlan(tuple(programs), to_host)


def policy_problems(options: PolicyOptions, layer_names: Sequence[str]) -> list[Problem]:
    """What is wrong with a policy for a model; of a user's own one also with its arguments."""
    try:
        strategy = strategy_of(options)
    except RequestError as error:
        return list(error.problems)
    own = options.target is not None
    problems = strategy.option_problems(options.values, f"{SECTION}.kwargs") if own else []
    return problems or strategy.model_problems(options.values, layer_names)


def _solve_users(strategy: Strategy, chain: StageChain, target: str) -> ChainProgram:
    """A user's answer, which is looked at before anything is made of it."""
    try:
        program = strategy(chain)
        segments = all(isinstance(each, Segment) for each in program)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RequestError([Problem(_TARGET, target, "must make a program of a stage", why)]) from error
    wrong = check_program(program, chain.first, chain.last) if segments else "it returned other things than segments"
    if wrong is not None:
        rule = f"must return segments that are the layers {chain.first} .. {chain.last} in order"
        raise RequestError([Problem(_TARGET, target, rule, wrong[0].upper() + wrong[1:])])
    return program
