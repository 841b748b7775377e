"""Whether one trace computes what another one does: both run on small random inputs, forwards and backwards.

They run on the CPU in the formats of the trace, with weights drawn at random, so that a plan on tensors without memory
and a run with the model's own come to the same answer. Outputs, how they lie in memory and what they share it with,
values that are changed in place, and the gradients of inputs and parameters must be equal to rounding. Numbers that are
drawn in the traces, as dropout does, are drawn alike. Buffers are drawn from between 1/2 and 3/2 and then from 0 and 1,
for they may be masks. At last their first row and that of whole numbers is all zeros and the second all ones, which
hides one of them whole if they are masks, and what the layer then gives must be equal if it gives numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from runner.model.kernels.order import in_order, order_in_memory
from runner.model.traced.operators import Program
from runner.model.traced.segments import Entry, Part, part_of

__all__ = ["concrete", "some_sizes", "why_different"]

_Outcome = tuple[list[Any], list[Tensor], list[Tensor], list[int]]
_DRAWS = 8  # a mask that is drawn may hide everything, so that others are drawn
_STEPS = (2, 4, 1)
"""The differences between the sizes that a trace does not fix, in one try after the other."""
_SHARE_OF_ROOT = 0.25  # of the root of a format's least difference from 1: what sums in another order may differ by
_ENTRIES = 200_000_000  # of weights and inputs: about a gigabyte in 32 bits


def why_different(old: Program, new: Program) -> str:
    """Why the second trace may not stand for the first one; empty if it may.

    Args:
        old: a trace, before it is cut.
        new: another one with the same weights, constants and inputs.
    """
    state = torch.default_generator.get_state()
    try:
        return _why_different(old, new)
    finally:
        torch.default_generator.set_state(state)


def _why_different(old: Program, new: Program) -> str:
    why = "no small inputs were found for which the layer gives numbers"
    for sizes in some_sizes(old):
        proven = False
        for of_buffers in (0, 1):
            for seed in range(of_buffers, _DRAWS, 2):
                try:
                    expected = _outcome(old, sizes, seed)
                except Exception as error:  # the sizes or the drawn values do not fit
                    why = f"on small random inputs the layer itself raises {_shown(error)}"
                    continue
                if expected is not None:
                    if different := _tried(new, sizes, seed, expected):
                        return different
                    proven = True
                    break
        if proven:
            return _different_where_rows_are_hidden(old, new, sizes)
    return why


def _different_where_rows_are_hidden(old: Program, new: Program, sizes: Mapping[Any, int]) -> str:
    """Why they differ where whole numbers and buffers hide rows whole, and each of several other inputs in turn."""
    values = [node.meta.get("val") for node in old.inputs if isinstance(node, Node)]
    floating = [at for at, each in enumerate(values) if isinstance(each, Tensor) and each.is_floating_point()]
    for hides in (-1, *(floating if len(values) > 1 else ())):
        try:
            expected = _outcome(old, sizes, 1, hides=hides)
        except Exception:  # these are no inputs of the layer
            continue
        if expected is not None and (different := _tried(new, sizes, 1, expected, hides=hides)):
            return different
    return ""


def _tried(new: Program, sizes: Mapping[Any, int], seed: int, expected: _Outcome, *, hides: int | None = None) -> str:
    try:
        found = _outcome(new, sizes, seed, hides=hides)
    except Exception as error:  # an operator may not take what another one gives
        return f"with it the layer raises {_shown(error)}"
    different = "there are values that are no numbers" if found is None else _difference(expected, found)
    return different and f"on small random inputs {different}"


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def some_sizes(program: Program) -> Iterator[dict[Any, int]]:
    """Small sizes for the symbols of a trace, and at last those with which it was made."""
    values = [node.meta.get("val") for node in program.inputs if isinstance(node, Node)]
    given: list[Any] = [size for each in values if isinstance(each, Tensor) for size in each.shape]
    given += [each for each in values if isinstance(each, torch.SymInt)]
    hints: dict[Any, int] = {}
    for size in given:
        if isinstance(size, torch.SymInt):
            hints |= dict.fromkeys(sorted(size.node.expr.free_symbols, key=str), 0) | hints
            if size.node.expr in hints and size.node.hint is not None:
                hints[size.node.expr] = int(size.node.hint)
    ranges = program.conditions.ranges
    for step in _STEPS:
        sizes = {}
        for number, symbol in enumerate(hints):
            least, most = ranges.get(str(symbol), (0, float("inf")))
            sizes[symbol] = int(min(max(step * (number + 3), least), most))
        yield sizes
        if not hints:
            return
    if all(hints.values()):
        yield hints


def concrete(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A traced size as a number; anything else as it is."""
    return int(value.node.expr.subs(sizes)) if isinstance(value, torch.SymInt) else value


def _outcome(program: Program, sizes: Mapping[Any, int], seed: int, *, hides: int | None = None) -> _Outcome | None:
    """Outputs, what inputs and buffers are afterwards, gradients and shared memory; None if there is no number."""
    drawn = _Drawn(sizes, seed, hides=hides is not None)
    inputs = [node for node in program.inputs if isinstance(node, Node)]
    part = part_of(program, program.nodes, takes=inputs, gives=None, takes_state=False, gives_state=False)
    names = {name: node for node, name in program.weights.items()}
    values = [drawn.weight(names[name]) for name in part.weights]
    constants = [drawn.of(each) if hasattr(each, "fake_mode") else each.cpu() for each in part.constants]
    given = [drawn.value(node, hides=at == hides) for at, node in enumerate(inputs)]
    every = iter(given)
    flat = [next(every) if isinstance(each, Node) else each for each in program.inputs]
    args, kwargs = pytree.tree_unflatten(flat, program.input_spec)
    Entry(program).bind(kwargs if kwargs and not args else args)
    leaves = [each for each in (*values, *given) if isinstance(each, Tensor) and each.requires_grad]
    held = [each.clone() if isinstance(each, Tensor) else each for each in (*values, *given)]  # may be changed in place
    torch.default_generator.manual_seed(seed)
    run = _on_cpu(part)
    with torch.enable_grad():
        made = run(*held[: len(values)], *constants, *held[len(values) :])
        outputs = [each for each in made if isinstance(each, Tensor)]
        ends = [each for each in outputs if each.requires_grad]
        weights = [drawn.like(each) for each in ends]
        gradients = (
            torch.autograd.grad(ends, leaves, weights, allow_unused=True, materialize_grads=True) if ends else ()
        )
    known = [each for each in (*held, *constants, *outputs) if isinstance(each, Tensor)]
    places = [each.untyped_storage().data_ptr() for each in known]
    shared = [places.index(each.untyped_storage().data_ptr()) for each in outputs]
    after = [each.detach() for each in held if isinstance(each, Tensor)]
    found = list(made), after, list(gradients), shared
    if not all(bool(each.isfinite().all()) for each in (*outputs, *gradients) if each.is_floating_point()):
        return None
    return found


class _Drawn:
    """Draws the values of traced tensors.

    Args:
        sizes: the sizes of the symbols.
        seed: the generator's; with an odd one, buffers are zeros and ones.
        hides: whether one row of what may be a mask is all zeros, and one all ones.
    """

    def __init__(self, sizes: Mapping[Any, int], seed: int, *, hides: bool = False) -> None:
        self._sizes, self._binary, self._hides = sizes, bool(seed % 2), hides
        self._generator, self._left = torch.Generator().manual_seed(seed), _ENTRIES

    def weight(self, node: Node) -> Tensor:
        """The value of a parameter or a buffer."""
        value = node.meta["val"]
        if not value.is_floating_point():
            return self.of(value)
        if not value.requires_grad and not isinstance(value, torch.nn.Parameter):
            made = torch.rand(self._shape(value), generator=self._generator)
            return (self._hiding((made > 0.5).float()) if self._binary else made + 0.5).to(value.dtype)
        made = torch.randn(self._shape(value), generator=self._generator)
        if value.dim() > 1:
            made /= max(1, prod(made.shape[1:])) ** 0.5
        return made.to(value.dtype).requires_grad_()

    def value(self, node: Node, *, hides: bool) -> Any:
        """The value of an input, which may be a mask that hides rows whole."""
        value = node.meta["val"]
        return self.of(value, hides=hides) if isinstance(value, Tensor) else concrete(value, self._sizes)

    def of(self, value: Tensor, *, hides: bool = False) -> Tensor:
        """The value of any other traced tensor."""
        shape = self._shape(value)
        if value.is_floating_point() or value.is_complex():
            made = torch.randn(shape, generator=self._generator).to(value.dtype)
            return self._laid(self._hiding(made) if hides else made, value).requires_grad_()
        return self._laid(self._hiding(torch.randint(2, shape, generator=self._generator)).to(value.dtype), value)

    def _hiding(self, made: Tensor) -> Tensor:
        if self._hides and made.dim() > 1 and len(made) > 1:
            made[0], made[1] = 0, 1
        return made

    def _laid(self, made: Tensor, value: Tensor) -> Tensor:
        """The numbers in the order in memory in which the traced tensor has them."""
        order = order_in_memory([concrete(each, self._sizes) for each in value.stride()])
        return in_order(made, order)

    def like(self, value: Tensor) -> Tensor:
        """The gradient of an output."""
        return torch.randn(value.shape, generator=self._generator).to(value.dtype)

    def _shape(self, value: Tensor) -> list[int]:
        shape = [concrete(size, self._sizes) for size in value.shape]
        self._left -= prod(shape)
        if self._left < 0:
            raise MemoryError("its weights and inputs are too large to try it")
        return shape


def _on_cpu(part: Part) -> Any:
    """The trace, whose operators make tensors on the CPU, wherever they were traced."""

    def here(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    for node in part.run.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = (pytree.tree_map(here, each) for each in (node.args, node.kwargs))
    part.run.recompile()
    return part.run


def _difference(expected: _Outcome, found: _Outcome) -> str:
    """The difference of two outcomes in words; empty if they are equal to rounding."""
    if expected[3] != found[3]:
        return "outputs share memory with something else"
    for old, new in zip(expected[0], found[0], strict=True):
        if isinstance(old, Tensor) and old.is_contiguous() and not new.is_contiguous():
            return "outputs lie otherwise in memory"
    pairs = zip(expected[:3], found[:3], strict=True)
    differ = (not _are_close(old, new) for old, new in pairs)
    kinds = ("outputs", "values in place", "gradients")
    return next((f"{kind} differ" for kind, is_other in zip(kinds, differ, strict=True) if is_other), "")


def _are_close(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    numbers = [each.detach().double() for each in expected if isinstance(each, Tensor) and each.is_floating_point()]
    overall = max((float(each.abs().max()) for each in numbers if each.numel()), default=0.0)
    for old, new in zip(expected, found, strict=True):
        if not isinstance(old, Tensor) or not old.is_floating_point():
            same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
        else:
            least = torch.finfo(old.dtype).eps
            share = max(_SHARE_OF_ROOT * least**0.5, 8 * least)
            largest = float(old.detach().abs().max()) if old.numel() else 0.0
            same = (old.shape, old.dtype) == (new.shape, new.dtype) and torch.allclose(
                new.detach().double(), old.detach().double(), rtol=0, atol=share * largest + 16 * least * overall
            )
        if not same:
            return False
    return True
