"""Substitutions in layers: what is computed stays equal to rounding, with its gradients, and names of weights stay."""

from __future__ import annotations

import math
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
from runner.model.kernels.substitutions import SUBSTITUTIONS
from runner.model.layers import LayerSource

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
    assert any(
        "kernels.substitutions replaces in layers that differ: attention at" in each for each in made.plan.advice
    )


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
