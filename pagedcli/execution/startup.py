"""Starting quickly: what costs time before the first token and can be avoided."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection, inside; what is alive at the end is then left out of every later one.

    Importing torch and transformers makes over a million objects that stay. Collections during it take a fifth of its
    time (3.7 against 2.9 s of processor time here), and each full one later would look at all of them again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()
