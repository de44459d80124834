"""Every backend that runs here against attention in float64, over shuffled blocks whose unused slots hold NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcli.attention.backends import make_backend
from pagedcli.attention.interface import LayerSpec

from .cases import Sequences, in_chunks, in_one, run

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
         "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-11}
"""Largest error relative to max(1, output): scores reach 10 and fp32 knows them to 1e-6; else the output's rounding,
and as much again where the softmax's weights are rounded to bfloat16 as well."""


def check(name: str, spec: LayerSpec, lengths: list[int], source: torch.dtype, cache: torch.dtype, block: int,
          cuts: list[list[int]], seed: int = 0) -> None:
    seqs = Sequences(spec, lengths, source, seed)
    got = run(make_backend(name), seqs, block, cache, cuts, seed, pad=8)
    for mine, true in zip(got, seqs.rounded(cache), strict=True):
        error = (mine.double() - true).abs() / true.abs().clamp(min=1.0)
        assert float(error.max()) <= ROUNDING[source], (name, spec, lengths, source, cache, block, cuts)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("cache", list(TYPES))
@pytest.mark.parametrize("source", ["fp32", "bf16"])
def test_every_cache_type(name: str, cache: str, source: str) -> None:
    spec = LayerSpec(6, 2, 64, 64, 0.125)
    lengths = [150, 1, 37]
    check(name, spec, lengths, TYPES[source], TYPES[cache], 16, in_chunks(lengths, 3))


@pytest.mark.parametrize(("key_dim", "value_dim", "group", "kind"), [
    (8, 8, 4, "bf16"), (32, 32, 7, "fp32"), (72, 72, 1, "bf16"), (80, 80, 2, "fp16"), (96, 96, 16, "bf16"),
    (112, 112, 5, "fp32"), (120, 120, 6, "bf16"), (128, 128, 8, "bf16"), (192, 128, 3, "bf16"),
    (256, 256, 2, "bf16"), (33, 16, 3, "bf16"), (24, 5, 1, "fp32"), (1, 1, 4, "bf16"), (64, 64, 1, "bf16"),
    (18, 18, 2, "bf16"), (36, 21, 1, "bf16")])
def test_head_sizes_and_groups(key_dim: int, value_dim: int, group: int, kind: str) -> None:
    spec = LayerSpec(2 * group, 2, key_dim, value_dim, key_dim**-0.5)
    check("cpu", spec, [140, 23], TYPES[kind], TYPES[kind], 16, [[139, 22], [1, 1]])


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("window", [1, 5, 128, 129, 200])
def test_windows(name: str, window: int) -> None:
    spec = LayerSpec(3, 1, 32, 32, 0.2, window=window)
    lengths = [300, 40]
    check(name, spec, lengths, torch.float32, torch.float32, 16, in_chunks(lengths, window))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    """Both backends, any rule, any cut; the shapes are few so that few kernels are compiled."""
    heads, kv_heads, dim = data.draw(st.sampled_from([(9, 3, 64), (4, 4, 32)]))
    spec = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5,
                     window=data.draw(st.sampled_from([None, 1, 7, 64, 131])),
                     softcap=data.draw(st.sampled_from([None, 0.7, 30.0])), sinks=data.draw(st.booleans()))
    kind = data.draw(st.sampled_from(["fp32", "bf16"]))
    lengths = data.draw(st.lists(st.integers(1, 180), min_size=1, max_size=4))
    block = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 256]))
    seed = data.draw(st.integers(0, 1000))
    cuts = data.draw(st.sampled_from([in_one(lengths), in_chunks(lengths, seed)]))
    for name in ("cpu", "reference"):
        check(name, spec, lengths, TYPES[kind], TYPES[kind], block, cuts, seed)


def test_large_scores_and_distant_sinks() -> None:
    """Scores in the hundreds neither overflow nor lose the largest key; a sink far above all takes the whole weight."""
    spec = LayerSpec(2, 1, 32, 32, 40.0, sinks=True)
    seqs = Sequences(spec, [200], torch.float32)
    seqs.sinks = torch.tensor([-1e4, 1e5])
    got = run(make_backend("cpu"), seqs, 16, torch.float32, [[200]])[0].double()
    true = seqs.rounded(torch.float32)[0]
    # fp32 scores near 1000 are known to 1e-4 of a unit in the exponent.
    assert float((got - true).abs().max()) < 1e-3
    assert not got[:, 1].any()


def test_writes_saturate_in_eight_bits() -> None:
    """Values beyond the largest number of an 8-bit cache come back as that number, NaN as NaN."""
    for cache, most in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        for name in ("cpu", "reference"):
            spec = LayerSpec(1, 1, 32, 32, 1.0)
            seqs = Sequences(spec, [1], torch.float32)
            seqs.v[0] = torch.linspace(-2 * most, 2 * most, 32).reshape(1, 1, 32)
            got = run(make_backend(name), seqs, 16, cache, [[1]])[0][0, 0]
            assert torch.equal(got, seqs.v[0][0, 0].clamp(-most, most).to(cache).float())
            seqs.v[0][0, 0, 3] = float("nan")
            assert run(make_backend(name), seqs, 16, cache, [[1]])[0][0, 0].isnan().tolist() == [
                n == 3 for n in range(32)]
