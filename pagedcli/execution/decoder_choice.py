"""Which of the ways to run a loaded model is the fastest that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedcli.attention.cpu import CpuBackend
from pagedcli.attention.interface import AttentionBackend
from pagedcli.core.dtypes import dtype_name
from pagedcli.execution import linear_kernels as linear
from pagedcli.execution.decoder import Decoder
from pagedcli.execution.fused_decoder import FusedDecoder, unfusable, widens
from pagedcli.execution.native_decoder import NATIVE, NativeDecoder
from pagedcli.execution.native_weights import pack_weights

if TYPE_CHECKING:
    from pagedcli.execution.hf_model import HFDecoder


def not_native(decoder: HFDecoder, backend: AttentionBackend) -> str | None:
    """None when the decoder can run as a native program over this backend, else the reason that it cannot."""
    reason = unfusable(decoder) or linear.lacks(dtype_name(decoder.dtype))
    if reason is not None:
        return reason
    if not isinstance(backend, CpuBackend):
        return f"the {backend.name} attention backend"
    config: Any = decoder.module.config
    if any(hasattr(layer.self_attn.o_proj, "combine") for layer in decoder.module.model.layers):
        return "layers split among ranks"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "odd widths"
    if len({(spec.heads, spec.kv_heads, spec.value_dim) for spec in decoder.specs}) > 1:
        return "layers of several shapes"
    return None


def choose_decoder(decoder: HFDecoder, backend: AttentionBackend) -> tuple[Callable[[HFDecoder, int], Decoder], str]:
    """What makes the decoder to run from (the loaded one, most positions), the fastest that can, and what it is."""
    unfused = unfusable(decoder)
    if unfused is not None:
        return lambda own, _: own, f"transformers' own modules ({unfused})"
    slower = not_native(decoder, backend)
    if slower is not None:
        how = "products by oneDNN" + (" in fp32, rounded to bf16" if widens(decoder.dtype) else "")
        return FusedDecoder, f"fused, {how} ({slower})"
    return lambda own, most: NativeDecoder(pack_weights(own), most), NATIVE
