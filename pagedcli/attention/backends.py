"""Attention backends by name. Each is imported only when asked for."""

from __future__ import annotations

import importlib
from typing import Any

from pagedcli.attention.interface import AttentionBackend
from pagedcli.core.errors import CannotRunError, UsageError

BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("pagedcli.attention.cpu", "CpuBackend"),
    "reference": ("pagedcli.attention.reference", "ReferenceBackend"),
    "cuda": ("pagedcli.attention.cuda", "CudaBackend"),
}
"""Name -> (module, class). A new backend is one more line."""


def make_backend(name: str, **options: Any) -> AttentionBackend:
    """An unbound backend, made with the options that its class takes.

    UsageError: no backend has this name. CannotRunError: it exists but something it needs is missing here.
    """
    if name not in BACKENDS:
        raise UsageError(f"--attention-backend = {name!r}: must be one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except ImportError as fault:
        raise CannotRunError(f"--attention-backend {name} cannot run here: {fault}. "
                             f"Install what is missing or choose another of {', '.join(BACKENDS)}",
                             "backend_unavailable") from fault
    made: AttentionBackend = backend(**options)
    return made
