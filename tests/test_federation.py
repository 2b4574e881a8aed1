"""peers.yaml: defaults of the paper, the sentence for every wrong field, and the digest all peers must share."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from crad_p2p.errors import ConfigurationError, ExitCode
from crad_p2p.federation import (
    DATASETS,
    MEDMNIST_SETS,
    BarrierSettings,
    DataSettings,
    DfmlSettings,
    Federation,
    FedGdSettings,
    FedMkdSettings,
    MethodSettings,
    MsfkdSettings,
    TrainingSettings,
    build_federation,
    describe_difference,
    is_loopback,
    load_federation,
)
from crad_p2p.methods.catalogue import METHODS

TREE: dict[str, Any] = {
    "federation": "colon-demo",
    "peers": [
        {"id": 0, "address": "a.example.org:7400"},
        {"id": 1, "address": "b.example.org:7400", "arch": "cnn6"},
        {"id": 5, "address": "[::1]:7400"},
    ],
}


def tree_with(path: str, value: Any, tree: dict[str, Any] = TREE) -> dict[str, Any]:
    """A tree with one field set, by its dotted name."""
    tree = copy.deepcopy(tree)
    node: Any = tree
    *parents, last = path.split(".")
    for part in parents:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[last] = value
    return tree


def build(tree: dict[str, Any] = TREE) -> Federation:
    return build_federation(copy.deepcopy(tree), "peers.yaml")


def write(folder: Path, content: str | bytes | dict[str, Any]) -> Path:
    path = folder / "peers.yaml"
    if isinstance(content, dict):
        content = yaml.safe_dump(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sentence(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_federation(path)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}")
    return str(caught.value).removeprefix(str(path))


# ------------------------------------------------------------------------------------------------------------- defaults


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    federation = load_federation(write(tmp_path, TREE))
    assert federation == build()
    assert federation.federation == "colon-demo"
    assert (federation.seed, federation.rounds) == (1024, 300)
    data, method, training = federation.data, federation.method, federation.training
    assert data.dataset == "digits"
    assert (data.partition.kind, data.partition.alpha, data.partition.balance) == ("dirichlet", 0.3, True)
    assert (data.partition.min_size, data.holdout, data.samples, data.augmentation) == (10, 0.2, None, "auto")
    assert (method.name, method.temperature, method.distillation_weight) == ("crad", 3.0, 0.7)
    assert (method.min_support, method.empty_class, method.warmup_rounds) == (2, "uniform", 0)
    assert (training.batch_size, training.optimizer, training.learning_rate) == (64, "sgd", 0.01)
    assert (training.momentum, training.weight_decay, training.clip_norm) == (0.9, 5e-4, 10.0)
    assert federation.barrier.policy == "all"


def test_the_example_of_the_design_is_understood(tmp_path: Path) -> None:
    text = """
federation: colon-demo
seed: 1024
rounds: 300
data: {dataset: pathmnist, partition: {kind: dirichlet, alpha: 0.3}, holdout: 0.2}
method: {name: crad, temperature: 3.0, distillation_weight: 0.7, min_support: 2}
training: {batch_size: 64, optimizer: sgd, learning_rate: 0.01, momentum: 0.9, weight_decay: 5.0e-4, clip_norm: 10.0}
barrier: {policy: all}
peers:
  - {id: 0, address: "a.example.org:7400"}
  - {id: 1, address: "b.example.org:7400", arch: cnn6}
  - {id: 5, address: "[::1]:7400"}
"""
    assert load_federation(write(tmp_path, text)) == build(tree_with("data.dataset", "pathmnist"))


def test_architectures_come_from_the_pool_by_id() -> None:
    peers = [{"id": i, "address": f"host{i}:7400"} for i in (0, 1, 2, 3, 4, 5, 7, 65535)]
    federation = build({**TREE, "peers": peers})
    pool = ["resnet18", "resnet18-half", "cnn6"]
    assert [entry.arch for entry in federation.peers] == [pool[i % 3] for i in (0, 1, 2, 3, 4, 5, 7, 65535)]
    assert build().peer(1).arch == "cnn6"  # unless its entry says otherwise


def test_there_are_as_many_peers_as_entries_and_they_are_found_by_id() -> None:
    federation = build({**TREE, "peers": TREE["peers"][::-1]})
    assert federation.ids == (0, 1, 5)
    assert federation.peer(5).address == "[::1]:7400"
    with pytest.raises(ConfigurationError) as caught:
        federation.peer(2)
    assert str(caught.value) == "peer id 2 is not in the federation file; its ids are 0, 1, 5"
    ten = build({**TREE, "peers": [{"id": i, "address": f"host:{i + 1}"} for i in range(10)]})
    with pytest.raises(ConfigurationError, match="peer id 10 is not in the federation file; its ids are 0 to 9"):
        ten.peer(10)
    with pytest.raises(ConfigurationError, match=r"its ids are 0$"):
        build({**TREE, "peers": TREE["peers"][:1]}).peer(-1)


def test_who_teaches_whom_and_when() -> None:
    federation = build(tree_with("method.warmup_rounds", 2))
    assert [federation.teachers_of(1, number) for number in (1, 2, 3, 300)] == [(), (), (0, 5), (0, 5)]
    assert build().teachers_of(0, 1) == (1, 5)
    assert build().teachers_of(5, 1) == (0, 1)
    assert build(tree_with("method.name", "local")).teachers_of(1, 3) == ()
    assert build({**TREE, "peers": TREE["peers"][:1]}).teachers_of(0, 1) == ()


def test_when_the_global_test_set_is_due() -> None:
    federation = build({**TREE, "rounds": 25, "training": {"evaluate_every": 10}})
    assert [number for number in range(26) if federation.evaluates_after(number)] == [10, 20, 25]


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1:1", "127.8.8.8:1", "[::1]:7400", "localhost:1")))
    assert not any(map(is_loopback, ("10.0.0.1:1", "a.example.org:1", "[::2]:1", "0.0.0.0:1", "localhost.org:1")))


# --------------------------------------------------------------------------------------------------------- wrong fields


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("federation", "Colon", "must be lower-case letters, digits and hyphens, 63 at most, found 'Colon'"),
        ("federation", "-a", "must be lower-case letters"),
        ("federation", "a-", "must be lower-case letters"),
        ("federation", "a_b", "must be lower-case letters"),
        ("federation", "", "must be lower-case letters"),
        ("federation", "a" * 64, "must be lower-case letters"),
        ("federation", "a\n", "must be lower-case letters"),
        ("federation", 7, "must be a valid string, found 7"),
        ("seed", -1, "must be greater than or equal to 0, found -1"),
        ("seed", 2**63, "must be less than 9223372036854775808, found 9223372036854775808"),
        ("seed", "x", "must be a valid integer.*found 'x'"),
        ("seed", 1.5, "must be a valid integer.*found 1.5"),
        ("seed", None, "must be a valid integer, found None"),
        ("rounds", 0, "must be greater than or equal to 1, found 0"),
        ("data.holdout", 0, "must be greater than 0, found 0"),
        ("data.holdout", 1, "must be less than 1, found 1"),
        ("data.holdout", float("nan"), "must be a finite number, found nan"),
        ("data.samples", 0, "must be greater than or equal to 1, found 0"),
        ("data.augmentation", "flip", "must be 'auto', 'none', 'crop', 'crop_hflip' or 'hvflip', found 'flip'"),
        ("data.partition.kind", "iid", "must be 'dirichlet', 'groups' or 'own', found 'iid'"),
        ("data.partition.alpha", 0, "must be greater than 0, found 0"),
        ("data.partition.alpha", float("inf"), "must be a finite number, found inf"),
        ("data.partition.min_size", 0, "must be greater than or equal to 1, found 0"),
        ("data.partition.balance", "perhaps", "must be a valid boolean.*found 'perhaps'"),
        ("method.name", 7, "must be a valid string, found 7"),
        ("method.temperature", 0, "must be greater than 0, found 0"),
        ("method.distillation_weight", -0.1, "must be greater than or equal to 0, found -0.1"),
        ("method.distillation_weight", 1.1, "must be less than or equal to 1, found 1.1"),
        ("method.min_support", 0, "must be greater than or equal to 1, found 0"),
        ("method.empty_class", "skip", "must be 'uniform', 'zero' or 'student', found 'skip'"),
        ("method.warmup_rounds", -1, "must be greater than or equal to 0, found -1"),
        ("method.fedmkd", {"memory_weight": "all"}, "must be 'half' or 'uniform', found 'all'"),
        ("method.dfml", {"mode": "server"}, "must be 'symmetric' or 'aggregator', found 'server'"),
        ("method.dfml", {"period": 5}, "must be a multiple of 2, found 5"),
        ("method.dfml", {"alpha_max": 1.1}, "must be less than or equal to 1, found 1.1"),
        ("method.dfml", {"temperature": 0}, "must be greater than 0, found 0"),
        ("method.dfml", 10, "must hold the fields mode, temperature, alpha_min, alpha_max, period, found 10"),
        ("training.batch_size", 1, "must be greater than or equal to 2, found 1"),
        ("training.optimizer", "adam", "must be 'sgd', found 'adam'"),
        ("training.learning_rate", 0, "must be greater than 0, found 0"),
        ("training.momentum", 1, "must be less than 1, found 1"),
        ("training.momentum", -0.1, "must be greater than or equal to 0, found -0.1"),
        ("training.weight_decay", -1, "must be greater than or equal to 0, found -1"),
        ("training.clip_norm", 0, "must be greater than 0, found 0"),
        ("training.evaluate_every", 0, "must be greater than or equal to 1, found 0"),
        ("barrier.policy", "some", "must be 'all' or 'quorum', found 'some'"),
        ("peers.1.id", -1, "must be greater than or equal to 0, found -1"),
        ("peers.1.id", 65536, "must be less than or equal to 65535, found 65536"),
        ("peers.1.arch", 6, "must be a valid string, found 6"),
        (
            "data",
            None,
            "must hold the fields dataset, partition, holdout, samples, transfer_samples, augm.*, found None",
        ),
        ("data", "digits", "must hold the fields dataset, .*found 'digits'"),
        ("data.partition", 0.3, "must hold the fields kind, by, alpha, min_size, balance, found 0.3"),
        ("peers.1", "b.example.org:7400", "must hold the fields id, address, arch, data, found 'b.example.org:7400'"),
        ("peers", None, "found None"),
    ],
)
def test_a_wrong_field_in_one_sentence(tmp_path: Path, field: str, value: Any, message: str) -> None:
    tree = tree_with(field, value) if field != "peers.1" else {**TREE, "peers": [TREE["peers"][0], value]}
    found = sentence(write(tmp_path, tree))
    assert found.startswith((f": '{field}': ", f": '{field}."))
    with pytest.raises(ConfigurationError, match=message):
        build(tree)
    with pytest.raises(ConfigurationError, match=f"^the command line: '{field}[.']"):
        build_federation(tree, "the command line")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.dataset", "cifar", "data set 'cifar' is unknown; did you mean 'cifar10'? allowed are digits, cifar10"),
        (
            "data.dataset",
            "imagenet",
            "data set 'imagenet' is unknown; allowed are digits, cifar10, cifar100, pathmnist",
        ),
        (
            "method.name",
            "scaffold",
            "method 'scaffold' is unknown; allowed are crad, stage1, uniform, uncertainty, acc, ",
        ),
        ("method.name", "fedmk", "method 'fedmk' is unknown; did you mean 'fedmkd'? allowed are crad, "),
        ("method.dfml", {"alpha_min": 0.9}, "alpha_min 0.9 is above alpha_max 0.8"),
        ("peers", [], "the list is empty; at least one peer is needed"),
        ("data.dataset", "npz:", "data set 'npz:' is unknown"),
        ("data.dataset", "chestmnist", "data set 'chestmnist' is multi-label, and CRAD learns single-label classes"),
        ("peers.1.arch", "cnn7", "architecture 'cnn7' is unknown; did you mean 'cnn6'? allowed are resnet18, "),
        ("peers.1.arch", "vgg", "architecture 'vgg' is unknown; allowed are resnet18, resnet18-half, cnn6"),
        ("peers.1.arch", "cnn6@9", "the width in architecture 'cnn6@9' must be a number above 0 and at most 4"),
        ("peers.1.address", "host", "address 'host' must be HOST:PORT with a port from 1 to 65535"),
        ("peers.1.address", ":7400", "address ':7400' must be HOST:PORT"),
        ("peers.1.address", "host:", "address 'host:' must be HOST:PORT"),
        ("peers.1.address", "host:0", "address 'host:0' must be HOST:PORT"),
        ("peers.1.address", "host:65536", "address 'host:65536' must be HOST:PORT"),
        ("peers.1.address", "host:-1", "address 'host:-1' must be HOST:PORT"),
        ("peers.1.address", "host:http", "address 'host:http' must be HOST:PORT"),
    ],
)
def test_a_name_or_address_that_cannot_be(tmp_path: Path, field: str, value: str, message: str) -> None:
    tree = tree_with(field, value, tree_with("method.name", "dfml") if field == "method.dfml" else TREE)
    assert sentence(write(tmp_path, tree)).startswith(f": {field}: {message}")


def test_every_data_set_but_chestmnist_of_the_2d_ones() -> None:
    for name in (*DATASETS, "npz:a.npz"):
        assert DataSettings(dataset=name).dataset == name
    assert {"digits", "cifar10", "cifar100", *MEDMNIST_SETS} == set(DATASETS)
    assert len(MEDMNIST_SETS) == 11
    assert "chestmnist" not in MEDMNIST_SETS


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "round",
            "'round' is not a field; did you mean 'rounds'? allowed are federation, seed, rounds, participation, ",
        ),
        (
            "data.alpha",
            "'data.alpha' is not a field; allowed are dataset, partition, holdout, samples, transfer_samples",
        ),
        (
            "data.partition.alpah",
            "'data.partition.alpah' is not a field; did you mean 'alpha'? allowed are kind, by, alpha",
        ),
        ("method.temperatur", "'method.temperatur' is not a field; did you mean 'temperature'? allowed are name, temp"),
        (
            "method.dfml.cycle",
            "'method.dfml.cycle' is not a field; allowed are mode, temperature, alpha_min, alpha_max",
        ),
        ("training.lr", "'training.lr' is not a field; allowed are batch_size, optimizer, learning_rate, momentum, "),
        ("barrier.quorum", "'barrier.quorum' is not a field; allowed are policy, min, max_staleness, grace"),
        ("peers.1.adress", "'peers.1.adress' is not a field; did you mean 'address'? allowed are id, address, arch"),
    ],
)
def test_an_unknown_field_with_what_is_allowed(tmp_path: Path, field: str, message: str) -> None:
    assert sentence(write(tmp_path, tree_with(field, 1))).startswith(f": {message}")


def without(field: str) -> dict[str, Any]:
    tree = copy.deepcopy(TREE)
    node: Any = tree
    *parents, last = field.split(".")
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    del node[last]
    return tree


@pytest.mark.parametrize("field", ["federation", "peers", "peers.2.address"])
def test_a_missing_field(tmp_path: Path, field: str) -> None:
    assert sentence(write(tmp_path, without(field))) == f": '{field}' is missing; it is required"


def test_a_missing_id(tmp_path: Path) -> None:
    assert sentence(write(tmp_path, without("peers.1.id"))) == ": 'peers.1.id' is missing; it is required"


def test_more_than_one_wrong_field_is_counted(tmp_path: Path) -> None:
    tree = {**TREE, "seed": -1, "rounds": 0, "surplus": 1}
    assert sentence(write(tmp_path, tree)) == ": 'seed': must be greater than or equal to 0, found -1 (and 2 more)"


def test_an_id_or_address_given_twice(tmp_path: Path) -> None:
    twice = ": peers: id 0 is given twice; every peer needs its own id"
    assert sentence(write(tmp_path, tree_with("peers.1.id", 0))) == twice
    twice = ": peers: address 'a.example.org:7400' is given twice; every peer needs its own address"
    assert sentence(write(tmp_path, tree_with("peers.2.address", "a.example.org:7400"))) == twice


def test_a_key_given_twice(tmp_path: Path) -> None:
    text = yaml.safe_dump(TREE)
    assert sentence(write(tmp_path, "seed: 1\nseed: 1\n" + text)) == (
        ", line 1, column 1: is not valid YAML: the key 'seed' is given twice"
    )
    inside = text + "method: {name: crad,\n  name: uniform}\n"
    assert "is not valid YAML: the key 'name' is given twice" in sentence(write(tmp_path, inside))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("federation: [", ", line 1, column 14: is not valid YAML: "),
        ("a: b: c", ", line 1, column 5: is not valid YAML: mapping values are not allowed here"),
        ("federation: a\n\tseed: 1", ", line 2, column 1: is not valid YAML: "),
        (
            "x: !!python/object/apply:os.getcwd []",
            ", line 1, column 4: is not valid YAML: could not determine a constr",
        ),
        ("? [a]\n: b", ", line 1, column 3: is not valid YAML: found unhashable key"),
        ("a: \0", ": is not valid YAML: unacceptable character"),
        (b"federation: \xff", ": is not UTF-8 text"),
        ("", ": must hold fields such as 'federation' and 'peers'; found nothing"),
        ("- 1", ": must hold fields such as 'federation' and 'peers'; found a list"),
        ("text", ": must hold fields such as 'federation' and 'peers'; found a str"),
        ("{}", ": 'federation' is missing; it is required (and 1 more)"),
        ("1: 2", ": '"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert sentence(write(tmp_path, content)).startswith(message)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert sentence(tmp_path / "none.yaml") == (
        ": cannot be read (No such file or directory); 'crad-mesh init' writes such a file"
    )
    assert sentence(tmp_path).startswith(": cannot be read (Is a directory)")


# -------------------------------------------------------------------------------------------------------------- barrier


@pytest.mark.parametrize(("peers", "least"), [(2, 2), (3, 2), (4, 3), (7, 4), (10, 6)])
def test_a_quorum_is_just_over_half_unless_told_otherwise(peers: int, least: int) -> None:
    def with_min(number: int | None) -> Federation:
        entries = [{"id": i, "address": f"127.0.0.1:{7000 + i}"} for i in range(peers)]
        barrier = {"policy": "quorum", "min": number}
        return build_federation({"federation": "q", "peers": entries, "barrier": barrier}, "peers.yaml")

    assert with_min(None).barrier.quorum(peers) == (least, 2, 15.0)
    for number in range(least, peers + 1):
        assert with_min(number).barrier.quorum(peers)[0] == number
    for number in (-1, 0, least - 1, peers + 1):
        expected = rf"barrier\.min: {number} of {peers} peers; it must be more than half, .* from {least} to {peers}$"
        with pytest.raises(ConfigurationError, match=expected):
            with_min(number)


@pytest.mark.parametrize("field", ["min", "max_staleness", "grace"])
def test_what_belongs_to_a_quorum_is_not_silently_ignored(field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{field}' belongs to policy quorum, and the policy is all"):
        build(tree_with(f"barrier.{field}", 2))


# ------------------------------------------------------------------------------------------------------------ partition

GROUPS = tree_with("data", {"dataset": "npz:a.npz", "partition": {"kind": "groups", "by": "patient"}})


def test_shards_of_whole_groups_are_written_down_and_read_again() -> None:
    federation = build(GROUPS)
    assert federation.as_tree()["data"]["partition"] == {"kind": "groups", "by": "patient", "min_size": 10}
    assert federation.data.partition.describe() == "whole groups by patient"
    assert build().data.partition.describe() == "Dirichlet alpha 0.3"
    again = build(federation.as_tree())
    assert again.digest() == federation.digest()
    named = {name: value for name, value in federation.agreed().items() if name.startswith("data.partition.")}
    assert named == {"data.partition.kind": "groups", "data.partition.by": "patient", "data.partition.min_size": 10}
    others = {"by": "hospital", "min_size": 11}
    digests = {build(tree_with(f"data.partition.{field}", value, GROUPS)).digest() for field, value in others.items()}
    assert len(digests | {federation.digest(), build(tree_with("data.dataset", "npz:a.npz")).digest()}) == 4


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            tree_with("data.partition.alpha", 0.3, GROUPS),  # the default, but given
            "data.partition: 'alpha' belongs to kind dirichlet, and the kind is groups; leave one of them out",
        ),
        (
            tree_with("data.partition.balance", True, GROUPS),
            "data.partition: 'balance' belongs to kind dirichlet, and the kind is groups; leave one of them out",
        ),
        (
            tree_with("data.partition.by", "patient"),
            "data.partition: 'by' belongs to kind groups, and the kind is dirichlet; leave one of them out",
        ),
        (
            tree_with("data.partition.by", None, GROUPS),
            "data.partition: 'by' is missing, and kind groups needs it: with 'by: patient', the array train_patient of",
        ),
        (tree_with("data.partition.by", "", GROUPS), "data.partition: 'by' is missing"),
        (
            tree_with("data.dataset", "pathmnist", GROUPS),
            "data: the partition is of kind groups, and data set pathmnist has none: use a file, npz:PATH, with an "
            "array train_patient that says",
        ),
    ],
)
def test_what_belongs_to_another_partition_is_not_silently_ignored(
    tmp_path: Path, tree: dict[str, Any], message: str
) -> None:
    assert sentence(write(tmp_path, tree)).startswith(f": {message}")


# ------------------------------------------------------------------------------------------------------- npz and digest


def test_a_relative_npz_path_is_taken_from_the_file_or_the_data_folder(tmp_path: Path) -> None:
    path = write(tmp_path, tree_with("data.dataset", "npz:sub/../shard.npz"))
    assert load_federation(path).data.dataset == f"npz:{tmp_path.resolve()}/shard.npz"
    elsewhere = load_federation(path, Path("/data"))
    assert elsewhere.data.dataset == "npz:/data/shard.npz"
    assert load_federation(path).digest() == elsewhere.digest()
    absolute = write(tmp_path, tree_with("data.dataset", "npz:/x/shard.npz"))
    assert load_federation(absolute, Path("/data")).data.dataset == "npz:/x/shard.npz"
    assert load_federation(absolute).digest() == elsewhere.digest()
    other_name = write(tmp_path, tree_with("data.dataset", "npz:/x/other.npz"))
    assert load_federation(other_name).digest() != elsewhere.digest()


def test_the_digest_is_of_canonical_json() -> None:
    fields = {name: build().agreed()[name] for name in sorted(build().agreed())}
    pairs = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields.items())
    assert build().digest() == hashlib.sha256(f"{{{pairs}}}".encode()).hexdigest()
    assert fields["method.temperature"] == 3.0
    assert fields["peers.5.arch"] == "cnn6"


def test_the_digest_does_not_see_addresses_or_the_order_of_peers() -> None:
    for change in ({"address": "other.org:1"}, {"address": "127.0.0.1:9"}):
        tree = copy.deepcopy(TREE)
        tree["peers"][1].update(change)
        assert build(tree).digest() == build().digest()
    assert build({**TREE, "peers": TREE["peers"][::-1]}).digest() == build().digest()
    assert not any("address" in name or "7400" in str(value) for name, value in build().agreed().items())


def test_spelling_out_the_defaults_changes_nothing() -> None:
    spelled = copy.deepcopy(TREE)
    spelled.update(seed=1024, rounds=300, data={"dataset": "digits", "holdout": 0.2, "partition": {"alpha": 0.3}})
    spelled.update(method={"temperature": 3}, training={"weight_decay": 0.0005}, barrier={"policy": "all"})
    spelled["peers"][0]["arch"] = "resnet18"
    assert build(spelled).digest() == build().digest()


def test_the_digest_is_what_it_was_before_there_were_other_methods() -> None:
    """A field that is not in use must not be seen: peers of earlier versions would be strangers, and runs lost."""
    known = {
        "crad": "1f38ff9acb1eb5c1a6f8a845bd9f29217caec0b09ca96eab55ac7b7fc7c3940f",
        "uniform": "0b82f08685f734cab356db376c477f536d7ba4a6e4ddfa027ac7ebd9c082c7d1",
        "local": "aa282d3296b4d6b2a2c053d7994c431fe50935f05ccec305da42682fe8107c48",
    }
    for name, digest in known.items():
        assert build(tree_with("method.name", name)).digest() == digest


# ----------------------------------------------------------------------------------------------- settings of one method

SECTIONS: dict[str, Any] = {
    "fedmkd": FedMkdSettings,
    "dfml": DfmlSettings,
    "msfkd": MsfkdSettings,
    "fedgd": FedGdSettings,
}
#: What some methods need besides their name.
WITH_TRANSFER: dict[str, Any] = {**TREE, "data": {**TREE.get("data", {}), "transfer_samples": 50}}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_chosen_and_written_down_again(name: str) -> None:
    federation = build(tree_with("method.name", name, WITH_TRANSFER))
    assert federation.method.traits == METHODS[name]
    tree = federation.as_tree()
    assert {section for section in SECTIONS if section in tree["method"]} == {name} & set(SECTIONS)
    assert build(tree).digest() == federation.digest()


@pytest.mark.parametrize("section", SECTIONS)
def test_the_settings_of_a_method_are_refused_for_another(tmp_path: Path, section: str) -> None:
    for name in ("crad", *(set(SECTIONS) - {section})):
        found = sentence(write(tmp_path, {**TREE, "method": {"name": name, section: {}}}))
        assert found == f": method: '{section}' belongs to method {section}, and the method is {name}; leave it out"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_settings_of_a_method_are_agreed_on_where_it_is_used(section: str) -> None:
    tree = WITH_TRANSFER
    plain = build({**tree, "method": {"name": section}})
    defaults = SECTIONS[section]().model_dump(mode="json")
    assert build({**tree, "method": {"name": section, section: defaults}}).digest() == plain.digest()
    agreed = plain.agreed()
    assert {name.rpartition(".")[2] for name in agreed if name.startswith(f"method.{section}.")} == set(defaults)
    # The same peers by another method, as for a comparison: nothing of the section is left.
    other = plain.model_copy(update={"method": plain.method.model_copy(update={"name": "local"})})
    assert build(other.as_tree()).digest() == other.digest() == build({**tree, "method": {"name": "local"}}).digest()


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("fedmkd", {"memory_weight": "uniform"}),
        ("dfml", {"mode": "aggregator"}),
        ("dfml", {"temperature": 2.0}),
        ("dfml", {"alpha_min": 0.1}),
        ("dfml", {"alpha_max": 0.9}),
        ("dfml", {"period": 20}),
        ("msfkd", {"keep_quantile": 0.4}),
        ("msfkd", {"require_plurality": False}),
        ("fedgd", {"first": 21}),
        ("fedgd", {"every": 49}),
        ("fedgd", {"images": 501}),
        ("fedgd", {"steps": 99}),
        ("fedgd", {"weight": 25.0}),
    ],
)
def test_the_digest_sees_the_settings_of_a_method(name: str, section: dict[str, Any]) -> None:
    changed = build({**WITH_TRANSFER, "method": {"name": name, name: section}})
    assert changed.digest() != build({**WITH_TRANSFER, "method": {"name": name}}).digest()


def test_noise_on_the_counts_does_not_go_with_a_cross_entropy_beside_them(tmp_path: Path) -> None:
    tree = {**TREE, "privacy": {"count_epsilon": 1.0}, "method": {"name": "ce"}}
    assert sentence(write(tmp_path, tree)).startswith(
        ": privacy.count_epsilon: method ce publishes the cross-entropy of"
    )
    build({**tree, "method": {"name": "acc"}})


def test_all_but_fedgd_publish_the_same_kind_in_every_round() -> None:
    for name in set(METHODS) - {"fedgd"}:
        federation = build(tree_with("method.name", name, WITH_TRANSFER))
        kind = "predictions" if name in ("fedmd", "msfkd") else "cnn6"
        assert {federation.published_by(1, number) for number in range(7)} == {kind} == federation.kinds_of(1)


@pytest.mark.parametrize("name", ["fedmd", "msfkd"])
def test_predictions_need_a_transfer_set_and_all_peers(tmp_path: Path, name: str) -> None:
    tree = tree_with("method.name", name, WITH_TRANSFER)
    without = sentence(write(tmp_path, tree_with("data.transfer_samples", None, tree)))
    assert without.startswith(f": data.transfer_samples: it is missing, and method {name} compares predictions on a")
    some = sentence(write(tmp_path, {**tree, "participation": 2}))
    assert some.startswith(f": participation: 2 with method {name}, which moves no models and takes the predictions of")
    build({**WITH_TRANSFER, "participation": 2})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"participation": 2}, "participation: 2 with method fedgd, which moves no models and"),
        (
            {"barrier": {"policy": "quorum"}},
            "barrier.policy: quorum with method fedgd, whose peers all need the images of",
        ),
        (
            {"rounds": 21},
            "method.fedgd.first: images are first made in round 20 of 21, passed on in the next and learned",
        ),
        (
            {"method": {"name": "fedgd", "fedgd": {"images": 2}}},
            "method.fedgd.images: 2 for 3 peers, each of which makes",
        ),
        (
            {"method": {"name": "fedgd", "warmup_rounds": 21}},
            "method.warmup_rounds: 21, and images are first made in round 2",
        ),
    ],
)
def test_images_that_could_not_be_made_or_used(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    tree = tree_with("method.name", "fedgd")
    build({**tree, "rounds": 22})
    build({**tree, "method": {"name": "fedgd", "warmup_rounds": 20, "fedgd": {"images": 3}}})
    assert sentence(write(tmp_path, {**tree, **changes})).startswith(f": {found}")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"participation": 2}, "participation: 2 with method.dfml.mode aggregator, in which one peer a round trains"),
        ({"barrier": {"policy": "quorum"}}, "barrier.policy: quorum with method.dfml.mode aggregator, in which nobody"),
        ({"rounds": 1}, "rounds: 1 with method.dfml.mode aggregator, in which models that were trained in a round are"),
        ({"method.warmup_rounds": 1}, "method.warmup_rounds: 1 with method.dfml.mode aggregator, in which no peer"),
    ],
)
def test_what_does_not_go_with_one_that_trains_for_all(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    for mode in ("symmetric", "aggregator"):
        tree = {**TREE, "method": {"name": "dfml", "dfml": {"mode": mode}}}
        build(tree)
        for field, value in changes.items():
            tree = tree_with(field, value, tree)
        if mode == "symmetric":
            build(tree)
        else:
            assert sentence(write(tmp_path, tree)).startswith(f": {found}")


def test_rounds_in_which_images_are_made() -> None:
    made = FedGdSettings(first=3, every=4)
    assert [number for number in range(14) if made.are_made_in(number)] == [3, 7, 11]


@pytest.mark.parametrize("name", ["fedmd", "msfkd"])
def test_predictions_of_untrained_models_teach_nobody(name: str) -> None:
    federation = build(tree_with("method.name", name, WITH_TRANSFER))
    assert [federation.teachers_of(1, number) for number in range(4)] == [(), (), (0, 5), (0, 5)]
    warm = build(tree_with("method.warmup_rounds", 2, federation.as_tree()))
    assert [warm.teachers_of(1, number) for number in range(4)] == [(), (), (), (0, 5)]


def test_a_transfer_set_is_agreed_on_where_there_is_one() -> None:
    assert build(tree_with("data.transfer_samples", None)).digest() == build().digest()
    assert "data.transfer_samples" not in build().agreed()
    digests = {build(tree_with("data.transfer_samples", size)).digest() for size in (None, 50, 51)}
    assert len(digests) == 3


CHANGES: dict[str, Any] = {
    "federation": "other",
    "seed": 1025,
    "rounds": 301,
    "data.dataset": "pathmnist",
    "data.partition.alpha": 0.31,
    "data.partition.min_size": 11,
    "data.partition.balance": False,
    "data.holdout": 0.21,
    "data.samples": 100,
    "data.transfer_samples": 50,
    "data.augmentation": "none",
    "method.name": "uniform",
    "method.temperature": 3.0001,
    "method.distillation_weight": 0.71,
    "method.min_support": 3,
    "method.empty_class": "zero",
    "method.warmup_rounds": 1,
    "training.batch_size": 65,
    "training.learning_rate": 0.011,
    "training.momentum": 0.8,
    "training.weight_decay": 0.0,
    "training.clip_norm": 11.0,
    "training.evaluate_every": 11,
    "privacy.count_epsilon": 1.0,
    "barrier": {"policy": "quorum"},
    "barrier.min": 3,
    "barrier.max_staleness": 1,
    "barrier.grace": 5,
    "peers.1.arch": "cnn6@0.5",
    "peers.1.id": 2,
}


def test_the_digest_sees_every_other_field() -> None:
    quorum = {**TREE, "barrier": {"policy": "quorum"}}
    digests = {
        build(tree_with(field, value, quorum if field.startswith("barrier.") else TREE)).digest()
        for field, value in CHANGES.items()
    }
    fewer = build({**TREE, "peers": TREE["peers"][:2]}).digest()
    assert len(digests | {fewer, build().digest()}) == len(CHANGES) + 2


def test_no_field_is_forgotten_above() -> None:
    """Every field that is agreed on is either changed above or has a single allowed value."""
    fixed = {"barrier.policy", "data.partition.kind", "training.optimizer"}
    names = {name for name in build(WITH_TRANSFER).agreed() if not name.startswith("peers.")}
    assert names == {name for name in CHANGES if not name.startswith("peers.") and name != "barrier"} | fixed
    sections = {
        "data": DataSettings,
        "method": MethodSettings,
        "training": TrainingSettings,
        "barrier": BarrierSettings,
    }
    declared = {f"{section}.{field}" for section, model in sections.items() for field in model.model_fields}
    assert {name.rsplit(".", name.count(".") - 1)[0] if "partition" in name else name for name in names} >= (
        declared
        - {"data.partition", *(f"method.{section}" for section in SECTIONS)}
        - {"data.classes", "data.image", "data.test"}  # test_own_federation
    )
    peers = {name for name in build().agreed() if name.startswith("peers.")}
    assert peers == {"peers.0.arch", "peers.1.arch", "peers.5.arch"}


def test_the_first_difference_in_words() -> None:
    here, there = build().agreed(), build(tree_with("method.temperature", 4)).agreed()
    assert describe_difference(here, here, "there", "here") is None
    assert describe_difference(there, here, "b", "a") == "method.temperature is 4.0 in b and 3.0 in a"
    both = {**there, "data.dataset": "pathmnist"}
    assert describe_difference(both, here, "b", "a") == 'data.dataset is "pathmnist" in b and "digits" in a'
    fewer = build({**TREE, "peers": TREE["peers"][:2]}).agreed()
    assert describe_difference(fewer, here, "b", "a") == 'peers.5.arch is absent in b and "cnn6" in a'
    assert describe_difference(here, fewer, "b", "a") == 'peers.5.arch is "cnn6" in b and absent in a'
    assert describe_difference({"x": None}, {}, "b", "a") == "x is null in b and absent in a"


def test_a_differing_field_can_be_named_with_both_values() -> None:
    here, there = build().agreed(), build(tree_with("method.temperature", 4)).agreed()
    assert {name: (here[name], there[name]) for name in here if here[name] != there[name]} == {
        "method.temperature": (3.0, 4.0)
    }
    assert list(here) == sorted(here)


@pytest.mark.parametrize("address", ["a:²", "a b:7400", "a:７４００", "a:007400", "[::1:7400", "http://a:7400"])
def test_an_address_that_only_looks_like_one(address: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"address {address!r} must be HOST:PORT")):
        build({**TREE, "peers": [{"id": 0, "address": address, "arch": "cnn6"}]})


@pytest.mark.parametrize("address", ["a:1", "a-b.example.org:65535", "127.0.0.1:7400", "[::1]:7400"])
def test_an_address(address: str) -> None:
    assert build({**TREE, "peers": [{"id": 0, "address": address, "arch": "cnn6"}]}).peers[0].address == address


@pytest.mark.parametrize("value", ["0", 0.5, True, None])
def test_a_wrong_id_is_not_reported_as_another_field(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'peers\.0\.id': must be a valid integer") as error:
        build({**TREE, "peers": [{"id": value, "address": "a:1"}]})
    assert "more)" not in str(error.value)


@pytest.mark.parametrize("text", ["yes", "'7'", "7.5"])
def test_a_number_must_be_written_as_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.yaml"
    path.write_text(f"{{federation: f, rounds: {text}, peers: [{{id: 0, address: 'a:1'}}]}}")
    with pytest.raises(ConfigurationError, match="'rounds': must be a valid integer"):
        load_federation(path)


def test_yaml_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    path.write_text(
        """
federation: f
peers:
  - &first {id: 0, address: 'a:1', arch: cnn6}
  - {<<: *first, id: 1, address: 'a:2'}
"""
    )
    assert [peer.arch for peer in load_federation(path).peers] == ["cnn6", "cnn6"]


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "peers.yaml"
    path.write_text("[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        load_federation(path)
