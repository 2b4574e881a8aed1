"""Snapshot files: equal tensors give equal bytes, and no damage gets through."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from crad_p2p import weights
from crad_p2p.architectures import build_model, initialise, layout_of
from crad_p2p.frozen import frozen
from crad_p2p.snapshot import (
    MAX_HEADER_BYTES,
    DamagedFileError,
    Layout,
    SnapshotError,
    TensorSpec,
    check_file,
    check_header,
    file_bounds,
    layout_from_json,
    layout_to_json,
    sha256_file,
)
from crad_p2p.weights import MAX_MAGNITUDE, as_function, check_values, decode, encode, probe

PROPERTY = settings(deadline=None, derandomize=True, max_examples=250, database=None)
CPU = torch.device("cpu")


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "conv.weight": torch.randn(3, 2, generator=draw),
        "bn.running_var": torch.rand(5, generator=draw),
        "bn.num_batches_tracked": torch.tensor(12),
        "fc.bias": torch.randn(1, generator=draw),
    }


LAYOUT: Layout = {
    "conv.weight": TensorSpec("F32", (3, 2)),
    "bn.running_var": TensorSpec("F32", (5,)),
    "bn.num_batches_tracked": TensorSpec("I64", ()),
    "fc.bias": TensorSpec("F32", (1,)),
}
DATA_BYTES = 24 + 20 + 8 + 4
GOOD = encode(tensors())


def header_of(snapshot: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", snapshot[:8])
    tree: dict[str, Any] = json.loads(snapshot[8 : 8 + length])
    return tree


def digest(snapshot: bytes) -> str:
    return hashlib.sha256(snapshot).hexdigest()


def check(folder: Path, snapshot: bytes, layout: Layout = LAYOUT, **manifest: Any) -> None:
    path = folder / "snapshot.safetensors"
    path.write_bytes(snapshot)
    check_file(path, layout, **{"size": len(snapshot), "sha256": digest(snapshot), **manifest})


def assemble(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


# ------------------------------------------------------------------------------------------------------- bytes and back


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        assert value.shape == two[name].shape
        assert value.numpy().tobytes() == two[name].numpy().tobytes()


def test_round_trip(tmp_path: Path) -> None:
    assert_equal(decode(GOOD), tensors())
    assert encode(decode(GOOD)) == GOOD
    check(tmp_path, GOOD)
    odd = {"x": torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])}
    assert_equal(decode(encode(odd)), odd)
    assert decode(encode({})) == {}


def test_equal_tensors_give_equal_bytes() -> None:
    shuffled = dict(reversed(list(tensors().items())))
    assert encode(shuffled) == GOOD
    strided = tensors()
    strided["conv.weight"] = strided["conv.weight"].t().contiguous().t()
    assert not strided["conv.weight"].is_contiguous()
    assert encode(strided) == GOOD
    assert (
        encode({name: value.clone().requires_grad_(value.dtype.is_floating_point) for name, value in tensors().items()})
        == GOOD
    )
    changed = tensors()
    changed["fc.bias"] += 1e-6
    assert encode(changed) != GOOD


@pytest.mark.parametrize("arch", ["resnet18@0.05", "resnet18-half@0.1", "cnn6@0.1"])
def test_a_models_snapshot_passes_its_layout_and_no_other(tmp_path: Path, arch: str) -> None:
    model = build_model(arch, classes=4, channels=1)
    initialise(model, 1)
    snapshot = encode(model.state_dict())
    layout = layout_of(arch, classes=4, channels=1)
    check(tmp_path, snapshot, layout)
    assert len(snapshot) < file_bounds(layout)[1]
    check_values(decode(snapshot))
    for other in (layout_of(arch, classes=5, channels=1), layout_of(arch, classes=4, channels=3)):
        with pytest.raises(SnapshotError, match="must be F32"):
            check(tmp_path, snapshot, other)


def test_layouts_travel_as_json() -> None:
    travelled = layout_from_json(json.loads(json.dumps(layout_to_json(LAYOUT))))
    assert travelled == LAYOUT
    assert [spec.nbytes for spec in travelled.values()] == [24, 20, 8, 4]
    assert file_bounds(LAYOUT)[1] == 8 + MAX_HEADER_BYTES + DATA_BYTES


def test_digest_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(GOOD)
    assert sha256_file(path) == digest(GOOD)


def test_what_is_not_safetensors() -> None:
    for bad in (b"", b"\0" * 7, GOOD[:-1], GOOD + b"\0", b"PK\x03\x04" * 10):
        with pytest.raises(SnapshotError, match="not a safetensors file"):
            decode(bad)


# -------------------------------------------------------------------------------------------------- the file as a whole


@pytest.mark.parametrize("missing", [1, DATA_BYTES, len(GOOD) - 8, len(GOOD) - 3, len(GOOD)])
def test_a_cut_file(tmp_path: Path, missing: int) -> None:
    cut = GOOD[: len(GOOD) - missing]
    with pytest.raises(SnapshotError, match=f"file has {len(cut)} bytes, the manifest says {len(GOOD)}"):
        check(tmp_path, cut, size=len(GOOD), sha256=digest(GOOD))
    with pytest.raises(SnapshotError):  # also where the manifest announces it so
        check(tmp_path, cut)


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    longer = GOOD + b"\0"
    with pytest.raises(SnapshotError, match=f"file has {len(longer)} bytes, the manifest says {len(GOOD)}"):
        check(tmp_path, longer, size=len(GOOD), sha256=digest(GOOD))
    with pytest.raises(SnapshotError, match=f"take {DATA_BYTES} bytes, the file has {DATA_BYTES + 1} behind"):
        check(tmp_path, longer)


def test_another_digest(tmp_path: Path) -> None:
    changed = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
    with pytest.raises(
        SnapshotError, match=f"sha256 .* {digest(changed)[:12]}…, the manifest says {digest(GOOD)[:12]}…"
    ):
        check(tmp_path, changed, sha256=digest(GOOD))


def test_size_digest_and_header_are_checked_in_this_order(tmp_path: Path) -> None:
    """What a transfer can have damaged comes first, as an error of its own kind: it may be fetched again."""
    bad = assemble(b"[]", b"")
    with pytest.raises(DamagedFileError, match="file has"):
        check(tmp_path, bad, size=1, sha256="0" * 64)
    with pytest.raises(DamagedFileError, match="sha256"):
        check(tmp_path, bad, sha256="0" * 64)
    with pytest.raises(SnapshotError, match="header") as refused:
        check(tmp_path, bad)
    assert not isinstance(refused.value, DamagedFileError)


@pytest.mark.parametrize("length", [len(GOOD) - 7, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_that_claims_too_much(tmp_path: Path, length: int) -> None:
    with pytest.raises(SnapshotError, match=f"claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed"):
        check(tmp_path, struct.pack("<Q", length) + GOOD[8:])


def test_a_header_of_the_largest_size(tmp_path: Path) -> None:
    data = GOOD[-DATA_BYTES:]
    header = json.dumps(header_of(GOOD)).encode()
    check(tmp_path, assemble(header.ljust(MAX_HEADER_BYTES), data))
    with pytest.raises(SnapshotError, match=f"claims {MAX_HEADER_BYTES + 1} bytes"):
        check(tmp_path, assemble(header.ljust(MAX_HEADER_BYTES + 1), data))


# ----------------------------------------------------------------------------------------------------------- the header


def refused(header: bytes | dict[str, Any], message: str, data_bytes: int = DATA_BYTES) -> None:
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    with pytest.raises(SnapshotError, match=message):
        check_header(header, LAYOUT, data_bytes=data_bytes)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    tree = header_of(GOOD)
    tree[name] = {**tree[name], **fields}
    return tree


def test_the_good_header_passes() -> None:
    check_header(json.dumps(header_of(GOOD)).encode(), LAYOUT, data_bytes=DATA_BYTES)
    moved = {  # any order of the tensors that fills the data exactly
        "fc.bias": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "bn.running_var": {"dtype": "F32", "shape": [5], "data_offsets": [4, 24]},
        "conv.weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 48]},
        "bn.num_batches_tracked": {"dtype": "I64", "shape": [], "data_offsets": [48, 56]},
    }
    check_header(json.dumps(moved).encode(), LAYOUT, data_bytes=DATA_BYTES)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"nonsense", b"\xff\xfe\xfd", b'{"a": 1} x', b"{'a': 1}", b"9" * 5000],
)
def test_a_header_that_is_not_json(header: bytes) -> None:
    refused(header, "header is not valid")


@pytest.mark.parametrize("header", [b"[]", b"null", b"3", b'"text"'])
def test_a_header_that_is_no_object(header: bytes) -> None:
    refused(header, "not a JSON object")


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting(opening: bytes) -> None:
    refused(opening * 50_000, "header is not valid")
    refused(b'{"conv.weight": ' + opening * 50_000, "header is not valid")


def test_a_key_given_twice() -> None:
    text = json.dumps(header_of(GOOD))
    twice = text[:-1] + ', "fc.bias": ' + json.dumps(header_of(GOOD)["fc.bias"]) + "}"
    refused(twice.encode(), "a key is given twice")
    inside = text.replace('"dtype": "I64"', '"dtype": "F32", "dtype": "I64"')
    assert inside != text
    refused(inside.encode(), "a key is given twice")


def test_a_tensor_missing_or_too_many() -> None:
    missing = header_of(GOOD)
    del missing["fc.bias"]
    refused(missing, "snapshot has no tensor 'fc.bias'; its architecture has 4 tensors")
    extra = {**header_of(GOOD), "extra": {"dtype": "F32", "shape": [1], "data_offsets": [56, 60]}}
    refused(extra, "unexpected tensor 'extra'", DATA_BYTES + 4)
    refused({**header_of(GOOD), "__metadata__": {}}, "unexpected tensor '__metadata__'")
    refused({**header_of(GOOD), "__metadata__": {"format": "pt"}}, "unexpected tensor '__metadata__'")
    refused({**header_of(GOOD), "x" * 10_000: {}}, f"unexpected tensor '{'x' * 80}…'")
    refused({}, "no tensor 'bn.num_batches_tracked'")


@pytest.mark.parametrize(
    ("name", "fields", "found"),
    [
        ("conv.weight", {"shape": [2, 3]}, r"must be F32 \[3, 2\], found F32 \[2, 3\]"),
        ("conv.weight", {"shape": [6]}, r"found F32 \[6\]"),
        ("conv.weight", {"shape": [3, 2, 1]}, r"found F32 \[3, 2, 1\]"),
        ("conv.weight", {"shape": []}, r"found F32 \[\]"),
        ("conv.weight", {"shape": [-3, -2]}, r"found F32 \[-3, -2\]"),
        ("conv.weight", {"shape": "3,2"}, "found F32 3,2"),
        ("conv.weight", {"shape": None}, "found F32 None"),
        ("conv.weight", {"shape": [10**400, 2]}, "found F32"),
        ("conv.weight", {"dtype": "I64"}, r"must be F32 \[3, 2\], found I64 \[3, 2\]"),
        ("conv.weight", {"dtype": "F16"}, "found F16"),
        ("conv.weight", {"dtype": "I32"}, "found I32"),
        ("conv.weight", {"dtype": "f32"}, "found f32"),
        ("conv.weight", {"dtype": None}, "found None"),
        ("bn.num_batches_tracked", {"dtype": "F64"}, r"must be I64 \[\], found F64 \[\]"),
        ("bn.num_batches_tracked", {"shape": [1]}, r"must be I64 \[\], found I64 \[1\]"),
    ],
)
def test_a_wrong_shape_or_dtype(name: str, fields: dict[str, Any], found: str) -> None:
    refused(changed(name, **fields), f"tensor '{name}' .*{found}")


def test_an_entry_with_other_fields() -> None:
    only = "must have exactly dtype, shape and data_offsets"
    refused(changed("fc.bias", comment="x"), f"'fc.bias' {only}")
    refused({**header_of(GOOD), "fc.bias": {"dtype": "F32", "shape": [1]}}, only)
    for entry in (None, 3, "F32", ["dtype", "shape", "data_offsets"]):
        refused({**header_of(GOOD), "fc.bias": entry}, only)


# The data in order: num_batches_tracked 0-8, running_var 8-28, conv.weight 28-52, fc.bias 52-56.
def test_the_offsets_are_as_the_tests_below_take_them() -> None:
    spans = {name: entry["data_offsets"] for name, entry in header_of(GOOD).items()}
    assert spans == {
        "bn.num_batches_tracked": [0, 8],
        "bn.running_var": [8, 28],
        "conv.weight": [28, 52],
        "fc.bias": [52, 56],
    }


@pytest.mark.parametrize(
    ("name", "offsets", "message", "data_bytes"),
    [
        ("fc.bias", [53, 57], "'fc.bias' lies at bytes 53 to 57; expected 52 to 56", 57),  # a gap
        ("bn.num_batches_tracked", [1, 9], "lies at bytes 1 to 9; expected 0 to 8", 56),
        ("fc.bias", [48, 52], "'fc.bias' lies at bytes 48 to 52; expected 52 to 56", 52),  # an overlap
        ("conv.weight", [8, 32], "lies at bytes", 56),
        ("fc.bias", [0, 4], "lies at bytes", 56),
        ("fc.bias", [52, 57], "'fc.bias' lies at bytes 52 to 57; expected 52 to 56", 57),  # not its size
        ("fc.bias", [52, 52], "lies at bytes 52 to 52", 52),
        ("fc.bias", [56, 52], "lies at bytes 56 to 52", 56),
        ("bn.num_batches_tracked", [-8, 0], "lies at bytes -8 to 0; expected 0 to 8", 56),
        ("fc.bias", [2**64 + 52, 2**64 + 56], "lies at bytes 18446744073709551668", 56),
        ("fc.bias", [52, 10**300], "lies at bytes 52 to 1000", 56),
        ("fc.bias", [52, 56], "take 56 bytes, the file has 57 behind its header", 57),  # trailing bytes
        ("fc.bias", [52, 56], "take 56 bytes, the file has 55 behind its header", 55),  # cut
        ("fc.bias", [52, 56], "take 56 bytes, the file has 0 behind its header", 0),
    ],
)
def test_offsets_must_fill_the_data_exactly(name: str, offsets: list[int], message: str, data_bytes: int) -> None:
    refused(changed(name, data_offsets=offsets), message, data_bytes)


@pytest.mark.parametrize(
    "offsets",
    [
        [52.0, 56.0],
        [52, 56.0],
        ["52", "56"],
        [True, 56],
        [None, 56],
        [52],
        [52, 56, 60],
        [],
        52,
        None,
        "52",
        {"a": 1},
        [[52], 56],
        [math.inf, 56],
    ],
)
def test_offsets_must_be_two_integers(offsets: Any) -> None:
    refused(changed("fc.bias", data_offsets=offsets), "data_offsets must be two integers")


# ----------------------------------------------------------------------------------------------------------- the values


def test_good_values_pass() -> None:
    check_values(tensors())
    check_values({"w": torch.tensor([MAX_MAGNITUDE, -MAX_MAGNITUDE, 0.0]), "none": torch.empty(0)})
    check_values({"running_var": torch.zeros(3), "num_batches_tracked": torch.tensor(0)})
    check_values({"running_mean": torch.tensor([-5.0])})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.001e6, -1.001e6, 3e38])
@pytest.mark.parametrize("name", ["conv.weight", "bn.running_var", "fc.bias"])
def test_values_not_finite_or_huge(name: str, value: float) -> None:
    bad = tensors()
    bad[name].view(-1)[-1] = value
    with pytest.raises(SnapshotError, match=f"'{name}' holds values that are not finite or beyond 1e\\+06"):
        check_values(bad)


def test_negative_variances_and_counts() -> None:
    bad = tensors()
    bad["bn.running_var"][2] = -1e-30
    with pytest.raises(SnapshotError, match=r"'bn\.running_var' holds a negative variance"):
        check_values(bad)
    bad = tensors()
    bad["bn.num_batches_tracked"] -= 13
    with pytest.raises(SnapshotError, match=r"'bn\.num_batches_tracked' holds a negative count"):
        check_values(bad)


# -------------------------------------------------------------------------------------------------- use and a last look

ARCH, SHAPE = "cnn6@0.05", (1, 8, 8)


def model_state(seed: int = 1) -> dict[str, Tensor]:
    model = build_model(ARCH, classes=4, channels=1)
    initialise(model, seed)
    return model.state_dict()


def forward_of(state: dict[str, Tensor]) -> Any:
    return as_function(build_model(ARCH, classes=4, channels=1, device="meta"), state)


def test_as_function_is_the_model_in_eval_mode() -> None:
    state = model_state()
    state["norms.0.running_mean"].fill_(0.7)
    state["norms.0.running_var"].fill_(2.0)
    before = {name: value.clone() for name, value in state.items()}
    model = build_model(ARCH, classes=4, channels=1)
    model.load_state_dict(state)
    model.eval()
    images = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    skeleton = build_model(ARCH, classes=4, channels=1, device="meta").train()
    forward = as_function(skeleton, state)
    with torch.no_grad():
        assert torch.equal(forward(images), model(images))
        as_function(skeleton, model_state(2))(images)
        assert torch.equal(forward(images), model(images))  # the skeleton may be shared
    assert_equal(state, before)


def test_probe_passes_a_good_model_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    probe(forward_of(model_state()), SHAPE, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "damage",
    [
        {"classifier.weight": torch.zeros(4, 3)},
        {"classifier.bias": None},
        {"surplus": torch.zeros(1)},
        {"convolutions.0.weight": torch.zeros(3, 2, 3, 3)},
        {"convolutions.0.weight": torch.zeros(3, 1, 3, 3, dtype=torch.float64)},
    ],
)
def test_tensors_that_do_not_fit_are_refused(damage: dict[str, Tensor | None]) -> None:
    state = {name: value for name, value in {**model_state(), **damage}.items() if value is not None}
    frozen(ARCH, 4, SHAPE).bind(model_state())
    with pytest.raises(SnapshotError, match="snapshot does not fit its architecture"):
        frozen(ARCH, 4, SHAPE).bind(state)


def test_probe_refuses_logits_that_are_not_finite() -> None:
    state = model_state()
    for name, value in state.items():
        if name.endswith("weight"):
            value.fill_(MAX_MAGNITUDE)  # each of them allowed
    check_values(state)
    with pytest.raises(SnapshotError, match="probe batch gives logits that are not finite"):
        probe(forward_of(state), SHAPE, CPU)
    state = model_state()
    state["classifier.bias"][3] = math.nan
    with pytest.raises(SnapshotError, match="not finite"):
        probe(forward_of(state), SHAPE, CPU)


# ----------------------------------------------------------------------------------------------------------------- fuzz


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def passes(folder: Path, snapshot: bytes, **manifest: Any) -> dict[str, Tensor] | None:
    """The tensors if every check passes; anything but a SnapshotError escapes."""
    try:
        check(folder, snapshot, **manifest)
        found = decode(snapshot)
        check_values(found)
    except SnapshotError:
        return None
    return found


HEADER_END = len(GOOD) - DATA_BYTES


@st.composite
def damaged(draw: st.DrawFn, stop: int = len(GOOD)) -> bytes:
    """The good file with some bytes set, swapped out, cut off or added."""
    snapshot = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, min(stop, len(snapshot)) - 1))
        match draw(st.sampled_from(["flip", "set", "copy", "insert", "delete"])):
            case "flip":
                snapshot[place] ^= 1 << draw(st.integers(0, 7))
            case "set":
                snapshot[place] = draw(st.sampled_from([0, 0x20, 0x22, 0x2C, 0x30, 0x39, 0x5B, 0x7B, 0x7D, 0x80, 0xFF]))
            case "copy":
                source = draw(st.integers(0, stop - 8))
                snapshot[place : place + 4] = snapshot[source : source + 4]
            case "insert":
                snapshot[place:place] = draw(st.binary(min_size=1, max_size=4))
            case "delete":
                del snapshot[place : place + draw(st.integers(1, 4))]
    return bytes(snapshot)


@given(damaged())
@PROPERTY
def test_damage_on_the_way_never_passes(folder: Path, snapshot: bytes) -> None:
    assume(snapshot != GOOD)
    assert passes(folder, snapshot, size=len(GOOD), sha256=digest(GOOD)) is None


@given(damaged(stop=HEADER_END))
@PROPERTY
def test_a_header_made_wrong_on_purpose_changes_no_tensor(folder: Path, snapshot: bytes) -> None:
    """Here the manifest goes with the damaged bytes."""
    found = passes(folder, snapshot)
    if found is not None and snapshot[-DATA_BYTES:] == GOOD[-DATA_BYTES:]:
        assert_equal(found, tensors())


@given(st.binary(min_size=DATA_BYTES, max_size=DATA_BYTES))
@PROPERTY
def test_any_data_is_used_as_it_is_or_refused(folder: Path, data: bytes) -> None:
    found = passes(folder, GOOD[:HEADER_END] + data)
    if found is not None:
        numbers = np.frombuffer(data[8:], "<f4")
        assert np.isfinite(numbers).all()
        assert np.abs(numbers).max() <= 1e6
        assert (numbers[:5] >= 0).all()
        assert np.frombuffer(data[:8], "<i8")[0] >= 0
        assert found["conv.weight"].numpy().tobytes() == data[28:52]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([0, 1, 56, "F32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(LAYOUT)), st.sampled_from(["", "dtype", "shape", "data_offsets", "0", "1"]), JSON)
@PROPERTY
def test_any_json_in_the_header_is_refused_or_harmless(folder: Path, name: str, place: str, value: Any) -> None:
    tree = copy.deepcopy(header_of(GOOD))
    if place == "":
        tree[name] = value
    elif place in "01":
        tree[name]["data_offsets"][int(place)] = value
    else:
        tree[name][place] = value
    found = passes(folder, assemble(json.dumps(tree).encode(), GOOD[HEADER_END:]))
    if found is not None:
        assert_equal(found, tensors())


@given(st.binary(max_size=200))
@PROPERTY
def test_any_bytes_at_all(folder: Path, snapshot: bytes) -> None:
    assert passes(folder, snapshot) is None
    try:
        weights.decode(snapshot)
    except SnapshotError:
        return
