"""gRPC channel and server options, each with its reason, and how long the service waits for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio

from crad_p2p.errors import CertificateError
from crad_p2p.federation import Federation, is_loopback

#: Bytes of snapshot data in one message. Under TLS 64 KiB costs half as much CPU again; more gains nothing.
CHUNK_BYTES = 1 << 20

_COMMON: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
    ("grpc.max_metadata_size", 8192),
    # Identity only: weights do not compress, and a compressed message could unpack to anything.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A silently dead link is noticed after time + timeout. The ping timeout is the one that works; both are set.
    ("grpc.keepalive_time_ms", 8_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # else two peers on one port would both "succeed"
    # Must allow the clients' keepalive, or they are sent away for pinging too much.
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.max_ping_strikes", 0),
)

CLIENT_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_COMMON,
    ("grpc.enable_http_proxy", 0),  # proxy variables would capture even loopback calls
    ("grpc.enable_retries", 0),  # a half-read stream cannot be retried by the library; links resume by offset
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),  # the default grows to two minutes
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


def require_loopback(federation: Federation, listen: str) -> None:
    """Plain text is for one machine only.

    Raises:
        CertificateError: an address that other machines can reach.
    """
    for what, address in (("--listen", listen), *((f"peer {peer.id}", peer.address) for peer in federation.peers)):
        if not is_loopback(address):
            raise CertificateError(
                f"{what} has the address {address}, which is not of the loopback interface, and this version has no "
                f"certificates yet: without them snapshots would travel unprotected, so only addresses such as "
                f"127.0.0.1:7400 are accepted"
            )


def dial(address: str) -> grpc.aio.Channel:
    """A channel of its own to HOST:PORT (never shared with another, so that streams cannot block one another)."""
    return grpc.aio.insecure_channel(_target(address), options=[*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def _target(address: str) -> str:
    host, _, port = address.rpartition(":")
    # "localhost" may resolve to ::1 first, where nobody listens.
    return f"dns:///{'127.0.0.1' if host == 'localhost' else host}:{port}"
