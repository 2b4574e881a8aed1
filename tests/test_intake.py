"""What another institution sends is checked before use: every refusal, by name."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from crad_p2p.federation import build_federation
from crad_p2p.manifest import MAX_BYTES, Manifest
from crad_p2p.snapshot import MAX_HEADER_BYTES, Layout, SnapshotError, TensorSpec, file_bounds
from launch.authority import throwaway
from peer._proto.crad.v1 import peer_pb2
from peer.credentials import load_authorities, load_credentials
from peer.hello import describe_disagreement, greeting
from peer.intake import Intake, agreed_fields
from peer.signatures import sign_manifest

FEDERATION = build_federation(
    {
        "federation": "intake-test",
        "peers": [
            {"id": 0, "address": "127.0.0.1:7400", "arch": "cnn6"},
            {"id": 1, "address": "127.0.0.1:7401", "arch": "cnn6"},
            {"id": 2, "address": "127.0.0.1:7402", "arch": "resnet18"},
        ],
    },
    "test",
)
LAYOUT: Layout = {
    "count": TensorSpec("I64", ()),
    "first.weight": TensorSpec("F32", (2, 3)),
    "second.weight": TensorSpec("F32", (4,)),
}
LAYOUTS = {"cnn6": LAYOUT, "resnet18": {"other": TensorSpec("F32", (100_000,))}}
CLASSES = 3


def intake() -> Intake:
    return Intake(FEDERATION, LAYOUTS, CLASSES)


# --- greetings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"rounds": ' + b"[" * 100_000,
        b'{"rounds": {}}',
        b'{"rounds": []}',
        b'{"rounds": [[300]]}',
        b'{"rounds": 300, "peers": {"0": 1}}',
        b'{"rounds": 300, "rounds": 300}',
        b'{"rounds": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda document: repr(document[:30]),
)
def test_who_does_not_say_in_plain_values_what_it_runs(document: bytes) -> None:
    assert agreed_fields(document) is None
    said = describe_disagreement(greeting_with(document), FEDERATION, 0)
    assert said == "peer 1 does not say what it runs"


def greeting_with(agreed: bytes) -> peer_pb2.HelloRequest:
    request = greeting(FEDERATION, 1)
    request.agreed = agreed
    return request


def test_who_says_in_plain_values_what_it_runs() -> None:
    agreed = FEDERATION.agreed()
    assert agreed_fields(json.dumps(agreed).encode()) == agreed
    assert describe_disagreement(greeting_with(json.dumps(agreed).encode()), FEDERATION, 0) is None


# --- snapshots --------------------------------------------------------------------------------------------------------

Entries = dict[str, dict[str, Any]]


def entries() -> Entries:
    """The header that the layout must have."""
    result, end = {}, 0
    for name, spec in LAYOUT.items():
        start, end = end, end + spec.nbytes
        result[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    return result


DATA = bytes(range(8 + 24 + 16))


def as_file(header: Entries | bytes, data: bytes = DATA, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def manifest_document(**changes: Any) -> dict[str, Any]:
    """A right manifest of round 4 of peer 1, with changes."""
    return {
        "run": FEDERATION.digest(),
        "peer": 1,
        "round": 4,
        "arch": "cnn6",
        "size": 100,
        "sha256": "ab" * 32,
        "statistics": {"counts": [3, 0, 5], "hits": [1, 0, 5], "predicted": [2, 2, 4]},
        "consumed": [{"peer": 0, "round": 3, "sha256": "cd" * 32}],
        "model_round": 0,
        "missing": [],
        "quarantined": [],
        **changes,
    }


def check(tmp_path: Path, content: bytes, **changes: Any) -> None:
    """Pass a file through the intake, with a manifest that fits it but for the changes."""
    path = tmp_path / "1.partial"
    path.write_bytes(content)
    fields = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), **changes}
    intake().snapshot(path, Manifest.model_validate_json(json.dumps(manifest_document(**fields))))


def refusal(tmp_path: Path, content: bytes, **changes: Any) -> str:
    with pytest.raises(SnapshotError) as raised:
        check(tmp_path, content, **changes)
    return str(raised.value)


def test_a_snapshot_of_its_architecture_is_taken(tmp_path: Path) -> None:
    check(tmp_path, as_file(entries()))


def test_the_order_of_tensors_is_free(tmp_path: Path) -> None:
    shuffled = {
        "second.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "count": {"dtype": "I64", "shape": [], "data_offsets": [40, 48]},
        "first.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]},
    }
    check(tmp_path, as_file(shuffled))


@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_refused(tmp_path: Path, change: int) -> None:
    content = as_file(entries())
    expected = f"file has {len(content)} bytes, the manifest says {len(content) + change}"
    assert refusal(tmp_path, content, size=len(content) + change) == expected


def test_another_digest_is_refused(tmp_path: Path) -> None:
    right = as_file(entries())
    flipped = right[:-1] + bytes([right[-1] ^ 1])
    found, announced = (hashlib.sha256(content).hexdigest() for content in (flipped, right))
    expected = f"sha256 of the file is {found[:12]}…, the manifest says {announced[:12]}…"
    assert refusal(tmp_path, flipped, sha256=announced) == expected


@pytest.mark.parametrize("content", [b"x", b"1234567", struct.pack("<Q", 1)])
def test_a_file_without_room_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    assert refusal(tmp_path, content).startswith(("safetensors header claims", f"a file of {len(content)} bytes"))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, len(as_file(entries())) - 7])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    assert f"header claims {length} bytes; at most" in refusal(tmp_path, as_file(entries(), length=length))


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    padded = json.dumps(entries()).encode().ljust(MAX_HEADER_BYTES + 1)
    assert f"header claims {MAX_HEADER_BYTES + 1} bytes; at most {MAX_HEADER_BYTES}" in refusal(
        tmp_path, as_file(padded)
    )
    check(tmp_path, as_file(padded[:-1]))  # the largest one that is allowed


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"{", "header is not valid"),
        (b"\xff\xfe{}", "header is not valid"),
        (b"[" * 100_000, "header is not valid"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"count": {}, "count": {}}', "a key is given twice"),
    ],
)
def test_a_header_that_is_not_a_json_object_is_refused(tmp_path: Path, header: bytes, expected: str) -> None:
    assert expected in refusal(tmp_path, as_file(header))


def test_a_key_twice_within_a_tensor_is_refused(tmp_path: Path) -> None:
    text = json.dumps(entries()).replace('"dtype": "I64"', '"dtype": "I64", "dtype": "I64"')
    assert "a key is given twice" in refusal(tmp_path, as_file(text.encode()))


@pytest.mark.parametrize("name", ["evil.weight", "__metadata__", "x" * 1000])
def test_a_tensor_too_many_is_refused(tmp_path: Path, name: str) -> None:
    header = entries()
    header[name] = {"dtype": "F32", "shape": [0], "data_offsets": [48, 48]}
    found = refusal(tmp_path, as_file(header))
    shown = name if len(name) <= 80 else f"{name[:80]}…"
    assert found == f"snapshot has an unexpected tensor '{shown}'; its architecture has 3 tensors"


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    header = entries()
    del header["second.weight"]
    assert "snapshot has no tensor 'second.weight'" in refusal(tmp_path, as_file(header, DATA[:32]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"dtype": "F16"}, "F16 [2, 3]"),
        ({"dtype": ["F32"]}, "['F32'] [2, 3]"),
        ({"shape": [3, 2]}, "F32 [3, 2]"),
        ({"shape": [6]}, "F32 [6]"),
        ({"shape": [2, 3, 1]}, "F32 [2, 3, 1]"),
        ({"shape": "2,3"}, "F32 2,3"),
        ({"shape": None}, "F32 None"),
    ],
)
def test_another_dtype_or_shape_is_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    header = entries()
    header["first.weight"] |= change
    assert refusal(tmp_path, as_file(header)) == f"tensor 'first.weight' must be F32 [2, 3], found {found}"


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "F32",
        {"dtype": "F32", "shape": [2, 3]},
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32], "more": 1},
    ],
)
def test_an_entry_with_other_fields_is_refused(tmp_path: Path, entry: Any) -> None:
    header = entries()
    header["first.weight"] = entry
    assert refusal(tmp_path, as_file(header)) == (
        "tensor 'first.weight' must have exactly dtype, shape and data_offsets"
    )


@pytest.mark.parametrize("offsets", [None, 8, [], [8], [8, 32, 32], ["8", "32"], [8.0, 32.0], [False, 32], [None, 32]])
def test_offsets_that_are_not_two_integers_are_refused(tmp_path: Path, offsets: Any) -> None:
    header = entries()
    header["first.weight"]["data_offsets"] = offsets
    assert refusal(tmp_path, as_file(header)) == "data_offsets must be two integers"


@pytest.mark.parametrize(
    "offsets",
    [[7, 31], [9, 33], [8, 31], [8, 33], [0, 24], [-24, 0], [32, 8], [10**30, 10**30 + 24]],
    ids=["overlap", "gap", "short", "long", "on top", "negative", "backwards", "beyond"],
)
def test_offsets_with_a_gap_or_an_overlap_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    header = entries()
    header["first.weight"]["data_offsets"] = offsets
    assert "lies at bytes" in refusal(tmp_path, as_file(header))


def test_tensors_without_a_gap_but_of_other_lengths_are_refused(tmp_path: Path) -> None:
    header = entries()
    header["first.weight"]["data_offsets"] = [8, 33]
    header["second.weight"]["data_offsets"] = [33, 48]
    found = refusal(tmp_path, as_file(header))
    assert found == "tensor 'first.weight' lies at bytes 8 to 33; expected 8 to 32"


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"\0", b""])
def test_too_much_or_too_little_behind_the_header_is_refused(tmp_path: Path, data: bytes) -> None:
    expected = f"the tensors take 48 bytes, the file has {len(data)} behind its header"
    assert refusal(tmp_path, as_file(entries(), data)) == expected


# --- manifests --------------------------------------------------------------------------------------------------------


def manifest_refusal(document: dict[str, Any] | bytes, peer: int = 1, number: int = 4) -> str:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(SnapshotError) as raised:
        intake().manifest(content, peer, number)
    return str(raised.value)


def test_the_manifest_that_was_asked_for_is_taken() -> None:
    document = manifest_document()
    manifest = intake().manifest(json.dumps(document).encode(), 1, 4)
    assert json.loads(manifest.to_bytes()) == {**document, "signature": None}
    assert intake().manifest(manifest.to_bytes(), 1, 4) == manifest


@pytest.mark.parametrize(
    ("changes", "asked", "expected"),
    [
        ({"run": "ef" * 32}, (1, 4), f"manifest says run {'ef' * 32}, expected {FEDERATION.digest()}"),
        ({"peer": 2}, (1, 4), "manifest says peer 2, expected 1"),
        ({}, (0, 4), "manifest says peer 1, expected 0"),
        ({"round": 3}, (1, 4), "manifest says round 3, expected 4"),
        ({}, (1, 5), "manifest says round 4, expected 5"),
        ({"arch": "resnet18"}, (1, 4), "manifest says arch resnet18, expected cnn6"),
        ({"arch": "cnn6@1.0"}, (1, 4), "manifest says arch cnn6@1.0, expected cnn6"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    changes: dict[str, Any], asked: tuple[int, int], expected: str
) -> None:
    assert manifest_refusal(manifest_document(**changes), *asked) == expected


TEACHER = {"peer": 0, "round": 3, "sha256": "cd" * 32}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"consumed": [{**TEACHER, "peer": 77}]}, "manifest names [77] as teachers, expected other peers of the fed"),
        ({"consumed": [{**TEACHER, "peer": 1}]}, "manifest names [1] as teachers, expected other peers of the fed"),
        ({"missing": [9, 8]}, "manifest names [8, 9] as teachers, expected other peers of the federation"),
        ({"quarantined": [1]}, "manifest names [1] as teachers, expected other peers of the federation"),
        ({"consumed": [{**TEACHER, "round": 4}]}, "manifest names teachers of round 4, expected rounds before 4"),
        (
            {"consumed": [{**TEACHER, "round": 9}]},
            "manifest names teachers of round 9, expected rounds",
        ),
        ({"consumed": [TEACHER, {**TEACHER, "sha256": "00" * 32}]}, "manifest names a peer twice as teacher"),
        (
            {"consumed": [{**TEACHER, "round": 2}]},
            "manifest names teachers of round 2, expected none before 3",
        ),
    ],
)
def test_teachers_that_cannot_have_been_are_refused(changes: dict[str, Any], expected: str) -> None:
    """Nobody can fill the memory of what was seen with peers and rounds that do not exist, or name a digest first."""
    assert manifest_refusal(manifest_document(**changes)).startswith(expected)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_statistics_of_another_number_of_classes_are_refused(classes: int) -> None:
    statistics = {"counts": [1] * classes, "hits": [1] * classes, "predicted": [1] * classes}
    found = manifest_refusal(manifest_document(statistics=statistics))
    assert found == f"manifest has statistics of {classes} classes, expected 3"


@pytest.mark.parametrize(
    ("method", "cross_entropy", "expected"),
    [
        ("crad", None, None),
        ("crad", [0.1, 0.0, 1e3], "manifest has the cross-entropy of the classes, which method crad does not publish"),
        ("ce", [0.1, 0.0, 1e3], None),
        ("ce", None, "manifest has no cross-entropy of the classes, which method ce needs"),
        ("ce", [0.1, 0.2], "manifest field statistics: Value error, cross_entropy must have one number a class"),
        (
            "ce",
            [0.1, -0.1, 0.2],
            "manifest field statistics.cross_entropy.1: Input should be greater than or equal to 0",
        ),
        (
            "ce",
            [0.1, 1001, 0.2],
            "manifest field statistics.cross_entropy.1: Input should be less than or equal to 1000",
        ),
        ("ce", [0.1, float("nan"), 0.2], "manifest field statistics.cross_entropy.1: Input should be a finite number"),
        ("ce", [0.1, True, 0.2], "manifest field statistics.cross_entropy.1: Input should be a valid number"),
        ("ce", [0.1, "0", 0.2], "manifest field statistics.cross_entropy.1: Input should be a valid number"),
    ],
)
def test_the_cross_entropy_is_there_where_it_is_agreed_on_and_nowhere_else(
    method: str, cross_entropy: list[Any] | None, expected: str | None
) -> None:
    federation = build_federation({**FEDERATION.as_tree(), "method": {"name": method}}, "test")
    statistics = {**manifest_document()["statistics"], "cross_entropy": cross_entropy}
    document = json.dumps(manifest_document(run=federation.digest(), statistics=statistics)).encode()
    tested = Intake(federation, LAYOUTS, CLASSES)
    if expected is None:
        taken = tested.manifest(document, 1, 4).statistics.cross_entropy
        assert taken == (None if cross_entropy is None else tuple(cross_entropy))
    else:
        with pytest.raises(SnapshotError) as raised:
            tested.manifest(document, 1, 4)
        assert str(raised.value).startswith(expected)


@pytest.mark.parametrize(
    ("epsilon", "known", "expected"),
    [
        (None, (3, 0, 5), None),
        (None, (3, 1, 5), "0 validation samples of class 1, and the common partition gives this peer 1"),
        (0.5, (103, 0, 105), None),
        (0.5, (3, 0, 106), "5 validation samples of class 2, and the common partition gives this peer 106, with noise "
                           "of at most 100"),
    ],
)  # fmt: skip
def test_nobody_gains_weight_with_samples_that_he_does_not_have(
    epsilon: float | None, known: tuple[int, ...], expected: str | None
) -> None:
    """The weight of a teacher grows with its counts; where the data are common, all know them."""
    tree = {**FEDERATION.model_dump(mode="json"), "privacy": {"count_epsilon": epsilon}}
    federation = build_federation(tree, "test")
    tested = Intake(federation, LAYOUTS, CLASSES, samples={1: known})
    document = json.dumps(manifest_document(run=federation.digest())).encode()
    if expected is None:
        tested.manifest(document, 1, 4)
    else:
        with pytest.raises(SnapshotError) as raised:
            tested.manifest(document, 1, 4)
        assert str(raised.value) == f"manifest counts {expected}"


@pytest.mark.parametrize(
    ("signer", "words"),
    [
        (1, None),
        (0, "manifest of peer 1 is signed by peer 0"),
        (None, "manifest of round 4 of peer 1 is not signed"),
    ],
)
def test_with_certificates_a_manifest_is_taken_from_its_owner_alone(
    tmp_path: Path, signer: int | None, words: str | None
) -> None:
    throwaway(tmp_path, FEDERATION.federation, [0, 1])
    tested = Intake(FEDERATION, LAYOUTS, CLASSES, lambda: load_authorities(tmp_path / "ca.pem"))
    manifest = Manifest.from_bytes(json.dumps(manifest_document()).encode())
    if signer is not None:
        manifest = sign_manifest(manifest, load_credentials(tmp_path / f"{signer}", FEDERATION.federation, signer))
    if words is None:
        assert tested.manifest(manifest.to_bytes(), 1, 4) == manifest
    else:
        with pytest.raises(SnapshotError, match=f"^{words}$"):
            tested.manifest(manifest.to_bytes(), 1, 4)


def test_a_file_larger_than_the_architecture_is_refused_before_a_byte_is_fetched() -> None:
    largest = file_bounds(LAYOUT)[1]
    assert largest == 8 + MAX_HEADER_BYTES + 48
    intake().manifest(json.dumps(manifest_document(size=largest)).encode(), 1, 4)
    found = manifest_refusal(manifest_document(size=largest + 1))
    assert found == f"manifest announces {largest + 1} bytes; cnn6 has from 58 to {largest}"
    assert manifest_refusal(manifest_document(size=57)) == f"manifest announces 57 bytes; cnn6 has from 58 to {largest}"


def test_the_size_is_bounded_by_the_announced_architecture() -> None:
    document = manifest_document(peer=2, arch="resnet18", size=file_bounds(LAYOUT)[1] + 1)
    assert intake().manifest(json.dumps(document).encode(), 2, 4).size == file_bounds(LAYOUT)[1] + 1


def with_statistics(**changes: Any) -> dict[str, Any]:
    return {"statistics": {**manifest_document()["statistics"], **changes}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"run": "ef"}, "run"),
        ({"run": "EF" * 32}, "run"),
        ({"peer": -1}, "peer"),
        ({"peer": "1"}, "peer"),
        ({"peer": 1.0}, "peer"),
        ({"peer": True}, "peer"),
        ({"round": -1}, "round"),
        ({"arch": "x" * 101}, "arch"),
        ({"arch": None}, "arch"),
        ({"size": 0}, "size"),
        ({"size": 1e3}, "size"),
        ({"sha256": "ab" * 32 + "\n"}, "sha256"),
        ({"sha256": "../../etc/passwd"}, "sha256"),
        ({"more": 1}, "more"),
        ({"consumed": [{"peer": 0, "round": 3, "sha256": "x"}]}, "consumed.0.sha256"),
        ({"consumed": [{"peer": 0, "round": 3}]}, "consumed.0.sha256"),
        ({"consumed": None}, "consumed"),
        (with_statistics(counts=[3, 0, -5]), "statistics.counts.2"),
        (with_statistics(counts=[3, 0, 2**40]), "statistics.counts.2"),
        (with_statistics(counts=[3, 0, 5.0]), "statistics.counts.2"),
        (with_statistics(predicted=[2, 2, "4"]), "statistics.predicted.2"),
        (with_statistics(hits=[4, 0, 5]), "statistics: Value error, hits of a class must not be above its count"),
        (with_statistics(predicted=[2, 2]), "statistics: Value error, counts, hits and predicted must have one number"),
        (with_statistics(noise=1), "statistics.noise"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    assert manifest_refusal(manifest_document(**changes)).startswith(f"manifest field {field}")


@pytest.mark.parametrize("name", list(manifest_document()))
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    document = manifest_document()
    del document[name]
    assert manifest_refusal(document) == f"manifest field {name}: Field required"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    document = json.dumps(manifest_document()).replace('"size": 100', f'"size": {number}')
    assert "manifest" in manifest_refusal(document.encode())


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'"text"'])
def test_what_is_not_a_json_object_is_refused(document: bytes) -> None:
    assert manifest_refusal(document).startswith("manifest")


def test_a_huge_document_is_refused_unparsed() -> None:
    right = json.dumps(manifest_document()).encode()
    assert intake().manifest(right.ljust(MAX_BYTES), 1, 4).round == 4
    found = manifest_refusal(right.ljust(MAX_BYTES + 1))
    assert found == f"manifest of {MAX_BYTES + 1} bytes; at most {MAX_BYTES} are allowed"
