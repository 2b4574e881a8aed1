"""Federations from a few flags, for trying things out on one machine.

Two profiles: the demonstration on scikit-learn's digits, made to show something within two minutes on two cores, and
for every other data set the setting of the paper (ten peers, 300 rounds, full-width architectures).
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from crad_p2p.errors import UsageError
from crad_p2p.federation import POOL, Federation, build_federation, load_federation

DEMONSTRATION = "digits"
#: Why these values: docs/demonstration.md.
_DEMONSTRATION_PROFILE: dict[str, Any] = {
    "pool": tuple(f"{arch}@0.25" for arch in POOL),
    "rounds": 50,
    "alpha": 1.0,
    "training": {"batch_size": 16, "learning_rate": 0.02, "evaluate_every": 10},
}
#: Below those that Linux and macOS give to connections that go out.
_PORTS = range(20_000, 32_768)
_PAPER_PROFILE: dict[str, Any] = {"pool": POOL, "rounds": 300, "alpha": 0.3, "training": {}}


@dataclass(frozen=True)
class Quick:
    """The flags; None where the profile decides."""

    count: int | None = None
    dataset: str | None = None
    alpha: float | None = None
    rounds: int | None = None
    method: str | None = None
    seed: int | None = None
    pool: str | None = None
    samples: int | None = None
    participation: int | None = None
    transfer_samples: int | None = None

    def given(self) -> list[str]:
        """Names of the flags that were used."""
        return [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value is not None]


def split_dataset(text: str) -> tuple[str, str | None]:
    """What ``--dataset`` says: the data set, and what makes the groups that shards consist of, None for Dirichlet.

    ``npz:a.npz@patient`` is ``npz:a.npz`` and ``patient``.
    """
    dataset, at, by = text.rpartition("@")
    is_of_path = dataset.startswith("npz:") and ("/" in by or not dataset.endswith(".npz"))
    return (dataset, by) if at and not is_of_path else (text, None)


def federation_of(quick: Quick, addresses: list[str]) -> Federation:
    """Build the federation; the k-th peer gets the k-th address.

    Raises:
        UsageError: alpha is given for shards of whole groups.
        ConfigurationError: a value is not allowed.
    """
    dataset, by = split_dataset(quick.dataset or DEMONSTRATION)
    if by is not None and quick.alpha is not None:
        raise UsageError(
            f"--alpha {quick.alpha:g} with --dataset {quick.dataset}: alpha is of the Dirichlet draw class by class, "
            f"and @{by} makes shards of whole groups; leave out --alpha, or @{by}"
        )
    if dataset.startswith("npz:"):
        dataset = f"npz:{Path(dataset.removeprefix('npz:')).resolve()}"
    profile = _DEMONSTRATION_PROFILE if dataset == DEMONSTRATION else _PAPER_PROFILE
    partition: dict[str, Any] = {"kind": "groups", "by": by}
    if by is None:
        partition = {"alpha": profile["alpha"] if quick.alpha is None else quick.alpha}
    pool = quick.pool.split(",") if quick.pool else profile["pool"]
    tree: dict[str, Any] = {
        "federation": "local-mesh",
        "rounds": profile["rounds"] if quick.rounds is None else quick.rounds,
        "data": {
            "dataset": dataset,
            "samples": quick.samples,
            "transfer_samples": quick.transfer_samples,
            "partition": partition,
        },
        "method": {"name": quick.method or "crad"},
        "training": profile["training"],
        "peers": [{"id": i, "address": address, "arch": pool[i % len(pool)]} for i, address in enumerate(addresses)],
    }
    if quick.seed is not None:
        tree["seed"] = quick.seed
    if quick.participation is not None:
        tree["participation"] = quick.participation
    return build_federation(tree, "the command line")


def resolve(peers: Path | None, quick: Quick, data_dir: Path | None) -> Federation:
    """The federation of a command: from its file, or from its flags on free ports of this machine.

    Raises:
        UsageError: both were given.
        ConfigurationError: a value or the file is wrong.
    """
    if peers is None:
        return federation_of(quick, free_addresses(10 if quick.count is None else quick.count))
    if given := quick.given():
        raise UsageError(f"--peers {peers} already says everything; leave out {', '.join(given)}, or change the file")
    return load_federation(peers, data_dir)


def data_directory(peers: Path | None, data_dir: Path | None) -> Path:
    """Where the data set's files are: as given, else the federation file's folder, else the current one."""
    return (data_dir or (peers.parent if peers else Path())).resolve()


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody listens on; see :func:`free_ports`."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 on which nobody listens.

    Not chosen by the system: those it also gives to connections that go out, so a peer which is started again could
    find its port taken.

    Raises:
        UsageError: there are not so many.
    """
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(free) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    if len(free) < count:
        raise UsageError(f"{count} peers need as many ports of 127.0.0.1, and {len(free)} are free; use fewer peers")
    return free


def write_federation(federation: Federation, path: Path) -> None:
    """Write a federation as a file that :func:`load_federation` reads back."""
    path.write_text(yaml.safe_dump(federation.as_tree(), sort_keys=False, allow_unicode=True))


def default_threads(count: int) -> int:
    """Torch threads of one learner where ``count`` of them share this machine."""
    return max(1, cores() // count)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
