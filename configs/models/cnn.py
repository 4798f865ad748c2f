"""A small residual network for 8 x 8 grey images."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with batch norm beside a skip connection."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(channels_in, channels_out, 3, stride),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            _convolution(channels_out, channels_out, 3, 1),
            nn.BatchNorm2d(channels_out),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.skip = nn.Sequential(
                _convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.skip(x))


def _convolution(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)


def build(width: int = 32, blocks: int = 2, classes: int = 10) -> nn.Sequential:
    """Images ``[batch, 1, 8, 8]`` to scores ``[batch, classes]``: three groups of blocks."""
    layers: list[nn.Module] = [
        _convolution(1, width, 3, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    channels = width
    for group in range(3):
        for block in range(blocks):
            halve = group > 0 and block == 0
            layers.append(Residual(channels, width << group, 2 if halve else 1))
            channels = width << group
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the images whose highest score is the right digit."""
    return (outputs.argmax(dim=1) == targets).float().mean()
