"""What every framework of the comparison is given: the shards, the model, and one epoch on one shard.

Imported in the virtual environments of the other frameworks, too; of this project only the architecture is needed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p.architectures import build_model, initialise

ARCH, CLASSES, CHANNELS, PEERS = "cnn6", 10, 1, 10
BATCH, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, CLIP_NORM = 16, 0.02, 0.9, 5e-4, 10.0
MEAN = STD = 0.5


@dataclass(frozen=True)
class Samples:
    """Normalised images float32 [n, 1, 8, 8] and labels int64 [n]."""

    images: Tensor
    labels: Tensor


@cache
def shard(folder: Path, peer: int) -> tuple[Samples, Samples]:
    """What a peer trains on, and what it validates on."""
    with np.load(folder / f"{peer}.npz") as file:
        train, validation = (
            Samples(
                torch.from_numpy(file[f"{part}_images"]).float().div_(255).sub_(MEAN).div_(STD),
                torch.from_numpy(file[f"{part}_labels"]),
            )
            for part in ("train", "validation")
        )
    return train, validation


def start_model() -> nn.Module:
    """The common start."""
    model = build_model(ARCH, classes=CLASSES, channels=CHANNELS)
    initialise(model, 0)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.SGD:
    """As the federation file of this project's peers has it."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples) -> None:
    """One local epoch in a new order. A last batch of one image is left out."""
    model.train()
    for batch in torch.randperm(len(samples.labels)).split(BATCH):
        if len(batch) > 1:
            loss = F.cross_entropy(model(samples.images[batch]), samples.labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """Share of right answers, in one batch."""
    return float((model.eval()(samples.images).argmax(-1) == samples.labels).double().mean())


def versions(*packages: str) -> dict[str, str]:
    """Of these packages, as installed."""
    return {package: version(package) for package in packages}


def note_round(number: int) -> None:
    """Tell the benchmark that all peers have finished this round."""
    with Path(os.environ["BENCHMARK_ROUNDS"]).open("a") as file:
        file.write(f"{number} {time.monotonic()}\n")
