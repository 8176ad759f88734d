"""The networks of the papers by name, in plain torch; each makes a fresh module for an input shape.

No BatchNorm: running statistics are neither parameters nor data, so clients could not share them.
Image networks take flat rows as well (784 is 1x28x28) and pad images that are too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from symprune.errors import Refusal, SympruneError

NORM_GROUPS = 32
MOST_LAYERS = 100  # of an mlp by name
MOST_DIGITS = 8  # of the number of units in one of them


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
        self.norm1 = group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = group_norm(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            narrow = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, group_norm(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(x)).relu()


def group_norm(width: int) -> nn.GroupNorm:
    """In 32 groups, or in pairs of channels where there are fewer than 64."""
    return nn.GroupNorm(min(NORM_GROUPS, width // 2), width)


def residual_network(
    shape: tuple[int, ...], classes: int, widths: tuple[int, ...], blocks: int, smallest: int
) -> nn.Module:
    """So many blocks at each width, for small images: first convolution 3x3, no pooling before the
    blocks."""
    (channels, _), prepare = _image(shape, smallest)
    first = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
    layers: list[nn.Module] = [*prepare, first, group_norm(widths[0]), nn.ReLU()]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(ResidualBlock(channels, width, 2 if stage and not block else 1))
            channels = width
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pool, nn.Linear(channels, classes))


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 for small images, with GroupNorm."""
    return residual_network(shape, classes, (64, 128, 256, 512), 2, smallest=32)


def resnet20(shape: tuple[int, ...], classes: int) -> nn.Module:
    """He et al.'s ResNet-20 for small images, with GroupNorm: 0.27 million weights."""
    return residual_network(shape, classes, (16, 32, 64), 3, smallest=8)


class CharacterLSTM(nn.Module):
    """Two LSTM layers over a row of character codes and one linear layer for the next one, as
    Scafflix has for Shakespeare (thesis, section 3.3.2)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.lstm = nn.LSTM(8, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x.long()))
        scores: Tensor = self.output(states[:, -1])
        return scores


def character_lstm(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """For rows of codes below the number of classes, such as the data set `characters` has."""
    if len(shape) != 1:
        raise SympruneError(f"Rows of shape {shape} are no sequences of characters.")
    return CharacterLSTM(classes, width)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "he-mlp": he_mlp,
    "lenet5": lenet5,
    "cnn": cnn,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "character-lstm": character_lstm,
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
    if len(widths) > MOST_LAYERS or max(map(len, widths)) > MOST_DIGITS:
        most = f"{MOST_LAYERS} layers of {MOST_DIGITS} digits each"
        raise Refusal(f"A network by name has at most {most}, not {name[:80]!r}.")
    return lambda shape, classes: NETWORKS[kind](shape, classes, *map(int, widths))


def check_size(make: Callable[[], nn.Module], model: str, most: int) -> None:
    """Refuse a network with more parameters than this, without taking memory for them."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make().parameters())
    if size > most:
        raise Refusal(f"Model {model} has {size:,} parameters; {most:,} are allowed.")


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
