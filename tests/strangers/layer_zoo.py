"""A zoo of layers as models use them: each makes a module and its inputs, on whatever tensors are made there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LAYERS", "Case", "calling", "numbers", "of"]

Case = Callable[[], "tuple[Callable[..., Any], tuple[Any, ...]]"]
Input = tuple[int, ...] | Callable[[], Any]


def draw(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def numbers(below: int, *shape: int) -> Callable[[], Tensor]:
    """Makes whole numbers below a limit."""
    return lambda: torch.arange(torch.Size(shape).numel()).reshape(shape) % below


def last_channels(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()


def narrow(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16).requires_grad_()


def of(make: Callable[[], Callable[..., Any]], *inputs: Input) -> Case:
    """A module that ``make`` makes, with random inputs of these shapes, or those that a callable makes."""
    return lambda: (make(), tuple(each() if callable(each) else draw(*each) for each in inputs))


def calling(function: Callable[..., Any], *inputs: Input) -> Case:
    """A function without weights."""
    return of(lambda: function, *inputs)


def with_dtype(make: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return make()
        finally:
            torch.set_default_dtype(before)

    return made


class Cast(nn.Module):
    """Its module under autocast to bf16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*values)


_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "no bias": {"bias": False}, "stride": {"stride": 2, "padding": 1}, "groups": {"groups": 8},
    "dilation": {"dilation": 2, "padding": "same"}, "circular": {"padding": 1, "padding_mode": "circular"},
}  # fmt: skip
_ATTENDING: dict[str, dict[str, Any]] = {"": {}, "causal": {"is_causal": True}, "dropout": {"dropout_p": 0.1}}
_ATTENTIONS: dict[str, dict[str, Any]] = {
    "": {}, "dropout": {"dropout": 0.1}, "no bias": {"bias": False}, "bias_kv": {"add_bias_kv": True},
    "first": {"batch_first": True}, "widths": {"kdim": 8, "vdim": 8}, "zero": {"add_zero_attn": True},
}  # fmt: skip
_TRANSFORMERS: dict[str, dict[str, Any]] = {"": {}, "norm first": {"norm_first": True}, "gelu": {"activation": "gelu"}}
_RECURRENT: tuple[dict[str, Any], ...] = (
    {}, {"batch_first": True}, {"bidirectional": True}, {"bias": False}, {"dropout": 0.2}, {"proj_size": 5},
    {"nonlinearity": "relu"},
)  # fmt: skip
_FORMATS: tuple[tuple[str, tuple[Any, ...], tuple[int, ...]], ...] = (
    ("LSTM", (9, 17), (6, 4, 9)), ("GRU", (9, 17), (3, 4, 9)), ("Linear", (9, 17), (6, 4, 9)),
    ("Conv2d", (8, 16, 3), (3, 8, 12, 12)), ("BatchNorm2d", (8,), (3, 8, 12, 12)), ("LayerNorm", (16,), (5, 3, 16)),
    ("TransformerEncoderLayer", (16, 4, 32), (5, 3, 16)),
)  # fmt: skip


def convolutions() -> Iterator[tuple[str, Case]]:
    for axes in (1, 2, 3):
        plain, transposed = getattr(nn, f"Conv{axes}d"), getattr(nn, f"ConvTranspose{axes}d")
        size = (9,) * axes
        for name, options in _CONVOLUTIONS.items():
            yield f"conv{axes}d {name}", of(partial(plain, 8, 16, 3, **options), (3, 8, *size))
        yield f"conv{axes}d odd channels", of(partial(plain, 5, 7, 3), (3, 5, *size))
        yield f"conv{axes}d pointwise", of(partial(plain, 8, 16, 1), (3, 8, *size))
        options = {"stride": 2, "padding": 1, "output_padding": 1}
        yield f"transposed conv{axes}d", of(partial(transposed, 8, 5, 3, **options), (3, 8, *size))
    yield "conv2d channels last", of(partial(nn.Conv2d, 8, 16, 3), last_channels(3, 8, 12, 12))
    yield "conv2d one sample", of(partial(nn.Conv2d, 8, 16, 3), (1, 8, 12, 12))
    yield "conv2d unbatched", of(partial(nn.Conv2d, 8, 16, 3), (8, 12, 12))
    yield "depthwise", of(partial(nn.Conv2d, 32, 32, 3, groups=32, padding=1), (4, 32, 16, 16))
    yield "im2col", of(partial(nn.Unfold, 3, padding=1), (2, 3, 6, 6))
    yield "im2col stride", of(partial(nn.Unfold, 3, stride=3), (2, 3, 6, 6))
    yield "col2im", of(partial(nn.Fold, (6, 6), 3, padding=1), (2, 27, 36))
    yield "tensor.unfold", calling(lambda x: x.unfold(1, 3, 2), (4, 9))
    yield "pixel shuffle", of(partial(nn.PixelShuffle, 2), (2, 8, 3, 3))
    yield "pixel unshuffle", of(partial(nn.PixelUnshuffle, 2), (2, 2, 6, 6))


def pools_and_norms() -> Iterator[tuple[str, Case]]:
    for axes in (1, 2, 3):
        shape = (3, 4, *(8,) * axes)
        for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
            yield f"{name}{axes}d", of(partial(getattr(nn, f"{name}{axes}d"), 3), shape)
        yield f"LPPool{axes}d", of(partial(getattr(nn, f"LPPool{axes}d"), 2, 3), shape)
        yield f"MaxUnpool{axes}d", calling(partial(unpooled, axes), shape)
        for name in ("BatchNorm", "InstanceNorm"):
            for affine in (True, False):
                make = partial(getattr(nn, f"{name}{axes}d"), 4, affine=affine, track_running_stats=affine)
                yield f"{name}{axes}d affine={affine}", of(make, shape)
        for name in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            yield f"{name}{axes}d", of(partial(getattr(nn, f"{name}{axes}d"), 2), shape)
        yield f"Dropout{axes}d", of(partial(getattr(nn, f"Dropout{axes}d"), 0.3), shape)
    for make in (
        partial(nn.FractionalMaxPool2d, 3, output_size=5), partial(nn.LocalResponseNorm, 3),
        partial(nn.GroupNorm, 2, 8),
    ):  # fmt: skip
        yield str(make()), of(make, (2, 8, 12, 12))
    yield "GroupNorm channels last", of(partial(nn.GroupNorm, 2, 8), last_channels(4, 8, 5, 5))
    yield "BatchNorm2d channels last", of(partial(nn.BatchNorm2d, 8), last_channels(3, 8, 12, 12))
    for name, make, shape in (
        ("BatchNorm2d", partial(nn.BatchNorm2d, 8), (3, 8, 5, 5)), ("LayerNorm", partial(nn.LayerNorm, 9), (4, 7, 9)),
        ("GroupNorm", partial(nn.GroupNorm, 2, 8), (4, 8, 5, 5)),
    ):  # fmt: skip
        yield f"{name} of a narrow input", of(make, partial(narrow, *shape))
    for make in (partial(nn.LayerNorm, 33), partial(nn.LayerNorm, 33, bias=False), partial(nn.RMSNorm, 33)):
        yield str(make()), of(make, (4, 7, 33))
    parametrizations = nn.utils.parametrizations
    yield "spectral norm", of(lambda: parametrizations.spectral_norm(nn.Linear(9, 11)), (4, 9))
    yield "weight norm", of(lambda: parametrizations.weight_norm(nn.Linear(9, 11)), (4, 9))
    yield "orthogonal", of(lambda: parametrizations.orthogonal(nn.Linear(9, 9)), (4, 9))


def unpooled(axes: int, value: Tensor) -> Tensor:
    pooled, places = getattr(functional, f"max_pool{axes}d")(value, 2, return_indices=True)
    made: Tensor = getattr(functional, f"max_unpool{axes}d")(pooled, places, 2)
    return made


_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.ReLU,
    nn.ReLU6, nn.RReLU, nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.GLU, nn.Dropout, nn.AlphaDropout, nn.Flatten,
)  # fmt: skip
_METHODS: dict[str, tuple[Any, ...]] = {
    "erf": (), "mean": (), "topk": (3,), "kthvalue": (2,), "roll": (2,), "clamp": (-1, 1), "repeat_interleave": (2,),
    "cumsum": (1,), "cumprod": (1,), "logcumsumexp": (1,), "logsumexp": (1,), "var": (1,), "std": (1,), "amax": (1,),
    "prod": (1,), "max": (1,), "median": (1,), "sort": (1,), "softmax": (1,), "diff": (1,), "flip": (1,), "tril": (1,),
    "cummax": (1,), "mode": (1,), "unbind": (1,), "norm": (1,), "renorm": (2, 0, 1.0), "quantile": (0.5,),
    "repeat": (2, 3),
}  # fmt: skip


def elementwise() -> Iterator[tuple[str, Case]]:
    for kind in _ACTIVATIONS:
        yield kind.__name__, of(kind, (6, 34))
    for name in ("Softmin", "Softmax", "LogSoftmax"):
        yield name, of(partial(getattr(nn, name), -1), (6, 34))
    yield "ReLU in place", of(lambda: nn.Sequential(nn.Linear(34, 34), nn.ReLU(True)), (6, 34))
    for name, arguments in _METHODS.items():
        yield name, calling(partial(method, name, arguments), (4, 9))
    shape = (4, 8)
    yield "normalize", calling(functional.normalize, shape)
    yield "i0", calling(torch.special.i0, shape)
    yield "gumbel_softmax", calling(partial(functional.gumbel_softmax, hard=True), shape)
    yield "bernoulli", calling(lambda x: x * torch.bernoulli(torch.full(shape, 0.5)), shape)
    yield "one_hot", calling(lambda x: functional.one_hot(torch.arange(4), 4).float() @ x, shape)
    yield "pad", calling(lambda x: functional.pad(x, (1, 2)), shape)
    yield "complex", calling(lambda x: torch.view_as_complex(x.view(4, 4, 2)).abs(), shape)
    yield "randperm", calling(lambda x: x[torch.randperm(4)], shape)
    yield "where", calling(lambda x, y: torch.where(x > 0, x, y), shape, shape)
    yield "masked_fill", calling(lambda x: x.masked_fill(x > 0, 0.0), shape)
    yield "cat", calling(lambda x, y: torch.cat([x, y]), shape, (2, 8))
    yield "stack", calling(lambda x, y: torch.stack([x, y]), shape, shape)
    for function in (functional.cosine_similarity, functional.pairwise_distance):
        yield function.__name__, calling(function, shape, shape)


def method(name: str, arguments: tuple[Any, ...], value: Tensor) -> Any:
    return getattr(value, name)(*arguments)


def attention() -> Iterator[tuple[str, Case]]:
    attend = functional.scaled_dot_product_attention
    for width in (16, 17):
        shape = (2, 4, 19, width)
        for name, options in _ATTENDING.items():
            yield f"sdpa {width} {name}", calling(partial(attend, **options), shape, shape, shape)
    yield "sdpa cross", calling(attend, (2, 4, 19, 16), (2, 4, 7, 16), (2, 4, 7, 16))
    grouped = partial(attend, enable_gqa=True)
    yield "sdpa grouped", calling(grouped, (2, 4, 19, 16), (2, 2, 19, 16), (2, 2, 19, 16))
    masked = lambda q, k, v: attend(q, k, v, attn_mask=torch.ones(19, 19, dtype=torch.bool))  # noqa: E731
    yield "sdpa mask", calling(masked, *((2, 4, 19, 16),) * 3)
    yield "sdpa trained mask", calling(attend, *((2, 4, 19, 16),) * 3, (19, 19))
    yield "sdpa long", calling(partial(attend, is_causal=True), *((1, 2, 600, 32),) * 3)
    for name, options in _ATTENTIONS.items():
        width = options.get("kdim", 16)
        for weights in (True, False):
            make = partial(Attention, options, weights)
            yield f"attention {name} {weights}", of(make, (5, 3, 16), (5, 3, width), (5, 3, width))
    for name, options in _TRANSFORMERS.items():
        yield f"encoder {name}", of(partial(nn.TransformerEncoderLayer, 16, 4, 32, **options), (5, 3, 16))
        yield f"decoder {name}", of(partial(nn.TransformerDecoderLayer, 16, 4, 32, **options), (5, 3, 16), (7, 3, 16))
    yield "transformer", of(partial(nn.Transformer, 16, 4, 2, 2, 32), (5, 3, 16), (7, 3, 16))


class Attention(nn.Module):
    def __init__(self, options: dict[str, Any], weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(16, 4, **options), weights

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attention(query, key, value, need_weights=self.weights)


def recurrent() -> Iterator[tuple[str, Case]]:
    for name, steps in (("RNN", 3), ("GRU", 3), ("LSTM", 6)):
        kind = getattr(nn, name)
        for layers in (1, 2, 3):
            for options in _RECURRENT:
                wrong = {"proj_size": name != "LSTM", "nonlinearity": name != "RNN", "dropout": layers == 1}
                if not any(wrong.get(option, False) for option in options) and (layers < 3 or name == "LSTM"):
                    yield f"{name} {layers} {options}", of(partial(kind, 9, 17, layers, **options), (steps, 4, 9))
        yield f"{name} packed", of(partial(within, Packed, kind), (5, 4, 9))
        yield f"{name} unbatched", of(partial(kind, 9, 17), (steps, 9))
        yield f"{name} untrained input", of(partial(kind, 9, 17), partial(torch.randn, steps, 4, 9))
        yield f"{name} frozen", of(partial(frozen, kind), (steps, 4, 9))
        yield f"{name} wide", of(partial(kind, 64, 64), (steps, 8, 64))
        yield f"{name} cell", of(partial(getattr(nn, f"{name}Cell"), 9, 17), (4, 9))
    yield "LSTM last state", of(partial(within, LastState, nn.LSTM), (6, 4, 9))
    for dtype in (torch.bfloat16, torch.float64):
        inputs = partial(draw, 6, 4, 9, dtype=dtype)
        yield f"LSTM {dtype}", of(with_dtype(partial(nn.LSTM, 9, 17), dtype), inputs)


def within(wrapper: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    return wrapper(kind(9, 17))


def frozen(kind: type[nn.Module]) -> nn.Module:
    return kind(9, 17).requires_grad_(False)


class Packed(nn.Module):
    """A recurrent layer that is given sequences of several lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(value, torch.tensor([5, 4, 2, 1]))
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]


class LastState(nn.Module):
    """A recurrent layer of which only the last state is used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Tensor) -> Any:
        return self.layer(value)[1][0]


def formats() -> Iterator[tuple[str, Case]]:
    """Modules in bf16, and under autocast."""
    for name, arguments, shape in _FORMATS:
        make: Callable[[], nn.Module] = partial(getattr(nn, name), *arguments)
        yield f"autocast {name}", of(partial(autocast, make), shape)
        inputs = partial(draw, *shape, dtype=torch.bfloat16)
        yield f"bf16 {name}", of(with_dtype(make, torch.bfloat16), inputs)


def autocast(make: Callable[[], nn.Module]) -> nn.Module:
    return Cast(make())


LAYERS = (convolutions, pools_and_norms, elementwise, attention, recurrent, formats)
"""Families, which give names and cases."""
