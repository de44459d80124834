"""A `transformers` model that computes the answer to each row of ids once, for searches that ask for the same rows.

The 54 settings of `beam_equal` differ in what is done with a row's logits, so that most of what one search asks was
asked by another. Only the forward pass is remembered: every choice is still made by `generate` of `transformers`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

Row = tuple[int, ...]


class RowMemory:
    """Logits of every row of ids met, and keys and values of its last token, from which the next one goes on.

    `asked` and `computed` count rows. A row computed among others may differ in last bits from the same row computed
    elsewhere, as in any batch of `transformers`.
    """

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._logits: dict[Row, torch.Tensor] = {}
        self._places: dict[Row, torch.Tensor] = {}
        self._kv: torch.Tensor | None = None
        self._used = 0
        self.asked = self.computed = 0

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits [rows, 1, vocabulary] of the last position of whole rows [rows, length] without padding."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("rows with padding cannot be told apart by their ids; give prompts of one length")
        rows = [tuple(row) for row in input_ids.tolist()]
        fresh = [row for row in dict.fromkeys(rows) if row not in self._logits]
        known = [row for row in fresh if row[:-1] in self._places]
        for group, past in ((known, True), ([row for row in fresh if row[:-1] not in self._places], False)):
            if group:
                self._compute(group, past)
        self.asked += len(rows)
        self.computed += len(fresh)
        return torch.stack([self._logits[row] for row in rows])[:, None]

    def _compute(self, rows: list[Row], past: bool) -> None:
        length, cache = len(rows[0]), DynamicCache()
        old = torch.stack([self._places[row[:-1]] for row in rows]) if past else torch.empty(len(rows), 0).long()
        if past:
            assert self._kv is not None
            held = self._kv[old].permute(2, 3, 0, 4, 1, 5)  # [layer, key or value, row, head, position, dim]
            for layer, (keys, values) in enumerate(held):
                cache.update(keys.contiguous(), values.contiguous(), layer)
        ids = torch.tensor(rows)[:, old.shape[1]:]
        out = self._plain(input_ids=ids, attention_mask=torch.ones(len(rows), length, dtype=torch.long), cache=cache,
                          use_cache=True, logits_to_keep=1)
        layers: Any = cache.layers  # of one kind here; the library's type allows others
        fresh = torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers])
        fresh = fresh[..., old.shape[1]:, :].permute(2, 4, 0, 1, 3, 5)  # [row, position, layer, k or v, head, dim]
        places = self._store(fresh.flatten(0, 1)).view(len(rows), -1)
        for row, where, logits in zip(rows, torch.cat((old, places), 1), out.logits[:, -1], strict=True):
            self._logits[row], self._places[row] = logits.clone(), where

    def _store(self, tokens: torch.Tensor) -> torch.Tensor:
        """Places of keys and values of tokens, appended; what holds them doubles when it is full."""
        need = self._used + len(tokens)
        if self._kv is None or need > len(self._kv):
            grown = torch.empty(max(2 * need, 1024), *tokens.shape[1:], dtype=tokens.dtype)
            if self._kv is not None:
                grown[:self._used] = self._kv[:self._used]
            self._kv = grown
        self._kv[self._used:need] = tokens
        places, self._used = torch.arange(self._used, need), need
        return places


@contextmanager
def remembering(model: Any) -> Iterator[RowMemory]:
    """`model.generate(..., use_cache=False)`, which passes whole rows, asks the memory inside the block."""
    plain = model.forward
    memory = RowMemory(plain)

    @functools.wraps(plain)
    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None,
                **_: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=memory(input_ids, attention_mask))

    model.forward = forward
    try:
        yield memory
    finally:
        del model.forward
