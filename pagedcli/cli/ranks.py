"""Commands under torchrun: rank 0 does what was asked, the others only compute for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from pagedcli.core.errors import ExitStatus


@contextmanager
def leading_ranks(size: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Inside is rank 0 (or a run without torchrun). Any other rank serves plans until they end, then leaves with 0.

    Raises UsageError when torchrun started another number of processes than `size`.
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        yield
        return
    from pagedcli.execution.tensor_parallel import follow_if_follower, release_followers

    if follow_if_follower(size, variables):
        raise typer.Exit(ExitStatus.OK)
    try:
        yield
    finally:
        release_followers(size, variables)
