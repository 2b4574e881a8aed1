"""What must hold for any bytes from another institution: for hypothesis (``test_fuzz``) and ``benchmarks/fuzz``.

Each target takes bytes, and says whether they were accepted. It raises an AssertionError if something was accepted that
is not what it should be; any other exception is a finding, too, since the documented ones are caught here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from crad_p2p.durable import write_file
from crad_p2p.federation import build_federation
from crad_p2p.manifest import Manifest
from crad_p2p.snapshot import DamagedFileError, Layout, SnapshotError, TensorSpec, check_file
from launch.authority import Authority, _issue, key_to_pem, new_authority, new_key, to_pem
from peer._proto.crad.v1 import peer_pb2
from peer.certificates import MAX_DER, certificate_from_der, check_issued, identity_in, identity_uri
from peer.channels import Waits
from peer.credentials import Credentials, load_credentials
from peer.hello import describe_data_difference, describe_disagreement
from peer.intake import (
    _BOUNDS,
    LARGEST_CHUNK_BYTES,
    MAX_ANSWER_BYTES,
    NONCE_BYTES,
    SMALLEST_CHUNK_BYTES,
    Intake,
    MessageError,
    document_digest,
    parse,
)
from peer.link import Link, _CallError
from peer.signatures import check_greeting, sign_greeting, sign_manifest

FEDERATION = build_federation(
    {
        "federation": "fuzz",
        "peers": [{"id": i, "address": f"127.0.0.1:{7400 + i}", "arch": "cnn6"} for i in range(3)],
    },
    "test",
)
ME, PEER, ROUND = 0, 1, 4
LAYOUT: Layout = {
    "first.weight": TensorSpec("F32", (2, 3)),
    "norm.running_var": TensorSpec("F32", (4,)),
    "norm.num_batches_tracked": TensorSpec("I64", ()),
}
KINDS = sorted(_BOUNDS, key=lambda kind: kind.__name__)


class _World:
    """Keys, certificates and what is right, made once."""

    def __init__(self) -> None:
        self.authority: Authority = new_authority(FEDERATION.federation)
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.credentials = [self._credentials(i) for i in range(3)]
        self.authorities = self.credentials[0].authorities
        self.intake = Intake(FEDERATION, {"cnn6": LAYOUT}, 3, lambda: self.authorities)
        self.known = {each.certificate.tbs_certificate_bytes for each in self.credentials}

    def _credentials(self, peer: int) -> Credentials:
        key, folder = new_key(), self.folder / str(peer)
        leaf = _issue(self.authority, key.public_key(), peer, 30, datetime.now(UTC))
        folder.mkdir()
        write_file(folder / "ca.pem", to_pem(self.authority.certificate))
        write_file(folder / "peer.pem", to_pem(leaf))
        write_file(folder / "peer.key", key_to_pem(key), 0o600)
        return load_credentials(folder, FEDERATION.federation, peer)

    def der(self, peer: int) -> bytes:
        return self.credentials[peer].certificate.public_bytes(Encoding.DER)


@cache
def world() -> _World:
    made = _World()
    import atexit

    atexit.register(shutil.rmtree, made.folder, ignore_errors=True)
    return made


# --- what is right ----------------------------------------------------------------------------------------------------


def header_entries() -> dict[str, Any]:
    result, end = {}, 0
    for name, spec in LAYOUT.items():
        start, end = end, end + spec.nbytes
        result[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    return result


DATA = struct.pack("<10f", *(0.25 * i for i in range(10))) + struct.pack("<q", 7)


def as_file(header: bytes, data: bytes = DATA) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def right_file() -> bytes:
    return as_file(json.dumps(header_entries()).encode())


def manifest_document(**changes: Any) -> dict[str, Any]:
    return {
        "run": FEDERATION.digest(),
        "peer": PEER,
        "round": ROUND,
        "arch": "cnn6",
        "size": 300,
        "sha256": "ab" * 32,
        "statistics": {"counts": [3, 0, 5], "hits": [1, 0, 5], "predicted": [2, 2, 4]},
        "consumed": [{"peer": 0, "round": 3, "sha256": "cd" * 32}],
        "model_round": ROUND,
        "missing": [2],
        "quarantined": [],
        **changes,
    }


@cache  # a signature is another one each time
def right_manifest() -> bytes:
    manifest = Manifest.model_validate_json(json.dumps(manifest_document()))
    return sign_manifest(manifest, world().credentials[PEER]).to_bytes()


@cache
def right_messages() -> list[bytes]:
    """One of each kind, with the byte before it that says which."""
    agreed = json.dumps(FEDERATION.agreed()).encode()
    data = peer_pb2.Data(class_names=["a", "b"], image_shape=[1, 8, 8], partition_digest="ab" * 32)
    document = right_manifest()
    own = world().credentials[PEER]
    nonce = bytes(NONCE_BYTES)
    messages = (
        peer_pb2.HelloRequest(peer=1, software="0.1.0", agreed=agreed, protocol=1, nonce=nonce),
        peer_pb2.WatchRequest(progress=True),
        peer_pb2.GetManifestRequest(peer=1, round=4),
        peer_pb2.GetSnapshotRequest(peer=1, round=4, sha256="ab" * 32, offset=7, recheck=True),
        peer_pb2.RefuseRequest(round=4, sha256="ab" * 32, reason="why"),
        peer_pb2.HelloReply(
            peer=1,
            software="0.1.0",
            agreed=agreed,
            protocol=1,
            seen_round=3,
            seen_sha256="ab" * 32,
            certificate=world().der(PEER),
            proof=sign_greeting(own, ME, nonce),
            unix_time=1e9,
        ),
        peer_pb2.PeerState(
            round=4,
            collected=3,
            data=data,
            manifest=document,
            manifest_sha256=document_digest(document),
            busy_seconds=1.5,
            phase="train",
        ),
        peer_pb2.GetManifestReply(document=document, manifest_sha256=document_digest(document)),
        peer_pb2.Chunk(offset=0, data=b"x" * 2000),
        peer_pb2.RefuseReply(),
    )
    return [bytes((KINDS.index(type(each)),)) + each.SerializeToString() for each in messages]


# --- targets ----------------------------------------------------------------------------------------------------------


def manifests(content: bytes) -> bool:
    """``Manifest.from_bytes`` and the intake, as it is and signed by its peer, so that the signature hides nothing."""
    try:
        manifest = Manifest.from_bytes(content)
    except ValueError:
        _manifest_taken(content)
        return False
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    taken = _manifest_taken(content)
    if not taken and manifest.peer == PEER:
        taken = _manifest_taken(sign_manifest(manifest, world().credentials[PEER]).to_bytes())
    return taken


def _manifest_taken(content: bytes) -> bool:
    try:
        taken = world().intake.manifest(content, PEER, ROUND, sha256=document_digest(content))
    except SnapshotError:
        return False
    assert taken == Manifest.from_bytes(content)
    assert (taken.run, taken.peer, taken.round, taken.arch) == (FEDERATION.digest(), PEER, ROUND, "cnn6")
    assert len(taken.statistics.counts) == len(taken.statistics.hits) == len(taken.statistics.predicted) == 3
    assert all(0 <= h <= n for h, n in zip(taken.statistics.hits, taken.statistics.counts, strict=True))
    assert {each.peer for each in taken.consumed} | {*taken.missing, *taken.quarantined} <= {0, 2}
    assert taken.signature is not None
    return True


def messages(content: bytes) -> bool:
    """The first byte says which kind, the rest is parsed; what is done with a right one first is done, too."""
    kind = KINDS[content[0] % len(KINDS)] if content else KINDS[0]
    try:
        found = parse(kind, content[1:])
    except MessageError:
        return False
    again = found.SerializeToString()
    assert parse(kind, again).SerializeToString() == again
    for name, test in _BOUNDS[kind].items():
        assert test(getattr(found, name)), name
    if isinstance(found, peer_pb2.HelloRequest | peer_pb2.HelloReply):
        difference = describe_disagreement(found, FEDERATION, ME)
        assert difference is None or len(difference) < 3_000
    if isinstance(found, peer_pb2.HelloReply):
        _greeting(found)
    if isinstance(found, peer_pb2.PeerState) and found.HasField("data"):
        own = peer_pb2.Data(class_names=["a", "b"], image_shape=[1, 8, 8], partition_digest="ab" * 32)
        difference = describe_data_difference(found.data, own, PEER, ME)
        assert difference is None or len(difference) < 3_000
    return True


def _greeting(reply: peer_pb2.HelloReply) -> None:
    try:
        check_greeting(
            reply.certificate,
            reply.proof,
            federation=FEDERATION.federation,
            authorities=world().authorities,
            caller=ME,
            called=PEER,
            nonce=bytes(NONCE_BYTES),
        )
    except ValueError:
        return
    assert certificate_from_der(reply.certificate).tbs_certificate_bytes == _tbs(PEER)


def _tbs(peer: int) -> bytes:
    return world().credentials[peer].certificate.tbs_certificate_bytes


def snapshots(content: bytes) -> bool:
    """A file as announced: the header, then the values."""
    from crad_p2p.weights import check_values, decode

    path = world().folder / "snapshot"
    path.write_bytes(content)
    try:
        check_file(path, LAYOUT, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        # Whatever passes has exactly the tensors of the layout: then it must be a safetensors file, too.
        tensors = decode(content)
    except SnapshotError:
        return False
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()} == {
        name: ({"F32": "torch.float32", "I64": "torch.int64"}[spec.dtype], spec.shape) for name, spec in LAYOUT.items()
    }
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == len(DATA)
    try:
        check_values(tensors)
    except SnapshotError:
        return False
    for name, tensor in tensors.items():
        assert bool(tensor.isfinite().all()), name
    assert bool((tensors["norm.running_var"] >= 0).all())
    return True


def certificates(content: bytes) -> bool:
    """DER as it is, and signed by the CA once more, so that its signature hides nothing."""
    taken = _certificate_taken(content, resigned=False)
    try:
        tbs = certificate_from_der(content).tbs_certificate_bytes
    except ValueError:
        return taken
    return _certificate_taken(_signed(tbs), resigned=True) or taken


_ALGORITHM = bytes.fromhex("300a06082a8648ce3d040302")  # ecdsa-with-SHA256


def _signed(tbs: bytes) -> bytes:
    signature = world().authority.key.sign(tbs, ec.ECDSA(hashes.SHA256()))
    return _der(0x30, tbs + _ALGORITHM + _der(0x03, b"\0" + signature))


def _der(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 128:
        return bytes((tag, length)) + content
    size = (length.bit_length() + 7) // 8
    return bytes((tag, 0x80 | size)) + length.to_bytes(size, "big") + content


def _certificate_taken(content: bytes, *, resigned: bool) -> bool:
    try:
        certificate = certificate_from_der(content)
        check_issued(certificate, world().authorities, datetime.now(UTC))
        check_issued(certificate, world().authorities, None)
        federation, peer = identity_in(certificate)
    except ValueError:
        return False
    assert len(content) <= MAX_DER
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == [identity_uri(federation, peer)]
    if not resigned:
        assert certificate.tbs_certificate_bytes in world().known
    return True


class _Call:
    """A stream of answers that are there already."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = iter(answers)
        self.left = len(answers)

    async def read(self) -> Any:
        self.left -= 1
        return next(self._answers, grpc.aio.EOF)

    def cancel(self) -> None:
        pass


class _Stub:
    def __init__(self, answers: list[bytes]) -> None:
        self.call = _Call(answers)

    def GetSnapshot(self, _: Any) -> _Call:
        return self.call


#: A file of three chunks of the smallest size and a rest.
_BIG: Layout = {"weights": TensorSpec("F32", (800,))}
_BIG_HEADER = b'{"weights":{"dtype":"F32","shape":[800],"data_offsets":[0,3200]}}'
BIG_FILE = as_file(_BIG_HEADER, bytes(range(100)) * 32)


def chunks(content: bytes) -> bool:
    """A transfer: each pair of bytes is a chunk, an answer that is none, or one that is cut or changed.

    Begins where a cut transfer has left off, as the first byte says.
    """
    return _run(_transfer(content))


def program(content: bytes) -> tuple[bytes, list[bytes]]:
    """What is on disk already, and the answers."""
    at = min(content[0] * 16 if content else 0, len(BIG_FILE))
    begun, answers = BIG_FILE[:at], []
    for what, how in zip(content[1::2], content[2::2], strict=False):
        length = SMALLEST_CHUNK_BYTES + 4 * how if what & 1 else 8 * how
        offset, data = at, BIG_FILE[at : at + length]
        match what >> 1 & 7:
            case 1:
                offset += how - 128
            case 2:
                data = data[::-1]
            case 3:
                data = data + bytes(how)
            case 4:
                data = bytes(LARGEST_CHUNK_BYTES + how - 128)
            case 5:
                offset = 2**63 + how
            case _:
                pass
        raw = peer_pb2.Chunk(offset=max(0, offset), data=data).SerializeToString()
        match what >> 4 & 15:
            case 1:
                raw = raw[: how % (len(raw) + 1)]
            case 2 if raw:
                raw = raw[: how % len(raw)] + bytes((what,)) + raw[how % len(raw) + 1 :]
            case 3:
                raw = bytes(MAX_ANSWER_BYTES + 1)
            case _:
                at += len(data)
        answers.append(raw)
    return begun, answers


async def _transfer(content: bytes) -> bool:
    partial = world().folder / "transfer.partial"
    partial.with_suffix(".refused").unlink(missing_ok=True)
    begun, answers = program(content)
    partial.write_bytes(begun)
    document = manifest_document(size=len(BIG_FILE), sha256=hashlib.sha256(BIG_FILE).hexdigest())
    manifest = Manifest.model_validate_json(json.dumps(document))
    intake = Intake(FEDERATION, {"cnn6": _BIG}, 3, None)
    stub, link = _Stub(answers), _link()
    received = link.bytes_received
    try:
        await link._download(stub, manifest, partial, intake, recheck=bool(content[:1]) and content[0] & 1 == 1)  # type: ignore[arg-type]
        await link._check(intake, partial, manifest)
    except (DamagedFileError, SnapshotError, _CallError):
        partial = partial if partial.exists() else partial.with_suffix(".refused")
        assert partial.stat().st_size <= len(BIG_FILE)
        return False
    finally:
        assert link.bytes_received - received <= len(BIG_FILE)
    assert partial.read_bytes() == BIG_FILE
    return True


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


@cache
def _link() -> Link:
    return Link(FEDERATION, ME, PEER, Waits())


def _run(work: Awaitable[bool]) -> bool:
    return _loop().run_until_complete(work)


def _seeds_of_chunks() -> list[bytes]:
    whole = bytes((0,)) + bytes((1, 0)) * 3 + bytes((0, 60))
    return [whole, bytes((64,)) + bytes((1, 0)) * 2 + bytes((0, 60)), bytes((0, 1, 255, 1, 255)), b"\0" + b"\x01\0" * 9]


#: By name: what takes the bytes, and some that are right.
TARGETS: dict[str, tuple[Callable[[bytes], bool], Callable[[], list[bytes]]]] = {
    "manifest": (manifests, lambda: [right_manifest(), json.dumps(manifest_document()).encode()]),
    "messages": (messages, right_messages),
    "chunks": (chunks, _seeds_of_chunks),
    "safetensors": (snapshots, lambda: [right_file()]),
    "certificate": (certificates, lambda: [world().der(i) for i in range(3)]),
}
