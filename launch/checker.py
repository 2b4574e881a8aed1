"""Checks the histories of all peers against one another after a run: what must hold whatever went wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from crad_p2p.federation import Federation
from crad_p2p.manifest import Manifest
from crad_p2p.results import RoundRecord
from peer.recorder import FILE, PREVIOUS, replay
from peer.store import Store

#: By (peer, round).
Digests = dict[tuple[int, int], str]


def check(federation: Federation, stores: Mapping[int, Store], reference: Iterable[RoundRecord] | None) -> list[str]:
    """Everything that is wrong, a sentence each; empty if nothing is.

    Args:
        stores: of all peers, after they have ended.
        reference: history of an undisturbed run, to whose bytes every round must be equal; None under policy
            ``quorum``, where the result depends on who was there in time.
    """
    histories = {peer: store.history() for peer, store in stores.items()}
    published = {(peer, record.round): record.snapshot_sha256 for peer, each in histories.items() for record in each}
    wrong = [fault for peer in federation.ids for fault in _rounds(federation, peer, histories[peer])]
    wrong += [fault for peer in federation.ids for fault in _teachers(federation, peer, histories[peer], published)]
    wrong += [fault for peer, store in stores.items() for fault in _manifests(peer, store, published)]
    wrong += [fault for store in stores.values() for fault in _recordings(federation, store)]
    wrong += [
        f"{path}: evidence of two snapshots for one round" for store in stores.values() for path in store.conflicts()
    ]
    if reference is not None:
        expected = {(record.peer, record.round): record.snapshot_sha256 for record in reference}
        wrong += [
            f"peer {peer}, round {number}: its snapshot is {published[peer, number][:12]}…, undisturbed {sha256[:12]}…"
            for (peer, number), sha256 in sorted(expected.items())
            if published.get((peer, number), sha256) != sha256
        ]
    return wrong


def _rounds(federation: Federation, peer: int, history: list[RoundRecord]) -> Iterable[str]:
    """Every round once, in order, or skipped and said so."""
    due, schedule = 1, federation.schedule
    for record in history:
        missing = tuple(
            number for number in range(due, record.round) if schedule is None or schedule.takes_part(peer, number)
        )
        if record.peer != peer or record.round < due or record.skipped_rounds != missing:
            yield (
                f"peer {peer}: round {due} was due, and its history has round {record.round} of peer {record.peer}, "
                f"with {list(record.skipped_rounds)} said to be skipped"
            )
        if missing and federation.barrier.policy == "all":
            yield f"peer {peer} skipped rounds {list(missing)} under policy all"
        due = record.round + 1
        if schedule is not None and not schedule.takes_part(peer, record.round):
            yield f"peer {peer} trained round {record.round}, in which it has no part"
    if due != federation.version(peer, federation.rounds) + 1:
        yield f"peer {peer} ended after round {due - 1} of {federation.rounds}"


def _teachers(
    federation: Federation, peer: int, history: list[RoundRecord], published: Mapping[tuple[int, int], str]
) -> Iterable[str]:
    """Who taught had published, and who did not is named."""
    for record in history:
        if record.skipped_rounds:
            continue
        expected = federation.teachers_of(peer, record.round)
        quarantined = tuple(j for j in record.quarantined_teachers if j in expected)  # others do not teach yet
        named = sorted(record.teachers + record.missing_teachers + quarantined)
        where = f"peer {peer}, round {record.round}"
        if named != list(expected):
            yield f"{where}: peers {list(expected)} may teach, and its history names {named}"
        for teacher in set(record.teachers) - set(record.stale_teachers):
            version = federation.version(teacher, record.round - 1)
            if version > 0 and (teacher, version) not in published:
                yield f"{where}: taught by peer {teacher}, which never published round {version}"
        if federation.barrier.policy == "all" and (record.missing_teachers or record.stale_teachers):
            yield f"{where}: trained without the newest of all others under policy all"


def _manifests(peer: int, store: Store, published: Mapping[tuple[int, int], str]) -> Iterable[str]:
    """What is on any disk is whole, and what it says, also of those it was taught by, is what its owner published."""
    for number in store.kept_rounds():
        if reason := store.damage(number):
            yield f"peer {peer}: {store.round_dir(number)} is damaged ({reason})"
    own = [store.manifest(number) for number in store.kept_rounds()]
    received = [
        store.received_manifest(other, number)
        for other in sorted({peer for peer, _ in published})
        for number in store.received_rounds(other)
    ]
    for manifest in own + received:
        for owner, number, sha256 in _claims(manifest):
            if published.get((owner, number), sha256) != sha256:
                yield (
                    f"on the disk of peer {peer}, round {manifest.round} of peer {manifest.peer} names {sha256[:12]}… "
                    f"for round {number} of peer {owner}, which published {published[owner, number][:12]}…"
                )


def _claims(manifest: Manifest) -> Iterable[tuple[int, int, str]]:
    yield manifest.peer, manifest.round, manifest.sha256
    for each in manifest.consumed:
        yield each.peer, each.round, each.sha256


def _recordings(federation: Federation, store: Store) -> Iterable[str]:
    """The recorded events give the recorded decisions again, and no round was trained while too few had the last."""
    for path in (store.root / PREVIOUS, store.root / FILE):
        if path.exists():
            yield from _recording(path)
            yield from _presence(federation, path)


def _recording(path: Path) -> Iterable[str]:
    try:
        for step in replay(path):
            if not step.agrees:
                yield f"{path}, line {step.line}: replayed, the same events give other decisions"
                return
    except ValueError as error:
        yield f"{path}: {error}"


def _presence(federation: Federation, path: Path) -> Iterable[str]:
    """Counted here from what the others said, not by the barrier that is to be checked."""
    size = len(federation.peers)
    least = federation.barrier.quorum(size)[0] if federation.barrier.policy == "quorum" else size
    said: dict[int, int] = {}
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        try:
            tree = json.loads(line)
        except ValueError:  # what has to be complete is checked above
            continue
        if not isinstance(tree, dict):
            continue
        if "start" in tree:
            said = {int(peer): last for peer, last in tree["start"]["state"]["announced"].items()}
            continue
        event = tree.get("event", {})
        if event.get("is") == "Announced":
            said[event["peer"]] = max(event["round"], said.get(event["peer"], -1))
        for decision in tree.get("decisions", ()):
            if decision["is"] == "Train":
                present = 1 + sum(
                    last >= federation.version(peer, decision["round"] - 1) for peer, last in said.items()
                )
                if present < least:
                    yield (
                        f"{path}, line {number}: round {decision['round']} was trained when {present} peers had the "
                        f"round before, and {least} are needed"
                    )
