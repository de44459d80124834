"""Packed weights kept on disk, so that later starts read them as they are needed, without torch or transformers.

A copy holds what the probe needs too: the logits of the model's own eager forward. So a start from a copy is tried
against the model's own answer like any other; one that fails, or whose source has changed, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedcli import __version__
from pagedcli.attention.host_arrays import HOST_DTYPES, lazy_zeros, words_of
from pagedcli.core.devices import HOST
from pagedcli.core.dtypes import dtype_name
from pagedcli.execution.gguf_cache import cache_dir, place_digest
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.native_weights import NativeWeights, rebuild, tensors
from pagedcli.execution.seals import file_sum, word_sum

FORMAT = 3
"""Raise it when the packing or what a copy holds changes."""
LEAST_BYTES, MOST_BYTES = 64 << 20, 4 << 30
"""Packed weights worth a copy: smaller ones load in no time, larger ones would fill a disk unasked."""
FREE_SHARE = 4
"""A copy is kept only where the disk has this many times its size free."""
ALIGNED = 64
NUMBERS = ("vocab_size", "hidden", "eps", "rotary_scale")


class PackedCopy:
    """A copy read back: what the probe and the executor need of a model that is not there itself.

    `config` is the model's, with its type's defaults filled in.
    """

    device = HOST

    def __init__(self, folder: Path, weights: NativeWeights, judged: NDArray[np.float32],
                 config: Mapping[str, Any]) -> None:
        self.folder, self.weights, self.config = folder, weights, config
        self.specs, self.vocab_size, self.dtype = weights.specs, weights.vocab_size, weights.dtype
        self._judged = judged

    def eager(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, T, vocab_size] that the model's own forward gave for the probe's ids when the copy was made."""
        assert ids.shape == self._judged.shape[:2], "a copy answers the probe's question only"
        return self._judged


def copy_folder(source: ModelSource, dtype: str) -> Path | None:
    """Where the copy of a model's weights in `dtype` lies or would lie; None for a model without weight files.

    The name carries a digest of what it was made from: the weight files' names, sizes and times of change, the config
    and the versions of all that had a part in it.
    """
    if source.folder is None or source.dummy:
        return None
    folder = source.folder.resolve()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256(repr((FORMAT, __version__, version("torch"), version("transformers"))).encode())
    digest.update(json.dumps(source.read_config(), sort_keys=True).encode())
    for file in files:
        facts = file.stat()  # of what a link points to: the hub's cache is made of links
        digest.update(repr((file.name, facts.st_size, facts.st_mtime_ns)).encode())
    return cache_dir() / "packed" / f"{_family(source, dtype)}{digest.hexdigest()[:16]}"


def find_copy(source: ModelSource, dtype: str) -> PackedCopy | None:
    """The copy of a model's weights in `dtype`, if there is one that can be read."""
    folder = copy_folder(source, dtype)
    if folder is None or not folder.is_dir():
        return None
    try:
        facts = json.loads((folder / "facts.json").read_text("utf-8"))
        found = _read(folder / "weights.bin", facts["tensors"], facts["sum"])
        return PackedCopy(folder, rebuild(facts, found), found["judged"], facts["config"])
    except (OSError, ValueError, KeyError, TypeError):  # cut short, or made by something else: it is made anew
        drop_copy(folder)
        return None


def keep_copy(source: ModelSource, config: Mapping[str, Any], weights: NativeWeights,
              judged: NDArray[np.float32]) -> str | None:
    """Write a copy, replacing older ones of the same model and type. A note on what was done, None when nothing was.

    It appears by one rename, so it is whole or absent. Never an error: a run does not need it.
    """
    folder = copy_folder(source, dtype_name(weights.dtype))
    if folder is None:
        return None
    parts = [*tensors(weights), ("judged", np.ascontiguousarray(judged))]
    size = sum(array.nbytes for _, array in parts)
    if not LEAST_BYTES <= size <= MOST_BYTES or folder.is_dir():
        return None
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(parent).free < FREE_SHARE * size:
            return f"no packed copy of the weights kept: less than {FREE_SHARE * size:,} bytes free in {parent}"
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=parent))
        try:
            table = _write(scratch / "weights.bin", parts)
            facts = {"specs": [asdict(spec) for spec in weights.specs], "config": dict(config), "tensors": table,
                     "sum": file_sum(scratch / "weights.bin"), **{name: getattr(weights, name) for name in NUMBERS}}
            (scratch / "facts.json").write_text(json.dumps(facts), "utf-8")
            scratch.chmod(0o755)
            for old in parent.glob(f"{_family(source, dtype_name(weights.dtype))}*"):
                if old != folder:
                    drop_copy(old)
            try:
                os.rename(scratch, folder)
            except OSError:
                if not folder.is_dir():  # else another process was as quick
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, TypeError, ValueError) as fault:
        return f"no packed copy of the weights kept: {fault}"
    return f"packed weights kept in {folder} for the next start"


def drop_copy(folder: Path) -> None:
    """Remove a copy that is of no use."""
    shutil.rmtree(folder, ignore_errors=True)


def _family(source: ModelSource, dtype: str) -> str:
    """How the names of all copies of one model in one type begin."""
    place = place_digest(source.weights_folder)
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', source.name).lstrip('.-')}-{place}-{dtype}-"


def _write(file: Path, parts: list[tuple[str, NDArray[Any]]]) -> list[list[Any]]:
    """The arrays one after another, each from a multiple of ALIGNED on; [name, dtype, shape, offset] of each."""
    table: list[list[Any]] = []
    with file.open("wb") as stream:
        for name, array in parts:
            stream.write(bytes(-stream.tell() % ALIGNED))
            table.append([name, dtype_name(array.dtype), list(array.shape), stream.tell()])
            stream.write(words_of(np.ascontiguousarray(array)).data)
        stream.flush()
        os.fsync(stream.fileno())
    return table


def _read(file: Path, table: list[list[Any]], expected: int) -> dict[str, NDArray[Any]]:
    """The arrays as views of one run of memory in large pages. OSError when the file is not as it was written."""
    total = file.stat().st_size
    memory = lazy_zeros((total,), np.dtype(np.uint8))
    view, done = memory.data, 0
    with file.open("rb", buffering=0) as stream:
        while done < total:
            count = stream.readinto(view[done:])
            if not count:
                raise OSError(f"{file} was cut short while it was read")
            done += count
    if word_sum(memory) != expected:
        raise OSError(f"{file} holds other bytes than were written")
    found = {}
    for name, kind, shape, offset in table:
        dtype = HOST_DTYPES[kind]
        length = dtype.itemsize
        for side in shape:
            length *= side
        if offset + length > total:
            raise OSError(f"{file} ends before {name} does")
        found[name] = memory[offset:offset + length].view(dtype).reshape(shape)
    return found
