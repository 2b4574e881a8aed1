"""Frozen models computed fast give what the model gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from crad_p2p.architectures import build_model
from crad_p2p.frozen import Frozen

SHAPE = (3, 32, 32)
IMAGES = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))


class Preactivated(nn.Module):
    """Batch norm and ReLU before a convolution: nothing of that can be folded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.third = nn.Conv2d(8, 8, 3, padding="same", groups=2)
        self.normalised = nn.GroupNorm(2, 8)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(F.relu(self.norm(x)))
        y = self.second(x) + x
        y = torch.cat([self.third(y), self.normalised(y)], 1)[:, 4:12]
        return self.classifier(F.adaptive_avg_pool2d(y * 0.5, 1).flatten(1))


class Shared(nn.Module):
    """One convolution used twice, one result used twice, a sum of different shapes, an activation that is no ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Conv2d(4, 4, 1)
        self.one = nn.Conv2d(4, 1, 1)
        self.classifier = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.again(self.again(self.stem(x))))
        y = self.wide(x)
        y = F.relu(self.one(y) + y) + torch.sigmoid(self.wide(y)) - y
        return self.classifier(y.mean((2, 3)))


class Deciding(nn.Module):
    """Looks at its values, so it cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return (x if x.sum() > 0 else 2 * x).mean((2, 3))


class WithParameter(nn.Module):
    """Owns a tensor that is in none of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolution(x) * self.scale).mean((2, 3))


def of_pool(arch: str) -> Callable[[], nn.Module]:
    return lambda: build_model(arch, classes=4, channels=3)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # how many convolutions are folded
    "resnet18": (of_pool("resnet18@0.25"), 20),
    "resnet18-half": (of_pool("resnet18-half@0.25"), 20),
    "cnn6": (of_pool("cnn6@0.25"), 6),
    "torchvision's resnet": (lambda: torchvision.models.resnet18(num_classes=4), 20),
    "bottlenecks": (lambda: torchvision.models.resnet50(num_classes=4), 53),
    "depthwise": (lambda: torchvision.models.mobilenet_v2(num_classes=4, width_mult=0.25), 52),
    "dropout and bias": (lambda: torchvision.models.vgg11_bn(num_classes=4), 8),
    "attention": (lambda: torchvision.models.squeezenet1_1(num_classes=4), 26),
    "before": (Preactivated, 1),
    "shared": (Shared, 2),
    "deciding": (Deciding, 0),
    "a tensor of its own": (WithParameter, 0),
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Values with which every part matters."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            tensors[name] = torch.ones_like(value)
        elif value.dim() > 1:
            fan = value[0].numel()
            tensors[name] = torch.randn(value.shape, generator=generator) * (2 / fan) ** 0.5
        else:
            tensors[name] = torch.rand(value.shape, generator=generator) + 0.5
    return tensors


def skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_it_gives_what_the_model_gives(name: str) -> None:
    make, folded = MODELS[name]
    model = make()
    tensors = tensors_of(model)
    model.load_state_dict(tensors)
    expected = model.eval()(IMAGES)
    architecture = Frozen(skeleton(make), SHAPE)
    assert len(architecture._chains) == folded
    size = float(expected.abs().max())
    for batch_size in (5, 32):
        found = architecture.bind(tensors, batch_size=batch_size)(IMAGES)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * size)
    rough = architecture.bind(tensors, torch.bfloat16)(IMAGES)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, expected, rtol=0, atol=0.1 * size)
    assert torch.equal(rough, expected) is (not folded)


@torch.no_grad()
def test_without_fused_convolutions_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    make, _ = MODELS["resnet18"]
    tensors = tensors_of(make())
    architecture = Frozen(skeleton(make), SHAPE)
    expected = architecture.bind(tensors)(IMAGES)
    monkeypatch.setattr("crad_p2p.frozen._HAS_FUSED", False)
    found = architecture.bind(tensors)(IMAGES)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_the_tensors_of_something_else_are_refused() -> None:
    make, _ = MODELS["cnn6"]
    architecture, tensors = Frozen(skeleton(make), SHAPE), tensors_of(make())
    fewer = {name: value for name, value in tensors.items() if name != "classifier.bias"}
    for wrong in (fewer, {**tensors, "more": torch.ones(1)}, {**tensors, "classifier.bias": torch.ones(5)}):
        with pytest.raises(RuntimeError, match="names and shapes are not those of the architecture"):
            architecture.bind(wrong)


@torch.no_grad()
def test_nothing_of_a_model_stays() -> None:
    """Without the garbage collector, which may come late."""
    make, _ = MODELS["resnet18"]
    architecture, tensors = Frozen(skeleton(make), SHAPE), tensors_of(make())
    forward = architecture.bind(tensors)
    forward(IMAGES)
    references = [weakref.ref(value) for value in tensors.values()]
    gc.disable()
    try:
        del tensors, forward
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()


def test_several_compute_with_one_architecture_at_the_same_time() -> None:
    make, _ = MODELS["cnn6"]
    architecture = Frozen(skeleton(make), SHAPE)
    models = [{name: value * (1 + k) for name, value in tensors_of(make()).items()} for k in range(4)]

    def compute(tensors: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            forward = architecture.bind(tensors)
            return torch.stack([forward(IMAGES) for _ in range(20)])

    expected = [compute(each) for each in models]
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(compute, models), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
