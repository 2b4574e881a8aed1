"""The one place where bytes of another institution come in: every message, manifest and snapshot passes here.

Certificates alone are read elsewhere, by ``peer.certificates``.

Messages travel as raw bytes through gRPC and are parsed here alone, requests by ``peer.gate`` and answers by
``peer.link``. After these checks a manifest is signed by its owner, and a snapshot has exactly the tensors of its
announced architecture and the announced digest; the learner checks the values (``crad_p2p.weights``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from crad_p2p.federation import Federation
from crad_p2p.foreign import printable, unique_keys
from crad_p2p.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.snapshot import DamagedFileError, Layout, SnapshotError, check_file, check_start, file_bounds
from peer._proto.crad.v1 import peer_pb2
from peer.chunks import split
from peer.signatures import Authorities, check_signature

M = TypeVar("M", bound=Message)

#: Bytes of snapshot data that are taken in one message.
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 1 << 10, 1 << 20
#: Of one message: a request holds at most the agreed fields of a few thousand peers, an answer at most one chunk.
MAX_REQUEST_BYTES = 1 << 18
MAX_ANSWER_BYTES = LARGEST_CHUNK_BYTES + (1 << 10)
NONCE_BYTES = 32

_MAX_AGREED, _MAX_TEXT, _MAX_CERTIFICATE, _MAX_CLASSES = 1 << 17, 2_000, 1 << 13, 10_000
_MAX_NUMBER = 2**31
#: Laplace noise of scale 1/ε on a count is beyond this many times 1/ε with a probability of e**-50.
_NOISE = 50
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PHASES = ("start", "images", "recover", "wait", "teachers", "train", "validate", "evaluate", "linger", "done")


class MessageError(Exception):
    """A message that must not be used, and why."""


def parse(kind: type[M], raw: bytes | None) -> M:
    """A message of another peer, with every field within its bounds.

    Raises:
        MessageError: not a message of that kind, or a field that cannot be.
    """
    if raw is None:
        raise MessageError("no message came")
    limit = MAX_ANSWER_BYTES if kind in _ANSWERS else MAX_REQUEST_BYTES
    if len(raw) > limit:
        raise MessageError(f"a message of {len(raw)} bytes; at most {limit} are allowed")
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise MessageError(f"bytes that are no {kind.__name__}") from None
    for name in _BOUNDS[kind]:
        _require(kind, name, getattr(message, name))
    return message


def parse_chunk(raw: bytes | None) -> tuple[int, memoryview]:
    """Offset and data of a ``Chunk`` of another peer, as :func:`parse` would find them, but without copies of the data.

    Raises:
        MessageError: as there.
    """
    found = split(raw) if raw is not None and len(raw) <= MAX_ANSWER_BYTES else None
    if found is None:
        message = parse(peer_pb2.Chunk, raw)
        return message.offset, memoryview(message.data)
    offset, data = found
    _require(peer_pb2.Chunk, "offset", offset)
    _require(peer_pb2.Chunk, "data", data)
    return offset, data


def _require(kind: type[Message], name: str, value: Any) -> None:
    if not _BOUNDS[kind][name](value):
        shown = f"{len(value)} bytes" if isinstance(value, (bytes, memoryview)) else printable(str(value), 60)
        raise MessageError(f"{kind.__name__} with {name} {shown}, which cannot be")


def _up_to(limit: int) -> Callable[[Any], bool]:
    return lambda value: len(value) <= limit


def _below(limit: int) -> Callable[[Any], bool]:
    return lambda value: value < limit


def _from(least: int, below: int) -> Callable[[Any], bool]:
    return lambda value: least <= value < below


def _is_digest(value: str) -> bool:
    return _DIGEST.fullmatch(value) is not None


def _is_digest_or_empty(value: str) -> bool:
    return not value or _is_digest(value)


def _is_share_of_time(value: float) -> bool:
    return 0 <= value < 1e9  # false for NaN, too


def _is_data(data: Any) -> bool:
    return (
        len(data.class_names) <= _MAX_CLASSES
        and all(len(name) <= _MAX_TEXT for name in data.class_names)
        and len(data.image_shape) <= 4
        and _is_digest_or_empty(data.partition_digest)
        and _is_digest_or_empty(data.test_digest)
    )


_BOUNDS: Mapping[type[Message], Mapping[str, Callable[[Any], bool]]] = {
    peer_pb2.HelloRequest: {
        "peer": _below(2**16),
        "software": _up_to(100),
        "agreed": _up_to(_MAX_AGREED),
        "nonce": lambda nonce: len(nonce) == NONCE_BYTES,
    },
    peer_pb2.WatchRequest: {},
    peer_pb2.GetManifestRequest: {"peer": _below(2**16), "round": _below(_MAX_NUMBER)},
    peer_pb2.GetSnapshotRequest: {
        "peer": _below(2**16),
        "round": _below(_MAX_NUMBER),
        "sha256": _is_digest,
        "offset": _below(2**50),
    },
    peer_pb2.RefuseRequest: {"round": _below(_MAX_NUMBER), "sha256": _is_digest_or_empty, "reason": _up_to(_MAX_TEXT)},
    peer_pb2.HelloReply: {
        "peer": _below(2**16),
        "software": _up_to(100),
        "agreed": _up_to(_MAX_AGREED),
        "seen_round": _below(_MAX_NUMBER),
        "seen_sha256": _is_digest_or_empty,
        "seen_manifest": _up_to(MAX_MANIFEST_BYTES),
        "certificate": _up_to(_MAX_CERTIFICATE),
        "proof": _up_to(200),
        "unix_time": math.isfinite,
    },
    peer_pb2.PeerState: {
        "round": _from(-1, _MAX_NUMBER),
        "collected": _from(-1, _MAX_NUMBER),
        "data": _is_data,
        "manifest": _up_to(MAX_MANIFEST_BYTES),
        "manifest_sha256": _is_digest_or_empty,
        "busy_seconds": _is_share_of_time,
        "phase": _PHASES.__contains__,
        "explanation": _up_to(_MAX_TEXT),
    },
    peer_pb2.GetManifestReply: {"document": _up_to(MAX_MANIFEST_BYTES), "manifest_sha256": _is_digest},
    peer_pb2.Chunk: {"offset": _below(2**50), "data": lambda data: 0 < len(data) <= LARGEST_CHUNK_BYTES},
    peer_pb2.RefuseReply: {},
}
_ANSWERS = frozenset(
    (peer_pb2.HelloReply, peer_pb2.PeerState, peer_pb2.GetManifestReply, peer_pb2.Chunk, peer_pb2.RefuseReply)
)


def agreed_fields(document: bytes) -> dict[str, Any] | None:
    """What a peer says that it runs; None if that is not a JSON object of plain values, each with a name of its own."""
    try:
        fields = json.loads(document, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return None
    # Flat, as it is made: what is nested could be too deep to be shown.
    if not isinstance(fields, dict) or any(isinstance(value, (dict, list)) for value in fields.values()):
        return None
    return fields


def document_digest(document: bytes) -> str:
    """What goes with a manifest on its way, so that a flipped bit cannot turn one count into another."""
    return hashlib.sha256(document).hexdigest()


def check_seen(reply: peer_pb2.HelloReply, federation: Federation, own_id: int, authorities: Authorities) -> None:
    """See that this peer has really published the round that another one says to have had of it.

    Raises:
        ValueError: its manifest is missing, of another round, or not signed by this peer.
    """
    manifest = Manifest.from_bytes(reply.seen_manifest)
    said = (federation.digest(), own_id, reply.seen_round, reply.seen_sha256)
    if manifest.run != federation.digest():
        raise ValueError("the manifest is of another run, with other settings")
    if (manifest.run, manifest.peer, manifest.round, manifest.sha256) != said:
        raise ValueError(f"the manifest is of round {manifest.round} of peer {manifest.peer}, or of other bytes")
    check_signature(manifest, federation.federation, authorities)


def require_same_counts(found: tuple[int, ...], before: tuple[int, ...], slack: int = 0) -> None:
    """See that a peer counts what it has counted before.

    Args:
        slack: by how much they may differ.

    Raises:
        SnapshotError: it does not.
    """
    if len(found) != len(before):
        raise SnapshotError(f"manifest has statistics of {len(found)} classes, and an earlier one of {len(before)}")
    for c, (now, then) in enumerate(zip(found, before, strict=True)):
        if abs(now - then) > slack:
            raise SnapshotError(
                f"manifest counts {now} validation samples of class {c}, and an earlier one {then}; they must stay the "
                f"same over the run"
            )


class Intake:
    """Checks for one federation.

    Args:
        layouts: of all that is published (:meth:`Federation.published_by`), as the learner reports them.
        classes: length of the class statistics.
        authorities: gives those who issue the certificates that sign manifests; None without TLS, where none is signed.
        samples: validation samples of every class, by peer: of all peers, or, where each has images of its own, of this
            one alone; None if nothing is known.
    """

    def __init__(
        self,
        federation: Federation,
        layouts: Mapping[str, Layout],
        classes: int,
        authorities: Callable[[], Authorities] | None = None,
        *,
        samples: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._federation = federation
        self._digest = federation.digest()
        barrier = federation.barrier
        self._staleness = barrier.quorum(len(federation.peers))[1] if barrier.policy == "quorum" else 0
        self._layouts = layouts
        self._classes = classes
        self._authorities = authorities
        self._samples = samples
        epsilon = federation.privacy.count_epsilon
        self._noise = 0 if epsilon is None else math.ceil(_NOISE / epsilon)

    def manifest(
        self,
        document: bytes,
        peer: int,
        number: int,
        *,
        sha256: str | None = None,
        counts: tuple[int, ...] | None = None,
        may_draw_again: bool = False,
    ) -> Manifest:
        """Parse a peer's manifest of the round that was asked for.

        Args:
            sha256: of the document, as its sender gave it; None if the document did not travel.
            counts: n of every class in an earlier manifest of the peer, which must not change; None if there is none.
            may_draw_again: the peer may have lost its disk, and with it the noise on its counts.

        Raises:
            DamagedFileError: it was changed on the way, or is not of this run, peer and round.
            SnapshotError: it is, and malformed, not signed by this peer, or of another architecture, size or number
                of classes.
        """
        if sha256 is not None and document_digest(document) != sha256:
            raise DamagedFileError(
                f"manifest has sha256 {document_digest(document)}, its sender gave {printable(sha256)}"
            )
        try:
            manifest = Manifest.from_bytes(document)
        except ValueError as error:
            raise SnapshotError(str(error)) from None
        arch = self._federation.peer(peer).arch
        expected = {"run": self._digest, "peer": peer, "round": number, "arch": arch}
        for name, value in expected.items():
            if getattr(manifest, name) != value:
                # Another document than was asked for says nothing of that one.
                kind = SnapshotError if name == "arch" else DamagedFileError
                raise kind(f"manifest says {name} {printable(str(getattr(manifest, name)))}, expected {value}")
        self._check_statistics(peer, manifest.statistics, counts, 2 * self._noise if may_draw_again else 0)
        teachers = [each.peer for each in manifest.consumed] + [*manifest.missing, *manifest.quarantined]
        named = {*teachers}
        if len(named) != len(teachers):
            raise SnapshotError("manifest names a peer twice as teacher")
        if strangers := sorted(named - {*self._federation.ids} | named & {peer}):
            raise SnapshotError(f"manifest names {strangers} as teachers, expected other peers of the federation")
        self._check_versions(manifest)
        if late := [each.round for each in manifest.consumed if each.round >= number]:
            raise SnapshotError(f"manifest names teachers of round {max(late)}, expected rounds before {number}")
        least, most = file_bounds(self._layout(manifest))
        if not least <= manifest.size <= most:
            what = self._federation.published_by(peer, number)
            raise SnapshotError(f"manifest announces {manifest.size} bytes; {what} has from {least} to {most}")
        if self._authorities is not None:
            try:
                check_signature(manifest, self._federation.federation, self._authorities())
            except ValueError as error:
                raise SnapshotError(str(error)) from None
        return manifest

    def due(self, teacher: int, number: int) -> int:
        """The round of the snapshot with which a peer teaches in round ``number``, unless it is late."""
        return self._federation.version(teacher, number - 1)

    def _check_versions(self, manifest: Manifest) -> None:
        number, schedule = manifest.round, self._federation.schedule
        if schedule is not None and not schedule.takes_part(manifest.peer, number):
            raise SnapshotError(f"manifest is of round {number}, in which peer {manifest.peer} has no part")
        for each in manifest.consumed:
            if schedule is not None and not schedule.takes_part(each.peer, number):
                raise SnapshotError(f"manifest names peer {each.peer} as teacher, which has no part in round {number}")
            if each.round > self.due(each.peer, number) and each.round < number:
                raise SnapshotError(
                    f"manifest names peer {each.peer} as teacher with round {each.round}, in which it has no part"
                )
        if number == 0:
            return
        oldest = {each: self.due(each.peer, number) - self._staleness for each in manifest.consumed}
        if early := [each for each, least in oldest.items() if each.round < least]:
            first = min(early, key=lambda each: each.round)
            raise SnapshotError(f"manifest names teachers of round {first.round}, expected none before {oldest[first]}")

    def _check_statistics(
        self, peer: int, statistics: ClassStatistics, counts: tuple[int, ...] | None, slack: int
    ) -> None:
        found = len(statistics.counts)
        if found != self._classes:
            raise SnapshotError(f"manifest has statistics of {found} classes, expected {self._classes}")
        name, is_due = self._federation.method.name, self._federation.method.traits.publishes_cross_entropy
        if is_due != (statistics.cross_entropy is not None):
            has = "no cross-entropy of the classes" if is_due else "the cross-entropy of the classes"
            raise SnapshotError(f"manifest has {has}, which method {name} {'needs' if is_due else 'does not publish'}")
        if counts is not None:
            require_same_counts(statistics.counts, counts, slack)
        if other := self.other_counts(peer, statistics.counts):
            source = "it has" if self._federation.data.is_own else "the common partition gives this peer"
            raise SnapshotError(
                f"manifest counts {other[0]} validation samples of class {other[1]}, and {source} {other[2]}"
            )

    def other_counts(self, peer: int, counts: tuple[int, ...]) -> tuple[int, int, str] | None:
        """The first class of which a peer counts other validation samples than are known of it, beyond the noise; None
        if there is none, or nothing is known of how much weight this peer may claim.

        Returns:
            what it counts, the class, and what is known, with the noise.
        """
        if self._samples is None or (self._federation.data.is_own and peer not in self._samples):
            return None
        for c, (said, there) in enumerate(zip(counts, self._samples[peer], strict=True)):
            if abs(said - there) > self._noise:
                return said, c, f"{there}{f', with noise of at most {self._noise}' if self._noise else ''}"
        return None

    def start_of_snapshot(self, path: Path, manifest: Manifest) -> bool:
        """Check the header of a file that is still on its way; whether it has come.

        Raises:
            SnapshotError: it is not that of the announced architecture.
        """
        return check_start(path, self._layout(manifest), size=manifest.size)

    def snapshot(self, path: Path, manifest: Manifest) -> None:
        """Check a complete file against its manifest; reads all of it.

        Raises:
            SnapshotError: says what differs.
        """
        check_file(path, self._layout(manifest), size=manifest.size, sha256=manifest.sha256)

    def _layout(self, manifest: Manifest) -> Layout:
        return self._layouts[self._federation.published_by(manifest.peer, manifest.round)]
