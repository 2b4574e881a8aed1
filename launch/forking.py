"""The fork server of a local mesh: torch is imported once, and shared, for all learners of this machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from crad_p2p import forking
from launch.children import environment
from peer.waiting import within

#: Seconds that it gets to end after SIGTERM; its processes have ended before.
_GRACE = 3.0


@asynccontextmanager
async def fork_server(
    out: Path, note: Callable[[str], None], module: str = "crad_p2p.learner"
) -> AsyncIterator[dict[str, str]]:
    """Run one for as long as the context lasts. It is not waited for: who asks it, waits.

    Args:
        out: DIR; its socket and what it complains of are there.
        note: called with a sentence where there can be none; every learner is then started by itself.
        module: what it becomes.

    Yields:
        entries for the environment of the peers that are to use it.
    """
    path, log = out / "fork-server.sock", out / "fork-server.log"
    if not forking.is_supported():
        yield {}
        return
    try:
        listener = forking.listen(path)
    except OSError as error:
        note(f"{path}: {error.strerror or error}; the learners share no memory, and start more slowly")
        yield {}
        return
    with listener, log.open("wb") as file:
        # A session of its own, so that Ctrl-C reaches only this process; a death of this one is a SIGTERM.
        process = await asyncio.create_subprocess_exec(
            *forking.command(listener, module),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env=environment(signal.SIGTERM),
        )
    try:
        yield {forking.NAME: str(path)}
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await within(_GRACE, process.wait())
        except TimeoutError:
            process.kill()
            await process.wait()
        with suppress(OSError):  # DIR may be gone
            path.unlink()
        with suppress(OSError):
            if not log.stat().st_size:
                log.unlink()
