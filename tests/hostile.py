"""Clients that mean no good, and one that does: HTTP/2 by hand, so that nothing keeps them from sending anything.

Run as a program it is a peer that behaves: it watches, says hello ten times a second, and writes down how long each
answer took.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from crad_p2p.durable import write_file
from launch.authority import Authority, _issue, key_to_pem, new_authority, new_key, to_pem

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


# --- certificates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identities:
    """Directories with ``ca.pem``, ``peer.pem`` and ``peer.key``, good and bad, of one federation."""

    folder: Path
    authority: Authority

    def member(self, peer: int) -> Path:
        return self._write(str(peer), self.authority, peer)

    def of_another_ca(self, peer: int) -> Path:
        return self._write("other-ca", new_authority(self.authority.federation), peer)

    def of_another_federation(self, peer: int) -> Path:
        """Signed by the same CA."""
        stranger = new_authority("elsewhere")
        lent = Authority(self.authority.certificate, self.authority.key)
        key = new_key()
        leaf = _issue(stranger, key.public_key(), peer, 2, datetime.now(UTC))
        return self._store("elsewhere", key, self._signed_again(leaf, lent))

    def expired(self, peer: int) -> Path:
        key, then = new_key(), datetime.now(UTC) - timedelta(days=9)
        return self._store("expired", key, _issue(self.authority, key.public_key(), peer, 2, then))

    def with_two_names(self, first: int, second: int) -> Path:
        key = new_key()
        leaf = _issue(self.authority, key.public_key(), first, 2, datetime.now(UTC))
        other = _issue(self.authority, key.public_key(), second, 2, datetime.now(UTC))
        names = [*_names(leaf), *_names(other)]
        return self._store("two-names", key, self._signed_again(leaf, self.authority, names))

    def _write(self, name: str, authority: Authority, peer: int) -> Path:
        key = new_key()
        return self._store(name, key, _issue(authority, key.public_key(), peer, 2, datetime.now(UTC)))

    def _store(self, name: str, key: object, leaf: x509.Certificate) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "ca.pem", to_pem(self.authority.certificate))
        write_file(folder / "peer.pem", to_pem(leaf))
        write_file(folder / "peer.key", key_to_pem(key), 0o600)  # type: ignore[arg-type]
        return folder

    def _signed_again(
        self, leaf: x509.Certificate, authority: Authority, names: list[x509.GeneralName] | None = None
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(leaf.subject)
            .issuer_name(authority.certificate.subject)
            .public_key(leaf.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(leaf.not_valid_before_utc)
            .not_valid_after(leaf.not_valid_after_utc)
        )
        for extension in leaf.extensions:
            value: x509.ExtensionType = extension.value
            if isinstance(value, x509.AuthorityKeyIdentifier):
                continue
            if names and isinstance(value, x509.SubjectAlternativeName):
                value = x509.SubjectAlternativeName(names)
            builder = builder.add_extension(value, critical=extension.critical)
        return builder.sign(authority.key, hashes.SHA256())


def identities(folder: Path, federation: str) -> Identities:
    return Identities(folder, new_authority(federation))


def _names(leaf: x509.Certificate) -> Iterable[x509.GeneralName]:
    return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


# --- HTTP/2 by hand ---------------------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _length(number: int) -> bytes:
    """An HPACK integer with a prefix of seven bits."""
    if number < 127:
        return bytes((number,))
    out, number = bytearray((127,)), number - 127
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def header(name: bytes, value: bytes) -> bytes:
    """A literal header that is not remembered."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def request_headers(path: bytes, *more: tuple[bytes, bytes], method: bytes = b"POST") -> bytes:
    fixed = ((b":method", method), (b":scheme", b"https"), (b":path", path), (b":authority", b"peer"))
    grpc = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(header(*pair) for pair in (*fixed, *grpc, *more))


def message(content: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">BI", compressed, len(content) if length is None else length) + content


def tls_context(identity: Path | None, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if identity is not None:
        context.load_cert_chain(identity / "peer.pem", identity / "peer.key")
    return context


class Connection:
    """One connection with nothing between the test and the bytes."""

    def __init__(
        self,
        port: int,
        context: ssl.SSLContext,
        *,
        settings: bytes = b"",
        window: int = 0,
        patience: float = 10.0,
    ) -> None:
        raw = socket.create_connection(("127.0.0.1", port), timeout=patience)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.socket = context.wrap_socket(raw)
        except BaseException:
            raw.close()
            raise
        self._next = 1
        self._buffer = b""
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        if window:
            self.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", window)))

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def open(self, path: bytes, body: bytes | None, *more: tuple[bytes, bytes], end: bool = True) -> int:
        """Send a request; its stream."""
        stream, self._next = self._next, self._next + 2
        out = frame(HEADERS, END_HEADERS, stream, request_headers(path, *more))
        if body is not None:
            pieces = [body[i : i + 16_384] for i in range(0, len(body), 16_384)] or [b""]
            for piece in pieces[:-1]:
                out += frame(DATA, 0, stream, piece)
            out += frame(DATA, END_STREAM if end else 0, stream, pieces[-1])
        self.send(out)
        return stream

    def frames(self, seconds: float) -> Iterator[tuple[int, int, int, bytes]]:
        """Frames as they come, until the connection ends or nothing has come for so long."""
        self.socket.settimeout(seconds)
        while True:
            while len(self._buffer) < 9 or len(self._buffer) < 9 + int.from_bytes(self._buffer[:3], "big"):
                try:
                    more = self.socket.recv(1 << 16)
                except (TimeoutError, ssl.SSLError, OSError):
                    return
                if not more:
                    return
                self._buffer += more
            length = int.from_bytes(self._buffer[:3], "big")
            kind, flags, stream = self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big")
            payload, self._buffer = self._buffer[9 : 9 + length], self._buffer[9 + length :]
            if kind == SETTINGS and not flags & ACK:
                self.send(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))
            yield kind, flags, stream, payload

    def wait_for(self, streams: set[int], seconds: float = 10.0) -> bool:
        """Until all these streams have ended; whether they have."""
        left = set(streams)
        for kind, flags, stream, _ in self.frames(seconds):
            if kind == RST or (kind in (DATA, HEADERS) and flags & END_STREAM):
                left.discard(stream)
            if not left or kind == GOAWAY:
                break
        return not left

    def close(self) -> None:
        with suppress(OSError):
            self.socket.close()


# --- the peer that behaves --------------------------------------------------------------------------------------------


class Probe:
    """Such a peer in a process of its own."""

    def __init__(self, folder: Path, peers: Path, tls: Path, peer: int, called: int) -> None:
        import subprocess

        self._file = folder / "probe.jsonl"
        self._log = (folder / "probe.log").open("w")
        arguments = [str(peers), str(tls), str(peer), str(called), str(self._file)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *arguments], stdout=self._log, stderr=subprocess.STDOUT, env=os.environ
        )

    def answers(self, since: float) -> list[tuple[float, float, str]]:
        """When each hello was said (monotonic), how long its answer took, and what was wrong with it, if anything."""
        if not self._file.exists():
            return []
        lines = self._file.read_text().splitlines()
        return [(t, s, e) for t, s, e in map(json.loads, lines) if t >= since]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


async def _behave(peers: Path, tls: Path, peer: int, called: int, out: Path) -> None:
    import grpc.aio

    from crad_p2p.federation import load_federation
    from peer._proto.crad.v1 import peer_pb2
    from peer.channels import RawStub, dial
    from peer.hello import greeting
    from peer.intake import parse
    from peer.signatures import check_greeting
    from peer.tls import Tls

    federation = load_federation(peers)
    own = Tls(tls, federation.federation, peer)
    channel = dial(federation.peer(called).address, own, called)
    stub = RawStub(channel)

    async def watch() -> None:
        """A second channel, as a link that has two; ends are written down as failures."""
        while True:
            try:
                call = stub.Watch(peer_pb2.WatchRequest())
                while (raw := await call.read()) is not grpc.aio.EOF:
                    parse(peer_pb2.PeerState, raw)
                note(time.monotonic(), 0.0, "the stream of states ended")
            except grpc.aio.AioRpcError as error:
                note(time.monotonic(), 0.0, f"watch: {error.code().name} {error.details()}")
            await asyncio.sleep(0.2)

    def note(start: float, took: float, error: str) -> None:
        file.write(json.dumps((start, took, error)) + "\n")
        file.flush()

    with out.open("w") as file:
        watching = asyncio.create_task(watch())
        while not watching.done():
            request, start = greeting(federation, peer), time.monotonic()
            try:
                reply = parse(peer_pb2.HelloReply, await stub.Hello(request, timeout=10))
                check_greeting(
                    reply.certificate,
                    reply.proof,
                    federation=federation.federation,
                    authorities=own.authorities,
                    caller=peer,
                    called=called,
                    nonce=request.nonce,
                )
                note(start, time.monotonic() - start, "")
            except grpc.aio.AioRpcError as error:
                note(start, time.monotonic() - start, f"{error.code().name} {error.details()}")
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(_behave(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])))
