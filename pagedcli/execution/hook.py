"""The function that Hugging Face attention layers call in place of their own, and what it calls in turn.

transformers looks attention functions up by name in one class-level registry, so ours is registered there once, under
`HOOK_NAME`. Which run a call belongs to is told by a ContextVar that the runner sets around the model's forward:
extra keyword arguments would not do (some models drop them), and a context variable keeps two models, or two threads,
apart without any module being changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from pagedcli.attention.interface import AttentionBackend, LayerSpec
from pagedcli.core.errors import CannotRunError

HOOK_NAME = "pagedcli"

HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "is_causal", "output_hidden_states",
                      "return_dict", "logits_to_keep", "layer_idx", "training"})
"""Arguments that layers pass along and that say nothing about which keys a query sees or how it weighs them."""

UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


class AttentionRun(Protocol):
    """What answers the calls of one forward. q, k, v: [T, heads, dim] views; returns [T, heads, value_dim]."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               arguments: Mapping[str, Any]) -> torch.Tensor: ...


_RUN: ContextVar[AttentionRun | None] = ContextVar("pagedcli_attention_run", default=None)


@contextmanager
def running(run: AttentionRun) -> Iterator[None]:
    """Answer attention calls with `run`, inside."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def attention_hook(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   attention_mask: torch.Tensor | None = None, *positional: Any,
                   **arguments: Any) -> tuple[torch.Tensor, None]:
    """query [1, H, T, d], key and value [1, Hkv, T, d'], after rotary embedding -> ([1, T, H, dv], None)."""
    run = _RUN.get()
    if run is None:
        raise CannotRunError("a model loaded for paged attention was called outside its executor", "hook_misused")
    if attention_mask is not None or positional:
        raise CannotRunError(f"{type(module).__name__} builds its own attention mask, which paged attention cannot "
                             "honour", "model_unsupported")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise CannotRunError(f"{type(module).__name__} does not say which layer it is (no layer_idx)",
                             "model_unsupported")
    out = run.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), arguments)
    return out.unsqueeze(0), None


AttentionInterface.register(HOOK_NAME, attention_hook)


def read_spec(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: Mapping[str, Any]) -> LayerSpec:
    """The layer's shape and rule, from one call. CannotRunError names an argument that nobody here understands."""
    for name, value in arguments.items():
        if name in UNDERSTOOD or name in HARMLESS or value is None or value is False:
            continue
        raise CannotRunError(f"the model's attention asks for {name}, which paged attention does not offer",
                             "model_unsupported")
    if arguments.get("is_causal") is False:
        raise CannotRunError("the model's attention is not causal", "model_unsupported")
    scale, window = arguments.get("scaling"), arguments.get("sliding_window")
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1]:
        raise CannotRunError(f"attention with queries {list(q.shape[1:])}, keys {list(k.shape[1:])} and values "
                             f"{list(v.shape[1:])} (heads, dim) is not a grouping of heads", "model_unsupported")
    return LayerSpec(heads=q.shape[1], kv_heads=k.shape[1], key_dim=k.shape[2], value_dim=v.shape[2],
                     scale=float(k.shape[2] ** -0.5 if scale is None else scale),
                     window=None if window is None else int(window), softcap=arguments.get("softcap"),
                     sinks=arguments.get("s_aux") is not None)


class Observer:
    """Answers with zeros and writes down each layer's spec, in the order of the calls."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               arguments: Mapping[str, Any]) -> torch.Tensor:
        if layer in self.specs:
            raise CannotRunError(f"the model's layer {layer} attends more than once a step", "model_unsupported")
        self.specs[layer] = read_spec(q, k, v, arguments)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


class PagedRun:
    """Answers from the paged cache, and checks that each layer calls once a forward, with the spec it was loaded with.

    `seconds` is the time spent in attention since the last `start` (wall time, so only meaningful on a CPU).
    """

    def __init__(self, backend: AttentionBackend, specs: Mapping[int, LayerSpec]) -> None:
        self._backend = backend
        self._specs = specs
        self._place = {layer: place for place, layer in enumerate(specs)}
        self._rules = {layer: (spec.window, spec.softcap, spec.sinks) for layer, spec in specs.items()}
        self._expected = list(specs)
        self._called: list[int] = []
        self.seconds = 0.0

    def start(self) -> None:
        self._called.clear()
        self.seconds = 0.0

    def finish(self) -> None:
        """CannotRunError unless every layer attended exactly once since `start`."""
        if self._called != self._expected:
            raise CannotRunError(f"the model's layers attended in the order {self._called}, but "
                                 f"{self._expected} when it was loaded", "model_unsupported")

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               arguments: Mapping[str, Any]) -> torch.Tensor:
        began = time.perf_counter()
        sinks = arguments.get("s_aux")
        rule = (arguments.get("sliding_window"), arguments.get("softcap"), sinks is not None)
        if self._rules.get(layer) != rule:
            raise CannotRunError(f"layer {layer} attends by another rule (window, softcap, sinks = {rule}) than when "
                                 f"the model was loaded ({self._rules.get(layer)})", "model_unsupported")
        self._called.append(layer)
        out = self._backend.attend(self._place[layer], q, k, v, self._specs[layer], sinks)
        self.seconds += time.perf_counter() - began
        return out
