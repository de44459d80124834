"""Which attention calls `pagedcli kernels` times: a short list, and the whole grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BATCHES = (8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 4096, 16_384)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK = 128
"""New tokens a sequence of a chunk case."""
PROMPT_PAIRS = 1 << 26
"""Query-key pairs of one prompt or chunk case at most: beyond, a row takes a slow machine minutes."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key/value heads and head size of a known model."""

    name: str
    heads: int
    kv_heads: int
    dim: int


HEADS: Mapping[str, Heads] = {item.name: item for item in (
    Heads("smollm2-135m", 9, 3, 64), Heads("opt-13b", 40, 40, 128), Heads("llama3-8b", 32, 8, 128),
    Heads("opt-125m", 12, 12, 64), Heads("gemma-2b", 8, 1, 256),
)}
"""Groups of 3, 1, 4, 1 and 8."""


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `context` tokens, of which a step computes the last `fresh`, in blocks of `block_size`.

    kernel: decode, chunk or prompt, or a decode kernel of the CUDA backend by name.
    """

    kernel: str
    heads: Heads
    batch: int
    context: int
    block_size: int = 16

    @property
    def fresh(self) -> int:
        """Tokens a sequence that the step computes."""
        if self.kernel == "prompt":
            return self.context
        return min(CHUNK, self.context) if self.kernel == "chunk" else 1

    @property
    def decode_kernel(self) -> str | None:
        """The CUDA kernel that is asked for by name."""
        return self.kernel.removeprefix("decode_") if self.kernel.startswith("decode_") else None

    @property
    def label(self) -> str:
        return (f"{self.kernel}, {self.heads.name}, batch {self.batch}, context {self.context} tokens, blocks of "
                f"{self.block_size} tokens")


def figure_18a(heads: Heads) -> list[Case]:
    """The paper's Figure 18a: one decode call at its batches and contexts, blocks of 16."""
    return [Case("decode", heads, batch, context) for batch in (8, 32) for context in (64, 128, 256)]


def quick_cases(cuda: bool) -> list[Case]:
    """One thing changed at a time, the most telling first."""
    main, others = HEADS["smollm2-135m"], [HEADS[name] for name in ("llama3-8b", "opt-125m", "gemma-2b")]
    cases = [Case("decode", main, 8, context) for context in (64, 1024, 4096)]
    cases += [Case("decode", main, 32, 512, size) for size in (1, 8, 16, 64, 256)]
    cases += [Case("decode", heads, 16, 512) for heads in others]
    cases += [Case("prompt", main, 4, 256), Case("prompt", main, 1, 1024), Case("chunk", main, 4, 1024)]
    cases += [Case("decode", main, 256, 512), Case("decode", main, 8, 16_384)]
    if cuda:
        cases += [Case("prompt", HEADS["llama3-8b"], 8, 2048), Case("prompt", HEADS["opt-13b"], 1, 4096)]
        cases += named_kernels(32, 1024)
    return cases


def full_cases(cuda: bool) -> list[Case]:
    """Batches by contexts for every group of heads, block sizes, prompts and chunks."""
    cases = [Case("decode", heads, batch, context) for heads in HEADS.values() for context in CONTEXTS
             for batch in BATCHES]
    cases += [Case("decode", heads, batch, context, size) for heads in (HEADS["smollm2-135m"], HEADS["opt-13b"])
              for batch, context in ((8, 4096), (32, 1024)) for size in BLOCK_SIZES if size != 16]
    for kernel in ("prompt", "chunk"):
        cases += [Case(kernel, heads, batch, context, size) for heads in HEADS.values() for batch in (1, 8, 32)
                  for context in CONTEXTS for size in (16, 128)
                  if batch * context * (context if kernel == "prompt" else CHUNK) <= PROMPT_PAIRS]
    return cases + (named_kernels(32, 1024) + named_kernels(8, 16_384) if cuda else [])


def named_kernels(batch: int, context: int) -> list[Case]:
    """The CUDA backend's decode kernels beside each other, where more than one can run."""
    return [Case(f"decode_{name}", HEADS[model], batch, context) for model, names in (
        ("opt-13b", ("v1", "split", "mma")), ("llama3-8b", ("v1", "split", "mma")), ("smollm2-135m", ("split", "mma")),
    ) for name in names]
