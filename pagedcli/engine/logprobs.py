"""Log-probabilities kept for output rows: compact in memory, on disk when they are many, read lazily."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from pagedcli.core.errors import CannotRunError
from pagedcli.core.wording import counted
from pagedcli.engine import draw_kernels

SPILL_BYTES = 64 << 20
"""Prompt log-probabilities of one request beyond this many bytes go to a temporary file."""


class TopLogprobs(Sequence[tuple[int, float]]):
    """(token, logprob) pairs, most likely first, in 8 bytes a pair. Never holds -inf or NaN. Equal to a like tuple."""

    __slots__ = ("_ids", "_logprobs")

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._ids = np.asarray(ids, np.int32)
        self._logprobs = np.asarray(logprobs, np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, float], ...]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(zip(self._ids[index].tolist(), self._logprobs[index].tolist(), strict=True))
        return int(self._ids[index]), float(self._logprobs[index])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids.tolist(), self._logprobs.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TopLogprobs({list(self[:4])}{'...' if len(self) > 4 else ''})"


def token_logprob(logit: float, log_sum: float) -> float:
    """float32 log-probability from a raw logit and its row's logsumexp (float64)."""
    return float(np.float32(np.float64(logit) - log_sum))


def top_logprobs(row: np.ndarray, peaks: np.ndarray, log_sum: float, k: int, chosen: int) -> TopLogprobs:
    """The k most likely tokens (-1: all) of a raw row [vocabulary] float32, and `chosen` if it is not one of them.

    Ties go by lowest id. Tokens of probability zero are left out.
    """
    if k == 0:
        ids = np.array([chosen])
    else:
        limit = len(row) if k < 0 else min(k, len(row))
        ids = np.empty(len(row), np.int64)
        ids = ids[:draw_kernels.top_entries(row, peaks, peaks.max(), limit, ids)]
        ids = ids[np.argsort(-row[ids], kind="stable")]
        if chosen not in ids:
            ids = np.append(ids, chosen)
    values = (row[ids].astype(np.float64) - log_sum).astype(np.float32)
    good = np.isfinite(values)
    return TopLogprobs(ids[good], values[good])


class _Records:
    """Fixed-size records by index, in memory or, past a limit, in a file that vanishes with its last user."""

    def __init__(self, count: int, size: int, limit: int) -> None:
        self._size = size
        self._file = None
        self._memory: np.ndarray | None = None
        if count * size <= limit:
            self._memory = np.zeros((count, size), np.uint8)
        else:
            try:
                # Kept open for as long as this object lives, so no `with`.
                self._file = tempfile.TemporaryFile(prefix="pagedcli-logprobs-")  # noqa: SIM115
            except OSError as fault:
                raise CannotRunError(f"prompt_logprobs need a temporary file of {counted(count * size, 'byte')} in "
                                     f"{tempfile.gettempdir()}, which failed: {fault}; set TMPDIR") from fault

    @property
    def spilled(self) -> bool:
        return self._file is not None

    def put(self, index: int, data: bytes) -> None:
        if self._memory is not None:
            self._memory[index] = np.frombuffer(data, np.uint8)
            return
        assert self._file is not None
        try:
            view, offset = memoryview(data), index * self._size
            while len(view):
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as fault:
            raise CannotRunError(f"cannot write prompt_logprobs to a temporary file in {tempfile.gettempdir()}: "
                                 f"{fault}; free space, set TMPDIR or ask for fewer") from fault

    def get(self, index: int) -> bytes:
        if self._memory is not None:
            return self._memory[index].tobytes()
        assert self._file is not None
        parts, offset, left = [], index * self._size, self._size
        while left:
            part = os.pread(self._file.fileno(), left, offset)
            if not part:
                raise CannotRunError("the temporary file with prompt_logprobs was cut short")
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return b"".join(parts)


class PromptLogprobs:
    """What the model thought of each prompt token, filled in any order and read once complete.

    Position p's entry comes from the row at p - 1; position 0 has none. Putting a position again changes nothing, so
    chunks may be computed anew after a preemption. With k = -1 whole rows are kept (4 bytes a vocabulary entry).
    """

    def __init__(self, prompt: Sequence[int], k: int, vocab_size: int, spill_bytes: int = SPILL_BYTES) -> None:
        self._prompt = prompt
        self._everything = k < 0 or k >= vocab_size
        self._k = k
        self._width = vocab_size
        self._have = np.zeros(len(prompt), bool)
        self._have[0] = True
        size = 4 * vocab_size if self._everything else 4 + 8 * (k + 1)
        self._records = _Records(len(prompt), size, spill_bytes)

    def __len__(self) -> int:
        return len(self._prompt)

    @property
    def complete(self) -> bool:
        return bool(self._have.all())

    @property
    def spilled(self) -> bool:
        """Whether the entries lie in a temporary file."""
        return self._records.spilled

    def has(self, position: int) -> bool:
        return bool(self._have[position])

    def put(self, position: int, row: np.ndarray, peaks: np.ndarray, log_sum: float) -> None:
        """Record the raw logits [vocabulary] float32 that predict the token at `position`."""
        if self._everything:
            data = (row.astype(np.float64) - log_sum).astype(np.float32).tobytes()
        else:
            top = top_logprobs(row, peaks, log_sum, self._k, self._prompt[position])
            record = np.zeros(1, self._record_type)
            record["count"] = len(top)
            record["ids"][0, :len(top)] = [token for token, _ in top]
            record["logprobs"][0, :len(top)] = [value for _, value in top]
            data = record.tobytes()
        self._records.put(position, data)
        self._have[position] = True

    def __getitem__(self, position: int) -> TopLogprobs | None:
        """Entry of one position: the top k and the prompt's own token, most likely first; None for position 0."""
        if position == 0:
            return None
        if not self._have[position]:
            raise KeyError(f"prompt position {position} has not been computed")
        data = self._records.get(position)
        if not self._everything:
            record = np.frombuffer(data, self._record_type)[0]
            count = int(record["count"])
            return TopLogprobs(record["ids"][:count], record["logprobs"][:count])
        values = np.frombuffer(data, np.float32)
        order = np.argsort(-values, kind="stable")
        return TopLogprobs(order[:int(np.isfinite(values).sum())], values[order][:int(np.isfinite(values).sum())])

    def __iter__(self) -> Iterator[TopLogprobs | None]:
        """Entries from position 0, one at a time."""
        return (self[position] for position in range(len(self)))

    def logprob(self, position: int) -> float | None:
        """Log-probability of the prompt's own token at `position`; None for the first, or where it is -inf."""
        if position == 0 or not self._have[position]:
            return None
        token = self._prompt[position]
        if self._everything:
            value = float(np.frombuffer(self._records.get(position), np.float32)[token])
            return value if math.isfinite(value) else None
        return dict(self[position] or ()).get(token)

    @property
    def _record_type(self) -> np.dtype:
        return np.dtype([("count", np.int32), ("ids", np.int32, self._k + 1), ("logprobs", np.float32, self._k + 1)])
