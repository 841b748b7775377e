"""Substitutions in layers: what is computed stays equal to rounding, with its gradients, and names of weights stay."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import substituted_models
import torch
from substituted_models import Attending, Gated, Table
from tensor_models import LENGTH, TOKENS
from test_kernels import COMMON, plain, run, weights_of
from thread_runs import result
from torch import Tensor, nn
from torch.nn import functional
from whole_runs import peaks

from runner.config.schema import SUBSTITUTIONS as NAMES
from runner.errors import RequestError
from runner.model.kernels.choice import Kernels
from runner.model.kernels.draft import Draft
from runner.model.kernels.substituting import Substituting, substituting_of
from runner.model.kernels.substitutions import SUBSTITUTIONS, substituted
from runner.model.layers import LayerSource
from runner.model.traced.operators import trace_mode

WIDTH = substituted_models.WIDTH
_MODELS = tuple(f"{part}.target=substituted_models:{what}" for part, what in (("data", "data"), ("loss", "loss")))


class Biased(nn.Module):
    """Attention without an axis of heads, whose scores are in 32 bits and get a learned part and a hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.map = nn.Parameter(torch.randn(LENGTH, LENGTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        tokens = value.shape[1]
        later = torch.ones(tokens, tokens, device=value.device).triu(1).bool()
        scores = torch.bmm(0.5 * self.map(value), value.transpose(1, 2)) + self.near[:tokens, :tokens]
        shares = functional.softmax(torch.where(later, -1e9, scores).float(), 2)
        return torch.bmm(shares.type_as(value), value)


class Scaled(nn.Module):
    """Factors in a row, before torch's attention, and behind a product that is larger than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        query, key = self.query(value) * 0.3, self.key(value) / 2
        mixed = functional.scaled_dot_product_attention((query * 2).unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        return mixed.squeeze(1) + functional.dropout((query @ key.mT) * 0.25, 0.1, self.training) @ value


class Cast(nn.Module):
    """Turned and turned back, cast to a wider format and back."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Any:
        turned = self.map(value).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return turned.double().to(value.dtype).sin()


class Counts(nn.Module):
    """A norm that counts the samples in a number without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.norm(value.mT * 1).mT
        return made + 0


class Adapted(Gated):
    """One of whose maps is frozen, and whose numbers are whole for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value + (value.long() * 2 * 3).to(value.dtype))


def compared(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> Kernels:
    """Compare a layer with itself as it is written, on some inputs."""
    own = deepcopy(module)
    kernels = Kernels({}, substitutions=Substituting(names, of_preset=False))
    (source,) = kernels.of_layers([LayerSource(0, "0", lambda: own)])
    layer = source.calling(source.build())
    for value in inputs:
        results = []
        for function, parameters in ((module, module.parameters()), (layer, own.parameters())):
            given = value.clone().requires_grad_(value.is_floating_point())
            torch.manual_seed(5)
            output = function(given)
            loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
            gradients = torch.autograd.grad(
                loss,
                [each for each in (*parameters, given) if each.requires_grad],
                allow_unused=True,
                materialize_grads=True,
            )
            results.append((output, *gradients))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=2e-6)
    assert own.state_dict().keys() == module.state_dict().keys()
    return kernels


def values(*samples: int) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(count, LENGTH - at, WIDTH) for at, count in enumerate(samples, 1)]


@pytest.mark.parametrize(
    ("make", "name", "places"),
    [
        (Attending, "attention", 1),
        (Attending, "cancel_reshapes", 1),
        (Attending, "drop_identities", 4),
        (Attending, "fold_scales", 1),
        (Attending, "merge_linears", 1),
        (Gated, "merge_linears", 1),
        (Gated, "fold_scales", 1),
        (Adapted, "fold_scales", 1),
        (Biased, "attention", 1),
        (Scaled, "fold_scales", 2),
        (Cast, "cancel_reshapes", 2),
        (Counts, "drop_identities", 2),
    ],
)
def test_each_is_equal_in_values_and_gradients(make: Callable[[], nn.Module], name: str, places: int) -> None:
    kernels = compared(make(), [name], values(5, 3, 1))
    assert kernels.substituted() == (f"{name} at {places} place{'s' * (places > 1)}",)
    assert not kernels.left
    assert not [*kernels.problems(), *kernels.notes()]


def test_a_product_with_rows_of_zeros_and_a_one_is_a_row() -> None:
    kernels = compared(Table(), ["one_hot"], [torch.randint(TOKENS, (samples, 7)) for samples in (3, 5)])
    assert kernels.substituted() == ("one_hot at 2 places",)


def test_all_together_are_equal_with_dropout_too() -> None:
    made = compared(Attending(0.2), NAMES, values(4, 2)).substituted()
    assert not any(each.startswith("attention") for each in made)  # it would draw otherwise
    assert any(each.startswith("fold_scales") for each in made)
    module = Attending(0.2)
    module.eval()
    assert not compared(module, NAMES, values(4)).substituted()  # counted in training


class Reads(Attending):
    """Gives the mean of its attention's probabilities, too."""

    def forward(self, value: Tensor) -> Any:
        scores = self.query(value) @ self.key(value).mT
        shares = scores.softmax(-1)
        return shares @ value + shares.mean()


class Visible(Reads):
    """Whose mask lets through what it hides in part."""

    def forward(self, value: Tensor) -> Tensor:
        scores = self.query(value) @ value.mT
        hidden = self.seen[: value.shape[1], : value.shape[1]] == 0
        made: Tensor = scores.masked_fill(hidden, -1.0).softmax(-1) @ value
        return made


class Padded(nn.Module):
    """Attention whose scores a mask of the ids hides, with a number in their place.

    Args:
        number: the number.
        kind: the format of the weights; scores are in 32 bits.
        causal: whether a mask of their places hides them, which leaves each row at least one.
    """

    def __init__(self, number: float, kind: torch.dtype = torch.float32, *, causal: bool = False) -> None:
        super().__init__()
        self.rows, self.query = nn.Embedding(TOKENS, WIDTH, dtype=kind), nn.Linear(WIDTH, WIDTH, dtype=kind)
        self.number, self.causal = number, causal

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        scores = (self.query(rows) @ rows.mT).float()
        later = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).triu(1).bool()
        hidden = later if self.causal else (ids == 0).unsqueeze(1)
        made: Tensor = scores.masked_fill(hidden, self.number).softmax(-1).to(rows.dtype) @ rows
        return made


class Masked(nn.Module):
    """Attention whose mask is a number in 32 bits for each token, and whose scores an input is added to, if asked.

    Args:
        adds: whether the input is added to scores in which a constant mask hides some.
    """

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.query, self.adds = nn.Linear(WIDTH, WIDTH), adds

    def forward(self, value: Tensor, seen: Tensor) -> Tensor:
        scores = self.query(value) @ value.mT
        hidden = torch.ones(value.shape[1], value.shape[1]).triu(1).bool() if self.adds else seen.unsqueeze(1) == 0
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        made: Tensor = (scores + seen.unsqueeze(1) if self.adds else scores).softmax(-1) @ value
        return made


def ids_with_a_hidden_row() -> Tensor:
    torch.manual_seed(4)
    ids = torch.randint(TOKENS, (4, 7))
    ids[1] = 0
    return ids


_LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("number", [-1e4, -1e9, _LEAST])
def test_a_mask_that_may_hide_rows_whole_stays_where_a_sum_is_something_else(number: float) -> None:
    kernels = compared(Padded(number), ["attention"], [ids_with_a_hidden_row()])
    assert not kernels.substituted()


@pytest.mark.parametrize("adds", [False, True])
def test_so_does_one_that_an_input_of_floating_numbers_makes(adds: bool) -> None:
    kernels = Kernels({}, substitutions=Substituting(["attention"], of_preset=False))
    (source,) = kernels.of_layers([LayerSource(0, "0", lambda: Masked(adds=adds))])
    source.build()(values(4)[0], torch.ones(4, LENGTH - 1))
    assert not kernels.substituted()


def test_minus_infinity_hides_rows_whole_without_a_word_of_the_trial() -> None:
    module = Padded(float("-inf"))
    kernels = Kernels({}, substitutions=Substituting(["attention"], of_preset=False))
    (source,) = kernels.of_layers([LayerSource(0, "0", lambda: deepcopy(module))])
    layer, ids = source.calling(source.build()), ids_with_a_hidden_row()
    made, written = layer(ids), module(ids)
    assert kernels.substituted() == ("attention at 1 place",)
    assert written[1].isnan().all()
    assert not made.isnan().any()  # the documents say so
    torch.testing.assert_close(made[[0, 2, 3]], written[[0, 2, 3]])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [-1e9, _LEAST])
def test_low_numbers_hide_in_any_format(kind: torch.dtype, number: float) -> None:
    kernels = Kernels({}, substitutions=Substituting(["attention"], of_preset=False))
    module = Padded(number, kind, causal=True)
    (source,) = kernels.of_layers([LayerSource(0, "0", lambda: deepcopy(module))])
    ids = ids_with_a_hidden_row()
    made, written = source.calling(source.build())(ids), module(ids)
    assert kernels.substituted() == ("attention at 1 place",)
    close = 4 * torch.finfo(kind).eps
    torch.testing.assert_close(made, written, rtol=close, atol=4 * close)


class Viewing(nn.Module):
    """Attention of heads, whose product a view reads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        samples, tokens, _ = value.shape
        query = self.query(value).view(samples, tokens, 4, -1).transpose(1, 2)
        made: Tensor = ((query @ query.mT).softmax(-1) @ query).view(samples, tokens, WIDTH)
        return made


def test_attention_lies_in_memory_as_the_product_did() -> None:
    kernels = compared(Viewing(), NAMES, values(4))
    assert any(each.startswith("attention") for each in kernels.substituted())
    (program,) = _traces(Viewing(), values(4)[0], NAMES)
    order = [str(node.target) for node in program.nodes]
    at = next(at for at, each in enumerate(order) if "scaled_dot_product" in each)
    assert order[at + 1] == "aten.contiguous.default"


def _traces(module: nn.Module, value: Tensor, names: Sequence[str]) -> list[Any]:
    return [substituted(trace_mode(module, (value,)), names, lambda *_: None)]


class Flat(nn.Module):
    """Lays what it gets in order, and then takes it for a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.map(value.contiguous().view(-1, WIDTH) * 1).view(value.shape) + value
        return made


def test_alike_layers_take_values_in_any_order_in_memory() -> None:
    modules = [Flat(), Flat()]
    kernels = Kernels({}, substitutions=Substituting(["drop_identities"], of_preset=False))
    sources = kernels.of_layers([LayerSource(at, str(at), lambda at=at: modules[at]) for at in range(2)])  # type: ignore[misc]
    expected = [deepcopy(each) for each in modules]
    layers = [source.calling(source.build()) for source in sources]
    whole = torch.randn(4, 5, 2 * WIDTH)
    for value in (whole[..., :WIDTH].contiguous(), whole[..., :WIDTH]):
        for given in (value, value.transpose(0, 1), value.transpose(0, 1).contiguous().transpose(0, 1)):
            for layer, module in zip(layers, expected, strict=True):
                torch.testing.assert_close(layer(given), module(given))
    (value,) = values(1)
    given = value.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(layers[0](given), expected[0](given))
    assert not kernels.left


class Writes(Attending):
    """Changes what two frozen maps read between them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        first = self.query(normed)
        normed.view(-1).mul_(2)
        made: Tensor = first + self.key(normed)
        return made


class Rounds(Cast):
    """Casts to a format that holds less."""

    def forward(self, value: Tensor) -> Any:
        return self.map(value).to(torch.bfloat16).to(value.dtype)


class Branches(Gated):
    """Computes otherwise for large values."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value if value.sum() > 0 else 2 * value)


class Copies(nn.Linear):
    """Gives a copy, which others may change in place."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (input * 1.0).mT.contiguous().mT.contiguous()


def _seen(module: nn.Module, given: Any, made: Any) -> None:
    return None


def _tripled(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return 3 * made


class Normalized(Gated):
    def __deepcopy__(self, memo: object) -> Normalized:
        made = normalized()  # torch copies no weight that is computed
        made.load_state_dict(self.state_dict())
        return made


def normalized() -> Normalized:
    module = Normalized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has a newer one, which puts no hook
        nn.utils.weight_norm(module.down)
    return module


def computing() -> nn.Module:
    module = Gated()
    module.down.register_forward_hook(_tripled)
    module.register_forward_hook(_tripled)  # runs around the trace
    return module


@pytest.mark.parametrize("make", [normalized, computing])
def test_hooks_that_compute_are_in_the_trace(make: Callable[[], nn.Module]) -> None:
    kernels = compared(make(), ["fold_scales"], values(4, 3))
    assert kernels.substituted() == ("fold_scales at 1 place",)
    assert not kernels.left


def hooked() -> nn.Module:
    module = Gated()
    module.up.register_forward_hook(_seen)
    return module


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (Reads, "attention", "no layer multiplies values by a softmax of products that nothing else reads"),
        (Visible, "attention", "no layer multiplies values by a softmax"),
        (Writes, "merge_linears", "it is found and not made: on small random inputs "),
        (Rounds, "cancel_reshapes", "no layer has views or casts in a row"),
        (Adapted, "merge_linears", "no layer gives one value to two linear maps"),
        (Branches, "merge_linears", "a Branches runs as it is written"),
        (hooked, "merge_linears", "a Gated runs as it is written"),
        (Gated, "one_hot", "no layer multiplies a one_hot"),
    ],
)
def test_what_would_compute_something_else_stays(make: Callable[[], nn.Module], name: str, why: str) -> None:
    kernels = compared(make(), [name], values(4))
    assert not kernels.substituted()
    (problem,) = kernels.problems()
    assert problem.line().startswith(f"kernels.substitutions = {name}: must find something to replace")
    assert why in problem.why.lower() or why in problem.why


def test_a_pattern_that_is_wrong_is_found_out() -> None:
    def halved(draft: Draft, _: object) -> int:
        for node in draft.operators():
            if "softmax" in str(node.target):
                draft.put(node, draft.add(node, torch.ops.aten.sigmoid.default, node.args[0]))
        return 1

    with mock.patch.dict(SUBSTITUTIONS, {"attention": halved}):
        kernels = compared(Attending(), ["attention"], values(4))
    (problem,) = kernels.problems()
    assert "outputs differ" in problem.why


def test_a_preset_leaves_out_what_the_model_does_not_have() -> None:
    for preset, left in (("substituted", 0), ("none", len(NAMES) - 2)):
        kernels = Kernels({}, preset, substitutions=substituting_of(preset, NAMES, ""))
        (source,) = kernels.of_layers([LayerSource(0, "0", Gated)])
        source.calling(source.build())(values(3)[0])
        assert len(list(kernels.problems())) == left
        if not left:
            notes = list(kernels.notes())
            assert len(notes) == len(NAMES) - 2
            assert notes[0].startswith("kernels=substituted leaves attention out: no layer multiplies")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("start")
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
    run(folder, *_MODELS, "model.target=substituted_models:build", *still)
    return weights_of(folder)


_TWO = ("parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=2")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("build", ("activation_checkpoint=full",)),
        ("build", _TWO),
        ("whole", _TWO),
        ("build", ("kernels.elementwise=fused",)),
    ],
)
def test_runs_are_equal_to_plain_torch_and_planned(
    target: str, layout: tuple[str, ...], start: dict[str, Tensor], tmp_path: Path
) -> None:
    made = run(tmp_path, *_MODELS, f"model.target=substituted_models:{target}", "kernels=substituted", *layout)
    losses, weights = plain(start, substituted_models)
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in weights_of(tmp_path).items():
        torch.testing.assert_close(value, weights[name.removeprefix("inside.")], rtol=0, atol=3e-5, msg=name)
    for counted, predicted in peaks(made):
        assert 0.9 * predicted <= counted <= predicted
    assert [each.split()[0] for each in made.plan.profile.substituted] == sorted(NAMES)
    assert any("kernels replaces in layers that differ: attention at" in each for each in made.plan.advice)


@pytest.mark.costly
def test_a_checkpoint_of_two_stages_is_resumed_without_substitutions(start: dict[str, Tensor], tmp_path: Path) -> None:
    words = (*COMMON, *_MODELS, "model.target=substituted_models:build")
    saved = ("kernels=substituted", "checkpoint.every=2", "checkpoint.keep=9", *_TWO)
    _, first = result(tmp_path, *saved, words=words)
    (checkpoint,) = (tmp_path / "run").rglob("step-2.ckpt")
    record, second = result(tmp_path, f"resume={checkpoint}", words=words, run="resumed")
    _, expected = plain(start, substituted_models)
    assert first.keys() == second.keys() == expected.keys() - {"1.seen", "3.seen"}
    for name, value in second.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-5, msg=name)
        torch.testing.assert_close(first[name], expected[name], rtol=0, atol=3e-5, msg=name)
    assert math.isfinite(record["loss"][-1])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("kernels.substitutions=[merge_linear]",),
            "merge_linear: must be some of .*Try kernels.substitutions=.merge_",
        ),
        (
            ("kernels.substitutions=[one_hot,atention]",),
            r"= atention: must be some of .*Try kernels.substitutions=\[one_hot,attention\]",
        ),
        (
            ("kernels.substitutions=[one_hot]", "parallelism.tensor=2"),
            "= one_hot.*Ranks divide its layers",
        ),
        (
            ("kernels=substituted", "model.target=tensor_models:undividable"),
            "kernels = substituted: must find",
        ),
        (("kernels=substituted", "compile=true"), "compile = true: must be false with kernels=substituted"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, *overrides)
