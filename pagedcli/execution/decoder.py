"""What the executor needs of a model, whoever computes it."""

from __future__ import annotations

from typing import Protocol

import torch

from pagedcli.attention.interface import AttentionBackend, LayerSpec


class Decoder(Protocol):
    """What the executor needs of a model. A fused implementation for one family can stand in for HFDecoder.

    `specs` has one entry per attention layer, in calling order; `attention_seconds` is of the last forward. Row counts
    are padded to multiples of `row_tile`, 1 where a row's bits never depend on how many there are.
    """

    specs: tuple[LayerSpec, ...]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    row_tile: int

    @property
    def attention_seconds(self) -> float: ...

    def attach(self, backend: AttentionBackend) -> None:
        """Use this backend (already bound and, before each forward, prepared) from now on."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """ids, positions: int64 [T]; rows: int64 [R] indices into T -> logits [R, vocab_size] of the model's dtype or
        float32, to be used before the next call."""
