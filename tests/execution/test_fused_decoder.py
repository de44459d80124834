"""Fused layers, native and by oneDNN, against the model's own, and the row operations between them against torch."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcli.core.plan import Slice, StepPlan
from pagedcli.execution import decoder_choice, fused_decoder, native_weights
from pagedcli.execution.fused_decoder import FusedDecoder, packed, widens
from pagedcli.execution.linear_kernels import lacks
from pagedcli.execution.native_decoder import NativeDecoder
from pagedcli.execution.row_team import RowTeam
from tests.execution.tiny_models import VOCAB, eager_logits, load, run_steps, save_model, shuffled_tables

LLAMA_LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 3 rotary": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(params=["native", "oneDNN"])
def decoder_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class that llama-like models run as; the slower one as on a processor without the native products."""
    if request.param == "oneDNN":
        monkeypatch.setattr(decoder_choice, "not_native", lambda decoder, backend: "none wanted")
        return FusedDecoder
    reason = lacks("fp32")
    if reason is not None:
        pytest.skip(f"no native products on this processor: {reason}")
    return NativeDecoder


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_logits_equal_the_models_own(name: str, tmp_path: Path, decoder_kind: type) -> None:
    family, changes = LLAMA_LIKE[name]
    folder = save_model(family, tmp_path / "model", **changes)
    executor = load(folder, attention_backend="cpu")
    assert isinstance(executor.decoder, decoder_kind), executor.info.notes
    prompts = [[3 + (7 * place + row) % 90 for place in range(length)] for row, length in enumerate((21, 9, 26))]
    tables = shuffled_tables([len(prompt) for prompt in prompts], 64, 4)
    ours = run_steps(executor, prompts, tables, [(10, 1, 3), (1, 8, 20), (10, 0, 3)])
    for mine, own in zip(ours, eager_logits(folder, prompts), strict=True):
        assert torch.allclose(mine, own, rtol=1e-4, atol=1e-4), float((mine - own).abs().max())


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("gpt2", {}, "'gpt2'"), ("gemma2", {}, "'gemma2'"), ("llama", {"hidden_act": "gelu"}, "'gelu'"),
    ("llama", {"mlp_bias": True}, "biases")])
def test_other_models_keep_their_modules_and_say_why(family: str, changes: dict[str, Any], reason: str,
                                                     tmp_path: Path) -> None:
    executor = load(save_model(family, tmp_path / "model", **changes), attention_backend="cpu")
    assert not isinstance(executor.decoder, FusedDecoder | NativeDecoder)
    assert any(reason in note for note in executor.info.notes), executor.info.notes


def test_the_source_weights_are_let_go(tmp_path: Path, decoder_kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    place, name = ((fused_decoder, "_take_layer") if decoder_kind is FusedDecoder
                   else (native_weights, "pack_layer"))
    original = getattr(place, name)

    def watching(layer: Any, *rest: Any) -> Any:
        result = original(layer, *rest)
        taken.append(sum(item.weight.numel() for item in (layer.self_attn.q_proj, layer.mlp.down_proj)))
        return result

    monkeypatch.setattr(place, name, watching)
    load(save_model("llama", tmp_path / "model"), attention_backend="cpu")
    assert taken == [0, 0, 0]


TYPES = {torch.float32: 2e-6, torch.bfloat16: 2.0 ** -8}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_norm(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        residual, delta = torch.randn(120, 576).to(dtype), torch.randn(120, 576).to(dtype)
        weight, out = torch.rand(576).to(dtype), torch.empty(120, 576, dtype=dtype)
        expected_sum = (residual.float() + delta.float()).to(dtype)
        RowTeam(dtype).norm(residual, delta, weight, 1e-5, out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(residual, expected_sum)
    exact = expected_sum.double()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert torch.allclose(out.double(), exact, rtol=TYPES[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated_silu_over_the_whole_range(dtype: torch.dtype) -> None:
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([0.0, -0.0, 1e-30, 300.0, -300.0])])
    both = torch.cat([gate, torch.full_like(gate, 0.75)])[None].to(dtype).contiguous()
    out = torch.empty(1, len(gate), dtype=dtype)
    RowTeam(dtype).silu(both, out)
    first = both[0, :len(gate)].double()
    assert torch.allclose(out[0].double(), torch.nn.functional.silu(first) * 0.75, rtol=TYPES[dtype], atol=1e-30)


def test_a_number_that_is_none_stays_none() -> None:
    both = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    out = torch.empty(1, 2, dtype=torch.bfloat16)
    RowTeam(torch.bfloat16).silu(both, out)
    assert out[0, 0].isnan() and not out[0, 1].isnan()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rotary_with_head_norms(dtype: torch.dtype) -> None:
    rows, queries, keys, dim = 37, 4, 2, 16
    qkv = torch.randn(rows, (queries + 2 * keys) * dim).to(dtype)
    weights, positions = torch.rand(2, dim).to(dtype) + 0.5, torch.arange(rows) * 3 % 50
    angles = torch.arange(50)[:, None] / (10000 ** (torch.arange(0, dim, 2) / dim))[None]
    table = torch.cat([angles.cos(), angles.sin()], 1).float().contiguous()
    given = qkv.clone().view(rows, -1, dim)
    RowTeam(dtype).rope(qkv, positions, table, weights, 1e-6, queries + keys, dim, queries)
    heads = given[:, :queries + keys].float()
    norm = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
    scale = torch.cat([weights[:1].expand(queries, -1), weights[1:].expand(keys, -1)]).float()
    turned = (norm * scale).to(dtype).float()
    c, s = table[positions, None, :dim // 2], table[positions, None, dim // 2:]
    a, b = turned[..., :dim // 2], turned[..., dim // 2:]
    expected = torch.cat([a * c - b * s, b * c + a * s], -1)
    ours = qkv.view(rows, -1, dim)
    assert torch.allclose(ours[:, :queries + keys].float(), expected, rtol=2 * TYPES[dtype], atol=2 * TYPES[dtype])
    assert torch.equal(ours[:, queries + keys:], given[:, queries + keys:]), "values are not turned"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_products_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((256, 576), np.float32)).to(dtype)
    for width in (192, 960, 3072):
        product = packed(torch.from_numpy(rng.standard_normal((width, 576), np.float32)).to(dtype))
        whole = product(x)
        for rows in (8, 16, 24, 64, 72, 136, 248):
            assert torch.equal(product(x[:rows].contiguous()), whole[:rows]), (width, rows)


def test_without_bfloat16_products_they_are_taken_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder, "widens", lambda dtype: dtype == torch.bfloat16)
    rng = np.random.default_rng(1)
    x, weight = (torch.from_numpy(rng.standard_normal((rows, 576), np.float32)).bfloat16() for rows in (64, 192))
    bias = torch.from_numpy(rng.standard_normal(192, np.float32)).bfloat16()
    product = packed(weight, bias)
    whole = product(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert whole.dtype == torch.bfloat16
    assert ((whole.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all(), "one rounding, of 8 bits"
    for rows in (8, 16, 24, 40):
        assert torch.equal(product(x[:rows].contiguous()), whole[:rows]), rows


def test_a_widened_product_lets_its_weight_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder, "widens", lambda dtype: dtype == torch.bfloat16)
    weight = torch.eye(16, dtype=torch.bfloat16)
    gone = weakref.ref(weight)
    product = packed(weight)
    del weight
    assert gone() is None
    x = torch.arange(128).view(8, 16).bfloat16()
    assert torch.equal(product(x), x)


def test_a_torch_without_onednn_widens_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # it has no operation to ask
    assert widens(torch.bfloat16) and not widens(torch.float32)
    x = torch.arange(128).view(8, 16).bfloat16()
    assert torch.equal(packed(torch.eye(16, dtype=torch.bfloat16))(x), x)


def test_a_step_with_padding_rows_writes_only_its_own(tmp_path: Path) -> None:
    executor = load(save_model("llama", tmp_path / "model"), attention_backend="cpu")
    pool = executor.store.pool
    with torch.inference_mode():
        pool.zero_()
    executor.execute(StepPlan([Slice(0, [5, 6, 7], 0, [9], 1)]))
    touched = [block for block in range(pool.shape[0]) if bool(pool[block].any())]
    assert touched == [9]
