"""Shards of whole groups: who gets which, what is held out, and that all peers come to the same."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from processes import Peers
from typer.testing import CliRunner

from crad_p2p.data.datasets import load_dataset
from crad_p2p.data.groups import groups_partition, hold_out_groups
from crad_p2p.data.partition import Split, make_splits, partition_digest, transfer_set
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ConfigurationError, ExitCode, UsageError
from crad_p2p.federation import DataSettings, Federation, build_federation, load_federation
from crad_p2p.learner import Learner
from crad_p2p.randomness import generator
from crad_p2p.simulation import simulate
from launch.cli import app
from launch.preflight.here import describe_federation
from launch.preflight.learner import describe_data
from launch.quick import Quick, federation_of, split_dataset, write_federation
from launch.template import render

RNG = np.random.default_rng(3)
#: 42 groups of 11 to 389 samples, which are mixed in the file.
SIZES = RNG.integers(11, 390, 42)
GROUPS = RNG.permutation(np.repeat(np.arange(42), SIZES))
LABELS = RNG.integers(0, 4, len(GROUPS))
PARTITION = {"kind": "groups", "by": "patient"}


def data(**fields: Any) -> DataSettings:
    partition = {**PARTITION, **fields.pop("partition", {})}
    return DataSettings.model_validate_json(json.dumps({"dataset": "npz:a.npz", "partition": partition, **fields}))


def deal(groups: np.ndarray, clients: int, seed: int = 5, **options: Any) -> list[np.ndarray]:
    return groups_partition(groups, clients, np.random.default_rng(seed), by="patient", **options)


def assert_whole(parts: Iterable[np.ndarray], groups: np.ndarray, members: np.ndarray) -> None:
    """Every member is in exactly one part, and every group."""
    parts = list(parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(members))
    found = [group for part in parts for group in np.unique(groups[part])]
    assert len(found) == len(set(found))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def parts_of(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return split.train, split.validation, split.test


# ------------------------------------------------------------------------------------------------------------- dealing


@pytest.mark.parametrize("clients", [1, 3, 10, 14])
def test_every_group_belongs_to_exactly_one_client_and_each_has_three(clients: int) -> None:
    for seed in range(5):
        shards = deal(GROUPS, clients, seed)
        assert len(shards) == clients
        assert_whole(shards, GROUPS, np.arange(len(GROUPS)))
        assert min(len(np.unique(GROUPS[shard])) for shard in shards) >= 3


def test_the_deal_repeats_and_depends_on_the_generator() -> None:
    assert all(map(np.array_equal, deal(GROUPS, 5), deal(GROUPS, 5)))
    assert not all(map(np.array_equal, deal(GROUPS, 5), deal(GROUPS, 5, seed=6)))


def test_further_groups_go_to_whoever_has_fewest() -> None:
    """The same order, dealt by hand."""

    class InOrder:
        def permutation(self, count: int) -> np.ndarray:
            return np.arange(count)

    #                  0  1  2  3  4  5 |  6  7  8  9
    sizes = np.array([5, 1, 5, 1, 5, 1, 20, 8, 4, 8])
    groups = np.repeat(np.arange(10), sizes)
    shards = groups_partition(groups, 2, InOrder(), by="patient", min_size=1)  # type: ignore[arg-type]
    # 15 and 3; then 15 and 23; then 23 each, and the lowest id is the next
    assert [np.unique(groups[shard]).tolist() for shard in shards] == [[0, 2, 4, 7, 8], [1, 3, 5, 6, 9]]


def test_too_few_groups_or_samples_are_refused() -> None:
    said = (
        r"data\.partition: for 4 peers 12 groups by patient are needed, 3 each \(to learn from, to validate and to "
        r"test\), but the training set has 11; use fewer peers"
    )
    with pytest.raises(ConfigurationError, match=said):
        deal(np.repeat(np.arange(11), 10), 4)
    deal(np.repeat(np.arange(12), 10), 4)
    with pytest.raises(ConfigurationError, match=r"min_size 31 for each of 4 peers, but the .* 120 .* 124 are needed"):
        deal(np.repeat(np.arange(12), 10), 4, min_size=31)


def test_a_shard_that_is_too_small_has_everything_dealt_again() -> None:
    groups = np.repeat(np.arange(6), [1, 1, 1, 10, 10, 10])
    small = {seed: min(map(len, deal(groups, 2, seed, min_size=1))) for seed in range(20)}
    assert min(small.values()) == 3
    assert all(min(map(len, deal(groups, 2, seed, min_size=12))) == 12 for seed in small)
    with pytest.raises(ConfigurationError, match="100 draws of whole groups by patient all left some peer with less"):
        deal(groups, 2, min_size=13)


# ------------------------------------------------------------------------------------------------------------ hold-out


def hold_out(sizes: list[int], holdout: float = 0.2, seed: int = 2) -> list[list[int]]:
    """The sizes of the groups to learn from, to validate and to test."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    parts = hold_out_groups(groups, np.arange(len(groups)), holdout, np.random.default_rng(seed))
    assert_whole(parts, groups, np.arange(len(groups)))
    return [np.bincount(groups[part])[np.unique(groups[part])].tolist() for part in parts]


def test_no_group_is_divided_between_what_is_learned_and_what_is_measured() -> None:
    shard = np.flatnonzero(GROUPS % 3 == 1)
    for seed in range(10):
        parts = hold_out_groups(GROUPS, shard, 0.2, np.random.default_rng(seed))
        assert_whole(parts, GROUPS, shard)
        assert min(map(len, parts)) > 0
    again = hold_out_groups(GROUPS, shard, 0.2, np.random.default_rng(9))
    assert all(map(np.array_equal, parts, again))
    other = hold_out_groups(GROUPS, shard, 0.2, np.random.default_rng(10))
    assert not all(map(np.array_equal, parts, other))


def test_groups_of_one_size_are_held_out_in_the_share_that_is_wanted() -> None:
    for seed in range(5):
        assert [len(part) for part in hold_out([10] * 20, 0.2, seed)] == [16, 2, 2]
        assert [len(part) for part in hold_out([10] * 20, 0.3, seed)] == [14, 3, 3]  # 0.3 is less as a float
        assert [len(part) for part in hold_out([10] * 15, 0.2, seed)] == [13, 1, 1]  # two are not closer to 15


@pytest.mark.parametrize("sizes", [[100, 300, 200], [1, 1, 1], [1000, 1, 1]])
@pytest.mark.parametrize("holdout", [0.01, 0.2, 0.99])
def test_of_three_groups_each_part_has_one(sizes: list[int], holdout: float) -> None:
    for seed in range(5):
        assert [len(part) for part in hold_out(sizes, holdout, seed)] == [1, 1, 1]


def test_where_all_are_too_large_the_closest_is_taken() -> None:
    for seed in range(5):
        learn, validate, test = hold_out([400, 300, 200, 100], 0.02, seed)
        assert (validate, test, sorted(learn)) == ([100], [200], [300, 400])
    firsts = {hold_out([100, 100, 100], 0.02, seed)[1][0] for seed in range(5)}
    assert firsts == {100}


def test_groups_are_taken_in_the_order_that_is_drawn_while_they_bring_the_count_closer() -> None:
    class InOrder:
        def permutation(self, count: int) -> np.ndarray:
            return np.arange(count)

    #                          target 10:  no  yes yes no | the same from those left: yes, no: 6 and 8 is no closer
    sizes = [20, 4, 5, 3, 6, 8, 54]
    groups = np.repeat(np.arange(7), sizes)
    parts = hold_out_groups(groups, np.arange(100), 0.2, InOrder())  # type: ignore[arg-type]
    assert [np.unique(groups[part]).tolist() for part in parts] == [[0, 5, 6], [1, 2], [3, 4]]
    tied = np.repeat(np.arange(4), [30, 40, 30, 30])  # 30 is as far from the target of 13 as any other 30
    parts = hold_out_groups(tied, np.arange(130), 0.2, InOrder())  # type: ignore[arg-type]
    assert [np.unique(tied[part]).tolist() for part in parts] == [[1, 3], [0], [2]]


# -------------------------------------------------------------------------------------------------------- whole splits


def test_splits_of_all_peers_cover_the_training_set_once() -> None:
    splits = make_splits(LABELS, data(), [30, 7, 100], 1, GROUPS)
    assert list(splits) == [7, 30, 100]
    assert_whole([part for split in splits.values() for part in parts_of(split)], GROUPS, np.arange(len(GROUPS)))
    shards = groups_partition(GROUPS, 3, generator(1, "partition"), by="patient")
    for shard, split in zip(shards, splits.values(), strict=True):
        np.testing.assert_array_equal(shard, np.sort(np.concatenate(parts_of(split))))


def test_the_transfer_set_is_drawn_from_all_groups_and_nothing_else_of_them_is_lost() -> None:
    settings = data(transfer_samples=40)
    cut = transfer_set(LABELS, settings, 1)
    np.testing.assert_array_equal(cut, transfer_set(LABELS, DataSettings(transfer_samples=40), 1))
    splits = make_splits(LABELS, settings, range(10), 1, GROUPS)
    parts = [part for split in splits.values() for part in parts_of(split)]
    assert_whole(parts, GROUPS, np.setdiff1d(np.arange(len(GROUPS)), cut))
    with pytest.raises(ConfigurationError, match="the training set without its transfer set has 42; use fewer peers"):
        make_splits(LABELS, settings, range(15), 1, GROUPS)


def test_settings_of_groups_are_used() -> None:
    sizes = {
        holdout: sum(len(split.validation) for split in make_splits(LABELS, each, range(3), 1, GROUPS).values())
        for holdout, each in ((holdout, data(holdout=holdout)) for holdout in (0.1, 0.6))
    }
    assert 3 * sizes[0.1] < sizes[0.6]
    with pytest.raises(ConfigurationError, match="min_size 5000 for each of 3 peers"):
        make_splits(LABELS, data(partition={"min_size": 5000}), range(3), 1, GROUPS)
    with pytest.raises(ValueError, match="no groups"):
        make_splits(LABELS, data(), range(3), 1)


def test_the_digest_sees_groups_that_give_the_same_split() -> None:
    splits = make_splits(LABELS, data(), range(3), 1, GROUPS)
    variants = (None, GROUPS, 41 - GROUPS, GROUPS[:-1])
    assert len({partition_digest(LABELS, splits, groups=each) for each in variants}) == len(variants)


# ------------------------------------------------------------------------------------------------------------ the peers

SAMPLES = 96


def save(path: Path, groups: np.ndarray | None = None) -> str:
    """Twelve patients with eight small images each."""
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (SAMPLES, 8, 8), dtype=np.uint8)
    labels = rng.integers(0, 3, SAMPLES)
    groups = np.arange(SAMPLES) % 12 if groups is None else groups
    np.savez(
        path,
        train_images=images,
        train_labels=labels,
        train_patient=groups,
        test_images=images[:9],
        test_labels=labels[:9],
    )
    return f"npz:{path}"


def federation(dataset: str, count: int = 3, **fields: Any) -> Federation:
    tree = {
        "federation": "groups",
        "rounds": 2,
        "data": {"dataset": dataset, "partition": PARTITION, **fields},
        "peers": [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6@0.125"} for i in range(count)],
    }
    return build_federation(tree, "a test")


def ready(folder: Path, settings: Federation, peer: int = 1) -> dict[str, Any]:
    """What the learner of a peer says when it has its data."""
    arguments = argparse.Namespace(
        id=peer, device="cpu", precision="float32", data_dir=folder, peers=folder / "peers.yaml", download=False
    )
    arguments.scratch, arguments.count_key = folder / "scratch", None
    events = io.StringIO()
    Learner(settings, arguments, events)
    return dict(json.loads(events.getvalue()))


def test_peers_notice_other_groups(tmp_path: Path) -> None:
    settings = federation(save(tmp_path / "a.npz"))
    images = load_dataset(settings.data, seed=settings.seed, data_dir=tmp_path).train
    splits = make_splits(images.labels, settings.data, settings.ids, settings.seed, images.groups)
    first = ready(tmp_path, settings)
    assert first["partition_digest"] == partition_digest(images.labels, splits, groups=images.groups)
    assert first["train_samples"] == len(splits[1].train)
    groups = np.arange(SAMPLES) % 12
    renamed = federation(save(tmp_path / "b.npz", np.array([f"P{100 - group}" for group in groups])))
    assert ready(tmp_path, renamed)["partition_digest"] == first["partition_digest"]  # the same images are together
    groups[[0, 1]] = groups[[1, 0]]
    other = federation(save(tmp_path / "c.npz", groups))
    assert ready(tmp_path, other)["partition_digest"] != first["partition_digest"]


def test_a_check_shows_the_groups_and_what_validation_lacks(tmp_path: Path) -> None:
    settings = federation(save(tmp_path / "a.npz"))
    said = ready(tmp_path, settings)
    assert said["groups"] == [2, 1, 1]
    said["validation_counts"]["1"] = [2, 1, 0]
    assert describe_data(said, settings, 1).sentence.startswith(
        "16 training images here, of 2 groups by patient, with 1 more to validate and 1 to test; to validate there are "
        "fewer than 2 images of 1, 2; 3 classes, images 1x8x8"
    )
    said["validation_counts"]["1"] = [2, 2, 4]
    assert "with 1 more to validate and 1 to test; 3 classes" in describe_data(said, settings, 1).sentence
    assert "a.npz in whole groups by patient; peer 0" in describe_federation(settings, 0).sentence
    plain = ready(tmp_path, federation(save(tmp_path / "a.npz"), partition={}))
    assert plain["groups"] is None
    assert "training images here; 3 classes" in describe_data(plain, settings, 1).sentence


def test_over_the_network_as_in_memory(mesh: Callable[..., Peers]) -> None:
    settings: dict[str, Any] = {"dataset": "npz:a.npz", "partition": PARTITION, "samples": 90}
    peers = mesh(2, light=False, method={"name": "crad"}, rounds=2, seed=5, data=settings)
    save(peers.folder / "a.npz")
    federation = load_federation(peers.file)
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=peers.folder)
    cpu = torch.device("cpu")
    summary, _ = simulate(federation, dataset, device=cpu, precision=resolve_precision("auto", cpu), threads=1)
    splits = make_splits(dataset.train.labels, federation.data, (0, 1), 5, dataset.train.groups)
    assert sum(len(part) for split in splits.values() for part in parts_of(split)) == 90
    started = [peers.start(0), peers.start(1)]
    for i, (each, expected) in enumerate(zip(started, summary.peers, strict=True)):
        assert each.ended() == ExitCode.COMPLETE, each.output
        assert expected.train_samples == len(splits[i].train)
        assert sum(expected.counts) == len(splits[i].validation)
        result = each.result()
        for field in ("snapshot_sha256", "train_samples", "counts", "local_accuracy"):
            assert getattr(result, field) == getattr(expected, field), (i, field)


# ------------------------------------------------------------------------------------------------------- quick commands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("npz:coloncells.npz@patient", ("npz:coloncells.npz", "patient")),
        ("npz:d@y/a@b.npz@site", ("npz:d@y/a@b.npz", "site")),
        ("npz:a.npz@x/b.npz", ("npz:a.npz@x/b.npz", None)),
        ("npz:d@y/a.npz", ("npz:d@y/a.npz", None)),
        ("npz:a@b", ("npz:a@b", None)),
        ("npz:a.npz@", ("npz:a.npz", "")),
        ("digits", ("digits", None)),
        ("digits@patient", ("digits", "patient")),
    ],
)
def test_what_stands_behind_the_last_at(text: str, expected: tuple[str, str | None]) -> None:
    assert split_dataset(text) == expected


def test_a_quick_command_with_groups(tmp_path: Path) -> None:
    made = federation_of(Quick(dataset="npz:a.npz@patient"), ["127.0.0.1:1", "127.0.0.1:2"])
    assert made.data.dataset == f"npz:{Path('a.npz').resolve()}"
    assert made.data.partition.as_tree() == {"kind": "groups", "by": "patient", "min_size": 10}
    write_federation(made, tmp_path / "peers.yaml")
    assert load_federation(tmp_path / "peers.yaml") == made
    for quick, error, words in (
        (
            Quick(dataset="npz:a.npz@patient", alpha=0.3),
            UsageError,
            "--alpha 0.3 with --dataset npz:a.npz@patient: alp",
        ),
        (Quick(dataset="npz:a.npz@"), ConfigurationError, "'by' is missing"),
        (Quick(dataset="digits@patient"), ConfigurationError, "data set digits has none"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            federation_of(quick, ["127.0.0.1:1"])


def test_init_writes_a_file_with_groups(tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    ended = CliRunner().invoke(app, ["init", str(path), "--dataset", "npz:a.npz@patient"])
    assert ended.exit_code == 0, ended.output
    settings = load_federation(path).data
    assert (settings.dataset, settings.partition.by) == (f"npz:{tmp_path.resolve()}/a.npz", "patient")


def test_a_new_file_with_groups_says_what_they_are() -> None:
    text = render(3, "npz:a.npz", "site: 1")  # a name that YAML would take for something else
    made = build_federation(yaml.safe_load(text), "the new file")
    assert made.data.partition.as_tree() == {"kind": "groups", "by": "site: 1", "min_size": 10}
    assert "the array train_site: 1 of the file" in text
    plain = render(3, "npz:a.npz")
    alternative = plain.replace("# kind: groups", "kind: groups").replace("# by: ", "by: ")
    for line in ("    kind: dirichlet", "    alpha: 0.3", "    balance: true"):
        alternative = alternative.replace(line, "    #")
    assert build_federation(yaml.safe_load(alternative), "a test").data.partition.by == "patient"
