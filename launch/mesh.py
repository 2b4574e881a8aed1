"""Many real ``crad-peer`` processes on this machine: started, watched, started again if killed, and stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import grpc.aio

from crad_p2p.errors import CradError, ExitCode, IncompleteError, error_of
from crad_p2p.federation import Federation
from launch.authority import throwaway
from launch.children import environment
from launch.computing import Computing
from launch.forking import fork_server
from launch.quick import cores
from launch.view import Progress
from peer._proto.crad.v1 import peer_pb2
from peer.channels import RawStub, Waits, dial
from peer.intake import MessageError, parse
from peer.store import Store
from peer.tls import Tls
from peer.waiting import within

#: Seconds that peers get to leave after SIGTERM.
_GRACE = 8.0
#: Times that one peer is started before its being killed counts as a failure of the run.
_MAX_STARTS = 10
#: Seconds between two attempts to reach a peer's status.
_RETRY = 0.3
#: Peers that begin at the same time, for each core: until their data are loaded, or for so many seconds. All of a
#: hundred at once would leave no time to any of them for answering the others.
_BEGINNING, _LONGEST_BEGINNING = 8, 60.0


def tls_dir(out: Path, peer_id: int) -> Path:
    """Where the throw-away certificate of one peer of a local mesh is."""
    return out / "tls" / str(peer_id)


def peer_dir(out: Path, peer_id: int) -> Path:
    """State directory of one peer of a local mesh."""
    return out / "peers" / str(peer_id)


class Mesh:
    """Runs all peers of a federation to their end.

    Args:
        peers_file: the federation file that every peer reads.
        out: DIR; peer i keeps its state in DIR/peers/i and its log in DIR/peers/i/log.txt.
        recover: start every peer with --recover, which changes nothing where nothing was lost; one that is killed later
            is started again without it.

    Attributes:
        reservations: last words of the peers that finished with reservations (exit code 11).
        failed: last words of those without which the others went on, under policy ``quorum``.
    """

    def __init__(
        self,
        federation: Federation,
        peers_file: Path,
        out: Path,
        *,
        computing: Computing,
        recover: bool,
        progress: Progress,
    ) -> None:
        self._federation = federation
        self._peers_file = peers_file
        self._out = out
        self._options = computing.arguments()
        self._recover = recover
        self._progress = progress
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._forking: dict[str, str] = {}
        at_once = _BEGINNING * cores()
        self._beginning = asyncio.Semaphore(at_once)
        # The first to be started wait for the last, which may be as late.
        self._start_wait = Waits.start + _LONGEST_BEGINNING * (len(federation.peers) // at_once)
        self._is_started = {peer: asyncio.Event() for peer in federation.ids}  # once, whatever has become of it
        self._has_begun = {peer: asyncio.Event() for peer in federation.ids}
        self.reservations: dict[int, str] = {}
        self.failed: dict[int, str] = {}

    async def run(self) -> None:
        """Start every peer and wait until all have finished.

        Raises:
            CradError: the first failure of a peer, in its own words (under policy ``quorum`` the first that leaves too
                few); all others are stopped, and continue when the mesh is started again.
        """
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stopped.set)
        async with fork_server(self._out, self._progress.note) as self._forking:
            throwaway(self._out / "tls", self._federation.federation, self._federation.ids)  # while that one imports
            await self._run_all(stopped)

    async def _run_all(self, stopped: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch(peer)) for peer in self._federation.ids]
                watchers.append(group.create_task(self._end_on(stopped)))
                peers = [group.create_task(self._keep(peer)) for peer in self._federation.ids]
                await asyncio.wait(peers)
                for watcher in watchers:
                    watcher.cancel()
        except* CradError as errors:
            first = errors.exceptions[0]
            assert isinstance(first, CradError)
            raise first from None
        finally:
            await self._stop_all()

    async def _keep(self, peer: int) -> None:
        """Run one peer; start it again when something killed it."""
        kills, reached = 0, -1
        recover = self._recover
        while kills < _MAX_STARTS:
            status = await self._run_once(peer, ["--recover"] if recover else [])
            row = self._progress.rows.get(peer)
            recover = recover and row is not None and row.phase in ("start", "recover")  # killed before it was done
            if status == ExitCode.COMPLETE:
                return
            if status == ExitCode.RESERVATIONS:
                self.reservations[peer] = last_words(self._out, peer, status)
                return
            if status > 0:
                words = last_words(self._out, peer, status)
                if not self._can_do_without(peer):
                    raise error_of(status, f"peer {peer} ended: {words}")
                self.failed[peer] = words
                self._progress.drop(peer)
                self._progress.note(
                    f"peer {peer} ended, and the others go on without it (after their last round they serve on for it "
                    f"for a while): {words}"
                )
                return
            before, reached = reached, Store(peer_dir(self._out, peer)).last_round()
            kills = kills + 1 if reached == before else 1
            name = signal.Signals(-status).name
            self._progress.note(f"peer {peer} was killed by {name}; starting it again")
        raise IncompleteError(
            f"peer {peer} was killed {_MAX_STARTS} times without finishing a round in between; if the machine is short "
            f"of memory, use fewer peers or smaller architectures. Run the same command again to continue "
            f"(--out {self._out})"
        )

    def _can_do_without(self, peer: int) -> bool:
        barrier, size = self._federation.barrier, len(self._federation.peers)
        return barrier.policy == "quorum" and size - len({*self.failed, peer}) >= barrier.quorum(size)[0]

    async def _run_once(self, peer: int, more: list[str]) -> int:
        folder = peer_dir(self._out, peer)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # as crad-peer makes it
        command = [sys.executable, "-P", "-m", "peer", "--id", str(peer), "--peers", str(self._peers_file)]
        command += ["--state-dir", str(folder), "--tls-dir", str(tls_dir(self._out, peer))]
        command += ["--start-wait", f"{self._start_wait:g}", *self._options, *more]
        async with self._beginning:
            with (folder / "log.txt").open("ab") as log:
                # A session of its own, so that Ctrl-C reaches only this process, which then stops all in order.
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Should this process be killed, it stops as if told to.
                    env={**environment(signal.SIGTERM), **self._forking},
                )
            self._processes[peer] = process
            self._is_started[peer].set()
            either = [asyncio.ensure_future(each) for each in (process.wait(), self._has_begun[peer].wait())]
            try:
                await asyncio.wait(either, timeout=_LONGEST_BEGINNING, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in either:
                    each.cancel()
        return await process.wait()

    async def _watch(self, peer: int) -> None:
        """Keep the peer's row up to date, from its first start on."""
        await self._is_started[peer].wait()
        # With the peer's own certificate: what belongs to a site may look at its peer.
        tls = Tls(tls_dir(self._out, peer), self._federation.federation, peer)
        channel = dial(self._federation.peer(peer).address, tls, peer)
        stub = RawStub(channel)
        row, said = self._progress.rows[peer], ""
        try:
            while row.phase != "done":
                try:
                    async for raw in stub.Watch(peer_pb2.WatchRequest(progress=True)):
                        state = parse(peer_pb2.PeerState, raw)
                        row.round, row.phase, row.step, row.steps = state.round, state.phase, state.step, state.steps
                        if state.HasField("data") or state.phase == "recover":  # which is waiting for all others
                            self._has_begun[peer].set()
                        if state.HasField("validation_accuracy"):
                            row.validation_accuracy = state.validation_accuracy
                        if state.HasField("global_accuracy"):
                            row.global_accuracy = state.global_accuracy
                        self._progress.updated()
                except grpc.aio.AioRpcError:
                    pass  # not up yet, or starting again
                except MessageError as error:
                    self._has_begun[peer].set()
                    if str(error) != said:
                        said = str(error)
                        self._progress.note(f"peer {peer} cannot be shown as it is now: {said}")
                await asyncio.sleep(_RETRY)
        finally:
            await channel.close()

    async def _end_on(self, stopped: asyncio.Event) -> None:
        await stopped.wait()
        raise IncompleteError(f"stopped; run the same command again to continue (--out {self._out})")

    async def _stop_all(self) -> None:
        running = [process for process in self._processes.values() if process.returncode is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _GRACE
        for process in running:
            try:
                await within(max(0.0, deadline - time.monotonic()), process.wait())
            except TimeoutError:
                process.kill()
                await process.wait()


def last_words(out: Path, peer: int, status: int) -> str:
    """The last line of a peer's log, which says why it ended."""
    log = peer_dir(out, peer) / "log.txt"
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:  # its whole state directory may have been removed while it ran
        return (
            f"exit code {status}; its log {log}, which should say why, cannot be read ({error.strerror}): see what "
            f"became of {log.parent}"
        )
    said = lines[-1].removeprefix("crad-peer: ") if lines else "without a word"
    return f"{said} (log: {log})"
