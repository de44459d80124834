// Decode attention (one query token per sequence) on CUDA cores, and the merge of partial results.
//
//   out, q        [seqs][heads][D]; q with its own strides between sequences and heads, 16-byte aligned rows
//   k/v_cache     see common.cuh; k_scale, v_scale [kv_heads] multiply 8-bit elements (null: 1)
//   tables        [seqs][max_blocks] block numbers; entries past a sequence's last token are never read
//   ctx_lens      [seqs] tokens in the cache, the query's own included; 0 marks a padding row, which gets zeros
//   sinks         [heads] logits that join each softmax denominator (null: none)
//   part_o        [seqs][heads][splits][D], part_ml [seqs][heads][splits] (maximum, sum), float32
// Sequences lie on grid.x, whose limit is 2^31 - 1; y and z stop at 65,535.
#include "simt_attention.cuh"

__device__ __forceinline__ float scale_of(const float* scales, int kv_head) {
  return scales == nullptr ? 1.f : scales[kv_head];
}

// One query head over tokens [lo, hi) per row: the body of both decode kernels. Rows are the heads
// [head0, head0 + ROWS) of kv_head that are below head_end.
template <class T, class C, int D, int BS, int NW, int ROWS, bool CAP> struct DecodeBlock {
  typedef SimtAttention<T, C, D, BS, NW, ROWS, CAP> Attention;

  static __device__ __forceinline__ void run(typename Attention::Merge& merge, const T* q, i64 q_head_stride,
                                             const CacheView<C>& cache, int head0, int head_end, int lo, int hi,
                                             float scale, float softcap) {
    Attention a;
    int row_lo[ROWS], row_hi[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      a.load_query(r, head0 + r < head_end ? q + (head0 + r) * q_head_stride : nullptr);
      row_lo[r] = lo;
      row_hi[r] = hi;
    }
    a.run(cache, lo, hi, row_lo, row_hi, scale, softcap);
    a.merge_into(merge);
  }
};

// One pass: one thread block per (sequence, head). For multi-head attention and short contexts.
// grid (seqs, heads), block NW * 32.
template <class T, class C, int D, int BS, int NW, bool CAP>
__global__ void __launch_bounds__(NW * 32, 1)
    decode_v1(T* __restrict__ out, const T* __restrict__ q, const C* __restrict__ k_cache,
              const C* __restrict__ v_cache, const int* __restrict__ tables, const int* __restrict__ ctx_lens,
              const float* __restrict__ sinks, const float* __restrict__ k_scale, const float* __restrict__ v_scale,
              int max_blocks, int group, int window, float scale, float softcap, i64 q_stride, i64 q_head_stride,
              i64 block_stride) {
  typedef DecodeBlock<T, C, D, BS, NW, 1, CAP> Block;
  __shared__ typename Block::Attention::Merge merge;
  const i64 seq = blockIdx.x;
  const int head = blockIdx.y, heads = gridDim.y, kv_head = head / group;
  const int hi = ctx_lens[seq], lo = window_start(hi, window);
  const i64 at_head = (i64)kv_head * (BS * D);
  const CacheView<C> cache = {k_cache + at_head, v_cache + at_head, tables + seq * max_blocks, block_stride};
  Block::run(merge, q + seq * q_stride, q_head_stride, cache, head, heads, lo, hi, scale * scale_of(k_scale, kv_head),
             softcap);
  for (int d = threadIdx.x; d < D; d += NW * 32) {
    float m, l, o;
    Block::Attention::merged(merge, 0, d, m, l, o);
    o *= add_sink(sinks, head, m, l) * scale_of(v_scale, kv_head);
    out[(seq * heads + head) * D + d] = from_float<T>(l > 0.f ? o / l : 0.f);
  }
}

// Split over the context: one thread block per (sequence, chunk of ROWS heads of one kv head, split); every K and V
// load serves ROWS heads. With one split the result goes straight to out.
// grid (seqs, kv_heads * ceil(group / ROWS), splits), block NW * 32.
template <class T, class C, int D, int BS, int NW, int ROWS, bool CAP>
__global__ void __launch_bounds__(NW * 32, 1)
    decode_split(T* __restrict__ out, float* __restrict__ part_o, float2* __restrict__ part_ml,
                 const T* __restrict__ q, const C* __restrict__ k_cache, const C* __restrict__ v_cache,
                 const int* __restrict__ tables, const int* __restrict__ ctx_lens, const float* __restrict__ sinks,
                 const float* __restrict__ k_scale, const float* __restrict__ v_scale, int max_blocks, int group,
                 int window, int min_split, float scale, float softcap, i64 q_stride, i64 q_head_stride,
                 i64 block_stride) {
  typedef DecodeBlock<T, C, D, BS, NW, ROWS, CAP> Block;
  __shared__ typename Block::Attention::Merge merge;
  const int chunks = (group + ROWS - 1) / ROWS, kv_head = blockIdx.y / chunks, heads = gridDim.y / chunks * group;
  const int head0 = kv_head * group + blockIdx.y % chunks * ROWS, head_end = (kv_head + 1) * group;
  const i64 seq = blockIdx.x;
  const int ctx = ctx_lens[seq], start = window_start(ctx, window), split = blockIdx.z, splits = gridDim.z;
  const Splits s = split_tokens(start, ctx, splits, min_split);
  if (split >= s.count && splits > 1) return;  // the merge kernel counts the same and never looks here
  const int lo = max(start, s.base + split * s.len), hi = min(ctx, s.base + (split + 1) * s.len);
  const i64 at_head = (i64)kv_head * (BS * D);
  const CacheView<C> cache = {k_cache + at_head, v_cache + at_head, tables + seq * max_blocks, block_stride};
  Block::run(merge, q + seq * q_stride, q_head_stride, cache, head0, head_end, lo, hi,
             scale * scale_of(k_scale, kv_head), softcap);
  const float v_factor = scale_of(v_scale, kv_head);
  const int live = min(ROWS, head_end - head0);
  for (int e = threadIdx.x; e < live * D; e += NW * 32) {
    const int r = e / D, d = e % D, head = head0 + r;
    float m, l, o;
    Block::Attention::merged(merge, r, d, m, l, o);
    if (splits == 1) {
      o *= add_sink(sinks, head, m, l) * v_factor;
      out[(seq * heads + head) * D + d] = from_float<T>(l > 0.f ? o / l : 0.f);
    } else {
      const i64 at = (seq * heads + head) * splits + split;
      part_o[at * D + d] = o * v_factor;
      if (d == 0) part_ml[at] = make_float2(m, l);
    }
  }
}

// Partial results of one head into its output, in split order. grid (seqs, heads), block 128.
template <class T, int D>
__global__ void __launch_bounds__(128)
    reduce_splits(T* __restrict__ out, const float* __restrict__ part_o, const float2* __restrict__ part_ml,
                  const int* __restrict__ ctx_lens, const float* __restrict__ sinks, int splits, int window,
                  int min_split) {
  const i64 seq = blockIdx.x, at = (seq * gridDim.y + blockIdx.y) * splits;
  const int ctx = ctx_lens[seq], count = split_tokens(window_start(ctx, window), ctx, splits, min_split).count;
  float top = NEG_INF;
  for (int p = 0; p < count; p++) top = fmaxf(top, part_ml[at + p].x);
  const float ref = finite_or_zero(top);
  for (int d = threadIdx.x; d < D; d += 128) {
    float m = top, l = 0.f, o = 0.f;
    for (int p = 0; p < count; p++) {
      const float2 ml = part_ml[at + p];
      const float f = ptx::ex2(ml.x - ref);
      l += f * ml.y;
      o += f * part_o[(at + p) * D + d];
    }
    o *= add_sink(sinks, blockIdx.y, m, l);
    out[(seq * gridDim.y + blockIdx.y) * D + d] = from_float<T>(l > 0.f ? o / l : 0.f);
  }
}
