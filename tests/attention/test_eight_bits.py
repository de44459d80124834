"""Every finite 8-bit code survives the way into the cache and back, and rounding is to nearest even."""

from __future__ import annotations

import pytest
import torch

from pagedcli.attention.backends import make_backend
from pagedcli.attention.interface import LayerSpec

from .cases import Sequences, run


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_codes_and_their_midpoints(cache: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(cache).float()
    codes = codes[codes.isfinite()].sort().values
    values = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes * 1.03])
    values = values[: len(values) // 8 * 8]
    spec = LayerSpec(1, 1, 8, 8, 1.0)
    rows = len(values) // 8
    seqs = Sequences(LayerSpec(1, 1, 8, 8, 1.0, window=1), [rows], torch.float32)
    seqs.v[0] = values.reshape(rows, 1, 8)
    limit = torch.finfo(cache).max
    want = values.clamp(-limit, limit).to(cache).float().reshape(rows, 8)
    got = run(make_backend("cpu"), seqs, 16, cache, [[rows]])[0][:, 0]
    assert spec.group == 1
    assert torch.equal(got, want)
