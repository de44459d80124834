"""Separate random streams for each purpose, so that changing one never shifts another."""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np

from pagedcli.core.errors import UsageError


class Purpose(IntEnum):
    """What a random stream is for. The numbers are part of the format: never reuse or reorder them."""

    DATA = 0
    ARRIVALS = 1
    SAMPLING = 2
    TOKENS = 3
    TEXT = 4
    CONVERSATIONS = 5


def seed_sequence(seed: int, purpose: Purpose, *keys: int | str) -> np.random.SeedSequence:
    """The seed of one stream: `seed` as entropy, the purpose and keys as the spawn key.

    Strings are keyed by a stable hash, so a stream is the same in every process. Raises UsageError for a
    negative seed.
    """
    if seed < 0:
        raise UsageError(f"--seed = {seed}: must be at least 0")
    spawn = [int(purpose)]
    for key in keys:
        spawn.append(key if isinstance(key, int) else stable_hash(key))
    return np.random.SeedSequence(entropy=seed, spawn_key=tuple(spawn))


def generator(seed: int, purpose: Purpose, *keys: int | str) -> np.random.Generator:
    """A numpy generator on the stream (seed, purpose, keys)."""
    return np.random.Generator(np.random.PCG64(seed_sequence(seed, purpose, *keys)))


def stable_hash(text: str) -> int:
    """A 64-bit integer of a string, equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
