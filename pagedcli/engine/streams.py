"""Random numbers by counter: a draw is a pure function of who asks, so its neighbours and its history cannot matter.

The generator is Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
vectorised over rows. The key is a hash of (run or request seed, request key), the counter holds (sample, position).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

StreamKey = tuple[int, int]
"""Two 32-bit words that name one request's family of streams."""


def stream_key(seed: int, request_key: str) -> StreamKey:
    """The key of a request's streams. Any integer is a valid seed."""
    digest = hashlib.blake2b(f"{seed}\x1f{request_key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10. `counters` [4, rows] and `keys` [2, rows] hold 32-bit words; so does the answer, [4, rows]."""
    c0, c1, c2, c3 = counters
    k0, k1 = keys
    for _ in range(ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _WORD) ^ c1 ^ k0, second & _LOW, (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(
    keys: Sequence[StreamKey], samples: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) a row, on a grid of 2**-53, for (key, sample, position of the token to be drawn)."""
    rows = len(keys)
    if not rows:
        return np.empty(0, np.float64)
    key_words = np.array(keys, np.uint64).T
    counters = np.zeros((4, rows), np.uint64)
    counters[0] = samples
    counters[1] = positions
    words = philox(counters, key_words)
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
