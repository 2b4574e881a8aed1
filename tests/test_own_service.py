"""Own images at the seams of the service: what is said of them, compared, pinned, and refused."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import pixels, save
from rich.console import Console
from test_exchange import exchanging
from test_intake import CLASSES, FEDERATION, LAYOUTS, manifest_document
from wire import PEER, in_loop, manifest_of, serving, until

from crad_p2p.data.own.peers import all_sites
from crad_p2p.errors import ConfigurationError, DataError, UsageError
from crad_p2p.federation import Federation, build_federation
from crad_p2p.learner import Learner
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.simulation import simulate
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, SnapshotError
from launch.compare.plan import make_plan
from launch.explain.command import show
from launch.kept import keep_models
from launch.preflight.here import describe_federation
from launch.preflight.learner import data_message, describe_data
from launch.quick import Quick
from launch.view import Progress, result_table
from peer import events as e
from peer._proto.crad.v1 import peer_pb2
from peer.findings import Level
from peer.hello import data_as_json, describe_data_difference
from peer.host import Host, make_host
from peer.intake import Intake, MessageError, parse
from peer.node import Node

NAMES = ["adenoma", "normal"]


def site(folder: Path, seed: int, count: int = 20, *, classes: int = 2) -> str:
    for label, name in enumerate(NAMES[:classes]):
        for i in range(count):
            base = pixels(1000 * seed + 100 * label + i, 9, 12, below=100)
            save(folder / name / f"{i}.png", (base + 100 * label).astype(np.uint8))
    return f"folder:{folder}"


def federation_of(
    folder: Path, *, count: int = 2, peers: bool = True, method: dict[str, Any] | None = None, **data: Any
) -> Federation:
    entries = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6@0.125"} for i in range(count)]
    if peers:
        for i, entry in enumerate(entries):
            entry["data"] = site(folder / f"site-{i}", i)
    own = {"partition": {"kind": "own"}, "classes": NAMES, "image": {"size": 8}, **data}
    tree = {
        "federation": "own",
        "rounds": 3 if method else 2,
        "data": own,
        "training": {"batch_size": 8},
        "peers": entries,
    }
    tree["method"] = method or {"name": "crad"}
    return build_federation(tree, "test")


def host_of(federation: Federation, folder: Path, **given: Any) -> Host:
    options: dict[str, Any] = {
        "listen": None,
        "state_dir": folder / "state",
        "data_dir": None,
        "download": False,
        "device": "cpu",
        "precision": "float32",
        "threads": 1,
        "tls_dir": None,
        "insecure": True,
        **given,
    }
    return make_host(federation, 0, folder / "peers.yaml", **options)


# --- the host ---------------------------------------------------------------------------------------------------------


def test_the_option_stands_above_the_file_and_one_of_them_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert host_of(federation, tmp_path).data == f"folder:{tmp_path / 'site-0'}"
    host = host_of(federation, tmp_path, data="csv:my images.csv")
    assert host.data == f"csv:{tmp_path}/my images.csv"
    arguments = host.learner_arguments(tmp_path / "scratch")
    assert arguments[arguments.index("--data") + 1] == host.data
    with pytest.raises(ConfigurationError, match=r"peer 0: .* nobody says where the images of this peer are: give 'cr"):
        host_of(federation_of(tmp_path, peers=False), tmp_path)
    with pytest.raises(
        UsageError, match="--data: 'images' does not say where images are; did you mean 'folder:images'"
    ):
        host_of(federation, tmp_path, data="images")


def test_the_option_is_refused_where_the_data_are_common(tmp_path: Path) -> None:
    common = build_federation({"federation": "a", "peers": [{"id": 0, "address": "127.0.0.1:1"}]}, "test")
    with pytest.raises(UsageError, match=r"--data folder:a: .* has data.partition.kind dirichlet, so that all peers"):
        host_of(common, tmp_path, data="folder:a")
    assert "--data" not in host_of(common, tmp_path).learner_arguments(tmp_path)


# --- the learner ------------------------------------------------------------------------------------------------------


def ready_of(federation: Federation, folder: Path, peer: int = 0, **given: Any) -> list[dict[str, Any]]:
    """What a learner says until it is ready."""
    (folder / "state").mkdir(exist_ok=True)
    arguments = argparse.Namespace(id=peer, device="cpu", precision="float32", data_dir=None, download=False)
    arguments.peers, arguments.scratch = folder / "peers.yaml", folder / "scratch"
    arguments.count_key, arguments.data, arguments.state_dir = None, None, folder / "state"
    arguments.look_only = False
    vars(arguments).update(given)
    events = io.StringIO()
    Learner(federation, arguments, events)
    return [json.loads(line) for line in events.getvalue().splitlines()]


def test_a_learner_says_what_it_reads_and_finds(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    (tmp_path / "site-0" / "normal" / "bad.png").write_bytes(b"bad")
    *before, ready = ready_of(federation, tmp_path)
    progress = [event for event in before if event["event"] == "progress"]
    assert (progress[-1]["phase"], progress[-1]["step"], progress[-1]["steps"]) == ("images", 100, 100)
    said = [event["message"] for event in before if event["event"] == "note"]
    assert said == [
        "class adenoma: 16 train, 2 validation, 2 test",
        "class normal: 16 train, 2 validation, 2 test",
        "own images, divided by class: 32 train, 4 validation, 4 test",
    ]
    (warned,) = (event["message"] for event in before if event["event"] == "warning")
    assert warned.startswith("1 file is refused, the first: normal/bad.png, which is no PNG")
    assert warned.endswith(f": see {tmp_path / 'state' / 'data-summary.txt'}")
    assert (tmp_path / "state" / "data-summary.json").exists()
    assert ready["validation_counts"] == {"0": [2, 2]}
    assert (ready["partition_digest"], ready["test_digest"]) == ("", "")
    assert ready["image_shape"] == [3, 8, 8]
    again = ready_of(federation, tmp_path)
    assert not [event for event in again if event["event"] == "progress"]  # nothing is read
    assert again[-1]["own"] == ready["own"]


def test_nothing_that_is_sent_tells_of_the_images(tmp_path: Path) -> None:
    """Two sites with other images say the same of them, and the number of images is in no progress."""
    federation = federation_of(tmp_path)
    site(tmp_path / "site-1", 5, count=50)
    first, second = (ready_of(federation, tmp_path, peer=i, state_dir=tmp_path / str(i)) for i in range(2))
    assert data_message(first[-1]) == data_message(second[-1])
    for events in (first, second):
        assert {event["steps"] for event in events if event["event"] == "progress"} == {100}


def test_a_look_leaves_nothing_behind_and_uses_what_is_there(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    scratch = tmp_path / "scratch"
    first = ready_of(federation, tmp_path, look_only=True, scratch=scratch, state_dir=tmp_path / "no-state")
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and scratch not in path.parents] == [
        scratch,
        tmp_path / "state",
    ]
    assert not list((tmp_path / "state").iterdir())
    ready_of(federation, tmp_path)
    again = ready_of(federation, tmp_path, look_only=True)
    assert not [event for event in again if event["event"] == "progress"]
    assert again[-1]["own"] == first[-1]["own"]


def test_the_option_says_where_the_images_are(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    other = site(tmp_path / "other", 9, count=30)
    assert ready_of(federation, tmp_path, data=other)[-1]["train_samples"] == 48


# --- a simulation -----------------------------------------------------------------------------------------------------


def run(federation: Federation, folder: Path) -> Any:
    said: list[str] = []
    shards = all_sites(federation, folder / "images", said.append)
    summary, history = simulate(federation, shards, device=torch.device("cpu"), threads=1)
    return summary, history, said


def test_without_a_common_test_set_there_is_no_global_accuracy_anywhere(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    summary, history, said = run(federation, tmp_path)
    assert said == [f"peer {i}: own images, divided by class: 32 train, 4 validation, 4 test" for i in range(2)]
    assert summary.mean_global_accuracy is None
    for peer in summary.peers:
        assert (peer.global_accuracy, peer.global_accuracy_per_class) == (None, ())
        assert peer.local_accuracy is not None
        assert sum(peer.counts) == 4
    assert all(record.global_accuracy is None for record in history)
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table(summary, None))
    console.print(Progress(console, federation)._table())
    text = console.file.getvalue()
    assert "own" in text
    assert "common" not in text


def test_with_a_common_test_set_there_is_one(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, test=site(tmp_path / "common", 7, count=10))
    summary, history, _ = run(federation, tmp_path)
    assert summary.mean_global_accuracy is not None
    assert [len(peer.global_accuracy_per_class) for peer in summary.peers] == [2, 2]
    assert [record.global_accuracy is None for record in history] == [True, True, False, False]
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table(summary, None))
    console.print(Progress(console, federation)._table())
    assert console.file.getvalue().count("common: ") == 2
    *_, ready = ready_of(federation, tmp_path)
    assert len(ready["test_digest"]) == 64


def test_a_site_without_a_class_and_one_with_three_images_of_it_take_part(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    for path in (tmp_path / "site-0" / "normal").iterdir():
        path.unlink()
    for path in [*(tmp_path / "site-1" / "adenoma").iterdir()][3:]:
        path.unlink()
    summary, _, said = run(federation, tmp_path)
    assert [peer.train_samples for peer in summary.peers] == [16, 19]
    assert [peer.counts for peer in summary.peers] == [(2, 0), (0, 2)]
    assert said[0] == "peer 0: own images, divided by class: 16 train, 2 validation, 2 test"


def test_peers_that_make_their_transfer_set_need_no_common_images(tmp_path: Path) -> None:
    method = {"name": "fedgd", "fedgd": {"first": 1, "every": 2, "images": 8, "steps": 2}}
    summary, _, _ = run(federation_of(tmp_path, method=method), tmp_path)
    assert summary.complete


def test_explain_refuses_a_run_of_own_images(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    published: list[Any] = []
    shards = all_sites(federation, tmp_path / "images", lambda _: None)
    simulate(federation, shards, device=torch.device("cpu"), threads=1, on_end=published.extend)
    keep_models(out, federation, published)
    with pytest.raises(UsageError, match=r"its peers have their own images \(data.partition.kind own\)"):
        show(Console(), "5", out, student=None, figure=None, as_json=False, data_dir=None, download=False)


def test_compare_refuses_own_images(tmp_path: Path) -> None:
    settings = {"data": {"partition": {"kind": "own"}, "classes": NAMES}}
    with pytest.raises(UsageError, match=r"'data.partition.kind' is not for this file"):
        make_plan(
            methods=["crad"],
            datasets=["digits"],
            seeds=[1],
            counts=[None],
            common=Quick(),
            settings=settings,
            source=str(tmp_path),
        )


def test_all_places_are_needed_before_any_image_is_read(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    entries = (federation.peers[0], federation.peers[1].model_copy(update={"data": None}))
    with pytest.raises(ConfigurationError, match="peer 1: "):
        run(federation.model_copy(update={"peers": entries}), tmp_path)
    assert not (tmp_path / "images").exists()


# --- what peers compare -----------------------------------------------------------------------------------------------


def test_the_digest_of_the_common_test_set_is_compared() -> None:
    def data(digest: str) -> peer_pb2.Data:
        return peer_pb2.Data(class_names=NAMES, image_shape=[3, 8, 8], test_digest=digest)

    a, b, none = data("a" * 64), data("b" * 64), data("")
    assert describe_data_difference(a, a, 1, 0) is None
    assert describe_data_difference(none, none, 1, 0) is None
    assert describe_data_difference(a, b, 1, 0) == (
        "the common test sets (data.test) differ: digest aaaaaaaaaaaa… on peer 1 and bbbbbbbbbbbb… on peer 0; give "
        "both the same files in the same classes"
    )
    assert "aaaaaaaaaaaa… on peer 1 and none on peer 0" in str(describe_data_difference(a, none, 1, 0))
    assert data_as_json(a)["test_digest"] == "a" * 64
    assert "test_digest" not in data_as_json(none)
    with pytest.raises(MessageError, match=r"with data .*, which cannot be"):
        parse(peer_pb2.PeerState, peer_pb2.PeerState(phase="wait", data=data("x" * 64)).SerializeToString())
    parse(peer_pb2.PeerState, peer_pb2.PeerState(phase="images", data=a).SerializeToString())


# --- counts -----------------------------------------------------------------------------------------------------------


def own_intake(epsilon: float | None = None, samples: dict[int, tuple[int, ...]] | None = None) -> tuple[Intake, bytes]:
    tree = FEDERATION.model_dump(mode="json")
    data = {"partition": {"kind": "own"}, "classes": ["a", "b", "c"]}
    peers = [{name: value for name, value in entry.items() if name != "data"} for entry in tree["peers"]]
    federation = build_federation({**tree, "data": data, "peers": peers, "privacy": {"count_epsilon": epsilon}}, "test")
    document = json.dumps(manifest_document(run=federation.digest())).encode()
    return Intake(federation, LAYOUTS, CLASSES, samples=samples), document


def test_counts_of_others_are_not_known_and_those_of_this_peer_are() -> None:
    counts = (3, 0, 5)  # of the document
    intake, document = own_intake(samples={0: (1, 1, 1)})
    intake.manifest(document, 1, 4)
    intake, document = own_intake(samples={1: counts})
    intake.manifest(document, 1, 4)
    intake, document = own_intake(samples={1: (3, 1, 5)})
    with pytest.raises(SnapshotError, match="counts 0 validation samples of class 1, and it has 1"):
        intake.manifest(document, 1, 4)
    intake, document = own_intake(0.5, samples={1: (103, 0, 5)})
    intake.manifest(document, 1, 4)  # within the noise


def test_counts_are_pinned_and_noise_that_was_lost_moves_them_only_so_far() -> None:
    intake, document = own_intake()
    intake.manifest(document, 1, 4, counts=(3, 0, 5))
    for may_draw_again in (False, True):
        with pytest.raises(SnapshotError, match="counts 5 validation samples of class 2, and an earlier one 6"):
            intake.manifest(document, 1, 4, counts=(3, 0, 6), may_draw_again=may_draw_again)
    with pytest.raises(SnapshotError, match="statistics of 3 classes, and an earlier one of 2"):
        intake.manifest(document, 1, 4, counts=(3, 0))
    intake, document = own_intake(0.5)  # noise of 100 at most, twice
    intake.manifest(document, 1, 4, counts=(3, 200, 5), may_draw_again=True)
    with pytest.raises(SnapshotError, match="an earlier one 201"):
        intake.manifest(document, 1, 4, counts=(3, 201, 5), may_draw_again=True)
    with pytest.raises(SnapshotError, match="an earlier one 200"):
        intake.manifest(document, 1, 4, counts=(3, 200, 5))


@in_loop
async def test_the_first_counts_that_come_are_what_counts(tmp_path: Path) -> None:
    """Two rounds of a peer may be on their way at once, each asked for when nothing of it was known."""
    async with serving(tmp_path) as remote, exchanging(remote, tmp_path) as here:
        asked = here.exchange._fetched_manifest

        async def slowly(peer: int, number: int) -> Manifest:
            manifest = await asked(peer, number)
            here.exchange._counts[peer] = (7, 7)  # meanwhile another one has come
            return manifest

        here.exchange._fetched_manifest = slowly  # type: ignore[method-assign]
        here.exchange.fetch(e.FetchManifest(PEER, 0))
        await until(lambda: here.events == [e.SnapshotRefused(PEER, 0, manifest=True)])
        assert "counts 1 validation samples of class 0, and an earlier one 7" in here.exchange.reasons[PEER]
        assert here.exchange._counts[PEER] == (7, 7)
        assert manifest_of(0).statistics.counts == (1, 1)


@pytest.mark.parametrize(("there", "is_same"), [((2, 2), True), ((2, 3), False)])
def test_a_peer_that_got_its_rounds_back_must_have_its_images_back(
    tmp_path: Path, there: tuple[int, ...], is_same: bool
) -> None:
    federation = federation_of(tmp_path)
    *_, ready = ready_of(federation, tmp_path)
    node = Node(federation, host_of(federation, tmp_path, state_dir=tmp_path / "lost"))
    node._store.open(federation, 0)
    node._tls = None
    staging = node._store.staging_dir(0)
    for name in (SNAPSHOT_FILE, CHECKPOINT_FILE):
        (staging / name).write_bytes(b"x")
    statistics = ClassStatistics(counts=there, hits=(0, 0), predicted=(0, 0))
    manifest = manifest_of(0).model_copy(update={"peer": 0, "statistics": statistics})
    node._store.commit(staging, manifest, RoundRecord(peer=0, round=0, snapshot_sha256="", validation_accuracy=None))
    try:
        if is_same:
            node._require_published_counts(node._intake_of(ready))
        else:
            with pytest.raises(
                DataError,
                match=r"the images are not those with which this peer trained: round 0, which it got back, counts 3 "
                r"validation images of class 1, and here are 2; put the images back",
            ):
                node._require_published_counts(node._intake_of(ready))
    finally:
        node._store.close()


# --- the check and what is printed ------------------------------------------------------------------------------------


def test_the_check_tells_of_own_images(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    assert "2 rounds of crad on own images; peer 0 is cnn6@0.125" in describe_federation(federation, 0).sentence
    *_, ready = ready_of(federation, tmp_path)
    finding = describe_data(ready, federation, 0)
    assert finding.level is Level.OK
    assert finding.sentence == (
        "own images, divided by class: 32 train, 4 validation, 4 test; 2 of 2 classes are here, images 3x8x8; learner "
        "on cpu"
    )
    (tmp_path / "site-0" / "normal" / "bad.png").write_bytes(b"bad")
    finding = describe_data(ready_of(federation, tmp_path)[-1], federation, 0)
    assert finding.level is Level.WARNING
    assert "1 file is refused, the first: normal/bad.png, which is no PNG" in finding.sentence


def test_noise_is_said_otherwise_where_images_are_own(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    noised = federation.model_copy(update={"privacy": federation.privacy.model_copy(update={"count_epsilon": 1.0})})
    sentence = describe_federation(noised, 0).sentence
    assert "hits, accuracies and models have none" in sentence
    assert "common data set" not in sentence
