"""Named sets from the Hugging Face cache on this machine, or from the Hub when it can be reached.

Off line the Hub's own client retries for half a minute; here one short look decides, so that a run without a
network goes on in seconds.
"""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from pagedcli.core.errors import UsageError
from pagedcli.workloads.readers import Record, Table, read_table, table_of
from pagedcli.workloads.spec import HubSource

PROBE_SECONDS = 2.0
_TRUE = frozenset({"1", "on", "yes", "true"})


def _home() -> Path:
    if value := os.environ.get("HF_HOME"):
        return Path(value).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "huggingface"


def hub_cache() -> Path:
    """The folder of files downloaded from the Hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            return Path(value).expanduser()
    return _home() / "hub"


def datasets_cache() -> Path:
    """The folder of sets prepared by `datasets`."""
    value = os.environ.get("HF_DATASETS_CACHE")
    return Path(value).expanduser() if value else _home() / "datasets"


def offline_by_environment() -> str | None:
    """The variable that forbids the network, if one is set."""
    return next((name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
                 if os.environ.get(name, "").lower() in _TRUE), None)


def _newest(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda p: (-p.stat().st_mtime, p.name))


def has_cached(source: HubSource) -> bool:
    """Whether the set lies in this machine's cache, without reading it."""
    return bool(_snapshot(source) or _prepared(source))


def cached(source: HubSource) -> tuple[Table, str] | None:
    """The set from this machine's cache and where it was found, or None."""
    files = _snapshot(source)
    if files:
        return _joined(files), f"Hugging Face cache, {source.repo}"
    prepared = _prepared(source)
    if prepared:
        return _arrow(prepared), f"Hugging Face datasets cache, {source.repo}"
    return None


def _snapshot(source: HubSource) -> list[Path]:
    """The set's files in the newest downloaded snapshot that holds them."""
    folder = hub_cache() / f"datasets--{source.repo.replace('/', '--')}" / "snapshots"
    for snapshot in _newest(folder.iterdir()) if folder.is_dir() else []:
        files = sorted(p for p in snapshot.glob(source.data_files) if p.exists())
        if files:
            return files
    return []


def _joined(files: list[Path]) -> Table:
    tables = [read_table(path) for path in files]
    return table_of(tables[0].name, (record for table in tables for record in table.records))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _prepared(source: HubSource) -> list[Path]:
    """Arrow files of the split that `datasets` prepared earlier, in order."""
    root = datasets_cache()
    wanted = _plain(source.repo)
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if folder.is_dir() and _plain(folder.name) == wanted:
            found = [p for p in folder.rglob("*.arrow")
                     if source.split in p.stem.split("-") and not p.name.startswith("cache-")]
            if found:
                newest = _newest(found)[0].parent
                return sorted(p for p in found if p.parent == newest)
    return []


def _arrow(files: list[Path]) -> Table:
    import pyarrow as pa

    rows = []
    for path in files:
        try:
            with pa.memory_map(str(path)) as mapped:
                rows += pa.ipc.open_stream(mapped).read_all().to_pylist()
        except pa.ArrowException as fault:
            raise UsageError(f"{path}: damaged file in the datasets cache ({fault}); delete its folder",
                             "bad_trace") from None
    name = files[0].name
    return table_of(name, (Record(f"{name} row {n}", row) for n, row in enumerate(rows, start=1)))


def reachable(timeout: float = PROBE_SECONDS) -> str | None:
    """None when the Hub answers within `timeout` seconds, else why it does not.

    Runs in a thread that is left behind at the deadline: a name look-up cannot be given a time limit of its own.
    """
    from huggingface_hub.constants import ENDPOINT

    outcome: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(ENDPOINT, method="HEAD")
            urllib.request.urlopen(request, timeout=timeout).close()
            outcome.append(None)
        except urllib.error.HTTPError:
            outcome.append(None)
        except Exception as fault:
            reason = getattr(fault, "reason", fault)
            outcome.append(str(getattr(reason, "strerror", None) or reason))

    worker = threading.Thread(target=ask, daemon=True)
    worker.start()
    worker.join(timeout + 0.5)
    return outcome[0] if outcome else f"no answer within {timeout:g} s"


def from_hub(source: HubSource, root: Path | None = None, cache_dir: Path | None = None) -> Table:
    """The set through `datasets`: from the Hub, or from `root/<owner>/<name>` when a folder stands in for it.

    Raises whatever `datasets` raises; the caller turns it into a note.
    """
    import datasets

    place = source.repo if root is None else str(root / source.repo)
    loaded = datasets.load_dataset(
        place, data_files={source.split: source.data_files}, split=source.split,
        cache_dir=None if cache_dir is None else str(cache_dir),
        download_config=datasets.DownloadConfig(max_retries=1))
    return table_of(source.repo, (Record(f"{source.repo} row {n}", dict(row)) for n, row in enumerate(loaded, start=1)))
