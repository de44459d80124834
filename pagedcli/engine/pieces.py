"""What bytes a token stands for, for the decoders whose text is the joined bytes of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

PIECE_STEPS = ["Replace", "ByteFallback", "Fuse", "Strip"]
"""Decoder steps, in this order, that join bytes; of a Strip only one that takes a mark off the very start."""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table): bytes that print stand for
    themselves, the others take the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


def decoder_settings(backend: Any) -> dict[str, Any]:
    """How a tokenizers.Tokenizer decodes, as in its tokenizer.json; {} when it has no decoder or will not say."""
    if backend.decoder is None:
        return {}
    try:
        settings = json.loads(backend.decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


class BytePieces:
    """`piece(id)` gives a token's bytes; `lead` is the mark to be taken off the start of a text (b"" for none)."""

    def __init__(self, backend: Any, *, skip_special: bool = True) -> None:
        self._backend = backend
        settings = decoder_settings(backend)
        steps = settings.get("decoders", [settings]) if settings else []
        names = [step.get("type") for step in steps]
        self._alphabet = _byte_alphabet() if names == ["ByteLevel"] else None
        self.lead = b""
        self._replacements: list[tuple[str, str]] = []
        self.supported = self._alphabet is not None or self._joins(steps, names)
        self._special = {token.content for token in backend.get_added_tokens_decoder().values()
                         if token.special} if skip_special else set()
        self._known: dict[int, bytes] = {}

    def _joins(self, steps: list[dict[str, Any]], names: list[Any]) -> bool:
        if "Fuse" not in names or sorted(names, key=lambda n: (PIECE_STEPS + [n]).index(n)) != names:
            return False
        if not set(names) <= set(PIECE_STEPS) or names.count("Strip") > 1:
            return False
        for step in steps:
            if step["type"] == "Replace":
                pattern = step.get("pattern", {})
                if "String" not in pattern:
                    return False
                self._replacements.append((pattern["String"], step["content"]))
            if step["type"] == "Strip":
                if step.get("start") != 1 or step.get("stop") != 0:
                    return False
                self.lead = step["content"].encode()
        return "ByteFallback" in names

    def piece(self, token: int) -> bytes:
        """Bytes of one token; none for special tokens and for ids that the tokenizer does not know."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None or text in self._special:
            return b""
        if self._alphabet is not None:
            if all(char in self._alphabet for char in text):
                return bytes(self._alphabet[char] for char in text)
            return str(text).encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            text = text.replace(old, new)
        return str(text).encode()


class StopSpelling:
    """Says whether a token completes a stop string, in the manner of transformers' StopStringCriteria.

    A stop counts when it ends inside the newest token. It is looked for in the bytes of all ids, so it may begin in the
    prompt, and special tokens count as their names.
    """

    ANCHOR = "abcdef"

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pieces = BytePieces(backend, skip_special=False)
        self._anchor: list[int] = [] if self._pieces.supported else backend.encode(
            self.ANCHOR, add_special_tokens=False).ids
        self._known: dict[int, bytes] = {}

    def completed(self, before: Sequence[int], token: int, stops: Sequence[str]) -> str | None:
        """The stop string that `token` completes after `before`, the one that ends first; or None."""
        last = self._spell(token)
        if not last:
            return None
        targets = [stop.encode() for stop in stops]
        longest = max(map(len, targets))
        data = b"".join([self._spell(item) for item in before[-(longest - 1):]] if longest > 1 else []) + last
        best: tuple[int, int] | None = None
        for place, target in enumerate(targets):
            at = data.find(target, max(0, len(data) - len(last) + 1 - len(target)))
            if at >= 0 and (best is None or at + len(target) < best[0]):
                best = (at + len(target), place)
        return None if best is None else stops[best[1]]

    def _spell(self, token: int) -> bytes:
        if self._pieces.supported:
            return self._pieces.piece(token)
        found = self._known.get(token)
        if found is None:
            text = self._backend.decode([*self._anchor, token], skip_special_tokens=False)
            found = self._known[token] = text[text.index(self.ANCHOR) + len(self.ANCHOR):].encode()
        return found
