"""The memory of a training step, against what a real step of that size keeps."""

from __future__ import annotations

import pytest
import torch

from crad_p2p.architectures import build_model
from crad_p2p.device import memory_of
from crad_p2p.footprint import kept_for_backward


@pytest.mark.parametrize("arch", ["resnet18@0.25", "cnn6@0.25"])
@pytest.mark.parametrize("side", [8, 28])
def test_what_a_batch_keeps(arch: str, side: int) -> None:
    model = build_model(arch, classes=10, channels=3).train()
    own = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(torch.zeros(16, 3, side, side))
    expected = sum(size for address, size in kept.items() if address not in own)
    assert output.shape == (16, 10)
    found = kept_for_backward(arch, classes=10, image_shape=(3, side, side), batch_size=16)
    assert found == pytest.approx(expected, rel=0.15)


def test_it_draws_nothing() -> None:
    before = torch.get_rng_state()
    kept_for_backward("cnn6@0.125", classes=2, image_shape=(1, 8, 8), batch_size=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cpu_has_no_memory_of_its_own() -> None:
    assert memory_of(torch.device("cpu")) is None
