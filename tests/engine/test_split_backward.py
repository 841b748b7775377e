"""I and W together give the bits of one full backward, compute each product once, and keep nothing too long."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from narrow import gradient, present
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.engine.update.gradients import StageGradients
from runner.model.boundary import flatten, map_tensors
from runner.model.live_tracker import LiveTracker
from runner.model.split.backward import backward_input, backward_weight

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution_backward", "embedding_dense_backward"}


class Made(nn.Module):
    """A module from a function of its parts and its input; it has the parts that it is given, by these names."""

    inner: nn.Module
    other: nn.Module
    a: nn.Module
    b: nn.Module
    table: nn.Embedding
    w: nn.Parameter
    v: nn.Parameter
    prompt: nn.Parameter
    weights: nn.Parameter
    shared: nn.Parameter
    waiting: nn.Parameter
    at_once: nn.Parameter

    def __init__(self, function: Callable[[Made, Any], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    return module


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 6))


def chunked(module: Made, x: Tensor) -> Tensor:
    a, b, c = module.inner(x).chunk(3, dim=-1)
    first, second = torch.split(a * b, [2, 4], dim=-1)
    made: Tensor = torch.cat([second, first], -1) + c.sigmoid()
    return made


def in_place(module: Made, x: Tensor) -> Tensor:
    hidden = module.inner(x).mul_(2.0).add_(x)
    hidden[:, 1] += 1.0
    hidden[:, 0] = module.other(x)[:, 0] * 2
    made: Tensor = module.inner(hidden.tanh_()).relu_()
    return made


def gated_by_detached(module: Made, x: Tensor) -> Tensor:
    made: Tensor = module.inner(x.detach()) + module.other(x)
    return made


def expert_products(module: Made, x: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), module.weights).transpose(0, 1) + torch.einsum("bti,io->bto", x, module.shared)


class Tripled(torch.autograd.Function):
    """A function of a weight alone that saves nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Squared(torch.autograd.Function):
    """One that saves what it was given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        made: Tensor = gradients[0] * 2 * ctx.saved_tensors[0]
        return made


def functions_of_weights(module: Made, x: Tensor) -> Tensor:
    tripled, squared = Tripled.apply(module.waiting), Squared.apply(module.at_once)  # type: ignore[no-untyped-call, unused-ignore]
    made: Tensor = x @ tripled + x @ squared
    return made


def five_steps(module: Made, x: Tensor) -> Tensor:
    hidden = torch.zeros(2, 6)
    for step in x:
        hidden = module.inner(step, hidden)
    return hidden


def tuple_and_dict(module: Made, value: Any) -> Any:
    hidden, extra = value["pair"]
    return {"out": (module.inner(hidden), extra * 2, value["name"]), "same": extra, "tokens": value["tokens"]}


X = (4, 3, 6)
Case = tuple[Callable[[], nn.Module], Callable[[], Any]]
"""What makes a module, and what makes its input."""

CASES: dict[str, Case] = {
    "mlp": (mlp, lambda: torch.randn(X)),
    "functions of weights": (
        lambda: Made(functions_of_weights, waiting=weight(6, 6), at_once=weight(6, 6)),
        lambda: torch.randn(X),
    ),
    "attention": (
        lambda: Made(lambda m, x: m.inner(x, x, x)[0], inner=nn.MultiheadAttention(6, 2)),
        lambda: torch.randn(X),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2), lambda: torch.randn(X)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6)),
        lambda: torch.randint(9, (4, 3)),
    ),
    "sparse embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6)),
        lambda: torch.randint(9, (4, 3)),
    ),
    "tied embedding": (
        lambda: Made(lambda m, x: m.inner(m.table(x)) @ m.table.weight.t(), table=nn.Embedding(9, 6), inner=mlp()),
        lambda: torch.randint(9, (4, 3)),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4, 2, 2),
            nn.GroupNorm(1, 2),
            nn.Conv2d(2, 4, 3, stride=2, groups=2, bias=False),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        lambda: torch.randn(4, 2, 6, 6),
    ),
    "no parameters": (lambda: nn.Sequential(nn.GELU(), nn.Softmax(-1)), lambda: torch.randn(X)),
    "identity": (nn.Identity, lambda: torch.randn(X)),
    "frozen layer": (lambda: frozen(mlp(), "3.weight", "3.bias", "0.weight"), lambda: torch.randn(X)),
    "frozen": (lambda: frozen(mlp(), *(n for n, _ in mlp().named_parameters())), lambda: torch.randn(X)),
    "used three times in a row": (
        lambda: Made(lambda m, x: m.inner(m.inner(m.inner(x)).tanh()), inner=mlp()),
        lambda: torch.randn(X),
    ),
    "weight used directly, and by itself": (
        lambda: Made(
            lambda m, x: (x.flatten(0, 1) @ m.w @ m.w.tanh() @ m.w).tanh() @ (m.v @ m.v), w=weight(6, 6), v=weight(6, 6)
        ),
        lambda: torch.randn(X),
    ),
    "weight on the left": (
        lambda: Made(lambda m, x: m.w @ torch.relu(m.w @ x.flatten(0, 1).t()), w=weight(6, 6)),
        lambda: torch.randn(2, 3, 6),
    ),
    "scaled addmm": (
        lambda: Made(lambda m, x: torch.addmm(x, x, m.w, beta=0.5, alpha=2.0), w=weight(6, 6)),
        lambda: torch.randn(5, 6),
    ),
    "chunks and splits": (lambda: Made(chunked, inner=nn.Linear(6, 18)), lambda: torch.randn(X)),
    "chunked weight": (
        lambda: Made(lambda m, x: sum(functional.linear(x, w) for w in m.w.chunk(3)), w=weight(18, 6)),
        lambda: torch.randn(X),
    ),
    "converted weight": (
        lambda: Made(lambda m, x: functional.linear(x.double(), m.w.double()).float(), w=weight(6, 6)),
        lambda: torch.randn(X),
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.GELU(), nn.Linear(6, 6)),
        lambda: torch.randn(X),
    ),
    "in place": (lambda: Made(in_place, inner=nn.Linear(6, 6), other=nn.Linear(6, 6)), lambda: torch.randn(4, 6)),
    "off the path": (lambda: Made(gated_by_detached, inner=mlp(), other=nn.Linear(6, 6)), lambda: torch.randn(X)),
    "unused": (lambda: Made(lambda m, x: m.inner(x), inner=mlp(), other=nn.Linear(6, 6)), lambda: torch.randn(X)),
    "learned prompt": (
        lambda: Made(lambda m, x: x + m.inner(m.prompt.expand(12, 6)).view(4, 3, 6), prompt=weight(1, 6), inner=mlp()),
        lambda: torch.randn(X),
    ),
    "experts": (lambda: Made(expert_products, weights=weight(3, 6, 6), shared=weight(6, 6)), lambda: torch.randn(X)),
    "recurrent": (
        lambda: Made(lambda m, x: m.inner(x)[0], inner=nn.LSTM(6, 6, num_layers=2)),
        lambda: torch.randn(5, 2, 6),
    ),
    "recurrent cell": (lambda: Made(five_steps, inner=nn.GRUCell(6, 6)), lambda: torch.randn(5, 2, 6)),
    "tuples and dicts": (
        lambda: Made(tuple_and_dict, inner=mlp()),
        lambda: {"pair": (torch.randn(X), torch.randn(2, 2)), "name": "a", "tokens": torch.randint(5, (2,))},
    ),
    "checkpoint": (
        lambda: Made(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=mlp(), b=mlp()),
        lambda: torch.randn(X),
    ),
    "re-entrant checkpoint": (
        lambda: Made(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=mlp(), b=mlp()),
        lambda: torch.randn(X),
    ),
}


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


class Run:
    """One stage's gradients, by a full backward or a split one, over two micro-batches with the same random numbers."""

    def __init__(self, module: nn.Module, values: list[Any], *, first: bool, autocast: bool = False) -> None:
        self.module, self.autocast = module, autocast
        self.gradients = StageGradients(trained(module))
        self.values = values
        self.first = first
        self.input_gradients: list[Tensor | None] = []

    def forward(self, index: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Input leaves, output roots and the gradients of these."""
        torch.manual_seed(index)
        value = map_tensors(
            lambda t: t.detach().requires_grad_(t.is_floating_point() and not self.first), self.values[index]
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.module(value)
        roots = [t for t in flatten(output)[0] if t.requires_grad]
        return [t for t in flatten(value)[0] if t.requires_grad], roots, [torch.randn_like(root) for root in roots]

    def full(self) -> list[Tensor]:
        for index in range(len(self.values)):
            leaves, roots, gradients = self.forward(index)
            if roots:
                torch.autograd.backward(roots, gradients)
            self.input_gradients += [leaf.grad for leaf in leaves]
        return self.taken()

    def split(self, *, late: bool = True) -> list[Tensor]:
        pendings = []
        for index in range(len(self.values)):
            leaves, roots, gradients = self.forward(index)
            produced, pending = backward_input(roots, gradients, leaves)
            assert all(leaf.grad is None for leaf in leaves)
            self.input_gradients += produced
            pendings.append(pending)
            if not late:
                backward_weight(pendings.pop())
        for pending in pendings:
            backward_weight(pending)
            assert len(pending) == 0
        return self.taken()

    def taken(self) -> list[Tensor]:
        for parameter, view in self.gradients._views:
            assert parameter.grad is view, "gradients stay views of their buffer"
        taken = [flat.clone() for flat in self.gradients.flats]
        self.gradients.zero()
        return taken


def make(case: Case, *, first: bool = False, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Run:
    torch.manual_seed(5)
    module, value = case[0]().to(dtype), case[1]
    values = [map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value()) for _ in range(2)]
    return Run(module, values, first=first, autocast=autocast)


def assert_has_the_bits_of_a_full_backward(case: Case, **options: Any) -> None:
    """With each W at once, and with all of them late."""
    expected = make(case, **options)
    gradients = expected.full()
    for late in (False, True):
        split = make(case, **options)
        assert all(map(torch.equal, gradients, split.split(late=late)))
        assert len(split.input_gradients) == len(expected.input_gradients)
        for mine, theirs in zip(split.input_gradients, expected.input_gradients, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs
            else:
                assert torch.equal(mine, theirs)


def assert_computes_each_product_once(case: Case, **options: Any) -> None:
    expected, split = make(case, **options), make(case, **options)
    expected.values, split.values = expected.values[:1], split.values[:1]
    assert counted(split.split) == counted(expected.full)


def assert_leaves_nothing(case: Case) -> None:
    """To be called without the collector."""
    run = make(case)
    run.split()
    run.input_gradients.clear()
    with LiveTracker() as tracker:
        before = tracker.live
        run.split()
        run.input_gradients.clear()
        assert tracker.live == before


def counted(function: Callable[[], Any]) -> Counter[str]:
    """How often each product is computed by ``function``."""

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]  # the library's
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
            if name == "convolution_backward":
                counts[name] += sum(each is not None for each in made[:2])  # its two products, also if not asked for
            elif name in PRODUCTS:
                counts[name] += 1
            return made

    counts: Counter[str] = Counter()
    with Count():  # type: ignore[no-untyped-call]  # the library's
        function()
    return counts


@pytest.mark.costly
@pytest.mark.parametrize("first", [False, True], ids=["middle stage", "first stage"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_a_full_backward_and_computes_each_product_once(name: str, first: bool) -> None:
    assert_has_the_bits_of_a_full_backward(CASES[name], first=first)
    assert_computes_each_product_once(CASES[name], first=first)


@pytest.mark.parametrize(("first", "products"), [(False, (3, 3)), (True, (2, 3))], ids=["middle stage", "first stage"])
def test_products_of_three_linear_layers(first: bool, products: tuple[int, int]) -> None:
    """The first stage's input needs no gradient, in a full backward neither."""
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6))
    leaves, roots, gradients = Run(module, [torch.randn(X)], first=first).forward(0)
    pendings = []
    in_i = counted(lambda: pendings.append(backward_input(roots, gradients, leaves)[1]))
    in_w = counted(lambda: backward_weight(pendings[0]))
    assert (in_i["mm"], in_w["mm"]) == products


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied embedding"])
def test_has_the_bits_of_a_full_backward_in_bf16(name: str) -> None:
    assert_has_the_bits_of_a_full_backward(CASES[name], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "first", "waiting"),
    [
        ("mlp", False, 3), ("mlp", True, 3), ("embedding", True, 2),
        ("tied embedding", True, 4), ("convolutions", False, 6), ("used three times in a row", False, 3),
        ("experts", False, 2), ("recurrent", False, 0), ("recurrent cell", False, 2), ("weight norm", False, 3),
        ("chunked weight", False, 1), ("checkpoint", False, 3), ("identity", False, 0),
        ("re-entrant checkpoint", False, 0), ("functions of weights", False, 2 if torch.__version__ >= "2.13" else 0),
    ],
)  # fmt: skip
def test_weights_that_wait(name: str, first: bool, waiting: int) -> None:
    leaves, roots, gradients = make(CASES[name], first=first).forward(0)
    assert len(backward_input(roots, gradients, leaves)[1]) == waiting


def test_a_scalar_output_needs_no_gradient() -> None:
    module, x = mlp(), torch.randn(X, requires_grad=True)
    module(x).sum().backward()
    expected = [gradient(part) for part in (x, *module.parameters())]
    module.zero_grad()
    (made,), pending = backward_input([module(x).sum()], None, [x])
    backward_weight(pending)
    assert all(map(torch.equal, expected, [present(made), *(gradient(part) for part in module.parameters())]))


def test_no_output_that_requires_gradients() -> None:
    produced, pending = backward_input([], [], [torch.randn(2, requires_grad=True)])
    assert (produced, len(pending)) == ([None], 0)


def test_a_hook_on_a_weight_runs_once_on_the_whole_gradient() -> None:
    module = Made(lambda m, x: m.inner(m.inner(x)), inner=nn.Linear(6, 6))
    seen: list[Tensor] = []
    module.get_parameter("inner.weight").register_hook(lambda found: seen.append(found.clone()))  # type: ignore[no-untyped-call]  # the library's
    x = torch.randn(X, requires_grad=True)
    module(x).sum().backward()
    backward_weight(backward_input([module(x).sum()], None, [x])[1])
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_after_w_without_the_collector(name: str) -> None:
    assert_leaves_nothing(CASES[name])


@pytest.mark.usefixtures("without_collector")
def test_what_only_i_needs_is_free_after_it() -> None:
    rows, width = 32, 16
    module = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)
    )
    StageGradients(trained(module))
    norm_inputs: list[weakref.ref[Any]] = []
    module[3].register_forward_hook(lambda _, given, output: norm_inputs.append(weakref.ref(given[0])))
    x = torch.randn(rows, width, requires_grad=True)
    one = rows * width * 4
    with LiveTracker() as tracker:
        output = module(x)
        gradient = torch.randn_like(output)
        (produced,), pending = backward_input([output], [gradient], [x])
        del output
        assert norm_inputs[0]() is None
        # each linear layer's input and the gradient of its output, one of which is `gradient`, and `produced`
        assert tracker.live == 2 * 2 * one + one
        backward_weight(pending)
        assert tracker.live == 2 * one
        del produced, gradient
        assert tracker.live == 0
