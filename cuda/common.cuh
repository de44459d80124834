// What every attention kernel shares. Cache layout, K and V alike, for one layer:
//   element (block, kv_head, slot, dim) at base + block * block_stride + (kv_head * BS + slot) * D + dim
// where base already points at the layer's part of block 0 and block_stride counts elements between blocks
// (all layers, K and V, of a block lie together). Every offset that a block number enters is 64-bit.
// A kernel may hold 2^31 or more cache elements; a sequence holds fewer than 2^31 tokens.
#pragma once
#include "convert.cuh"
#include "ptx.cuh"

typedef long long i64;
#define NEG_INF (__int_as_float(0xff800000))
#define LOG2E 1.4426950408889634f
#define FULL_WARP 0xffffffffu

// Kernels say __launch_bounds__(threads, 1): without the 1, ptxas (12.9) aims at a rounder occupancy by itself and
// spills a few registers for it in the one-pass and the 256-wide kernels.

// Scores are kept in units of log2: exp(x) is then one ex2 with no multiplication. A true minus infinity marks
// masked tokens: any finite stand-in is within reach of real logits.

// Scaled score to its final value in log2 units: softcap * tanh(x / softcap) where CAP, then times log2(e).
template <bool CAP> __device__ __forceinline__ float finish_score(float x, float scale, float softcap) {
  if constexpr (CAP) return softcap * tanhf(x * scale / softcap) * LOG2E;
  return x * (scale * LOG2E);
}

// Reference for exponents: a maximum of minus infinity (no token seen) would give inf - inf.
__device__ __forceinline__ float finite_or_zero(float m) { return m == NEG_INF ? 0.f : m; }

// Tokens [lo, hi) that the query at position hi - 1 sees; window 0 means all.
__device__ __forceinline__ int window_start(int hi, int window) {
  return window > 0 && hi > window ? hi - window : 0;
}

// How a sequence's tokens [lo, hi) are divided among at most max_splits thread blocks. Split i holds tokens
// [base + i * len, base + (i + 1) * len) cut to [lo, hi). len is a multiple of 64 and at least min_len, so a
// sequence no longer than max_splits * min_len is always cut at the same positions, whatever the batch.
struct Splits {
  int base, len, count;
};
__device__ __forceinline__ Splits split_tokens(int lo, int hi, int max_splits, int min_len) {
  Splits s;
  s.base = lo / 64 * 64;
  const int n = hi - s.base;
  const int even = (n + max_splits - 1) / max_splits;
  s.len = (max(even, min_len) + 63) / 64 * 64;
  s.count = hi > lo ? (n + s.len - 1) / s.len : 0;
  return s;
}

// The head's sink logit joins the softmax denominator; maximum m and sum l are in log2 units. Returns the factor
// that brings a weighted sum taken relative to the old m to the new one.
__device__ __forceinline__ float add_sink(const float* sinks, int head, float& m, float& l) {
  if (sinks == nullptr) return 1.f;
  const float sink = sinks[head] * LOG2E;
  const float top = fmaxf(m, sink);
  const float f = l > 0.f ? ptx::ex2(m - top) : 0.f;
  l = l * f + ptx::ex2(sink - top);
  m = top;
  return f;
}
