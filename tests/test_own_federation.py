"""The part of peers.yaml that is about own images: what is allowed, agreed on, and left to each host."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import Federation, build_federation, describe_difference, load_federation
from launch.quick import write_federation
from peer.intake import agreed_fields

DATA: dict[str, Any] = {"partition": {"kind": "own"}, "classes": ["adenoma", "normal"]}
PEERS = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "data": f"folder:site {i}"} for i in range(2)]


def build(data: dict[str, Any] = DATA, **more: Any) -> Federation:
    tree = {"federation": "own", "data": data, "peers": PEERS, **more}
    return build_federation(copy.deepcopy(tree), "peers.yaml")


def refusal(data: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        build(data, **more)
    return str(caught.value)


def test_the_defaults() -> None:
    data = build().data
    assert data.is_own
    image = data.image_settings
    assert (image.size, image.channels, image.window, data.test, data.holdout) == (28, 3, None, None, 0.2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dataset": "digits"},
            "data: dataset 'digits' with partition kind own, where each site brings its own images",
        ),
        ({"samples": 5}, "'samples' is of one common data set, and partition kind own has none; leave it out"),
        ({"transfer_samples": 5}, "'transfer_samples' is of one common data set"),
        (
            {"partition": {"kind": "own", "alpha": 0.3}},
            "data.partition: 'alpha' with kind own, which cuts no shards; leave one of",
        ),
        ({"partition": {"kind": "own", "min_size": 1}}, "'min_size' with kind own"),
        ({"partition": {"kind": "own", "balance": True}}, "'balance' with kind own"),
        ({"classes": None}, "'classes' must name all classes of the federation, 2 at least"),
        ({"classes": ["one"]}, "2 at least, as partition kind own needs it; found 1"),
        ({"classes": ["a", "b", "a"]}, "classes 'a' and 'a' are the same, or differ in capitals only; rename one"),
        ({"classes": ["Polyp", "polyp"]}, "classes 'Polyp' and 'polyp' are the same, or differ in capitals only"),
        ({"classes": ["a", " b"]}, "must be text without spaces around it"),
        ({"classes": ["a", "u\u0308"]}, "must be text without spaces around it"),
        ({"classes": ["a", "b/c"]}, "cannot be that of a directory of images"),
        ({"classes": ["a", ".b"]}, "cannot be that of a directory of images"),
        ({"classes": [0, 1]}, "'data.classes.0': must be a valid string, found 0"),
        ({"image": {"size": 3}}, "'data.image.size': must be greater than or equal to 4, found 3"),
        ({"image": {"channels": 2}}, "'data.image.channels': must be 1 or 3, found 2"),
        ({"image": {"window": [4095, 0]}}, "window [4095, 0] must be two whole numbers, the smaller one first"),
        ({"image": {"sise": 28}}, "'data.image.sise' is not a field; did you mean 'size'? allowed are size, channels"),
        ({"test": "folder"}, "'folder' does not say where images are; did you mean 'folder:folder'?"),
    ],
)
def test_a_wrong_field_in_one_sentence(fields: dict[str, Any], message: str) -> None:
    said = refusal({**DATA, **fields})
    assert message in said
    assert "\n" not in said


def test_what_belongs_to_own_images_is_refused_without_them() -> None:
    for name, value in {"classes": ["a", "b"], "image": {}, "test": "folder:a"}.items():
        said = refusal({"dataset": "digits", name: value})
        assert f"'{name}' belongs to partition kind own, where each site brings its own images" in said
    said = refusal({"dataset": "digits"})
    assert "peers: peer 0 has its own images ('folder:site 0'), and data.partition.kind is dirichlet; set it to" in said
    wrong = [{**PEERS[0], "data": "site"}]
    assert "'site' does not say where images are; did you mean 'folder:site'?" in refusal(DATA, peers=wrong)


def test_methods_that_need_a_transfer_set_are_refused() -> None:
    said = refusal(DATA, method={"name": "fedmd"})
    assert "method: fedmd compares predictions on a transfer set" in said
    assert "with data.partition.kind own there is none: choose another method" in said


def test_what_is_agreed_on_is_flat_and_has_nothing_of_a_host() -> None:
    federation = build({**DATA, "image": {"window": [0, 4095]}, "test": "folder:common"})
    agreed = {name: value for name, value in federation.agreed().items() if name.startswith(("data.", "peers."))}
    assert agreed == {
        "data.augmentation": "auto",
        "data.classes.0": "adenoma",
        "data.classes.1": "normal",
        "data.holdout": 0.2,
        "data.image.channels": 3,
        "data.image.size": 28,
        "data.image.window.0": 0,
        "data.image.window.1": 4095,
        "data.partition.kind": "own",
        "data.test": True,
        "peers.0.arch": "resnet18",
        "peers.1.arch": "resnet18-half",
    }
    assert agreed_fields(json.dumps(federation.agreed()).encode()) == federation.agreed()


def test_the_digest_sees_all_but_where_images_are() -> None:
    elsewhere = [{**entry, "data": "csv:elsewhere.csv"} for entry in PEERS]
    nowhere = [{name: value for name, value in entry.items() if name != "data"} for entry in PEERS]
    with_test, other_test = ({**DATA, "test": place} for place in ("folder:a", "npz:b.npz"))
    same = {build().digest(), build(peers=elsewhere).digest(), build(peers=nowhere).digest()}
    assert len(same) == 1
    assert build({**DATA, "image": {"size": 28, "channels": 3, "window": None}}).digest() in same
    assert build(with_test).digest() == build(other_test).digest()
    changes: list[dict[str, Any]] = [
        {"classes": ["normal", "adenoma"]},
        {"classes": ["adenoma", "normal", "polyp"]},
        {"image": {"size": 29}},
        {"image": {"channels": 1}},
        {"image": {"window": [0, 65535]}},
        {"test": "folder:a"},
        {"holdout": 0.3},
    ]
    digests = {build({**DATA, **change}).digest() for change in changes}
    assert len(digests) == len(changes)
    assert not digests & same


def test_a_difference_is_said_in_words() -> None:
    one, other = build(), build({**DATA, "classes": ["adenoma", "polyp"]})
    said = describe_difference(one.agreed(), other.agreed(), "the file of peer 1", "the file of peer 0")
    assert said == 'data.classes.1 is "normal" in the file of peer 1 and "polyp" in the file of peer 0'


def test_places_are_taken_from_the_file_and_written_down_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "peers.yaml"
    path.parent.mkdir()
    data = {**DATA, "test": "npz:test.npz"}
    path.write_text(yaml.safe_dump({"federation": "own", "data": data, "peers": PEERS}))
    federation = load_federation(path, tmp_path / "files")
    assert [entry.data for entry in federation.peers] == [f"folder:{path.parent}/site {i}" for i in range(2)]
    assert federation.data.test == f"npz:{tmp_path}/files/test.npz"
    write_federation(federation, tmp_path / "again.yaml")
    again = load_federation(tmp_path / "again.yaml")
    assert again.digest() == federation.digest()
    assert again.peers == federation.peers
    assert again.data.test == federation.data.test
    assert "dataset" not in yaml.safe_load((tmp_path / "again.yaml").read_text())["data"]
