"""What each peer learns from: a part of a common data set, or images of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crad_p2p.data.datasets import Dataset
from crad_p2p.data.partition import Split, make_splits
from crad_p2p.federation import Federation


@dataclass(frozen=True, eq=False)
class Shard:
    """Of one peer.

    Attributes:
        dataset: the common one, or its own.
        split: which images of its training set the peer learns from, validates and tests on.
    """

    dataset: Dataset
    split: Split


def shards_of(federation: Federation, dataset: Dataset) -> Mapping[int, Shard]:
    """A common data set, cut for every peer.

    Raises:
        ConfigurationError: it cannot be cut so.
    """
    train = dataset.train
    splits = make_splits(train.labels, federation.data, federation.ids, federation.seed, train.groups)
    return {peer: Shard(dataset, split) for peer, split in splits.items()}
