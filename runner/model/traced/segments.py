"""A traced model as a chain of modules, each of which runs some consecutive operators.

A segment takes and returns a tuple of everything that later segments need, in the order in which it was made: its own
results and values that it only carries through (skip tensors, masks, sizes, the model's input). Parameters and buffers
keep the names that they have in the user's model; a parameter that several segments use is in each of them, as a tied
weight.

If later segments draw random numbers, the state of the generator is carried too, as the last value, so that the chain
draws the same numbers as the uncut model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from runner.model.boundary import call_arguments, flatten
from runner.model.traced.checked import CHECKED
from runner.model.traced.cuts import align, crossing, is_random, module_path
from runner.model.traced.operators import Program
from runner.model.traced.structure import Itself, structure_of_graph

__all__ = ["Entry", "Part", "Segment", "part_of", "split"]


@dataclass(frozen=True)
class Part:
    """One mode of a segment.

    Args:
        run: called with the weights, the constants and the taken values; returns a tuple.
        weights: names in the model.
        constants: constant tensors in the model's code.
        takes_state, gives_state: whether the generator's state is carried in, and out.
    """

    run: GraphModule
    weights: tuple[str, ...]
    constants: tuple[Tensor, ...]
    takes_state: bool
    gives_state: bool


class Segment(nn.Module):
    """Consecutive operators of a traced model.

    Args:
        parts: for training (True) and for evaluation (False).
        programs: the whole model's, for its input and its output.
        first, last: whether it takes the model's input, and returns the model's output.
    """

    def __init__(self, parts: Mapping[bool, Part], programs: Mapping[bool, Program], first: bool, last: bool) -> None:
        super().__init__()
        self._parts = dict(parts)
        self._entry = {mode: Entry(program) for mode, program in programs.items()} if first else None
        self._output_specs = {mode: program.output_spec for mode, program in programs.items()} if last else None
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    def hold(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Register a parameter or buffer of the model in this segment, under its own name."""
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner._modules[step]  # type: ignore[assignment]  # added above
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor, persistent=persistent)
        self._owners[name] = owner, leaf

    def structure(self, form_of: Callable[[Tensor], Hashable]) -> Hashable:
        """What a profile of the segment depends on besides its input: all but names, and the values of tensors.

        Args:
            form_of: gives a tensor's form, and tells tensors apart.
        """
        held = [form_of(tensor) for tensor in (*self.parameters(), *self.buffers())]
        part = self._parts[self.training]
        weights = [form_of(getattr(*self._owners[name])) for name in part.weights]
        constants = [form_of(constant) for constant in part.constants]
        ends = part.takes_state, part.gives_state, Itself(self._entry), Itself(self._output_specs)
        return tuple(held), tuple(weights), tuple(constants), structure_of_graph(part.run), ends

    def forward(self, value: Any) -> Any:
        part = self._parts[self.training]
        carried = self._entry[self.training].bind(value) if self._entry is not None else value
        if part.takes_state:
            *carried, state = carried
            _set_random_state(state)
        weights = [getattr(*self._owners[name]) for name in part.weights]
        device = weights[0].device if weights else _device_of(carried)
        constants = [constant.to(device) for constant in part.constants]
        made = part.run(*weights, *constants, *carried)
        if self._output_specs is not None:
            return pytree.tree_unflatten(list(made), self._output_specs[self.training])
        return (*made, _random_state(device)) if part.gives_state else tuple(made)


class Entry:
    """Binds a batch's input to the placeholders of a traced model, and checks that the trace covers it."""

    def __init__(self, program: Program) -> None:
        self._inputs = tuple(each.name if isinstance(each, Node) else _Constant(each) for each in program.inputs)
        self._spec, self._conditions = program.input_spec, program.conditions
        self._shapes: dict[str, tuple[Any, ...]] = {}
        self._parts = {node.name: part for node, part in program.parts.items()}
        for node in program.inputs:
            shape = getattr(node.meta.get("val"), "shape", None) if isinstance(node, Node) else None
            if isinstance(node, Node) and shape is not None:
                shown = (str(size) for size in shape)  # a symbol that torch has fixed since shows its value
                self._shapes[node.name] = tuple(int(size) if size.isdigit() else size for size in shown)

    def bind(self, value: Any) -> tuple[Any, ...]:
        """The values of the placeholders, in their order.

        Raises:
            ValueError: an input differs from the trace in structure, value, or size of a fixed axis, or has a size with
                which the model's code would go another way.
        """
        args, kwargs = call_arguments(value)
        names = list(self._spec.child(1).context) if hasattr(self._spec, "child") else list(kwargs)
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        flat, spec = pytree.tree_flatten((args, ordered))
        if len(flat) != len(self._inputs) or len(ordered) != len(kwargs):
            raise ValueError(f"the model was traced with {len(self._inputs)} inputs ({self._spec}), got {spec}")
        bound: list[Any] = []
        whole: list[Any] = []
        sizes: dict[str, int] = {}
        for name, given in zip(self._inputs, flat, strict=True):
            if isinstance(name, _Constant):
                if not name.equals(given):
                    raise ValueError(f"the model was traced with the input {name.value!r}, got {given!r}")
                whole.append(given)
                continue
            whole.append(self._whole(name, given))
            self._check(name, whole[-1], sizes)
            bound.append(given)
        if self._parts:
            args, named = pytree.tree_unflatten(whole, spec)
            kwargs = dict(named)
        self._conditions.check(args, kwargs, sizes)
        return tuple(bound)

    def _whole(self, name: str, given: Any) -> Any:
        """An input, or something of the shape of the whole of which it is a rank's part."""
        if name not in self._parts or not isinstance(given, Tensor):
            return given
        (dim, degree), shape = self._parts[name], list(given.shape)
        shape[dim] *= degree
        return given.new_empty(1).expand(shape)

    def _check(self, name: str, given: Any, sizes: dict[str, int]) -> None:
        traced = self._shapes.get(name)
        if traced is None or not isinstance(given, Tensor):
            return
        fits = len(traced) == given.dim()
        for wanted, size in zip(traced, given.shape, strict=False):
            fits &= size == (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, int(size)))
        if not fits:
            shown = ", ".join(str(size) for size in traced)
            raise ValueError(f"the model was traced with {name} of shape ({shown}), got {tuple(given.shape)}")


@dataclass(frozen=True)
class _Constant:
    value: Any

    def equals(self, given: Any) -> bool:
        return type(given) is type(self.value) and given == self.value


def split(model: nn.Module, programs: Mapping[bool, Program], cuts: Sequence[int]) -> list[tuple[str, Segment]]:
    """Cut the model at ``cuts``, positions of the training program; return the segments with labels for tables."""
    aligned = align(programs[True], programs[False])
    parts = {True: _parts(programs[True], cuts)}
    same = programs[False] is programs[True]
    parts[False] = parts[True] if same else _parts(programs[False], [aligned[cut] for cut in cuts])
    count = len(cuts) + 1
    segments = [
        Segment({mode: parts[mode][k] for mode in parts}, programs, first=k == 0, last=k == count - 1)
        for k in range(count)
    ]
    _hand_out_weights(model, segments)
    bounds = [0, *cuts, len(programs[True].nodes)]
    return [(_label(programs[True], *bounds[k : k + 2]), segment) for k, segment in enumerate(segments)]


def _parts(program: Program, cuts: Sequence[int]) -> list[Part]:
    bounds = [0, *cuts, len(program.nodes)]
    inputs = [node for node in program.inputs if isinstance(node, Node)]
    borders = [inputs, *crossing(program, cuts), []]
    draws = [is_random(node, program.owner) for node in program.nodes]
    later = [*reversed([*accumulate(reversed(draws), or_, initial=False)])]  # whether a later operator draws, or this
    random = [later[start] for start in bounds]
    last = len(bounds) - 2
    return [
        part_of(
            program,
            program.nodes[bounds[k] : bounds[k + 1]],
            takes=borders[k],
            gives=None if k == last else borders[k + 1],
            takes_state=k > 0 and random[k],
            gives_state=k < last and random[k + 1],
        )
        for k in range(last + 1)
    ]


def part_of(
    program: Program,
    nodes: Sequence[Node],
    *,
    takes: Sequence[Node],
    gives: Sequence[Node] | None,
    takes_state: bool,
    gives_state: bool,
) -> Part:
    """Build the graph of ``nodes``; its placeholders are the weights, the constants and the values that it takes."""
    outputs = tuple(program.outputs) if gives is None else tuple(gives)
    needed = {arg for node in nodes for arg in node.all_input_nodes}
    needed |= {out for out in outputs if isinstance(out, Node)}
    weights = [node for node in program.weights if node in needed]
    constants = [node for node in program.constants if node in needed]
    graph, copies = Graph(), {}
    for node in (*weights, *constants, *takes):
        copies[node] = graph.placeholder(node.name)
    attributes = [node for node in program.nodes if node.op == "get_attr" and node in needed and node not in nodes]
    for node in (*attributes, *nodes):
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].target = CHECKED.get(node.target, node.target)
        copies[node].meta = {}
    graph.output(tuple(copies[out] if isinstance(out, Node) else out for out in outputs))
    return Part(
        run=GraphModule(program.owner, graph, "TracedSegment"),
        weights=tuple(program.weights[node] for node in weights),
        constants=tuple(program.constants[node] for node in constants),
        takes_state=takes_state,
        gives_state=gives_state,
    )


def _hand_out_weights(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Give each segment the weights that it uses, under all their names; unused weights go to the first segment."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    saved = model.state_dict(keep_vars=True).keys()
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    unused = dict(names)
    for segment in segments:
        for name in dict.fromkeys(name for part in segment._parts.values() for name in part.weights):
            for each in names[id(tensors[name])]:
                segment.hold(each, tensors[each], persistent=each in saved)
            unused.pop(id(tensors[name]), None)
    for group in unused.values():
        for name in group:
            segments[0].hold(name, tensors[name], persistent=name in saved)


def _label(program: Program, start: int, end: int) -> str:
    """One name for the modules whose weights the operators use: their common path, or first..last."""
    paths = [module_path(n) for n in program.nodes[start:end] if any(a in program.weights for a in n.all_input_nodes)]
    parts = [path.split(".") for path in dict.fromkeys(paths) if path]
    if not parts:
        return "model"
    common = []
    for steps in zip(*parts, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    if common and not common[-1].isdigit() and len(parts) > 1:
        return f"{'.'.join(parts[0])}..{'.'.join(parts[-1])}"
    return ".".join(common) or f"{'.'.join(parts[0])}..{'.'.join(parts[-1])}"


# The generator's state


def _device_of(carried: Sequence[Any]) -> torch.device:
    tensors, _ = flatten(list(carried))
    return tensors[0].device if tensors else torch.device("cpu")


def _random_state(device: torch.device) -> Tensor:
    """A copy that an operator makes, so that whoever counts tensors counts it."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    made = torch.empty(state.shape, dtype=state.dtype, device=device)
    return made.copy_(state) if type(made) is Tensor else made  # a fake tensor, in a profile, has no values


def _set_random_state(state: Tensor) -> None:
    if state.device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), state.device)
    elif type(state) is Tensor:  # a fake tensor, in a profile, has no values
        torch.set_rng_state(state)
