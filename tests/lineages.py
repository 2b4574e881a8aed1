"""The manifests of a small run, and state directories with them as its peers would have left them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.results import RoundRecord, Seconds
from crad_p2p.snapshot import SNAPSHOT_FILE
from launch.authority import Authority, make_request, new_authority, new_key, sign_request, to_pem
from peer.credentials import Credentials
from peer.signatures import sign_manifest

ROUNDS = 6
PEERS = (0, 1, 2)
Manifests = dict[tuple[int, int], Manifest]


def federation(policy: str = "all", **changes: Any) -> Federation:
    peers = [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6"} for i in PEERS]
    tree = {"federation": "lineage", "rounds": ROUNDS, "barrier": {"policy": policy}, "peers": peers}
    return build_federation({**tree, **changes}, "test")


def content(peer: int, number: int) -> bytes:
    """Of a snapshot file."""
    return f"model of round {number} of peer {peer}".encode()


def sha256(peer: int, number: int) -> str:
    return hashlib.sha256(content(peer, number)).hexdigest()


def manifest(peer: int, number: int, *, run: str | None = None, **changes: Any) -> Manifest:
    """As it is where nothing goes wrong: everybody learns from everybody else's round before."""
    teachers = [j for j in PEERS if j != peer] if number > 0 else []
    tree = {
        "run": run or federation().digest(),
        "peer": peer,
        "round": number,
        "arch": "cnn6",
        "size": len(content(peer, number)),
        "sha256": sha256(peer, number),
        "statistics": ClassStatistics(counts=(4, 2 + peer), hits=(1, 2), predicted=(3, 3 + peer)),
        "consumed": tuple(consumed(j, number - 1) for j in teachers),
        "model_round": number,
        "missing": (),
        "quarantined": (),
    }
    return Manifest(**{**tree, **changes})


def consumed(peer: int, number: int) -> Consumed:
    return Consumed(peer=peer, round=number, sha256=sha256(peer, number))


def rejoining(peer: int, number: int, model_round: int, **changes: Any) -> Manifest:
    """The model of an earlier round, published again."""
    size, digest = len(content(peer, model_round)), sha256(peer, model_round)
    return manifest(peer, number, size=size, sha256=digest, model_round=model_round, consumed=(), **changes)


def whole_run(rounds: int = ROUNDS, **changes: Any) -> Manifests:
    return {(peer, number): manifest(peer, number, **changes) for number in range(rounds + 1) for peer in PEERS}


# --- signed -----------------------------------------------------------------------------------------------------------


def authority(name: str = "lineage", number: int = 0) -> Authority:
    """The same one every time; another one for another number."""
    return _authority(name, number)


@functools.cache
def _authority(name: str, _number: int) -> Authority:
    return new_authority(name)


@functools.cache
def credentials(peer: int, name: str = "lineage", number: int = 0, now: datetime | None = None) -> Credentials:
    issuer, key = authority(name, number), new_key()
    certificate = sign_request(issuer, make_request(key, name, peer), peer, now=now or datetime.now(UTC))
    pem = to_pem(issuer.certificate)
    return Credentials(Path(), name, peer, pem, b"", b"", certificate, key, (issuer.certificate,))


def signed(document: Manifest, by: Credentials | None = None) -> Manifest:
    return sign_manifest(document, by or credentials(document.peer))


# --- on disk ----------------------------------------------------------------------------------------------------------


def write_state(
    folder: Path,
    owner: int,
    manifests: Mapping[tuple[int, int], Manifest],
    *,
    of: Federation | None = None,
    recovered: Iterable[int] = (),
) -> Path:
    """The state directory of one peer after its last round; every round but the last two is in lineage.jsonl alone."""
    of = of or federation()
    (folder / "rounds").mkdir(parents=True)
    (folder / "federation.json").write_text(json.dumps({"peer": owner, "agreed": of.agreed()}))
    last = max(number for _, number in manifests)
    old = [each for (_, number), each in sorted(manifests.items()) if number < last - 1]
    (folder / "lineage.jsonl").write_bytes(b"".join(each.to_bytes() + b"\n" for each in old))
    for (peer, number), each in manifests.items():
        if number < last - 1:
            continue
        if peer == owner:
            place, snapshot = folder / f"rounds/{number:06d}/manifest.json", SNAPSHOT_FILE
        else:
            place, snapshot = folder / f"received/{number:06d}/{peer}.json", f"{peer}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(each.to_bytes())
        (place.parent / snapshot).write_bytes(content(peer, each.model_round))
    records = [
        record(each, recovered=number in recovered) for (peer, number), each in manifests.items() if peer == owner
    ]
    (folder / "history.jsonl").write_text("".join(each.to_line() for each in records if each.round > 0))
    return folder


def record(of: Manifest, *, recovered: bool = False) -> RoundRecord:
    skipped = tuple(range(of.model_round + 1, of.round))
    line = RoundRecord(of.peer, of.round, of.sha256, 0.5, skipped_rounds=skipped)
    return line if recovered or skipped else replace(line, train_loss=1.0, seconds=Seconds(train=2.0, validate=0.1))
