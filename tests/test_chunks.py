"""Pieces of a snapshot on the wire: written and read as protobuf does it, and as large as the line is fast."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import INTAKE, SIZE, SNAPSHOT, WAITS, Noting, Remote, in_loop, linked, manifest_of, serving, stub_of

from launch.proxy import Proxy
from peer._proto.crad.v1 import peer_pb2
from peer.chunks import LEAST_BYTES, MOST_BYTES, UNDER_WAY_BYTES, Pace, Piece, split
from peer.intake import LARGEST_CHUNK_BYTES, MAX_ANSWER_BYTES, MessageError, parse, parse_chunk

OFFSETS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 127, 128, 2**50 - 1, 2**50, 2**63, 2**64 - 1]))


@given(OFFSETS, st.binary(min_size=1, max_size=300))
def test_a_piece_is_written_as_by_protobuf(offset: int, data: bytes) -> None:
    assert Piece(offset, data).SerializeToString() == peer_pb2.Chunk(offset=offset, data=data).SerializeToString()


def by_protobuf(raw: bytes) -> tuple[int, bytes] | str:
    try:
        message = parse(peer_pb2.Chunk, raw)
    except MessageError as error:
        return str(error)
    return message.offset, message.data


def here(raw: bytes) -> tuple[int, bytes] | str:
    try:
        offset, data = parse_chunk(raw)
    except MessageError as error:
        return str(error)
    return offset, bytes(data)


@settings(max_examples=500)
@given(OFFSETS, st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 20), st.binary(max_size=3)), max_size=3))
def test_what_is_read_is_what_protobuf_reads(offset: int, data: bytes, changes: list[tuple[int, bytes]]) -> None:
    """Right messages, and such with bytes changed, inserted or left out."""
    raw = peer_pb2.Chunk(offset=offset, data=data).SerializeToString()
    for at, inserted in changes:
        raw = raw[:at] + inserted + raw[at + len(inserted) // 2 + 1 :]
    assert here(raw) == by_protobuf(raw)


@given(st.binary(max_size=30))
def test_any_bytes_are_read_as_protobuf_reads_them(raw: bytes) -> None:
    assert here(raw) == by_protobuf(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12\x02ab\x08\x05",  # the other way round
        b"\x08\x01\x08\x05\x12\x02ab",  # the last offset counts
        b"\x08\x05\x12\x01x\x12\x02ab",  # and the last data
        b"\x08\x05\x12\x02ab\x18\x07",  # a field of a later version
        b"\x08\x85\x80\x80\x80\x80\x80\x80\x80\x80\x00\x12\x02ab",  # ten bytes for a five
    ],
)
def test_other_forms_of_the_message_are_read_too(raw: bytes) -> None:
    assert split(raw) is None
    assert here(raw) == by_protobuf(raw) == (5, b"ab")


def test_a_length_of_too_many_bytes_is_refused_as_by_protobuf() -> None:
    raw = b"\x12\x81\x80\x80\x80\x80\x00x"
    assert split(raw) is None
    assert here(raw) == by_protobuf(raw) == "bytes that are no Chunk"


def test_the_data_are_not_copied() -> None:
    raw = Piece(70_000, bytes(LARGEST_CHUNK_BYTES)).SerializeToString()
    assert parse_chunk(raw)[1].obj is raw


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "no message came"),
        (
            Piece(0, bytes(LARGEST_CHUNK_BYTES + 1)).SerializeToString(),
            "Chunk with data 1048577 bytes, which cannot be",
        ),
        (bytes(MAX_ANSWER_BYTES + 1), "a message of 1049601 bytes; at most 1049600 are allowed"),
        (Piece(2**50, b"x").SerializeToString(), "Chunk with offset 1125899906842624, which cannot be"),
        (Piece(5, b"").SerializeToString(), "Chunk with data 0 bytes, which cannot be"),
        (b"\x12\x05ab", "bytes that are no Chunk"),
    ],
)
def test_what_cannot_be_is_refused(raw: bytes | None, words: str) -> None:
    with pytest.raises(MessageError, match=f"^{words}"):
        parse_chunk(raw)


# --- how large they are -----------------------------------------------------------------------------------------------


class Line:
    """Takes at once what can be under way, and passes it on at a pace.

    Attributes:
        sizes: of the pieces.
        slowest: seconds that one was on its way, what was before it left out.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.slowest = 0.0
        self._pace, self._now, self._buffered = Pace(), 0.0, 0

    def send(self, count: int, bytes_per_second: float) -> None:
        while count > 0:
            size = self._pace.next()
            self.sizes.append(size)
            if (over := self._buffered + size - UNDER_WAY_BYTES) > 0:
                self._now += over / bytes_per_second
                self._buffered -= over
            self._buffered += size
            self._pace.took(size, self._now)
            self.slowest = max(self.slowest, size / bytes_per_second)
            count -= size


def test_a_fast_line_gets_large_pieces_as_soon_as_it_is_known_to_be_fast() -> None:
    line = Line()
    line.send(45_000_000, 100e6)
    assert line.sizes[0] == LEAST_BYTES
    assert line.sizes.count(LEAST_BYTES) * LEAST_BYTES <= UNDER_WAY_BYTES + 2 * LEAST_BYTES
    assert {*line.sizes[UNDER_WAY_BYTES // LEAST_BYTES + 2 :]} == {MOST_BYTES}


def test_a_slow_line_gets_small_pieces_for_ever() -> None:
    line = Line()
    line.send(45_000_000, 20e3)
    assert {*line.sizes} == {LEAST_BYTES}
    assert line.slowest < 5


def test_a_line_that_becomes_slow_gets_small_pieces_again() -> None:
    line = Line()
    line.send(45_000_000, 100e6)
    line.sizes.clear()
    line.send(20_000_000, 20e3)
    assert {*line.sizes[UNDER_WAY_BYTES // MOST_BYTES :]} == {LEAST_BYTES}
    assert line.slowest < 30  # even those that were under way


class Sizes(Noting):
    """Notes the pieces, and how much of what was sent had not arrived."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sizes: list[int] = []
        self.under_way: list[int] = []
        self.received = lambda: 0

    async def chunks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for piece in super().chunks(request, context):
            self.sizes.append(len(piece.data))
            yield piece
            self.under_way.append(self.bytes_sent - self.received())


@in_loop
async def test_no_more_is_under_way_than_is_reckoned_with(tmp_path: Path) -> None:
    remote: Remote
    async with serving(tmp_path, Sizes) as remote, Proxy(f"127.0.0.1:{remote.port}") as proxy:
        proxy.down.bandwidth = 0.8e6
        async with linked(proxy.port, WAITS) as link:
            servicer: Any = remote.servicer
            servicer.received = lambda: link.bytes_received
            await link.snapshot(manifest_of(0), tmp_path / "0.safetensors", INTAKE)
    print(f"{max(servicer.under_way)} bytes under way")
    assert max(servicer.under_way) <= UNDER_WAY_BYTES
    assert {*servicer.sizes[:-1]} == {LEAST_BYTES}


@in_loop
async def test_a_transfer_begins_anywhere_and_ends_with_what_is_left(tmp_path: Path) -> None:
    remote: Remote
    async with serving(tmp_path, Sizes) as remote, stub_of(remote.port) as stub:
        for offset in (0, 1, LEAST_BYTES - 1, SIZE - MOST_BYTES - 7, SIZE - 1, SIZE):
            request = peer_pb2.GetSnapshotRequest(peer=1, round=0, sha256=manifest_of(0).sha256, offset=offset)
            came = [(each.offset, each.data) async for each in stub.GetSnapshot(request)]
            assert b"".join(data for _, data in came) == SNAPSHOT[offset:]
            assert [at for at, _ in came] == [offset + sum(len(d) for _, d in came[:i]) for i in range(len(came))]
            assert all(LEAST_BYTES <= len(data) <= MOST_BYTES for _, data in came[:-1])
    sizes: Any = remote.servicer
    assert MOST_BYTES in sizes.sizes


@in_loop
async def test_a_transfer_that_was_cut_within_a_large_piece_goes_on_at_its_last_byte(tmp_path: Path) -> None:
    """As when the disk was full, or the process was killed while it wrote."""
    goal, at = tmp_path / "0.safetensors", UNDER_WAY_BYTES + MOST_BYTES // 2 + 3
    goal.with_suffix(".partial").write_bytes(SNAPSHOT[:at])
    remote: Remote
    async with serving(tmp_path, Sizes) as remote, linked(remote.port) as link:
        await link.snapshot(manifest_of(0), goal, INTAKE)
        assert remote.servicer.offsets == [at]
        assert link.bytes_received == SIZE - at
    assert goal.read_bytes() == SNAPSHOT
