"""Files that one reader of PEM takes and another does not: they work with all of them, or are refused by name."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from processes import free_port
from wire import ME, PEER, WAITS, Noting, Remote, federation, in_loop

import peer.server
from crad_p2p.durable import write_file
from crad_p2p.errors import CertificateError, PortTakenError
from launch.authority import Authority, key_to_pem, make_request, new_authority, new_key, sign_request, to_pem
from peer.credentials import load_credentials
from peer.link import Link
from peer.server import Server
from peer.strangers import describe_stranger
from peer.tls import Tls

NAME = "link-test"
OURS, OTHER, THIRD = (new_authority(NAME) for _ in range(3))
KEYS = {peer: new_key() for peer in (ME, PEER)}
LEAVES = {peer: sign_request(OURS, make_request(key, NAME, peer), peer) for peer, key in KEYS.items()}

#: Of one PEM block.
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "as it is made": lambda pem: pem,
    "without the last newline": lambda pem: pem.rstrip(),
    "BOM": lambda pem: b"\xef\xbb\xbf" + pem,
    "indented": lambda pem: b"".join(b"    " + line for line in pem.splitlines(keepends=True)),
    "NUL before": lambda pem: b"\0" + pem,
    "NUL behind": lambda pem: pem + b"\0",
    "lines of Windows": lambda pem: pem.replace(b"\n", b"\r\n"),
    "one line": lambda pem: pem.replace(b"\n", b""),
    "words before": lambda pem: b"The CA of the federation:" + pem,
    "words behind": lambda pem: pem.rstrip() + b" that was it",
}
#: Those of which a reader may think that there is no certificate.
REFUSED: dict[str, Callable[[bytes], bytes]] = {
    "NUL within": lambda pem: pem[:100] + b"\0" + pem[100:],
    "UTF-16": lambda pem: pem.decode().encode("utf-16"),
    "a damaged end": lambda pem: pem.replace(b"-----END", b"----END"),
}


def fill(
    folder: Path,
    peer: int,
    form: Callable[[bytes], bytes] = FORMS["as it is made"],
    authorities: tuple[Authority, ...] = (OURS, OTHER),
) -> Path:
    """The files of a peer; each PEM block has that form."""
    folder.mkdir(exist_ok=True)
    write_file(folder / "ca.pem", b"".join(form(to_pem(each.certificate)) for each in authorities))
    write_file(folder / "peer.pem", form(to_pem(LEAVES[peer])))
    write_file(folder / "peer.key", form(key_to_pem(KEYS[peer])), 0o600)
    return folder


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_tls_is_given_is_made_anew(tmp_path: Path, form: Callable[[bytes], bytes]) -> None:
    plain = load_credentials(fill(tmp_path / "tls", PEER), NAME, PEER)
    found = load_credentials(fill(tmp_path / "tls", PEER, form), NAME, PEER)
    assert found == plain  # and so nothing has to be taken up anew
    assert found.ca_pem == to_pem(OURS.certificate) + to_pem(OTHER.certificate)
    assert found.certificate_pem == to_pem(LEAVES[PEER])
    assert found.key_pem == key_to_pem(KEYS[PEER])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_peers_with_such_files_reach_one_another(tmp_path: Path, form: Callable[[bytes], bytes]) -> None:
    """From the start, and when they come while a peer runs."""
    own, theirs = (Tls(fill(tmp_path / f"{peer}", peer, form), NAME, peer) for peer in (ME, PEER))

    async def greet(port: int) -> None:
        link = Link(federation(port), ME, PEER, WAITS, tls=own)
        try:
            await link.hello()
        finally:
            await link.close()

    @in_loop
    async def test() -> None:
        remote = Remote(tmp_path / "remote")
        remote.servicer = Noting(federation(remote.port), PEER, remote.store, remote.status, None, theirs)
        await remote.start()
        try:
            await greet(remote.port)
            assert await describe_stranger(f"127.0.0.1:{remote.port}", PEER, own) is None
            fill(tmp_path / f"{PEER}", PEER, form, (THIRD, OURS))
            assert theirs.reload()
            await greet(remote.port)
        finally:
            await remote.stop()
            remote.close()

    test()


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("ca.pem", "peer.pem", "peer.key") for form in REFUSED][
        # A key is found all the same, and is whole.
        :-1
    ],
)
def test_what_cannot_be_read_whole_is_refused_by_name_and_the_files_before_stay_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, form: str
) -> None:
    tls = Tls(fill(tmp_path / "tls", PEER), NAME, PEER)
    before, path = tls.credentials, tmp_path / "tls" / name
    content = path.read_bytes()
    last = content.rindex(b"-----BEGIN")  # of two CAs one is right
    path.write_bytes(content[:last] + REFUSED[form](content[last:]))
    with caplog.at_level(logging.WARNING):
        assert not tls.reload()
    assert f"those before stay in use: {path}: " in caplog.text
    assert tls.credentials is before
    with pytest.raises(CertificateError) as raised:
        load_credentials(tmp_path / "tls", NAME, PEER)
    assert str(raised.value).startswith(f"{path}: ")


def test_new_files_that_hold_the_same_are_no_news(tmp_path: Path) -> None:
    tls = Tls(fill(tmp_path / "tls", PEER), NAME, PEER)
    fill(tmp_path / "tls", PEER, FORMS["indented"])
    assert not tls.reload()


# --- a server that does not come about --------------------------------------------------------------------------------


class Spoilt(Tls):
    """With what is right for everybody but gRPC."""

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(b"no key", b"no certificate")])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[str, type[Tls]], Server]]:
    remote = Remote(tmp_path / "remote")

    def make(listen: str, kind: type[Tls]) -> Server:
        tls = kind(fill(tmp_path / "tls", PEER), NAME, PEER)
        return Server(listen, Noting(federation(remote.port), PEER, remote.store, remote.status, None, tls))

    yield make
    remote.close()


@in_loop
async def test_what_grpc_refuses_is_not_taken_for_a_port_in_use(
    tmp_path: Path, server: Callable[[str, type[Tls]], Server]
) -> None:
    with pytest.raises(CertificateError, match=f"^{tmp_path / 'tls'}: gRPC does not take what is in ca.pem, peer.pem"):
        server(f"127.0.0.1:{free_port()}", Spoilt)


@in_loop
async def test_a_port_in_use_is_not_taken_for_what_grpc_refuses(server: Callable[[str, type[Tls]], Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for kind in (Tls, Spoilt):
            with pytest.raises(PortTakenError, match="the port is taken by another process"):
                server(f"127.0.0.1:{other.getsockname()[1]}", kind)


@in_loop
async def test_a_port_that_was_in_use_just_now(
    server: Callable[[str, type[Tls]], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.server, "why_not_bound", lambda _: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(PortTakenError, match="the port was taken just now"),
    ):
        server(f"127.0.0.1:{other.getsockname()[1]}", Tls)
