"""A Llama-like decoder's weights as the native program reads them: packed for its products, one copy of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedcli.attention.host_arrays import aligned_copy, aligned_zeros, as_array
from pagedcli.attention.interface import LayerSpec
from pagedcli.execution import linear_kernels as linear
from pagedcli.execution.host_memory import give_back

if TYPE_CHECKING:
    from pagedcli.execution.hf_model import HFDecoder


@dataclass(frozen=True, slots=True)
class Packed:
    """One product's weights in groups (see linear_kernels.pack) and its bias, float32, zeros where there is none.
    `width`: input elements."""

    weights: NDArray[Any]
    bias: NDArray[np.float32]
    width: int

    @property
    def columns(self) -> int:
        return len(self.bias)


def pack_product(weight: Any, bias: Any = None) -> Packed:
    """[N, K] and [N], arrays or tensors, as the kernels want them, N padded to whole groups."""
    padded_bias = aligned_zeros([linear.padded(weight.shape[0])], np.float32)
    if bias is not None:
        padded_bias[:len(bias)] = as_array(bias)
    return Packed(linear.pack(as_array(weight)), padded_bias, weight.shape[1])


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `head_norms`: [2, dim] for queries and keys, or None."""

    norm_in: NDArray[Any]
    norm_mid: NDArray[Any]
    head_norms: NDArray[Any] | None
    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """All of a decoder. `embedding` [vocab_size, hidden] is None where the head's weights are the same.

    `inv_freq` [dim / 2] float32 and `rotary_scale` make the rotary table.
    """

    specs: tuple[LayerSpec, ...]
    vocab_size: int
    hidden: int
    eps: float
    rotary_scale: float
    inv_freq: NDArray[np.float32]
    embedding: NDArray[Any] | None
    norm: NDArray[Any]
    head: Packed
    layers: tuple[LayerWeights, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.norm.dtype


def pack_layer(layer: Any) -> LayerWeights:
    """A module's weights, packed; the originals are let go, so that memory holds one copy of each."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [as_array(item.bias) for item in projections if item.bias is not None]
    norms = [as_array(getattr(attention, name).weight) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    result = LayerWeights(
        # Copies: views into the file of weights would keep all of it in memory.
        norm_in=aligned_copy(layer.input_layernorm.weight),
        norm_mid=aligned_copy(layer.post_attention_layernorm.weight),
        head_norms=aligned_copy(np.stack(norms)) if norms else None,
        qkv=pack_product(np.concatenate([as_array(item.weight) for item in projections]),
                         np.concatenate(biases) if biases else None),
        out=pack_product(attention.o_proj.weight, attention.o_proj.bias),
        gate_up=pack_product(linear.gated(as_array(mlp.gate_proj.weight), as_array(mlp.up_proj.weight))),
        down=pack_product(mlp.down_proj.weight, mlp.down_proj.bias))
    for item in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        item.weight.data = item.weight.new_empty(0)
    return result


def pack_weights(source: HFDecoder) -> NativeWeights:
    """The weights of a decoder that `native_decoder.not_native` finds nothing wrong with; takes it apart."""
    module: Any = source.module
    rotary, embedding, head = module.model.rotary_emb, module.model.embed_tokens.weight, module.lm_head
    tied = head.weight.data_ptr() == embedding.data_ptr() and head.bias is None
    result = NativeWeights(
        specs=source.specs, vocab_size=source.vocab_size, hidden=int(module.config.hidden_size),
        eps=float(module.config.rms_norm_eps),
        rotary_scale=float(getattr(rotary, "attention_scaling", 1.0)), inv_freq=aligned_copy(rotary.inv_freq.float()),
        embedding=None if tied else aligned_copy(embedding), norm=aligned_copy(module.model.norm.weight),
        head=pack_product(head.weight, head.bias),
        layers=tuple(pack_layer(layer) for layer in module.model.layers))
    give_back()  # some 200 MiB of the originals of a small model
    return result


def tensors(weights: Any, prefix: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array with its path of field names and layer numbers, in one order."""
    for field in fields(weights):
        value = getattr(weights, field.name)
        name = prefix + field.name
        if isinstance(value, np.ndarray):
            yield name, value
        elif isinstance(value, Packed):
            yield from tensors(value, name + ".")
        elif field.name == "layers":
            for number, layer in enumerate(value):
                yield from tensors(layer, f"{name}.{number}.")


def rebuild(facts: Mapping[str, Any], found: Mapping[str, NDArray[Any]]) -> NativeWeights:
    """The inverse of `tensors`: weights from their tensors by name and `facts`, the numbers among the fields."""
    def product(name: str) -> Packed:
        weights = found[f"{name}.weights"]
        width = weights.shape[1] * (weights.shape[3] if weights.ndim == 4 else 1)
        return Packed(weights, found[f"{name}.bias"], width)

    layers = tuple(LayerWeights(
        norm_in=found[f"layers.{n}.norm_in"], norm_mid=found[f"layers.{n}.norm_mid"],
        head_norms=found.get(f"layers.{n}.head_norms"),
        **{part: product(f"layers.{n}.{part}") for part in ("qkv", "out", "gate_up", "down")})
        for n in range(len(facts["specs"])))
    return NativeWeights(
        specs=tuple(LayerSpec(**spec) for spec in facts["specs"]),
        **{key: facts[key] for key in ("vocab_size", "hidden", "eps", "rotary_scale")},
        inv_freq=found["inv_freq"], embedding=found.get("embedding"), norm=found["norm"], head=product("head"),
        layers=layers)
