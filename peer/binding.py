"""Why an address cannot be listened on: gRPC only says that it cannot."""

from __future__ import annotations

import errno
import socket

from crad_p2p.errors import PortTakenError

#: Without --listen a peer listens at the address by which the others reach it.
_IN_FILE = "if it is the address of this peer in the federation file, and wrong, correct it there, at every site"


def why_not_bound(listen: str) -> PortTakenError | None:
    """Try to bind to HOST:PORT alone, as a server does; what to say if that fails."""
    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")  # as peers read it
    remedy = "free it ('ss -ltnp' shows who has it), or give another address with --listen"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended peer leaves behind is no matter
            probe.bind(address)
    except socket.gaierror as error:
        reason, remedy = (
            f"the name cannot be resolved ({error.strerror})",
            f"{_IN_FILE}, or give one of this machine with --listen",
        )
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is taken by another process",
            errno.EADDRNOTAVAIL: "the address is not of this machine",
            errno.EACCES: "this user may not take this port",
        }.get(error.errno or 0, f"{error.strerror}")
        if error.errno == errno.EACCES:
            remedy = "give one above 1023 with --listen"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = f"{_IN_FILE}; if it is right, behind NAT or in a container, say where to listen here: "
            remedy += f"--listen 0.0.0.0:{port}"
    else:
        return None
    return PortTakenError(f"cannot listen on {listen}: {reason}; {remedy}")
