"""``crad-mesh certs``: from a federation's CA to the certificate of every peer, by files that people carry."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crad_p2p.errors import CertificateError, UsageError
from crad_p2p.federation import FEDERATION_NAME, load_federation

if TYPE_CHECKING:
    from cryptography import x509

app = typer.Typer(
    no_args_is_help=True,
    help="Make and look at certificates: a CA for the federation, and one certificate for every peer.",
)

#: A key and request that wait for their certificate while others are in use.
NEXT_KEY_FILE = "next.key"
NEXT_REQUEST_FILE = "next.csr"
ISSUED_FILE = "issued.jsonl"

PeerId = Annotated[int, typer.Option("--id", min=0, max=65535, help="Which peer of the federation.")]


@app.command("init-ca")
def init_ca(
    federation: Annotated[str, typer.Option(help="Name of the federation, as in peers.yaml.")],
    out: Annotated[Path, typer.Option(help="The CA's directory.")] = Path("crad-ca"),
) -> None:
    """Make the CA of a federation: once, on a machine of whoever runs it.

    Example: crad-mesh certs init-ca --federation colon
    """
    from crad_p2p.durable import write_file
    from launch.authority import CA_KEY_FILE, key_to_pem, make_folder, new_authority, to_pem
    from peer.certificates import fingerprint
    from peer.credentials import CA_FILE

    _check_name(federation)
    for path in (out / CA_KEY_FILE, out / CA_FILE):
        _refuse_existing(path, "every certificate hangs on it: give another directory with --out")
    authority = new_authority(federation)
    with _writing():
        make_folder(out)
        write_file(out / CA_FILE, to_pem(authority.certificate))
        write_file(out / CA_KEY_FILE, key_to_pem(authority.key), 0o600)
    print(f"The CA of federation {federation} is made, in {out}:")
    print(f"  {out / CA_KEY_FILE}  stays here, and nobody else gets it; keep a copy of {out} under lock and key")
    print(f"  {out / CA_FILE}  is for every site; its fingerprint (sha256) is")
    print(f"  {fingerprint(authority.certificate)}")
    print(f"Next: send {out / CA_FILE} to every site and read the fingerprint out by telephone; every site runs")
    print(f"  crad-mesh certs request --id ID --federation {federation}")


@app.command()
def request(
    peer_id: PeerId,
    peers: Annotated[Path | None, typer.Option(help="The federation file, which has the federation's name.")] = None,
    federation: Annotated[str | None, typer.Option(help="That name, instead of --peers.")] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Where this peer's certificate will be; by default crad-tls/ID here.")
    ] = None,
) -> None:
    """Make a peer's key, and a request for the certificate to it: on the site itself.

    Example: crad-mesh certs request --id 0 --peers peers.yaml
    """
    from peer.credentials import CERTIFICATE_FILE, KEY_FILE, REQUEST_FILE

    name = _name_of_federation(peers, federation, peer_id)
    folder = tls_dir or Path("crad-tls", str(peer_id))
    if (folder / CERTIFICATE_FILE).exists():
        advice = f"'crad-mesh certs renew --tls-dir {folder}' makes another one beside it"
    else:
        advice = f"send {folder / REQUEST_FILE}, or remove the key to begin anew"
    _refuse_existing(folder / KEY_FILE, advice)
    _new_request(folder, KEY_FILE, REQUEST_FILE, name, peer_id)


@app.command()
def sign(
    path: Annotated[Path, typer.Argument(metavar="REQUEST", help="The request of a site.")],
    peer_id: PeerId,
    ca: Annotated[Path, typer.Option(help="The CA's directory.")] = Path("crad-ca"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificate is good.")] = 365,
    out: Annotated[Path | None, typer.Option(help="The certificate; by default peer-ID.pem here.")] = None,
) -> None:
    """Sign a peer's request: where the CA is, after a look at who sent it.

    The request must ask for just this peer of the CA's federation. What is signed is also listed in the CA's
    issued.jsonl.

    Example: crad-mesh certs sign from-site-a/peer.csr --id 0
    """
    from crad_p2p.durable import write_file
    from launch.authority import load_authority, load_request, sign_request, to_pem
    from peer.credentials import CA_FILE

    authority = load_authority(ca)
    asked = load_request(path)
    out = out or Path(f"peer-{peer_id}.pem")
    _refuse_existing(out, "give another name with --out")
    try:
        certificate = sign_request(authority, asked, peer_id, days)
    except ValueError as error:
        raise CertificateError(
            f"{path}: {error}; nothing is signed: ask the site, by telephone, what it sent"
        ) from None
    with _writing():
        _list_issued(ca / ISSUED_FILE, peer_id, certificate)  # first, so that nothing is signed unlisted
        write_file(out, to_pem(certificate))
    print(f"{out}: certificate of peer {peer_id} of federation {authority.federation}")
    _describe(certificate)
    print(f"Next: send {out} and {ca / CA_FILE} to the site of peer {peer_id}, which runs")
    print(f"  crad-mesh certs install {out.name} --ca {CA_FILE}")
    print(f"or, if it has a {CA_FILE} already, without --ca.")


@app.command()
def install(
    signed: Annotated[Path, typer.Argument(help="The certificate that came back.")],
    tls_dir: Annotated[
        Path | None, typer.Option(help="Where the request was made; by default crad-tls/ID here.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's certificate, needed the first time.")] = None,
) -> None:
    """Put a signed certificate in place, after a check that it fits the key that waits for it: on the site.

    A peer that runs takes it up by itself. If this is interrupted, the same command again finishes it.

    Example: crad-mesh certs install peer-0.pem --ca ca.pem
    """
    from crad_p2p.durable import rename, write_file
    from launch.authority import load_request
    from peer.certificates import fingerprint
    from peer.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, REQUEST_FILE, load_certificate, load_files

    _, certificate = load_certificate(signed, "give the file that came back from whoever runs the CA")
    identity = _identity(signed, certificate)
    folder = tls_dir or Path("crad-tls", str(identity[1]))
    key = _waiting_key(folder, signed, certificate)
    asked = folder / (NEXT_REQUEST_FILE if key.name == NEXT_KEY_FILE else REQUEST_FILE)
    if asked.exists() and (wanted := _identity(asked, load_request(asked))) != identity:
        raise CertificateError(
            f"{signed}: is for peer {identity[1]} of federation '{identity[0]}', and {asked} asked for peer "
            f"{wanted[1]} of '{wanted[0]}'; have it signed as it is"
        )
    if ca is None and not (folder / CA_FILE).exists():
        raise UsageError(f"{folder / CA_FILE}: is not there yet; give the CA's certificate with --ca")
    if key.name == KEY_FILE and (folder / NEXT_KEY_FILE).exists():
        raise CertificateError(
            f"{signed}: is for the key that is in use already, and a renewal waits for its answer; give the file that "
            f"came back for {folder / NEXT_REQUEST_FILE}"
        )
    fitting = load_files(ca or folder / CA_FILE, signed, key, *identity)
    with _writing():
        if ca is not None:
            write_file(folder / CA_FILE, fitting.ca_pem)
        if key.name == NEXT_KEY_FILE:
            rename(key, folder / KEY_FILE)
        write_file(folder / CERTIFICATE_FILE, fitting.certificate_pem)
        asked.unlink(missing_ok=True)
        if not (folder / NEXT_KEY_FILE).exists():
            (folder / NEXT_REQUEST_FILE).unlink(missing_ok=True)  # of an installation that was interrupted
    print(f"{folder}: certificate of peer {identity[1]} of federation {identity[0]}")
    _describe(certificate)
    print("It was signed by the CA with the fingerprint (sha256)")
    print(f"  {fingerprint(fitting.issuer)}")
    print("Next: compare this fingerprint by telephone with whoever runs the CA, if that is not done yet. A peer that")
    print(f"runs takes the new files up by itself. {folder / KEY_FILE} never leaves this machine.")


@app.command()
def renew(
    tls_dir: Annotated[
        Path | None, typer.Option(help="The peer's directory; by default the only one in crad-tls here.")
    ] = None,
) -> None:
    """Make a new key and a request for it, beside those in use: on the site, before the certificate expires.

    Example: crad-mesh certs renew --tls-dir crad-tls/0
    """
    from peer.credentials import CERTIFICATE_FILE, load_certificate

    folder = tls_dir or _only_directory()
    path = folder / CERTIFICATE_FILE
    _, certificate = load_certificate(path, "for a first certificate use 'crad-mesh certs request'")
    identity = _identity(path, certificate)
    _refuse_existing(
        folder / NEXT_KEY_FILE,
        f"a renewal is under way: send {folder / NEXT_REQUEST_FILE}, or remove the key to begin anew",
    )
    print(f"{path}: stays in use until the new certificate is installed; it expires on {_end(certificate)}")
    _new_request(folder, NEXT_KEY_FILE, NEXT_REQUEST_FILE, *identity)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A certificate, request or key, or a directory of them.")],
) -> None:
    """Say what a file is, and whether a peer would accept a directory.

    Example: crad-mesh certs inspect crad-tls/0
    """
    if path.is_dir():
        _inspect_directory(path)
    else:
        _inspect_file(path)


# --- steps ------------------------------------------------------------------------------------------------------------


def _new_request(folder: Path, key_file: str, request_file: str, federation: str, peer: int) -> None:
    """A new key and the request for it, and what to do with them."""
    from crad_p2p.durable import write_file
    from launch.authority import key_to_pem, make_folder, make_request, new_key, to_pem

    key = new_key()
    with _writing():
        make_folder(folder)
        # The key last: once it is there, both are.
        write_file(folder / request_file, to_pem(make_request(key, federation, peer)))
        write_file(folder / key_file, key_to_pem(key), 0o600)
    print(f"{folder / request_file}: request for peer {peer} of federation {federation}")
    _describe_key(key.public_key())
    print(
        f"Next: send {folder / request_file} to whoever runs the CA, and read the fingerprint out by telephone; there"
    )
    print(f"  crad-mesh certs sign {request_file} --id {peer}")
    print(f"signs it. {folder / key_file} never leaves this machine, not even for the CA.")


def _list_issued(path: Path, peer: int, certificate: x509.Certificate) -> None:
    from peer.certificates import fingerprint

    line = json.dumps(
        {
            "serial": f"{certificate.serial_number:x}",
            "id": peer,
            "not_before": certificate.not_valid_before_utc.isoformat(),
            "not_after": certificate.not_valid_after_utc.isoformat(),
            "sha256": fingerprint(certificate),
        }
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _waiting_key(folder: Path, signed: Path, certificate: x509.Certificate) -> Path:
    """The key in a peer's directory that a certificate is for."""
    from peer.credentials import KEY_FILE, load_key

    there = [path for path in (folder / NEXT_KEY_FILE, folder / KEY_FILE) if path.exists()]
    for path in there:
        _, key = load_key(path, "'crad-mesh certs request' makes one")
        if key.public_key() == certificate.public_key():
            return path
    raise CertificateError(
        f"{signed}: is not for a key in {folder} (there {_words(there)}); expected the answer to the request that was "
        f"made there: give the right directory with --tls-dir, or have the newest request signed"
    )


def _words(keys: list[Path]) -> str:
    return f"is {' and '.join(path.name for path in keys)}" if keys else "is no key"


def _only_directory() -> Path:
    from peer.credentials import CERTIFICATE_FILE

    found = sorted(path.parent for path in Path("crad-tls").glob(f"*/{CERTIFICATE_FILE}"))
    if len(found) != 1:
        there = f"certificates are in {', '.join(map(str, found))}" if found else "no certificate is in crad-tls here"
        raise UsageError(f"{there}; say with --tls-dir which directory is meant")
    return found[0]


def _name_of_federation(peers: Path | None, federation: str | None, peer: int) -> str:
    if peers is not None and federation is None:
        whole = load_federation(peers)
        whole.peer(peer)  # it is in the file
        return whole.federation
    if federation is not None and peers is None:
        return _check_name(federation)
    raise UsageError("give either --peers with the federation file, or --federation with its name")


def _check_name(federation: str) -> str:
    if not re.fullmatch(FEDERATION_NAME, federation):
        raise UsageError(
            f"--federation '{federation}' must be lower-case letters, digits and hyphens, 63 at most, as in peers.yaml"
        )
    return federation


def _identity(path: Path, named: x509.Certificate | x509.CertificateSigningRequest) -> tuple[str, int]:
    from peer.certificates import identity_in

    try:
        return identity_in(named)
    except ValueError as error:
        raise CertificateError(f"{path}: {error}; 'crad-mesh certs' makes requests and certificates so") from None


def _refuse_existing(path: Path, advice: str) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: is there already, and is not overwritten; {advice}")


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = error.filename or "a file"
        raise UsageError(f"{what}: cannot be written ({error.strerror}); mend that, or choose another place") from None


# --- inspect ----------------------------------------------------------------------------------------------------------


def _end(certificate: x509.Certificate) -> str:
    from peer.certificates import date_text

    return date_text(certificate.not_valid_after_utc)


def _describe(certificate: x509.Certificate) -> None:
    from peer.certificates import date_text, days_left, fingerprint

    days = days_left(certificate)
    left = f"{days:.0f} days left" if days > 0 else "expired"
    if datetime.now(UTC) < certificate.not_valid_before_utc:
        left = "not yet valid"
    print(f"  valid            {date_text(certificate.not_valid_before_utc)} to {_end(certificate)} ({left})")
    print(f"  fingerprint      {fingerprint(certificate)}")
    if not _is_authority(certificate):  # whose one fingerprint is read out by telephone
        _describe_key(certificate.public_key())


def _describe_key(key: object) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    from peer.certificates import key_fingerprint

    if isinstance(key, ec.EllipticCurvePublicKey):
        print(f"  key fingerprint  {key_fingerprint(key)}")


def _inspect_file(path: Path) -> None:
    from launch.authority import load_request
    from peer.credentials import certificates_in, kind_of, load_key, read_file

    content = read_file(path, "a certificate, a request or a private key", "give such a file")
    kind = kind_of(content)
    if kind == "a private key":
        print(f"{path}: private key")
        print(f"  mode             {stat.S_IMODE(path.stat().st_mode):04o}")
        _, key = load_key(path, "'crad-mesh certs request' makes one")
        _describe_key(key.public_key())
    elif kind == "a request":
        asked = load_request(path)
        federation, peer = _identity(path, asked)
        print(f"{path}: request for peer {peer} of federation {federation}")
        _describe_key(asked.public_key())
    elif kind == "a certificate":
        for certificate in certificates_in(path, content, "certificates", "give such a file"):
            print(f"{path}: {_title(certificate)}")
            _describe(certificate)
    else:
        raise CertificateError(f"{path}: holds {kind}; expected a certificate, a request or a private key in PEM")


def _title(certificate: x509.Certificate) -> str:
    from peer.certificates import identity_in, name_text

    if _is_authority(certificate):
        return f"certificate of a CA, {name_text(certificate.subject)}"
    try:
        federation, peer = identity_in(certificate)
        return f"certificate of peer {peer} of federation {federation}"
    except ValueError as error:
        return f"certificate that {error}"


def _is_authority(certificate: x509.Certificate) -> bool:
    from peer.certificates import check_authority

    try:
        check_authority(certificate)
    except ValueError:
        return False
    return True


def _inspect_directory(folder: Path) -> None:
    from launch.authority import CA_KEY_FILE, load_authority
    from peer.credentials import CA_FILE, CERTIFICATE_FILE, KEY_FILE, REQUEST_FILE, expiry_warning, load_credentials

    names = (CA_FILE, CA_KEY_FILE, CERTIFICATE_FILE, KEY_FILE, REQUEST_FILE, NEXT_KEY_FILE, NEXT_REQUEST_FILE)
    for path in (folder / name for name in names):
        if path.exists():
            try:
                _inspect_file(path)
            except CertificateError as error:
                print(error)
    if (folder / CA_KEY_FILE).exists():
        print(f"{folder}: the CA of federation {load_authority(folder).federation}")
        return
    federation, peer = _whose(folder)
    credentials = load_credentials(folder, federation, peer)
    print(f"{folder}: accepted as peer {peer} of federation {federation}")
    if warning := expiry_warning(credentials):
        print(warning)


def _whose(folder: Path) -> tuple[str, int]:
    """Federation and peer that a directory is for, by its certificate or a request that waits."""
    from launch.authority import load_request
    from peer.credentials import CERTIFICATE_FILE, REQUEST_FILE, load_certificate

    certificate, request = folder / CERTIFICATE_FILE, folder / REQUEST_FILE
    if not certificate.exists() and request.exists():
        return _identity(request, load_request(request))
    return _identity(certificate, load_certificate(certificate)[1])
