"""A gRPC server that a call's name cannot end.

``grpc.aio`` decodes the name of every call in its main loop, and one that is not UTF-8, be it of malice or of a flipped
bit, ends the server for good, with all connections. So the calls that there are are registered with gRPC's core, which
compares bytes, and all others are dropped without a look at their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from crad_p2p import __version__
from crad_p2p.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: With these this was tried.
_KNOWN = "'grpcio>=1.85,<1.86'"
#: Seconds after a call that could not be taken.
_PAUSE = 0.01


def make_server(
    options: Sequence[tuple[str, Any]],
    service: str,
    handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]],
    on_unknown: Callable[[], None],
) -> grpc.aio.Server:
    """A server of one service that has not started.

    Args:
        handlers: of each call, by its name.
        on_unknown: called for each call by another name.

    Raises:
        ConfigurationError: this grpcio has other insides than those that are known here.
    """
    server: Any = grpc.aio.server(options=options)
    try:
        server._server = _core(options, on_unknown)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"grpcio {grpc.__version__} is not known to crad-p2p {__version__} ({error}), and with its server any "
            f"single damaged call could end this peer: install {_KNOWN}, or a newer version of crad-p2p"
        ) from None
    server.add_registered_method_handlers(service, dict(handlers))
    return server  # type: ignore[no-any-return]


def _core(options: Sequence[tuple[str, Any]], on_unknown: Callable[[], None]) -> Any:
    make_future = cygrpc.AioServer._make_request_call_future

    class Core(cygrpc.AioServer):  # type: ignore[misc]
        def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
            """The next call of this name; with None, of any name that is not registered: never, as far as seen here."""
            if method is not None:
                future: asyncio.Future[Any] = make_future(self, method)
                return future
            never = asyncio.get_running_loop().create_future()
            dropping = asyncio.get_running_loop().create_task(self._drop_others())
            never.add_done_callback(lambda _: dropping.cancel())
            return never

        async def _drop_others(self) -> None:
            while self.is_running():
                try:
                    await self._request_call()  # what is not kept is ended by core
                except Exception as error:  # one call failed in core, or the server stops
                    logger.debug("a call by an unknown name could not be dropped: %s", error)
                    await asyncio.sleep(_PAUSE)  # should it fail again and again, not in a tight loop
                else:
                    on_unknown()

    return Core(cygrpc.get_working_loop(), None, (), (), tuple(options), None)
