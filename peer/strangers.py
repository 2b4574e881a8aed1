"""Who answers at an address where another peer was expected, for a sentence in the log.

gRPC only says that a handshake has failed. Nothing that is found here is trusted or used.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from peer.certificates import certificate_from_der, check_issued, date_text, identity_of
from peer.credentials import CA_FILE, Credentials
from peer.tls import Tls

#: Seconds for one look.
_PATIENCE = 1.5


@dataclass(frozen=True)
class Stranger:
    """Why no connection comes about, and who can mend that, and how."""

    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


async def describe_stranger(address: str, peer: int, tls: Tls) -> Stranger | None:
    """Why no connection with that peer comes about at HOST:PORT; None if nothing is found that would say so."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await _look(address, peer, tls)
    except ssl.SSLError as error:
        return Stranger(
            f"no TLS 1.3 handshake comes about ({error.reason or error})",
            f"ask the site of peer {peer} what runs there: another program, or a peer with --insecure",
        )
    except (OSError, TimeoutError):
        return None


async def _look(address: str, peer: int, tls: Tls) -> Stranger | None:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # to see it, whatever it is
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    _show(context, tls.credentials)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if (fault := _fault_of(der, peer, tls)) is not None:
            return fault
        try:
            # A server that does not accept this peer's certificate says so only after the handshake.
            await reader.read(1)
        except ssl.SSLError as error:
            return _refused(error, peer, tls)
        return None
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            await writer.wait_closed()


def _show(context: ssl.SSLContext, own: Credentials) -> None:
    """Give a context the certificate in use, and its key: the files may hold others by now, or be half written.

    Raises:
        OSError: it is larger than any that another peer would take.
    """
    with ExitStack() as stack:

        def piped(content: bytes) -> str:  # it takes paths alone, and no key is to lie on a disk again
            source, goal = os.pipe()
            stack.callback(os.close, source)
            try:
                os.set_blocking(goal, False)
                if os.write(goal, content) < len(content):
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            finally:
                os.close(goal)
            return f"/dev/fd/{source}"

        context.load_cert_chain(piped(own.certificate_pem), piped(own.key_pem))


def _refused(error: ssl.SSLError, peer: int, tls: Tls) -> Stranger:
    own = tls.credentials
    text = f"it refuses the certificate of this peer ({error.reason or error})"
    if datetime.now(UTC) > own.not_after:
        return Stranger(
            f"{text}, which expired on {date_text(own.not_after)}",
            f"renew it here: 'crad-mesh certs renew --tls-dir {own.folder}'",
        )
    return Stranger(text, _compare(peer, tls))


def _compare(peer: int, tls: Tls) -> str:
    shows = f"'crad-mesh certs inspect {tls.credentials.folder}' shows it"
    return f"compare the CA's fingerprint with the site of peer {peer} ({shows}), and ask whoever runs the CA"


def _fault_of(der: bytes, peer: int, tls: Tls) -> Stranger | None:
    expected, now = f"expected one of peer {peer}", datetime.now(UTC)
    try:
        certificate = certificate_from_der(der)
        found = identity_of(certificate, tls.credentials.federation)
    except ValueError as error:
        remedy = f"see that this is the address of peer {peer}, and ask that site what runs there"
        return Stranger(f"the certificate there {error}; {expected}", remedy)
    if found != peer:
        return Stranger(
            f"the certificate there is that of peer {found}, expected that of peer {peer}",
            f"see that this is the address of peer {peer}, and ask that site which id it has started",
        )
    try:
        check_issued(certificate, tls.authorities, None)
    except ValueError as error:
        trusted = f"expected one of a CA in {tls.credentials.folder / CA_FILE}"
        return Stranger(f"the certificate there {error}; {trusted}", _compare(peer, tls))
    try:
        check_issued(certificate, tls.authorities, now)
    except ValueError as error:
        if now > certificate.not_valid_after_utc:
            remedy = f"the site of peer {peer} must renew it, with 'crad-mesh certs renew' there"
        elif now < certificate.not_valid_before_utc:
            remedy = f"set the clock right, here or at the site of peer {peer}"
        else:
            remedy = "whoever runs the CA must make a new one, with 'crad-mesh certs init-ca'"
        return Stranger(f"the certificate there {error}", remedy)
    return None
