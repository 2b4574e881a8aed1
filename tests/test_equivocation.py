"""A peer that shows different snapshots of one round to different peers, or at different times."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from processes import DEAF, Peer, Peers, free_port, until

from crad_p2p.errors import ExitCode
from crad_p2p.manifest import Manifest

LAST_WORDS = "crad-peer: all 7 rounds are done, with reservations: there is evidence that a peer published twice, in .*"


def evidence(peer: Peer, name: str) -> dict[str, object]:
    path = peer.state / "conflicts" / name
    tree: dict[str, object] = json.loads(path.read_text())
    return tree


def kept(peer: Peer) -> list[str]:
    return sorted(path.name for path in peer.state.glob("conflicts/*"))


def documents(tree: dict[str, object]) -> dict[str, Manifest]:
    manifests = tree["manifests"]
    assert isinstance(manifests, dict)
    return {name: Manifest.from_bytes(text.encode()) for name, text in manifests.items()}


def remembers(peer: Peer, other: int) -> int:
    """The newest round of another peer that is durably remembered here."""
    number: int = json.loads((peer.state / "seen.json").read_text())[str(other)]["round"]
    return number


def assert_said(peer: Peer, round_number: int, first: str, first_source: str, second: str, second_source: str) -> None:
    """One line of level ERROR with all that there is to know."""
    path = peer.state / f"conflicts/peer-2-round-{round_number}.json"
    line = (
        f"ERROR   two different snapshots of round {round_number} of peer 2 are about: {first[:12]}… ({first_source}) "
        f"and {second[:12]}… ({second_source}); peer 2 has published twice, or one of those who say so is wrong; "
        f"evidence is kept in {path}"
    )
    until(lambda: line in peer.output, f"{line} in {peer.output}", 10)  # the file is there a moment earlier


def in_step(peers: Peers, running: list[Peer], number: int) -> None:
    """Let all go on to this round: nobody waits for both faces, so one of them could be left behind."""
    peers.tell("hold", number + 1)
    for each in running:
        each.reach(number)
        me = int(each.manifest(number).peer)
        for other in {0, 1, 2, 3} - {me}:
            until(lambda each=each, other=other: each.has(other, number), f"{each.state} has round {number} of {other}")


def test_a_peer_with_two_faces_is_noticed_by_everybody_one_round_later(mesh: Callable[..., Peers]) -> None:
    """Peer 2 runs twice, and takes no notice of what it is told: peer 1 sees another one than peers 0 and 3."""
    peers = mesh(4, rounds=7)
    port = free_port()
    other_file = peers.write_file(peers.folder / "other", {2: port})
    peers.tell("hold", 1)
    zero, three = peers.start(0), peers.start(3)
    one = peers.start(1, file=other_file)
    face = peers.start(2, command=DEAF)
    other_face = peers.start(2, file=other_file, command=DEAF, state=peers.state("2b"), LIGHT_SALT="other@3")
    everybody = [zero, one, three, face, other_face]
    for number in range(4):
        in_step(peers, everybody, number)
    for each, by in ((zero, face), (three, face), (one, other_face)):
        until(lambda each=each: each.has(2, 3), "round 3 of peer 2 is here")
        assert by.manifest(3).sha256 == Manifest.from_bytes((each.state / "received/000003/2.json").read_bytes()).sha256
        assert each.last_round() == 3  # it waits
    a, b = face.manifest(3).sha256, other_face.manifest(3).sha256
    assert a != b
    assert face.manifest(2).sha256 == other_face.manifest(2).sha256
    for each in everybody:
        assert kept(each) == []  # nobody can know yet

    peers.tell("hold", 5)
    for each in everybody:
        each.reach(4)
        until(lambda each=each: kept(each) == ["peer-2-round-3.json"], f"it has evidence: {each.output}")
    own, published = "its own manifest", "published here"
    assert_said(zero, 3, a, own, b, "taught round 4 of peer 1")
    one.says(rf"{b[:12]}… \({own}\) and {a[:12]}… \(taught round 4 of peer [03]\)")
    assert_said(three, 3, a, own, b, "taught round 4 of peer 1")
    assert_said(face, 3, a, published, b, "taught round 4 of peer 1")  # it is said to have published something else
    other_face.says(rf"{b[:12]}… \({published}\) and {a[:12]}… \(taught round 4 of peer [03]\)")

    for each, digest in ((zero, a), (three, a), (face, a)):
        tree = evidence(each, "peer-2-round-3.json")
        assert (tree["peer"], tree["round"], tree["first"], tree["second"]) == (2, 3, a, b)
        says, shown = documents(tree).values()
        assert list(documents(tree)) == ["peer 1, round 4", "peer 2, round 3, as it was here"]
        assert {(c.peer, c.round): c.sha256 for c in says.consumed}[2, 3] == b
        assert (shown.peer, shown.round, shown.sha256) == (2, 3, digest)
    for number in (5, 6):
        in_step(peers, everybody, number)
    peers.tell("hold", 8)  # a peer that has finished leaves without waiting for a face that it does not see
    for each in everybody:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert re.fullmatch(LAST_WORDS, each.last_words()), each.last_words()
        assert "Traceback" not in each.output
        assert [record.round for record in each.history()] == list(range(1, 8))
        assert {*kept(each)} >= {f"peer-2-round-{number}.json" for number in (3, 4, 5)}
        assert all(name.startswith("peer-2-") for name in kept(each))


def test_other_bytes_of_a_round_that_was_here_are_noticed_also_after_a_restart(mesh: Callable[..., Peers]) -> None:
    """Nothing of it has to be fetched, so what it shows is compared with what was here."""
    peers = mesh(3, rounds=7)
    running = peers.run_to(3)
    ignored = shutil.ignore_patterns("*.partial", ".staging*")  # files of a running service
    backup = Path(shutil.copytree(running[2].state, peers.folder / "backup", ignore=ignored))
    peers.go_to(4, running)
    for each in running[:2]:
        until(lambda each=each: remembers(each, 2) == 4, f"round 4 of peer 2 is remembered: {each.output}")
    for each in running:
        assert each.stop() < 5
    first = running[2].manifest(4).sha256
    shutil.rmtree(running[2].state)
    shutil.copytree(backup, running[2].state)
    zero, one = peers.start(0), peers.start(1)
    deaf = peers.start(2, command=DEAF, LIGHT_SALT="other")
    deaf.reach(4)
    second = deaf.manifest(4).sha256
    assert second != first
    for each in (zero, one):
        until(lambda each=each: kept(each) == ["peer-2-round-4.json"], f"it has evidence: {each.output}", 20)
        each.says(r"WARNING peer 2 came back at round 3, but its round 4 has been here|ERROR   two different")
        sources = {"seen here before the last start", "its own manifest"}
        tree = evidence(each, "peer-2-round-4.json")
        assert {tree["first"], tree["second"]} == {first, second}
        assert {tree["first_source"], tree["second_source"]} == sources
        assert [(m.round, m.sha256) for m in documents(tree).values()] == [(4, second), (4, first)]
        assert each.manifest(4).sha256
