"""SIGTERM and Ctrl-C: noted when they come, acted on where a peer can end in order.

An exception out of nowhere, as Python's own handlers raise it, may end up in the middle of grpc.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from crad_p2p.errors import IncompleteError


class Signals:
    """The first signal that comes.

    Args:
        on_second: called when another comes, for whoever does not want to wait for the end in order.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        """Begin to note them; needs a running loop."""
        loop = asyncio.get_running_loop()
        self._told: asyncio.Future[str] = loop.create_future()
        self._on_second = on_second
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, number.name)

    def _note(self, name: str) -> None:
        if self._told.done():
            self._on_second()
        else:
            self._told.set_result(name)

    async def wait(self) -> str:
        """The name of the signal, once it comes."""
        return await asyncio.shield(self._told)

    async def unless_told(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this work, or end it when a signal comes.

        Raises:
            IncompleteError: a signal came.
        """
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._told]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise IncompleteError(
                    f"stopped by {self._told.result()} before it took part; start the same command again to continue"
                )
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])
