"""What others write can neither forge a line of the log nor steer a terminal: it is escaped wherever it is quoted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from forging import NOW, forge, genuine_authority, uri
from test_intake import CLASSES, DATA, FEDERATION, LAYOUTS, as_file, entries, intake, manifest_document
from wire import federation

from crad_p2p.foreign import printable
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import SnapshotError, check_header
from crad_p2p.weights import decode
from peer._proto.crad.v1 import peer_pb2
from peer.certificates import certificate_from_der, check_issued, identity_of, name_text
from peer.hello import describe_data_difference, describe_disagreement, greeting
from peer.intake import Intake, MessageError, parse
from peer.log import TextFormatter
from peer.refusals import Refusals
from peer.signatures import check_signature
from peer.words import address_in, in_short

#: A line like this program's, colours, a cursor that goes up, text that runs to the left, a bell, NUL, and a lone half.
HOSTILE = "x\n2026-11-30 10:00:00Z peer 0 ERROR forged\r\x1b[31m\x1b[1A\x9b2J\u202e\u2028\x07\0\ud800"
#: The same as it can travel in UTF-8.
SENT = HOSTILE[:-1]


def places(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every value in a JSON document."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def changed(tree: Any, path: tuple[str | int, ...], *, as_key: bool) -> Any:
    """A copy with the hostile text as the value there, or as another key beside it."""
    copy = json.loads(json.dumps(tree))
    if not path:
        return {HOSTILE: copy} if as_key else HOSTILE
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if as_key and isinstance(inner, dict):
        inner[HOSTILE] = inner[path[-1]]
    else:
        inner[path[-1]] = HOSTILE
    return copy


def variants(tree: Any) -> Iterator[bytes]:
    """The document with the hostile text in each place, escaped as JSON allows and as it is."""
    for path in places(tree):
        for as_key in (False, True):
            text = json.dumps(changed(tree, path, as_key=as_key))
            yield text.encode()
            yield text.replace(json.dumps(HOSTILE), json.dumps(SENT, ensure_ascii=False)).encode()
    yield SENT.encode()
    yield b'{"' + SENT.encode() + b'"'
    yield json.dumps(tree).encode() + SENT.encode()


def check_line(text: str, *, most: int = 600) -> None:
    assert text.isprintable(), repr(text)
    assert len(text) <= most


def refusals_of(documents: Iterator[bytes], tested: Intake, errors: type[Exception] = SnapshotError) -> int:
    count = 0
    for document in documents:
        try:
            tested.manifest(document, 1, 4)
        except errors as error:
            check_line(str(error))
            count += 1
    return count


def test_manifests() -> None:
    signed = manifest_document(signature={"certificate": "AAAA", "value": "AAAA"})
    checks_signatures = Intake(FEDERATION, LAYOUTS, CLASSES, lambda: ())
    assert refusals_of(variants(signed), checks_signatures) == sum(1 for _ in variants(signed))
    assert refusals_of(variants(manifest_document()), intake()) > 100


def test_an_architecture_of_many_lines() -> None:
    with pytest.raises(SnapshotError) as raised:
        intake().manifest(json.dumps(manifest_document(arch=SENT)).encode(), 1, 4)
    check_line(str(raised.value))
    assert "manifest says arch x\\n2026-11-30 10:00:00Z peer 0 ERROR forged" in str(raised.value)


def test_signatures() -> None:
    for certificate in (HOSTILE, SENT, "AAAA"):
        document = manifest_document(signature={"certificate": certificate, "value": SENT})
        try:
            manifest = Manifest.from_bytes(json.dumps(document).encode())
            check_signature(manifest, "colon", [genuine_authority().certificate])
        except ValueError as error:
            check_line(str(error))
        else:
            pytest.fail("it is no signature")


@pytest.mark.parametrize("reader", ["service", "learner"])
def test_snapshots(reader: str) -> None:
    found = 0
    for header in variants(entries()):
        try:
            if reader == "service":
                check_header(header, LAYOUTS["cnn6"], data_bytes=len(DATA))
            else:
                decode(as_file(header))
        except SnapshotError as error:
            check_line(str(error))
            found += 1
    assert found > 10


def test_greetings() -> None:
    ours = federation(1)
    agreed = ours.agreed()
    requests = [peer_pb2.HelloRequest(peer=1, protocol=1, software=SENT)]
    requests += [greeting(ours, 1) for _ in variants(agreed)]
    for request, document in zip(requests[1:], variants(agreed), strict=True):
        request.agreed = document
    said = [describe_disagreement(request, ours, 0) for request in requests]
    assert all(said)
    for text in filter(None, said):
        check_line(text)


def test_data() -> None:
    other, own = (peer_pb2.Data(class_names=["a", name]) for name in (SENT, "b"))
    said = describe_data_difference(other, own, 1, 0)
    assert said
    check_line(said)


@pytest.mark.parametrize(
    "message",
    [
        peer_pb2.GetSnapshotRequest(sha256=SENT),
        peer_pb2.RefuseRequest(sha256=SENT),
        peer_pb2.HelloRequest(software=SENT * 10),
        peer_pb2.PeerState(phase=SENT),
        peer_pb2.PeerState(phase="wait", manifest_sha256=SENT),
        peer_pb2.PeerState(phase="wait", data=peer_pb2.Data(class_names=[SENT * 100])),
        peer_pb2.PeerState(phase="wait", data=peer_pb2.Data(partition_digest=SENT)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages(message: Any) -> None:
    with pytest.raises(MessageError) as raised:
        parse(type(message), message.SerializeToString())
    check_line(str(raised.value))


def fault(check: Callable[..., object], *arguments: Any) -> str:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    pytest.fail("it is no fault")


@pytest.mark.parametrize("text", ["spiffe://co\nlon/peer/1", "\x1b[2J", "spiffe://colon/peer/1"])
def test_certificates(text: str) -> None:
    ca = genuine_authority()
    certificate = forge(ca, names=[uri(text), x509.DNSName("peer-1\x1b[2J\n")])
    check_line(fault(identity_of, certificate, "colon"))
    check_line(fault(check_issued, certificate, [genuine_authority().certificate], NOW))
    check_line(fault(certificate_from_der, SENT.encode()))
    check_line(name_text(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, SENT)])))


def test_words_of_grpc() -> None:
    for details in (SENT, f"failed to connect; last error: UNKNOWN: {SENT}"):
        check_line(in_short(details))
    check_line(address_in(f"ipv4:{SENT}"))
    check_line(address_in(f"ipv6:%5B{'%0A%1B'}%5D:1"))


def test_refused_calls(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    refusals = Refusals(tmp_path / "refused.txt")
    refusals.add("peer 1", "malformed Hello", SENT)
    refusals.add_stranger("an unknown caller", address_in(f"ipv4:{SENT}"), "certificate", SENT, "see who that is")
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        check_line(line)
    refusals.save()
    assert len((tmp_path / "refused.txt").read_text().splitlines()) == 2


def test_a_line_of_the_log_is_one_line_whoever_wrote_what_is_in_it() -> None:
    record = logging.LogRecord("grpc", logging.ERROR, __file__, 1, "a library says: %s", (HOSTILE,), None)
    line = TextFormatter(3).format(record)
    check_line(line)
    assert " peer 3 ERROR   a library says: x\\n2026-11-30" in line
    assert line.endswith(printable(HOSTILE, len(HOSTILE)))
