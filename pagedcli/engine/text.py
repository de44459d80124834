"""Text as tokens come: no half characters, no stop strings, and a cost a token that does not grow with the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, Protocol

from pagedcli.core.request import SamplingParams
from pagedcli.core.sequence import Sequence
from pagedcli.engine.interface import TextState
from pagedcli.engine.pieces import BytePieces, decoder_settings

CONTEXT_TOKENS = 6
"""Prompt tokens that decide how the first output token reads (whether a leading space is text, for one)."""

MAX_WAITING = 8
"""Tokens that may wait for the rest of a character. UTF-8 needs at most 4, so more can only be broken text."""

BROKEN = "\ufffd"


class _Place(NamedTuple):
    """Where a sequence's text stands. Immutable, so that forks share it.

    `held` is text that may yet become part of a stop string. `reader` is the decoder's own place.
    """

    reader: Any
    held: str
    hold: int


class _Reader(Protocol):
    """Turns tokens into characters. Places are immutable."""

    def begin(self, prompt: Items[int]) -> Any: ...

    def take(self, place: Any, tokens: Items[int]) -> tuple[Any, str]:
        """Characters that the last of `tokens` completes."""
        ...

    def rest(self, place: Any, tokens: Items[int]) -> str:
        """What is left at the end, without an unfinished character."""
        ...


class _ByteReader:
    """For decoders that join bytes: a place is (bytes of an unfinished character, whether text has begun)."""

    def __init__(self, pieces: BytePieces) -> None:
        self._piece = pieces.piece
        self._lead = pieces.lead

    def begin(self, prompt: Items[int]) -> tuple[bytes, bool]:
        tail = b"".join(self._piece(token) for token in prompt[-CONTEXT_TOKENS:])
        begun = bool(tail) or not self._lead or any(self._piece(token) for token in prompt)
        return tail[codecs.utf_8_decode(tail, "replace", False)[1]:], begun

    def take(self, place: tuple[bytes, bool], tokens: Items[int]) -> tuple[tuple[bytes, bool], str]:
        waiting, begun = place
        data = self._piece(tokens[-1])
        if not begun and data:
            data, begun = data.removeprefix(self._lead), True
        if waiting:
            data = waiting + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        return (data[used:], begun), text

    def rest(self, place: tuple[bytes, bool], tokens: Items[int]) -> str:
        return ""


class _WindowPlace(NamedTuple):
    """`tokens[first:]` is decoded at each step; `shown` is the text of `tokens[first:read]`, already given out."""

    first: int
    read: int
    shown: str


class _WindowReader:
    """For any other decoder: the text of a few last tokens with the newest one, less their text without it."""

    def __init__(self, backend: Any) -> None:
        self._decode = backend.decode
        # A decoder that knows no bytes makes no U+FFFD of its own: one in its text is a real character.
        self._waits = "Byte" in str(decoder_settings(backend))

    def begin(self, prompt: Items[int]) -> _WindowPlace:
        read = len(prompt)
        first = max(0, read - CONTEXT_TOKENS)
        return _WindowPlace(first, read, self._decode(prompt[first:]))

    def take(self, place: _WindowPlace, tokens: Items[int]) -> tuple[_WindowPlace, str]:
        count = len(tokens)
        window = self._decode(tokens[place.first:])
        if self._waits and window.endswith(BROKEN) and count - place.read < MAX_WAITING:
            return place, ""
        new = window[len(place.shown):]
        since = self._decode(tokens[place.read:])
        if not since and count - place.first < 4 * CONTEXT_TOKENS:
            # Only tokens without text so far: keep those that came before, or the next would read as a beginning.
            return _WindowPlace(place.first, count, window), new
        return _WindowPlace(place.read, count, since), new

    def rest(self, place: _WindowPlace, tokens: Items[int]) -> str:
        return str(self._decode(tokens[place.first:])[len(place.shown):]).rstrip(BROKEN)


class IncrementalText(TextState):
    """Text of sequences, token by token, over a tokenizer with `.backend` (tokenizers.Tokenizer) and `.eos_ids`.

    Together with the prompt's text, a sequence's text reads as the tokenizer decodes all its ids, special tokens left
    out. Text is held back by the longest stop string less one character. Of several stop strings the one that ends
    first counts, as if characters came one by one, so the outcome does not depend on how a text is cut into tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        pieces = BytePieces(tokenizer.backend)
        self._reader: _Reader = _ByteReader(pieces) if pieces.supported else _WindowReader(tokenizer.backend)
        self._eos_ids = frozenset(tokenizer.eos_ids)

    def start(self, seq: Sequence) -> None:
        """Begin a sequence whose tokens are its prompt."""
        stops = seq.group.params.stop
        seq.text = ""
        seq.text_state = _Place(self._reader.begin(seq.group.request.prompt), "",
                                max(map(len, stops)) - 1 if stops else 0)

    def advance(self, seq: Sequence) -> str | None:
        """See `TextState.advance`. A stop counts from min_tokens on (in beam search always, as in Hugging Face), and
        never when the length is forced.

        The text of an eos or stop token that ends the sequence is left out unless include_stop_str_in_output is set.
        """
        place: _Place = seq.text_state
        params = seq.group.params
        if place.reader is None:
            return None  # the text has ended already
        may_stop = seq.group.request.output_len is None and (
            params.use_beam_search or seq.output_len >= params.min_tokens)
        if may_stop and not params.include_stop_str_in_output and self._ends(seq.tokens[-1], params):
            seq.text += place.held + self._reader.rest(place.reader, seq.tokens[:-1])
            seq.text_state = _Place(None, "", place.hold)
            return None
        reader, new = self._reader.take(place.reader, seq.tokens)
        if not params.stop:
            seq.text += new
            seq.text_state = _Place(reader, "", 0)
            return None
        text = place.held + new
        found = _first_stop(text, params.stop, len(place.held)) if new and may_stop else None
        if found is not None:
            end, stop = found
            seq.text += text[:end if params.include_stop_str_in_output else end - len(stop)]
            seq.text_state = _Place(None, "", place.hold)
            return stop
        cut = max(len(text) - place.hold, 0)
        seq.text += text[:cut]
        seq.text_state = _Place(reader, text[cut:], place.hold)
        return None

    def finish(self, seq: Sequence) -> None:
        """See `TextState.finish`. Nothing is added after a stop string."""
        place: _Place | None = seq.text_state
        if place is None:
            return
        seq.text += place.held
        if place.reader is not None:
            seq.text += self._reader.rest(place.reader, seq.tokens)
        seq.text_state = None

    def _ends(self, token: int, params: SamplingParams) -> bool:
        return token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos)


def _first_stop(text: str, stops: Items[str], held: int) -> tuple[int, str] | None:
    """(end, stop string) of the stop that ends first in `text` past `held`, the longest of those.

    Earlier text can hold a whole stop only when it came before min_tokens; that one no longer counts.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(held + 1 - len(stop), 0))
        if at >= 0:
            end = at + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
    return best
