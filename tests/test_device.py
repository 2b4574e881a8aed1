"""Which device is used; and, where there is an accelerator, that a whole simulation runs on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_device, resolve_precision
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


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("possible", [False, True])
def test_bfloat16_where_it_is_fast_and_the_libraries_can(
    monkeypatch: pytest.MonkeyPatch, fast: bool, possible: bool
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("crad_p2p.device.supports", lambda *_: possible)
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == (torch.bfloat16 if fast and possible else torch.float32)
    assert resolve_precision("float32", cpu) == torch.float32
    if possible:
        assert resolve_precision("bfloat16", cpu) == torch.bfloat16
    else:
        with pytest.raises(ConfigurationError, match="--precision bfloat16: cpu cannot compute in it here; use auto"):
            resolve_precision("bfloat16", cpu)


@pytest.mark.skipif(sys.platform != "linux", reason="asks oneDNN, by its variable, for an older processor")
def test_the_libraries_have_the_last_word_on_bfloat16() -> None:
    """As on a processor without AVX-512, where torch's own functions would compute, and oneDNN does not."""
    code = (
        "import torch; from crad_p2p.frozen import supports; cpu = torch.device('cpu'); "
        "print(supports(torch.float32, cpu), supports(torch.bfloat16, cpu))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["True", "False"]


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
