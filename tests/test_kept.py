"""``--keep-models``: what stays of a simulation is what its peers would have published, where they would keep it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from crad_p2p import durable
from crad_p2p.errors import IncompleteError, UsageError
from crad_p2p.federation import load_federation
from crad_p2p.results import Summary
from crad_p2p.snapshot import SNAPSHOT_FILE, sha256_file
from launch import kept
from launch.cli import app
from launch.compare.plan import make_plan
from launch.compare.run import perform
from launch.compare.session import find_finished, folder_of, name_without_models, prepare
from launch.engines import Job, Need
from launch.kept import has_models, keep_models
from launch.quick import Quick
from peer.store import Store

TINY = [
    "--count",
    "3",
    "--rounds",
    "2",
    "--samples",
    "200",
    "--pool",
    "cnn6@0.125",
    "--threads",
    "1",
    "--device",
    "cpu",
]


def simulate(out: Path, *options: str) -> None:
    ended = CliRunner().invoke(app, ["simulate", *TINY, *options, "--out", str(out)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output


def test_every_peer_has_its_last_snapshot_where_a_state_directory_has_it(tmp_path: Path) -> None:
    simulate(tmp_path / "plain", "--participation", "2")
    simulate(tmp_path, "--participation", "2", "--keep-models")
    assert not has_models(tmp_path / "plain")
    federation = load_federation(tmp_path / "models" / "peers.yaml")
    plain, summary = Summary.read(tmp_path / "plain" / "summary.json"), Summary.read(tmp_path / "summary.json")
    assert federation.digest() == summary.config_digest == plain.config_digest
    assert [each.snapshot_sha256 for each in summary.peers] == [each.snapshot_sha256 for each in plain.peers]
    for peer, result in zip(federation.ids, summary.peers, strict=True):
        store = Store(tmp_path / "models" / str(peer))
        number = federation.version(peer, 2)
        assert store.kept_rounds() == [number]
        manifest = store.manifest(number)
        assert sha256_file(store.round_dir(number) / SNAPSHOT_FILE) == manifest.sha256 == result.snapshot_sha256
    assert {federation.version(peer, 2) for peer in federation.ids} != {2}  # one was away


def test_models_of_an_earlier_run_are_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    simulate(tmp_path, "--keep-models")
    before = sha256_file(Store(tmp_path / "models" / "0").round_dir(2) / SNAPSHOT_FILE)
    simulate(tmp_path, "--keep-models", "--seed", "7")
    assert sha256_file(Store(tmp_path / "models" / "0").round_dir(2) / SNAPSHOT_FILE) != before
    other = tmp_path / "other"
    (other / "models").mkdir(parents=True)
    (other / "models" / "mine").write_text("")
    with pytest.raises(UsageError, match="is there already, and holds no models of a simulation; choose another --out"):
        CliRunner().invoke(app, ["simulate", *TINY, "--keep-models", "--out", str(other)], catch_exceptions=False)
    with pytest.raises(UsageError, match="holds no models of a simulation"):
        keep_models(other, load_federation(tmp_path / "models" / "peers.yaml"), [])
    assert [path.name for path in other.rglob("*")] == ["models", "mine"]


def test_a_full_disk_is_an_error_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        durable.write_file(path, content)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_file", full)
    with pytest.raises(IncompleteError, match=r"could not be kept in .*models \(No space left on device\); mend that"):
        simulate(tmp_path, "--keep-models")
    assert not has_models(tmp_path)
    assert Summary.read(tmp_path / "summary.json").complete  # what was computed is there


def test_runs_of_a_comparison_keep_theirs_in_their_folders(tmp_path: Path) -> None:
    quick = Quick(rounds=1, samples=200, pool="cnn6@0.125")
    plan = make_plan(methods=["crad", "local"], datasets=["digits"], seeds=[1], counts=[3], common=quick)
    for planned, keeps in zip(plan, (True, False), strict=True):
        folder = prepare(planned, tmp_path)
        assert ("--keep-models" in Job("", folder, folder, "float32", Need(1, 1), keeps).arguments("cpu")) == keeps
        perform(folder, data_dir=tmp_path, device="cpu", precision="float32", keeps_models=keeps)
        assert has_models(folder) == keeps
    said = name_without_models(find_finished(plan, tmp_path).values(), tmp_path)
    assert said is not None
    assert plan[1].name in said
    assert plan[0].name not in said
    prepare(plan[0], tmp_path)  # it is made anew
    assert not has_models(folder_of(tmp_path, plan[0]))


def test_keeping_again_is_safe_after_a_kill(tmp_path: Path) -> None:
    simulate(tmp_path, "--keep-models")
    (tmp_path / "models.partial" / "9").mkdir(parents=True)
    keep_models(tmp_path, load_federation(tmp_path / "models" / "peers.yaml"), [])
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"peers.yaml"}
    assert not (tmp_path / "models.partial").exists()
