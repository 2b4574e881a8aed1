"""Sites with their own images as real processes: the bytes of the simulation, other test sets, other images."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pictures import pixels, save
from processes import ENVIRONMENT, Peers, assert_one_sentence

from crad_p2p.errors import ExitCode
from launch.quick import free_addresses

NAMES = ["adenoma", "normal", "polyp"]
ARCHITECTURES = ["cnn6@0.125", "resnet18@0.125", "resnet18-half@0.125"]
DATA: dict[str, Any] = {"partition": {"kind": "own"}, "classes": NAMES, "image": {"size": 8, "channels": 1}}


def site(folder: Path, seed: int, **counts: int) -> str:
    for name, count in counts.items():
        for i in range(count):
            base = pixels(1000 * seed + 100 * NAMES.index(name) + i, 9, 12, below=80)
            save(folder / name / f"{i}.png", base + 80 * NAMES.index(name))
    return f"folder:{folder}"


def crad_mesh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "launch", *arguments, "--threads", "1", "--device", "cpu"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mesh and its simulation, in ``up`` and ``simulate``."""
    folder = tmp_path_factory.mktemp("own")
    site(folder / "site 0", 0, adenoma=20, normal=20, polyp=3)
    site(folder / "site 1", 1, adenoma=30, polyp=10)
    site(folder / "other", 2, normal=12, polyp=12)
    rows = [f"other/{name}/{i}.png,{name},P{i // 2}" for name in ("normal", "polyp") for i in range(12)]
    (folder / "site 2.csv").write_text("image,label,patient\n" + "\n".join(rows) + "\n")
    places = ["folder:site 0", "folder:site 1", "csv:site 2.csv"]
    peers = [
        {"id": i, "address": address, "arch": ARCHITECTURES[i], "data": places[i]}
        for i, address in enumerate(free_addresses(3))
    ]
    tree = {"federation": "own", "rounds": 2, "data": DATA, "training": {"batch_size": 8}, "peers": peers}
    (folder / "peers.yaml").write_text(yaml.safe_dump(tree))
    for command in ("up", "simulate"):
        ended = crad_mesh(command, "--peers", "peers.yaml", "--out", command, cwd=folder)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
        (folder / f"{command}.txt").write_text(ended.stdout)
    return folder


def summary(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return tree


def test_mesh_and_simulation_have_the_same_bytes(runs: Path) -> None:
    over_grpc, in_memory = summary(runs / "up"), summary(runs / "simulate")
    assert over_grpc["config_digest"] == in_memory["config_digest"]
    for field in ("best_round", "mean_local_accuracy", "complete"):
        assert over_grpc[field] == in_memory[field]
    for field in ("snapshot_sha256", "train_samples", "counts", "hits", "local_accuracy"):
        assert [peer[field] for peer in over_grpc["peers"]] == [peer[field] for peer in in_memory["peers"]], field
    assert [peer["counts"] for peer in over_grpc["peers"]] == [[2, 2, 0], [3, 0, 1], [0, 2, 2]]


def test_what_was_not_measured_is_null_and_in_no_table(runs: Path) -> None:
    for folder in (runs / "up", runs / "simulate"):
        tree = summary(folder)
        assert tree["mean_global_accuracy"] is None
        assert {peer["global_accuracy"] for peer in tree["peers"]} == {None}
        assert {len(peer["global_accuracy_per_class"]) for peer in tree["peers"]} == {0}
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert {line["global_accuracy"] for line in lines} == {None}
        assert "common" not in (runs / f"{folder.name}.txt").read_text()


def test_each_peer_keeps_its_images_and_says_what_they_are(runs: Path) -> None:
    for i, images in enumerate((43, 40, 24)):
        folder = runs / "up" / "peers" / str(i)
        assert (folder / "images" / "own.images").stat().st_size == images * 8 * 8
        assert (folder / "images" / "own.images").read_bytes() == (
            runs / "simulate" / "images" / str(i) / "own.images"
        ).read_bytes()
        tree = json.loads((folder / "data-summary.json").read_text())
        assert sum(sum(parts.values()) for parts in tree["images"].values()) == images
        assert tree == json.loads((runs / "simulate" / "images" / str(i) / "data-summary.json").read_text())
    log = (runs / "up" / "peers" / "2" / "log.txt").read_text()
    assert "INFO    class normal: 8 train, 2 validation, 2 test" in log
    assert "INFO    own images of 6 patients, divided by patient" in log
    assert "INFO    without any image here: adenoma" in log
    assert "3 classes, each peer's images are its own." in (runs / "up.txt").read_text()


def test_a_finished_run_stays_that_of_its_images(runs: Path) -> None:
    """The same command shows it again; with other places it is another run."""
    again = crad_mesh("up", "--peers", "peers.yaml", "--out", "up", cwd=runs)
    assert again.returncode == 0
    assert "holds the complete run of this federation" in " ".join(again.stdout.split())
    tree = yaml.safe_load((runs / "peers.yaml").read_text())
    tree["peers"][0]["data"] = "folder:site 1"
    (runs / "other.yaml").write_text(yaml.safe_dump(tree))
    other = crad_mesh("up", "--peers", "other.yaml", "--out", "up", cwd=runs)
    assert other.returncode == ExitCode.CONFIGURATION
    assert re.search(r"holds a run with other settings: peers\.0\.data is .*site 0.* and .*site 1", other.stderr)


def test_a_peer_without_a_place_is_named_before_anything_is_started(runs: Path) -> None:
    tree = yaml.safe_load((runs / "peers.yaml").read_text())
    del tree["peers"][1]["data"]
    (runs / "missing.yaml").write_text(yaml.safe_dump(tree))
    for command in ("up", "simulate"):
        ended = crad_mesh(command, "--peers", "missing.yaml", "--out", "missing", cwd=runs)
        assert ended.returncode == ExitCode.CONFIGURATION
        assert "crad-mesh: peer 1: data.partition.kind is own, and nobody says where" in ended.stderr


# --- one peer a host --------------------------------------------------------------------------------------------------


def own(mesh: Callable[..., Peers], tmp_path: Path, count: int = 2, **data: Any) -> Peers:
    """Peers whose images are in ``site-i``."""
    for i in range(count):
        site(tmp_path / f"site-{i}", i, adenoma=20, normal=20)
    return mesh(count, light=False, rounds=2, data={**DATA, **data}, training={"batch_size": 8})


def test_other_common_test_sets_end_both(mesh: Callable[..., Peers], tmp_path: Path) -> None:
    """Each host has the test set at a place of its own; what is in it must be the same."""
    peers = own(mesh, tmp_path, test="folder:common")
    for i in range(2):
        site(tmp_path / f"host-{i}" / "common", 7 + i, polyp=3)
    running = [
        peers.start(i, "--data", f"folder:{tmp_path}/site-{i}", "--data-dir", f"{tmp_path}/host-{i}") for i in range(2)
    ]
    for each in running:
        assert each.ended() == ExitCode.PEERS_DISAGREE, each.output
        assert "different data: the common test sets (data.test) differ: digest " in each.last_words()


def test_a_peer_goes_on_with_its_images_and_with_no_others(mesh: Callable[..., Peers], tmp_path: Path) -> None:
    peers = own(mesh, tmp_path)

    def start(*ids: int, options: tuple[str, ...] = ()) -> list[Any]:
        return [peers.start(i, *options, CRAD_DATA=f"folder:{tmp_path}/site-{i}") for i in ids]

    for each in start(0, 1):
        assert each.ended() == 0, each.output
    before = (peers.state(1) / "images" / "own.images").stat().st_mtime_ns
    for each in start(0, 1):  # they serve once more; nothing is read again
        assert each.ended() == 0, each.output
    assert (peers.state(1) / "images" / "own.images").stat().st_mtime_ns == before
    changed = tmp_path / "site-1" / "normal"
    for i in range(10):
        (changed / f"{i}.png").unlink()
    # The last rounds are here, so only a lost disk makes it start a learner at once.
    shutil.rmtree(peers.state(1))
    (one,) = start(1, options=("--recover",))
    (zero,) = start(0)
    assert one.ended() == ExitCode.DATA, one.output
    assert_one_sentence(
        one.output,
        ExitCode.DATA,
        ExitCode.DATA,
        r"the images are not those with which this peer trained: round 2, which it got back, counts 2 validation "
        r"images of class 1, and here are 1; put the images back",
    )
    zero.kill()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ([], ExitCode.CONFIGURATION, "peer 0: data.partition.kind is own, and nobody says where the images"),
        (
            ["--data", "site-0"],
            ExitCode.USAGE,
            "--data: 'site-0' does not say where images are; did you mean 'folder:s",
        ),
        (["--data", "folder:nowhere"], ExitCode.DATA, "nowhere: the directory of images cannot be read"),
        (
            ["--data", "folder:typo"],
            ExitCode.DATA,
            "the directory 'adenom' is no class of the federation; did you mean",
        ),
    ],
)
def test_mistakes_end_with_one_sentence(
    mesh: Callable[..., Peers], tmp_path: Path, options: list[str], code: ExitCode, sentence: str
) -> None:
    peers = own(mesh, tmp_path, count=1)
    shutil.copytree(tmp_path / "site-0", peers.folder / "typo")
    (peers.folder / "typo" / "adenoma").rename(peers.folder / "typo" / "adenom")
    peer = peers.start(0, *options)
    ended = peer.ended()
    assert_one_sentence(peer.output, ended, code, re.escape(sentence))


def test_the_check_reads_the_images_and_leaves_nothing(mesh: Callable[..., Peers], tmp_path: Path) -> None:
    peers = own(mesh, tmp_path, count=1)
    (tmp_path / "site-0" / "normal" / "bad.png").write_bytes(b"bad")
    command = [sys.executable, "-P", "-m", "launch", "check", "--id", "0", "--peers", str(peers.file), "--wait", "0"]
    command += ["--device", "cpu", "--threads", "1"]
    environment = {**ENVIRONMENT, "CRAD_DATA": f"folder:{tmp_path}/site-0"}
    ended = subprocess.run(command, cwd=peers.folder, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if " data " in line)
    assert re.match(
        r"warning +data +own images, divided by class: 32 train, 4 validation, 4 test; 2 of 3 classes are here, images "
        r"1x8x8; learner on cpu; 1 file is refused, the first: normal/bad.png, which is no PNG",
        line,
    )
    assert not (peers.folder / "crad-state").exists()
