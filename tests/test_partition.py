"""The Dirichlet partition and the hold-out: exact cover, no overlap, sizes, shares and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from crad_p2p.data.partition import (
    Split,
    dirichlet_partition,
    make_splits,
    partition_digest,
    split_holdout,
    transfer_set,
)
from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import DataSettings, PartitionSettings
from crad_p2p.randomness import generator


def balanced(classes: int, per_class: int) -> np.ndarray:
    return np.repeat(np.arange(classes), per_class)


def draw(labels: np.ndarray, clients: int, alpha: float, seed: int = 5, **options: object) -> list[np.ndarray]:
    return dirichlet_partition(labels, clients, alpha, np.random.default_rng(seed), **options)  # type: ignore[arg-type]


def assert_exact_cover(parts: list[np.ndarray], total: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(total))


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("clients", [1, 2, 10])
def test_every_sample_belongs_to_exactly_one_client(clients: int, alpha: float, balance: bool) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 2003)
    shards = draw(labels, clients, alpha, balance=balance)
    assert len(shards) == clients
    assert_exact_cover(shards, len(labels))
    for shard in shards:
        assert shard.dtype == np.int64
        assert len(shard) >= 10
        assert (np.diff(shard) > 0).all()


def test_the_draw_repeats_and_depends_on_the_generator() -> None:
    labels = balanced(10, 100)
    assert all(map(np.array_equal, draw(labels, 5, 0.3), draw(labels, 5, 0.3)))
    assert not all(map(np.array_equal, draw(labels, 5, 0.3), draw(labels, 5, 0.3, seed=6)))


def class_shares(alpha: float, *, balance: bool) -> np.ndarray:
    """Share of each class at each client, [draws · classes, clients]."""
    labels, tables = balanced(10, 1000), []
    for seed in range(20):
        shards = draw(labels, 5, alpha, seed, min_size=1, balance=balance)
        tables.append(np.stack([np.bincount(labels[shard], minlength=10) for shard in shards], axis=1) / 1000)
    return np.concatenate(tables)


def test_alpha_is_the_concentration_of_each_class_over_clients() -> None:
    for alpha in (0.3, 1.0, 10.0):
        shares = class_shares(alpha, balance=False)
        assert shares.mean(axis=0) == pytest.approx(0.2, abs=0.06)  # no client is favoured
        expected = 0.2 * 0.8 / (5 * alpha + 1)  # variance of one component of Dirichlet(alpha, …, alpha)
        assert shares.var() == pytest.approx(expected, rel=0.2)


def test_balance_stops_a_client_once_it_holds_its_even_share() -> None:
    labels = balanced(10, 100)  # ascending, so classes are dealt in this order
    exceeded = 0
    for seed in range(20):
        for shard in draw(labels, 5, 0.3, seed, balance=True):
            by_class = np.bincount(labels[shard], minlength=10)
            held_before = np.cumsum(by_class) - by_class
            assert not by_class[held_before >= 200].any()
        exceeded += any(len(shard) > 300 for shard in draw(labels, 5, 0.3, seed, balance=False))
    assert exceeded  # without balance, some client gets more than balance could ever leave it


def test_a_tiny_alpha_gives_whole_classes_and_no_nan() -> None:
    labels = balanced(10, 100)
    with np.errstate(all="raise"):
        for seed in range(20):
            shards = draw(labels, 10, 1e-3, seed, min_size=1)
            assert_exact_cover(shards, 1000)
            assert sum(len(np.unique(labels[shard])) for shard in shards) < 15  # of 100: classes stay nearly whole


def test_samples_are_shuffled_inside_a_class() -> None:
    shards = draw(np.zeros(1000, np.int64), 2, 100.0)
    assert (np.diff(shards[0]) > 1).sum() > 100  # not one run of consecutive indices


def test_refused_at_once_where_there_are_too_few_samples() -> None:
    with pytest.raises(ConfigurationError) as caught:
        draw(balanced(10, 9), 10, 0.3)
    for part in ("min_size 10", "10 peers", "90 samples", "100 are needed", "alpha 0.3"):
        assert part in str(caught.value)
    assert list(map(len, draw(balanced(1, 10), 1, 0.3))) == [10]  # exactly enough


def test_gives_up_after_a_hundred_draws() -> None:
    class Counting(np.random.Generator):
        draws = 0

        def dirichlet(self, *args: object, **options: object) -> np.ndarray:  # type: ignore[override]
            Counting.draws += 1
            return super().dirichlet(*args, **options)  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError) as caught:  # two classes cannot reach five clients
        dirichlet_partition(balanced(2, 100), 5, 1e-3, Counting(np.random.PCG64(1)), min_size=10, balance=False)
    assert Counting.draws == 2 * 100
    for part in ("alpha 0.001", "min_size 10", "5 peers", "200 samples", "100 draws", "larger alpha"):
        assert part in str(caught.value)


# --------------------------------------------------------------------------------------------------------- hold-out


def assert_disjoint(split: Split, indices: np.ndarray) -> None:
    parts = (split.train, split.validation, split.test)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(indices))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def test_holdout_shares_per_class() -> None:
    counts = {0: 1, 1: 4, 2: 5, 3: 10, 4: 15, 5: 100, 6: 0, 7: 129}
    labels = np.random.default_rng(1).permutation(np.repeat(list(counts), list(counts.values())))
    others = np.full(50, 3)  # same class, another peer's
    split = split_holdout(np.concatenate([labels, others]), np.arange(len(labels)), 0.2, np.random.default_rng(2))
    assert_disjoint(split, np.arange(len(labels)))
    #                                    n_c:   1  4  5  10  15  100  0  129
    held = np.array([0, 0, 1, 2, 3, 20, 0, 25])
    validation = np.array([0, 0, 1, 1, 2, 10, 0, 13])
    np.testing.assert_array_equal(np.bincount(labels[split.validation], minlength=8), validation)
    np.testing.assert_array_equal(np.bincount(labels[split.test], minlength=8), held - validation)
    np.testing.assert_array_equal(np.bincount(labels[split.train], minlength=8), np.array(list(counts.values())) - held)


def test_holdout_is_exact_where_floating_point_is_not() -> None:
    assert 100 * 0.29 < 29
    split = split_holdout(np.zeros(100, np.int64), np.arange(100), 0.29, np.random.default_rng(2))
    assert (len(split.train), len(split.validation), len(split.test)) == (71, 15, 14)


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_holdout_of_a_tiny_shard_of_one_class(size: int) -> None:
    indices = np.arange(100, 100 + size)
    split = split_holdout(np.full(200, 3), indices, 0.2, np.random.default_rng(2))
    assert_disjoint(split, indices)
    assert (len(split.validation), len(split.test)) == (size // 5, 0)


def test_holdout_is_drawn_not_cut_from_the_front() -> None:
    split = split_holdout(np.zeros(100, np.int64), np.arange(100), 0.2, np.random.default_rng(2))
    assert split.validation.max() > 20
    other = split_holdout(np.zeros(100, np.int64), np.arange(100), 0.2, np.random.default_rng(3))
    assert not np.array_equal(split.validation, other.validation)


# ------------------------------------------------------------------------------------------------------ whole splits

LABELS = np.random.default_rng(9).integers(0, 10, 1500)
SETTINGS = DataSettings()


def test_splits_of_all_peers_cover_the_training_set_once() -> None:
    splits = make_splits(LABELS, SETTINGS, range(10), seed=1024)
    parts = [part for split in splits.values() for part in (split.train, split.validation, split.test)]
    assert_exact_cover(parts, len(LABELS))
    held = sum(len(split.validation) + len(split.test) for split in splits.values())
    assert 0.12 < held / len(LABELS) <= 0.2
    for split in splits.values():
        assert len(split.validation) >= len(split.test)


def test_the_kth_id_in_ascending_order_gets_the_kth_shard() -> None:
    splits = make_splits(LABELS, SETTINGS, [30, 7, 100], seed=1)
    assert list(splits) == [7, 30, 100]
    renamed = make_splits(LABELS, SETTINGS, [0, 1, 2], seed=1)

    def shard(split: Split) -> np.ndarray:
        return np.sort(np.concatenate([split.train, split.validation, split.test]))

    for peer, stand_in in ((7, 0), (30, 1), (100, 2)):
        np.testing.assert_array_equal(shard(splits[peer]), shard(renamed[stand_in]))
        assert not np.array_equal(splits[peer].validation, renamed[stand_in].validation)  # the hold-out is the id's


def test_partition_settings_are_used() -> None:
    settings = DataSettings(partition=PartitionSettings(alpha=100.0, min_size=120), holdout=0.5)
    splits = make_splits(LABELS, settings, range(10), seed=1)
    for split in splits.values():
        assert 120 <= len(split.train) + len(split.validation) + len(split.test) < 200
        assert len(split.train) < 100
    with pytest.raises(ConfigurationError, match="min_size 151"):
        make_splits(LABELS, DataSettings(partition=PartitionSettings(min_size=151)), range(10), seed=1)
    unbalanced = DataSettings(partition=PartitionSettings(balance=False))
    assert digest(unbalanced) != digest(SETTINGS)


def digest(settings: DataSettings, seed: int = 1, labels: np.ndarray = LABELS) -> str:
    return partition_digest(labels, make_splits(labels, settings, range(5), seed))


def test_digest_sees_every_difference() -> None:
    assert digest(SETTINGS) == digest(DataSettings())
    others = [
        digest(SETTINGS, seed=2),
        digest(DataSettings(holdout=0.21)),
        digest(SETTINGS, labels=LABELS[:-1]),
    ]
    assert len({digest(SETTINGS), *others}) == 4
    one, two, none = np.array([1]), np.array([2]), np.array([], dtype=np.int64)
    # the same indices in other parts, or at other peers
    variants = [
        [Split(one, two, none)],
        [Split(one, none, two)],
        [Split(none, one, two)],
        [Split(one, none, none), Split(two, none, none)],
        [Split(two, none, none), Split(one, none, none)],
        [Split(one, none, none), Split(none, two, none)],
    ]
    assert len({partition_digest(LABELS, dict(enumerate(variant))) for variant in variants}) == len(variants)


def test_digest_sees_labels_that_give_the_same_split() -> None:
    splits = make_splits(LABELS, SETTINGS, range(5), 1)
    assert partition_digest(LABELS, splits) != partition_digest(1 - np.minimum(LABELS, 1), splits)


def test_digest_is_the_same_on_every_machine() -> None:
    splits = {0: Split(np.array([0, 2**40]), np.array([1]), np.array([], dtype=np.int64))}
    assert (
        partition_digest(np.array([0, 1]), splits) == "0767b071408102aa4f94cc8d46055faa5f9c25a9db08c43ba6450d0bbb292818"
    )


def test_the_shards_of_a_seed_are_what_they_always_were() -> None:
    """Peers of earlier versions would be strangers, and runs lost."""
    labels = np.arange(1500) % 10
    known = {
        None: "4bbfb9fe19fd317c20ade35d97405dbab166349eda133be20c8f2f18d8c0642c",
        203: "ed1fac5814f85f7b6f35dd22447763ca87d59942c3811e16a2b5d782ac80c9c2",
    }
    for transfer, digest in known.items():
        splits = make_splits(labels, DataSettings(transfer_samples=transfer), range(10), 1024)
        assert partition_digest(labels, splits) == digest


# ------------------------------------------------------------------------------------------------------- transfer sets

WITH_TRANSFER = DataSettings(transfer_samples=203)


def test_a_transfer_set_has_all_classes_alike_and_no_shard_has_an_image_of_it() -> None:
    found = transfer_set(LABELS, WITH_TRANSFER, seed=1)
    assert sorted(np.bincount(LABELS[found]).tolist()) == [20] * 7 + [21] * 3
    splits = make_splits(LABELS, WITH_TRANSFER, range(10), seed=1)
    parts = [part for split in splits.values() for part in (split.train, split.validation, split.test)]
    assert_exact_cover([found, *parts], len(LABELS))


def test_everybody_draws_the_same_transfer_set_and_the_seed_another_one() -> None:
    one, again, other = (transfer_set(LABELS, WITH_TRANSFER, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert len(np.intersect1d(one, other)) < 100
    np.testing.assert_array_equal(one, np.unique(one))
    extra = {tuple(np.flatnonzero(np.bincount(LABELS[transfer_set(LABELS, WITH_TRANSFER, s)]) == 21)) for s in range(5)}
    assert len(extra) > 1  # it is not always the first classes that give one more


def test_without_a_transfer_set_all_is_as_it_was() -> None:
    assert transfer_set(LABELS, SETTINGS, seed=1).tolist() == []
    shards = dirichlet_partition(LABELS, 10, 0.3, generator(1, "partition"))
    splits = make_splits(LABELS, SETTINGS, range(10), seed=1)
    for shard, split in zip(shards, splits.values(), strict=True):
        np.testing.assert_array_equal(shard, np.sort(np.concatenate([split.train, split.validation, split.test])))
    none = np.empty((0, 1, 2, 2), dtype=np.uint8)
    assert partition_digest(LABELS, splits, none) == partition_digest(LABELS, splits)


def test_a_transfer_set_takes_half_of_a_class_at_most() -> None:
    labels = np.repeat([0, 1, 4], [100, 100, 9])
    assert np.bincount(labels[transfer_set(labels, DataSettings(transfer_samples=12), 1)]).tolist() == [4, 4, 0, 0, 4]
    said = "13 images, .* of each of 3 classes, .*: class 4 has 9 in the training set; use at most 12, or more samples"
    for seed in range(5):  # whichever class is to give one more
        with pytest.raises(ConfigurationError, match=said):
            transfer_set(labels, DataSettings(transfer_samples=13), seed)
    with pytest.raises(ConfigurationError, match=r"class 1 has 1 in the training set; use more samples$"):
        transfer_set(np.array([0, 0, 1]), DataSettings(transfer_samples=1), 1)
    settings = DataSettings(transfer_samples=200, partition=PartitionSettings(min_size=131))
    with pytest.raises(ConfigurationError, match="the training set without its transfer set has 1300 samples"):
        make_splits(LABELS, settings, range(10), seed=1)


def test_the_digest_sees_the_pixels_of_the_transfer_set() -> None:
    """Predictions on other images have the same shape, and say nothing."""
    splits = make_splits(LABELS, WITH_TRANSFER, range(5), 1)
    images = np.random.default_rng(1).integers(0, 256, (203, 1, 4, 4), dtype=np.uint8)
    changed = images.copy()
    changed[7, 0, 1, 2] ^= 1
    variants = (images, changed, images[::-1], images.reshape(203, 1, 2, 8), None)
    assert len({partition_digest(LABELS, splits, each) for each in variants}) == len(variants)
