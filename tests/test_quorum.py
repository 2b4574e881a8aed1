"""Policy ``quorum`` with real ``crad-peer`` processes: who is waited for, who is gone on without, and who says so."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable

import pytest
from processes import COMMAND, Peer, Peers, assert_one_sentence, doctored, until, up

from crad_p2p.errors import ExitCode

GRACE = 1.0
QUORUM = {"policy": "quorum", "grace": GRACE}
#: A peer from which snapshots come, byte by byte.
THIN = """
import asyncio, peer.cli, peer.server
from peer._proto.crad.v1 import peer_pb2
async def trickle(self, request, context):
    await self._published(request.peer, request.round, context)
    data = (self._store.round_dir(request.round) / "snapshot.safetensors").read_bytes()
    for offset in range(request.offset, len(data)):
        yield peer_pb2.Chunk(offset=offset, data=data[offset : offset + 1])
        await asyncio.sleep(1)
peer.server.PeerServicer.GetSnapshot = trickle
peer.cli.main()
"""


def rounds_without(peer: Peer, other: int, field: str) -> list[int]:
    return [record.round for record in peer.history() if other in getattr(record, field)]


# --- one that goes away and comes back --------------------------------------------------------------------------------


def test_a_killed_peer_costs_one_deadline_and_rejoins_at_the_round_of_the_mesh(mesh: Callable[..., Peers]) -> None:
    peers = mesh(4, rounds=24, barrier={**QUORUM, "max_staleness": 2})
    running = peers.run_to(4)
    *others, killed = running
    killed.kill()
    start = time.monotonic()
    peers.tell("hold", 15)
    for each in others:
        each.reach(14)
    waited = time.monotonic() - start
    # One deadline for ten rounds; a second one would be over twice this, since each begins with the grace.
    assert GRACE < waited < 2 * GRACE + 3, waited
    for each in others:
        waits = {record.round: record.seconds.wait for record in each.history() if record.round > 5}
        # Deadlines differ a little between peers, and who was first waits for who was last.
        assert {number for number, wait in waits.items() if wait > GRACE / 3} <= {6, 7}, waits

    back = peers.start(3)
    back.says("WARNING the mesh is at round 14 and went on without this peer, which was at round 4: going on from")
    for each in others:
        until(lambda each=each: each.times_connected(3) > 1, "it reaches peer 3 again")
        until(lambda each=each: each.has(3, 14), "its round 14 is here")
    manifest = back.manifest(14)
    assert (manifest.round, manifest.model_round, manifest.consumed) == (14, 4, ())
    assert manifest.sha256 == back.manifest(14).sha256 != others[0].manifest(14).sha256
    peers.tell("hold", None)
    for each in [*others, back]:
        assert each.ended() == ExitCode.RESERVATIONS, each.output

    history = back.history()
    assert [record.round for record in history] == [1, 2, 3, 4, *range(14, 25)]
    assert {record.round: record.skipped_rounds for record in history if record.skipped_rounds} == {
        14: tuple(range(5, 14))
    }
    (rejoined,) = (record for record in history if record.round == 14)
    assert rejoined.snapshot_sha256 == manifest.sha256
    assert (rejoined.teachers, rejoined.missing_teachers, rejoined.seconds.train) == ((), (), 0.0)
    assert back.result().skipped_rounds == tuple(range(5, 14))
    assert back.result().rounds_completed == 24
    assert_one_sentence(
        back.output,
        back.process.returncode,
        ExitCode.RESERVATIONS,
        "all 24 rounds are done, with reservations: .*the mesh went on without this peer in 9 rounds, last in round 13",
    )
    for each in others:
        stale, missing = rounds_without(each, 3, "stale_teachers"), rounds_without(each, 3, "missing_teachers")
        assert stale == [6, 7]
        assert missing == [8, 9, 10, 11, 12, 13, 14, 15]  # the model of round 4 is not young enough for round 15
        assert {3 in record.teachers for record in each.history() if record.round in missing} == {False}
        assert each.history()[15].round == 16
        assert 3 in each.history()[15].teachers
        assert (each.result().stale_teachers, each.result().missing_teachers) == ((3,), (3,))
        assert each.result().skipped_rounds == ()
        assert_one_sentence(
            each.output,
            each.process.returncode,
            ExitCode.RESERVATIONS,
            "all 24 rounds are done, with reservations: 10 of 24 rounds were trained without the newest model of "
            r"peer 3\. .*history\.jsonl has the details",
        )
        assert "WARNING round 6 is trained with an older model of peer 3" in each.output
        assert "WARNING round 8 is trained without peer 3" in each.output
        assert "WARNING round 16" not in each.output
        assert "lost" not in each.output  # nobody has lost anything
    last = others[0].manifest(24)
    assert (last.missing, last.model_round, len(last.consumed)) == ((), 24, 3)


def test_the_manifest_says_who_was_missing_and_whose_model_was_old(mesh: Callable[..., Peers]) -> None:
    """A peer that is killed for good: the others finish with reservations, and do not linger for it."""
    peers = mesh(3, rounds=12, barrier={**QUORUM, "max_staleness": 2}, linger=60.0)
    *others, killed = peers.run_to(4)
    killed.kill()
    peers.tell("hold", 7)
    for each in others:
        each.reach(6)
        assert {(c.peer, c.round) for c in each.manifest(6).consumed} >= {(2, 4)}
        assert each.manifest(6).missing == ()
        # What was consumed is what the other has published.
        found = {c.peer: c.sha256 for c in each.manifest(6).consumed}
        assert found[2] == json.loads((killed.state / "rounds/000004/manifest.json").read_text())["sha256"]
    peers.tell("hold", 10)
    for each in others:
        each.reach(9)
    back = peers.start(2)
    back.reach(9)
    for each in others:
        until(lambda each=each: each.has(2, 9), "the model of round 4 is here as that of round 9")
    back.kill()
    start = time.monotonic()
    peers.tell("hold", None)
    for i, each in enumerate(others):
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert each.manifest(12).missing == (2,)
        assert [c.peer for c in each.manifest(12).consumed] == [1 - i]
        assert rounds_without(each, 2, "stale_teachers") == [6, 7]
        assert rounds_without(each, 2, "missing_teachers") == [8, 9, 10, 11, 12]  # its weights stay those of round 4
        assert "peer 2 had not said that the last round is done there when this peer left" in each.last_words()
        assert {record.round for record in each.history()} == set(range(1, 13))
    assert time.monotonic() - start < 20  # and not the linger time


def test_thin_lines_of_some_do_not_keep_the_snapshots_of_others_from_coming(mesh: Callable[..., Peers]) -> None:
    """Two of five send a byte a second: their transfers move, are never cut, and more are asked for in every round."""
    peers = mesh(5, rounds=100_000, barrier={**QUORUM, "max_staleness": 3})
    peers.tell("hold", 1)
    running = [peers.start(i, "--start-wait", "6", command=doctored(THIN) if i < 2 else (COMMAND,)) for i in range(5)]
    peers.connected(running)
    whole = running[2:]
    for each in whole:
        for other in {2, 3, 4} - {running.index(each)}:
            until(lambda each=each, other=other: each.has(other, 0), f"{each.state} has round 0 of peer {other}")
    peers.tell("hold", None)
    for each in whole:
        each.reach(12)
    for each in whole:
        for other in {2, 3, 4} - {each.manifest(12).peer}:
            # Whether it was there for the first round depends on how fast the two started.
            assert set(rounds_without(each, other, "missing_teachers")) <= {1}, each.output
        assert "--recover" not in each.output


def test_after_a_restart_a_missing_peer_still_teaches_with_what_is_here_of_it(mesh: Callable[..., Peers]) -> None:
    """Its newest manifest is here, and its snapshot is not; that of the round before is."""
    peers = mesh(3, rounds=8, barrier={**QUORUM, "max_staleness": 3})
    for each in peers.run_to(4):
        each.kill()
    for i in (0, 1):
        (peers.state(i) / "received/000004/2.safetensors").unlink()
    peers.tell("hold", 6)
    for each in [peers.start(i, "--start-wait", "3") for i in (0, 1)]:
        each.reach(5)
        assert (2, 3) in {(consumed.peer, consumed.round) for consumed in each.manifest(5).consumed}, each.output


def test_a_peer_that_lost_its_last_round_does_not_learn_from_one_that_is_ahead(mesh: Callable[..., Peers]) -> None:
    """After --recover: a snapshot of the round that it makes anew is here, of one that is away."""
    peers = mesh(3, rounds=8, barrier={**QUORUM, "max_staleness": 3})
    for each in peers.run_to(5):
        each.kill()
    state, other = peers.state(0), peers.state(2)
    shutil.rmtree(state / "rounds/000005")
    path = state / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    for suffix in ("json", "safetensors"):
        (state / f"received/000004/1.{suffix}").unlink()
        (other / f"received/000005/0.{suffix}").unlink()
    seen = json.loads((other / "seen.json").read_text())  # the other has had its round 4 alone
    seen["0"] = {"round": 4, "sha256": json.loads((state / "rounds/000004/manifest.json").read_text())["sha256"]}
    (other / "seen.json").write_text(json.dumps(seen))
    peers.tell("hold", 6)
    here, _ = [peers.start(i, "--start-wait", "3") for i in (0, 2)]
    here.reach(5)
    assert [(each.peer, each.round) for each in here.manifest(5).consumed] == [(1, 3), (2, 4)]


# --- too few ----------------------------------------------------------------------------------------------------------


def test_fewer_than_min_wait_and_say_so_and_go_on_when_one_returns(mesh: Callable[..., Peers]) -> None:
    peers = mesh(4, rounds=8, barrier=QUORUM)
    running = peers.run_to(4)
    for each in running[2:]:
        each.kill()
    peers.tell("hold", None)
    reached = {}
    for each in running[:2]:
        until(lambda each=each: each.explanation() is not None and "it needs 3 of 4" in each.explanation(), each.output)
        reached[each.state] = each.last_round()
    # The time that a deadline would take, and more, changes nothing.
    time.sleep(2 * GRACE)
    for each in running[:2]:
        said = each.explanation()
        assert said is not None
        number = reached[each.state]
        assert f"round {number + 1} waits for round {number} of peers 2 (not connected), 3 (not connected)" in said
        assert "; it needs 3 of 4 peers and has 2" in said
        assert each.last_round() == reached[each.state] <= 5
        assert each.process.poll() is None
    back = peers.start(2)
    for each in [*running[:2], back]:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert each.result().rounds_completed == 8
    assert "peer 3" in running[0].last_words()


# --- the start --------------------------------------------------------------------------------------------------------


def test_the_start_wait_over_all_that_are_up_end_and_name_the_missing(mesh: Callable[..., Peers]) -> None:
    peers = mesh(5, rounds=3)
    running = [peers.start(i, "--start-wait", "3") for i in (0, 1, 3)]
    for each in running:
        code = each.ended(20)
        sentence = r"peers 2, 4 have not been reached within 3 s of the start; see .*start the same command again"
        assert_one_sentence(each.output, code, ExitCode.INCOMPLETE, sentence)
        assert each.last_round() == 0


def test_one_that_is_missing_at_the_start_is_named_in_the_singular(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    alone = peers.start(1, "--start-wait", "0.5")
    sentence = (
        r"peer 0 has not been reached within 0\.5 s of the start; see whether peer 0 runs at the address in the file, "
        r"with a certificate of the CA that is trusted here \('crad-mesh check' tells more\), and start .*"
    )
    code = alone.ended(20)
    assert_one_sentence(alone.output, code, ExitCode.INCOMPLETE, sentence)


def test_under_quorum_they_go_on_after_the_start_wait_and_report_the_subset(mesh: Callable[..., Peers]) -> None:
    peers = mesh(5, rounds=6, barrier=QUORUM)
    running = [peers.start(i, "--start-wait", "3") for i in (0, 1, 3)]
    for each in running:
        assert each.ended(40) == ExitCode.RESERVATIONS, each.output
        assert {record.missing_teachers for record in each.history()} == {(2, 4)}
        assert each.result().missing_teachers == (2, 4)
        assert each.manifest(6).missing == (2, 4)
        assert "6 of 6 rounds were trained without the newest model of peers 2, 4" in each.last_words()
        assert "peers 2, 4 had not said that the last round is done there when this peer left" in each.last_words()
        # The wait is paid once.
        assert sum(record.seconds.wait for record in each.history()) < 2 * 3


def test_two_of_five_are_too_few_for_a_start_under_quorum(mesh: Callable[..., Peers]) -> None:
    peers = mesh(5, rounds=6, barrier=QUORUM)
    running = [peers.start(i, "--start-wait", "3") for i in (1, 4)]  # enough to find one another
    for each in running:
        code = each.ended(20)
        sentence = "peers 0, 2, 3 have not been reached within 3 s of the start"
        assert_one_sentence(each.output, code, ExitCode.INCOMPLETE, sentence)
        assert each.last_round() == 0


# --- a slow one -------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_twenty_times_slower_is_waited_for(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=3, barrier={**QUORUM, "grace": 0.8})
    peers.tell("hold", 1)
    peers.tell("seconds", 0.075)
    peers.tell("seconds", 1.5, peer=1)  # longer than grace and the others' round times would allow
    running = peers.start_all()
    peers.connected(running)
    peers.tell("hold", None)
    for each in running:
        assert each.ended() == ExitCode.COMPLETE, each.output
        assert [len(record.teachers) for record in each.history()] == [2] * 3


def test_a_peer_that_becomes_slow_is_missed_at_first_and_then_waited_for(mesh: Callable[..., Peers]) -> None:
    """It says how long it took; before that, nobody could know."""
    peers = mesh(3, rounds=9, barrier={**QUORUM, "grace": 0.5})
    one, slow, two = peers.run_to(4)
    peers.tell("hold", 5, peer=1)
    peers.tell("hold", 7)
    for each in (one, two):
        each.reach(6)
    peers.tell("seconds", 1.5, peer=1)
    peers.tell("hold", 7, peer=1)
    for each in (one, two):
        until(lambda each=each: each.has(1, 6), "its round 6 is here")
    peers.tell("hold", None, peer=1)
    peers.tell("hold", None)
    for each in (one, slow, two):
        assert each.ended() == ExitCode.RESERVATIONS if each is not slow else each.ended() in (0, 11), each.output
    for each in (one, two):
        assert [r.round for r in each.history() if 1 in r.missing_teachers + r.stale_teachers] == [6, 7]
        assert [r.round for r in each.history() if 1 in r.teachers and r.round > 7] == [8, 9]
        assert all(r.seconds.wait > 1 for r in each.history() if r.round > 7)


# --- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "least"), [(4, 2), (5, 2)])
def test_a_min_of_half_or_less_is_refused_when_the_file_is_read(
    mesh: Callable[..., Peers], count: int, least: int
) -> None:
    peers = mesh(count, barrier={**QUORUM, "min": least})
    refused = peers.start(0)
    code = refused.ended(20)
    sentence = (
        rf"peers\.yaml: barrier\.min: {least} of {count} peers; it must be more than half, .*from {count // 2 + 1}"
    )
    assert_one_sentence(refused.output, code, ExitCode.CONFIGURATION, sentence)
    assert not refused.state.exists()


# --- crad-mesh up -----------------------------------------------------------------------------------------------------


def test_up_goes_on_without_a_peer_that_ends_with_an_error_and_says_so(mesh: Callable[..., Peers]) -> None:
    peers = mesh(4, rounds=9, barrier={**QUORUM, "grace": 2.5})
    peers.tell("fail", 4, peer=3)
    ended = up(peers)
    assert ended.returncode == ExitCode.RESERVATIONS, ended.stdout + ended.stderr
    assert re.search(r"peer 3 ended, and the others go on without it \(.*\): no more images", ended.stdout)
    assert "round 9 of 9: mean validation accuracy" in ended.stdout
    assert ended.stderr.startswith("crad-mesh: all 9 rounds are done, but not by peer 3: ")
    summary = json.loads((peers.folder / "out/summary.json").read_text())
    assert (summary["complete"], summary["best_round"]) == (False, None)
    assert [each["rounds_completed"] for each in summary["peers"]] == [9, 9, 9, 3]
    assert [each["missing_teachers"] for each in summary["peers"]] == [[3], [3], [3], []]

    peers.tell("fail", None, peer=3)  # mended: the same command brings it to the end, too
    ended = up(peers)
    assert ended.returncode == ExitCode.RESERVATIONS, ended.stdout + ended.stderr
    assert "all 9 rounds are done, with reservations: some were made without a peer" in ended.stderr
    summary = json.loads((peers.folder / "out/summary.json").read_text())
    assert summary["complete"] is True
    assert [each["rounds_completed"] for each in summary["peers"]] == [9, 9, 9, 9]
    # All that it needs for round 4 is on its disk, so it may train that before it hears how far the others are.
    assert summary["peers"][3]["skipped_rounds"] in ([4, 5, 6, 7, 8], [5, 6, 7, 8])
    again = up(peers)  # a finished run is shown, and ends as it did
    assert again.returncode == ExitCode.RESERVATIONS
    assert "holds the complete run" in again.stdout


def test_up_ends_when_too_few_are_left(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=9, barrier=QUORUM)
    peers.tell("fail", 3, peer=0)
    peers.tell("fail", 4, peer=2)
    ended = up(peers)
    assert ended.returncode == ExitCode.DATA, ended.stdout + ended.stderr
    assert "peer 0 ended, and the others go on without it" in ended.stdout
    assert ended.stderr.startswith("crad-mesh: peer 2 ended: no more images")


def test_under_policy_all_up_ends_with_the_first_peer_that_does(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=9)
    peers.tell("fail", 3, peer=1)
    ended = up(peers)
    assert ended.returncode == ExitCode.DATA, ended.stdout + ended.stderr
    assert ended.stderr.startswith("crad-mesh: peer 1 ended: no more images")
