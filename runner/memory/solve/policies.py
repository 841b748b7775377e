"""Makes the program of every stage from a policy, which is shipped or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from runner.errors import Problem, RequestError
from runner.memory.solve.offload import Offload
from runner.memory.solve.program import check_program
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.strategy import SECTION, Strategy
from runner.memory.solve.values import (
    ActivationPlan,
    ChainProgram,
    PolicyOptions,
    Program,
    Segment,
    StageChain,
    StageChoice,
)
from runner.profile import ModelProfile
from runner.progress import now
from runner.targets import import_target

__all__ = ["Choose", "policy_problems", "solve", "strategy_of"]

Choose = Callable[[StageChain, Strategy], tuple[Program, StageChoice]]
"""A function that chooses a stage's program among the candidates of a strategy."""

_TARGET = f"{SECTION}.target"


def strategy_of(options: PolicyOptions) -> Strategy:
    """The strategy that the options choose.

    A user's own is a :class:`Strategy`, or a function of a :class:`StageChain` that returns segments.

    Raises:
        RequestError: the target cannot be imported, or cannot be called.
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
    offload: Offload | None = None,
    budgets: Sequence[int | None] | None = None,
    in_flight: Sequence[int] | None = None,
    between: Sequence[int] | None = None,
    choose: Choose | None = None,
    copy_seconds: Callable[[float], float] = lambda num_bytes: 0.0,
    may_run_graphs: bool = False,
) -> ActivationPlan:
    """The policy's program for every stage.

    Args:
        profile: the profile of the whole model.
        partition: first and last layer of each stage, inclusive.
        options: the policy; :func:`policy_problems` must find nothing wrong with it.
        to_host: see :class:`ActivationPlan`.
        offload: chooses what is moved to the host's memory; None: nothing is.
        budgets, in_flight, between: one value per stage, see :class:`StageChain`; by default None, 1 and ``in_flight``.
        choose: chooses among a strategy's candidates where the budget is known; needed for a strategy that chooses.
        copy_seconds, may_run_graphs: see :class:`StageChain`.

    Raises:
        RequestError: a user's own strategy raises, or does not return a program of the stage.
    """
    strategy = strategy_of(options) if offload is None else offload.over(strategy_of(options))
    budgets, in_flight = budgets or [None] * len(partition), in_flight or [1] * len(partition)
    solved = []
    stages = zip(partition, budgets, in_flight, between or in_flight, strict=True)
    for (first, last), budget, count, saved_at_once in stages:
        if strategy.chooses or strategy.reads_budget:
            now(f"activation_checkpoint={options.name}: layers {first} to {last}")
        chain = StageChain(
            profile,
            first,
            last,
            options.values,
            budget,
            count,
            copy_seconds,
            may_run_graphs=may_run_graphs,
            between=saved_at_once,
        )
        if options.target is None:
            solved.append(_solved(strategy, chain, choose))
        else:
            solved.append(_solve_users(strategy, chain, choose, options.target))
    choices = tuple(choice for _, choice in solved if choice is not None)
    return ActivationPlan(tuple(program for program, _ in solved), to_host, choices)


def _solved(strategy: Strategy, chain: StageChain, choose: Choose | None) -> tuple[Program, StageChoice | None]:
    """The program of a stage, and how it was chosen if the strategy chooses and the budget is known."""
    if strategy.chooses and choose is not None and chain.budget_bytes is not None:
        return choose(chain, strategy)
    return strategy(chain), None


def policy_problems(options: PolicyOptions, layer_names: Sequence[str]) -> list[Problem]:
    """Problems of a policy for a model, and for a user's own policy also problems of its arguments."""
    try:
        strategy = strategy_of(options)
    except RequestError as error:
        return list(error.problems)
    own = options.target is not None
    problems = strategy.option_problems(options.values, f"{SECTION}.kwargs") if own else []
    return problems or strategy.model_problems(options.values, layer_names)


def _solve_users(
    strategy: Strategy, chain: StageChain, choose: Choose | None, target: str
) -> tuple[Program, StageChoice | None]:
    """The program that a user's strategy returns, checked before it is used."""
    try:
        program, choice = _solved(strategy, chain, choose)
        segments = isinstance(program, tuple) and all(isinstance(each, Segment) for each in program)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RequestError([Problem(_TARGET, target, "must make a program of a stage", why)]) from error
    wrong: str | None = "it returned other things than segments"
    if segments:
        wrong = check_program(cast(ChainProgram, program), chain.first, chain.last)
    if wrong is not None:
        rule = f"must return segments that are the layers {chain.first} .. {chain.last} in order"
        raise RequestError([Problem(_TARGET, target, rule, wrong[0].upper() + wrong[1:])])
    return program, choice
