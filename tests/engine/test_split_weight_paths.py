"""What a weight passes before it meets the input runs in W, and both parts give the bits of plain autograd.

The oracle is ``torch.autograd.backward`` on the same module; the module's own functions count where they ran.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from narrow import gradient, present
from reference import train
from test_split_backward import Case, assert_has_the_bits_of_a_full_backward, assert_leaves_nothing
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from runner.model.live_tracker import LiveTracker
from runner.model.split.backward import PendingWeights, backward_input, backward_weight, capturing
from runner.schedule import build

RAN: Counter[str] = Counter()
"""How often the backward of each function ran, by its name."""


class Cubed(torch.autograd.Function):
    """A function of a weight that saves it, and counts its backwards."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        RAN["cubed"] += 1
        made: Tensor = gradients[0] * 3 * ctx.saved_tensors[0] ** 2
        return made


class Halved(torch.autograd.Function):
    """A function with two outputs, of which one may stay unused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(value)
        top, bottom = value.chunk(2)
        return top.sin(), bottom.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        RAN["halved"] += 1
        top, bottom = ctx.saved_tensors[0].chunk(2)
        return torch.cat([gradients[0] * top.cos(), gradients[1] * bottom.exp()])


class Fused(torch.autograd.Function):
    """A product of its own, whose backward makes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        RAN["fused"] += 1
        value, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ value


def cubed(value: Tensor) -> Tensor:
    made: Tensor = Cubed.apply(value)  # type: ignore[no-untyped-call, unused-ignore]
    return made


def halved(value: Tensor) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = Halved.apply(value)  # type: ignore[no-untyped-call, unused-ignore]
    return made


def fused(value: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = Fused.apply(value, weight)  # type: ignore[no-untyped-call, unused-ignore]
    return made


class Counted(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return cubed(value).triu() + value.tril(-1)


def hooked(value: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    value.register_hook(hook)  # type: ignore[no-untyped-call]
    return value


def counting(linear: nn.Linear) -> nn.Module:
    made: nn.Module = parametrize.register_parametrization(linear, "weight", Counted())
    return made


class Layer(nn.Module):
    """``function(self, x)``, with weights ``v`` and ``w`` [6, 6], a vector ``g`` [6] and a table ``t`` [9, 6]."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, shape in {"v": (6, 6), "w": (6, 6), "g": (6,), "t": (9, 6), "a": (6, 2), "b": (2, 6)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.4))
        self.register_buffer("base", torch.randn(6, 6) * 0.4)
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in Qwen3, over the last axis."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def heads(m: Any, x: Tensor) -> Tensor:
    """Attention with norms of queries and keys per head of 3, as in Qwen3."""
    query, key = (functional.linear(x, w).view(4, 3, 2, 3) for w in (m.w, m.v))
    query, key = rms_norm(query, m.g[:3]).transpose(1, 2), rms_norm(key, m.g[3:]).transpose(1, 2)
    return functional.scaled_dot_product_attention(query, key, key).transpose(1, 2).reshape(4, 3, 6)


def doubly(m: Any, x: Tensor) -> Tensor:
    """DoRA: a low-rank sum, its norm beside the product, and a magnitude."""
    whole = m.base + (m.a @ m.b) * 0.5
    made: Tensor = functional.linear(x, whole) * (m.g / whole.norm(dim=1))
    return made


def interleaved(m: Any, x: Tensor) -> Tensor:
    """Uses of one weight, direct and by way of a function, in turns: their gradients add up in that order."""
    x = functional.linear(x, m.w)
    x = functional.linear(x, cubed(m.w))
    x = functional.linear(x, m.w)
    made: Tensor = functional.linear(x, m.w.tanh()) @ m.w
    return made


def at_once_and_later(m: Any, x: Tensor) -> Tensor:
    """The transformed weight is used by products before and after it is transformed again."""
    first = cubed(m.w)
    x = functional.linear(x, first)
    second = first.sin() @ first
    return functional.linear(functional.linear(x, second), first) @ second


def between_its_uses(m: Any, x: Tensor) -> Tensor:
    """W would first add what both direct products give, and then what comes between them."""
    first = cubed(m.w)
    x = x @ first
    return x @ first.sin() @ first


def before_its_uses(m: Any, x: Tensor) -> Tensor:
    """All direct products are later than the second transformation: their parts come first in any order."""
    first = cubed(m.w)
    second = first.sin()
    return x @ first @ second @ first


def recurrent(m: Any, x: Tensor) -> Tensor:
    hidden, weight = torch.zeros(3, 6), cubed(m.w)
    for step in x:
        hidden = torch.tanh(functional.linear(step, m.v) + functional.linear(hidden, weight))
    return hidden


def hyper(m: Any, x: Tensor) -> Tensor:
    """The weight's path joins the input before the product; the function of the weight alone can wait."""
    return functional.linear(x, cubed(m.w) * x.mean())


def looked_up(m: Any, ids: Tensor) -> Tensor:
    """A table behind a function, used again as the head."""
    table = m.t * m.t.norm(dim=1, keepdim=True)
    return functional.linear(functional.linear(functional.embedding(ids, table), m.w).relu(), table)


def weight_normed(m: Any, x: Tensor) -> Tensor:
    made: Tensor = m.second(m.first(x).relu())
    return made


X, IDS = (4, 3, 6), (4, 3)
CASES: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: Layer(
        weight_normed,
        first=parametrizations.weight_norm(nn.Linear(6, 6)),
        second=parametrizations.weight_norm(nn.Linear(6, 6), dim=-1),
    ),
    "weight norm of a convolution": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(3, 3, 3, padding=1)), nn.ReLU(), nn.Conv1d(3, 3, 1)
    ),
    "parametrization": lambda: nn.Sequential(counting(nn.Linear(6, 6))),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.GELU(), nn.Linear(6, 6)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.GELU(), nn.Linear(6, 6)),
    "function": lambda: Layer(lambda m, x: functional.linear(x, cubed(m.w))),
    "fake quantization": lambda: Layer(
        lambda m, x: functional.linear(x, torch.fake_quantize_per_tensor_affine(m.w, 0.1, 0, -8, 7))
    ),
    "low rank, frozen base": lambda: Layer(lambda m, x: functional.linear(x, m.base + (m.a @ m.b) * 2)),
    "low rank of norms": lambda: Layer(doubly),
    "tied": lambda: Layer(lambda m, x: functional.linear(functional.linear(x, m.w).relu(), cubed(m.w))),
    "used three times": lambda: Layer(
        lambda m, x: (lambda w: functional.linear(functional.linear(x, w).relu(), w) + x @ w)(cubed(m.w))
    ),
    "in turns": lambda: Layer(interleaved),
    "twice transformed": lambda: Layer(at_once_and_later),
    "between its uses": lambda: Layer(between_its_uses),
    "before its uses": lambda: Layer(before_its_uses),
    "recurrent": lambda: Layer(recurrent),
    "by itself": lambda: Layer(lambda m, x: x @ (cubed(m.w) @ cubed(m.w)) @ (m.v @ m.v)),
    "one output of two": lambda: Layer(lambda m, x: x @ halved(m.w)[1].t()),
    "chunks": lambda: Layer(lambda m, x: x @ torch.cat(cubed(m.w).chunk(3), 1).view(6, 6)),
    "pieces": lambda: Layer(lambda m, x: by_pieces(m.w, x)),
    "pieces in a checkpoint": lambda: Layer(lambda m, x: checkpoint(by_pieces, m.w, x, use_reentrant=False)),
    "product of its own": lambda: Layer(lambda m, x: fused(x.flatten(0, 1), cubed(m.w))),
    "times the input": lambda: Layer(lambda m, x: x * cubed(m.g) + (1 + m.w[0])),
    "looked up": lambda: Layer(looked_up),
    "depends on the input": lambda: Layer(hyper),
    "norms of heads": lambda: Layer(heads),
    "beside the input too": lambda: Layer(lambda m, x: functional.linear(x, cubed(m.w)) * m.w[0] + x @ m.w),
    "in place": lambda: Layer(lambda m, x: functional.linear(x, cubed(m.w).mul_(2).add_(m.v))),
    "bias of a function": lambda: Layer(lambda m, x: functional.linear(x, cubed(m.w), cubed(m.g))),
    "gradients changed by hooks": lambda: Layer(changed),
    "in a checkpoint": lambda: Layer(
        lambda m, x: functional.linear(checkpoint(m.inside, x, use_reentrant=False), cubed(m.v)),
        inside=nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh()),
    ),
}  # fmt: skip


def by_pieces(weight: Tensor, x: Tensor) -> Tensor:
    """A product with each part of a weight."""
    return torch.cat([functional.linear(x, piece) for piece in torch.split(weight, 3)], -1)


def changed(m: Any, x: Tensor) -> Tensor:
    """Hooks on what a product gives and takes, and on a transformed weight."""
    weight = hooked(cubed(m.w), lambda gradient: gradient * 3)
    hidden = hooked(x.flatten(0, 1) @ weight, lambda gradient: gradient.clamp(-0.5, 0.5))
    scale = hooked(cubed(m.g), lambda gradient: gradient * 5)
    return hooked((hidden * scale) @ m.v, lambda gradient: gradient * 2)


def case_of(name: str) -> Case:
    return CASES[name], lambda: torch.randint(9, IDS) if name == "looked up" else torch.randn(X)


@pytest.mark.costly
@pytest.mark.parametrize("first", [False, True], ids=["middle stage", "first stage"])
@pytest.mark.parametrize("name", CASES)
def test_both_parts_have_the_bits_of_plain_autograd(name: str, first: bool) -> None:
    assert_has_the_bits_of_a_full_backward(case_of(name), first=first)


def test_a_schedule_that_splits_has_the_bits_of_one_process() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(7)
        kinds = ("weight norm", "parametrization", "low rank, frozen base", "fake quantization", "function", "in turns")
        return nn.Sequential(*(nn.Sequential(nn.LayerNorm(6), CASES[kind](), nn.GELU()) for kind in kinds))

    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(2, 8, 6, generator=generator)) for _ in range(2)]
    options: dict[str, Any] = {"count": 4, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    model, loss = make(), functional.mse_loss
    expected = train(model, loss, batches, **options)
    order = build("dualpipe_v", ranks=2, microbatches=4)
    losses, weights = train_in_threads(make, loss, batches, pipeline=2, data=1, schedule=order, **options)
    assert losses == [expected] * 2
    assert [key for key, value in model.state_dict().items() if not torch.equal(weights[key], value)] == []


@pytest.mark.parametrize("precision", [{"dtype": torch.bfloat16}, {"autocast": True}], ids=["bf16", "bf16 products"])
@pytest.mark.parametrize("name", ["weight norm", "low rank of norms", "in turns", "norms of heads"])
def test_in_other_precisions(name: str, precision: dict[str, Any]) -> None:
    assert_has_the_bits_of_a_full_backward(case_of(name), **precision)


def ran_in(name: str, *, first: bool = False) -> tuple[Counter[str], Counter[str], int]:
    """Which functions ran in I, and in W, and the number of weights that waited."""
    torch.manual_seed(3)
    case = case_of(name)
    module, value = case[0](), case[1]()
    value = value.requires_grad_(not first) if value.is_floating_point() else value
    output = module(value)
    RAN.clear()
    _, pending = backward_input([output], [torch.ones_like(output)], [value] if value.requires_grad else [])
    in_i, waiting = copy.copy(RAN), len(pending)
    RAN.clear()
    backward_weight(pending)
    return in_i, copy.copy(RAN), waiting


of_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="with torch before 2.13 functions of users stay in I")


@of_2_13
@pytest.mark.parametrize(
    ("name", "first", "in_i", "in_w", "waiting"),
    [
        ("function", False, {}, {"cubed": 1}, 1), ("function", True, {}, {"cubed": 1}, 1),
        ("parametrization", False, {}, {"cubed": 1}, 1), ("parametrization", True, {}, {"cubed": 1}, 1),
        ("weight norm", False, {}, {}, 4), ("weight norm", True, {}, {}, 4),
        ("weight norm of a convolution", False, {}, {}, 5),
        ("fake quantization", False, {}, {}, 1),
        ("orthogonal", False, {}, {}, 2),
        ("low rank, frozen base", False, {}, {}, 2),
        ("low rank of norms", False, {}, {}, 3), ("tied", False, {}, {"cubed": 1}, 1),
        ("tied", True, {}, {"cubed": 1}, 1),
        ("used three times", False, {}, {"cubed": 1}, 1), ("in turns", False, {}, {"cubed": 1}, 1),
        ("twice transformed", True, {}, {"cubed": 1}, 1), ("recurrent", False, {}, {"cubed": 1}, 2),
        ("by itself", False, {}, {"cubed": 2}, 2),
        ("pieces", False, {}, {}, 1), ("pieces in a checkpoint", False, {}, {}, 0),
        ("product of its own", False, {"fused": 1}, {"cubed": 1}, 1), ("times the input", False, {}, {"cubed": 1}, 2),
        ("looked up", True, {}, {}, 2), ("bias of a function", False, {}, {"cubed": 2}, 2),
        ("depends on the input", False, {}, {"cubed": 1}, 1), ("between its uses", False, {"cubed": 1}, {}, 0),
        ("before its uses", False, {}, {"cubed": 1}, 1), ("norms of heads", False, {}, {}, 2),
        ("beside the input too", False, {"cubed": 1}, {}, 0), ("in a checkpoint", False, {}, {"cubed": 1}, 1),
    ],
)  # fmt: skip
def test_where_the_weights_own_path_runs(
    name: str, first: bool, in_i: dict[str, int], in_w: dict[str, int], waiting: int
) -> None:
    assert ran_in(name, first=first) == (in_i, in_w, waiting)


def test_an_output_that_is_a_weights_own() -> None:
    """The stage gives a transformed weight to the next one, and uses it too."""

    def outputs(weight: Tensor, x: Tensor) -> list[Tensor]:
        made = cubed(weight)
        return [x @ made.sin(), made]

    expected, weight = (nn.Parameter(torch.arange(36.0).view(6, 6) / 30) for _ in range(2))
    x = torch.randn(4, 6, requires_grad=True)
    given = [torch.randn(4, 6), torch.randn(6, 6)]
    torch.autograd.backward(outputs(expected, x), given)
    leaf = x.detach().requires_grad_()
    (made,), pending = backward_input(outputs(weight, leaf), given, [leaf])
    backward_weight(pending)
    assert torch.equal(present(made), gradient(x))
    assert torch.equal(gradient(weight), gradient(expected))


def test_hooks_run_once_on_the_whole_gradient_of_a_product_and_of_its_transformed_weight() -> None:
    seen: list[str] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        weight = hooked(cubed(m.w), lambda _: seen.append("weight"))
        hidden = hooked(x @ weight, lambda _: seen.append("hidden"))
        return hidden.relu() @ weight

    x = torch.randn(4, 6, requires_grad=True)
    backward_weight(backward_input([Layer(forward)(x)], [torch.ones(4, 6)], [x])[1])
    assert sorted(seen) == ["hidden", "weight"]


def test_the_gradient_of_an_input_keeps_the_layout_in_which_it_arrives() -> None:
    """A leaf's ``grad`` would have the leaf's layout, and sums over it other bits."""
    x = torch.randn(4, 6).t().requires_grad_()
    gradient = torch.randn(6, 4)
    with capturing([x]) as (made, *_):
        assert made is None
    with capturing([x]) as found:
        torch.autograd.backward([x * 1.0], [gradient])
    (arrived,) = found
    assert arrived is not None
    assert arrived.stride() == (4, 1)
    assert x.grad is None
    torch.autograd.backward([x * 1.0], [gradient])
    own: Any = x.grad
    assert own.stride() == (1, 6)
    assert torch.equal(own, arrived)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_after_w_without_the_collector(name: str) -> None:
    assert_leaves_nothing(case_of(name))


@of_2_13
@pytest.mark.usefixtures("without_collector")
def test_w_keeps_the_weights_path_and_nothing_of_the_input_but_the_products_operands() -> None:
    """What a function of the weight saved, and gave, is kept; the input of the norm before the product is not."""
    width, rows, size = 16, 32, 4
    module = nn.Sequential(nn.LayerNorm(width), counting(nn.Linear(width, width)))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(rows, width, requires_grad=True)
    gradient = torch.ones(rows, width)
    with LiveTracker() as tracker:
        output = module(x)
        made, pending = backward_input([output], [gradient], [x])
        del output, made
        operands = rows * width * size  # the norm's output; the gradient was there before
        assert operands <= tracker.live <= operands + 2 * width * width * size
        backward_weight(pending)
        assert tracker.live == 0


def test_nothing_waits_twice() -> None:
    pending = PendingWeights()
    backward_weight(pending)
    assert len(pending) == 0
