// Attention of several query tokens per sequence over paged keys: whole prompts, chunks of prompts, prompts whose
// beginning is cached, and single decode tokens among them. The queries' own keys are in the cache already.
//
//   out, q         [tokens][heads][D], all sequences one after the other; q with strides, 16-byte aligned rows
//   starts         [seqs + 1] first row of each sequence in q, and the end of the last
//   positions      [seqs] position in its sequence of each sequence's first query token
//   tiles          [n][2] (sequence, first row): the work list. The rows of a sequence are its (token, head of the
//                  group) pairs, token-major, so that short chunks of grouped heads still fill a matrix product
// The query at position p sees tokens [max(0, p + 1 - window), p]. Other arguments as in paged_attention.cu.
// grid (n, kv_heads), block NW * 32.
#include "mma_attention.cuh"
#include "simt_attention.cuh"

// One sequence's rows within a tile: where each query lies and what it sees.
struct PrefillRows {
  int first_token, token_count, position, group, head0;
  __device__ __forceinline__ bool exists(int row) const { return row / group < token_count; }
  __device__ __forceinline__ i64 token(int row) const { return (i64)first_token + row / group; }
  __device__ __forceinline__ int head(int row) const { return head0 + row % group; }
  __device__ __forceinline__ int hi(int row) const { return exists(row) ? position + row / group + 1 : 0; }
};

__device__ __forceinline__ PrefillRows rows_of(const int* starts, const int* positions, int seq, int kv_head,
                                               int group) {
  PrefillRows r;
  r.first_token = starts[seq];
  r.token_count = starts[seq + 1] - r.first_token;
  r.position = positions[seq];
  r.group = group;
  r.head0 = kv_head * group;
  return r;
}

// Tensor cores: tiles of 16 * NW rows, 32 tokens of K and V at a time in two stages shared by the warps.
// Dynamic shared memory: MmaPrefill::SHARED bytes.
template <class T, class C, int D, int BS, int NW, bool CAP> struct MmaPrefill {
  typedef KvTile<T, C, D, BS, 32> Tile;
  typedef MmaAttention<T, D, 32, CAP> Attention;
  static constexpr int STAGES = 2 * 2 * Tile::STAGE * (int)sizeof(C);
  static constexpr int WIDE = Tile::WIDEN ? 2 * Tile::ELEMS * (int)sizeof(T) : 0;
  static constexpr int SHARED = STAGES + WIDE + NW * Attention::Q_ELEMS * (int)sizeof(T);
};

template <class T, class C, int D, int BS, int NW, bool CAP>
__global__ void __launch_bounds__(NW * 32, 1)
    prefill_mma(T* __restrict__ out, const T* __restrict__ q, const C* __restrict__ k_cache,
                const C* __restrict__ v_cache, const int* __restrict__ tables, const int* __restrict__ starts,
                const int* __restrict__ positions, const int* __restrict__ tiles, const float* __restrict__ sinks,
                const float* __restrict__ k_scale, const float* __restrict__ v_scale, int max_blocks, int group,
                int window, float scale, float softcap, i64 q_stride, i64 q_head_stride, i64 block_stride) {
  typedef MmaPrefill<T, C, D, BS, NW, CAP> Shape;
  typedef typename Shape::Tile Tile;
  extern __shared__ __align__(16) unsigned char smem[];
  const int seq = tiles[2 * blockIdx.x], row0 = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
  const i64 heads = (i64)gridDim.y * group;
  const PrefillRows rows = rows_of(starts, positions, seq, kv_head, group);
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4;
  C* stages = reinterpret_cast<C*>(smem);
  T* wide = reinterpret_cast<T*>(smem + Shape::STAGES);
  if constexpr (Tile::WIDEN) {
    Tile::clear_padding(wide, thread, NW * 32);
    Tile::clear_padding(wide + Tile::ELEMS, thread, NW * 32);
  } else {
    for (int i = 0; i < 4; i++) Tile::clear_padding(reinterpret_cast<T*>(stages) + i * Tile::STAGE, thread, NW * 32);
  }

  typename Shape::Attention a;
  const T* q_rows[2];
  int row_lo[2], row_hi[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + warp * 16 + g + 8 * r;
    q_rows[r] = rows.exists(row) ? q + rows.token(row) * q_stride + rows.head(row) * q_head_stride : nullptr;
    row_hi[r] = rows.hi(row);
    row_lo[r] = window_start(row_hi[r], window);
  }
  a.init(q_rows, reinterpret_cast<T*>(smem + Shape::STAGES + Shape::WIDE) + warp * Shape::Attention::Q_ELEMS);

  // What the whole tile reads, and what each warp may take without looking at single rows.
  const int last_row = min(row0 + NW * 16, rows.token_count * group) - 1;
  const int lo = window_start(rows.hi(row0), window), hi = rows.hi(last_row);
  const int warp_first = row0 + warp * 16, warp_last = min(warp_first + 15, last_row);
  const int all_see_to = rows.hi(warp_first), all_see_from = window_start(rows.hi(warp_last), window);
  const int warp_lo = window_start(all_see_to, window), warp_hi = rows.hi(warp_last);
  const bool warp_works = warp_first <= last_row;

  const i64 at_head = (i64)kv_head * (BS * D);
  const int* table = tables + (i64)seq * max_blocks;
  auto fetch = [&](int t0) {
    if (t0 < hi) {
      C* sk = stages + (t0 / 32 & 1) * 2 * Tile::STAGE;
      Tile::template fetch<NW * 32>(sk, sk + Tile::STAGE, k_cache + at_head, v_cache + at_head, table, block_stride,
                                    t0, lo, hi, thread);
    }
    ptx::cp_async_commit();
  };
  const float k_factor = k_scale == nullptr ? scale : scale * k_scale[kv_head];
  const int begin = lo / 32 * 32;
  fetch(begin);
  for (int t0 = begin; t0 < hi; t0 += 32) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // tile t0 is visible to all, and all are done with the stage that is filled next
    fetch(t0 + 32);
    const C* sk = stages + (t0 / 32 & 1) * 2 * Tile::STAGE;
    const T* tk = reinterpret_cast<const T*>(sk);
    const T* tv = reinterpret_cast<const T*>(sk + Tile::STAGE);
    if constexpr (Tile::WIDEN) {
      Tile::widen(wide, sk, thread, NW * 32);
      Tile::widen(wide + Tile::ELEMS, sk + Tile::STAGE, thread, NW * 32);
      __syncthreads();
      tk = wide;
      tv = wide + Tile::ELEMS;
    }
    if (warp_works && t0 < warp_hi && t0 + 32 > warp_lo)
      a.step(tk, tv, t0, row_lo, row_hi, t0 < all_see_from || t0 + 32 > all_see_to || warp_last != warp_first + 15,
             k_factor, softcap);
  }
  ptx::cp_async_wait<0>();
  a.finish();
  const float v_factor = v_scale == nullptr ? 1.f : v_scale[kv_head];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + warp * 16 + g + 8 * r;
    if (!rows.exists(row)) continue;
    float m = a.m[r], l = a.l[r];
    const float f = add_sink(sinks, rows.head(row), m, l) * v_factor;
    const float by = l > 0.f ? f / l : 0.f;
    T* to = out + (rows.token(row) * heads + rows.head(row)) * D;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<unsigned*>(to + n * 8 + a.t * 2) =
          pack_pair<T>(a.acc[n][2 * r] * by, a.acc[n][2 * r + 1] * by);
  }
}

// CUDA cores, any element type: ROWS rows per thread block share every K and V load. Per row the same arithmetic as
// decode_v1, bit for bit: a token gives the same output as a prompt row and as a decode row.
template <class T, class C, int D, int BS, int NW, int ROWS, bool CAP>
__global__ void __launch_bounds__(NW * 32, 1)
    prefill_simt(T* __restrict__ out, const T* __restrict__ q, const C* __restrict__ k_cache,
                 const C* __restrict__ v_cache, const int* __restrict__ tables, const int* __restrict__ starts,
                 const int* __restrict__ positions, const int* __restrict__ tiles, const float* __restrict__ sinks,
                 const float* __restrict__ k_scale, const float* __restrict__ v_scale, int max_blocks, int group,
                 int window, float scale, float softcap, i64 q_stride, i64 q_head_stride, i64 block_stride) {
  typedef SimtAttention<T, C, D, BS, NW, ROWS, CAP> Attention;
  __shared__ typename Attention::Merge merge;
  const int seq = tiles[2 * blockIdx.x], row0 = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
  const i64 heads = (i64)gridDim.y * group;
  const PrefillRows rows = rows_of(starts, positions, seq, kv_head, group);
  Attention a;
  int row_lo[ROWS], row_hi[ROWS], hi = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = row0 + r;
    a.load_query(r, rows.exists(row) ? q + rows.token(row) * q_stride + rows.head(row) * q_head_stride : nullptr);
    row_hi[r] = rows.hi(row);
    row_lo[r] = window_start(row_hi[r], window);
    hi = max(hi, row_hi[r]);
  }
  const i64 at_head = (i64)kv_head * (BS * D);
  const CacheView<C> cache = {k_cache + at_head, v_cache + at_head, tables + (i64)seq * max_blocks, block_stride};
  const float k_factor = k_scale == nullptr ? scale : scale * k_scale[kv_head];
  const float v_factor = v_scale == nullptr ? 1.f : v_scale[kv_head];
  a.run(cache, row_lo[0], hi, row_lo, row_hi, k_factor, softcap);
  a.merge_into(merge);
  for (int e = threadIdx.x; e < ROWS * D; e += NW * 32) {
    const int r = e / D, d = e % D, row = row0 + r;
    if (!rows.exists(row)) break;
    float m, l, o;
    Attention::merged(merge, r, d, m, l, o);
    o *= add_sink(sinks, rows.head(row), m, l) * v_factor;
    out[(rows.token(row) * heads + rows.head(row)) * D + d] = from_float<T>(l > 0.f ? o / l : 0.f);
  }
}
