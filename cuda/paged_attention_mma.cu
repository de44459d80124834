// Decode attention on tensor cores: the query heads of one kv head, up to 16, are the rows of the matrix product, so
// every K and V byte is read from memory once per group and the sums cost no CUDA-core instructions. Arguments as in
// paged_attention.cu; T is half or bfloat16. Each warp keeps its own ring of ST stages of 16-token K and V tiles
// filled by cp.async, so warps never wait for each other inside the loop.
// grid (seqs, kv_heads * ceil(group / 16), splits), block NW * 32, dynamic shared memory MmaDecode::SHARED bytes.
#include "mma_attention.cuh"

template <class T, class C, int D, int BS, int NW, int ST, bool CAP> struct MmaDecode {
  typedef KvTile<T, C, D, BS, 16> Tile;
  typedef MmaAttention<T, D, 16, CAP> Attention;
  static constexpr int STAGES = ST * 2 * Tile::STAGE * (int)sizeof(C);
  static constexpr int WIDE = Tile::WIDEN ? 2 * Tile::ELEMS * (int)sizeof(T) : 0;
  static constexpr int WARP_BYTES = STAGES + WIDE + Attention::Q_ELEMS * (int)sizeof(T);
  static constexpr int MERGE_BYTES = NW * 16 * D * 4;
  static constexpr int SHARED = NW * WARP_BYTES > MERGE_BYTES ? NW * WARP_BYTES : MERGE_BYTES;
};

template <class T, class C, int D, int BS, int NW, int ST, bool CAP>
__global__ void __launch_bounds__(NW * 32, 1)
    decode_mma(T* __restrict__ out, float* __restrict__ part_o, float2* __restrict__ part_ml, const T* __restrict__ q,
               const C* __restrict__ k_cache, const C* __restrict__ v_cache, const int* __restrict__ tables,
               const int* __restrict__ ctx_lens, const float* __restrict__ sinks, const float* __restrict__ k_scale,
               const float* __restrict__ v_scale, int max_blocks, int group, int window, int min_split, float scale,
               float softcap, i64 q_stride, i64 q_head_stride, i64 block_stride) {
  typedef MmaDecode<T, C, D, BS, NW, ST, CAP> Shape;
  typedef typename Shape::Tile Tile;
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ float warp_m[NW][16];
  __shared__ float warp_l[NW][16];
  const int chunks = (group + 15) / 16, kv_head = blockIdx.y / chunks, heads = gridDim.y / chunks * group;
  const int head0 = kv_head * group + blockIdx.y % chunks * 16, live = min(16, (kv_head + 1) * group - head0);
  const i64 seq = blockIdx.x;
  const int ctx = ctx_lens[seq], start = window_start(ctx, window), split = blockIdx.z, splits = gridDim.z;
  const Splits s = split_tokens(start, ctx, splits, min_split);
  if (split >= s.count && splits > 1) return;
  const int lo = max(start, s.base + split * s.len), hi = min(ctx, s.base + (split + 1) * s.len);
  const i64 at_head = (i64)kv_head * (BS * D);
  const C* k = k_cache + at_head;
  const C* v = v_cache + at_head;
  const int* table = tables + seq * max_blocks;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned char* own = smem + warp * Shape::WARP_BYTES;
  C* stages = reinterpret_cast<C*>(own);
  T* wide = reinterpret_cast<T*>(own + Shape::STAGES);
  if constexpr (Tile::WIDEN) {
    Tile::clear_padding(wide, lane, 32);
    Tile::clear_padding(wide + Tile::ELEMS, lane, 32);
  } else {
    for (int i = 0; i < 2 * ST; i++) Tile::clear_padding(reinterpret_cast<T*>(stages) + i * Tile::STAGE, lane, 32);
  }

  typename Shape::Attention a;
  const T* rows[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = lane / 4 + 8 * r;
    rows[r] = i < live ? q + seq * q_stride + (head0 + i) * q_head_stride : nullptr;
  }
  a.init(rows, reinterpret_cast<T*>(own + Shape::STAGES + Shape::WIDE));

  const float k_factor = k_scale == nullptr ? scale : scale * k_scale[kv_head];
  const int row_lo[2] = {lo, lo}, row_hi[2] = {hi, hi};
  const int first = lo / 16 + warp, end = (hi + 15) / 16, tiles = end > first ? (end - first + NW - 1) / NW : 0;
  auto fetch = [&](int i) {  // an empty group when there is no tile i: the count of groups stays in step
    if (i < tiles) {
      C* sk = stages + i % ST * 2 * Tile::STAGE;
      Tile::template fetch<32>(sk, sk + Tile::STAGE, k, v, table, block_stride, (first + i * NW) * 16, lo, hi, lane);
    }
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < ST - 1; i++) fetch(i);
  for (int i = 0; i < tiles; i++) {
    ptx::cp_async_wait<ST - 2>();
    __syncwarp();  // other lanes' copies of tile i are visible, and all lanes are done with tile i - 1
    fetch(i + ST - 1);
    const C* sk = stages + i % ST * 2 * Tile::STAGE;
    const int t0 = (first + i * NW) * 16;
    const bool masked = t0 < lo || t0 + 16 > hi;
    if constexpr (Tile::WIDEN) {
      Tile::widen(wide, sk, lane, 32);
      Tile::widen(wide + Tile::ELEMS, sk + Tile::STAGE, lane, 32);
      __syncwarp();
      a.step(wide, wide + Tile::ELEMS, t0, row_lo, row_hi, masked, k_factor, softcap);
    } else {
      a.step(reinterpret_cast<const T*>(sk), reinterpret_cast<const T*>(sk + Tile::STAGE), t0, row_lo, row_hi, masked,
             k_factor, softcap);
    }
  }
  ptx::cp_async_wait<0>();
  a.finish();
  __syncthreads();  // no warp needs its tiles any more: the same memory takes the warps' results

  float* o_rows = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int n = 0; n < D / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      o_rows[(warp * 16 + a.g + 8 * (i >> 1)) * D + n * 8 + a.t * 2 + (i & 1)] = a.acc[n][i];
  if (a.t == 0) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      warp_m[warp][a.g + 8 * r] = a.m[r];
      warp_l[warp][a.g + 8 * r] = a.l[r];
    }
  }
  __syncthreads();
  const float v_factor = v_scale == nullptr ? 1.f : v_scale[kv_head];
  for (int e = threadIdx.x; e < live * D; e += NW * 32) {
    const int r = e / D, d = e % D, head = head0 + r;
    float m = NEG_INF, l = 0.f, o = 0.f;
#pragma unroll
    for (int w = 0; w < NW; w++) m = fmaxf(m, warp_m[w][r]);
    const float ref = finite_or_zero(m);
#pragma unroll
    for (int w = 0; w < NW; w++) {
      const float f = ptx::ex2(warp_m[w][r] - ref);
      l += f * warp_l[w][r];
      o += f * o_rows[(w * 16 + r) * D + d];
    }
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
