"""Which substitutions a request wants in its layers, which are made, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runner.config.schema import SUBSTITUTIONS
from runner.errors import Problem
from runner.model.traced.operators import Program

__all__ = ["Substituting", "counted", "substituting_of"]

_KEY = "kernels.substitutions"
_RULE = "must find something to replace"
_NONE = {
    "attention": "No layer multiplies values by a softmax of products that nothing else reads and no dropout changes",
    "cancel_reshapes": "No layer has views or casts in a row that give what they are given",
    "drop_identities": "No layer has an operator that gives what it is given",
    "fold_scales": "No layer multiplies by a number where another one, or a smaller value, could take it",
    "merge_linears": "No layer gives one value to two linear maps that both have a bias or both have none, and that "
    "are both trained or both frozen",
    "one_hot": "No layer multiplies a one_hot of numbers by a matrix",
}


class Substituting:
    """Makes substitutions in traces, and counts them.

    Args:
        wanted: their names.
        of_preset: whether they are wanted as far as the model has what they are for.
        why_not: why none can be made; empty if they can be.

    Attributes:
        places: at how many places each one is made in training, over the layers that differ.
    """

    def __init__(self, wanted: Sequence[str], *, of_preset: bool, why_not: str = "") -> None:
        self.places: dict[str, int] = {}
        self._wanted, self._of_preset, self._why_not = tuple(wanted), of_preset, why_not
        self._unproven: dict[str, str] = {}

    @property
    def changes_traces(self) -> bool:
        """Whether layers run operators of their traces."""
        return bool(self._wanted) and not self._why_not

    def program(self, program: Program, *, training: bool) -> Program:
        """The program with the substitutions; itself if none is made."""
        if not self.changes_traces:
            return program
        from runner.model.kernels.apart import in_own_thread
        from runner.model.kernels.substitutions import substituted

        def tell(name: str, places: int, why: str) -> None:
            if why:
                self._unproven[name] = f"It is found and not made: {why}"
            elif training:
                self.places[name] = self.places.get(name, 0) + places

        return in_own_thread(lambda: substituted(program, self._wanted, tell))

    def missing(self, left: Sequence[str]) -> dict[str, str]:
        """The substitutions that are made nowhere, each with the reason.

        Args:
            left: why layers run as they are written.
        """
        others = f"; {left[0]}" if left else ""
        return {
            name: self._why_not or self._unproven.get(name, _NONE[name]) + others
            for name in self._wanted
            if name not in self.places
        }

    def problems(self, left: Sequence[str]) -> Iterator[Problem]:
        """Problems if one that is named is made nowhere, or none of a preset's is."""
        missing = self.missing(left)
        if self._of_preset:
            if len(missing) == len(self._wanted):
                why = self._why_not or "; ".join(missing.values())
                yield Problem("kernels", "substituted", _RULE, why, "kernels=none")
            return
        rest = ",".join(name for name in self._wanted if name not in missing)
        for name, why in missing.items():
            yield Problem(_KEY, name, _RULE, why, f"{_KEY}=[{rest}]")

    def notes(self, left: Sequence[str]) -> Iterator[str]:
        """What a preset leaves out, and why; and where one that is made elsewhere is not."""
        for name, why in self.missing(left).items():
            yield f"kernels=substituted leaves {name} out: {why[0].lower()}{why[1:]}"
        for name in sorted(self.places.keys() & self._unproven.keys()):
            why = self._unproven[name]
            yield f"{name} is not made everywhere: {why[0].lower()}{why[1:]}"

    def made(self) -> tuple[str, ...]:
        """The substitutions that are made, each with the number of its places."""
        return counted(self.places)


def counted(places: Mapping[str, int]) -> tuple[str, ...]:
    """What is replaced, each with the number of its places."""
    return tuple(f"{name} at {count} place{'s' * (count > 1)}" for name, count in sorted(places.items()))


def substituting_of(preset: str, wanted: Sequence[str], why_not: str) -> Substituting:
    """The substitutions of a request.

    Args:
        preset: the name of the option of ``kernels``.
        wanted: the names of the substitutions.
        why_not: why none can be made; empty if they can be.
    """
    of_preset = preset == "substituted" and set(wanted) == set(SUBSTITUTIONS)
    return Substituting(wanted, of_preset=of_preset, why_not=why_not)
