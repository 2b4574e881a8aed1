"""The end of a run: copies of the last models, slow and cut lines, and disks that are lost when all is done."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable

import pytest
from disks import assert_refused, digests, finish, two_last
from processes import Peers, assert_one_sentence, until
from wire import in_loop

from crad_p2p.errors import ExitCode
from launch.proxy import Proxy


def test_a_disk_lost_after_the_last_round(mesh: Callable[..., Peers]) -> None:
    """Nobody learns from the last round, and its snapshot is with the others all the same."""
    peers = mesh(3, rounds=4)
    one, behind, lost = peers.run_to(3)
    peers.tell("hold", 4, peer=1)
    peers.tell("hold", None)
    until(lambda: one.has(2, 4), "the last round of peer 2 is with peer 0")
    lost.kill()
    before = digests(lost.state)
    shutil.rmtree(lost.state)

    assert_refused(peers, "[34]")
    back = peers.start(2, "--recover")
    back.says("round 4 of this peer is back, from peer 0")
    back.says("round 3 of this peer is back, from peer [01]")
    peers.tell("hold", None, peer=1)
    finish(peers, [one, behind, back], 4)
    assert two_last(digests(back.state)) == two_last(before)


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_disk_lost_when_all_have_finished_and_left(mesh: Callable[..., Peers], power_cut: bool) -> None:
    """Who is started again for it stays as long as it needs them."""
    peers = mesh(3, rounds=4, linger=4.0)
    for each in peers.start_all():
        assert each.ended() == ExitCode.COMPLETE, each.output
    state = peers.state(2)
    before = digests(state)
    if power_cut:  # the last received files, as if they had not been made durable
        for path in state.glob("received/000004/*"):
            path.unlink()
        (state / "served.json").unlink()
        back = peers.start(2)
        back.says("learner on cpu")
    else:
        shutil.rmtree(state)
        back = peers.start(2, "--recover")
        back.says("asking all other peers")
    others = [peers.start(i) for i in (0, 1)]
    for each in [back, *others]:
        assert each.ended(60) == ExitCode.COMPLETE, each.output
    assert two_last(digests(state)) == two_last(before)
    assert back.has(0, 4)
    assert back.has(1, 4)
    assert back.result().rounds_completed == 4


def test_a_snapshot_of_the_last_round_that_must_not_be_used_is_reported(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=3)
    peers.tell("misname", 3, peer=2)
    one, two, wrong = peers.start_all()
    for each in (one, two):
        code = each.ended()
        sentence = r"all 3 rounds are done, with reservations: snapshots of peer 2 were refused\. .*"
        assert_one_sentence(each.output, code, ExitCode.RESERVATIONS, sentence)
    assert wrong.ended() == ExitCode.RESERVATIONS, wrong.output  # it was told
    again = peers.start(0, "--linger", "1")  # it remembers, and asks nobody
    assert again.ended(30) == ExitCode.RESERVATIONS, again.output


@in_loop
async def test_a_slow_last_transfer_is_not_cut(mesh: Callable[..., Peers]) -> None:
    """It takes longer than the linger time, and moves; what is under way, some megabytes, takes less."""
    peers = mesh(2, rounds=1, linger=2.0)
    size = str(1 << 22)  # 16 MiB
    async with Proxy(f"127.0.0.1:{peers.ports[0]}") as proxy:
        proxy.down.bandwidth = 4_000_000
        one = peers.start(0, LIGHT_FLOATS=size)
        two = peers.start(1, file=peers.write_file(peers.folder / "view", {0: proxy.port}), LIGHT_FLOATS=size)
        for each in (one, two):
            assert await asyncio.to_thread(each.ended, 30) == ExitCode.COMPLETE, each.output
    assert two.has(0, 1)


@in_loop
async def test_a_last_transfer_that_is_cut_for_good_keeps_no_third_peer_waiting(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=2, linger=19.0)
    size = str(1 << 21)  # 8 MiB
    hasty = (sys.executable, "-P", "-c", "import peer.leaving, peer.cli; peer.leaving.RETURN = 1.0; peer.cli.main()")
    async with Proxy(f"127.0.0.1:{peers.ports[0]}") as proxy:
        view = peers.write_file(peers.folder / "view", {0: proxy.port})
        one, cut_off, third = (
            peers.start(i, file=view if i == 1 else None, command=hasty, LIGHT_FLOATS=size) for i in range(3)
        )
        partial = cut_off.state / "received/000002/0.partial"
        await asyncio.to_thread(cut_off.reach, 1)
        proxy.down.bandwidth = 3_000_000
        await asyncio.to_thread(until, partial.exists, "the last transfer is under way")
        since = time.monotonic()
        proxy.cut()
        for each in (third, one):
            assert await asyncio.to_thread(each.ended, 30) == ExitCode.COMPLETE, each.output
        # The cut is noticed after seven seconds, and a caller that does not read any more is waited for.
        assert time.monotonic() - since < peers.linger - 1
        assert "nobody learns from the last models of peer 0, which cannot be reached now" in cut_off.output
        cut_off.kill()
