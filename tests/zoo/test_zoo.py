from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from runner.zoo import data, gpt, losses, mlp


def test_gpt_holds_no_weights_before_a_layer_is_called() -> None:
    model = gpt.build(vocab_size=11, sequence_length=6, width=8, layers=3, heads=2)
    assert list(model.parameters()) == []
    assert len(model.layers()) == 5


def test_gpt_layers_are_the_same_under_the_same_seed() -> None:
    layers = gpt.build(vocab_size=11, sequence_length=6, width=8, layers=1, heads=2).layers()
    for make in layers:
        torch.manual_seed(3)
        first = make()
        torch.manual_seed(3)
        second = make()
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_gpt_is_causal_and_passes_one_tensor_between_layers() -> None:
    torch.manual_seed(0)
    layers = [make() for make in gpt.build(vocab_size=11, sequence_length=6, width=8, layers=2, heads=2).layers()]
    tokens = torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    outputs = []
    for ids in (tokens, changed):
        hidden = ids
        for layer in layers[:-1]:
            hidden = layer(hidden)
            assert hidden.shape == (2, 6, 8)
        outputs.append(layers[-1](hidden))
    assert torch.equal(outputs[0][:, :4], outputs[1][:, :4])
    assert not torch.allclose(outputs[0][:, 4:], outputs[1][:, 4:])


def test_gpt_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads = 3 must divide width = 8"):
        gpt.build(vocab_size=11, sequence_length=6, width=8, layers=1, heads=3)


def test_mlp_shapes() -> None:
    model = mlp.build(inputs=3, outputs=2, width=5, layers=4)
    assert isinstance(model, nn.Sequential)
    assert len(model) == 4
    assert model(torch.zeros(7, 3)).shape == (7, 2)
    assert len(list(mlp.build(3, 2, 5, 1).parameters())) == 2
    with pytest.raises(ValueError, match="layers = 0 must be at least 1"):
        mlp.build(3, 2, 5, 0)


def test_random_tokens_have_four_successors_and_repeat() -> None:
    train, val = data.random_tokens(samples=200, val_samples=10, sequence_length=12, vocab_size=16, seed=5)
    assert (len(train), len(val)) == (200, 10)
    inputs, targets = train.tensors
    assert inputs.dtype == targets.dtype == torch.long
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for token in range(16):
        assert len(targets[inputs == token].unique()) <= 4  # type: ignore[no-untyped-call]  # the library's
    data._walks.cache_clear()
    again, _ = data.random_tokens(samples=200, val_samples=10, sequence_length=12, vocab_size=16, seed=5)
    assert torch.equal(again.tensors[0], inputs)
    again.tensors[0].zero_()  # as a user's own function may
    third, _ = data.random_tokens(samples=200, val_samples=10, sequence_length=12, vocab_size=16, seed=5)
    assert torch.equal(third.tensors[0], inputs)
    other, _ = data.random_tokens(samples=200, val_samples=10, sequence_length=12, vocab_size=16, seed=6)
    assert not torch.equal(other.tensors[0], inputs)


def test_random_regression_can_be_learned() -> None:
    train, val = data.random_regression(samples=400, val_samples=50, inputs=4, outputs=2, seed=1)
    (features, targets), (val_features, val_targets) = train.tensors, val.tensors
    solution = torch.linalg.lstsq(features, targets).solution
    total, count = losses.mse(val_features @ solution, val_targets)
    linear = total / count
    assert linear < 0.5 * val_targets.var()


def test_losses_by_hand() -> None:
    output = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]])
    target = torch.tensor([[1, 0]])
    total, count = losses.cross_entropy(output, target)
    assert total.item() == pytest.approx(math.log(2.0) + math.log(4.0 / 3.0), abs=1e-6)
    assert count.item() == 2
    squares, elements = losses.mse(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]))
    assert (squares.item(), elements.item()) == (5.0, 2)
    half, _ = losses.cross_entropy(output.bfloat16(), target)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0, 0.1]])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_the_weight_is_what_torch_divides_by(smoothing: float, weights: list[float] | None, ignored: int) -> None:
    generator = torch.Generator().manual_seed(4)
    output = torch.randn(5, 6, 4, generator=generator)
    target = torch.randint(0, 4, (5, 6), generator=generator)
    target[2, :3] = ignored
    options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": smoothing}
    total, weight = losses.cross_entropy(output, target, class_weights=weights, **options)
    of_classes = None if weights is None else torch.tensor(weights)
    expected = functional.cross_entropy(output.flatten(0, 1), target.flatten(), of_classes, **options)
    torch.testing.assert_close(total / weight, expected)


def test_an_output_is_not_compared_with_the_targets_of_other_samples() -> None:
    """Torch broadcasts (5, 1) against (5) with no more than a warning, and the training goes on to nowhere."""
    with pytest.raises(ValueError, match=r"shape \(5,\) must be that of the output, \(5, 1\)"):
        losses.mse(torch.zeros(5, 1), torch.zeros(5))
    with pytest.raises(ValueError, match=r"shape \(2, 4, 3\) must be that .* the classes: \(2, 3, 4\)"):
        losses.cross_entropy(torch.zeros(2, 3, 4, 3), torch.zeros(2, 4, 3, dtype=torch.int64))


def test_targets_may_be_probabilities() -> None:
    generator = torch.Generator().manual_seed(4)
    output, target = torch.randn(5, 4, generator=generator), torch.rand(5, 4, generator=generator).softmax(-1)
    total, weight = losses.cross_entropy(output, target)
    torch.testing.assert_close(total / weight, functional.cross_entropy(output, target))


def test_a_part_in_which_nothing_counts_adds_nothing() -> None:
    output = torch.randn(3, 4, requires_grad=True)
    total, weight = losses.cross_entropy(output, torch.full((3,), -100))
    total.backward()  # type: ignore[no-untyped-call]  # the library's
    assert (total.item(), weight.item()) == (0.0, 0)
    assert output.grad is not None
    assert not output.grad.any()
