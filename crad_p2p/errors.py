"""Exit codes and the errors that carry them.

An error a user can cause is a :class:`CradError`: its text names the thing, what was expected and found, and what to
do; the commands print it as one sentence, without a traceback, and end with its exit code (docs/exit-codes.md).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended. The numbers are part of the stable interface."""

    COMPLETE = 0
    USAGE = 2
    CONFIGURATION = 3
    PORT_TAKEN = 4
    ALREADY_RUNNING = 5
    CERTIFICATE = 6
    PEERS_DISAGREE = 7
    DATA = 8
    INCOMPLETE = 9
    LEARNER_FAILED = 10
    RESERVATIONS = 11
    AUDIT = 12


class CradError(Exception):
    """A failure with a sentence for the user and an exit code."""

    exit_code = ExitCode.INCOMPLETE


class UsageError(CradError):
    """The command line itself is off."""

    exit_code = ExitCode.USAGE


class ConfigurationError(CradError):
    """peers.yaml, or a value given on the command line, is not what it must be."""

    exit_code = ExitCode.CONFIGURATION


class PortTakenError(CradError):
    """The listening address is in use, or not of this machine."""

    exit_code = ExitCode.PORT_TAKEN


class AlreadyRunningError(CradError):
    """Another process holds this peer's state directory."""

    exit_code = ExitCode.ALREADY_RUNNING


class CertificateError(CradError):
    """The transport would not be safe: no certificate, or one that does not fit."""

    exit_code = ExitCode.CERTIFICATE


class PeersDisagreeError(CradError):
    """Two peers were started with different federations, software or data.

    Args:
        peer: the other one, which should find out as well.
    """

    exit_code = ExitCode.PEERS_DISAGREE

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class DataError(CradError):
    """The images or labels cannot be used."""

    exit_code = ExitCode.DATA


class IncompleteError(CradError):
    """The run ended before its last round."""

    exit_code = ExitCode.INCOMPLETE


class ReservationsError(CradError):
    """All rounds are done, but not as they should be: some without a peer, or with evidence against one."""

    exit_code = ExitCode.RESERVATIONS


class AuditError(CradError):
    """The manifests do not prove what they should."""

    exit_code = ExitCode.AUDIT


class LearnerFailedError(CradError):
    """The learner process ended with an error that a restart would not heal."""

    exit_code = ExitCode.LEARNER_FAILED


class DivergedError(LearnerFailedError):
    """Training gave values that are not finite."""


def error_of(exit_code: int, message: str) -> CradError:
    """The error class of an exit code, for messages that crossed a process boundary."""
    for kind in CradError.__subclasses__():
        if kind.exit_code == exit_code:
            return kind(message)
    return CradError(message)
