"""What can be seen on this host alone, before anything is started."""

from __future__ import annotations

import os
from datetime import datetime

from crad_p2p.errors import ConfigurationError, ExitCode
from crad_p2p.federation import Federation
from crad_p2p.privacy import describe_noise
from peer.certificates import days_left, issued_text
from peer.credentials import Credentials, expiry_warning
from peer.disk_space import existing
from peer.findings import Finding, failed_by, failure, ok, warning
from peer.store import PASSED, Store
from peer.words import in_days


def describe_federation(federation: Federation, own_id: int) -> Finding:
    """What runs, and the beginning of its digest, for people who compare two screens."""
    count, rounds, epsilon = len(federation.peers), federation.rounds, federation.privacy.count_epsilon
    noise = "" if epsilon is None else f"; {describe_noise(epsilon, is_own=federation.data.is_own)}"
    by = federation.data.partition.by
    cut = "" if by is None else f" in whole groups by {by}"
    return ok(
        "federation",
        f"{federation.federation}, digest {federation.digest()[:12]}…: {count} peer{'s' if count > 1 else ''}, "
        f"{rounds} round{'s' if rounds > 1 else ''} of {federation.method.name} on {federation.data.words}{cut}; "
        f"peer {own_id} is {federation.peer(own_id).arch}{noise}",
    )


def check_certificate(credentials: Credentials, now: datetime | None = None) -> Finding:
    """Of credentials that fit in every other way: are they about to expire?"""
    if sentence := expiry_warning(credentials, now):
        return warning("certificate", sentence)
    days = days_left(credentials.certificate, now)
    return ok(
        "certificate",
        f"of peer {credentials.peer} of {credentials.federation}, "
        f"{issued_text(credentials.certificate, credentials.issuer)}, {in_days(days)}; the key is for its owner alone",
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
    final = federation.version(own_id, federation.rounds)
    if last >= final and (final == federation.rounds or (root / PASSED).exists()):
        return ok(
            what, f"{root}: all {federation.rounds} rounds are done; started again, this peer only serves the others"
        )
    return ok(what, f"{root}: this peer goes on after round {last}" if last >= 0 else f"{root} holds no round yet")
