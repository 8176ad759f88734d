"""The networks of the papers by name, in plain torch; each makes a fresh module for an input shape.

No BatchNorm: running statistics are neither parameters nor data, so clients could not share them.
Image networks take flat rows as well (784 is 1x28x28) and pad images that are too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

from symprune.errors import SympruneError

NORM_GROUPS = 32


def mlp(shape: tuple[int, ...], classes: int, *widths: int) -> nn.Module:
    """Hidden layers of these widths (one of 64 by default) with ReLU."""
    sizes = [math.prod(shape), *(widths or (64,))]
    layers: list[nn.Module] = [nn.Flatten()]
    for size, width in pairwise(sizes):
        layers += [nn.Linear(size, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def he_mlp(shape: tuple[int, ...], classes: int, *widths: int, gain: float = 1.0) -> nn.Module:
    """The same with He's uniform start and zero biases. Torch's own has a sixth of the variance,
    from which a deep or half-empty network learns slowly."""
    module = mlp(shape, classes, *widths)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        bound = gain * math.sqrt((3 if layer is layers[-1] else 6) / layer.in_features)
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)
    return module


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet as FedSpa uses it (Caffe's widths): convolutions 20 and 50, then 500 units."""
    (channels, side), prepare = _image(shape, smallest=28)
    last = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        *prepare,
        *(nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(50 * last * last, 500), nn.ReLU()),
        nn.Linear(500, classes),
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedP3's network (thesis appendix C): two convolutions of 64, two layers of 1024 units. On
    32x32 the first of them has 1600 inputs, so smaller images are padded to that."""
    (channels, side), prepare = _image(shape, smallest=32)
    last = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        *prepare,
        *(nn.Conv2d(channels, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * last * last, 1024), nn.ReLU()),
        *(nn.Linear(1024, 1024), nn.ReLU()),
        nn.Linear(1024, classes),
    )


def vgg11(shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-11 for small images: eight 3x3 convolutions with GroupNorm and one linear layer."""
    (channels, side), prepare = _image(shape, smallest=32)
    layers: list[nn.Module] = list(prepare)
    for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for width in stage:
            norm = nn.GroupNorm(NORM_GROUPS, width)
            layers += [nn.Conv2d(channels, width, 3, padding=1), norm, nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * (side // 32) ** 2, classes))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            narrow = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.GroupNorm(NORM_GROUPS, width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(x)).relu()


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 for small images (first convolution 3x3, no pooling before the blocks)."""
    (channels, _), prepare = _image(shape, smallest=32)
    first = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    layers: list[nn.Module] = [*prepare, first, nn.GroupNorm(NORM_GROUPS, 64), nn.ReLU()]
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        layers.append(ResidualBlock(channels, width, 1 if stage == 0 else 2))
        layers.append(ResidualBlock(width, width, 1))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "he-mlp": he_mlp,
    "lenet5": lenet5,
    "cnn": cnn,
    "vgg11": vgg11,
    "resnet18": resnet18,
}


def network(name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    """The builder a name stands for; `mlp:100-50` has hidden layers of 100 and 50 units."""
    kind, _, argument = name.partition(":")
    if kind not in NETWORKS:
        raise SympruneError(f"Unknown network {kind!r}; choose from {', '.join(NETWORKS)}.")
    if not argument:
        return NETWORKS[kind]
    widths = argument.split("-")
    if not kind.endswith("mlp") or not all(w.isdigit() and int(w) > 0 for w in widths):
        raise SympruneError(f"Network {name!r} is not of the form mlp:100-50.")
    return lambda shape, classes: NETWORKS[kind](shape, classes, *map(int, widths))


def _image(shape: tuple[int, ...], smallest: int) -> tuple[tuple[int, int], tuple[nn.Module, ...]]:
    """Channels and side of the image a row is after the modules that make it one."""
    prepare: tuple[nn.Module, ...] = ()
    if len(shape) == 1:
        channels = 1 if math.isqrt(shape[0]) ** 2 == shape[0] else 3
        side = math.isqrt(shape[0] // channels)
        if channels * side * side != shape[0]:
            raise SympruneError(f"Rows of {shape[0]} values are no square image.")
        shape = (channels, side, side)
        prepare = (nn.Unflatten(1, shape),)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise SympruneError(f"Rows of shape {shape} are no square image.")
    channels, side = shape[0], shape[1]
    if side < smallest:
        before = (smallest - side) // 2
        after = smallest - side - before
        prepare = (*prepare, nn.ZeroPad2d((before, after, before, after)))
        side = smallest
    return (channels, side), prepare
