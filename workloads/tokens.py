"""Token ids of exactly the right length for each request, the same ids where requests share content."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import numpy as np

from pagedcli.core.errors import UsageError
from pagedcli.workloads.spec import TraceRequest
from pagedcli.workloads.streams import Purpose, generator
from pagedcli.workloads.traces import MOONCAKE_BLOCK

_CHUNK = 512
_WORD = re.compile(r"\w+|[^\w\s]")

Encode = Callable[[str], Sequence[int]]


def estimate_tokens(text: str) -> int:
    """Tokens of a text when there is no tokenizer: a word costs one for each six letters, a sign one."""
    return sum(1 if len(piece) <= 6 else -(-len(piece) // 6) for piece in _WORD.findall(text))


class _Stream:
    """An endless, randomly accessible stream of token ids for one (seed, key)."""

    def __init__(self, vocab: int, seed: int, avoid: Collection[int], *key: int | str) -> None:
        self._vocab, self._seed, self._key = vocab, seed, key
        self._avoid = np.array(sorted({i for i in avoid if 0 <= i < vocab}), dtype=np.int64)

    def _chunk(self, number: int) -> list[int]:
        rng = generator(self._seed, Purpose.TOKENS, *self._key, number)
        ids = rng.integers(self._vocab - len(self._avoid), size=_CHUNK)
        # Ids are drawn among the allowed ones: step over each avoided id at or below.
        for banned in self._avoid:
            ids += ids >= banned
        listed: list[int] = ids.tolist()
        return listed

    def take(self, start: int, count: int) -> list[int]:
        """Ids at positions start .. start + count - 1."""
        if count <= 0:
            return []
        first, last = start // _CHUNK, (start + count - 1) // _CHUNK
        ids = [i for number in range(first, last + 1) for i in self._chunk(number)]
        skip = start - first * _CHUNK
        return ids[skip:skip + count]


def token_ids(request: TraceRequest, vocab: int, seed: int, encode: Encode | None = None,
              avoid: Collection[int] = ()) -> tuple[int, ...]:
    """Ids of a request's prompt: exactly `prompt_len` of them, each in [0, vocab), deterministic.

    Where content is shared, ids are: the first `prefix_len` of one `prefix_id`, the blocks of one Mooncake hash, the
    overlapping windows of one conversation. All else is drawn from the request's own stream. With `encode` (a
    tokenizer), text is used where the request has it, cut to length, or drawn out with ids from its stream when it
    falls short. Without it ids are random. Ids in `avoid` (special tokens) are never drawn.

    Raises UsageError when `vocab` leaves no id to draw, or an id of the source lies outside it.
    """
    if vocab - len({i for i in avoid if 0 <= i < vocab}) < 2:
        raise UsageError(f"vocabulary of {vocab} ids less {len(set(avoid))} special ones: at least 2 are needed")
    if request.token_ids:
        worst = max(request.token_ids)
        if worst >= vocab:
            raise UsageError(f"request {request.index}: prompt_token_ids holds {worst}, but the model's vocabulary "
                             f"ends at {vocab - 1}")
        return request.token_ids[:request.prompt_len]

    def stream(*key: int | str) -> _Stream:
        return _Stream(vocab, seed, avoid, *key)

    if encode is not None and request.prompt is not None:
        return tuple(_from_text(request, encode, stream))
    if request.block_hashes:
        ids: list[int] = []
        for block in request.block_hashes:
            ids += stream("block", block).take(0, min(MOONCAKE_BLOCK, request.prompt_len - len(ids)))
    elif request.conversation is not None and not request.prefix_len:
        return tuple(stream("conversation", request.conversation).take(request.offset, request.prompt_len))
    else:
        ids = stream("prefix", request.prefix_id or "").take(0, min(request.prefix_len, request.prompt_len))
    ids += stream("request", request.index).take(0, request.prompt_len - len(ids))
    return tuple(ids)


def _from_text(request: TraceRequest, encode: Encode, stream: Callable[..., _Stream]) -> list[int]:
    text = request.prompt or ""
    ids: list[int] = []
    if request.prefix_len and request.prefix_text:
        ids = list(encode(request.prefix_text))[:request.prefix_len]
        ids += stream("prefix", request.prefix_id or "").take(0, request.prefix_len - len(ids))
        text = text[len(request.prefix_text):]
    rest = request.prompt_len - len(ids)
    body = list(encode(text))
    # A conversation's prompt is the end of its history, every other prompt the start of its text.
    body = body[-rest:] if request.offset and rest else body[:rest]
    return ids + body + stream("request", request.index).take(0, rest - len(body))
