"""Cutting one training set into shards for the peers, and each shard into train, validation and test; before that, if
the settings want one, a transfer set that all have in common. Shards of whole groups are made by
:mod:`crad_p2p.data.groups`.

Every peer computes the whole partition from the settings and the seed alone; :func:`partition_digest` lets two peers
find out that they did not get the same one (another NumPy may draw other numbers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.groups import groups_partition, hold_out_groups
from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import DataSettings
from crad_p2p.randomness import generator

_TRIES = 100


@dataclass(frozen=True, eq=False)
class Split:
    """One shard as indices into the whole training set: int64, ascending, without overlap.

    Attributes:
        train: what the peer learns from.
        validation: what its class statistics are counted on.
        test: what its local accuracy is measured on.
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def dirichlet_partition(
    labels: NDArray[np.int64],
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    *,
    min_size: int = 10,
    balance: bool = True,
    what: str = "the training set",
) -> list[NDArray[np.int64]]:
    """Divide all samples among the clients, each class by its own draw from Dirichlet(alpha).

    Args:
        labels: int64 [n].
        clients: number of shards N.
        alpha: concentration; small values give each client few classes.
        generator: source of all draws.
        min_size: everything is drawn again until the smallest shard has so many samples, 100 times at most.
        balance: a client that holds n/N samples gets none of the classes still to come.
        what: the samples, for the errors.

    Returns:
        N index arrays, int64, ascending; each sample is in exactly one.

    Raises:
        ConfigurationError: no draw gave every client ``min_size`` samples.
    """
    wanted = f"min_size {min_size} for each of {clients} peers, but {what} has {len(labels)} samples"
    if len(labels) < clients * min_size:
        raise ConfigurationError(
            f"data.partition: {wanted} and {clients * min_size} are needed; use more samples, fewer peers or a smaller "
            f"min_size in the federation file (alpha {alpha:g} plays no part in this)"
        )
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_TRIES):
        owner = _draw_owners(by_class, len(labels), clients, alpha, generator, balance)
        if np.bincount(owner, minlength=clients).min() >= min_size:
            return [np.flatnonzero(owner == client) for client in range(clients)]
    raise ConfigurationError(
        f"data.partition: {wanted} and {_TRIES} draws with alpha {alpha:g} all left some peer with less; use a larger "
        f"alpha, more samples, fewer peers or a smaller min_size in the federation file"
    )


def _draw_owners(
    by_class: Sequence[NDArray[np.int64]],
    total: int,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    balance: bool,
) -> NDArray[np.int64]:
    """One draw: the client of each sample, int64 [total]."""
    owner = np.empty(total, dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for members in by_class:
        # Setting the share of full clients to zero and renormalising is the same as a Dirichlet draw over the others,
        # which cannot end in 0/0 where alpha is tiny. Some client is always open: not all can hold their even share
        # while samples of this class are left.
        open_clients = np.flatnonzero(sizes * clients < total) if balance else np.arange(clients)
        shares = generator.dirichlet(np.full(len(open_clients), alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members) + 1e-9).astype(np.int64)  # 100 · 0.999… is 100
        shuffled = generator.permutation(members)  # file order may carry structure, such as the patient
        for client, part in zip(open_clients, np.split(shuffled, cuts), strict=True):
            owner[part] = client
            sizes[client] += len(part)
    return owner


def split_holdout(
    labels: NDArray[np.int64], indices: NDArray[np.int64], holdout: float, generator: np.random.Generator
) -> Split:
    """Hold out floor(n_c · holdout) samples of each class c of a shard: the larger half validates, the rest tests.

    A class with fewer than 1/holdout samples is learned from, but neither validated nor tested.

    Args:
        labels: int64, of the whole training set.
        indices: int64 [n], the shard.
        holdout: share in (0, 1).
        generator: source of all draws.
    """
    train, validation, test = [indices[:0]], [indices[:0]], [indices[:0]]
    for label in np.unique(labels[indices]):
        members = generator.permutation(indices[labels[indices] == label])
        held = int(len(members) * holdout + 1e-9)  # 100 · 0.29 is 28.999…
        middle = (held + 1) // 2
        validation.append(members[:middle])
        test.append(members[middle:held])
        train.append(members[held:])
    return Split(*(np.sort(np.concatenate(parts)).astype(np.int64) for parts in (train, validation, test)))


def transfer_set(labels: NDArray[np.int64], settings: DataSettings, seed: int) -> NDArray[np.int64]:
    """The images that belong to no shard, on which peers may compare predictions: as many of every class, or one more.

    Which classes give one more, and which images, is drawn by the seed. Nobody is to use the labels of these images.

    Args:
        labels: int64 [n], of the whole training set.
        settings: ``transfer_samples``.
        seed: the federation seed.

    Returns:
        Indices, int64, ascending; none where the settings want no transfer set.

    Raises:
        ConfigurationError: some class would lose more than half of its images.
    """
    wanted = settings.transfer_samples
    if wanted is None:
        return np.empty(0, dtype=np.int64)
    draw = generator(seed, "transfer set")
    classes, sizes = np.unique(labels, return_counts=True)
    shares = np.full(len(classes), wanted // len(classes))
    shares[draw.permutation(len(classes))[: wanted % len(classes)]] += 1
    least = int(sizes.argmin())
    if -(-wanted // len(classes)) > sizes[least] // 2:
        most = len(classes) * (int(sizes[least]) // 2)
        raise ConfigurationError(
            f"data.transfer_samples: {wanted} images, as many of each of {len(classes)} classes, would take more than "
            f"half of some: class {classes[least]} has {sizes[least]} in the training set; use "
            + (f"at most {most}, or more samples" if most else "more samples")
        )
    parts = [
        draw.permutation(np.flatnonzero(labels == label))[:share]
        for label, share in zip(classes, shares.tolist(), strict=True)
    ]
    return np.sort(np.concatenate(parts)).astype(np.int64)


def make_splits(
    labels: NDArray[np.int64],
    settings: DataSettings,
    ids: Sequence[int],
    seed: int,
    groups: NDArray[np.int64] | None = None,
) -> dict[int, Split]:
    """The split of every peer, by ascending id; the k-th id gets the k-th shard.

    Args:
        labels: int64 [n], of the whole training set.
        settings: partition, holdout and transfer set, of which no shard has an image.
        ids: all peers of the federation, in any order.
        seed: the federation seed.
        groups: int64 [n], for kind ``groups``. The transfer set is taken out without regard to them.

    Raises:
        ConfigurationError: see :func:`dirichlet_partition`, :func:`groups_partition` and :func:`transfer_set`.
    """
    partition = settings.partition
    left = np.setdiff1d(np.arange(len(labels)), transfer_set(labels, settings, seed))
    draw, what = generator(seed, "partition"), "the training set"
    if settings.transfer_samples is not None:
        what += " without its transfer set"
    if partition.by is None:
        shards = dirichlet_partition(
            labels[left],
            len(ids),
            partition.alpha,
            draw,
            min_size=partition.min_size,
            balance=partition.balance,
            what=what,
        )
    else:
        if groups is None:
            raise ValueError("kind groups, and no groups of the training set")
        shards = groups_partition(groups[left], len(ids), draw, by=partition.by, min_size=partition.min_size, what=what)

    def hold_out(shard: NDArray[np.int64], draw: np.random.Generator) -> Split:
        if partition.by is None or groups is None:
            return split_holdout(labels, shard, settings.holdout, draw)
        return Split(*hold_out_groups(groups, shard, settings.holdout, draw))

    return {
        peer: hold_out(left[shard], generator(seed, "holdout", peer=peer))
        for peer, shard in zip(sorted(ids), shards, strict=True)
    }


def validation_counts(labels: NDArray[np.int64], splits: Mapping[int, Split], classes: int) -> dict[int, list[int]]:
    """Validation samples of every class, by peer: the data are common, so every peer knows what the others count."""
    return {peer: np.bincount(labels[split.validation], minlength=classes).tolist() for peer, split in splits.items()}


def partition_digest(
    labels: NDArray[np.int64],
    splits: Mapping[int, Split],
    transfer: NDArray[np.uint8] | None = None,
    groups: NDArray[np.int64] | None = None,
) -> str:
    """sha256 (hex) over what all peers must have alike: the labels of the common training set, every split, the
    images of the transfer set, uint8 [S, C, H, W]: predictions on other images would say nothing, and look the same;
    and the groups, int64 [n], where shards are made of them.
    """
    digest = hashlib.sha256(labels.astype("<i8").tobytes())
    for peer in sorted(splits):
        for part in (splits[peer].train, splits[peer].validation, splits[peer].test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.astype("<i8").tobytes())
    if transfer is not None and len(transfer):
        digest.update(f"transfer set {transfer.shape}".encode())
        digest.update(np.ascontiguousarray(transfer).tobytes())
    if groups is not None:
        digest.update(f"groups {groups.shape}".encode())
        digest.update(groups.astype("<i8").tobytes())
    return digest.hexdigest()
