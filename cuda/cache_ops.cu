// Writing new tokens into the cache and copying whole blocks.
#include "common.cuh"

// Fused reshape and write of new keys and values. k, v: [tokens][kv_heads][D] with strides between tokens and heads
// (elements; 16-byte aligned rows); slots [tokens]: block * BS + slot, or negative for a padding row, which is not
// written. k_scale, v_scale [kv_heads] divide what goes into 8-bit elements (null: 1).
// grid (entries of slots), any block size.
template <class T, class C, int D, int BS>
__global__ void __launch_bounds__(256)
    reshape_and_cache(const T* __restrict__ k, const T* __restrict__ v, C* __restrict__ k_cache,
                      C* __restrict__ v_cache, const i64* __restrict__ slots, const float* __restrict__ k_scale,
                      const float* __restrict__ v_scale, int kv_heads, i64 k_stride, i64 k_head_stride, i64 v_stride,
                      i64 v_head_stride, i64 block_stride) {
  constexpr int V = 16 / sizeof(T), VECS = D / V;
  static_assert(D % V == 0, "head dimension must be a whole number of vectors");
  const i64 token = blockIdx.x, slot = slots[token];
  if (slot < 0) return;
  const i64 at_token = slot / BS * block_stride + slot % BS * D;
  for (int i = threadIdx.x; i < kv_heads * VECS; i += blockDim.x) {
    const int head = i / VECS, d = i % VECS * V;
    const T* k_from = k + token * k_stride + head * k_head_stride + d;
    const T* v_from = v + token * v_stride + head * v_head_stride + d;
    const i64 at = at_token + (i64)head * (BS * D) + d;
    if constexpr (IsFp8<C>::value) {
      float kf[V], vf[V];
      load_floats<T, V>(k_from, kf);
      load_floats<T, V>(v_from, vf);
      const float kr = k_scale == nullptr ? 1.f : 1.f / k_scale[head];
      const float vr = v_scale == nullptr ? 1.f : 1.f / v_scale[head];
      unsigned kw[V / 4], vw[V / 4];
#pragma unroll
      for (int w = 0; w < V / 4; w++) {
        kw[w] = vw[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          kw[w] |= (unsigned)from_float<C>(kf[4 * w + b] * kr).bits << 8 * b;
          vw[w] |= (unsigned)from_float<C>(vf[4 * w + b] * vr).bits << 8 * b;
        }
        reinterpret_cast<unsigned*>(k_cache + at)[w] = kw[w];
        reinterpret_cast<unsigned*>(v_cache + at)[w] = vw[w];
      }
    } else {
      *reinterpret_cast<uint4*>(k_cache + at) = *reinterpret_cast<const uint4*>(k_from);
      *reinterpret_cast<uint4*>(v_cache + at) = *reinterpret_cast<const uint4*>(v_from);
    }
  }
}

// Whole blocks, all layers at once: block pairs[2 i] of src to block pairs[2 i + 1] of dst. src and dst may be the
// same pool (copy-on-write) or a device pool and host memory mapped into the device's space (swap). No block may be
// written and also read or written again within one launch: thread blocks run in any order.
// block_bytes is a multiple of 16. grid (pairs, pieces), block 256; each piece is piece_bytes long.
extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(unsigned char* dst, const unsigned char* src, const i64* __restrict__ pairs, i64 block_bytes,
                i64 piece_bytes) {
  const i64 from = blockIdx.y * piece_bytes;
  const i64 to = min(block_bytes, from + piece_bytes);
  const unsigned char* s = src + pairs[2 * (i64)blockIdx.x] * block_bytes;
  unsigned char* d = dst + pairs[2 * (i64)blockIdx.x + 1] * block_bytes;
#pragma unroll 4
  for (i64 i = from + threadIdx.x * 16; i < to; i += 256 * 16)
    *reinterpret_cast<uint4*>(d + i) = *reinterpret_cast<const uint4*>(s + i);
}
