"""Shards of whole groups of images, such as those of one patient, and their hold-out: no group is divided."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from crad_p2p.errors import ConfigurationError

#: Groups of every shard, at least: to learn from, to validate and to test.
_LEAST = 3
_TRIES = 100


def groups_partition(
    groups: NDArray[np.int64],
    clients: int,
    generator: np.random.Generator,
    *,
    by: str,
    min_size: int = 10,
    what: str = "the training set",
) -> list[NDArray[np.int64]]:
    """Deal whole groups to the clients, in an order that is drawn.

    Every client gets three groups first, so that it can learn, validate and test; then each further group goes to the
    client that has fewest images, the lowest of several.

    Args:
        groups: int64 [n], the group of each sample.
        clients: number of shards N.
        generator: source of all draws.
        by: what the groups are called, for the errors.
        min_size: everything is drawn again until the smallest shard has so many samples, 100 times at most.
        what: the samples, for the errors.

    Returns:
        N index arrays, int64, ascending; each sample is in exactly one, and so is each group.

    Raises:
        ConfigurationError: there are fewer than 3 N groups, or no draw gave every client ``min_size`` samples.
    """
    peers = f"{clients} peer{'s' if clients > 1 else ''}"
    wanted = f"min_size {min_size} for each of {peers}, but {what} has {len(groups)} samples"
    if len(groups) < clients * min_size:
        raise ConfigurationError(
            f"data.partition: {wanted} and {clients * min_size} are needed; use more samples, fewer peers or a smaller "
            f"min_size in the federation file"
        )
    numbers, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(numbers) < _LEAST * clients:
        raise ConfigurationError(
            f"data.partition: for {peers} {_LEAST * clients} groups by {by} are needed, {_LEAST} each (to learn from, "
            f"to validate and to test), but {what} has {len(numbers)}; use fewer peers, or more samples where "
            f"data.samples leaves groups out"
        )
    for _ in range(_TRIES):
        owner = _deal(sizes, clients, generator)[which]
        if np.bincount(owner, minlength=clients).min() >= min_size:
            return [np.flatnonzero(owner == client) for client in range(clients)]
    raise ConfigurationError(
        f"data.partition: {wanted} and {_TRIES} draws of whole groups by {by} all left some peer with less; use more "
        f"samples, fewer peers or a smaller min_size in the federation file"
    )


def _deal(sizes: NDArray[np.int64], clients: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """One draw: the client of each group, int64."""
    owner = np.empty(len(sizes), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for place, group in enumerate(generator.permutation(len(sizes))):
        client = place % clients if place < _LEAST * clients else int(held.argmin())
        owner[group] = client
        held[client] += sizes[group]
    return owner


def hold_out_groups(
    groups: NDArray[np.int64], indices: NDArray[np.int64], holdout: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Hold out whole groups of a shard, about holdout/2 of its samples to validate and as many to test.

    In an order that is drawn, a group is taken to validate if that brings their number closer to holdout/2 of all; if
    none is, the one whose size is closest to it. Those to test are taken from the others in the same way. A group is
    always left to test, and one to learn from.

    Labels play no part in this. So classes can be absent in validation, or rarer than in the shard: the peer then has
    little or no support for them, and others give its word on them less weight or none.

    Args:
        groups: int64, of the whole training set.
        indices: int64 [n], the shard: three groups at least.
        holdout: share in (0, 1).
        generator: source of all draws.

    Returns:
        Indices to learn from, to validate and to test: int64, ascending, none of them empty.
    """
    mine = groups[indices]
    numbers, sizes = np.unique(mine, return_counts=True)
    order = generator.permutation(len(numbers)).tolist()
    target = Fraction(str(holdout)) / 2 * len(indices)  # exact: 0.3 as a float is less than three tenths
    validation, left = _take(order, sizes.tolist(), target, leave=2)
    test, train = _take(left, sizes.tolist(), target, leave=1)

    def members(part: list[int]) -> NDArray[np.int64]:
        return np.sort(indices[np.isin(mine, numbers[part])])

    return members(train), members(validation), members(test)


def _take(order: list[int], sizes: list[int], target: Fraction, *, leave: int) -> tuple[list[int], list[int]]:
    """Groups with about ``target`` samples in all, at least one of them, and those that are left."""
    taken: list[int] = []
    count = 0
    for group in order:
        if len(order) - len(taken) > leave and abs(count + sizes[group] - target) < abs(count - target):
            taken.append(group)
            count += sizes[group]
    if not taken:
        taken = [min(order, key=lambda group: abs(sizes[group] - target))]
    return taken, [group for group in order if group not in taken]
