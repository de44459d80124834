"""Every fault a user can meet, and the exit status each one ends with."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit codes of every command."""

    OK = 0
    ROW_ERRORS = 1
    USAGE = 2
    CANNOT_RUN = 3
    INTERRUPTED = 130


class PagedError(Exception):
    """Base of all faults that reach a user as one message, never as a traceback.

    `code` is a short snake_case name that scripts can match on.
    """

    exit_status = ExitStatus.CANNOT_RUN

    def __init__(self, message: str, code: str = "cannot_run") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class UsageError(PagedError):
    """The command line, a configuration or an input file as a whole is wrong."""

    exit_status = ExitStatus.USAGE

    def __init__(self, message: str, code: str = "usage") -> None:
        super().__init__(message, code)


class CannotRunError(PagedError):
    """The command is fine but this machine, model or memory cannot run it."""


class RequestError(PagedError):
    """One request is wrong; the others go on. Becomes the `error` object of its row."""

    exit_status = ExitStatus.ROW_ERRORS

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code)
