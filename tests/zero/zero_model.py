"""A model of equal layers, none of which is most of it."""

from torch import nn


def model(width=128, depth=12):
    middle = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(6, width), *middle, nn.Linear(width, 5))
