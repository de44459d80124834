"""Prompts of real words for synthetic workloads: plain English sentences from our own templates."""

from __future__ import annotations

from functools import cache

from pagedcli.workloads.lengths import load_sample
from pagedcli.workloads.streams import Purpose, generator

_POOL = 4096


@cache
def _sentences(seed: int) -> tuple[tuple[str, ...], ...]:
    """A pool of sentences as words; made once for a seed."""
    rng = generator(seed, Purpose.TEXT)
    lists = load_sample("words")

    def pick(kind: str) -> str:
        return str(lists[kind][int(rng.integers(len(lists[kind])))])

    pool = []
    for _ in range(_POOL):
        text = pick("plans").format(a=pick("how"), b=pick("how"), w=pick("who"), d=pick("did"), t=pick("thing"),
                                    u=pick("thing"), e=pick("when"))
        text = text.replace(" s ", "s ").replace(" ,", ",").replace(" .", ".")
        pool.append(tuple(text.split(" ")))
    return tuple(pool)


def words(count: int, seed: int, key: int) -> list[str]:
    """`count` words of connected sentences. The opening names `key`, so two prompts never begin alike."""
    if count < 1:
        return []
    rng = generator(seed, Purpose.TEXT, key)
    asks = load_sample("words")["ask"]
    opening = f"Note {key}: {asks[int(rng.integers(len(asks)))]}"
    out = opening.split(" ")
    pool = _sentences(seed)
    while len(out) < count:
        # Sentences average 11 words; draw about as many as are missing.
        for choice in rng.integers(_POOL, size=max(1, (count - len(out)) // 11)):
            out.extend(pool[int(choice)])
    return out[:count]


def prompt_text(tokens: int, seed: int, key: int) -> str:
    """A prompt of `tokens` words: common words are about one token each, and never less than one."""
    return " ".join(words(tokens, seed, key))
