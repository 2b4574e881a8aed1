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
from torch import Tensor, fx, nn

from crad_p2p.architectures import build_model
from crad_p2p.frozen import Frozen
from crad_p2p.snapshot import SnapshotError

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


class Small(nn.Module):
    """Two convolutions of one shape, and what can stand around them; ``way`` is how it computes.

    Without that operation in place, hook and so on, each of them would be folded right.
    """

    def __init__(self, way: Callable[[Small, Tensor], Tensor]) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.momentary = nn.BatchNorm2d(8, track_running_stats=False)
        self.relu = nn.ReLU(inplace=True)
        self.wide = nn.Linear(8 * 32 * 32, 4)
        self.classifier = nn.Linear(8, 4)
        self.way = way

    def head(self, x: Tensor) -> Tensor:
        return self.classifier(x.mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def changed_after_use(m: Small, x: Tensor) -> Tensor:
    x = m.one(x)
    y = m.two(x)
    x = m.relu(x)
    return m.head(y + x)


def sum_in_place(m: Small, x: Tensor) -> Tensor:
    x = m.one(x)
    before = x
    x += m.two(F.relu(x))
    return m.head(before * x)


def attending(m: Small, x: Tensor) -> Tensor:
    """Of two precisions where convolutions compute in bfloat16."""
    y = m.one(x)
    tokens = y.flatten(2).transpose(1, 2)
    keys = F.linear(tokens.float(), m.two.weight[:, :, 0, 0])
    return m.head(m.two((tokens @ keys.transpose(1, 2)).mean(1).reshape(x.size(0), 1, 32, 32).expand_as(y)))


def hooked() -> nn.Module:
    model = Small(lambda m, x: m.head(m.two(F.relu(m.one(x)))))
    model.one.register_forward_hook(lambda _module, _inputs, output: output * 3)
    return model


def normalised_weight() -> nn.Module:
    model = Small(lambda m, x: m.head(m.two(F.relu(m.one(x)))))
    nn.utils.parametrizations.weight_norm(model.one)
    return model


TRAPS: dict[str, Callable[[], nn.Module]] = {
    "an input changed in place afterwards": lambda: Small(changed_after_use),
    "changed in place before a sum": lambda: Small(lambda m, x: m.head(m.one(x) + m.other(m.relu(x)))),
    "a sum in place with another name": lambda: Small(sum_in_place),
    "a sum with a factor": lambda: Small(lambda m, x: m.head(F.relu(torch.add(m.one(x), m.other(x), alpha=2)))),
    "a view of its memory": lambda: Small(lambda m, x: m.wide(F.relu(m.one(x)).view(x.size(0), -1))),
    "batch norm of this very batch": lambda: Small(lambda m, x: m.head(m.momentary(m.one(x)))),
    "a hook": hooked,
    "a parametrised weight": normalised_weight,
    "two precisions in one product": lambda: Small(attending),
    "dropout in use": lambda: Small(lambda m, x: m.head(F.dropout(m.one(x), 0.5, training=True))),
}


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


@pytest.mark.parametrize("name", TRAPS)
@torch.no_grad()
def test_what_an_architecture_does_beside_its_graph_is_noticed(name: str) -> None:
    before = torch.random.get_rng_state()
    traced = fx.symbolic_trace(skeleton(TRAPS[name]))  # it can be read, so it is not this that keeps it from harm
    assert {node.op for node in traced.graph.nodes} >= {"placeholder", "call_module", "output"}
    architecture = Frozen(skeleton(TRAPS[name]), SHAPE)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's draws are changed
    if name == "dropout in use":
        assert architecture._graph is None
        return
    model = TRAPS[name]()
    tensors = tensors_of(model)
    model.load_state_dict(tensors)
    expected = model.eval()(IMAGES.clone())
    size = float(expected.abs().max())
    for precision, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        found = architecture.bind(tensors, precision)(IMAGES.clone())
        torch.testing.assert_close(found, expected, rtol=0, atol=allowed * size)


@torch.no_grad()
def test_what_follows_the_last_convolution_computes_in_float32() -> None:
    def make() -> nn.Module:
        return Small(lambda m, x: m.head(m.two(F.relu(m.one(x)))))

    forward, dtypes = Frozen(skeleton(make), SHAPE).bind(tensors_of(make()), torch.bfloat16), []
    forward(IMAGES, lambda node, result: dtypes.append((str(node.target), result.dtype)))  # type: ignore[call-arg]
    assert ("one", torch.bfloat16) in dtypes
    assert ("two", torch.float32) in dtypes


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
        with pytest.raises(
            SnapshotError, match="snapshot does not fit its architecture: other names, shapes or dtypes"
        ):
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
