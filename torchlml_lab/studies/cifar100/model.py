"""The networks of the study: the published DenseNet, a small CNN for CPUs, and heads on frozen features."""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d


class DenseNet(nn.Module):
    """DenseNet for 32 x 32 images (Huang et al. 2017) with bottlenecks and channel-halving transitions.

    `DenseNet(depth=40, growth=40)` is the "DenseNet 40-40" of the published code: three blocks of six layers.

    Args:
        depth: 6 m + 4 for m layers in each block.
        growth: The number of channels that each layer adds.
        classes: The number of logits.
    """

    def __init__(self, depth: int, growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                parts.append(_Layer(channels, growth))
                channels += growth
            if block < 2:
                parts.append(_Transition(channels, channels // 2))
                channels //= 2
        parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(channels, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, classes) of images (N, 3, 32, 32)."""
        return self.head(self.features(x))


class _Layer(nn.Module):
    """A layer that adds `growth` channels through a bottleneck four times as wide."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.new(x)), 1)


class _Transition(nn.Module):
    """Reduces the number of channels and halves the resolution."""

    def __init__(self, channels: int, fewer: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, fewer, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool2d(self.mix(x), 2)


def small_cnn(classes: int) -> nn.Module:
    """A CNN of five convolutions with 5 million multiplications per image, for machines without a GPU."""
    parts: list[nn.Module] = []
    channels = 3
    for more, stride in ((32, 2), (64, 2), (128, 2), (128, 1), (256, 2)):
        parts += [nn.Conv2d(channels, more, 3, stride, 1, bias=False), nn.BatchNorm2d(more), nn.ReLU()]
        channels = more
    network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    _initialize(network)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def feature_head(inputs: int, classes: int) -> nn.Module:
    """A multilayer perceptron with one hidden layer on frozen features."""
    hidden = 256
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, classes))


def wide_head(inputs: int, classes: int) -> nn.Module:
    """A wide multilayer perceptron without dropout on frozen features, which can memorize wrong labels."""
    hidden = 512
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )


def _initialize(network: nn.Module) -> None:
    """Initialize as the published DenseNet: He initialization by fan-out, and zero biases."""
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
