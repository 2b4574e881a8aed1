"""Signatures on manifests and greetings, made with the key of the peer's certificate.

A manifest's signature stays valid when its certificate has expired, since it was made before; that the peer is who it
says now is known from the connection.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from crad_p2p.manifest import Manifest, Signature
from peer.certificates import ForeignIssuerError, certificate_from_der, check_issued, identity_of, sign, verify
from peer.credentials import Credentials

Authorities = Sequence[x509.Certificate]

_MANIFEST, _GREETING = b"crad-p2p manifest 1", b"crad-p2p greeting 1"


def sign_manifest(manifest: Manifest, credentials: Credentials) -> Manifest:
    """The same manifest, signed by its peer."""
    value = sign(credentials.key, _MANIFEST, manifest.signed_bytes())
    certificate = credentials.certificate.public_bytes(Encoding.DER)
    signature = Signature(certificate=b64encode(certificate).decode(), value=b64encode(value).decode())
    return manifest.model_copy(update={"signature": signature})


def is_signed_with(manifest: Manifest, credentials: Credentials) -> bool:
    """Whether a manifest carries this very certificate."""
    certificate = b64encode(credentials.certificate.public_bytes(Encoding.DER)).decode()
    return manifest.signature is not None and manifest.signature.certificate == certificate


def check_signature(manifest: Manifest, federation: str, authorities: Authorities) -> None:
    """See that a manifest was signed by the peer that it names.

    Raises:
        ForeignIssuerError: it is signed by a certificate that none of the authorities issued.
        ValueError: it is not signed, or by somebody else.
    """
    if manifest.signature is None:
        raise ValueError(f"manifest of round {manifest.round} of peer {manifest.peer} is not signed")
    try:
        certificate = certificate_from_der(b64decode(manifest.signature.certificate, validate=True))
        value = b64decode(manifest.signature.value, validate=True)
        check_issued(certificate, authorities, None)
        signer = identity_of(certificate, federation)
        verify(certificate, _MANIFEST, manifest.signed_bytes(), value)
    except ValueError as error:
        text = f"signature of the manifest of round {manifest.round} of peer {manifest.peer}: {error}"
        raise (
            ForeignIssuerError(text, error.issuer) if isinstance(error, ForeignIssuerError) else ValueError(text)
        ) from None
    if signer != manifest.peer:
        raise ValueError(f"manifest of peer {manifest.peer} is signed by peer {signer}")


def sign_greeting(credentials: Credentials, caller: int, nonce: bytes) -> bytes:
    """Proof for one caller that this peer has the key of its certificate."""
    return sign(credentials.key, _GREETING, _greeting(caller, credentials.peer, nonce))


def check_greeting(
    certificate_der: bytes,
    proof: bytes,
    *,
    federation: str,
    authorities: Authorities,
    caller: int,
    called: int,
    nonce: bytes,
) -> datetime:
    """See that the called peer is who it should be; until when its certificate says so.

    Raises:
        ValueError: its certificate names somebody else, is not valid now, or the proof is not made with its key.
    """
    certificate = certificate_from_der(certificate_der)
    check_issued(certificate, authorities, datetime.now(UTC))
    found = identity_of(certificate, federation)
    if found != called:
        raise ValueError(f"its certificate is that of peer {found}, expected peer {called}")
    verify(certificate, _GREETING, _greeting(caller, called, nonce), proof)
    return certificate.not_valid_after_utc


def _greeting(caller: int, called: int, nonce: bytes) -> bytes:
    return f"{caller} {called} ".encode() + nonce
