"""State directories that lose rounds, for tests of what follows."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from processes import Peer, Peers, assert_one_sentence

from crad_p2p.errors import ExitCode

NOTHING = "(?:there is no round here|the newest here is round 0)"  # which may be made before the others answer
RESTORED = "this state directory was restored from an older copy, or is not the one that this peer ran with"


def copy_of(state: Path, name: str) -> Path:
    """A backup of a state directory, also of a running peer."""
    return Path(shutil.copytree(state, state.with_name(name), ignore=shutil.ignore_patterns("*.partial", ".staging*")))


def put_back(backup: Path, state: Path) -> None:
    shutil.rmtree(state)
    shutil.copytree(backup, state)


def digests(state: Path) -> dict[str, str]:
    """sha256 of the snapshots that are here, by round; each as its manifest says."""
    found = {}
    for path in sorted(state.glob("rounds/[0-9]*/snapshot.safetensors")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert json.loads(path.with_name("manifest.json").read_text())["sha256"] == digest
        found[path.parent.name] = digest
    return found


def manifests(state: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in state.glob("rounds/[0-9]*/manifest.json")}


def two_last(found: dict[str, object]) -> dict[str, object]:
    return dict(sorted(found.items())[-2:])


def stopped_at(peers: Peers, number: int, *earlier: int) -> tuple[list[Peer], dict[int, Path]]:
    """A federation of which the last peer was stopped at this round, with backups of its state at earlier ones."""
    running = peers.run_to(earlier[0] if earlier else number)
    backups = {}
    for each in earlier:
        peers.go_to(each, running)
        backups[each] = copy_of(running[-1].state, f"backup-{each}")
    peers.go_to(number, running)
    assert running[-1].stop() < 5
    backups[number] = copy_of(running[-1].state, f"backup-{number}")
    return running[:-1], backups


def finish(peers: Peers, running: list[Peer], rounds: int) -> None:
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == ExitCode.COMPLETE, each.output
        assert each.result().rounds_completed == rounds


def assert_refused(peers: Peers, had: str) -> None:
    """Peer 2, which has an empty disk now, is told that another has had a round of it; ``had`` is a pattern."""
    refused = peers.start(2)
    code = refused.ended(20)
    sentence = f"peer [01] has had round {had} of this peer, and {NOTHING}: {RESTORED}.*--recover.*"
    assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
