"""Shapes of models: what a simulator or dummy weights need to know, without weights and without torch.

Named shapes carry the published sizes: OPT from Zhang et al. 2022, table 1; LLaMA from Touvron et al. 2023, table 2;
the others from the configuration files their authors publish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.core.errors import CannotRunError, UsageError

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
OPT_POSITION_OFFSET = 2
"""OPT's position table has two rows more than it has positions."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one decoder. Lengths in tokens, widths in elements.

    `family` is the Hugging Face model type. `gated` MLPs have three matrices, plain ones two. `experts` is 0 for
    dense models, else `experts_per_token` of them work on each token. `window` is the sliding window of every layer.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool = False
    gated: bool = True
    linear_bias: bool = False
    qkv_bias: bool = False
    learned_positions: int = 0
    rope_theta: float = 10000.0
    window: int | None = None
    experts: int = 0
    experts_per_token: int = 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = 2 * self.hidden * query + 2 * self.hidden * key
        if self.linear_bias or self.qkv_bias:
            count += query + 2 * key
        return count + (self.hidden if self.linear_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's feed-forward part (of one expert, when there are several)."""
        count = (3 if self.gated else 2) * self.hidden * self.intermediate
        return count + (self.intermediate + self.hidden if self.linear_bias else 0)

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.linear_bias else 1)

    def _layer_parameters(self, experts: int) -> int:
        router = self.hidden * self.experts
        return self.attention_parameters + router + self.mlp_parameters * max(experts, 1) + 2 * self._norm_parameters

    @property
    def parameters(self) -> int:
        """All weights, tied ones once."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2) + self.learned_positions * self.hidden
        return tables + self._norm_parameters + self.layers * self._layer_parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with in the layers (embeddings and the output head left out)."""
        return self.layers * self._layer_parameters(self.experts_per_token)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, which only rows that want logits pass through."""
        return self.vocab * self.hidden

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all weights in `dtype` (a name of DTYPE_BYTES)."""
        return self.parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Bytes of keys and values of one token, all layers (paper section 3: 800 KB for OPT-13B in fp16)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def attention_flops(self, context: int) -> int:
        """Floating-point operations of scores and weighted values for one token over `context` keys."""
        return 4 * self.layers * self.heads * self.head_dim * context

    def to_config(self) -> dict[str, Any]:
        """Fields of a Hugging Face config.json with this shape (families opt, gpt2, and the llama-like ones)."""
        if self.family == "opt":
            return {"model_type": "opt", "num_hidden_layers": self.layers, "hidden_size": self.hidden,
                    "word_embed_proj_dim": self.hidden, "num_attention_heads": self.heads, "ffn_dim": self.intermediate,
                    "vocab_size": self.vocab, "max_position_embeddings": self.max_positions,
                    "do_layer_norm_before": True, "tie_word_embeddings": self.tied, "init_std": 0.02}
        if self.family == "gpt2":
            return {"model_type": "gpt2", "n_layer": self.layers, "n_embd": self.hidden, "n_head": self.heads,
                    "n_inner": self.intermediate, "vocab_size": self.vocab, "n_positions": self.max_positions,
                    "tie_word_embeddings": self.tied}
        config: dict[str, Any] = {
            "model_type": self.family, "num_hidden_layers": self.layers, "hidden_size": self.hidden,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate, "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions, "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }
        if self.family == "mistral":
            config["sliding_window"] = self.window
        return config


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(name, "opt", layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50272, 2048, tied=True,
                      gated=False, linear_bias=True, learned_positions=2048 + OPT_POSITION_OFFSET)


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(name, "gpt2", layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50257, 1024, tied=True,
                      gated=False, linear_bias=True, learned_positions=1024)


def _llama(name: str, layers: int, hidden: int, heads: int, intermediate: int, *, kv_heads: int | None = None,
           vocab: int = 32000, positions: int = 2048, tied: bool = False, theta: float = 10000.0) -> ModelShape:
    return ModelShape(name, "llama", layers, hidden, heads, kv_heads or heads, hidden // heads, intermediate, vocab,
                      positions, tied=tied, rope_theta=theta)


SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in (
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-2.7b", 32, 2560, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _opt("opt-30b", 48, 7168, 56),
    _opt("opt-66b", 64, 9216, 72),
    _opt("opt-175b", 96, 12288, 96),
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-xl", 48, 1600, 25),
    _llama("llama-7b", 32, 4096, 32, 11008),
    _llama("llama-13b", 40, 5120, 40, 13824),
    _llama("llama-30b", 60, 6656, 52, 17920),
    _llama("llama-65b", 80, 8192, 64, 22016),
    _llama("llama2-70b", 80, 8192, 64, 28672, kv_heads=8, positions=4096),
    _llama("llama3-8b", 32, 4096, 32, 14336, kv_heads=8, vocab=128256, positions=8192, theta=500000.0),
    _llama("smollm2-135m", 30, 576, 9, 1536, kv_heads=3, vocab=49152, positions=8192, tied=True, theta=100000.0),
    _llama("smollm2-360m", 32, 960, 15, 2560, kv_heads=5, vocab=49152, positions=8192, tied=True, theta=100000.0),
    _llama("smollm2-1.7b", 24, 2048, 32, 8192, vocab=49152, positions=8192, tied=True, theta=130000.0),
    ModelShape("mistral-7b", "mistral", 32, 4096, 32, 8, 128, 14336, 32000, 32768, window=4096),
    ModelShape("qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, tied=True, qkv_bias=True,
               rope_theta=1000000.0),
)}

_PLAIN_MLP = frozenset({"opt", "gpt2", "gpt_neox", "gptj", "phi", "starcoder2", "gpt_bigcode", "codegen", "nemotron"})
_BIASED = frozenset({"opt", "gpt2", "gpt_neox", "phi", "starcoder2", "gpt_bigcode"})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})


def find_shape(name: str) -> ModelShape | None:
    """The named shape, by short name or as the last part of a hub id (`facebook/opt-13b`), in any case."""
    return SHAPES.get(name.rsplit("/", 1)[-1].lower())


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes. UsageError names the first size that is missing or wrong."""
    config = config.get("text_config", config)
    family = str(config.get("model_type", "llama"))

    def size(*names: str) -> int:
        for key in names:
            value = config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: {key} = {value!r} in the model's config: must be a whole number, at least 1")
            return value
        raise UsageError(f"{name}: the model's config has no {' or '.join(names)}, so its size is unknown")

    def size_or(default: int, *names: str) -> int:
        return size(*names) if any(config.get(key) is not None for key in names) else default

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
    kv_heads = size_or(1 if config.get("multi_query") else heads, "num_key_value_heads", "num_kv_heads")
    positions = size_or(2048, "max_position_embeddings", "n_positions")
    offset = OPT_POSITION_OFFSET if family == "opt" else 0
    learned = positions + offset if family in ("opt", "gpt2", "gpt_bigcode") else 0
    rope = config.get("rope_parameters") or {}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    experts = size_or(0, "num_local_experts", "num_experts") if any(
        config.get(key) for key in ("num_local_experts", "num_experts")) else 0
    return ModelShape(
        name=name, family=family, layers=size("num_hidden_layers", "n_layer"), hidden=hidden, heads=heads,
        kv_heads=kv_heads, head_dim=size_or(hidden // heads, "head_dim"),
        intermediate=size_or(4 * hidden, "moe_intermediate_size", "ffn_dim", "intermediate_size", "n_inner"),
        vocab=size("vocab_size"), max_positions=positions,
        tied=bool(config.get("tie_word_embeddings", family in ("opt", "gpt2", "gemma", "gemma2"))),
        gated=family not in _PLAIN_MLP, linear_bias=family in _BIASED,
        qkv_bias=family in _QKV_BIAS or bool(config.get("attention_bias")), learned_positions=learned,
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0), window=window,
        experts=experts, experts_per_token=size_or(2, "num_experts_per_tok") if experts else 0,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path` (a file or a folder that holds one). CannotRunError when it is not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as fault:
        raise CannotRunError(f"cannot read the model config {file}: {fault}", "bad_model_file") from fault
    if not isinstance(value, dict):
        raise CannotRunError(f"the model config {file} holds a {type(value).__name__}, not a JSON object",
                             "bad_model_file")
    return value


def resolve_shape(model: str) -> ModelShape:
    """The shape of a short name, a config.json or a folder with one; UsageError lists the names there are."""
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return shape_from_config(read_config(path), path.stem if path.suffix else path.name)
    shape = find_shape(model)
    if shape is None:
        raise UsageError(f"--model = {model!r}: no shape of that name (there are {', '.join(SHAPES)}) "
                         "and no config.json at that path")
    return shape
