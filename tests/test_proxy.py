"""The bad link itself: each fault does what it says, to plain TCP connections, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from wire import in_loop, until

from launch.proxy import Proxy

BYTES = random.Random(5).randbytes(300_000)


class Echo:
    """A server that sends back what it gets, and counts."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.connections = 0
        self.resets = 0
        self.ends = 0

    async def __aenter__(self) -> Echo:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await until(lambda: self.connections == self.ends)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while data := await reader.read(65536):
                self.received += data
                writer.write(data)
                await writer.drain()
        except ConnectionResetError:
            self.resets += 1
        finally:
            self.ends += 1
            writer.close()


@asynccontextmanager
async def proxied(seed: int = 0) -> AsyncIterator[tuple[Echo, Proxy]]:
    """Nothing of the proxy is left afterwards."""
    before = asyncio.all_tasks()
    async with Echo() as echo, Proxy(echo.address, seed=seed) as proxy:
        yield echo, proxy
    assert proxy.present == 0
    await until(lambda: asyncio.all_tasks() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


async def dial(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def sent_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = BYTES) -> bytes:
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), 10)


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Neither bytes nor an end come."""
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
        return False
    return True


@in_loop
async def test_bytes_pass_both_ways_and_are_counted() -> None:
    async with proxied() as (echo, proxy):
        reader, writer = await dial(proxy)
        assert await sent_back(reader, writer) == BYTES
        assert proxy.up.received == proxy.up.passed == proxy.down.received == proxy.down.passed == len(BYTES)
        assert (proxy.accepted, proxy.present) == (1, 1)
        writer.write_eof()  # an end in one direction passes, and the other still carries what is to come
        assert await asyncio.wait_for(reader.read(), 5) == b""
        await until(lambda: proxy.present == 0)
        assert (echo.ends, echo.resets) == (1, 0)


@in_loop
async def test_a_delay_holds_for_every_byte_and_not_for_the_rate() -> None:
    async with proxied() as (_, proxy):
        proxy.up.delay, proxy.down.delay = 0.2, 0.1
        reader, writer = await dial(proxy)
        start = time.monotonic()
        assert await sent_back(reader, writer) == BYTES
        assert 0.3 <= time.monotonic() - start < 1.0


@in_loop
async def test_a_bandwidth_is_kept_by_all_connections_together() -> None:
    async with proxied() as (_, proxy):
        proxy.down.bandwidth = 2 * len(BYTES)
        ends = [await dial(proxy) for _ in range(2)]
        start = time.monotonic()
        await asyncio.gather(*(sent_back(*each) for each in ends))
        assert 0.95 <= time.monotonic() - start < 2.0


@in_loop
async def test_a_slow_link_gives_its_bytes_evenly() -> None:
    async with proxied() as (_, proxy):
        reader, writer = await dial(proxy)
        assert await sent_back(reader, writer) == BYTES
        proxy.down.bandwidth = 100_000
        writer.write(BYTES)
        seen, start = [], time.monotonic()
        while sum(seen) < 50_000:
            seen.append(len(await asyncio.wait_for(reader.read(BYTES.__len__()), 5)))
        assert max(seen) <= 25_000  # a fourth of a second's worth, though pieces are smaller: the machine may be busy
        assert time.monotonic() - start > 0.4


@in_loop
async def test_a_black_hole_keeps_and_accepts_connections_and_what_it_has_swallowed_stays_dead() -> None:
    async with proxied() as (echo, proxy):
        idle, busy = await dial(proxy), await dial(proxy)
        assert await sent_back(*idle) == await sent_back(*busy) == BYTES
        received = len(echo.received)
        proxy.cut()
        busy[1].write(b"lost")
        begun = await dial(proxy)  # is accepted
        begun[1].write(b"lost too")
        assert all(await asyncio.gather(*(is_silent(reader) for reader, _ in (idle, busy, begun))))
        assert (len(echo.received), echo.connections) == (received, 2)

        proxy.heal()
        assert await sent_back(*idle) == BYTES  # it has lost nothing
        busy[1].write(b"after a gap")
        begun[1].write(b"after a gap")
        assert all(await asyncio.gather(*(is_silent(reader) for reader, _ in (busy, begun))))
        assert b"after" not in echo.received
        assert await sent_back(*await dial(proxy)) == BYTES


@in_loop
async def test_an_end_of_a_connection_does_not_come_out_of_a_black_hole() -> None:
    async with proxied() as (echo, proxy):
        first, second = await dial(proxy), await dial(proxy)
        assert await sent_back(*first) == await sent_back(*second) == BYTES
        proxy.cut()
        first[1].close()
        second[1].write(b"lost")
        await second[1].drain()
        second[1].transport.abort()
        assert proxy.present == 2
        await asyncio.sleep(0.1)
        assert echo.ends == 0


@in_loop
async def test_half_open_one_direction_passes() -> None:
    async with proxied() as (echo, proxy):
        reader, writer = await dial(proxy)
        assert await sent_back(reader, writer) == BYTES
        proxy.down.swallows = True
        writer.write(b"there")
        await until(lambda: echo.received.endswith(b"there"))
        assert await is_silent(reader)
        proxy.heal()
        writer.write(b"again")
        await until(lambda: echo.received.endswith(b"again"))
        assert await is_silent(reader)  # what follows a gap is not passed on


@in_loop
async def test_refusing_means_that_nobody_listens_until_healed() -> None:
    async with proxied() as (_, proxy):
        present = await dial(proxy)
        proxy.refuse()
        proxy.refuse()  # twice is once
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await dial(proxy)
        assert await sent_back(*present) == BYTES
        proxy.heal()
        assert await sent_back(*await dial(proxy)) == BYTES  # on the same port


@in_loop
async def test_a_reset_breaks_both_ends() -> None:
    async with proxied() as (echo, proxy):
        reader, writer = await dial(proxy)
        assert await sent_back(reader, writer) == BYTES
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        await until(lambda: echo.resets == 1)
        assert await sent_back(*await dial(proxy)) == BYTES


@in_loop
async def test_truncation_passes_so_many_bytes_and_closes_once() -> None:
    async with proxied() as (_, proxy):
        reader, writer = await dial(proxy)
        proxy.down.truncate = 123_456
        writer.write(BYTES)
        with suppress(ConnectionResetError):  # what was still to come is lost
            assert await asyncio.wait_for(reader.readexactly(123_456), 5) == BYTES[:123_456]
            assert await asyncio.wait_for(reader.read(), 5) == b""
        assert proxy.down.passed == 123_456
        assert proxy.down.truncate is None
        assert await sent_back(*await dial(proxy)) == BYTES


@in_loop
async def test_bits_are_flipped_at_the_rate_and_at_the_places_of_the_seed() -> None:
    async def flipped(seed: int) -> bytes:
        async with proxied(seed) as (_, proxy):
            proxy.down.flips = 1e-3
            found = await sent_back(*await dial(proxy))
            different = sum((a ^ b).bit_count() for a, b in zip(found, BYTES, strict=True))
            assert different == proxy.down.flipped
            return found

    first = await flipped(1)
    wrong = sum(a != b for a, b in zip(first, BYTES, strict=True))
    assert 220 < wrong < 390  # 300 are expected
    assert await flipped(1) == first
    assert await flipped(2) != first


@in_loop
async def test_a_target_that_does_not_answer_and_one_that_is_changed() -> None:
    async with proxied() as (echo, proxy):
        address, proxy.target = proxy.target, "127.0.0.1:1"
        reader, _ = await dial(proxy)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        proxy.target = address
        assert await sent_back(*await dial(proxy)) == BYTES
        assert echo.connections == 1


@in_loop
async def test_it_can_be_left_in_the_middle_of_everything() -> None:
    async with proxied() as (_, proxy):
        proxy.down.delay, proxy.down.bandwidth = 5.0, 10_000.0
        for _ in range(5):
            (await dial(proxy))[1].write(BYTES)
        await until(lambda: proxy.down.received > 0)
