"""Layers as strangers write them, whose weights or buffers are not dense, real, of one size and with elements.

Plain PyTorch. Each takes and returns ``(samples, length, WIDTH)``, sample by sample, so that micro-batches change
nothing; each keeps what its kind is about in its output, its buffers or both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
LONGEST = 9


class Layer(nn.Module):
    """``x + tanh(linear(odd(x)))``, so that an error in the odd part shows and nothing grows out of bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def odd(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + torch.tanh(self.linear(self.odd(x)))
        return made


class Held(Layer):
    """Multiplies by a buffer of any format and layout, as ``use`` says."""

    def __init__(self, value: Tensor, use: Callable[[Tensor, Tensor], Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("held", value, persistent=persistent)
        self.use = use

    def odd(self, x: Tensor) -> Tensor:
        return self.use(x, self.get_buffer("held"))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns[: x.shape[1]]).flatten(-2)


def turns() -> Tensor:
    return torch.polar(torch.ones(LONGEST, WIDTH // 2), torch.rand(LONGEST, WIDTH // 2) * 6)


def adjacency() -> Tensor:
    return (torch.rand(WIDTH, WIDTH) > 0.5).float()


def joined(x: Tensor, matrix: Tensor) -> Tensor:
    made: Tensor = torch.sparse.mm(matrix, x.flatten(0, 1).T).T
    return made.reshape(x.shape)


def waves(x: Tensor, frequencies: Tensor) -> Tensor:
    """Positions so large that float32 would round them by whole turns."""
    angles = (torch.arange(x.shape[1], dtype=torch.float64) + 1e9)[:, None] * frequencies
    return x + torch.cos(angles).float()


class Fading(Layer):
    """A sparse buffer and an expanded one whose values its forward changes in place, whatever the micro-batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", adjacency().to_sparse(), persistent=False)
        self.register_buffer("factor", torch.rand(1).expand(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("graph").mul_(0.5 ** (len(x) / 8))
            self.get_buffer("factor")[:1].mul_(0.5 ** (len(x) / 8))
        return x


class Growing(Layer):
    """A causal mask that is made longer for a longer row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind != "first_in_forward":
            made = None if kind == "lazy" else torch.ones(2, 2).tril().bool()
            self.register_buffer("mask", made, persistent=kind != "transient")

    def odd(self, x: Tensor) -> Tensor:
        length, mask = x.shape[1], self._buffers.get("mask")
        if mask is None or len(mask) < length:
            mask = torch.ones(length, length).tril().bool()
            if self.kind == "assigned":
                self.mask = mask
            else:
                self.register_buffer("mask", mask, persistent=self.kind != "transient")
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[:length, :length])


class Counting(Layer):
    """Counts samples and sums what it has seen, in place; two buffers share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("first", self.get_buffer("seen")[:1])
        self.register_buffer("total", torch.zeros(WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("seen").add_(len(x))
            self.get_buffer("total").add_(x.detach().mean(1).sum(0))
        return x


class Remembering(Layer):
    """Keeps the means of the last samples that it has seen, in a buffer that is empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(0, WIDTH))

    def odd(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = torch.cat([self.get_buffer("kept"), x.detach().mean(1)])[-20:]
        return x


class Weighted(Layer):
    """Multiplies by a weight of any format, as ``use`` says."""

    def __init__(self, value: Tensor, use: Callable[[Tensor, Tensor], Tensor], *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(value, requires_grad=trained)
        self.use = use

    def odd(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Named(Tensor):
    """A subclass of tensors that adds nothing, as annotations of libraries are."""


class SparseTable(Layer):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def odd(self, x: Tensor) -> Tensor:
        added: Tensor = self.table((x[..., 0] > 0).long())
        return x + added


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors.to(x.dtype)


def scaled_as_plain(x: Tensor, factors: Tensor) -> Tensor:
    """What a subclass makes would be one itself, which no message carries."""
    return scaled(x, factors).as_subclass(Tensor)


def plus_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x + rows.sum(0).to(x.dtype)


def chosen(x: Tensor, places: Tensor) -> Tensor:
    return x[..., places]


def thirds(x: Tensor, held: Tensor) -> Tensor:
    """Computes in the format of what is held."""
    return x * (held + held / 3).float()


def half(dtype: torch.dtype) -> Callable[[], nn.Module]:
    """A buffer that float32 would round otherwise than its own format: added to in that format."""
    return lambda: Held(torch.rand(WIDTH).to(dtype), thirds)


KEPT: dict[str, Callable[[], nn.Module]] = {
    "complex buffer": lambda: Held(turns(), turned, persistent=False),
    "saved complex buffer": lambda: Held(turns(), turned),
    "complex128 buffer": lambda: Held(turns().to(torch.complex128), lambda x, b: turned(x, b.to(torch.complex64))),
    "sparse buffer": lambda: Held(adjacency().to_sparse(), joined, persistent=False),
    "sparse rows": lambda: Held(adjacency().to_sparse_csr(), joined, persistent=False),
    "unused sparse buffer": lambda: Held(adjacency().to_sparse(), lambda x, b: x, persistent=False),
    "float64 buffer": lambda: Held(torch.rand(WIDTH, dtype=torch.float64), waves),
    "float16 buffer": half(torch.float16),
    "bfloat16 buffer": half(torch.bfloat16),
    "buffer of no axis": lambda: Held(torch.tensor(0.7), scaled),
    "empty buffer": lambda: Held(torch.zeros(0, WIDTH), plus_rows),
    "expanded buffer": lambda: Held(torch.rand(1).expand(WIDTH), scaled),
    "transposed buffer": lambda: Held(torch.rand(WIDTH, WIDTH).T, lambda x, b: x @ b),
    "buffer of places": lambda: Held(torch.randperm(WIDTH), chosen),
    "buffer of truth values": lambda: Held(torch.rand(WIDTH) > 0.3, scaled),
    "buffer of a subclass": lambda: Held(torch.rand(WIDTH).as_subclass(Named), scaled_as_plain),
    **{f"mask, {kind}": partial(Growing, kind) for kind in
       ("registered", "assigned", "lazy", "transient", "first_in_forward")},
    "fading": Fading,
    "counts": Counting,
    "memory": Remembering,
    "complex weight": lambda: Weighted(turns(), turned),
    "frozen float64 weight": lambda: Weighted(torch.rand(WIDTH, dtype=torch.float64), waves, trained=False),
    "frozen bfloat16 weight": lambda: Weighted(torch.rand(WIDTH).bfloat16(), thirds, trained=False),
    "frozen places": lambda: Weighted(torch.randperm(WIDTH), chosen, trained=False),
    "frozen truth values": lambda: Weighted(torch.rand(WIDTH) > 0.3, scaled, trained=False),
    "empty weight": lambda: Weighted(torch.zeros(0, WIDTH), plus_rows),
    "weight of no axis": lambda: Weighted(torch.tensor(0.7), scaled),
    "transposed weight": lambda: Weighted(torch.rand(WIDTH, WIDTH).T, lambda x, w: x @ w),
    "sparse gradient": SparseTable,
}  # fmt: skip
"""What a run keeps exactly: each name makes its layer from torch's generator."""


def over_the_weight() -> nn.Module:
    made = Held(torch.zeros(1), lambda x, b: x @ b)
    made.held = made.linear.weight.data
    return made


def lazily() -> nn.Module:
    made = Held(torch.zeros(1), scaled)
    made.linear = nn.LazyLinear(WIDTH, bias=False)
    return made


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.rand(WIDTH), 0.1, 0, torch.quint8)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "float64 weight": (lambda: Weighted(torch.rand(WIDTH, dtype=torch.float64), scaled), "1.weight is float64"),
    "bfloat16 weight": (lambda: Weighted(torch.rand(WIDTH).bfloat16(), scaled), "1.weight is bfloat16"),
    "weight without a size": (lazily, "1.linear.weight must have a size"),
    "weight without values": (
        lambda: Weighted(torch.rand(WIDTH, device="meta"), scaled), "1.weight must have values",
    ),
    "quantized buffer": (lambda: Held(quantized(), lambda x, b: x), "1.held must be an ordinary tensor"),
    "nested buffer": (lambda: Held(nested(), lambda x, b: x), "1.held must be an ordinary tensor"),
    "saved sparse buffer": (
        lambda: Held(adjacency().to_sparse(), joined), "1.held must be registered with persistent=False",
    ),
    "sparse weight": (lambda: Weighted(adjacency().to_sparse(), joined), "1.weight must be dense"),
    "expanded weight": (lambda: Weighted(torch.rand(1).expand(WIDTH), scaled), "1.weight must have memory for each"),
    "buffer over a weight": (over_the_weight, "1.held must have memory of its own"),
}  # fmt: skip
"""What no run trains, and the words of its refusal where it is the second layer."""


def model(kinds: Any, seed: int = 3) -> nn.Sequential:
    """A model with a layer of each kind between two linear ones."""
    torch.manual_seed(seed)
    made = {**KEPT, **{kind: make for kind, (make, _) in REFUSED.items()}}
    return nn.Sequential(nn.Linear(4, WIDTH), *(made[kind]() for kind in kinds), nn.Linear(WIDTH, 3))


class Whole(nn.Module):
    """The same model as one module, which a pipeline must trace."""

    def __init__(self, kinds: Any) -> None:
        super().__init__()
        self.body = model(kinds)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x)
        return made


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows that are longer from one batch of eight to the next, beginning with any."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index = (index + self.start) % len(self)
        generator = torch.Generator().manual_seed(index)
        length = 3 + index // 8
        return torch.randn(length, 4, generator=generator), torch.randn(length, 3, generator=generator)


def data(start: int = 0) -> tuple[Rows, Rows]:
    return Rows(start), Rows()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)
