"""What one pass over rows of logits tells: the maximum, the sum of exponentials, and whether a row is fit to use."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from sys import modules

import numpy as np

from pagedcli.attention.cpu_team import Team, threads
from pagedcli.core.errors import CannotRunError
from pagedcli.core.sequence import Sequence
from pagedcli.engine import row_kernels as kernels


@cache
def _team(torch_in_use: bool) -> Team:
    """One team for all rows, on torch's threads where it is in use: making threads costs more than the rows do."""
    del torch_in_use
    return Team()


@dataclass(slots=True)
class RowStats:
    """Statistics of the rows `index` of `values` [rows, vocabulary] float32, as `row_kernels.row_stats` fills them."""

    values: np.ndarray
    index: np.ndarray
    status: np.ndarray
    best: np.ndarray
    peaks: np.ndarray
    sums: np.ndarray
    log_sum: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, index: Items[int]) -> RowStats:
        count, blocks = len(index), -(-values.shape[1] // kernels.BLOCK)
        rows = cls(values, np.array(index, np.int64), np.empty(count, np.int64), np.empty(count, np.int64),
                   np.empty((count, blocks), np.float32), np.empty((count, blocks), np.float64),
                   np.empty(count, np.float64))
        if count:
            rows._fill()
        return rows

    def _fill(self) -> None:
        out = (self.status, self.best, self.peaks, self.sums, self.log_sum)
        if len(self.index) * self.values.shape[1] < kernels.TEAM_ENTRIES or not self.values.flags.c_contiguous:
            kernels.row_stats(self.values, self.index, *out)
            return
        block = np.zeros(24, np.int64)
        block[:10] = (len(self.index), self.values.shape[1], self.peaks.shape[1],
                      *(array.ctypes.data for array in (self.values, self.index, *out)))
        _team("torch" in modules).run(kernels.row_stats_part().address, block.ctypes.data, threads())

    def row(self, place: int) -> np.ndarray:
        return self.values[self.index[place]]

    def logprobs(self, tokens: Items[Items[int]]) -> list[float]:
        """Log-probabilities (see logprobs.token_logprob) of some tokens of each row, row after row."""
        places = np.repeat(np.arange(len(tokens)), [len(item) for item in tokens])
        flat = np.fromiter((token for item in tokens for token in item), np.int64, len(places))
        logits = self.values[self.index[places], flat].astype(np.float64)
        found: list[float] = (logits - self.log_sum[places]).astype(np.float32).tolist()
        return found

    def refuse_bad(self, owners: Items[Sequence], when: str) -> None:
        """Raises CannotRunError for the first row that no token can be drawn from."""
        for place in np.flatnonzero(self.status).tolist():
            seq = owners[place]
            fault = ("hold NaN or infinity" if self.status[place] == kernels.NOT_A_NUMBER
                     else "allow no token (all are -inf)")
            raise CannotRunError(
                f"request {seq.group.request.key!r} (sequence {seq.id}, position {seq.length}): its logits {when} "
                f"{fault}; try --dtype fp32, or check the weights" + ("" if when == "from the model" else
                                                                     ", bad_words and min_tokens"))
