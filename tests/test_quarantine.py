"""A snapshot that must not be used: kept aside, left out of the round, told to those concerned, and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Peers
from wire import SNAPSHOT, manifest_of

from crad_p2p.errors import ExitCode
from crad_p2p.manifest import Manifest
from peer.quarantine import keep_aside
from peer.store import Store


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("misname", "snapshot has an unexpected tensor 'weirdly'; its architecture has 1 tensors"),  # by its header
        ("poison", "tensor 'weights' holds values that are not finite"),  # by its values, which only a learner sees
    ],
)
def test_the_round_goes_on_without_it_and_its_owner_is_told(
    mesh: Callable[..., Peers], setting: str, reason: str
) -> None:
    peers = mesh(3, rounds=4)
    peers.tell(setting, 2, peer=2)
    running = peers.start_all()
    bad = running[2]
    for each in running[:2]:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert f"WARNING the snapshot of round 2 of peer 2 is not used: {reason}; it is kept in" in each.output
        assert "snapshots of peer 2 were refused" in each.last_words()
        assert [record.quarantined_teachers for record in each.history()] == [(), (), (2,), ()]
        assert [record.teachers[-1] for record in each.history()] == [2, 2, 1 - int(each.state.name[-1]), 2]
        assert each.history()[2].quarantine_reasons == {"2": reason}
        assert each.result().quarantine_reasons == {"2": reason}
        kept = each.state / "quarantine"
        manifest = Manifest.from_bytes((kept / "2.json").read_bytes())
        snapshot = (kept / "2.safetensors").read_bytes()
        assert manifest.round == 2
        assert hashlib.sha256(snapshot).hexdigest() == manifest.sha256
        assert (kept / "2.txt").read_text() == f"round 2: {reason}\n"
    assert bad.ended() == ExitCode.RESERVATIONS, bad.output
    for i in (0, 1):
        assert f"WARNING peer {i} does not use round 2 of this peer: {reason}" in bad.output
    assert re.search(r"peers 0, 1 do not use models of this peer \(round 2: ", bad.last_words())
    assert json.loads((bad.state / "refused-by.json").read_text()) == {"0": [2, reason], "1": [2, reason]}


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """A snapshot as it was received, in its place."""
    path = tmp_path / "received/000002/1.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(SNAPSHOT)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".safetensors", ".refused"])
@pytest.mark.parametrize("has_links", [True, False])
def test_what_is_kept(
    tmp_path: Path, received: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", failing)
    received.rename(received.with_suffix(suffix))
    folder = tmp_path / "quarantine"
    said = [keep_aside(folder, received, manifest_of(n), f"reason {n}") for n in (1, 2)]
    assert said == [f"it is kept in {folder / '1.safetensors'}"] * 2
    about, reason = manifest_of(2).to_bytes(), b"round 2: reason 2\n"
    assert contents(folder) == {"1.safetensors": SNAPSHOT, "1.json": about, "1.txt": reason}


def test_what_is_kept_stays_as_it_is_when_a_manifest_is_refused_later(tmp_path: Path) -> None:
    """Mark and copy are one file where there are hard links."""
    store = Store(tmp_path)
    mark = store.received_snapshot_path(1, 2).with_suffix(".refused")
    mark.parent.mkdir(parents=True)
    mark.write_bytes(SNAPSHOT)
    store.quarantine(manifest_of(2), "reason")
    store.note_refused(1, 2, "not signed")
    assert (tmp_path / "quarantine/1.safetensors").read_bytes() == SNAPSHOT
    assert mark.read_text() == "not signed\n"
    assert store.refused(2) == [1]


def failing(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def copied_in_part(_source: Path, goal: Path) -> None:
    goal.write_bytes(b"half")
    failing()


@pytest.mark.parametrize(
    ("spoilt", "kept", "said"),
    [
        ("copy", {"1.json", "1.txt"}, "{} keeps 1.json, 1.txt of it, and not 1.safetensors (No space left on device)"),
        (
            "gone",
            {"1.json", "1.txt"},
            "{} keeps 1.json, 1.txt of it, and not 1.safetensors (No such file or directory)",
        ),
        ("write", {"1.safetensors"}, "{} keeps 1.safetensors of it, and not 1.json, 1.txt (No space left on device)"),
        ("all", set(), "{} keeps nothing of it (No space left on device)"),
    ],
)
def test_what_could_not_be_kept_is_said_and_nothing_older_passes_for_it(
    tmp_path: Path, received: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str, kept: set[str], said: str
) -> None:
    folder = tmp_path / "quarantine"
    keep_aside(folder, received, manifest_of(1), "earlier")
    if spoilt in ("copy", "all"):
        monkeypatch.setattr(os, "link", failing)
        monkeypatch.setattr(shutil, "copyfile", copied_in_part)
    if spoilt in ("write", "all"):
        monkeypatch.setattr(Path, "write_bytes", failing)
        monkeypatch.setattr(Path, "write_text", failing)
    if spoilt == "gone":
        received.unlink()
    told = keep_aside(folder, received, manifest_of(2), "later")
    monkeypatch.undo()
    assert told == said.format(folder)
    assert set(contents(folder)) == kept


def test_a_disk_that_takes_nothing_at_all(tmp_path: Path, received: Path) -> None:
    folder = tmp_path / "quarantine"
    folder.write_text("no directory")
    said = keep_aside(folder, received, manifest_of(2), "reason")
    assert said == f"{folder} keeps nothing of it (File exists)"


def test_a_manifest_that_was_refused_and_is_accepted_in_another_form_counts_as_refused_no_more(tmp_path: Path) -> None:
    """As when its peer has signed it again, with a certificate that is trusted here."""
    store = Store(tmp_path)
    (tmp_path / "received").mkdir()
    store.note_refused(1, 2, "it is not signed by a CA that is trusted here")
    store.note_refused(2, 2, "neither is this")
    assert store.refused(2) == [1, 2]
    store.save_received_manifest(manifest_of(2))
    assert store.refused(2) == [2]
    assert not store.is_refused(manifest_of(2))


@pytest.mark.parametrize("content", [bytes(len(SNAPSHOT)), SNAPSHOT[:-1], SNAPSHOT + b"x"])
def test_only_the_very_bytes_that_were_refused_are(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    mark = store.received_snapshot_path(1, 2).with_suffix(".refused")
    mark.parent.mkdir(parents=True)
    mark.write_bytes(content)
    assert not store.is_refused(manifest_of(2))


def test_bytes_that_were_refused_stay_so_under_a_new_signature(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.received_snapshot_path(1, 2).with_suffix(".refused")
    path.parent.mkdir(parents=True)
    path.write_bytes(SNAPSHOT)
    store.save_received_manifest(manifest_of(2))
    assert store.is_refused(manifest_of(2))
    assert store.refused(2) == [1]
