"""What the executor needs of a model, whoever computes it."""

from __future__ import annotations

from typing import Any, Protocol

from pagedcli.attention.interface import AttentionBackend, LayerSpec
from pagedcli.core.devices import Device

Integers = Any
"""int64: an array in host memory, or a tensor on the device."""


class Decoder(Protocol):
    """What the executor needs of a model. A fused implementation for one family can stand in for HFDecoder.

    `specs` has one entry per attention layer, in calling order; `attention_seconds` is of the last forward. Row counts
    are padded to multiples of `row_tile`, 1 where a row's bits never depend on how many there are.
    """

    specs: tuple[LayerSpec, ...]
    vocab_size: int
    dtype: Any
    row_tile: int

    @property
    def device(self) -> Device: ...

    @property
    def attention_seconds(self) -> float: ...

    def attach(self, backend: AttentionBackend) -> None:
        """Use this backend (already bound and, before each forward, prepared) from now on."""

    def forward(self, ids: Integers, positions: Integers, rows: Integers) -> Any:
        """ids, positions: [T]; rows: [R] indices into T -> logits [R, vocab_size] of the model's dtype or float32, an
        array (float32) or a tensor, to be used before the next call."""
