"""gRPC channel and server options, each with its reason, and how long the service waits for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from crad_p2p.errors import CertificateError
from crad_p2p.federation import Federation, is_loopback
from peer.gate import CALLS_OF_ONE, SERVICE
from peer.intake import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES
from peer.tls import Tls

_COMMON: tuple[tuple[str, Any], ...] = (
    ("grpc.max_metadata_size", 8_192),
    ("grpc.absolute_max_metadata_size", 16_384),
    # Identity only: weights do not compress, and a compressed message could unpack to anything.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The probes for the window's size are pings, sent while data flow. Their answers queue behind those data, and one
    # that takes longer than the ping timeout ends the connection: a slow link would be cut every few seconds.
    ("grpc.http2.bdp_probe", 0),
)

_SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_COMMON,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 2 * CALLS_OF_ONE),  # of one connection
    # Who has connected and says nothing holds a place that others need. A link always has a call open.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Requests are small; with more, who sends without end makes gRPC take hundreds of megabytes for its reads.
    ("grpc.experimental.tcp_max_read_chunk_size", 1 << 16),
    ("grpc.so_reuseport", 0),  # else two peers on one port would both "succeed"
    # Must allow the clients' keepalive, or they are sent away for pinging too much.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A caller that has vanished only holds a stream here, so there is no haste. A caller may have nothing to say while
    # a window's worth of data is on its way, and these pings queue behind it: 2 MiB at 4 kB/s take nine minutes.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 600_000),
    ("grpc.http2.ping_timeout_ms", 600_000),
)

_CLIENT_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_COMMON,
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_http_proxy", 0),  # proxy variables would capture even loopback calls
    ("grpc.enable_retries", 0),  # a half-read stream cannot be retried by the library; links resume by offset
    # A silently dead link is noticed after keepalive time (see client_options) + timeout. Pings are sent only when
    # nothing comes, so data under way never delay their answers. The ping timeout is the one that works; both are set.
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    # Bytes that a sender may have under way: 200 Mbit/s on a link with a round trip of 80 ms, and less the longer
    # it takes. Four transfers run at once.
    ("grpc.http2.lookahead_bytes", 2 << 20),
    # How long one attempt to connect may take. One that began while the link was cut gets no answer any more, and has
    # to be over within the five seconds in which traffic resumes. It takes three round trips (TCP, TLS, HTTP/2).
    ("grpc.min_reconnect_backoff_ms", 4_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # the default grows to two minutes
)


@dataclass(frozen=True)
class Waits:
    """Seconds.

    connect: until an answer to a small request counts as lost.
    no_progress: without a byte, until a stream is given up and resumed; one that moves is never cut.
    start: until every other peer must have been reached for the first time.
    linger: after the last round, for others who do not have everything yet.

    The fifth wait, policy ``quorum``'s for a round, comes from the peers' own round times (``peer.deadlines``).
    """

    connect: float = 20.0
    no_progress: float = 30.0
    start: float = 600.0
    linger: float = 600.0


def server_options(members: int) -> tuple[tuple[str, Any], ...]:
    """Options of a server for a federation of so many peers."""
    # A peer has one connection or two; those that were cut stay until this side notices.
    return (*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", 64 + 8 * members))


def client_options(members: int) -> tuple[tuple[str, Any], ...]:
    """Options of a channel to a peer, in a federation of so many: with many links each is looked after less often."""
    return (
        *_CLIENT_OPTIONS,
        ("grpc.keepalive_time_ms", min(10_000, max(3_000, 100 * members))),
    )


def require_loopback(federation: Federation, listen: str) -> None:
    """Plain text is for one machine only.

    Raises:
        CertificateError: an address that other machines can reach.
    """
    for what, address in (("--listen", listen), *((f"peer {peer.id}", peer.address) for peer in federation.peers)):
        if not is_loopback(address):
            raise CertificateError(
                f"--insecure sends everything as plain text, so it takes addresses of this machine only, such as "
                f"127.0.0.1:7400, and {what} has the address {address}: leave --insecure out and make certificates "
                f"(docs/certificates.md)"
            )


def dial(address: str, tls: Tls | None = None, peer: int | None = None, *, members: int = 1) -> grpc.aio.Channel:
    """A channel of its own to HOST:PORT (never shared with another, so that streams cannot block one another).

    Args:
        tls: this peer's certificate; None for plain text.
        peer: whose certificate is expected there.
        members: of the federation.
    """
    options = (*client_options(members), ("grpc.use_local_subchannel_pool", 1))
    if tls is None:
        return grpc.aio.insecure_channel(_target(address), options=options)
    assert peer is not None
    return grpc.aio.secure_channel(
        _target(address), tls.channel_credentials(), options=(*options, *tls.channel_options(peer))
    )


class RawStub:
    """The calls of a peer; answers are raw bytes, which ``peer.intake`` parses."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        def unary(name: str) -> Any:
            return channel.unary_unary(f"/{SERVICE}/{name}", request_serializer=_raw)

        def stream(name: str) -> Any:
            return channel.unary_stream(f"/{SERVICE}/{name}", request_serializer=_raw)

        self.Hello, self.GetManifest, self.Refuse = unary("Hello"), unary("GetManifest"), unary("Refuse")
        self.Watch, self.GetSnapshot = stream("Watch"), stream("GetSnapshot")


def _raw(message: Message) -> bytes:
    return message.SerializeToString()


def _target(address: str) -> str:
    host, _, port = address.rpartition(":")
    # "localhost" may resolve to ::1 first, where nobody listens.
    return f"dns:///{'127.0.0.1' if host == 'localhost' else host}:{port}"
