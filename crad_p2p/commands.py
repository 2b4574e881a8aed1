"""How a command ends: with an exit code, and one sentence where something is wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from crad_p2p.errors import CradError, ExitCode, IncompleteError
from crad_p2p.lines import fold, width_of

#: What typer ends with after Ctrl-C, by version.
_INTERRUPTED = (1, 130)


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an error with a sentence."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    except KeyboardInterrupt:
        raise IncompleteError(f"interrupted; {advice}") from None
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_command(app: typer.Typer, name: str) -> NoReturn:
    """Run a typer app and leave the process with its exit code."""
    try:
        app(prog_name=name)
    except CradError as error:
        _complain(f"{name}: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        _complain(f"{name}: {what}; mend that and start the same command again")
        sys.exit(ExitCode.INCOMPLETE)
    except SystemExit as ending:
        if ending.code not in _INTERRUPTED:
            raise
        closed = isinstance(ending.__context__, BrokenPipeError)  # as head(1) does; typer and rich end like this then
        what = "its output was closed before the end" if closed else "interrupted; start the same command again"
        _complain(f"{name}: {what}")
        sys.exit(ExitCode.INCOMPLETE)
    sys.exit(ExitCode.COMPLETE)


def _complain(sentence: str) -> None:
    print(fold(sentence, width_of(sys.stderr)), file=sys.stderr)
