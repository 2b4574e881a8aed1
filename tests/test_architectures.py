"""The three architectures: parameter counts, widths, shapes, start values, and the layout that a header must match."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p import architectures
from crad_p2p.architectures import build_model, initialise, layout_of
from crad_p2p.federation import ARCHITECTURES, POOL, parse_architecture
from crad_p2p.weights import encode


def parameters(arch: str, classes: int = 10, channels: int = 3) -> int:
    return sum(p.numel() for p in build_model(arch, classes=classes, channels=channels, device="meta").parameters())


def resnet18_parameters(base: int, classes: int, channels: int) -> int:
    """ResNet-18 counted by hand: convolutions without bias, two numbers a channel for each norm."""
    sizes = [base, 2 * base, 4 * base, 8 * base]
    total = 9 * channels * base + 2 * base
    inputs = base
    for stage, size in enumerate(sizes):
        total += 9 * inputs * size + 9 * size * size + 4 * size  # first block
        if stage:
            total += inputs * size + 2 * size  # its projection
        total += 2 * 9 * size * size + 4 * size  # second block
        inputs = size
    return total + 8 * base * classes + classes


def test_parameter_counts() -> None:
    assert parameters("resnet18") == 11_173_962
    assert round(parameters("resnet18-half") / 1e6, 2) == 2.80
    assert [parameters("cnn6", classes) for classes in (10, 100, 9)] == [816_202, 833_572, 816_009]
    for classes, channels in ((10, 3), (9, 1), (100, 3)):
        assert parameters("resnet18", classes, channels) == resnet18_parameters(64, classes, channels)
        assert parameters("resnet18-half", classes, channels) == resnet18_parameters(32, classes, channels)
        assert parameters("resnet18@0.125", classes, channels) == resnet18_parameters(8, classes, channels)


def test_the_width_multiplies_every_channel_count() -> None:
    assert layout_of("resnet18-half", classes=10, channels=3) == layout_of("resnet18@0.5", classes=10, channels=3)
    assert layout_of("resnet18-half@0.5", classes=10, channels=3) == layout_of("resnet18@0.25", classes=10, channels=3)
    assert layout_of("cnn6@1", classes=10, channels=3) == layout_of("cnn6", classes=10, channels=3)
    model = build_model("cnn6@0.25", classes=10, channels=3, device="meta")
    sizes = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert sizes == [16, 16, 32, 32, 48, 48]
    tiny = build_model("resnet18@0.001", classes=10, channels=3, device="meta")
    assert {module.out_channels for module in tiny.modules() if isinstance(module, nn.Conv2d)} == {1}


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("arch", [f"{name}@0.1" for name in ARCHITECTURES])
def test_images_to_logits(arch: str, channels: int, size: int) -> None:
    model = build_model(arch, classes=7, channels=channels)
    initialise(model, 1)
    images = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))
    for mode in (True, False):
        logits = model.train(mode)(images)
        assert logits.shape == (2, 7)
        assert bool(torch.isfinite(logits).all())
        assert not torch.equal(logits[0], logits[1])


def feature_sizes(arch: str, size: int) -> list[int]:
    """Height of what each 3x3 convolution puts out."""
    model = build_model(arch, classes=2, channels=3)
    initialise(model, 1)
    heights: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.register_forward_hook(lambda _module, _inputs, out: heights.append(out.shape[2]))
    model.eval()(torch.zeros(1, 3, size, size))
    return heights


def test_the_stem_is_for_small_images() -> None:
    assert feature_sizes("resnet18@0.05", 32) == [32] * 5 + [16] * 4 + [8] * 4 + [4] * 4
    assert feature_sizes("cnn6@0.05", 32) == [32, 32, 16, 16, 8, 8]


def test_a_block_adds_its_input() -> None:
    block = architectures.BasicBlock(3, 3, 1).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(block(x), x.relu())
    down = architectures.BasicBlock(3, 6, 2).eval()
    nn.init.zeros_(down.bn2.weight)
    torch.testing.assert_close(down(x), down.shortcut(x).relu())
    assert down(x).shape == (2, 6, 2, 2)
    assert architectures.BasicBlock(3, 6, 1)(x).shape == (2, 6, 4, 4)
    assert float(down(x).detach().abs().sum()) > 0


def convolved(x: Tensor, state: dict[str, Tensor], convolution: str, norm: str, stride: int = 1) -> Tensor:
    """Convolution and batch norm with running statistics, from the tensors of a snapshot."""
    kernel = state[f"{convolution}.weight"]
    x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
    mean, variance, weight, bias = (
        state[f"{norm}.{name}"].reshape(-1, 1, 1) for name in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def cnn6(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    for index in range(6):
        x = convolved(x, state, f"convolutions.{index}", f"norms.{index}").relu()
        if index in (1, 3):
            x = F.max_pool2d(x, 2)
    return x


def resnet18(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    x = convolved(x, state, "conv1", "bn1").relu()
    for stage, block in itertools.product(range(4), range(2)):
        prefix, stride = f"stages.{stage}.{block}.", 2 if stage and not block else 1
        out = convolved(x, state, prefix + "conv1", prefix + "bn1", stride).relu()
        out = convolved(out, state, prefix + "conv2", prefix + "bn2")
        if stage and not block:
            x = convolved(x, state, prefix + "shortcut.0", prefix + "shortcut.1", stride)
        x = (out + x).relu()
    return x


@pytest.mark.parametrize(("arch", "features"), [("cnn6@0.1", cnn6), ("resnet18@0.1", resnet18)])
def test_the_forward_pass_step_by_step(arch: str, features: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> None:
    model = build_model(arch, classes=5, channels=3)
    initialise(model, 1)
    draw = torch.Generator().manual_seed(2)
    state = model.state_dict()
    for name, value in state.items():
        if ".running_mean" in name or name.endswith("bias"):
            value.normal_(0, 0.3, generator=draw)
        elif value.ndim == 1:
            value.uniform_(0.5, 2, generator=draw)
    images = torch.randn(3, 3, 16, 16, generator=draw)
    expected = features(images, state).mean((2, 3)) @ state["classifier.weight"].T + state["classifier.bias"]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), expected, rtol=1e-3, atol=1e-4)


def test_the_names_are_exactly_those_that_can_be_built() -> None:
    assert set(architectures._BUILDERS) == set(ARCHITECTURES)
    assert set(POOL) <= set(ARCHITECTURES)
    for name in ARCHITECTURES:
        build_model(name, classes=2, channels=1, device="meta")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("resnet34", "'resnet34' is unknown; did you mean 'resnet18'.*allowed are resnet18, resnet18-half, cnn6"),
        ("", "'' is unknown"),
        ("CNN6", "unknown"),
        ("@0.5", "unknown"),
        ("cnn6@", "width in architecture 'cnn6@' must be a number above 0 and at most 4"),
        ("cnn6@0", "must be a number above 0"),
        ("cnn6@-1", "must be a number above 0"),
        ("cnn6@4.01", "at most 4"),
        ("cnn6@inf", "at most 4"),
        ("cnn6@nan", "must be a number"),
        ("cnn6@half", "must be a number"),
        ("cnn6@0.5@0.5", "must be a number"),
    ],
)
def test_no_architecture_id(arch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(arch, classes=2, channels=1, device="meta")
    with pytest.raises(ValueError, match=message):
        parse_architecture(arch)


def test_architecture_ids_are_taken_apart() -> None:
    assert parse_architecture("resnet18-half") == ("resnet18-half", 1.0)
    assert parse_architecture("cnn6@0.25") == ("cnn6", 0.25)
    assert parse_architecture("resnet18@4") == ("resnet18", 4.0)


# ----------------------------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "cnn6@0.125"])
def test_the_layout_is_that_of_a_real_model(arch: str) -> None:
    layout = layout_of(arch, classes=9, channels=1)
    model = build_model(arch, classes=9, channels=1)
    state = model.state_dict()
    names = {torch.float32: "F32", torch.int64: "I64"}
    assert {name: (spec.dtype, spec.shape) for name, spec in layout.items()} == {
        name: (names[value.dtype], tuple(value.shape)) for name, value in state.items()
    }
    assert list(layout) == list(state)
    assert [spec.nbytes for spec in layout.values()] == [value.nbytes for value in state.values()]
    assert any(name.endswith("running_var") for name in layout)  # what check_values looks for
    assert any(name.endswith("num_batches_tracked") for name in layout)
    if "@" in arch:
        snapshot = encode(state)
        data = len(snapshot) - 8 - int.from_bytes(snapshot[:8], "little")
        assert data == sum(spec.nbytes for spec in layout.values())


# --------------------------------------------------------------------------------------------------------- start values


def started(arch: str, seed: int, fill: float = math.nan) -> dict[str, Tensor]:
    model = build_model(arch, classes=10, channels=3)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(fill if value.is_floating_point() else 77)
    initialise(model, seed)
    return model.state_dict()


@pytest.mark.parametrize("arch", ["resnet18@0.25", "resnet18-half@0.25", "cnn6@0.25"])
def test_start_values_are_all_set_and_depend_on_the_seed_alone(arch: str) -> None:
    one, two, other = started(arch, 5), started(arch, 5, fill=3.0), started(arch, 6)
    for name, value in one.items():
        assert bool(torch.isfinite(value).all()), name
        assert torch.equal(value, two[name]), name
        drawn = name.endswith("weight") and value.ndim > 1
        assert torch.equal(value, other[name]) != drawn, name


def test_start_values_are_he_fan_out_and_fresh_norms() -> None:
    state = started("cnn6", 1)
    for index, outputs in enumerate((64, 64, 128, 128, 192, 192)):
        weight = state[f"convolutions.{index}.weight"]
        assert float(weight.std()) == pytest.approx((2 / (outputs * 9)) ** 0.5, rel=0.05)
        assert abs(float(weight.mean())) < 0.01
        for name, expected in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            assert bool((state[f"norms.{index}.{name}"] == expected).all())
        assert int(state[f"norms.{index}.num_batches_tracked"]) == 0
    classifier = state["classifier.weight"]
    assert float(classifier.abs().max()) == pytest.approx(192**-0.5, rel=0.02)
    assert float(classifier.abs().max()) <= 192**-0.5
    assert float(classifier.std()) == pytest.approx(192**-0.5 / 3**0.5, rel=0.05)
    assert not bool(state["classifier.bias"].any())


def test_the_global_generators_are_not_touched() -> None:
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()
    for arch in ARCHITECTURES:
        model = build_model(f"{arch}@0.1", classes=3, channels=1)
        initialise(model, 1)
        layout_of(arch, classes=3, channels=1)
    first = started("cnn6@0.1", 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert all(map(torch.equal, started("cnn6@0.1", 1).values(), first.values()))
    numpy_after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(numpy_before, numpy_after, strict=True))
