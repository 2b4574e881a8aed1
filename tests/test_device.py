"""Which device is used; and, where there is an accelerator, that a whole simulation runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_device
from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import build_federation
from crad_p2p.simulation import simulate

ACCELERATOR = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else None


def test_auto_takes_the_accelerator_if_there_is_one() -> None:
    assert resolve_device("auto").type == (ACCELERATOR or "cpu")


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_prefers_cuda_then_mps(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto").type == expected


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--device {name}: cannot be used"):
        resolve_device(name)


@pytest.mark.skipif(ACCELERATOR is None, reason="this machine has neither CUDA nor MPS")
def test_a_simulation_on_the_accelerator() -> None:
    federation = build_federation(
        {
            "federation": "accelerated",
            "rounds": 2,
            "data": {"dataset": "digits", "samples": 300, "holdout": 0.4},
            "training": {"batch_size": 32},
            "peers": [
                {"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": arch}
                for i, arch in enumerate(("resnet18@0.125", "resnet18-half@0.125", "cnn6@0.125"))
            ],
        },
        "the test",
    )
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=Path())
    summary, history = simulate(federation, dataset, device=torch.device(ACCELERATOR or ""), threads=1)
    assert summary.complete
    assert len(history) == 6
    assert all(record.train_loss is not None for record in history)
