# mypy: ignore-errors
"""A U-Net for masks of images: steps down with max pools, up with transposed convolutions, skips between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: str, middle: int | None = None) -> None:
        super().__init__()
        middle = middle or outputs
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, middle, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(middle) if norm == "batch" else nn.GroupNorm(2, middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs, norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool_conv(x)


class Up(nn.Module):
    """The image from below, made as large as the skip, whose sides may be odd."""

    def __init__(self, inputs: int, outputs: int, norm: str, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(inputs, outputs, norm, inputs // 2)
        else:
            self.up = nn.ConvTranspose2d(inputs, inputs // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(inputs, outputs, norm)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        diff_y, diff_x = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels: int, n_classes: int, width: int, norm: str, bilinear: bool) -> None:
        super().__init__()
        self.n_channels, self.n_classes, self.bilinear = n_channels, n_classes, bilinear
        factor = 2 if bilinear else 1
        self.inc = DoubleConv(n_channels, width, norm)
        self.down1 = Down(width, 2 * width, norm)
        self.down2 = Down(2 * width, 4 * width // factor, norm)
        self.up1 = Up(4 * width, 2 * width // factor, norm, bilinear)
        self.up2 = Up(2 * width, width, norm, bilinear)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


def build(norm: str = "group", bilinear: bool = False, width: int = 4) -> UNet:
    return UNet(3, 2, width, norm, bilinear)


def data(samples: int = 24, height: int = 11, width: int = 14) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(6)
    images = torch.randn(samples, 3, height, width, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randint(0, 2, (samples, height, width), generator=generator))


def dice_loss(input: Tensor, target: Tensor) -> Tensor:
    """One minus twice the share of what both have, for each image, in the mean over images."""
    dims = (1, 2, 3)
    inter = 2 * (input * target).sum(dim=dims)
    return (1 - (inter + 1e-6) / (input.sum(dim=dims) + target.sum(dim=dims) + 1e-6)).mean()


def loss(masks: Tensor, target: Tensor) -> Tensor:
    one_hot = F.one_hot(target, masks.size(1)).permute(0, 3, 1, 2).float()
    return F.cross_entropy(masks, target) + dice_loss(F.softmax(masks, dim=1), one_hot)
