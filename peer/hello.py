"""The handshake: do two peers run the same federation with the same software?"""

from __future__ import annotations

import json
import secrets
from functools import lru_cache
from typing import Any

from crad_p2p import __version__
from crad_p2p.federation import Federation, describe_difference
from crad_p2p.foreign import printable
from peer._proto.crad.v1 import peer_pb2
from peer.intake import NONCE_BYTES, agreed_fields

#: Of the messages and what they mean.
PROTOCOL = 1


def greeting(federation: Federation, own_id: int) -> peer_pb2.HelloRequest:
    """What this peer says of itself, and a nonce for the other to sign."""
    agreed, nonce = agreed_document(federation), secrets.token_bytes(NONCE_BYTES)
    return peer_pb2.HelloRequest(peer=own_id, software=__version__, protocol=PROTOCOL, agreed=agreed, nonce=nonce)


@lru_cache(maxsize=4)
def agreed_document(federation: Federation) -> bytes:
    """The agreed fields as they are sent; made once, since of many peers it is long and told to each."""
    return json.dumps(federation.agreed()).encode()


def describe_disagreement(
    other: peer_pb2.HelloRequest | peer_pb2.HelloReply, federation: Federation, own_id: int
) -> str | None:
    """The first thing in which the other peer differs, with both values; None if it runs the same."""
    there, here = f"peer {other.peer}", f"peer {own_id}"
    if other.peer == own_id:  # of which two are running
        there, here = f"the other process of {here}", "this one"
    if other.protocol != PROTOCOL:
        return f"the protocol version is {other.protocol} on {there} and {PROTOCOL} on {here}"
    if other.software != __version__:
        return f"the software version is {printable(other.software)} on {there} and {__version__} on {here}"
    if other.agreed == agreed_document(federation):
        return None
    if (agreed := agreed_fields(other.agreed)) is None:
        return f"{there} does not say what it runs"
    difference = describe_difference(agreed, federation.agreed(), f"the file of {there}", f"the file of {here}")
    return printable(difference, 400) if difference else None


def describe_data_difference(other: peer_pb2.Data, own: peer_pb2.Data, peer: int, own_id: int) -> str | None:
    """The first thing in which the data of two peers differ, with both values; None if they do not."""
    there, here = list(other.class_names), list(own.class_names)
    if there != here:
        if len(there) != len(here):
            values = f"has {len(there)} classes on peer {peer} and {len(here)} on peer {own_id}"
        else:
            c = next(c for c in range(len(here)) if there[c] != here[c])
            values = f"has {_quoted(there[c])} as class {c} on peer {peer} and {_quoted(here[c])} on peer {own_id}"
        return f"the class list {values}; names and their order must be the same"
    if list(other.image_shape) != list(own.image_shape):
        return f"images are {_shape(other)} on peer {peer} and {_shape(own)} on peer {own_id}"
    if other.test_digest != own.test_digest:
        return (
            f"the common test sets (data.test) differ: digest {_short(other.test_digest)} on peer {peer} and "
            f"{_short(own.test_digest)} on peer {own_id}; give both the same files in the same classes"
        )
    if other.partition_digest != own.partition_digest:
        return (
            f"the labels, the partition or the transfer set differ: digest {_short(other.partition_digest)} on peer "
            f"{peer} and {_short(own.partition_digest)} on peer {own_id}; all peers cut their shards out of one common "
            f"data set: give both the same whole set, not images of their own (for which there is kind own), and the "
            f"same version of NumPy"
        )
    return None


def data_as_json(data: peer_pb2.Data) -> dict[str, Any]:
    """The same as it is remembered on disk."""
    tested = {"test_digest": data.test_digest} if data.test_digest else {}
    return {
        "class_names": list(data.class_names),
        "image_shape": list(data.image_shape),
        "partition_digest": data.partition_digest,
        **tested,
    }


def _short(digest: str) -> str:
    return f"{digest[:12]}…" if digest else "none"


def _quoted(name: str) -> str:
    return f"'{printable(name)}'"


def _shape(data: peer_pb2.Data) -> str:
    return "x".join(map(str, data.image_shape))
