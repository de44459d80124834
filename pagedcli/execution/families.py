"""Which model types cannot run on a paged cache, and what a config says about positions. No torch is imported here.

The lists come from running tiny random models of every causal type of transformers 5.24 against eager attention; types
that are in no list are still compared with eager attention when they load (see probe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedcli.core.errors import CannotRunError, UsageError
from pagedcli.core.wording import counted

_ALIBI = "adds ALiBi biases inside its own attention, which never calls the attention interface"
_OWN = "computes attention in its own code, which never calls the attention interface"
_STATE = "keeps a recurrent state besides (or instead of) keys and values"
_ENCODER = "is an encoder or an encoder-decoder, not a decoder"
_MASK = "hides keys by a mask of its own, not by causality or a window"
_TWICE = "attends several times in one layer"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt", "falcon"), _ALIBI),
    **dict.fromkeys(("xglm", "openai-gpt", "gpt_neox_japanese", "cpmant", "xlm", "trocr", "ctrl", "reformer", "xlnet",
                     "transfo-xl"), _OWN),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "granitemoehybrid", "kimi_linear", "rwkv",
                     "qwen3_next", "nemotron_h", "falcon_h1", "olmo_hybrid", "minimax", "recurrent_gemma", "zamba",
                     "zamba2", "xlstm"), _STATE),
    **dict.fromkeys(("bert", "roberta", "electra", "camembert", "xlm-roberta", "rembert", "roformer", "bart", "marian",
                     "pegasus", "mbart", "blenderbot", "blenderbot-small", "mvp", "plbart", "prophetnet", "t5"),
                    _ENCODER),
    **dict.fromkeys(("llama4", "llama4_text", "doge"), _MASK),
    **dict.fromkeys(("diffllama", "dory", "hrm"), _TWICE),
}
"""Hugging Face model type -> why it cannot run here."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refuse(model_type: str, reason: str) -> CannotRunError:
    """The error for a model whose attention cannot be paged."""
    return CannotRunError(f"models of type {model_type!r} cannot run on a paged KV cache: this one {reason}. Types "
                          "that can: llama, opt, gpt2, mistral, mixtral, qwen2, qwen3, gemma, gemma2, phi, phi3, "
                          "gpt_oss, olmo, and others", "model_unsupported")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def check_family(config: Mapping[str, Any]) -> None:
    """CannotRunError, by type and reason, for a config whose model is known not to work."""
    text = _text(config)
    for model_type in (config.get("model_type"), text.get("model_type")):
        if isinstance(model_type, str) and model_type in REFUSED:
            raise refuse(model_type, REFUSED[model_type])
    if config.get("is_encoder_decoder"):
        raise refuse(str(config.get("model_type")), _ENCODER)
    odd = sorted(set(text.get("layer_types") or ()) - LAYER_TYPES)
    if odd:
        raise refuse(str(text.get("model_type")), f"has layers of type {', '.join(odd)}")


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every rope description in a config: one, one a layer type, or none."""
    found: list[Mapping[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = text.get(key)
        if isinstance(value, Mapping):
            nested = [item for item in value.values() if isinstance(item, Mapping)]
            found += nested or [value]
    return found


LEAST_POSITIONS = 12
"""The trial that every model passes at load has prompts of 11 tokens (probe.LENGTHS)."""


def position_limit(config: Mapping[str, Any], asked: int | None) -> tuple[int, str | None]:
    """Longest sequence (prompt plus output, tokens), and a note when the model's own limit was lowered.

    Rope types whose frequencies follow the longest sequence of the batch (dynamic NTK, longrope) are served only up to
    their original length: past it a long neighbour would change what short sequences compute, and cached keys
    would be stale. UsageError when `asked` is beyond the limit, or too little for the trial at load.
    """
    text = _text(config)
    own = next((text[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
                if isinstance(text.get(key), int)), None)
    note = None
    if own is not None:
        for rope in _ropes(text):
            kind = rope.get("rope_type", rope.get("type"))
            if kind in ("dynamic", "longrope"):
                first = rope.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
                limit = int(first) if first else own
                if limit < own:
                    note = (f"{kind} rope: served up to its original {counted(limit, 'position')}, not {own:,}, "
                            "because past them a sequence's values would depend on its neighbours")
                own = min(own, limit)
    if asked is not None and asked < LEAST_POSITIONS:
        raise UsageError(f"--max-model-len = {asked}: must be at least {LEAST_POSITIONS} tokens, which the trial of a "
                         "model at load needs; --max-tokens limits the output of rows")
    if own is None and asked is None:
        raise UsageError("the model's config gives no longest sequence; say it with --max-model-len")
    if own is not None and asked is not None and asked > own:
        raise UsageError(f"--max-model-len = {asked}: the model has {counted(own, 'position')}"
                         + (f" ({note})" if note else ""))
    limit = asked if asked is not None else own
    assert limit is not None
    return limit, note
