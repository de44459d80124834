"""Steps of fresh prompts alone by torch's own attention, on the emulated CUDA backend and by themselves."""

from __future__ import annotations

import pytest
import torch

from pagedcli.attention.cuda import CudaBackend
from pagedcli.attention.fresh_prompts import attend_prompts, plain_causal
from pagedcli.attention.interface import LayerSpec
from pagedcli.attention.reference import ReferenceBackend
from tests.emulator.backend import Batch, EmulatedLauncher
from tests.emulator.cases import Kernels
from tests.emulator.emulator import compiler

SPEC = LayerSpec(8, 2, 32, 32, 0.2)


def test_only_plain_causal_layers_qualify() -> None:
    rows = [(0, 5), (5, 12)]
    assert plain_causal(SPEC, rows)
    assert plain_causal(LayerSpec(8, 2, 32, 32, 0.2, window=7), rows)
    assert not plain_causal(LayerSpec(8, 2, 32, 32, 0.2, window=6), rows)
    assert not plain_causal(LayerSpec(8, 2, 32, 32, 0.2, softcap=5.0), rows)
    assert not plain_causal(LayerSpec(8, 2, 32, 32, 0.2, sinks=True), rows)


@pytest.mark.parametrize("group", [1, 4])
def test_each_prompt_sees_itself_only(group: int) -> None:
    spec = LayerSpec(2 * group, 2, 32, 32, 0.2)
    whole = torch.randn(16, spec.heads + 4, 32, dtype=torch.float64)
    q, k, v = whole.split([spec.heads, 2, 2], dim=1)
    out = attend_prompts(q, k, v, [(0, 6), (6, 7), (7, 13)], spec)
    assert not out[13:].any()
    for first, end in ((0, 6), (6, 7), (7, 13)):
        for row in range(first, end):
            for head in range(spec.heads):
                keys, values = k[first:row + 1, head // group], v[first:row + 1, head // group]
                weights = torch.softmax(keys @ q[row, head] * 0.2, 0)
                assert torch.allclose(out[row, head], weights @ values, atol=1e-12)


@pytest.mark.skipif(compiler() is None, reason="the CUDA emulator needs g++, which is not installed")
def test_the_backend_uses_it_for_fresh_prompts_alone_and_still_fills_the_cache() -> None:
    batch = Batch([[9, 3, 0], [1, 1, 5], [1, 4, 1]], 8, pad_to=8)
    launcher = EmulatedLauncher(Kernels(per_module=4))
    got = batch.run(CudaBackend(launcher, flash_prompts=True), SPEC, torch.float32, torch.float32)
    want = batch.run(ReferenceBackend(torch.float64), SPEC, torch.float32, torch.float32)
    assert max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True)) < 2e-5
    kernels = [name for name, _ in launcher.launched]
    assert kernels[:2] == ["reshape_and_cache"] * 2, "the first step holds whole prompts only"
    assert "prefill_simt" in kernels
    launcher.launched.clear()
    batch.run(CudaBackend(launcher, same_bits=True, flash_prompts=True), SPEC, torch.float32, torch.float32)
    assert launcher.launched[1][0] == "prefill_simt", "same bits keep to the paged kernels"
