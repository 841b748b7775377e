"""The half-width model of emoji and its samples, for measurements on a run's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.recipes.large_batch.measure import gradient_noise, gradients_of, largest_eigenvalue, mean_loss
from runner.recipes.rudalle.data import EmojiDataset, build
from runner.recipes.rudalle.loss import weighted_cross_entropy
from runner.recipes.rudalle.model import assemble

__all__ = ["Bench"]

_CONF = Path(__file__).parents[2] / "conf"
_COMPARED = 550  # samples of the training set, of which the training loss is the mean
_SHARP = 48  # samples of the fixed batch
_BATCH = 24  # whose gradients are compared, alone and united
_MULTIPLES = (1, 2, 4, 8, 16, 32)


class Bench:
    """Loads weights into the model and measures them."""

    def __init__(self) -> None:
        self._train, self._val = build(**_kwargs("data/emoji"))
        order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(0))
        self._shuffled = tuple(each[order] for each in self._train.tensors)

    def measure(self, weights: Path) -> dict[str, Any]:
        """Losses, their gap, and the largest eigenvalue of the Hessian.

        Args:
            weights: the file of a run.
        """
        model = _model(weights)
        train = mean_loss(model, self._loss, _COMPARED)
        val = mean_loss(model, lambda model, part: _loss(model, self._val, part), len(self._val))
        sharpness = largest_eigenvalue(model, lambda: self._loss(model, slice(_SHARP)))
        return {"train": train, "val": val, "gap": val - train, "sharpness": sharpness}

    def noise(self, weights: Path | None) -> list[dict[str, float]]:
        """The variance of gradients of several batch sizes, and how many samples' noise is as large as the gradient.

        Args:
            weights: the file of a run; None: the model before training.
        """
        model = _model(weights)
        samples = len(self._train) // _BATCH * _BATCH
        gradients = gradients_of(model, self._loss, samples, _BATCH)
        found = gradient_noise(gradients, _BATCH, _MULTIPLES)
        square = float(gradients.mean(dim=0).square().sum()) - found[0].variance / len(gradients)
        return [
            {"batch": each.batch, "batches": each.batches, "variance": each.variance, "gradient": square}
            for each in found
        ]

    def _loss(self, model: nn.Module, part: slice) -> Tensor:
        inputs, targets = self._shuffled
        return weighted_cross_entropy(model(inputs[part]), targets[part])


def _loss(model: nn.Module, data: EmojiDataset, part: slice) -> Tensor:
    inputs, targets = data.tensors
    return weighted_cross_entropy(model(inputs[part]), targets[part])


def _model(weights: Path | None) -> nn.Module:
    """The recipe's model; eager attention, because torch's fused kernel on a CPU cannot be differentiated twice."""
    torch.manual_seed(0)
    model = assemble(**{**_kwargs("model/rudalle_tiny"), **_recipe(), "attention": "eager"})
    if weights is not None:
        model.load_state_dict(load_file(weights))
    return model


def _recipe() -> dict[str, Any]:
    return _plain(OmegaConf.load(_CONF / "recipe/large_batch.yaml").model.kwargs)


def _kwargs(option: str) -> dict[str, Any]:
    return _plain(OmegaConf.load(_CONF / f"{option}.yaml").kwargs)


def _plain(node: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(node)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
