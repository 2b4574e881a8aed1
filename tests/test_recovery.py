"""A peer whose disk has lost rounds: refused, and brought back by ``--recover`` from what the others have had of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import (
    NOTHING,
    RESTORED,
    assert_refused,
    copy_of,
    digests,
    finish,
    manifests,
    put_back,
    stopped_at,
    two_last,
)
from processes import DEAF, Peer, Peers, assert_one_sentence, until, up

from crad_p2p.errors import ExitCode
from crad_p2p.manifest import Manifest
from peer.credentials import load_credentials
from peer.signatures import sign_manifest

# --- an older copy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restored", [5, 2])
def test_a_restored_copy_is_refused_and_recovered(mesh: Callable[..., Peers], restored: int) -> None:
    peers = mesh(3, rounds=9)
    others, backups = stopped_at(peers, 6, restored)
    put_back(backups[restored], peers.state(2))
    before = digests(peers.state(2))

    refused = peers.start(2)
    code = refused.ended(20)
    sentence = (
        rf"peer [01] has had round 6 of this peer, and the newest here is round {restored}: {RESTORED}\. "
        "Start the same command with --recover to fetch its last rounds back"
    )
    assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
    assert digests(peers.state(2)) == before  # nothing is touched
    assert all(each.process.poll() is None for each in others)

    back = peers.start(2, "--recover")
    back.says("learner on cpu")
    assert two_last(digests(peers.state(2))) == two_last(digests(backups[6]))
    assert two_last(manifests(peers.state(2))) == two_last(manifests(backups[6]))
    assert "round 6 of this peer is back, from peer" in back.output
    assert ("round 5 of this peer is back, from peer" in back.output) is (restored < 5)
    finish(peers, [*others, back], 9)
    history = back.history()
    expected = [*range(1, restored + 1), *range(max(5, restored + 1), 10)]
    assert [record.round for record in history] == expected
    assert [record.snapshot_sha256 for record in history if record.round in (5, 6)] == list(
        two_last(digests(backups[6])).values()
    )
    fetched = next(record for record in history if record.round == 6)
    assert (fetched.teachers, fetched.train_loss, fetched.missing_teachers) == ((0, 1), None, ())
    if lost := sorted(set(range(1, 10)) - set(expected)):
        assert f"has no lines for rounds {lost[0]} to {lost[-1]}, which are lost" in back.output
    for each in others:
        assert [record.round for record in each.history()] == list(range(1, 10))
        assert not list(each.state.glob("conflicts/*"))


def test_an_empty_directory_is_refused_and_recovered(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=7)
    others, backups = stopped_at(peers, 4)
    shutil.rmtree(peers.state(2))
    assert_refused(peers, "4")
    for each in others:
        assert "trained" not in each.output
        waits = "round 5 waits for round 4 of peer 2"
        assert each.explanation().startswith(("round 5 is being trained", waits)), each.explanation()
    back = peers.start(2, "--recover")
    finish(peers, [*others, back], 7)
    assert [record.round for record in back.history()] == [3, 4, 5, 6, 7]
    assert [r.snapshot_sha256 for r in back.history()][:2] == list(two_last(digests(backups[4])).values())


def test_a_disk_lost_while_nobody_teaches_yet(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6, method={"warmup_rounds": 4})
    others, backups = stopped_at(peers, 3)
    shutil.rmtree(peers.state(2))
    assert_refused(peers, "3")
    back = peers.start(2, "--recover")
    back.says("learner on cpu")
    assert two_last(digests(peers.state(2))) == two_last(digests(backups[3]))
    finish(peers, [*others, back], 6)


def test_up_with_recover(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6)
    peers.tell("fail", 4, peer=1)  # so that the run ends in its middle
    assert up(peers).returncode == ExitCode.DATA
    peers.tell("fail", None, peer=1)
    lost = peers.folder / "out/peers/2"
    before = digests(lost)
    shutil.rmtree(lost)
    refused = up(peers)
    assert refused.returncode == ExitCode.INCOMPLETE, refused.stdout + refused.stderr
    assert re.match(
        f"crad-mesh: peer 2 ended: peer [01] has had round [34] of this peer, and {NOTHING}: {RESTORED}",
        refused.stderr,
    )
    recovered = up(peers, "--recover")
    assert recovered.returncode == ExitCode.COMPLETE, recovered.stdout + recovered.stderr
    history = [json.loads(line) for line in (lost / "history.jsonl").read_text().splitlines()]
    assert history[0]["round"] in (2, 3)  # the last two came back, and the rest was trained
    assert history[-1]["round"] == 6
    assert {record["snapshot_sha256"] for record in history} & set(before.values())

    kept = two_last(digests(lost))
    shutil.rmtree(lost)
    recovered = up(peers, "--recover")  # also when the run was done
    assert recovered.returncode == ExitCode.COMPLETE, recovered.stdout + recovered.stderr
    assert digests(lost) == kept


def test_the_others_say_whom_they_wait_for(mesh: Callable[..., Peers]) -> None:
    """Their memory survives their own restart, also where the roll-back happened while they were down."""
    peers = mesh(3, rounds=7)
    others, backups = stopped_at(peers, 4, 2)
    for each in others:
        assert each.stop() < 5
        seen = json.loads((each.state / "seen.json").read_text())
        assert seen["2"] == {"round": 4, "sha256": digests(backups[4])["000004"]}
    put_back(backups[2], peers.state(2))
    peers.tell("hold", None)
    again = [peers.start(0), peers.start(1)]
    refused = peers.start(2)
    code = refused.ended(20)
    sentence = "has had round 4 of this peer, and the newest here is round 2"
    assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
    # Whoever was too slow to reach it before it ended waits for that; the other goes on with what it had of round 4.
    waits = re.compile(
        r"round 5 waits until peer 2 has been reached since the start"
        r"|round 6 waits for round 5 of peers? (\d, )?2 \(not connected\)"
    )
    for each in again:
        until(lambda each=each: waits.fullmatch(each.explanation()), "it says whom it waits for")
        assert each.process.poll() is None
    back = peers.start(2, "--recover")
    finish(peers, [*again, back], 7)


# --- a damaged directory ----------------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    path = folder / "snapshot.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def test_a_damaged_round_is_named_and_recovered(mesh: Callable[..., Peers]) -> None:
    """The last round or the one before; the federation waits through all of it."""
    peers = mesh(3, rounds=7)
    others, backups = stopped_at(peers, 4)
    cases: list[tuple[int, Callable[[Path], None], str]] = [
        (4, cut, r"snapshot\.safetensors does not have the digest that manifest\.json says"),
        (4, empty, r"manifest\.json: No such file"),
        (3, lose_manifest, r"manifest\.json: No such file"),
    ]
    for number, damage, reason in cases:
        put_back(backups[4], peers.state(2))
        folder = peers.state(2) / f"rounds/{number:06d}"
        damage(folder)
        refused = peers.start(2)
        code = refused.ended(20)
        sentence = rf"{folder} is damaged \({reason}.*\); start with --recover to fetch"
        assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)

        back = peers.start(2, "--recover")
        back.says("going on from round 4")
        assert two_last(digests(peers.state(2))) == two_last(digests(backups[4]))
        assert two_last(manifests(peers.state(2))) == two_last(manifests(backups[4]))
        assert f"round {number} of this peer is back" in back.output
        assert len(list((peers.state(2) / "set-aside").iterdir())) == 1
        back.says("learner on cpu")
        assert back.stop() < 5
    back = peers.start(2)
    finish(peers, [*others, back], 7)
    history = back.history()
    assert [record.round for record in history] == list(range(1, 8))
    assert history[3].train_loss == 1.0  # the line was there, and says more than the others know


def test_a_snapshot_that_goes_bad_while_its_owner_runs_ends_it_with_a_sentence(mesh: Callable[..., Peers]) -> None:
    """Those to whom it is sent see it first, and ask its owner to look at it."""
    peers = mesh(3, rounds=7)
    *others, owner = peers.run_to(4)
    for each in others:
        each.process.send_signal(signal.SIGSTOP)
    peers.tell("hold", 6)
    owner.reach(5)
    folder = owner.state / "rounds/000005"
    path = folder / "snapshot.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for each in others:
        each.process.send_signal(signal.SIGCONT)
    code = owner.ended(30)
    sentence = rf"{folder} is damaged \(snapshot\.safetensors does not have the digest .*\); start with --recover to .*"
    assert_one_sentence(owner.output, code, ExitCode.INCOMPLETE, sentence)
    back = peers.start(2, "--recover")
    back.says("going on from round 4")
    finish(peers, [*others, back], 7)


def test_a_last_round_that_nobody_has_had_is_made_again(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=7)
    *others, ahead = peers.run_to(4)
    backup = copy_of(ahead.state, "backup")
    for each in others:
        each.process.send_signal(signal.SIGSTOP)
    peers.tell("hold", 6)
    ahead.reach(5)
    ahead.kill()
    cut(ahead.state / "rounds/000005")
    for each in others:
        each.process.send_signal(signal.SIGCONT)
    back = peers.start(2, "--recover")
    back.says("going on from round 4")
    back.says("round 5 of 7 is published")
    assert digests(back.state)["000004"] == digests(backup)["000004"]
    assert "round 5 of this peer is back" not in back.output
    finish(peers, [*others, back], 7)
    assert [record.round for record in back.history()] == list(range(1, 8))


def test_files_beside_the_rounds_that_are_damaged_are_named(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=5)
    others, backups = stopped_at(peers, 3)
    for name, content, sentence in (
        ("seen.json", "[1]", r"seen\.json is damaged; .*Put back a copy, or remove it"),
        ("best.json", "{", r"best\.json is damaged; put back a copy, or remove it"),
        ("best.json", '{"round": "x", "accuracy": null}', r"best\.json is damaged; put back a copy, or remove it"),
        ("served.json", "1", r"served\.json is damaged; remove it, and the others are served once more"),
        (
            "history.jsonl",
            "{}\n" * 2 + (backups[3] / "history.jsonl").read_text(),
            r"history\.jsonl is damaged in line 1; put back a copy, or remove that line",
        ),
    ):
        put_back(backups[3], peers.state(1))
        (peers.state(1) / name).write_text(content)
        refused = peers.start(1)
        code = refused.ended(20)
        assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
    put_back(backups[3], peers.state(1))
    for path in peers.state(1).glob("received/*/0.json"):  # not made durable: a power cut can leave nothing in it
        path.write_bytes(b"")
    back = peers.start(1)
    finish(peers, [*others, back], 5)


def test_where_the_best_round_is_lost_the_best_of_the_others_stands(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=5)
    others, _ = stopped_at(peers, 3)
    best = peers.state(1) / "best.json"
    best.write_text('{"round": 1, "accuracy": 1.0}\n')
    back = peers.start(1)
    back.says("WARNING round 1, the best one so far, is not here; the best of the rounds to come stands")
    finish(peers, [*others, back], 5)
    assert back.result().best_round == 5


# --- --recover where there is nothing to do, or no way ----------------------------------------------------------------


def test_recover_changes_nothing_where_nothing_was_lost(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6)
    others, backups = stopped_at(peers, 4)
    back = peers.start(2, "--recover")
    back.says("INFO    nothing was lost: no other peer has had more of this one than is here")
    back.says("learner on cpu")
    assert digests(peers.state(2)) == digests(backups[4])
    assert (peers.state(2) / "rounds/000004/checkpoint.safetensors").read_bytes() == b"momentum"
    assert not (peers.state(2) / "set-aside").exists()
    finish(peers, [*others, back], 6)
    assert [record.round for record in back.history()] == list(range(1, 7))


def test_recover_of_a_peer_that_has_never_run(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    other = peers.start(0)
    other.says("listening")
    fresh = peers.start(1, "--recover")
    fresh.says("nothing was lost")
    finish(peers, [other, fresh], 3)


def test_recover_needs_enough_of_the_others(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6)
    others, _ = stopped_at(peers, 4)
    others[0].kill()
    shutil.rmtree(peers.state(2))
    start = time.monotonic()
    alone = peers.start(2, "--recover", "--start-wait", "1.5")
    code = alone.ended(20)
    assert time.monotonic() - start < 6
    sentence = (
        r"peer 0 did not answer within 1\.5 s, and may have had a later round of this peer than is here: start again "
        r"with --recover when all others are up"
    )
    assert_one_sentence(alone.output, code, ExitCode.INCOMPLETE, sentence)
    assert digests(peers.state(2)) == {}


def test_two_that_lost_their_disks_recover_at_the_same_time(mesh: Callable[..., Peers]) -> None:
    """Each needs the other's answer before it knows what it has lost."""
    peers = mesh(3, rounds=7)
    others, backups = stopped_at(peers, 4)
    before = {1: digests(others[1].state), 2: digests(backups[4])}
    assert others[1].stop() < 5
    for i in (1, 2):
        shutil.rmtree(peers.state(i))
    back = [peers.start(i, "--recover") for i in (1, 2)]
    for i, each in zip((1, 2), back, strict=True):
        each.says("going on from round 4")
        assert set(two_last(before[i]).items()) <= set(digests(peers.state(i)).items())
    assert "came back without any round" not in others[0].output  # it is being recovered, and says so
    finish(peers, [others[0], *back], 7)


def test_recovering_where_nobody_has_lost_anything(mesh: Callable[..., Peers]) -> None:
    """As a service manager would do it that always gives the option."""
    peers = mesh(3, rounds=4)
    for each in peers.run_to(2):
        assert each.stop() < 5
    again = peers.start_all("--recover")
    for each in again:
        each.says("nothing was lost")
    finish(peers, again, 4)


def test_with_a_quorum_enough_will_do_also_when_they_have_long_gone_on(
    mesh: Callable[..., Peers],
) -> None:
    peers = mesh(4, rounds=30, barrier={"policy": "quorum", "grace": 1.0})
    others, backups = stopped_at(peers, 4)
    peers.tell("hold", 15)
    for each in others:
        each.reach(14)
    others[0].kill()
    shutil.rmtree(peers.state(3))
    back = peers.start(3, "--recover", "--start-wait", "1")
    back.says("going on from round 4", 15)  # it does not wait for who has not answered
    back.says("WARNING the mesh is at round 14 and went on without this peer, which was at round 4")
    back.reach(14)
    assert set(digests(backups[4]).items()) >= set(list(digests(peers.state(3)).items())[:2])
    assert back.manifest(14).sha256 == digests(backups[4])["000004"]
    assert back.stop() < 5

    shutil.rmtree(peers.state(3))
    others[1].kill()
    alone = peers.start(3, "--recover", "--start-wait", "1")
    code = alone.ended(20)
    sentence = r"peers 0, 1 did not answer within 1 s, .*\(3 of 4 peers, this one included\)"
    assert_one_sentence(alone.output, code, ExitCode.INCOMPLETE, sentence)


def test_rounds_that_nobody_keeps_any_more_cannot_be_recovered(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6)
    others, _ = stopped_at(peers, 4)
    shutil.rmtree(peers.state(2))
    for each in others:
        for path in each.state.glob("received/*/2.safetensors"):
            path.unlink()
    back = peers.start(2, "--recover")
    code = back.ended(20)
    sentence = "round 4 of this peer has been with peers 0, 1, and nobody keeps it any more: put back a copy"
    assert_one_sentence(back.output, code, ExitCode.INCOMPLETE, sentence)


def test_a_holder_whose_manifest_has_another_digest_is_passed_over(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=7)
    others, backups = stopped_at(peers, 4)
    shutil.rmtree(peers.state(2))
    path = others[0].state / "received/000004/2.json"
    path.write_text(path.read_text().replace(json.loads(path.read_text())["sha256"], "0" * 64))
    back = peers.start(2, "--recover")
    back.says("round 4 of this peer is back, from peer 1")
    back.says("learner on cpu")
    assert digests(peers.state(2)) == two_last(digests(backups[4]))
    finish(peers, [*others, back], 7)


def remember_another(peer: Peer, *, signed_by: Path | None = None) -> str:
    """Make a peer remember other bytes of round 4 of peer 2, with a manifest for them or not; the real digest."""
    seen = peer.state / "seen.json"
    tree = json.loads(seen.read_text())
    known, tree["2"]["sha256"] = tree["2"]["sha256"], "ab" * 32
    seen.write_text(json.dumps(tree))
    if signed_by is not None:
        path = peer.state / "received/000004/2.json"
        other = Manifest.from_bytes(path.read_bytes()).model_copy(update={"sha256": "ab" * 32})
        path.write_bytes(sign_manifest(other, load_credentials(signed_by, "one", 2)).to_bytes())
    return str(known)


def test_what_others_claim_to_have_had_and_this_peer_has_not_signed_is_not_believed(
    mesh: Callable[..., Peers],
) -> None:
    """Else any single member could end any other one's run."""
    peers = mesh(3, rounds=6)
    others, two = stopped_at(peers, 4)
    del two
    assert others[1].stop() < 5
    remember_another(others[1])
    running = [others[0], peers.start(1), peers.start(2)]
    running[2].says(
        r"WARNING peer 1 says that it has had round 4 of this peer, and does not prove it: the manifest is of round 4"
    )
    peers.tell("hold", None)
    assert [each.ended() for each in running] == [0, ExitCode.RESERVATIONS, 0], running[1].output


def test_what_nobody_can_prove_any_more_is_said_when_recovering(mesh: Callable[..., Peers]) -> None:
    """As when the CA of that time has been taken out of ca.pem: then "nothing was lost" would be wrong."""
    peers = mesh(3, rounds=6)
    others, _ = stopped_at(peers, 4)
    for each in others:
        assert each.stop() < 5
        remember_another(each)
    again = [peers.start(i) for i in (0, 1)]
    for each in again:
        each.says("listening")
    shutil.rmtree(peers.state(2))
    back = peers.start(2, "--recover")
    back.says(
        r"WARNING peer 0 \(round 4\) and peer 1 \(round 4\) may have had later rounds of this peer than is here, and "
        r"cannot prove it: .* put that CA into its ca\.pem too, and start it with --recover again"
    )
    back.says("learner on cpu")
    assert "nothing was lost" not in back.output


def test_two_different_memories_of_one_round_are_not_chosen_from(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6)
    others, _ = stopped_at(peers, 4)
    assert others[1].stop() < 5
    known = remember_another(others[1], signed_by=peers.folder / "crad-tls/2")
    again = peers.start(1)
    again.says("listening")
    shutil.rmtree(peers.state(2))
    back = peers.start(2, "--recover")
    code = back.ended(20)
    sentence = (
        r"the other peers have had 2 different snapshots of round 4 of peer 2 \(sha256 (?=.*abababababab…)"
        rf"(?=.*{known[:12]}…).*\): it has run twice\. Put back the newest state directory"
    )
    assert_one_sentence(back.output, code, ExitCode.INCOMPLETE, sentence)


def test_with_a_quorum_those_who_lost_theirs_too_do_not_count(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6, barrier={"policy": "quorum", "grace": 5.0})
    running = peers.run_to(4)
    for each in running:
        each.kill()
    before = digests(peers.state(1))
    for i in (1, 2):
        shutil.rmtree(peers.state(i))
    both = [peers.start(i, "--recover", "--start-wait", "3") for i in (1, 2)]
    for each in both:
        code = each.ended(20)
        sentence = "peer 0 did not answer within 3 s, .* when enough are up whose disks are whole .*"
        assert_one_sentence(each.output, code, ExitCode.INCOMPLETE, sentence)
        assert each.last_round() == -1
    all_three = [peers.start(0), *(peers.start(i, "--recover") for i in (1, 2))]
    all_three[1].says("round 4 of this peer is back, from peer 0")
    for each in all_three:
        each.says("learner on cpu")
    assert digests(peers.state(1)) == two_last(before)
    finish(peers, all_three, 6)


@pytest.mark.parametrize("reached", [5, 6])
def test_other_bytes_than_the_others_have_had_are_refused_and_replaced(
    mesh: Callable[..., Peers], reached: int
) -> None:
    """A copy that went on by itself meanwhile: its rounds after the copy are not those that the others know."""
    peers = mesh(3, rounds=8)
    others, backups = stopped_at(peers, 5, 3)
    put_back(backups[3], peers.state(2))
    peers.tell("salt", "other", peer=2)
    peers.tell("hold", reached + 1, peer=2)
    deaf = peers.start(2, command=DEAF)
    deaf.reach(reached)
    assert deaf.stop() < 5
    peers.tell("salt", None, peer=2)
    refused = peers.start(2)
    code = refused.ended(20)
    here, there = digests(peers.state(2))["000005"], digests(backups[5])["000005"]
    sentence = f"peer [01] has had round 5 of this peer with sha256 {there[:12]}…, and here it has {here[:12]}…: this "
    assert re.fullmatch(f"crad-peer: {sentence}.*", refused.last_words())
    assert code == ExitCode.INCOMPLETE

    back = peers.start(2, "--recover")
    back.says("round 5 of this peer is back, from peer")
    back.says("learner on cpu")
    assert two_last(digests(peers.state(2))) == two_last(digests(backups[5]))
    aside = sorted(path.name[:6] for path in (peers.state(2) / "set-aside").iterdir())
    assert aside[-2:] == [f"{reached - 1:06d}", f"{reached:06d}"]
    peers.tell("hold", None, peer=2)
    peers.tell("hold", None)
    for each in [*others, back]:
        assert each.ended() in (ExitCode.COMPLETE, ExitCode.RESERVATIONS), each.output  # whether they saw what it did
    history = back.history()
    assert [record.round for record in history] == list(range(1, 9))
    assert [record.snapshot_sha256 for record in history[3:5]] == list(two_last(digests(backups[5])).values())
    for each in others:
        assert each.manifest(8).missing == ()
        assert [record.round for record in each.history()] == list(range(1, 9))


def test_a_learner_that_is_killed_while_rounds_are_recovered(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    (peers.control / "die").write_text("")
    broken = peers.start(1, "--recover")
    code = broken.ended(20)
    sentence = r"the learner process was killed by SIGKILL while it started; .*Start the same command again"
    assert_one_sentence(broken.output, code, ExitCode.LEARNER_FAILED, sentence)


def test_a_stop_while_rounds_are_recovered(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    for number in (signal.SIGTERM, signal.SIGINT):
        waiting = peers.start(1, "--recover")
        waiting.says("peer 0 at .*; trying again")
        assert waiting.stop(number) < 5
        sentence = f"stopped by {number.name} before it took part; start the same command again to continue"
        assert_one_sentence(waiting.output, waiting.process.returncode, ExitCode.INCOMPLETE, sentence)


# --- with real learners -----------------------------------------------------------------------------------------------


def test_real_learners_go_on_with_a_recovered_model_at_the_round_of_the_mesh(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, light=False, rounds=100_000, barrier={"policy": "quorum", "grace": 0.5})
    running = peers.start_all()
    running[2].reach(14)  # what the start took is not among the recent round times any more
    assert running[2].stop() < 5
    before = digests(running[2].state)
    last = int(max(before))
    shutil.rmtree(running[2].state)
    for each in running[:2]:
        each.reach(last + 4)
    back = peers.start(2, "--recover")
    back.says("WARNING the mesh is at round .* going on from there with the model of round")
    until(lambda: any(record.skipped_rounds for record in back.history()), "it has rejoined")
    *recovered, rejoined = back.history()[:3]
    assert all(record.snapshot_sha256 == before[f"{record.round:06d}"] for record in recovered)
    assert rejoined.skipped_rounds == tuple(range(recovered[-1].round + 1, rejoined.round))
    assert rejoined.snapshot_sha256 == recovered[-1].snapshot_sha256
    until(lambda: any(record.train_loss and record.teachers for record in back.history()), "it learns from the others")
    trained = next(record for record in back.history() if record.train_loss)
    assert trained.snapshot_sha256 != rejoined.snapshot_sha256
    for each in [*running[:2], back]:
        assert each.stop() < 5
