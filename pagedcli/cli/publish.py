"""Where the rows of a finished job go: a file, a pipe, a store."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from pagedcli.cli.environment import Environment
from pagedcli.cli.paths import Target
from pagedcli.core.errors import PagedError

if TYPE_CHECKING:
    from pagedcli.generate.journal import Journal


def publish(environment: Environment, target: Target, journal: Journal) -> None:
    """Put the finished rows where they belong, in input order. CannotRunError when that refuses them; the journal is
    then kept."""
    if target.url is not None:
        _upload(target.url, journal)
    elif target.path is None:
        try:
            journal.stream(environment.stdout)
        except BaseException:
            _discard_stdout()
            raise
    elif target.stream:
        stream = target.path.open("wb")
        try:
            journal.stream(stream)
        finally:
            with suppress(OSError):  # a device that refused the rows refuses them again on closing
                stream.close()
    else:
        journal.publish(target.path)


def _upload(url: str, journal: Journal) -> None:
    """Write the rows to a store. The journal goes only once the store has taken and closed the file."""
    from pagedcli.generate.remote import open_url, write_failed

    try:
        with open_url(url, "wb") as stream:
            for piece in journal.ordered():
                stream.write(piece)
    except PagedError:
        raise
    except Exception as fault:  # each kind of store has errors of its own
        raise write_failed(url, fault) from fault
    journal.remove()


def _discard_stdout() -> None:
    """Keep the interpreter from complaining about a closed pipe a second time when it exits."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        return
