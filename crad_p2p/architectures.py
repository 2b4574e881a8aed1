"""Architecture id to model. Ids look like ``resnet18``, ``cnn6@0.25`` (see ``federation.parse_architecture``).

All have a stem for small images (3x3, stride 1, no max-pooling) and batch normalisation after every convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p.federation import parse_architecture
from crad_p2p.snapshot import Layout, TensorSpec


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al. 2016), [B, in, H, W] to [B, out, H/stride, W/stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with the stem for 32x32 images: 11,173,962 parameters at width 1, RGB and ten classes."""

    def __init__(self, classes: int, channels: int, width: float) -> None:
        super().__init__()
        sizes = [_scale(size, width) for size in (64, 128, 256, 512)]
        self.conv1 = nn.Conv2d(channels, sizes[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(sizes[0])
        stages = [self._stage(sizes[0], sizes[0], 1)] + [self._stage(a, b, 2) for a, b in pairwise(sizes)]
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(sizes[-1], classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.stages(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.classifier(out.mean((2, 3)))
        return logits


class CNN6(nn.Module):
    """Six 3x3 convolutions, pooled after the second and fourth: 816,202 parameters at width 1, RGB and ten classes.

    The paper gives only the name and "about 0.8 M parameters"; this layout is ours.
    """

    def __init__(self, classes: int, channels: int, width: float) -> None:
        super().__init__()
        sizes = [_scale(size, width) for size in (64, 64, 128, 128, 192, 192)]
        pairs = list(pairwise([channels, *sizes]))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes)
        self.classifier = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = F.relu(norm(convolution(x)))
            if index in (1, 3):
                x = F.max_pool2d(x, 2)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


#: name -> constructor(classes, channels, width)
_BUILDERS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "resnet18": ResNet18,
    "resnet18-half": lambda classes, channels, width: ResNet18(classes, channels, width / 2),
    "cnn6": CNN6,
}


def build_model(arch: str, *, classes: int, channels: int, device: torch.device | str = "cpu") -> nn.Module:
    """A model whose values are not set yet: load a snapshot into it, or call :func:`initialise`.

    It maps float32 [B, channels, H, W] to logits [B, classes].

    Raises:
        ValueError: ``arch`` is no architecture id.
    """
    name, width = parse_architecture(arch)
    with torch.device("meta"):
        model = _BUILDERS[name](classes, channels, width)
    if str(device) != "meta":
        give_room(model, device)
    return model


def give_room(model: nn.Module, device: torch.device | str) -> None:
    """Tensors on a device, their values not set yet, in the place of those that a model made on ``meta`` has."""
    # Not by to_empty, which imports the symbolic algebra of torch's compiler.
    tensors = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in model.state_dict().items()}
    model.load_state_dict(tensors, assign=True)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill a CPU model with its start values: He initialisation (fan-out), all draws from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()


@functools.cache
def parameter_count(arch: str, *, classes: int, channels: int) -> int:
    """Trainable parameters of an architecture."""
    model = build_model(arch, classes=classes, channels=channels, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


def layout_of(arch: str, *, classes: int, channels: int) -> Layout:
    """Name, dtype and shape of every tensor of a snapshot of this architecture, without allocating one."""
    state = build_model(arch, classes=classes, channels=channels, device="meta").state_dict()
    dtypes = {torch.float32: "F32", torch.int64: "I64"}
    return {name: TensorSpec(dtypes[value.dtype], tuple(value.shape)) for name, value in state.items()}


def _scale(size: int, width: float) -> int:
    return max(1, round(size * width))
