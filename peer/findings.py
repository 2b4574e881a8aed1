"""What a check finds: one line each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from crad_p2p.errors import CradError, ExitCode


class Level(StrEnum):
    """How bad it is. A warning may be nothing: a peer that cannot be reached may only not be started yet."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One line of a check.

    Attributes:
        what: was looked at, in a word or two.
        remedy: what to do; empty if nothing, or if the text says it.
        exit_code: of a failure: that with which ``crad-peer`` would end.
    """

    level: Level
    what: str
    text: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.COMPLETE

    @property
    def sentence(self) -> str:
        """Text and remedy."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def ok(what: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, what, text)


def warning(what: str, text: str, remedy: str = "") -> Finding:
    """A peer can be started all the same."""
    return Finding(Level.WARNING, what, text, remedy)


def failure(what: str, exit_code: ExitCode, text: str, remedy: str = "") -> Finding:
    """A peer that is started would end, or never begin a round."""
    return Finding(Level.FAILURE, what, text, remedy, exit_code)


def failed_by(what: str, error: CradError) -> Finding:
    """The error that ``crad-peer`` would end with; its sentence says what to do."""
    return failure(what, error.exit_code, str(error))
