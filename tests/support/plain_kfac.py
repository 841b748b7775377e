"""K-FAC as a plain loop over whole batches, which knows nothing of the runner."""

from __future__ import annotations

import torch
from narrow import gradient
from torch import nn
from torch.nn import functional


def plain_kfac(
    model: nn.Sequential,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    settings: dict[str, float],
    interval: int,
    inverted: dict[tuple[int, str], int] | None = None,
) -> list[float]:
    """Losses. No hooks, inverses by their definition: of the batch of an interval's first step, used from a step of it
    on.

    ``inverted`` tells that step of each linear layer, by its number, and of each side: A of inputs, B of outputs; None:
    the first one. ``settings`` are lr, momentum, weight_decay and damping.
    """
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    velocity = {p: torch.zeros_like(p) for p in model.parameters()}
    shown: dict[tuple[int, str], torch.Tensor] = {}
    inverses: dict[tuple[int, str], torch.Tensor] = {}
    losses = []
    for step, (x, y) in enumerate(batches):
        inputs, outputs, value = {}, {}, x
        for layer in (part for child in model for part in (child if isinstance(child, nn.Sequential) else [child])):
            inputs[layer], value = value, layer(value)
            outputs[layer] = value
        loss = functional.mse_loss(value, y)
        losses.append(loss.item())
        model.zero_grad()
        slopes = torch.autograd.grad(len(x) * loss, [outputs[each] for each in linears], retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]  # the library's
        for number, (linear, slope) in enumerate(zip(linears, slopes, strict=True)):
            a, g = inputs[linear].detach().flatten(0, -2), slope.flatten(0, -2)
            if linear.bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            for side, rows in (("A", a), ("B", g)):
                if step % interval == 0:
                    shown[number, side] = rows.T @ rows / len(rows)
                if step % interval == (inverted or {}).get((number, side), 0):
                    factor = shown[number, side]
                    damped = factor + settings["damping"] ** 0.5 * torch.eye(len(factor), dtype=factor.dtype)
                    inverses[number, side] = torch.linalg.inv(damped)
            if (number, "A") not in inverses or (number, "B") not in inverses:
                continue
            parts = [gradient(linear.weight), *([] if linear.bias is None else [gradient(linear.bias)[:, None]])]
            whole = inverses[number, "B"] @ torch.cat(parts, dim=1) @ inverses[number, "A"]
            linear.weight.grad = whole[:, : linear.in_features]
            if linear.bias is not None:
                linear.bias.grad = whole[:, -1]
        with torch.no_grad():
            for p, v in velocity.items():
                v.copy_(settings["momentum"] * v + gradient(p) + settings["weight_decay"] * p)
                p.sub_(settings["lr"] * v)
    return losses
