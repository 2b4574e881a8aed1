"""The first moments of a command, in which Ctrl-C would end Python with a traceback out of some import."""

from __future__ import annotations

import os
import signal

from crad_p2p.errors import ExitCode


def leave_on_signals(name: str) -> None:
    """Until something else is set up, Ctrl-C and SIGTERM end the process at once with a sentence.

    For the time in which nothing has been begun; ``crad_p2p.commands.interruptible`` and the event loops take over.
    """
    sentence = f"{name}: interrupted while it started; start the same command again to continue\n".encode()

    def leave(*_: object) -> None:
        os.write(2, sentence)
        os._exit(ExitCode.INCOMPLETE)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
