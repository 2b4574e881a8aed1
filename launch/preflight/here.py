"""What can be seen on this host alone, before anything is started."""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime

from crad_p2p.errors import ConfigurationError, ExitCode, PortTakenError
from crad_p2p.federation import Federation
from peer.certificates import days_left
from peer.credentials import Credentials, expiry_warning
from peer.disk_space import existing
from peer.findings import Finding, failed_by, failure, ok, warning
from peer.store import Store


def describe_federation(federation: Federation, own_id: int) -> Finding:
    """What runs, and the beginning of its digest, for people who compare two screens."""
    count, rounds = len(federation.peers), federation.rounds
    return ok(
        "federation",
        f"{federation.federation}, digest {federation.digest()[:12]}…: {count} peer{'s' if count > 1 else ''}, "
        f"{rounds} round{'s' if rounds > 1 else ''} of {federation.method.name} on {federation.data.dataset}; peer "
        f"{own_id} is {federation.peer(own_id).arch}",
    )


def check_certificate(credentials: Credentials, now: datetime | None = None) -> Finding:
    """Of credentials that fit in every other way: are they about to expire?"""
    if sentence := expiry_warning(credentials, now):
        return warning("certificate", sentence)
    days = days_left(credentials.certificate, now)
    return ok(
        "certificate",
        f"of peer {credentials.peer} of {credentials.federation}, valid until {credentials.not_after:%Y-%m-%d}, "
        f"{days:.0f} days; the key is for its owner alone",
    )


def check_state(store: Store, federation: Federation, own_id: int) -> tuple[Finding, str | None]:
    """Can the state directory be used for this run, and which process does already? Nothing is made or changed."""
    holder = None
    try:
        holder = store.holder()
        return _check_state(store, federation, own_id, holder), holder
    except ConfigurationError as error:
        return failed_by("state", error), holder
    except OSError as error:
        where = error.filename or store.root
        return failure("state", ExitCode.CONFIGURATION, f"{where}: cannot be read ({error.strerror})"), holder


def _check_state(store: Store, federation: Federation, own_id: int, holder: str | None) -> Finding:
    what, root = "state", store.root
    belongs, last = store.check_owner(federation, own_id), store.last_round()
    above = existing(root)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "cannot be written by this user" if above.is_dir() else "is not a directory"
        remedy = "mend that" if belongs else "mend that, or choose another with --state-dir"
        return failure(what, ExitCode.CONFIGURATION, f"state directory {root}: {above} {reason}", remedy)
    if holder is not None:
        return ok(what, f"{root} is in use: this peer is running (process {holder})")
    if not belongs:
        return ok(what, f"{root} is new: this peer begins with the first round")
    return ok(what, f"{root}: this peer goes on after round {last}" if last >= 0 else f"{root} holds no round yet")


def why_not_bound(listen: str) -> PortTakenError | None:
    """Try to bind to HOST:PORT alone, as a server does; what to say if that fails."""
    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")  # as peers read it
    remedy = "free the port, or give another address with --listen"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended peer leaves behind is no matter
            probe.bind(address)
    except socket.gaierror as error:
        reason, remedy = (
            f"the name cannot be resolved ({error.strerror})",
            "give an address of this machine with --listen",
        )
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "another process has the port",
            errno.EADDRNOTAVAIL: "the address is not of this machine",
            errno.EACCES: "this user may not take this port",
        }.get(error.errno or 0, f"{error.strerror}")
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "behind NAT or in a container, say where to listen here: --listen 0.0.0.0:" + port
    else:
        return None
    return PortTakenError(f"cannot listen on {listen}: {reason}; {remedy}")
