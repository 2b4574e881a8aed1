"""The handshake: do two peers run the same federation with the same software?"""

from __future__ import annotations

import json

from crad_p2p import __version__
from crad_p2p.federation import Federation, describe_difference
from crad_p2p.foreign import printable
from peer._proto.crad.v1 import peer_pb2


def greeting(federation: Federation, own_id: int) -> peer_pb2.HelloRequest:
    """What this peer says of itself."""
    agreed = json.dumps(federation.agreed()).encode()
    return peer_pb2.HelloRequest(peer=own_id, software=__version__, agreed=agreed)


def describe_disagreement(
    other: peer_pb2.HelloRequest | peer_pb2.HelloReply, federation: Federation, own_id: int
) -> str | None:
    """The first thing in which the other peer differs, with both values; None if it runs the same."""
    there, here = f"peer {other.peer}", f"peer {own_id}"
    if other.software != __version__:
        return f"the software version is {printable(other.software)} on {there} and {__version__} on {here}"
    try:
        agreed = json.loads(other.agreed)
    except (ValueError, RecursionError):
        agreed = None
    if not isinstance(agreed, dict):
        return f"{there} does not say what it runs"
    difference = describe_difference(agreed, federation.agreed(), f"the file of {there}", f"the file of {here}")
    return printable(difference, 400) if difference else None
