from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from narrow import gradient
from omegaconf import OmegaConf
from torch import Tensor

from runner.recipes.rudalle.loss import image_and_text_cross_entropy, weighted_cross_entropy
from runner.recipes.rudalle.model import assemble, build
from runner.recipes.rudalle.sample import sample_images

CONF = Path(__file__).parents[2] / "conf" / "model"


def shipped(name: str) -> dict[str, Any]:
    return dict(OmegaConf.load(CONF / f"{name}.yaml").kwargs)


@pytest.mark.parametrize(("name", "parameters"), [("rudalle_tiny", 1_201_688), ("rudalle_malevich", 1_310_410_880)])
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = assemble(**shipped(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_shapes_at_full_size_on_the_meta_device() -> None:
    with torch.device("meta"):
        text, image = assemble(**shipped("rudalle_malevich"))(torch.zeros(1, 1151, dtype=torch.long))
    assert text.shape == (1, 127, 16384 + 128)
    assert image.shape == (1, 1024, 8192)


def test_no_weights_before_a_layer_is_called(small: dict[str, Any]) -> None:
    model = build(**small)
    assert list(model.parameters()) == []
    assert len(model.layers()) == 6
    assert {name.split(".")[0] for name in assemble(**small).state_dict()} == set("012345")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_logit_depends_on_a_later_token(small: dict[str, Any], small_ids: Tensor, attention: str) -> None:
    torch.manual_seed(0)
    # Subtracting the largest score over all queries changes roundings everywhere: off, for exact comparison.
    model = assemble(**{**small, "attention": attention, "pb_relax": False})
    before = torch.cat([part.flatten(2).sum(-1) for part in model(small_ids)], dim=1)
    for position in range(1, small_ids.shape[1]):
        changed = small_ids.clone()
        changed[:, position] = (changed[:, position] + 1) % 16
        after = torch.cat([part.flatten(2).sum(-1) for part in model(changed)], dim=1)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position:], after[:, position:])


@pytest.mark.parametrize("pb_relax", [True, False])
def test_fused_attention_equals_the_published_arithmetic(
    small: dict[str, Any], small_ids: Tensor, pb_relax: bool
) -> None:
    torch.manual_seed(0)
    fused = assemble(**small).double()
    eager = assemble(**{**small, "attention": "eager", "pb_relax": pb_relax}).double()
    eager.load_state_dict(fused.state_dict())
    for one, other in zip(fused(small_ids), eager(small_ids), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_masks_matter(small: dict[str, Any], small_ids: Tensor) -> None:
    torch.manual_seed(0)
    sparse = assemble(**small)
    dense = assemble(**{**small, "masks": False})
    dense.load_state_dict(sparse.state_dict())
    assert not torch.allclose(sparse(small_ids)[1], dense(small_ids)[1])


def test_dropout_only_while_training(small: dict[str, Any], small_ids: Tensor) -> None:
    model = assemble(**{**small, "dropout": 0.5, "attention": "eager"})
    assert not torch.equal(model(small_ids)[1], model(small_ids)[1])
    model.eval()
    assert torch.equal(model(small_ids)[1], model(small_ids)[1])


def test_gradient_shrink_changes_gradients_and_nothing_else(small: dict[str, Any], small_ids: Tensor) -> None:
    outputs, gradients = [], []
    for factor in (1.0, 0.1):
        torch.manual_seed(0)
        embedding = build(**{**small, "gradient_shrink": factor}).layers()[0]()
        output = embedding(small_ids)
        output.square().sum().backward()
        outputs.append(output)
        gradients.append([parameter.grad for parameter in embedding.parameters()])
    assert torch.equal(outputs[0], outputs[1])
    for whole, shrunk in zip(*gradients, strict=True):
        torch.testing.assert_close(shrunk, whole * 0.1)


def test_each_pad_position_has_its_own_embedding(small: dict[str, Any], small_ids: Tensor) -> None:
    embedding = build(**small).layers()[0]()
    embedding(small_ids).sum().backward()
    used = gradient(embedding.get_parameter("text_embeddings.weight")).abs().sum(dim=1) > 0
    assert used[20:].tolist() == [False, False, False, True, True, True]
    assert not used[0]


def test_scratch_init(small: dict[str, Any]) -> None:
    model = assemble(**small)
    state = model.state_dict()
    assert (state["1.before_first_addition_layernorm.weight"] == 0.1).all()
    assert (state["1.input_layernorm.weight"] == 1).all()
    assert state["1.mlp.dense_h_to_4h.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    assert state["0.text_embeddings.weight"].std().item() == pytest.approx(0.2, rel=0.15)
    reference = assemble(**{**small, "init": "reference"}).state_dict()
    assert (reference["1.before_first_addition_layernorm.weight"] == 1).all()
    assert reference["0.text_embeddings.weight"].std().item() == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention": "flash"}, "attention = 'flash' must be one of eager, sdpa"),
        ({"init": "zero"}, "init = 'zero' must be one of reference, scratch"),
        ({"heads": 3}, "heads = 3 must divide width = 16"),
        ({"layers": 0}, "layers = 0 must be at least 1"),
        ({"text_positions": 5}, "text_positions = 5 must be at least text_length"),
    ],
)
def test_wrong_arguments_are_named(small: dict[str, Any], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{**small, **wrong})


def test_loss_by_hand() -> None:
    text_logits = torch.tensor([[[0.0, 0.0, 0.0]]])  # ln 3
    image_logits = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])  # ln 2 and ln(1 + e)
    target = torch.tensor([[2, 0, 1]])
    text, image = image_and_text_cross_entropy((text_logits, image_logits), target)
    assert text.item() == pytest.approx(1.0986123)
    assert image.item() == pytest.approx((0.6931472 + 1.3132617) / 2)
    loss = weighted_cross_entropy((text_logits.bfloat16(), image_logits.bfloat16()), target, image_weight=7)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((text.item() + 7 * image.item()) / 8)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sampling_token_by_token_sees_what_the_whole_model_sees(small: dict[str, Any], attention: str) -> None:
    torch.manual_seed(3)
    model = assemble(**{**small, "attention": attention}).double()
    text = torch.tensor([[2, 7, 3, 0, 0, 0], [2, 9, 11, 4, 3, 0]])
    greedy = sample_images(model, text, torch.Generator().manual_seed(0), top_k=1)
    assert greedy.shape == (2, 16)
    _, logits = model(torch.cat([text, greedy[:, :-1]], dim=1))
    assert torch.equal(logits.argmax(dim=-1), greedy)


def test_sampling_is_repeatable(small: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = assemble(**small)
    text = torch.tensor([[2, 7, 3, 0, 0, 0]]).expand(3, -1)
    first, again, other = (sample_images(model, text, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
