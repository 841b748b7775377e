"""Defines a strategy: one object that tells everything that other code needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runner.errors import Problem
from runner.memory.solve.values import ChainProgram, Program, Segment, StageChain
from runner.options import Option, shown

__all__ = ["Candidate", "SECTION", "Solver", "Strategy"]

SECTION = "activation_checkpoint"
"""The section of a request that chooses a strategy."""

Solver = Callable[[StageChain], Sequence[Segment]]
"""A function from the chain of a stage to its program."""


class Candidate(NamedTuple):
    """A program that may be chosen under a budget.

    Args:
        name: the strategy that makes it, with its options, as for a reader.
        program: the program.
    """

    name: str
    program: Program


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to keep, drop and compute again what the backward needs.

    Args:
        name: how a request names it.
        solve: makes the program of one stage. It is pure: the same chain gives the same program.
        source: the publication or software from which it comes.
        about: what it does, in one line.
        options: the keys that it reads.
        model_problems: finds what is wrong with its options for a model whose layers have the given names.
        picks_operators: whether it keeps the outputs of single operators inside layers.
        compiles: whether the compiler of layers drops tensors and makes them again, and its programs keep everything.
        reads_budget: whether its programs depend on :attr:`StageChain.budget_bytes`, which needs a prediction.
        any_options: whether its options are unknown, as for a plain function; then every key is passed to it.
        candidates: makes the programs that it offers to a choice under a budget; they must not depend on the budget, so
            that a smaller one never leads to more memory. None: it offers none. See :mod:`.choose`.
        chooses: whether a stage gets the fastest of the candidates that fits; ``reads_budget`` must be set, too, and
            ``solve`` serves only as long as the budget is not known.
        runs_graphs: whether its candidates are graph programs. To find them takes seconds to minutes, so that ``auto``
            takes few of them; to run them takes hooks for what autograd saves, which nothing else may replace then.
        searches: whether to find its candidates may take minutes, so that no other requests are planned with it, to
            give advice or to compare them.
    """

    name: str
    solve: Solver
    source: str = ""
    about: str = ""
    options: tuple[Option, ...] = ()
    model_problems: Callable[[Mapping[str, Any], Sequence[str]], list[Problem]] = lambda options, names: []
    picks_operators: bool = False
    compiles: bool = False
    reads_budget: bool = False
    any_options: bool = False
    candidates: Callable[[StageChain], Iterable[Candidate]] | None = None
    chooses: bool = False
    runs_graphs: bool = False
    searches: bool = False

    def __call__(self, chain: StageChain) -> ChainProgram:
        """The program of one stage."""
        return tuple(self.solve(chain))

    def option_problems(self, values: Mapping[str, Any], section: str = SECTION) -> list[Problem]:
        """Problems of options that are missing, wrong or not its own.

        Args:
            values: the given options by key.
            section: the section of the keys, for messages.
        """
        known = {option.key: option for option in self.options}
        problems = []
        for key, option in known.items():
            path = f"{section}.{key}"
            if key not in values and option.required:
                why = f"The policy {self.name} needs it"
                problems.append(Problem(path, None, "must be given", why, f"{path}={option.example}"))
            elif key in values and (problem := option.problem(values[key], path)) is not None:
                problems.append(problem)
        for key in () if self.any_options else sorted(values.keys() - known.keys()):
            why = f"It has {', '.join(known)}" if known else "It has no options"
            rule = f"is no option of the policy {self.name}"
            problems.append(Problem(f"{section}.{key}", shown(values[key]), rule, why, f"~{section}.{key}"))
        return problems
