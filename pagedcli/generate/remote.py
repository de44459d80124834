"""Files that lie elsewhere: anything with a scheme (s3://, gs://, memory://, ...) that fsspec opens."""

from __future__ import annotations

import re
from typing import IO, Any

from pagedcli.core.errors import CannotRunError, UsageError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")


def is_url(path: str) -> bool:
    """Whether a path names a file by scheme (`file://` and chained ones of fsspec included)."""
    return _SCHEME.match(path) is not None


def open_url(url: str, mode: str) -> IO[bytes]:
    """Open for reading ("rb") or writing ("wb"). UsageError, with the reason, when it cannot be."""
    import fsspec

    try:
        stream: IO[bytes] = fsspec.open(url, mode).open()
    except Exception as fault:  # each kind of store has errors of its own
        raise _refused(url, mode, fault) from fault
    return stream


def url_exists(url: str) -> bool:
    """Whether there is a file at `url`. UsageError when the store cannot be asked."""
    import fsspec

    try:
        store, path = fsspec.core.url_to_fs(url)
        return bool(store.exists(path))
    except Exception as fault:  # as above
        raise _refused(url, "rb", fault) from fault


def write_failed(url: str, fault: Exception) -> CannotRunError:
    """The error for a write that began and did not end well."""
    return CannotRunError(f"writing {url} failed: {_reason(fault)}; all rows are kept in the journal: run the same "
                          "command again and none is generated twice", "unwritable_output")


def _refused(url: str, mode: str, fault: Exception) -> UsageError:
    what, code = ("read", "unreadable_input") if mode == "rb" else ("write", "unwritable_output")
    return UsageError(f"cannot {what} {url}: {_reason(fault)}", code)


def _reason(fault: Exception) -> str:
    """What the store said; a missing driver's message names the package to install."""
    text: Any = str(fault).strip().split("\n")[0]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__
