"""The manifest: what another peer may say, and that it travels unchanged."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crad_p2p.manifest import CROSS_ENTROPY_LIMIT, MAX_BYTES, ClassStatistics, Consumed, Manifest, Signature

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200, database=None)

TREE: dict[str, Any] = {
    "run": "0" * 64,
    "peer": 3,
    "round": 12,
    "arch": "cnn6@0.5",
    "size": 4711,
    "sha256": "abcdef0123456789" * 4,
    "statistics": {"counts": [5, 0, 2], "hits": [4, 0, 2], "predicted": [4, 1, 2]},
    "consumed": [{"peer": 1, "round": 11, "sha256": "1" * 64}, {"peer": 2, "round": 9, "sha256": "f" * 64}],
    "model_round": 12,
    "missing": [4],
    "quarantined": [0, 7],
    "signature": {"certificate": "AAAA", "value": "BBBB"},
}


def parse(tree: Any) -> Manifest:
    return Manifest.from_bytes(json.dumps(tree).encode())


def example() -> Manifest:
    return Manifest(
        run="0" * 64,
        peer=3,
        round=12,
        arch="cnn6@0.5",
        size=4711,
        sha256="abcdef0123456789" * 4,
        statistics=ClassStatistics(counts=(5, 0, 2), hits=(4, 0, 2), predicted=(4, 1, 2)),
        consumed=(Consumed(peer=1, round=11, sha256="1" * 64), Consumed(peer=2, round=9, sha256="f" * 64)),
        model_round=12,
        missing=(4,),
        quarantined=(0, 7),
        signature=Signature(certificate="AAAA", value="BBBB"),
    )


def test_round_trip() -> None:
    manifest = example()
    document = manifest.to_bytes()
    assert json.loads(document) == TREE
    assert list(json.loads(document)) == list(TREE)
    assert Manifest.from_bytes(document) == manifest
    assert Manifest.from_bytes(document).to_bytes() == document
    assert parse(TREE).to_bytes() == document  # however it was spaced
    assert parse({**TREE, "consumed": []}).consumed == ()


@given(
    st.lists(st.tuples(st.integers(0, 2**40 - 1), st.floats(0, 1), st.integers(0, 2**40 - 1)), max_size=20),
    st.text(max_size=100),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=5),
)
@PROPERTY
def test_any_manifest_travels_unchanged(
    statistics: list[tuple[int, float, int]], arch: str, consumed: list[tuple[int, int]]
) -> None:
    manifest = Manifest(
        run="a" * 64,
        peer=0,
        round=0,
        arch=arch,
        size=1,
        sha256="b" * 64,
        statistics=ClassStatistics(
            counts=tuple(n for n, _, _ in statistics),
            hits=tuple(int(n * share) for n, share, _ in statistics),
            predicted=tuple(p for _, _, p in statistics),
        ),
        consumed=tuple(Consumed(peer=p, round=r, sha256="c" * 64) for p, r in consumed),
        model_round=0,
        missing=(),
        quarantined=(),
    )
    document = manifest.to_bytes()
    assert Manifest.from_bytes(document) == manifest
    assert Manifest.from_bytes(document).to_bytes() == document


@given(st.lists(st.floats(0, CROSS_ENTROPY_LIMIT), max_size=20))
@PROPERTY
def test_a_cross_entropy_travels_to_the_last_bit(values: list[float]) -> None:
    zeros = (0,) * len(values)
    statistics = ClassStatistics(counts=zeros, hits=zeros, predicted=zeros, cross_entropy=tuple(values))
    manifest = example().model_copy(update={"statistics": statistics})
    document = manifest.to_bytes()
    assert Manifest.from_bytes(document) == manifest
    assert Manifest.from_bytes(document).signed_bytes() == manifest.signed_bytes()
    # On its way from the learner to the service it is JSON of another writer.
    assert json.loads(json.dumps(statistics.model_dump()))["cross_entropy"] == values


def test_without_a_cross_entropy_a_document_is_what_it_always_was() -> None:
    assert b"cross_entropy" not in example().to_bytes() + example().signed_bytes()
    assert "cross_entropy" not in example().statistics.model_dump()
    digest = hashlib.sha256(example().to_bytes()).hexdigest()
    assert digest == "841d049a2d6bffaa12eace30737f36e785d84dd9660b53b3c3aad3ecc07bace8"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "0" * 63),
        ("run", "0" * 65),
        ("run", "A" * 64),
        ("run", "g" * 64),
        ("run", "0" * 64 + "\n"),
        ("run", None),
        ("peer", -1),
        ("peer", "3"),
        ("peer", 3.0),
        ("peer", 3.5),
        ("peer", True),
        ("peer", None),
        ("round", -1),
        ("round", "12"),
        ("round", 12.0),
        ("round", False),
        ("arch", 6),
        ("arch", None),
        ("arch", "x" * 101),
        ("size", 0),
        ("size", -1),
        ("size", "4711"),
        ("size", 4711.0),
        ("size", True),
        ("sha256", "0" * 63),
        ("sha256", "0x" + "0" * 62),
        ("sha256", 0),
        ("statistics", None),
        ("statistics", []),
        ("consumed", None),
        ("consumed", {}),
        ("consumed", [None]),
        ("consumed", [[1, 11, "1" * 64]]),
        ("model_round", -1),
        ("model_round", "12"),
        ("model_round", None),
        ("missing", 4),
        ("missing", [-1]),
        ("missing", ["4"]),
        ("quarantined", None),
        ("quarantined", [1.5]),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^manifest field {field}"):
        parse({**TREE, field: value})


@pytest.mark.parametrize("field", [name for name in TREE if name != "signature"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"^manifest field {field}: Field required"):
        parse({name: value for name, value in TREE.items() if name != field})


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^manifest field mood: Extra inputs are not permitted"):
        parse({**TREE, "mood": ""})
    with pytest.raises(ValueError, match=r"^manifest field statistics\.mood: Extra"):
        parse({**TREE, "statistics": {**TREE["statistics"], "mood": []}})
    with pytest.raises(ValueError, match=r"^manifest field consumed\.1\.age: Extra"):
        parse({**TREE, "consumed": [TREE["consumed"][0], {**TREE["consumed"][1], "age": 2}]})


@pytest.mark.parametrize("field", ["counts", "hits", "predicted"])
@pytest.mark.parametrize("value", [-1, 2**40, 10**30, 1.0, "1", True, None])
def test_counts_are_whole_numbers_in_range(field: str, value: Any) -> None:
    numbers = {name: [*values, 0] for name, values in TREE["statistics"].items()}
    if field == "hits":
        numbers["counts"][-1] = 2**40 - 1  # the hits alone are wrong
    numbers[field][-1] = value
    with pytest.raises(ValueError, match=rf"^manifest field statistics\.{field}\.3"):
        parse({**TREE, "statistics": numbers})


@pytest.mark.parametrize("field", ["counts", "hits", "predicted"])
def test_statistics_of_different_lengths_are_refused(field: str) -> None:
    for numbers in ([0, 0], [0, 0, 0, 0], []):
        with pytest.raises(ValueError, match="must have one number a class each"):
            parse({**TREE, "statistics": {**TREE["statistics"], field: numbers}})
        with pytest.raises(ValidationError):
            ClassStatistics(**{**dict.fromkeys(("counts", "hits", "predicted"), (0, 0, 0)), field: tuple(numbers)})


def test_more_hits_than_samples_are_refused() -> None:
    parse({**TREE, "statistics": {"counts": [2, 1], "hits": [2, 1], "predicted": [9, 9]}})
    with pytest.raises(ValueError, match=r"manifest field statistics: .*hits of a class must not be above its count"):
        parse({**TREE, "statistics": {"counts": [9, 1], "hits": [0, 2], "predicted": [9, 9]}})


def test_consumed_entries_are_strict() -> None:
    entry = TREE["consumed"][0]
    for change in ({"sha256": "1" * 63}, {"peer": "1"}, {"peer": 1.0}, {"round": None}):
        with pytest.raises(ValueError, match=rf"^manifest field consumed\.0\.{next(iter(change))}"):
            parse({**TREE, "consumed": [{**entry, **change}]})
    with pytest.raises(ValueError, match=r"^manifest field consumed\.0\.sha256: Field required"):
        parse({**TREE, "consumed": [{"peer": 1, "round": 11}]})


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"a":' * 30_000,
        json.dumps(TREE).encode() + b"x",
        json.dumps(TREE).encode("utf-16"),
        json.dumps(TREE).replace("4711", "NaN").encode(),
        json.dumps(TREE).replace("4711", "1" * 5000).encode(),
        json.dumps(TREE).replace("cnn6", "\\ud800").encode(),
    ],
)
def test_what_is_no_manifest_is_a_value_error(document: bytes) -> None:
    with pytest.raises(ValueError, match=r"^manifest (field|is not valid JSON)"):
        Manifest.from_bytes(document)


@given(st.data())
@PROPERTY
def test_damaged_manifests_are_value_errors_or_manifests(data: st.DataObject) -> None:
    document = bytearray(example().to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(document) - 1))
        document[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        manifest = Manifest.from_bytes(bytes(document))
    except ValueError:
        return
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_limit_is_on_the_bytes_before_they_are_parsed() -> None:
    fits = json.dumps(TREE).encode().ljust(MAX_BYTES)
    assert Manifest.from_bytes(fits) == example()
    with pytest.raises(ValueError, match=f"manifest of {MAX_BYTES + 1} bytes; at most {MAX_BYTES} are allowed"):
        Manifest.from_bytes(fits + b" ")


def test_a_thousand_classes_and_peers_fit() -> None:
    many = 1000
    manifest = example().model_copy(
        update={
            "statistics": ClassStatistics(**dict.fromkeys(("counts", "hits", "predicted"), (10**9,) * many)),
            "consumed": tuple(Consumed(peer=peer, round=100_000, sha256="f" * 64) for peer in range(many)),
        }
    )
    assert len(manifest.to_bytes()) < MAX_BYTES
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_accuracy_is_the_share_of_all_samples() -> None:
    assert example().statistics.accuracy == pytest.approx(6 / 7)
    assert ClassStatistics(counts=(0, 0), hits=(0, 0), predicted=(3, 4)).accuracy is None
    assert ClassStatistics(counts=(), hits=(), predicted=()).accuracy is None
    assert ClassStatistics(counts=(9, 1), hits=(0, 1), predicted=(0, 0)).accuracy == pytest.approx(0.1)
    assert ClassStatistics(counts=(9,), hits=(0,), predicted=(0,)).accuracy == 0.0


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        example().peer = 4  # type: ignore[misc]


def test_weights_from_the_future_are_refused() -> None:
    assert parse({**TREE, "model_round": 9}).model_round == 9
    with pytest.raises(ValueError, match="model_round 13 is after round 12"):
        parse({**TREE, "model_round": 13})
