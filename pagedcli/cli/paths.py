"""Where a job's output and journal lie."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.cli.bounds import check_place, check_writable
from pagedcli.core.errors import UsageError
from pagedcli.generate.remote import is_url, url_exists


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a job. `path` None is standard output; `stream`: a pipe or device, written in place.

    A regular file is replaced in one rename. Its journal lies beside it as OUT.partial; that of a stream lies in the
    temporary folder, named by what the run is, so that the same run finds it again. So does that of a `url`, which is
    a stream too.
    """

    path: Path | None
    stream: bool
    url: str | None = None

    @property
    def name(self) -> str:
        if self.url is not None:
            return self.url
        return "standard output" if self.path is None else str(self.path)

    def journal(self, settings: Mapping[str, Any]) -> Path:
        if self.path is not None and not self.stream:
            return self.path.with_name(self.path.name + ".partial")
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
        return Path(tempfile.gettempdir()) / f"pagedcli-{os.getuid()}-{digest}.partial"


def find_target(source: str, output: str | None, overwrite: bool) -> Target:
    """Decide on the output. Raises UsageError when it cannot be written, exists, or is the input."""
    if output == "-" or (output is None and source == "-"):
        return Target(None, True)
    if output is None and is_url(source):
        raise UsageError(f"INPUT {source} is not a local file, so --output must say where the rows go",
                         "unwritable_output")
    if output is not None and is_url(output):
        if not overwrite and url_exists(output):
            raise UsageError(f"{output} exists: use --overwrite to replace it once all rows are done, or choose "
                             "another --output", "output_exists")
        return Target(None, True, output)
    path = Path(output if output is not None else source.removesuffix(".jsonl") + ".out.jsonl")
    path = Path(os.path.realpath(path))
    check_place("--output", path)
    if path.exists():
        if not stat.S_ISREG(path.stat().st_mode):
            return Target(path, True)
        if source != "-" and not is_url(source) and os.path.exists(source) and os.path.samefile(source, path):
            raise UsageError(f"--output {path} is the input itself: choose another file", "unwritable_output")
        if not overwrite:
            raise UsageError(f"{path} exists: use --overwrite to replace it once all rows are done, or choose another "
                             "--output", "output_exists")
    return Target(path, False)


def summary_path(given: str, source: str, target: Target, overwrite: bool) -> Path:
    """Where --json-summary goes. UsageError when it would replace the input, the output, the journal or any file."""
    if given == "-":
        raise UsageError("--json-summary -: the summary goes to a file of its own, since standard output may hold "
                         "rows; name one (/dev/stderr works too)")
    path = Path(given)
    if not path.exists() or path.is_file() or path.is_dir():  # a pipe behind /dev/stderr has no path of its own
        path = Path(os.path.realpath(given))
    taken = {"the output": target.path, "the journal": None if target.path is None or target.stream else
             target.journal({})}
    if source != "-" and not is_url(source):
        taken["the input"] = Path(os.path.realpath(source))
    for what, other in taken.items():
        if other is not None and path == other:
            raise UsageError(f"--json-summary {given} is {what}: choose another file")
    if path.exists() and stat.S_ISREG(path.stat().st_mode) and not overwrite:
        raise UsageError(f"--json-summary {given} exists: use --overwrite to replace it, or choose another file",
                         "output_exists")
    if not path.exists() or path.is_file() or path.is_dir():
        check_writable("--json-summary", path)  # now, not after hours of work
    return path
