"""A chain of operators as one operator, which keeps what it reads and nothing that it computes in between.

It is torch's custom operator: profiles and exports see one operator, and its code is what ``torch.compile`` makes of
the chain, and of the chain's derivative, when they first run. On fake tensors it only tells the shape of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from runner.model.compiled import why_not_compiled
from runner.model.kernels.apart import in_own_thread

__all__ = ["Chain", "chain_of", "register"]


@dataclass
class Chain:
    """Operators from some tensors to one.

    Args:
        graph: the operators; it takes the tensors one by one.
        examples: fake tensors like those, whose unknown sizes are symbols.
    """

    graph: GraphModule
    examples: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._compiled: Callable[..., Tensor] | None = None
        self._derivative: Callable[..., Sequence[Tensor]] | None = None

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        """The chain's result, computed by compiled code."""
        with self._lock:
            if self._compiled is None:
                self._compiled = _compiled(self.graph, cuda=values[0].is_cuda)
        return self._compiled(*values)

    def backward(self, values: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
        """The gradients of the floating-point tensors among the values, computed by compiled code."""
        with self._lock:
            if self._derivative is None:
                self._derivative = _compiled(in_own_thread(self._derive), cuda=gradient.is_cuda)
        return [made.contiguous() for made in self._derivative(*values, gradient)]

    def _derive(self) -> GraphModule:
        """The operators from the values and the result's gradient to the values' gradients, by torch's autograd."""
        from torch._functorch.aot_autograd import aot_export_joint_simple

        own = Graph()
        copies: dict[Any, Any] = {}
        for node in self.graph.graph.nodes:
            if node.op == "output":
                own.output((copies[node.args[0]],))  # the tool below wants a tuple
            else:
                copies[node] = own.node_copy(node, lambda old: copies[old])
        examples = [_leaf(example) for example in self.examples]
        joint = aot_export_joint_simple(GraphModule({}, own), tuple(examples), trace_joint=True)
        return _of_gradients(joint)


def _leaf(example: Tensor) -> Tensor:
    with example.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_like(example).requires_grad_(example.is_floating_point())


def _of_gradients(joint: Any) -> GraphModule:
    """The operators that give the gradients, of a graph that also gives the result."""
    graph = Graph()
    copies: dict[Any, Any] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            _, *gradients = node.args[0]
            graph.output(tuple(copies[each] for each in gradients if each is not None))
        elif "_assert_tensor_metadata" not in str(node.target):
            copies[node] = graph.node_copy(node, lambda old: copies[old])
            copies[node].meta = {}
    graph.eliminate_dead_code()
    return GraphModule({}, graph)


def _compiled(graph: GraphModule, *, cuda: bool) -> Any:
    """The graph as compiled code, made when that first runs; the graph itself where the machine has no compiler."""
    if why_not_compiled(cuda=cuda):
        return graph  # in a plan for another machine; a run is refused
    return torch.compile(graph, dynamic=True, options={"fallback_random": True})


_CHAINS: dict[str, Chain] = {}


def register(key: str, chain: Chain) -> None:
    """Make a chain known to its operator by a key that says all that it computes; the first one of a key stays."""
    _CHAINS.setdefault(key, chain)


def chain_of(key: str) -> Chain:
    """The chain of a key."""
    return _CHAINS[key]


@torch.library.custom_op("runner_kernels::chain", mutates_args=())
def _chain(values: list[Tensor], key: str) -> Tensor:
    return chain_of(key).forward(values)


@_chain.register_fake
def _chain_of_fakes(values: list[Tensor], key: str) -> Tensor:
    made: Tensor = chain_of(key).graph(*values)
    return made


@torch.library.custom_op("runner_kernels::chain_backward", mutates_args=())
def _chain_backward(values: list[Tensor], gradient: Tensor, key: str) -> list[Tensor]:
    return chain_of(key).backward(values, gradient)


@_chain_backward.register_fake
def _chain_backward_of_fakes(values: list[Tensor], gradient: Tensor, key: str) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in _floating(values)]


def _floating(values: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in values if each.is_floating_point()]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, ctx.key = inputs
    ctx.save_for_backward(*values)


def _back(ctx: Any, gradient: Tensor) -> tuple[list[Tensor | None], None]:
    values = list(ctx.saved_tensors)
    made = iter(_chain_backward(values, gradient, ctx.key))
    return [next(made) if each.is_floating_point() else None for each in values], None


_chain.register_autograd(_back, setup_context=_keep)
