"""Llama-like decoders on a CPU without their Python modules: fused weights, packed once, fused row operations.

The same mathematics as the Hugging Face modules, with fewer roundings: what lies between two matrix products is
computed in float32 and rounded once. The probe at load compares it with the model's own eager forward like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedcli.attention.host_arrays import as_tensor
from pagedcli.attention.interface import AttentionBackend, LayerSpec
from pagedcli.core.dtypes import dtype_name
from pagedcli.execution.decoder import Integers
from pagedcli.execution.flat_batch import ROW_TILE
from pagedcli.execution.row_team import ELEMENTS, RowTeam, rotary_table

if TYPE_CHECKING:
    from pagedcli.execution.hf_model import HFDecoder

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose layers are just norm, QKV (with biases or head norms or neither), rotary, attention, output, norm
and gated SiLU."""

Product = Callable[[torch.Tensor], torch.Tensor]


def unfusable(decoder: HFDecoder) -> str | None:
    """None when the decoder can run fused, else the reason that it keeps its own modules."""
    config = decoder.module.config
    if decoder.device.type != "cpu":
        return "the fused layers are for CPUs"
    if dtype_name(decoder.dtype) not in ELEMENTS:
        return f"the fused layers have no {decoder.dtype}"
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type!r} have no fused layers"
    if getattr(config, "hidden_act", None) != "silu":
        return f"the activation {getattr(config, 'hidden_act', None)!r} is not fused"
    if getattr(config, "mlp_bias", False):
        return "biases in the feed-forward layers are not fused"
    rotary = decoder.module.model.rotary_emb
    spec = decoder.specs[0]
    if 2 * len(rotary.inv_freq) != spec.key_dim or spec.key_dim != spec.value_dim:
        return "rotary positions over a part of the head are not fused"
    if getattr(rotary, "rope_type", "default") in ("dynamic", "longrope"):
        return f"rotary positions of type {rotary.rope_type!r} depend on the batch"
    return None


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """x [T, K] -> x @ weight.T + bias, with the weight laid out once for oneDNN where this torch has it."""
    if widens(weight.dtype):
        dtype = weight.dtype  # the product must not hold on to the weight itself
        wide = packed(weight.float(), None if bias is None else bias.float())
        return lambda x: wide(x.float()).to(dtype)
    ops = torch.ops.mkldnn
    if torch.backends.mkldnn.is_available() and hasattr(ops, "_reorder_linear_weight"):
        held = ops._reorder_linear_weight(weight, None)
        return lambda x: ops._linear_pointwise(x, held, bias, "none", [], "")
    kept = weight.contiguous()
    return lambda x: torch.nn.functional.linear(x, kept, bias)


def widens(dtype: torch.dtype) -> bool:
    """Whether products of this type are computed in float32 and rounded once: oneDNN refuses bfloat16 on processors
    below its least, and torch's own product of it gives a row other bits in another batch. Weights take twice the
    memory then, as they do in a torch without oneDNN."""
    if dtype != torch.bfloat16:
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_module(module: Any) -> Product:
    """The module's product, packed. One that is split among ranks puts the parts together after it."""
    weight, bias, combine = module.weight.detach(), module.bias, getattr(module, "combine", None)
    if combine is None:
        return packed(weight, bias)
    product = packed(weight, bias if module.bias_in_part else None)
    return lambda x: combine(product(x))


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    norm_in: torch.Tensor
    qkv: Product
    head_norms: torch.Tensor | None
    out: Product
    norm_mid: torch.Tensor
    gate_up: Product
    down: Product


class FusedDecoder:
    """Implements `decoder.Decoder` over the weights of an HFDecoder, whose own copies it takes apart as it goes."""

    row_tile = ROW_TILE

    def __init__(self, source: HFDecoder, max_positions: int) -> None:
        module: Any = source.module
        rotary = module.model.rotary_emb
        self.specs, self.vocab_size = source.specs, source.vocab_size
        self.dtype, self.device = source.dtype, source.device
        self._embedding: torch.Tensor = module.model.embed_tokens.weight.detach()
        self._eps = float(module.config.rms_norm_eps)
        self._norm: torch.Tensor = module.model.norm.weight.detach()
        self._head = packed_module(module.lm_head)
        self._table = as_tensor(rotary_table(rotary.inv_freq, float(getattr(rotary, "attention_scaling", 1.0)),
                                             max_positions))
        self._layers = [_take_layer(layer, spec) for layer, spec in zip(module.model.layers, self.specs, strict=True)]
        self._team = RowTeam(self.dtype)
        self._backend: AttentionBackend | None = None
        self._attention_seconds = 0.0

    @property
    def attention_seconds(self) -> float:
        return self._attention_seconds

    def attach(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def forward(self, ids: Integers, positions: Integers, rows: Integers) -> torch.Tensor:
        ids, positions, rows = (torch.as_tensor(item) for item in (ids, positions, rows))
        backend, team, eps = self._backend, self._team, self._eps
        assert backend is not None, "attach() comes before forward()"
        clock, spent = time.perf_counter, 0.0
        residual = torch.nn.functional.embedding(ids, self._embedding)
        normed = torch.empty_like(residual)
        positions = positions.contiguous()
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            spec = layer.spec
            team.norm(residual, delta, layer.norm_in, eps, normed)
            qkv = layer.qkv(normed)
            turned = spec.heads + spec.kv_heads
            team.rope(qkv, positions, self._table, layer.head_norms, eps, turned, spec.key_dim, spec.heads)
            parts = qkv.view(len(ids), -1, spec.key_dim)
            began = clock()
            mixed = backend.attend(number, parts[:, :spec.heads], parts[:, spec.heads:turned], parts[:, turned:], spec)
            spent += clock() - began
            attended = layer.out(mixed.view(len(ids), -1))
            team.norm(residual, attended, layer.norm_mid, eps, normed)
            both = layer.gate_up(normed)
            active = both.new_empty(len(ids), both.shape[1] // 2)
            team.silu(both, active)
            delta = layer.down(active)
        self._attention_seconds = spent
        assert delta is not None, "a decoder has layers"
        wanted, last = residual[rows], delta[rows]
        final = torch.empty_like(wanted)
        team.norm(wanted, last, self._norm, eps, final)
        return self._head(final)


def _take_layer(layer: Any, spec: LayerSpec) -> _Layer:
    """The layer's weights, fused and packed; the originals are let go, so that memory holds one copy of each."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [item.bias.detach() for item in projections if item.bias is not None]
    norms = [getattr(attention, name).weight.detach() for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    result = _Layer(
        spec=spec, norm_in=layer.input_layernorm.weight.detach(),
        qkv=packed(torch.cat([item.weight.detach() for item in projections]), torch.cat(biases) if biases else None),
        head_norms=torch.stack(norms) if norms else None, out=packed_module(attention.o_proj),
        norm_mid=layer.post_attention_layernorm.weight.detach(),
        gate_up=packed(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])),
        down=packed_module(mlp.down_proj))
    for item in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        item.weight = torch.nn.Parameter(item.weight.new_empty(0), requires_grad=False)
    return result
