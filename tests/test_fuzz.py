"""Whatever another institution sends is taken as what it is, or refused by the documented errors (``fuzzing``).

Right documents, files and messages are changed: bytes, JSON by its structure, and certificates in places that count.
``benchmarks/fuzz.py`` searches the same targets by coverage.
"""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

import fuzzing
import pytest
from fuzzing import (
    DATA,
    TARGETS,
    as_file,
    certificates,
    chunks,
    header_entries,
    manifest_document,
    manifests,
    snapshots,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few = settings(max_examples=150, deadline=2_000, suppress_health_check=list(HealthCheck))

#: In place of any value of a JSON document.
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**40, 2**63, 2**64, 1e999, -0.0, 1.0, float("nan")]),
    st.text(max_size=80),
    st.sampled_from(["ab" * 32, "AB" * 32, "../../lock", "F32", "I64", "\x00", "\ud800", "x" * 13_000]),
    st.lists(st.integers(-3, 70), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of all values."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [found for key in keys for found in ((tree, key), *places(tree[key]))]


@st.composite
def changed_trees(draw: st.DrawFn, right: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(right)
    for _ in range(draw(st.integers(0, 3))):
        if not (found := places(tree)):
            break
        holder, key = draw(st.sampled_from(found))
        match draw(st.sampled_from(("replace", "replace", "delete", "nudge", "copy"))):
            case "replace":
                holder[key] = draw(ODD)
            case "delete":
                del holder[key]
            case "nudge" if isinstance(holder[key], int):
                holder[key] += draw(st.integers(-2, 2))
            case "copy":
                other, from_key = draw(st.sampled_from(places(tree)))
                holder[key] = copy.deepcopy(other[from_key])
            case _:
                pass
    return tree


@st.composite
def changed_bytes(draw: st.DrawFn, right: bytes) -> bytes:
    content = bytearray(right)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(("set", "insert", "cut", "repeat", "end"))):
            case "set" if at < len(content):
                content[at] = draw(st.integers(0, 255))
            case "insert":
                content[at:at] = draw(st.binary(max_size=8))
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "repeat":
                content[at:at] = content[at : at + draw(st.integers(1, 200))]
            case _:
                del content[at:]
    return bytes(content)


def as_json(tree: Any, draw: Any) -> bytes:
    """Sometimes a key twice."""
    text = json.dumps(tree)
    if isinstance(tree, dict) and tree and draw(st.integers(0, 9)) == 0:
        name = draw(st.sampled_from(sorted(tree)))
        text = f"{{{json.dumps(name)}: {json.dumps(tree[name])}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_accepted(name: str) -> None:
    target, seeds = TARGETS[name]
    taken = [target(seed) for seed in seeds()]
    assert all(taken) or name == "chunks"
    assert any(taken)


@pytest.mark.parametrize("name", TARGETS)
@few
@given(data=st.data())
def test_changed_bytes(name: str, data: st.DataObject) -> None:
    target, seeds = TARGETS[name]
    target(data.draw(changed_bytes(data.draw(st.sampled_from(seeds())))))


@few
@given(data=st.data())
def test_changed_manifests(data: st.DataObject) -> None:
    tree = data.draw(changed_trees(manifest_document()))
    manifests(as_json(tree, data.draw))


@few
@given(data=st.data())
def test_changed_headers(data: st.DataObject) -> None:
    """The file is announced as it is, so that nothing but its header can be wrong, or its values."""
    header = as_json(data.draw(changed_trees(header_entries())), data.draw)
    content = as_file(header, data.draw(st.one_of(st.just(DATA), changed_bytes(DATA))))
    if data.draw(st.integers(0, 9)) == 0:
        length = data.draw(st.sampled_from([0, 1, len(header) - 1, len(header) + 1, 2**20 + 1, 2**63, 2**64 - 1]))
        content = struct.pack("<Q", length) + content[8:]
    snapshots(content)


@few
@given(values=st.lists(st.floats(width=32), min_size=10, max_size=10), count=st.integers(-(2**63), 2**63 - 1))
def test_any_values(values: list[float], count: int) -> None:
    data = struct.pack("<10fq", *values, count)
    # By name, the variances are the last four.
    right = all(abs(v) <= 1e6 for v in values) and all(v >= 0 for v in values[6:]) and count >= 0
    assert snapshots(as_file(json.dumps(header_entries()).encode(), data)) == right


@few
@given(st.binary(max_size=40))
def test_any_transfer(content: bytes) -> None:
    chunks(content)


@few
@given(begun=st.integers(0, 255), sizes=st.lists(st.integers(0, 255), min_size=4, max_size=8))
def test_transfers_in_pieces_of_any_size(begun: int, sizes: list[int]) -> None:
    """From wherever it was cut: whole pieces, as long as there is something left."""
    at, pieces = min(16 * begun, len(fuzzing.BIG_FILE)), []
    for size in sizes:
        if at >= len(fuzzing.BIG_FILE):
            break
        pieces.append(bytes((1, size)))
        at += 1_024 + 4 * size
    assert chunks(bytes((begun,)) + b"".join(pieces)) == (at >= len(fuzzing.BIG_FILE))


@few
@given(data=st.data())
def test_certificates_with_a_changed_part_signed_by_the_ca(data: st.DataObject) -> None:
    """Of what is signed; the target signs it anew."""
    der = fuzzing.world().der(1)
    certificates(data.draw(changed_bytes(der)))
    at = data.draw(st.integers(0, len(der) - 1))
    certificates(der[:at] + bytes((der[at] ^ 1 << data.draw(st.integers(0, 7)),)) + der[at + 1 :])
