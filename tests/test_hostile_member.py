"""A member with a valid certificate that means no good: what it says ends, misleads and stalls nobody else."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable

from processes import Peers, doctored

from crad_p2p.errors import ExitCode

QUORUM = {"policy": "quorum", "grace": 1.0, "max_staleness": 2}
UNSIGNED = doctored(
    "import peer.publishing, peer.cli; peer.publishing.sign_manifest = lambda manifest, _: manifest; peer.cli.main()"
)


#: After round 2 it shows a manifest of the last one, which it has signed.
CLAIMING_THE_LAST_ROUND = doctored(
    """
import peer.publishing, peer.cli, peer.server
from peer._proto.crad.v1 import peer_pb2
from peer.intake import document_digest
real = peer.publishing.Publisher.show
def show(self, *arguments):
    real(self, *arguments)
    if self._store.last_round() >= 2:
        manifest = self._store.manifest(self._store.last_round()).model_copy(update=dict(round=7, model_round=7))
        document = self._signed(manifest).to_bytes()
        self._status.update(round=7, manifest=document, manifest_sha256=document_digest(document))
peer.publishing.Publisher.show = show
honest = peer.server.PeerServicer.GetManifest
async def answer(self, request, call):
    state = self._status.state
    if state.round < 7:
        return await honest(self, request, call)
    return peer_pb2.GetManifestReply(document=state.manifest, manifest_sha256=state.manifest_sha256)
peer.server.PeerServicer.GetManifest = answer
peer.cli.main()
"""
)


def test_who_claims_to_be_far_ahead_makes_nobody_skip_rounds(mesh: Callable[..., Peers]) -> None:
    """Under policy quorum, also where one other peer and this one are enough for a round."""
    peers = mesh(3, rounds=7, barrier=QUORUM, linger=3.0)
    peers.tell("seconds", 0.1)
    good = [peers.start(0), peers.start(1)]
    peers.start(2, command=CLAIMING_THE_LAST_ROUND)
    for each in good:
        assert each.ended() in (ExitCode.COMPLETE, ExitCode.RESERVATIONS), each.output
        assert [record.round for record in each.history()] == list(range(1, 8))
        assert "went on without this peer" not in each.output


def test_a_manifest_of_an_older_round_that_must_not_be_used_ends_nobody(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=6, barrier=QUORUM, linger=3.0)
    peers.tell("hold", 1, peer=2)  # it stays at round 0, which could still teach the others' round 3
    good = [peers.start(0, "--start-wait", "5"), peers.start(1, "--start-wait", "5")]
    peers.start(2, command=UNSIGNED)
    for each in good:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert [record.round for record in each.history()] == list(range(1, 7))
        assert "is not signed" in each.output


def test_who_says_that_its_round_is_gone_is_waited_for(mesh: Callable[..., Peers]) -> None:
    """Under policy all nothing can go on without it; but it must not end the others."""
    gone = doctored(
        """
import grpc, pathlib, peer.server, peer.cli
real = peer.server.PeerServicer.GetSnapshot
async def get(self, request, call):
    if request.round == 2 and pathlib.Path("hide").exists():
        await self._gone(request.peer, request.round, call)
    async for chunk in real(self, request, call):
        yield chunk
peer.server.PeerServicer.GetSnapshot = get
import peer.exchange; peer.exchange._ASK_AGAIN = 0.5
peer.cli.main()
"""
    )
    peers = mesh(3, rounds=4, linger=3.0)
    (peers.folder / "hide").touch()
    running = [peers.start(i, command=gone) for i in range(3)]
    for each in running:
        each.says(r"WARNING round 2 is needed here of peer \d, but it answers: .*; waiting for it")
    (peers.folder / "hide").unlink()
    for each in running:
        assert each.ended() == 0, each.output


def test_a_peer_without_memory_of_its_data_ends_if_they_are_not_those_of_the_others(mesh: Callable[..., Peers]) -> None:
    peers = mesh(3, rounds=4)
    running = peers.run_to(2)
    running[2].kill()
    shutil.rmtree(peers.state(2))
    odd = peers.start(2, "--recover", LIGHT_CLASSES="even,queer")
    assert odd.ended() == ExitCode.PEERS_DISAGREE, odd.output
    right = peers.start(2)
    peers.tell("hold", None)
    for each in (*running[:2], right):
        assert each.ended() == 0, each.output
    remembered = json.loads((right.state / "data.json").read_text())
    assert remembered["class_names"] == ["even", "odd"]


def test_one_that_lies_about_the_data_does_not_end_a_peer_that_lost_its_disk(mesh: Callable[..., Peers]) -> None:
    """Until another one says that they are the same, it cannot know; but one out of two is not most of them."""
    lying = doctored(
        """
import peer.exchange, peer.node, peer.cli
real = peer.exchange.Exchange.use
def use(self, intake, data, **options):
    data.class_names[:] = ["even", "evil"]
    self._have_same_data |= set(self._links)  # what it says itself does not end it
    real(self, intake, data, **options)
peer.exchange.Exchange.use = use
peer.cli.main()
"""
    )
    silent = doctored(
        """
import asyncio, os, pathlib, peer.exchange, peer.cli
real = peer.exchange.Exchange.use
def use(self, *arguments, **options):
    async def later():
        while not pathlib.Path(os.environ["LIGHT_CONTROL"], "speak").exists():
            await asyncio.sleep(0.05)
        real(self, *arguments, **options)
    self._spawn(later())
peer.exchange.Exchange.use = use
peer.cli.main()
"""
    )
    peers = mesh(3, rounds=4)
    running = peers.run_to(2)
    for each in running:
        each.kill()
    (peers.state(0) / "data.json").unlink()
    shutil.rmtree(peers.state(1))
    peers.start(0, command=lying)
    other = peers.start(2, command=silent)
    lost = peers.start(1, "--recover")
    lost.says("peer 0 has other data than this peer: the class list has 'evil' as class 1 on peer 0 and 'odd'")
    peers.tell("speak", "")
    peers.tell("hold", None)
    for each in (lost, other):
        assert each.ended() == 0, each.output


def test_one_that_says_in_the_middle_of_the_run_that_it_leaves_is_waited_for_and_called_again(
    mesh: Callable[..., Peers],
) -> None:
    leaving = doctored(
        """
import peer.status, peer.cli
real = peer.status.Status.watch
told = set()
async def watch(self, **options):
    async for state in real(self, **options):
        if state.round == 1 and len(told) < 2:
            told.add(id(options))
            state.leaving = True
        yield state
peer.status.Status.watch = watch
peer.cli.main()
"""
    )
    peers = mesh(3, rounds=4)
    running = [peers.start(0), peers.start(1), peers.start(2, command=leaving)]
    for each in running:
        assert each.ended() == 0, each.output


def test_who_never_says_how_fast_it_is_is_waited_for_once(mesh: Callable[..., Peers]) -> None:
    """Its snapshots do not come either. It gets the start wait for its first round, and then as long as the others."""
    mute = doctored(
        """
import asyncio, peer.status, peer.server, peer.cli
real = peer.status.Status.update
peer.status.Status.update = lambda self, **fields: real(self, **{**fields, "busy_seconds": 0.0})
async def get(self, request, call):
    await asyncio.sleep(1000)
    yield
peer.server.PeerServicer.GetSnapshot = get
peer.cli.main()
"""
    )
    peers = mesh(3, rounds=5, barrier=QUORUM, linger=2.0)
    good = [peers.start(i, "--start-wait", "4") for i in range(2)]
    peers.start(2, "--start-wait", "4", command=mute)
    begun = time.monotonic()
    for each in good:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
    assert time.monotonic() - begun < 4 * 5 + 5
