"""What the finder divides gives what the undivided module gives, and what it leaves whole has the right reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_shards import compared, count, found
from torch import Tensor, nn
from torch.nn import functional

from runner.model.fake import fake_tensors
from runner.model.sharded import shape_rules
from runner.model.sharded.finder import divided
from runner.model.sharded.group import ShardGroup
from runner.model.traced.cuts import good_cuts
from runner.model.traced.operators import trace
from runner.model.traced.segments import split
from runner.zoo.gpt import build

WIDTH, HEADS = 16, 4
EQUAL = 1e-12


@pytest.fixture(autouse=True)
def _doubles() -> None:
    torch.manual_seed(3)


class Attention(nn.Module):
    """Self-attention whose code says its heads, in one of several ways; [batch, length, width] in and out."""

    def __init__(self, way: str = "outer", heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.way, self.heads, self.size, self.rate = way, heads, WIDTH // HEADS, dropout
        self.width = heads * self.size
        self.packed = nn.Linear(WIDTH, 3 * self.width)
        self.out = nn.Linear(self.width, WIDTH)

    def parts(self, value: Tensor) -> Any:
        batch, length, _ = value.shape
        heads, size, packed = self.heads, self.size, self.packed(value)
        if self.way == "outer":
            return packed.view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "inner":
            return packed.view(batch, length, heads, 3 * size).transpose(1, 2).chunk(3, -1)
        if self.way == "middle":
            return packed.unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4).unbind(0)
        if self.way == "slices":
            cut = (packed[..., : self.width], packed[..., self.width : 2 * self.width], packed[..., -self.width :])
            return tuple(each.view(batch, length, heads, size).transpose(1, 2) for each in cut)
        parts = packed.chunk(3, dim=-1) if self.way == "merged" else packed.split(self.width, dim=2)
        parts = tuple(each.reshape(batch, length, heads, size).transpose(1, 2) for each in parts)
        return tuple(each.reshape(batch * heads, length, size) for each in parts) if self.way == "merged" else parts

    def forward(self, value: Tensor) -> Any:
        batch, length, _ = value.shape
        query, key, values = self.parts(value)
        scores = query @ key.transpose(-2, -1) / self.size**0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=value.device).tril()
        chances = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        mixed = functional.dropout(chances, self.rate, self.training) @ values
        if self.way == "merged":
            mixed = mixed.view(batch, self.heads, length, self.size)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, self.width))


class Mlp(nn.Module):
    def __init__(self, kind: str = "gelu", hidden: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.rate = kind, dropout
        pieces = 2 if kind in ("packed", "glu", "halves") else 1
        self.up = nn.Linear(WIDTH, pieces * hidden)
        self.gate = nn.Linear(WIDTH, hidden) if kind == "swiglu" else None
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, value: Tensor) -> Any:
        up = self.up(value)
        if self.kind == "swiglu" and self.gate is not None:
            hidden = functional.silu(self.gate(value)) * up
        elif self.kind == "packed":
            gate, up = up.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        elif self.kind == "halves":
            half = up.shape[-1] // 2
            hidden = up[..., :half].sigmoid() * up[..., half:]
        elif self.kind == "glu":
            hidden = functional.glu(up)
        elif self.kind == "inplace":
            hidden = functional.relu(up.mul_(2.0), inplace=True)
        else:
            hidden = functional.gelu(up)
        return self.down(functional.dropout(hidden, self.rate, self.training))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), attention
        self.second, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, value: Tensor) -> Any:
        value = value + self.attention(self.first(value))
        return value + self.mlp(self.second(value))


def blocks(
    number: int = 2, way: str = "outer", kind: str = "gelu", heads: int = HEADS, dropout: float = 0.0
) -> nn.Module:
    made = (Block(Attention(way, heads, dropout), Mlp(kind, dropout=dropout)) for _ in range(number))
    return nn.Sequential(*made).double()


def batch(length: int = 5) -> Tensor:
    return torch.randn(3, length, WIDTH, dtype=torch.float64)


@pytest.mark.costly
@pytest.mark.parametrize("way", ["outer", "inner", "middle", "slices", "split", "merged"])
def test_attention_divides_by_heads_however_they_are_packed(way: str) -> None:
    model = blocks(2 if way == "outer" else 1, way)
    sums = 2 * len([*model.children()])  # two for each block, each way
    programs = trace(model, batch(), "model")
    for degree in (2, 4):
        result = compared(model, batch(), degree, programs=programs)
        assert result.error < EQUAL
        assert not result.divided.left
        program = result.divided.programs[True]
        assert (count(program, "identity"), count(program, "all_reduce")) == (sums, sums)
        assert result.forward == result.backward == ["all_reduce"] * sums


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["swiglu", "packed", "halves", "glu", "inplace"])
def test_layers_between_which_only_elements_meet(kind: str) -> None:
    model = nn.Sequential(Mlp(kind), nn.Tanh(), Mlp(kind)).double()
    programs = trace(model, batch(), "model")
    for degree in (2, 4):
        result = compared(model, batch(), degree, programs=programs)
        assert result.error < EQUAL
        assert not result.divided.left
        assert result.forward == result.backward == ["all_reduce"] * 2


def test_three_ranks_divide_three_heads_and_not_what_is_packed_of_them() -> None:
    result = compared(blocks(1, heads=3), batch(), 3)
    assert result.error < EQUAL
    assert result.divided.shards["0.attention.packed.weight"].pieces == 3


@pytest.mark.costly
def test_the_shipped_gpt_whole_and_cut() -> None:
    model = nn.Sequential(*(layer() for layer in build(31, 8, WIDTH, 2, HEADS).layers())).double()
    tokens = torch.randint(31, (3, 6))
    programs = trace(model, tokens, "model")
    for degree, training in ((2, True), (4, True), (2, False)):
        result = compared(model, tokens, degree, training=training, cut=True, programs=programs)
        assert result.error < EQUAL
        whole = ["0.tokens.weight", "0.positions.weight", "3.to_logits.weight"]
        assert [left.name for left in result.divided.left] == whole
        assert result.forward == result.backward == ["all_reduce"] * 4
        assert len(result.cuts) > 3
        assert not set(result.cuts) & result.divided.programs[True].uncut


def test_a_block_of_the_shipped_gpt_alone() -> None:
    block = build(31, 8, WIDTH, 1, HEADS).layers()[1]().double()
    programs = trace(block, batch(), "model")
    for degree in (2, 4):
        result = compared(block, batch(), degree, programs=programs)
        assert result.error < EQUAL
        assert result.forward == result.backward == ["all_reduce"] * 2


def test_a_trace_serves_other_sizes() -> None:
    model = blocks(1, "merged")
    programs = trace(model, batch(), "model")
    assert compared(model, torch.randn(2, 9, WIDTH, dtype=torch.float64), 2, programs=programs).error < EQUAL


@pytest.mark.costly
@pytest.mark.parametrize("way", ["outer", "inner", "merged"])
def test_each_rank_drops_its_part_of_what_one_process_drops(way: str) -> None:
    """Dropout of scores and of hidden features, divided, and then of a whole value and of packed features.

    Where scores have samples and heads as one axis, a rank's part of the mask is its heads of each sample.
    """
    model = nn.Sequential(blocks(1, way, dropout=0.4), nn.Dropout(0.5), Mlp("packed", dropout=0.3)).double()
    programs = trace(model, batch(), "model")
    for degree, training in ((2, True), (4, True), (2, False)):
        result = compared(model, batch(), degree, training=training, programs=programs)
        assert result.error < EQUAL
        assert [dropout.exact for dropout in result.divided.dropouts] == [True] * 3
        assert result.forward == result.backward == ["all_reduce"] * 3


def test_a_trace_with_dropout_of_merged_scores_serves_other_sizes() -> None:
    model = blocks(1, "merged", dropout=0.4)
    programs = trace(model, batch(), "model")
    result = compared(model, torch.randn(2, 9, WIDTH, dtype=torch.float64), 2, training=True, programs=programs)
    assert result.error < EQUAL
    assert len(result.divided.dropouts) == 2


def test_dropout_inside_attention_is_told() -> None:
    model = nn.Sequential(*(layer() for layer in build(31, 8, WIDTH, 1, HEADS, dropout=0.1).layers()[1:2]))
    dropouts = found(model, torch.randn(3, 5, WIDTH), 2).dropouts
    assert [(dropout.dim, dropout.exact) for dropout in dropouts] == [(1, False)]


class Cross(nn.Module):
    """Attention of one value to another one, with more query than key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, memory: Tensor) -> Any:
        query = self.norm(self.query(value).unflatten(-1, (HEADS, 4))).transpose(1, 2) * self.scale
        key, values = self.key_value(memory).view(*memory.shape[:2], 2, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, values, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_cross_attention_with_weights_for_each_head_and_for_all() -> None:
    memory = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    result = compared(Cross().double(), (batch(), memory), 2)
    assert result.error < EQUAL
    assert result.divided.shards["scale"].dim == 0
    assert result.forward == ["all_reduce"]
    assert result.backward == ["all_reduce"] * 4


class Adapted(nn.Module):
    """A linear layer and a product of two thin ones beside it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside)
        self.thin, self.wide = nn.Linear(inside, 4, bias=False), nn.Linear(4, outside, bias=False)

    def forward(self, value: Tensor) -> Any:
        return self.base(value) + 2.0 * self.wide(self.thin(functional.dropout(value, 0.0, self.training)))


def test_adapters_of_columns_and_rows() -> None:
    model = nn.Sequential(Adapted(WIDTH, 24), nn.GELU(), Adapted(24, WIDTH)).double()
    result = compared(model, batch(), 4)
    assert result.error < EQUAL
    assert {name: shard.dim for name, shard in result.divided.shards.items()} == {
        "0.base.bias": 0,
        "0.base.weight": 0,
        "0.wide.weight": 0,
        "2.base.weight": 1,
        "2.thin.weight": 1,
    }
    assert [left.name for left in result.divided.left] == ["0.thin.weight", "2.wide.weight"]


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp("swiglu")

    def forward(self, value: Tensor) -> Any:
        normed = self.norm(value)
        return value + self.attention(normed) + self.mlp(normed)


def test_layers_on_one_input_share_its_entry() -> None:
    result = compared(nn.Sequential(Parallel(), Parallel()).double(), batch(), 2, cut=True)
    assert result.error < EQUAL
    assert (result.forward, result.backward) == (["all_reduce"] * 4, ["all_reduce"] * 2)


class Shared(nn.Module):
    """One layer that runs three times, and a product with a turned weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, value: Tensor) -> Any:
        for _ in range(3):
            value = value + self.mlp(value)
        return (value @ self.up).relu() @ self.down.t()


def test_weights_that_several_operators_read() -> None:
    result = compared(Shared().double(), batch(), 2, cut=True)
    assert result.error < EQUAL
    assert {name: shard.dim for name, shard in result.divided.shards.items()} == {
        "mlp.down.weight": 1,
        "mlp.up.bias": 0,
        "mlp.up.weight": 0,
        "up": 1,
        "down": 1,
    }


@pytest.mark.costly
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_layer_of_torch(first: bool, training: bool) -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=first, norm_first=first).double()
    for parameter in model.parameters():  # its fast path does not compute the same operators
        parameter.requires_grad_()
    result = compared(model, batch(), 2, training=training)
    assert result.error < EQUAL
    assert result.forward == ["all_reduce"] * (2 if not result.divided.left else 1)


# What stays whole


class Odd(nn.Module):
    """Two layers between which a function stands; ``inside`` features of the first one."""

    def __init__(self, between: Callable[[Tensor], Tensor], hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), between

    def forward(self, value: Tensor) -> Any:
        return self.down(self.between(self.up(value)))


class Normed(nn.Module):
    """Attention whose norm is over all heads' features at once."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, value: Tensor) -> Any:
        parts = self.norm(self.query(value)), self.key(value), self.value(value)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        return self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Twice(nn.Module):
    """A weight that is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, value: Tensor) -> Any:
        return self.mlp(value), self.mlp.up.weight.square().sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.mlp = nn.LSTM(WIDTH, WIDTH, batch_first=True), Mlp()

    def forward(self, value: Tensor) -> Any:
        return self.mlp(self.lstm(value)[0])


class OnlyTraining(nn.Module):
    """Divisible in training, and not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, value: Tensor) -> Any:
        up = functional.gelu(self.mlp.up(value))
        return self.mlp.down(up if self.training else up.softmax(-1))


WHOLE: list[tuple[str, Callable[[], nn.Module], dict[str, str]]] = [
    (
        "heads",
        lambda: blocks(1, heads=3),
        {"0.attention.packed.weight": "makes 3 of the features, which 2 does not divide"},
    ),
    (
        "norm",
        Normed,
        {"norm": "", "query.weight": "layer_norm over the divided features", "key.weight": "query.weight"},
    ),
    ("softmax", lambda: Odd(lambda value: value.softmax(-1)), {"up.weight": "softmax over the divided features"}),
    ("sort", lambda: Odd(lambda value: value.sort(-1)[0]), {"up.weight": "sort of divided features is not followed"}),
    ("odd", lambda: Odd(torch.tanh, hidden=7), {"up.weight": "2 does not divide its 7 features"}),
    ("noise", lambda: Odd(lambda value: value + torch.rand_like(value)), {"up.weight": "draws random numbers"}),
    ("flip", lambda: Odd(lambda value: value.flip(-1)), {"up.weight": "flip of divided features is not followed"}),
    ("read", Twice, {"mlp.up.weight": "reads it whole"}),
    ("lstm", Recurrent, {"lstm.weight_ih_l0": "a recurrent layer is not divided"}),
    ("modes", OnlyTraining, {"mlp.up.weight": "softmax over the divided features"}),
    ("alone", lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), {"1.weight": "leaves the model"}),
]


@pytest.mark.costly
@pytest.mark.parametrize(("make", "reasons"), [each[1:] for each in WHOLE], ids=[each[0] for each in WHOLE])
def test_what_cannot_be_divided_stays_whole_and_says_why(
    make: Callable[[], nn.Module], reasons: dict[str, str]
) -> None:
    model = make().double()
    result = found(model, batch(), 2)
    left = {each.name: each.reason for each in result.left}
    for name, reason in reasons.items():
        if reason:
            assert reason in left[name]
            assert name not in result.shards
    assert all(str(each).startswith(f"left whole: {each.name}: ") for each in result.left)
    if "draws random numbers" not in reasons.values():
        assert compared(model, batch(), 2).error < EQUAL


def test_two_ranks_that_divide_nothing_have_the_traced_program() -> None:
    model = Odd(lambda value: value.softmax(-1))
    result = found(model, torch.randn(3, WIDTH), 2)
    assert not result.shards
    assert not result.programs[True].uncut
    assert [count(result.programs[True], name) for name in ("identity", "all_reduce", "own")] == [0, 0, 0]


class Changed(nn.Module):
    """Two layers that read one value, which is changed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.gate, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, value: Tensor) -> Any:
        read = value * 2.0
        query = self.query(read.clone())
        hidden = read.view(-1, WIDTH)
        gate = self.gate(hidden)
        read.mul_(0.0)
        return self.down(query * gate.view_as(query)) + read.sum()


def test_a_value_that_is_changed_after_it_was_read() -> None:
    """The gate's entry is a copy, so that what it read stays what it was."""
    model = Changed().double().requires_grad_(False)
    model.down.requires_grad_()
    assert compared(model, batch(), 2).error < EQUAL


def test_a_rule_that_errs_is_noticed_and_the_layers_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_rules, "_divide_literal", lambda *_: None)  # as if sizes could stay what they are
    model = nn.Sequential(Mlp(), Odd(lambda value: value.reshape(*value.shape[:-1], 4, 2).tanh().flatten(-2))).double()
    result = compared(model, batch(), 2)
    assert result.error < EQUAL
    assert sorted(result.divided.shards) == ["0.down.weight", "0.up.bias", "0.up.weight"]
    left = {each.name: each.reason for each in result.divided.left}
    assert "reshape cannot be divided" in left["1.up.weight"]


@pytest.mark.costly
def test_shapes_alone_are_divided_without_memory() -> None:
    """As a plan does: model, trace, parts and run are of fake tensors."""
    with fake_tensors():
        model = nn.Sequential(Block(Attention(), Mlp()), Block(Attention("inner"), Mlp("glu", dropout=0.1)))
        programs = trace(model, torch.randn(3, 5, WIDTH), "model")
        result = divided(model, programs, group := ShardGroup(4, 1))
        parameters = dict(model.named_parameters())
        for name, shard in result.shards.items():
            parameters[name].data = shard.cut(parameters[name].data)
        chain = [
            segment
            for _, segment in split(model, result.programs, good_cuts(result.programs[True], result.programs[False], 1))
        ]
        value: Any = torch.randn(3, 5, WIDTH, requires_grad=True)
        for segment in chain:
            value = segment(value)
        value.sum().backward()
    assert group.degree == 4
    gradient = parameters["0.attention.packed.weight"].grad
    assert gradient is not None
    assert gradient.shape == (12, WIDTH)
    assert len(chain) > 2
