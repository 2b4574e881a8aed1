"""The optimiser: torch's step, to the bit, without what comes with torch's class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from crad_p2p.sgd import Sgd


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def gradients(of: nn.Module, batch: Tensor) -> None:
    of.zero_grad(set_to_none=True)
    of(batch).square().sum().backward()


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 5e-4), (0.9, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_steps_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    ours, theirs = model(), model()
    sgd = Sgd(dict(ours.named_parameters()), 0.1, momentum=momentum, weight_decay=weight_decay)
    reference = torch.optim.SGD(theirs.parameters(), 0.1, momentum=momentum, weight_decay=weight_decay)
    assert sgd.buffers == {}
    for rate in (0.1, 0.1, 0.01, 0.1):
        batch = torch.randn(4, 7)
        sgd.learning_rate = reference.param_groups[0]["lr"] = rate
        for each, optimizer in ((ours, sgd), (theirs, reference)):
            gradients(each, batch)
            optimizer.step()
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name])
    momenta = {name: reference.state[p].get("momentum_buffer") for name, p in theirs.named_parameters()}
    if momentum:
        assert sgd.buffers.keys() == momenta.keys()
        assert all(torch.equal(buffer, momenta[name]) for name, buffer in sgd.buffers.items())
    else:
        assert sgd.buffers == {}


def test_it_goes_on_with_the_momentum_of_another() -> None:
    first, second = model(), model()
    batches = [torch.randn(4, 7) for _ in range(3)]
    whole = Sgd(dict(first.named_parameters()), 0.1, momentum=0.9, weight_decay=0.0)
    for batch in batches:
        gradients(first, batch)
        whole.step()
    half = Sgd(dict(second.named_parameters()), 0.1, momentum=0.9, weight_decay=0.0)
    for batch in batches[:2]:
        gradients(second, batch)
        half.step()
    other = Sgd(dict(second.named_parameters()), 0.1, momentum=0.9, weight_decay=0.0)
    other.buffers = half.buffers
    gradients(second, batches[2])
    other.step()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_parameters_without_a_gradient_stay() -> None:
    one = model()
    sgd = Sgd(dict(one.named_parameters()), 0.1, momentum=0.9, weight_decay=0.1)
    before = {name: value.clone() for name, value in one.state_dict().items()}
    one[2](torch.ones(1, 5)).sum().backward()
    sgd.step()
    changed = {name for name, value in one.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == sgd.buffers.keys() == {"2.weight", "2.bias"}


def test_a_round_needs_no_compiler(tmp_path: Path) -> None:
    """Importing it would cost every learner a second and more than a hundred megabytes."""
    code = (
        "import sys, launch.cli\n"
        "sys.argv = 'crad-mesh simulate --count 2 --rounds 1 --samples 60 --pool cnn6@0.125 --threads 1'.split()\n"
        "try: launch.cli.main()\n"
        "finally: print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
