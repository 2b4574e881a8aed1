"""Who answers at an address where another peer was expected, for a sentence in the log.

gRPC only says that a handshake has failed. Nothing that is found here is trusted or used.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from datetime import UTC, datetime

from peer.certificates import certificate_from_der, check_issued, identity_of
from peer.credentials import CERTIFICATE_FILE, KEY_FILE
from peer.tls import Tls

#: Seconds for one look.
_PATIENCE = 1.5


async def describe_stranger(address: str, peer: int, tls: Tls) -> str | None:
    """Why no connection with that peer comes about at HOST:PORT; None if nothing is found that would say so."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await _look(address, peer, tls)
    except ssl.SSLError as error:
        return f"no TLS 1.3 handshake comes about ({error.reason or error})"
    except (OSError, TimeoutError):
        return None


async def _look(address: str, peer: int, tls: Tls) -> str | None:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # to see it, whatever it is
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    folder = tls.credentials.folder
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if (fault := _fault_of(der, peer, tls)) is not None:
            return fault
        try:
            # A server that does not accept this peer's certificate says so only after the handshake.
            await reader.read(1)
        except ssl.SSLError as error:
            return f"it refuses the certificate of this peer ({error.reason or error})"
        return None
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            await writer.wait_closed()


def _fault_of(der: bytes, peer: int, tls: Tls) -> str | None:
    try:
        certificate = certificate_from_der(der)
        found = identity_of(certificate, tls.credentials.federation)
        if found != peer:
            return f"the certificate there is that of peer {found}, expected that of peer {peer}"
        check_issued(certificate, tls.authorities, datetime.now(UTC))
    except ValueError as error:
        return f"the certificate there {error}; expected one of peer {peer}"
    return None
