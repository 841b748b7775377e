"""Tries on real tensors what a run asks of a layer's backward, which fake tensors cannot show.

The gradients of a run are sums over a batch until its step divides them, and a micro-batch has a part of the sum. So a
backward must be linear in the gradient that it is given: a hook or a function that clips gradients, or adds something
to them, would do something else than in a loop over means. A layer that is run again must give the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import Problem, RequestError
from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.buffers import BufferSnapshot
from runner.model.seeds import seed_generators

__all__ = ["is_torchs_own", "repeats"]

_SCALES = (2.0**16, 2.0**-16)
_NARROW_SCALES = (2.0**4, 2.0**-4)  # for float16, in which gradients overflow early
_TOLERANCE = 1e-2  # of the largest gradient; kernels sum in an order of their own, and bfloat16 has three digits
_SEED = 1

_Function = Callable[[Any], Any]


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a layer consists of torch's own modules, without hooks, so that nothing need be tried."""
    own = all(type(each).__module__.startswith("torch.nn.modules.") for each in module.modules())
    return own and not any(_hooks_of(each) for each in module.modules())


def _hooks_of(module: nn.Module) -> bool:
    of_module = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    weights = (weight for weight in module.parameters(recurse=False))
    of_weights = any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights)
    return bool(of_module or module._backward_pre_hooks or of_weights)


def repeats(index: int, function: _Function, value: Any, module: nn.Module, *, narrow: bool) -> bool:
    """Run a layer several times, forward and backward, with the same random numbers and buffers.

    Args:
        index: its index in the model.
        function: the layer's function.
        value: its input, real tensors, which stay what they are.
        module: its module; gradients of its parameters are dropped.
        narrow: whether something is computed in float16.

    Returns:
        whether it gives the same output and gradients each time.

    Raises:
        RequestError: its backward is not linear in the gradient, changes gradients after they were accumulated, or its
            forward puts hooks on parameters.
    """
    buffers = BufferSnapshot(module.modules())
    try:
        return _repeats(index, _with_buffers(function, buffers), value, module, narrow=narrow)
    finally:
        buffers.put_back()


def _with_buffers(function: _Function, buffers: BufferSnapshot) -> _Function:
    """The function, which begins with the same buffers each time: a power iteration would begin where it has ended."""

    def run(value: Any) -> Any:
        buffers.put_back()
        return function(value)

    return run


def _repeats(index: int, function: _Function, value: Any, module: nn.Module, *, narrow: bool) -> bool:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    named = f"layer {index} ({type(module).__name__})"
    if any(weight._post_accumulate_grad_hooks for weight in weights):
        _refuse_changes_afterwards(named, function, value, weights)
    hooks = _num_hooks(weights)
    first, again = (_gradients(function, value, weights, 1.0) for _ in range(2))
    if _num_hooks(weights) > hooks:
        why = "One more acts on every gradient after each forward, of every micro-batch"
        _refuse(f"{named} must not put a hook on a parameter in its forward", why, "the hook where the model is made")
    if not _alike(first, again, 1.0):
        return False
    for scale in _NARROW_SCALES if narrow else _SCALES:
        if not _alike(first, _gradients(function, value, weights, scale), scale):
            if not _alike(first, _gradients(function, value, weights, 1.0), 1.0):
                return False  # the layer counts its calls, and has gone on to compute in another way
            rule = f"{named} must have a backward that is linear in the gradient"
            why = "Gradients are sums over samples until the step of a run, and a hook or function clips or shifts them"
            _refuse(rule, why, "trainer.grad_clip_value or trainer.grad_clip_norm in their place")
    return True


def _refuse_changes_afterwards(named: str, function: _Function, value: Any, weights: Sequence[nn.Parameter]) -> None:
    kept = _gradients(function, value, weights, 1.0, accumulates=False)
    versions = [weight._version for weight in weights]
    if not _alike(kept, _gradients(function, value, weights, 1.0), 1.0) or versions != [
        weight._version for weight in weights
    ]:
        rule = f"{named} must not change gradients or weights in hooks after accumulation"
        _refuse(rule, "They would act after each micro-batch, on a part of the gradient", "hooks on gradients")


def _refuse(rule: str, why: str, fix: str) -> None:
    path, _, must = rule.partition(" must ")
    raise RequestError([Problem("model.target", path, f"must {must}", why, fix)])


def _num_hooks(weights: Sequence[nn.Parameter]) -> int:
    return sum(len(weight._backward_hooks or ()) for weight in weights)


def _gradients(
    function: _Function, value: Any, weights: Sequence[nn.Parameter], scale: float, *, accumulates: bool = True
) -> list[Tensor | None]:
    """The output's tensors, and the gradients of the input and of weights for an output's gradient of ``scale``."""
    given = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value)
    seed_generators(_SEED)
    output = flatten(function(enter_graph(given)))[0]
    roots = [tensor for tensor in output if tensor.requires_grad]
    leaves = [*(tensor for tensor in flatten(given)[0] if tensor.requires_grad), *weights]
    ones = [torch.full_like(root, scale) for root in roots]
    if not roots:
        return []
    if not accumulates:
        return [*_outputs(output, scale), *torch.autograd.grad(roots, leaves, ones, allow_unused=True)]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(roots, ones)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [*_outputs(output, scale), *found]


def _outputs(output: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The output multiplied as the gradients are, so that both can be compared alike."""
    return [tensor.detach() * scale for tensor in output if tensor.is_floating_point() and tensor.requires_grad]


def _alike(first: Sequence[Tensor | None], other: Sequence[Tensor | None], scale: float) -> bool:
    """Whether gradients are ``scale`` times those of the first run; what is not finite is left out."""
    if len(first) != len(other):
        return False
    for one, two in zip(first, other, strict=True):
        if (one is None) != (two is None) or (one is not None and two is not None and one.shape != two.shape):
            return False
        if one is None or two is None or not one.numel():
            continue
        one, two = one.detach().to_dense(), two.detach().to_dense()
        if one.dtype == two.dtype and torch.equal(one if scale == 1.0 else one * scale, two):
            continue  # nearly always so, as scales are powers of two; what follows takes ten times as long
        wide = torch.complex128 if one.is_complex() else torch.float64
        one, two = one.to(wide), two.to(wide) / scale
        if not (torch.isfinite(one).all() and torch.isfinite(two).all()):
            continue
        if (one - two).abs().max() > _TOLERANCE * max(float(one.abs().max()), 1e-30):
            return False
    return True
