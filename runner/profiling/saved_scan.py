"""Finds out what autograd saves in one forward, and which operators made it.

The forward runs under hooks that drop every saved tensor, as the forward of a checkpointed layer does, so its peak is
that of a forward that keeps nothing. A forward that differentiates within (a force field, a gradient penalty) asks for
saved tensors itself, and runs again under hooks that keep them. torch.func allows no hooks at all: what it saves is
seen as one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from runner.memory.solve.save_ops import CONVOLUTIONS, OPERATORS, SaveChoice
from runner.model.boundary import flatten
from runner.model.dense_parts import dense_parts
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.profile import Recomputation

__all__ = ["ForwardScan", "operator_name", "run_hooked", "scan_forward"]

T = TypeVar("T")

_ENTERS = "aten::_unsafe_view"  # what a profiled layer's input is entered by, see runner.model.boundary.enter_graph
_REFUSES_HOOKS = "support saved tensor hooks"  # words of torch.func
_ONE_PIECE = -1  # stands for the storages of what was not seen being saved
_QUESTIONS = "prim"  # of fake tensors for their device; they read nothing


@dataclass
class _Operator:
    """One operator that ran: its outputs by storage, and its FLOPs."""

    name: str
    outputs: dict[int, int]
    flops: float


@dataclass
class ForwardScan:
    """What one forward did.

    Args:
        saved: storage to bytes of what autograd saved; without inputs, parameters and buffers.
        outputs: storages of the layer's output.
        operators: the operators whose outputs a policy may keep, in order.
        peak_bytes: most bytes alive above what was alive before.
        saves_input: whether the input is saved.
        given, made: storages of the tensors in its input and in its output, in order.
        kept: the storages among these that are saved.
        read: the storages among the given ones that operators use.
        needed: how many of the operators had run when autograd saved the last tensor; recomputation stops there.
        convolved: the read storages that only convolutions use.
        hooked: whether what autograd saves could be seen.
    """

    saved: dict[int, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    operators: list[_Operator] = field(default_factory=list)
    peak_bytes: int = 0
    saves_input: bool = False
    given: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    needed: int = 0
    convolved: set[int] = field(default_factory=set)
    hooked: bool = True

    @property
    def saves_output(self) -> bool:
        """Whether the output is saved, or is the input's own storage and cannot be dropped."""
        return bool(self.outputs & self.saved.keys()) or not self.outputs

    def recomputation(
        self, forward_flops: float, second_peak: Callable[[str], int | None], numbers: Mapping[int, int]
    ) -> dict[str, Recomputation]:
        """For every preset, and ``""`` for none: what is kept and what the recomputed forward makes.

        Args:
            forward_flops: the FLOPs of the layer's forward.
            second_peak: see :meth:`runner.profiling.operator_peaks.OperatorPeaks.second_peak`.
            numbers: the profile's numbers of the storages in the input.
        """
        found = {"": Recomputation(0, sum(self.saved.values()), forward_flops)}
        for preset, (names, every) in OPERATORS.items():
            choice = SaveChoice(preset)
            chosen = [operator for operator in self.operators if choice.keeps(operator.name)]
            kept = {storage: size for operator in chosen for storage, size in operator.outputs.items()}
            passed = {storage for operator in self.operators[: self.needed] for storage in operator.outputs}
            inner = {storage: size for storage, size in kept.items() if storage not in self.outputs}
            second = second_peak(preset)
            skips_convolutions = names >= CONVOLUTIONS and every == 1
            found[preset] = Recomputation(
                kept_bytes=sum(inner.values()),
                recomputed_bytes=sum(size for storage, size in self.saved.items() if storage not in kept),
                recomputed_flops=forward_flops - sum(operator.flops for operator in chosen),
                released_bytes=sum(
                    size for storage, size in inner.items() if storage in passed and storage not in self.saved
                ),
                keeps_output=bool(self.outputs & kept.keys()),
                second_peak_bytes=second,
                changes_kept=second is None,
                unread=tuple(numbers[each] for each in sorted(self.convolved)) if skips_convolutions else (),
            )
        return found


def scan_forward(
    function: Callable[[Any], Any], value: Any, states: Iterable[Tensor], tracker: LiveTracker
) -> ForwardScan:
    """Run ``function(value)`` and drop its graph.

    Args:
        function: a layer or loss.
        value: its input: tensors in containers.
        states: its parameters and buffers, which are alive anyway.
        tracker: active; its peak is reset.
    """
    states = list(states)
    try:
        return _scan(function, value, states, tracker, keeps=False)
    except _AskedWithinError:
        return _scan(function, value, states, tracker, keeps=True)


def _scan(
    function: Callable[[Any], Any], value: Any, states: Iterable[Tensor], tracker: LiveTracker, *, keeps: bool
) -> ForwardScan:
    scanner = _Scanner()
    scan = ForwardScan(given=[scanner.number(leaf) for leaf in flatten(value)[0]])
    inputs = set(scan.given)
    known = inputs | {scanner.number(state) for state in dense_parts(states)}

    def pack(tensor: Tensor) -> Tensor | None:
        scan.needed = len(scanner.operators)
        for part in dense_parts([tensor]):
            storage = scanner.number(part)
            scan.saves_input |= storage in inputs
            scan.kept.add(storage)
            if storage not in known:
                scan.saved[storage] = part.untyped_storage().nbytes()
        return tensor.detach() if keeps else None

    base = tracker.live
    tracker.reset_peak()
    with scanner:
        output, scan.hooked = run_hooked(lambda: function(value), pack, _unpack)
    if not scan.hooked:
        made = {scanner.number(leaf): leaf.untyped_storage().nbytes() for leaf in flatten(output)[0]}
        scan.saved, scan.saves_input = {_ONE_PIECE: max(0, tracker.live - base - sum(made.values()))}, True
    scan.peak_bytes = tracker.peak - base
    scan.made = [scanner.number(leaf) for leaf in flatten(output)[0]]
    scan.outputs = set(scan.made) - known
    scan.operators = scanner.operators
    scan.read = inputs & (scanner.read | scanner.convolved)
    scan.convolved = inputs & (scanner.convolved - scanner.read)
    return scan


def operator_name(operator: Any) -> str:
    """The operator's name as ``namespace::name``, without the overload."""
    schema = getattr(operator, "_schema", None)
    return str(schema.name) if schema is not None else str(operator.name())


def run_hooked(run: Callable[[], T], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> tuple[T, bool]:
    """Run a function under hooks for what autograd saves, or without them if it uses torch.func, which refuses any.

    Returns:
        what the function returned, and whether it ran under the hooks.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run(), True
    except RuntimeError as error:
        if _REFUSES_HOOKS not in str(error):
            raise
    return run(), False


class _AskedWithinError(RuntimeError):
    """A forward has asked for a tensor that was saved in it."""


def _unpack(packed: Tensor | None) -> Tensor:
    if packed is None:
        raise _AskedWithinError("a forward differentiates within")
    return packed


class _Scanner(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """Numbers storages and notes the operators that a preset may keep, and what convolutions and others read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[_Operator] = []
        self.read: set[int] = set()
        self.convolved: set[int] = set()
        self.number = StorageNumbers().of
        self._names = frozenset[str]().union(*(names for names, _ in OPERATORS.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator_name(func)
        if name != _ENTERS and func.namespace != _QUESTIONS:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            found = self.convolved if name in CONVOLUTIONS else self.read
            found |= {self.number(tensor) for tensor in given if tensor.layout is torch.strided}
        result = func(*args, **kwargs)
        if name in self._names:
            made = list(dense_parts(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
            count = flop_registry.get(getattr(func, "_overloadpacket", None))
            flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
            outputs = {self.number(tensor): tensor.untyped_storage().nbytes() for tensor in made}
            self.operators.append(_Operator(name, outputs, flops))
        return result
