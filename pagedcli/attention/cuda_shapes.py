"""What a CUDA kernel is compiled for, what a device allows, and the sizes that follow. No torch, no CuPy.

Some figures repeat what cuda/*.cuh computes at compile time (lanes per row, shared memory); a test compiles those
headers and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

CPP_TYPES: dict[str, str] = {
    "fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
}
"""Names of element types here -> in the CUDA sources."""
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
QUERY_TYPES: tuple[str, ...] = ("fp32", "fp16", "bf16")
HEAD_DIMS: tuple[int, ...] = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES: tuple[int, ...] = (8, 16, 32, 64, 128)
MINIMUM_CAPABILITY: tuple[int, int] = (8, 0)
"""cp.async and bfloat16 tensor cores came with compute capability 8.0."""
STATIC_SHARED_RESERVE = 2048
"""Bytes of a block's shared memory left to static arrays and to the driver (1 KiB a block from sm_80 on)."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What planning needs of a GPU. Shared memory in bytes."""

    sm_count: int
    shared_per_block: int
    shared_per_sm: int
    capability: tuple[int, int]


A100 = DeviceLimits(108, 163 * 1024, 164 * 1024, (8, 0))
H200 = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0))
"""CUDA C++ Programming Guide, table of technical specifications per compute capability; SM counts: datasheets."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's shape and rule, with the element types of queries and cache.

    window: tokens a query sees, 0 for all. softcap: 0 for none. scale multiplies q.k.
    """

    dtype: str
    cache_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def tensor_cores(self) -> bool:
        """Whether the query type has a tensor-core product with float32 sums."""
        return self.dtype in ("fp16", "bf16")

    @property
    def lane_elements(self) -> int:
        """Elements of a row that one lane of the CUDA-core kernels holds (RowShape::E)."""
        vector = 8 if ELEMENT_BYTES[self.cache_dtype] == 1 else 16 // ELEMENT_BYTES[self.cache_dtype]
        count = self.head_dim // vector
        best, least = 0, 1 << 30
        for vectors in range(1, 7):
            lanes = 1 << (-(-count // vectors) - 1).bit_length()
            held = vectors * vector
            cost = (lanes * vectors - count) * 64 + abs(held - 16)
            if lanes <= 32 and held <= 24 and cost < least:
                best, least = held, cost
        return best

    @property
    def rows(self) -> int:
        """Query rows that share a K and V load in the CUDA-core kernels: what the registers allow."""
        most = 4 if self.lane_elements <= 16 else 2
        chunks = -(-self.group // most)
        return -(-self.group // chunks)

    def unsupported(self) -> str | None:
        """Why no kernel takes this shape, naming value and limit; None when one does."""
        if self.dtype not in QUERY_TYPES:
            return f"query type {self.dtype}: the CUDA kernels take {', '.join(QUERY_TYPES)}"
        if self.cache_dtype not in CPP_TYPES or (
                ELEMENT_BYTES[self.cache_dtype] > 1 and self.cache_dtype != self.dtype):
            return (f"cache type {self.cache_dtype} with {self.dtype} queries: it must be {self.dtype}, "
                    "fp8_e4m3 or fp8_e5m2")
        if self.head_dim not in HEAD_DIMS:
            return f"head size {self.head_dim}: the CUDA kernels take {', '.join(map(str, HEAD_DIMS))}"
        if self.block_size not in BLOCK_SIZES:
            return f"block size {self.block_size}: the CUDA kernels take {', '.join(map(str, BLOCK_SIZES))}"
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            return f"{self.heads} query heads over {self.kv_heads} kv heads: not a whole group"
        if self.window < 0 or self.softcap < 0:
            return f"window {self.window}, softcap {self.softcap}: must not be negative"
        return None


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shared-memory tile of the tensor-core kernels (KvTile): `tokens` rows of one kv head."""

    shape: AttentionShape
    tokens: int

    @property
    def padded_row(self) -> int:
        """Elements between rows of a 16-bit tile."""
        return -(-self.shape.head_dim // 16) * 16 + 8

    @property
    def widens(self) -> bool:
        return ELEMENT_BYTES[self.shape.cache_dtype] == 1

    @property
    def stage_bytes(self) -> int:
        """One staged K and V tile."""
        row = -(-self.shape.head_dim // 16) * 16 if self.widens else 2 * self.padded_row
        return 2 * self.tokens * row

    @property
    def wide_bytes(self) -> int:
        """The 16-bit K and V tiles that 8-bit ones are widened into; 0 where nothing is widened."""
        return 2 * self.tokens * self.padded_row * 2 if self.widens else 0

    @property
    def query_bytes(self) -> int:
        """One warp's query rows, kept in shared memory above head size 128."""
        return 0 if self.shape.head_dim <= 128 else 16 * self.padded_row * 2


def mma_decode_bytes(shape: AttentionShape, warps: int, stages: int) -> int:
    """Dynamic shared memory of decode_mma (MmaDecode::SHARED)."""
    tile = TileShape(shape, 16)
    own = stages * tile.stage_bytes + tile.wide_bytes + tile.query_bytes
    return max(warps * own, warps * 16 * shape.head_dim * 4)


def mma_prefill_bytes(shape: AttentionShape, warps: int) -> int:
    """Dynamic shared memory of prefill_mma (MmaPrefill::SHARED)."""
    tile = TileShape(shape, 32)
    return 2 * tile.stage_bytes + tile.wide_bytes + warps * tile.query_bytes
