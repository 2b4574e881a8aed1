"""What certificates, requests and keys are, in words, and whether a peer would accept a directory of them."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from crad_p2p.errors import CertificateError
from crad_p2p.lines import say
from launch.authority import CA_KEY_FILE, load_authority, load_request
from peer.certificates import (
    check_authority,
    date_text,
    days_left,
    fingerprint,
    identity_in,
    key_fingerprint,
    name_text,
)
from peer.credentials import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    REQUEST_FILE,
    certificates_in,
    expiry_warning,
    kind_of,
    load_certificate,
    load_credentials,
    load_key,
    read_file,
)
from peer.words import in_days

#: A key and request that wait for their certificate while others are in use.
NEXT_KEY_FILE: Final = "next.key"
NEXT_REQUEST_FILE: Final = "next.csr"
#: What is in a directory of one peer, and in no other.
_OF_A_PEER: Final = (CERTIFICATE_FILE, KEY_FILE, REQUEST_FILE, NEXT_KEY_FILE, NEXT_REQUEST_FILE)


def inspect(path: Path) -> None:
    """Say what a file is, or what is in a directory of a peer, of the CA, or of several peers.

    Raises:
        CertificateError: it cannot be used; what could be told is printed.
    """
    if not path.is_dir():
        _inspect_file(path)
    elif any((path / name).exists() for name in (*_OF_A_PEER, CA_KEY_FILE)):
        _inspect_directory(path)
    else:
        _inspect_all(path)


def identity_named(path: Path, named: x509.Certificate | x509.CertificateSigningRequest) -> tuple[str, int]:
    """Federation and peer that a certificate or a request in a file names.

    Raises:
        CertificateError: it names none.
    """
    try:
        return identity_in(named)
    except ValueError as error:
        raise CertificateError(f"{path}: {error}; 'crad-mesh certs' makes requests and certificates so") from None


def describe(certificate: x509.Certificate) -> None:
    """Its dates and fingerprints."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    days = days_left(certificate)
    left = f"{in_days(days)} left" if days > 0 else "expired"
    if datetime.now(UTC) < start:
        left = "not yet valid"
    say(f"  valid            {date_text(start)} to {date_text(end)} ({left})")
    say(f"  fingerprint      {fingerprint(certificate)}")
    if not _is_authority(certificate):  # whose one fingerprint is read out by telephone
        describe_key(certificate.public_key())


def describe_key(key: object) -> None:
    """Its fingerprint."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        say(f"  key fingerprint  {key_fingerprint(key)}")


def _inspect_file(path: Path) -> None:
    content = read_file(path, "a certificate, a request or a private key", "give such a file")
    kind = kind_of(content)
    if kind == "a private key":
        say(f"{path}: private key")
        say(f"  mode             {stat.S_IMODE(path.stat().st_mode):04o}")
        key = load_key(path, "'crad-mesh certs request' makes one")
        describe_key(key.public_key())
    elif kind == "a request":
        asked = load_request(path)
        federation, peer = identity_named(path, asked)
        say(f"{path}: request for peer {peer} of federation {federation}")
        describe_key(asked.public_key())
    elif kind == "a certificate":
        for certificate in certificates_in(path, content, "certificates", "give such a file"):
            say(f"{path}: {_title(certificate)}")
            describe(certificate)
    else:
        raise CertificateError(f"{path}: holds {kind}; expected a certificate, a request or a private key in PEM")


def _title(certificate: x509.Certificate) -> str:
    if _is_authority(certificate):
        return f"certificate of a CA, {name_text(certificate.subject)}"
    try:
        federation, peer = identity_in(certificate)
        return f"certificate of peer {peer} of federation {federation}"
    except ValueError as error:
        return f"certificate that {error}"


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        check_authority(certificate)
    except ValueError:
        return False
    return True


def _inspect_directory(folder: Path) -> None:
    """Every file, and then all of them together."""
    verdict: list[str] = []
    fault: CertificateError | None = None
    try:
        verdict = _verdict(folder)
    except CertificateError as error:
        fault = error
    for path in (folder / name for name in (CA_FILE, CA_KEY_FILE, *_OF_A_PEER)):
        if path.exists():
            try:
                _inspect_file(path)
            except CertificateError as error:
                if not str(fault).startswith(f"{path}: "):  # else what is wrong with this file is said at the end
                    say(str(error))
    if fault is not None:
        raise fault
    for line in verdict:
        say(line)


def _verdict(folder: Path) -> list[str]:
    if (folder / CA_KEY_FILE).exists():
        return [f"{folder}: the CA of federation {load_authority(folder).federation}"]
    federation, peer = _whose(folder)
    warning = expiry_warning(load_credentials(folder, federation, peer))
    return [f"{folder}: accepted as peer {peer} of federation {federation}", *([warning] if warning else [])]


def _whose(folder: Path) -> tuple[str, int]:
    """Federation and peer that a directory is for, by its certificate or a request that waits."""
    certificate, request = folder / CERTIFICATE_FILE, folder / REQUEST_FILE
    if not certificate.exists() and request.exists():
        return identity_named(request, load_request(request))
    return identity_named(certificate, load_certificate(certificate))


def _inspect_all(folder: Path) -> None:
    """The directories of several peers, as in ``crad-tls``, and perhaps the CA certificates beside them."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [path for path in inside if any((path / name).exists() for name in (*_OF_A_PEER, CA_FILE))]
    if not found and not (folder / CA_FILE).exists():
        raise CertificateError(
            f"{folder}: holds no certificate, request or key, and neither does a directory in it; expected the "
            f"directory of a peer, such as crad-tls/0, or of a CA: 'crad-mesh certs request' makes the first"
        )
    if (folder / CA_FILE).exists():
        _inspect_file(folder / CA_FILE)
    refused = []
    for path in found:
        try:
            _inspect_directory(path)
        except CertificateError as error:
            say(str(error))
            refused.append(path)
    if refused:
        raise CertificateError(
            f"{folder}: not accepted {'is' if len(refused) == 1 else 'are'} {', '.join(map(str, refused))}, for the "
            f"reasons above"
        )
