"""Mutual TLS for gRPC: the certificate in use, who calls, and new files picked up while running."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import grpc
from cryptography import x509

from crad_p2p.errors import CertificateError
from peer.certificates import check_issued, date_text, host_name, identity_of, issued_text, issuer_of
from peer.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Credentials, expiry_warning, load_credentials
from peer.quiet import Quiet

logger = logging.getLogger(__name__)

#: Seconds between two looks at the files, and between two warnings that they expire.
_LOOK, _WARN = 10.0, 86_400.0
#: Callers whose certificates are remembered.
_MOST_CALLERS = 1_000


class CallerError(Exception):
    """Why a caller is refused.

    Attributes:
        claims: the peer that its certificate names, if a trusted CA issued that and only the time is wrong. Nothing is
            to be concluded from it but whom to tell.
    """

    def __init__(self, text: str, claims: int | None = None) -> None:
        super().__init__(text)
        self.claims = claims


@dataclass(frozen=True)
class Caller:
    """Who calls, by its certificate, and until when that is valid.

    Attributes:
        certificate: in words: its CA and its end.
    """

    peer: int
    until: datetime
    certificate: str = ""


class Tls:
    """The certificate, key and authorities of one peer.

    Args:
        folder: holds ``ca.pem``, ``peer.pem`` and ``peer.key``.

    Attributes:
        connections: that were made to this peer, whoever made them and whether or not a handshake followed.

    Raises:
        CertificateError: they must not be used.
    """

    def __init__(self, folder: Path, federation: str, peer: int) -> None:
        self._folder = folder
        self._federation = federation
        self._peer = peer
        self._seen = self._stamp()
        self._complaint = ""
        self.credentials: Credentials = load_credentials(folder, federation, peer)
        self._given = self.credentials  # to gRPC's server
        self._callers: dict[bytes, Caller] = {}
        self._connections = itertools.count()
        self.connections = 0

    @property
    def authorities(self) -> Sequence[x509.Certificate]:
        """Who issues the peers' certificates."""
        return self.credentials.authorities

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that asks every caller for its certificate, and has a new one as soon as it is here."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.credentials),
            self._newer_configuration,  # type: ignore[arg-type]  # None is right, and means no change
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For calls to other peers."""
        own = self.credentials
        return grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.certificate_pem)

    def channel_options(self, peer: int) -> tuple[tuple[str, str], ...]:
        """Options by which only this peer's certificate is accepted, whatever the address."""
        return (("grpc.ssl_target_name_override", host_name(self._federation, peer)),)

    def caller(self, auth: Mapping[str, Iterable[bytes]]) -> Caller:
        """Who calls.

        Args:
            auth: of the call, as gRPC gives it.

        Raises:
            CallerError: not by TLS 1.3, or by a certificate that is not one of this federation's, or not valid now.
        """
        version = b"".join(auth.get("ssl_tls_version", ())).decode(errors="replace")
        if version != "TLSv1.3":
            raise CallerError(f"TLS 1.3 is needed, and it came by {version or 'no TLS'}")
        pem = b"".join(auth.get("x509_pem_cert", ()))
        now = datetime.now(UTC)
        callers = self._callers  # a later one, should the files change meanwhile
        known = callers.get(pem)
        if known is None or now >= known.until:
            known = self._identify(pem, now)
            if len(callers) >= _MOST_CALLERS:
                callers.clear()
            callers[pem] = known
        return known

    def _identify(self, pem: bytes, now: datetime) -> Caller:
        # gRPC has checked the chain when the connection was made; since then authorities may have changed, and time
        # has passed.
        claims = None
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            check_issued(certificate, self.authorities, None)
            claims = identity_of(certificate, self._federation)
            check_issued(certificate, self.authorities, now)
        except ValueError as error:
            raise CallerError(str(error), claims) from None
        issuer = issuer_of(certificate, self.authorities)
        return Caller(claims, certificate.not_valid_after_utc, issued_text(certificate, issuer))

    def reload(self) -> bool:
        """Read the files again if they have changed; whether they are others now, and right.

        Files that must not be used leave those before in use, and are logged once: they may be half written.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            fresh = load_credentials(self._folder, self._federation, self._peer)
        except CertificateError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("new certificate files are not used, those before stay in use: %s", error)
            return False
        self._seen, self._complaint = stamp, ""
        before, self.credentials = self.credentials, fresh
        if (before.certificate_pem, before.key_pem, before.ca_pem) == (
            fresh.certificate_pem,
            fresh.key_pem,
            fresh.ca_pem,
        ):
            return False
        self._callers = {}
        logger.info(
            "new certificate files are in use; the certificate is valid until %s",
            f"{fresh.not_after:%Y-%m-%d %H:%M} UTC",
        )
        return True

    async def watch(self, on_change: Callable[[], None]) -> NoReturn:
        """Look at the files from time to time; warn when they are about to expire."""
        since_warning, quiet = _WARN, Quiet()
        while True:
            self.say_end(quiet)
            if since_warning >= _WARN and (warning := expiry_warning(self.credentials)):
                since_warning = 0.0
                logger.warning("%s", warning)
            await asyncio.sleep(_LOOK)
            since_warning += _LOOK
            if await asyncio.to_thread(self.reload):
                since_warning, quiet = _WARN, Quiet()
                on_change()

    def say_end(self, quiet: Quiet) -> None:
        """Log that the certificate has expired, if it has: at once, and then ever more rarely."""
        end = self.credentials.not_after
        if datetime.now(UTC) >= end and quiet.may_speak(end):
            logger.error(
                "the certificate of this peer expired on %s, and no other peer accepts it any more: get a new one with "
                "'crad-mesh certs renew --tls-dir %s'; it is taken up without a restart",
                date_text(end),
                self._folder,
            )

    def _stamp(self) -> tuple[object, ...]:
        """Changes whenever a file does."""
        stamps: list[object] = []
        for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
            try:
                about = (self._folder / name).stat()
                stamps.append((about.st_mtime_ns, about.st_ino, about.st_size, about.st_mode, about.st_ctime_ns))
            except OSError as error:
                stamps.append(error.errno)
        return tuple(stamps)

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, in a thread of its own, for every connection before its handshake."""
        self.connections = next(self._connections) + 1
        if self._given is self.credentials:
            return None
        self._given = self.credentials
        return _configuration(self._given)


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key_pem, credentials.certificate_pem)], root_certificates=credentials.ca_pem
    )
