"""Pieces of a snapshot on the wire: how large a sender makes them, and their bytes without needless copies.

On the wire a piece is the message ``Chunk`` of ``peer.proto``. Protobuf itself would copy its data twice at each end,
which for a snapshot costs more than the encryption.
"""

from __future__ import annotations

from collections import deque

#: Bytes of data in one message. A transfer is seen to move when a whole message has come, so a thin line gets small
#: ones; each message costs CPU time of its own, so a fast line gets large ones: 64 KiB cost 1.5 times as much for a
#: byte. With still larger ones, four transfers at once would take more memory than they save time.
LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 18
#: What may be under way: a sender is ahead of its receiver by no more than ``grpc.http2.lookahead_bytes`` and what gRPC
#: holds back to write.
UNDER_WAY_BYTES = 3 << 20
#: Seconds that a message may take at the pace at which the last ones have gone. A line has to become a hundred times
#: slower at once, so that one is not through within the wait for progress.
_SECONDS = 0.25
#: Bytes of the number of a length; protobuf takes no longer ones.
_LONGEST_LENGTH = 5
#: What stands before the two fields: their numbers and wire types.
_OFFSET, _DATA = 1 << 3 | 0, 2 << 3 | 2


class Pace:
    """How large the next piece may be, from when those before were taken.

    What has been taken may still lie in buffers; so what counts is what must have arrived, since no more than
    ``UNDER_WAY_BYTES`` can be under way.
    """

    def __init__(self) -> None:
        self._taken: deque[tuple[float, int]] = deque()
        self._sent = 0

    def took(self, count: int, now: float) -> None:
        """So many more bytes have been taken by now, a time in seconds."""
        self._sent += count
        self._taken.append((now, self._sent))
        while len(self._taken) > 1 and self._taken[1][1] < self._sent - 2 * UNDER_WAY_BYTES:
            self._taken.popleft()

    def next(self) -> int:
        """Bytes of the next piece."""
        if not self._taken:
            return LEAST_BYTES
        (then, before), (now, _) = self._taken[0], self._taken[-1]
        arrived = self._sent - before - UNDER_WAY_BYTES
        seconds = max(now - then, 1e-3)
        return MOST_BYTES if arrived / seconds * _SECONDS >= MOST_BYTES else LEAST_BYTES


class Piece:
    """A ``Chunk`` to be sent. Its data are kept only as they are sent, since many may wait at once for slow lines.

    Attributes:
        offset: of the first byte of ``data`` in the file.
    """

    __slots__ = ("_raw", "_start", "offset")

    def __init__(self, offset: int, data: bytes) -> None:
        self.offset = offset
        place = bytes((_OFFSET,)) + _varint(offset) if offset else b""
        head = place + bytes((_DATA,)) + _varint(len(data))
        self._start = len(head)
        self._raw = head + data

    @property
    def data(self) -> memoryview:
        return memoryview(self._raw)[self._start :]

    def SerializeToString(self) -> bytes:
        """As protobuf's class does it."""
        return self._raw


def split(raw: bytes) -> tuple[int, memoryview] | None:
    """Offset and data of a ``Chunk`` written as writers do it: its two fields in their order, and nothing else.

    None for all else, which may still be that message in another form.
    """
    try:
        offset, at = _read_varint(raw, 1) if raw[0] == _OFFSET else (0, 0)
        if raw[at] != _DATA:
            return None
        start = at + 1
        length, at = _read_varint(raw, start)
    except IndexError:
        return None
    if at - start > _LONGEST_LENGTH:
        return None
    return (offset, memoryview(raw)[at:]) if length == len(raw) - at else None


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends.

    Raises:
        IndexError: it does not end, or not within 63 bits.
    """
    number = 0
    for shift in range(0, 63, 7):
        number |= (raw[at] & 127) << shift
        at += 1
        if raw[at - 1] < 128:
            return number, at
    raise IndexError
