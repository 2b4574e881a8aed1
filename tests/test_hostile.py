"""A real service among enemies: it answers others, stays small, and counts what it refuses.

One ``crad-peer`` with a light learner serves a large snapshot over mutual TLS for all tests here. A second peer, which
behaves, is a process of its own: it says hello ten times a second and watches, all the time. Attackers speak HTTP/2 by
hand (``hostile``), most with the certificate of a third peer.
"""

from __future__ import annotations

import gzip
import logging
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hostile import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST,
    SETTINGS,
    WINDOW_UPDATE,
    Connection,
    Identities,
    Probe,
    frame,
    header,
    identities,
    message,
    request_headers,
    tls_context,
)
from processes import Peer, Peers, until
from wire import Noting, in_loop, serving, stub_of

from crad_p2p.federation import load_federation
from crad_p2p.manifest import Manifest
from peer._proto.crad.v1 import peer_pb2
from peer.gate import CALLS_OF_ONE
from peer.hello import greeting
from peer.intake import MAX_REQUEST_BYTES
from peer.log import Bounded

VICTIM, ENEMY, FRIEND = 0, 1, 2
#: Floats of the snapshot: 16 MB, which no window holds.
FLOATS = 4 << 20
#: What one attack may leave behind, in bytes.
ALLOWED = 100 << 20
#: Seconds in which the friend is answered, come what may.
PROMPT = 2.0
SNAPSHOT, MANIFEST, HELLO, WATCH, REFUSE = (
    f"/crad.v1.Peer/{name}".encode() for name in ("GetSnapshot", "GetManifest", "Hello", "Watch", "Refuse")
)


@dataclass
class Field:
    """The service, who watches it, and the identities of others."""

    peer: Peer
    probe: Probe
    port: int
    known: Identities
    enemy: ssl.SSLContext
    hello: peer_pb2.HelloRequest
    manifest: Manifest

    @property
    def pid(self) -> int:
        return self.peer.process.pid

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def refused(self) -> Counter[str]:
        """Counts by caller and reason."""
        path = self.peer.state / "refused.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter({line[12:]: int(line[:10].replace(",", "")) for line in lines})

    def connect(self, **options: object) -> Connection:
        return Connection(self.port, self.enemy, **options)  # type: ignore[arg-type]

    @contextmanager
    def attacked(
        self, *, counts: dict[str, int] | None = None, at_least: dict[str, int] | None = None
    ) -> Iterator[None]:
        """During the block others are answered; after it all is as before, but for these counts."""
        before, files, memory, start = self.refused(), self.open_files(), self.memory(), time.monotonic()
        peak = Peak(self)
        yield
        # Somebody was answered after the attack, too.
        done = peak.ended()
        until(lambda: self.probe.answers(done), "the friend is answered after it", 20)
        answers = self.probe.answers(start)
        slow = [each for each in answers if each[1] > PROMPT or each[2]]
        assert not slow, slow[:5]
        assert answers
        assert max(peak.bytes, self.memory()) - memory < ALLOWED, (memory >> 20, peak.bytes >> 20)
        until(lambda: self.open_files() <= files + 3, f"files are closed: {self.open_files()}, before {files}", 30)
        assert self.peer.process.poll() is None, self.peer.output[-2000:]
        found: Counter[str] = Counter()
        exact, least = counts or {}, at_least or {}

        def counted() -> bool:
            found.clear()
            found.update(self.refused() - before)
            return all(found[name] == exact[name] for name in exact) and all(
                found[name] >= least[name] for name in least
            )

        with suppress(AssertionError):
            until(counted, "counted", 12)
        assert {name: found[name] for name in exact} == exact, found
        assert all(found[name] >= least[name] for name in least), found


class Peak:
    """The most memory that the service has had, looked at ten times a second."""

    def __init__(self, field: Field) -> None:
        self.bytes = 0
        self._field = field
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            with suppress(OSError, TypeError):
                self.bytes = max(self.bytes, self._field.memory())

    def ended(self) -> float:
        """Stop looking; the time."""
        self._is_over.set()
        self._thread.join()
        return time.monotonic()


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    folder = tmp_path_factory.mktemp("hostile")
    peers = Peers(folder, 3)
    known = identities(folder / "known", "one")
    victim, enemy, friend = map(known.member, (VICTIM, ENEMY, FRIEND))
    peers.tell("hold", 1)
    probe = None
    try:
        peer = peers.start(VICTIM, "--tls-dir", str(victim), LIGHT_FLOATS=str(FLOATS))
        peer.reach(0)
        probe = Probe(folder, peers.file, friend, FRIEND, VICTIM)
        until(lambda: len(probe.answers(0)) > 5, "the friend is answered")
        hello = greeting(load_federation(peers.file), ENEMY)
        yield Field(peer, probe, peers.ports[VICTIM], known, tls_context(enemy), hello, peer.manifest(0))
    finally:
        if probe is not None:
            probe.end()
        peers.end()


def kinds(field: Field) -> dict[str, tuple[Callable[[Connection], set[int]], dict[str, int]]]:
    """Malformed requests: each sends one, and says how it is counted."""
    ours = f"peer {ENEMY}"
    hello, sha256 = field.hello, field.manifest.sha256
    snapshot = peer_pb2.GetSnapshotRequest

    def call(path: bytes, body: bytes | None, *more: tuple[bytes, bytes]) -> Callable[[Connection], set[int]]:
        return lambda c: {c.open(path, body, *more)}

    def of(path: bytes, request: object) -> Callable[[Connection], set[int]]:
        return call(path, message(request.SerializeToString()))  # type: ignore[attr-defined]

    def changed(**changes: object) -> bytes:
        request = peer_pb2.HelloRequest()
        request.CopyFrom(hello)
        for name, value in changes.items():
            setattr(request, name, value)
        return message(request.SerializeToString())

    def huge_header(c: Connection) -> set[int]:
        stream, c._next = c._next, c._next + 2
        block = request_headers(HELLO, (b"x-much", b"x" * 60_000))
        c.send(frame(HEADERS, END_STREAM, stream, block[:16_000]))
        parts = [block[i : i + 16_000] for i in range(16_000, len(block), 16_000)]
        for part in parts:
            c.send(frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, stream, part))
        return {stream}

    def cut_off(c: Connection) -> set[int]:
        stream = c.open(HELLO, message(b"x" * 50, length=100), end=False)
        c.send(frame(RST, 0, stream, struct.pack(">I", 8)))
        return set()

    def other_content_type(c: Connection) -> set[int]:
        stream, c._next = c._next, c._next + 2
        block = b"".join(header(*pair) for pair in ((b":method", b"GET"), (b":scheme", b"https"), (b":path", HELLO)))
        c.send(frame(HEADERS, END_HEADERS | END_STREAM, stream, block))
        return {stream}

    nested = b""
    for _ in range(400):
        nested = b"\x0a" + bytes((len(nested) & 127 | 128, len(nested) >> 7)) + nested
    no_request, unknown = {f"{ours}: no request": 1}, {"an unknown caller: unknown method": 1}

    by_gzip = (b"grpc-encoding", b"gzip")

    def malformed(name: str) -> dict[str, int]:
        return {f"{ours}: malformed {name}": 1}

    return {
        "garbage": (call(HELLO, message(b"\xff" * 40)), malformed("HelloRequest")),
        "truncated": (call(HELLO, message(hello.SerializeToString()[:-5])), malformed("HelloRequest")),
        "wrong wire types": (call(MANIFEST, message(b"\x0a\x01x\x15abcd")), {}),
        "deep nesting": (call(WATCH, message(b"\x0b" * 1_000)), malformed("WatchRequest")),
        "unknown fields, nested": (call(REFUSE, message(b"\x1a\x02\xff\xfe" + nested)), malformed("RefuseRequest")),
        "longer than a field may be": (call(HELLO, changed(software="x" * 101)), malformed("HelloRequest")),
        "larger than a message may be": (call(HELLO, message(b"x", length=MAX_REQUEST_BYTES + 1)), no_request),
        "says it is 4 GB": (call(HELLO, message(b"x", length=2**32 - 1)), no_request),
        # Were they unpacked, these would count as malformed.
        "compressed": (call(HELLO, message(gzip.compress(b"\xff" * 40), compressed=1), by_gzip), {}),
        "no such compression": (call(HELLO, message(b"x", compressed=1), (b"grpc-encoding", b"magic")), no_request),
        "no message": (lambda c: {c.open(HELLO, b"")}, no_request),
        "half a message": (call(HELLO, message(b"x" * 10, length=100)), no_request),
        "cut off": (cut_off, no_request),
        "unknown method": (call(b"/crad.v1.Peer/Shutdown", message(b"")), unknown),
        "another service": (call(b"/grpc.health.v1.Health/Check", message(b"")), unknown),
        "name not UTF-8": (call(b"/crad.v1.Peer/\xff\xfe", message(b"")), unknown),
        "no path": (call(b"Hello", message(b"")), unknown),
        "GET": (other_content_type, {}),
        "huge metadata": (huge_header, {}),
        "huge round": (
            of(MANIFEST, peer_pb2.GetManifestRequest(peer=0, round=2**32 - 1)),
            malformed("GetManifestRequest"),
        ),
        "negative round": (call(MANIFEST, message(b"\x10" + b"\xff" * 9 + b"\x01")), malformed("GetManifestRequest")),
        "path for a digest": (of(SNAPSHOT, snapshot(sha256="../../lock")), malformed("GetSnapshotRequest")),
        "no digest": (of(SNAPSHOT, snapshot()), malformed("GetSnapshotRequest")),
        "huge offset": (of(SNAPSHOT, snapshot(sha256=sha256, offset=2**63)), malformed("GetSnapshotRequest")),
        "beyond the end": (of(SNAPSHOT, snapshot(sha256=sha256, offset=field.manifest.size + 1)), {}),
        "no such peer": (of(MANIFEST, peer_pb2.GetManifestRequest(peer=2**16)), malformed("GetManifestRequest")),
        "short nonce": (call(HELLO, changed(nonce=b"x")), malformed("HelloRequest")),
        "somebody else": (call(HELLO, changed(peer=FRIEND)), {f"{ours}: says it is another peer": 1}),
        "other settings": (call(HELLO, changed(agreed=b"{}")), {f"{ours}: calls with other settings": 1}),
        "long reason": (of(REFUSE, peer_pb2.RefuseRequest(reason="x" * 2_001)), malformed("RefuseRequest")),
        "not a round": (
            of(REFUSE, peer_pb2.RefuseRequest(round=9)),
            {f"{ours}: speaks of a round that is not here": 1},
        ),
        "two messages": (call(MANIFEST, 2 * message(b"\x10\xff\xff\xff\xff\x0f")), malformed("GetManifestRequest")),
        "empty": (call(HELLO, message(b"")), malformed("HelloRequest")),
    }


#: Each of these ends in a reset of its stream, of which gRPC takes some twenty a second from one connection.
PACED = {"no such compression", "cut off", "GET", "huge metadata", "says it is 4 GB", "larger than a message may be"}


def test_ten_thousand_malformed_requests(field: Field) -> None:
    """Of more than thirty kinds, and each is counted as what it was."""
    table = kinds(field)
    few = 8
    many = (10_000 - few * len(PACED)) // (len(table) - len(PACED)) + 1
    expected: Counter[str] = Counter()
    for name, (_, counts) in table.items():
        if name not in PACED:
            expected.update({reason: many * number for reason, number in counts.items()})
    # Of what gRPC ends itself, it hands over some before.
    no_request = f"peer {ENEMY}: no request"
    at_least = {no_request: expected.pop(no_request)}
    with field.attacked(counts=dict(expected), at_least=at_least):
        for name, (send, _) in table.items():
            left, connection = few if name in PACED else many, field.connect(window=2**30)
            while left:
                number = min(left, CALLS_OF_ONE - 4)
                streams = set().union(*(send(connection) for _ in range(number)))
                assert connection.wait_for(streams) or not streams, name
                left -= number
            connection.close()


# --- who may not call -------------------------------------------------------------------------------------------------


def attempt(field: Field, context: ssl.SSLContext) -> bool:
    """Whether a call is answered, whatever with."""
    try:
        connection = Connection(field.port, context, patience=3)
    except OSError:
        return False
    try:
        return connection.wait_for({connection.open(HELLO, message(field.hello.SerializeToString()))}, 3)
    except OSError:
        return False
    finally:
        connection.close()


def test_certificates_that_must_not_be_used(field: Field) -> None:
    """What TLS itself refuses gRPC does not tell; it is counted as connections that made no call."""
    known = field.known
    in_handshake = {
        "none": tls_context(None),
        "another CA": tls_context(known.of_another_ca(ENEMY)),
        "expired": tls_context(known.expired(ENEMY)),
        "TLS 1.2": tls_context(known.member(ENEMY), ssl.TLSVersion.TLSv1_2),
    }
    in_gate = {
        "another federation": (tls_context(known.of_another_federation(ENEMY)), "an unknown caller: certificate"),
        "two names": (tls_context(known.with_two_names(ENEMY, FRIEND)), "an unknown caller: certificate"),
        "no member": (tls_context(known.member(77)), "peer 77: not a member"),
    }
    number = 20
    silent = "an unknown caller: connected and made no call"
    counts = {"an unknown caller: certificate": 2 * number, "peer 77: not a member": number, silent: 4 * number}
    with field.attacked(counts=counts):
        for _ in range(number):
            for name, context in in_handshake.items():
                assert not attempt(field, context), name
            for name, (context, _) in in_gate.items():
                assert attempt(field, context), name
    said = field.peer.output
    for who, reason in (("an unknown caller", "certificate"), ("peer 77", "not a member")):
        lines = re.findall(rf"WARNING refused a call of {who} at 127\.0\.0\.1:\d+: {reason} \(.*\); \w.*", said)
        assert len(lines) == 1, said[-2000:]
    field.peer.says(
        r"WARNING an unknown caller connected and made no call, .*: it may be a site that does not take this"
    )


# --- floods -----------------------------------------------------------------------------------------------------------


def opened(field: Field, count: int, path: bytes, request: object, **options: object) -> list[Connection]:
    """Connections with as many calls as each may have, and nobody who reads."""
    body = message(request.SerializeToString())  # type: ignore[attr-defined]
    made = [field.connect(**options) for _ in range(count)]
    for connection in made:
        for _ in range(2 * CALLS_OF_ONE):
            connection.open(path, body)
    return made


def closed(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()


#: SETTINGS_INITIAL_WINDOW_SIZE: as much as there can be.
WIDE = struct.pack(">HI", 4, 2**31 - 1)
SHUT = struct.pack(">HI", 4, 0)


@pytest.mark.parametrize("settings", [SHUT, b"", WIDE], ids=["shut", "default", "wide"])
def test_snapshots_that_nobody_reads(field: Field, settings: bytes) -> None:
    """Hundreds of transfers, whatever the window: of one peer a few are open, and gRPC holds one chunk for each."""
    request = peer_pb2.GetSnapshotRequest(peer=VICTIM, round=0, sha256=field.manifest.sha256)
    with field.attacked():
        made = opened(field, 12, SNAPSHOT, request, settings=settings, window=2**30 if settings == WIDE else 0)
        time.sleep(1.5)
        closed(made)


def test_replies_that_nobody_reads(field: Field) -> None:
    with field.attacked():
        made = opened(field, 12, HELLO, field.hello, settings=SHUT)
        time.sleep(1.0)
        closed(made)


def test_hundreds_of_watches(field: Field) -> None:
    """The oldest is told that it has been ended; the newest goes on."""
    body = message(peer_pb2.WatchRequest(progress=True).SerializeToString())
    with field.attacked():
        first = field.connect(window=2**30)
        ended = {first.open(WATCH, body) for _ in range(CALLS_OF_ONE)}
        later = [field.connect(window=2**30) for _ in range(10)]
        for connection in later:
            for _ in range(CALLS_OF_ONE):
                connection.open(WATCH, body)
            assert sum(1 for _ in zip(range(CALLS_OF_ONE), connection.frames(1.0), strict=False)) == CALLS_OF_ONE
        assert first.wait_for(ended)
        assert not later[-1].wait_for({1}, 0.5)
        closed([first, *later])


def test_requests_that_never_end(field: Field) -> None:
    """More after the message of a unary call, and messages that are begun and go on for ever."""
    with field.attacked():
        made = [field.connect(window=2**30) for _ in range(8)]
        for connection in made:
            with suppress(OSError):
                for _ in range(2 * CALLS_OF_ONE):
                    stream = connection.open(WATCH, message(b""), end=False)
                    connection.send(frame(DATA, 0, stream, message(b"x" * 1_000)))
                    connection.open(HELLO, message(b"x" * 900, length=MAX_REQUEST_BYTES), end=False)
                for _ in range(100):
                    connection.send(frame(DATA, 0, stream, message(b"x" * 8_000)))
        time.sleep(1.0)
        closed(made)


def test_connections_that_say_nothing(field: Field) -> None:
    """Nobody who is connected is disturbed, and a new peer is let in soon after the flood at the latest."""
    made: list[socket.socket] = []
    with field.attacked():
        for _ in range(2_000):
            with suppress(OSError):
                made.append(socket.create_connection(("127.0.0.1", field.port), timeout=1))
        for each in made[::3]:
            with suppress(OSError):
                each.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the start of a handshake
        until(lambda: attempt(field, field.enemy), "a peer is let in, while they are all still there", 14)
        for each in made:
            each.close()


def test_connections_that_make_no_call(field: Field) -> None:
    """Strangers' ones end within ten seconds, so they cannot hold the places of peers for long."""
    made: list[Connection] = []
    with field.attacked():
        for _ in range(500):
            try:
                made.append(field.connect(patience=0.05 if len(made) > 60 else 5))
            except OSError:
                continue
        closed(made)
        until(lambda: attempt(field, field.enemy), "a peer is let in", 12)


def flood(field: Field, content: Callable[[int], bytes], *, count: int = 200) -> int:
    """Send this so many times, or until the connection is ended; the bytes that were taken."""
    connection, sent = field.connect(window=2**30), 0
    with suppress(OSError):
        connection.socket.settimeout(2)
        for number in range(count):
            part = content(number)
            connection.send(part)
            sent += len(part)
    connection.close()
    return sent


FRAMES: dict[str, Callable[[int], bytes]] = {
    "pings": lambda _: frame(PING, 0, 0, bytes(8)) * 1_000,
    "settings": lambda _: frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 100)) * 1_000,
    "resets": lambda n: b"".join(
        frame(HEADERS, END_HEADERS, 2 * (100 * n + i) + 1, request_headers(HELLO))
        + frame(RST, 0, 2 * (100 * n + i) + 1, bytes(4))
        for i in range(100)
    ),
    "resets of nothing": lambda n: frame(RST, 0, 2 * n + 1, bytes(4)) * 1_000,
    "headers without end": lambda n: (
        frame(HEADERS, 0, 1, request_headers(HELLO))
        if n == 0
        else frame(CONTINUATION, 0, 1, header(b"x", b"y" * 9_000)) * 20
    ),
    "windows": lambda _: frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 1_000,
    "empty data": lambda n: (
        frame(HEADERS, END_HEADERS, 1, request_headers(HELLO)) if n == 0 else frame(DATA, 0, 1) * 1_000
    ),
    "unknown frames": lambda _: frame(99, 255, 0, bytes(1_000)) * 100,
    "garbage": lambda _: bytes(range(256)) * 64,
    "goaway": lambda _: frame(GOAWAY, 0, 0, bytes(8)) * 1_000,
}


@pytest.mark.parametrize("name", FRAMES)
def test_floods_of_frames(field: Field, name: str) -> None:
    with field.attacked():
        flood(field, FRAMES[name], count=600)


SECRET = "the password is swordfish"


class Careless(Noting):
    """Runs into errors of its own that say more than others should know."""

    async def GetManifest(self, *_: object) -> peer_pb2.GetManifestReply:
        raise RuntimeError(SECRET)

    async def chunks(self, *_: object) -> AsyncIterator[peer_pb2.Chunk]:
        yield peer_pb2.Chunk(offset=0, data=b"x" * 2_000)
        raise OSError(5, SECRET, "/home/ward/secret")


@in_loop
async def test_errors_of_this_program_stay_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The caller has a number, and the log has the rest under the same number."""
    async with serving(tmp_path, Careless) as remote, stub_of(remote.port) as stub:
        request = peer_pb2.GetSnapshotRequest(peer=1, round=0, sha256="ab" * 32)
        for call in (stub.GetManifest(peer_pb2.GetManifestRequest(peer=1)), stub.GetSnapshot(request)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call if hasattr(call, "__aiter__") else _one(call):
                    pass
            assert raised.value.code() == grpc.StatusCode.INTERNAL
            found = re.fullmatch("error ([0-9a-f]{8}); the called peer's log says more", raised.value.details() or "")
            assert found
            assert found[1] in caplog.text
            everything = f"{raised.value} {raised.value.debug_error_string()} {raised.value.trailing_metadata()}"
            assert "swordfish" not in everything
            assert "ward" not in everything
    assert caplog.text.count(SECRET) >= 2


async def _one(call: object) -> AsyncIterator[object]:
    yield await call  # type: ignore[misc]


def test_no_line_of_the_log_is_written_without_end() -> None:
    now = 0.0
    bounded = Bounded(lambda: now)

    def written(line: int) -> logging.LogRecord | None:
        record = logging.LogRecord("a", logging.INFO, "file.py", line, "peer %d is odd", (7,), None)
        return record if bounded.filter(record) else None

    assert sum(written(1) is not None for _ in range(5_000)) == 1_000
    assert written(2) is not None
    now = 5.0
    record = written(1)
    assert record is not None
    assert record.getMessage() == "peer 7 is odd (4,000 lines like this were left out)"
    assert written(1) is None


def test_the_log_stays_short(field: Field) -> None:
    """After all of this: each kind of refusal has a line at its 1st, 10th, 100th… time."""
    assert len(field.peer.output) < 60_000
    assert "Traceback" not in field.peer.output
