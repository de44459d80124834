// Attention on tensor cores: 16 query rows of one kv head (per warp) against tiles of KT tokens in shared memory.
// Decode gives a warp tiles of its own; prompts share a tile among the warps of a block.
//
// Tiles hold 16-bit elements [KT][LD]; LD = D rounded up to 16, plus 8, is an odd multiple of 16 bytes, so the
// eight rows that ldmatrix reads at once fall into different banks. 8-bit caches arrive in a staging tile of raw
// bytes and are widened into the 16-bit tile; both 8-bit formats are exact in half and in bfloat16.
#pragma once
#include "common.cuh"

template <class T, class C, int D, int BS, int KT> struct KvTile {
  static constexpr int DP = (D + 15) / 16 * 16, LD = DP + 8, ELEMS = KT * LD;
  static constexpr int ROW_BYTES = D * sizeof(C);
  static constexpr int VB = ROW_BYTES % 16 == 0 ? 16 : 8;  // bytes per copy
  static constexpr int VECS = ROW_BYTES / VB, VE = VB / sizeof(C);
  static constexpr bool WIDEN = IsFp8<C>::value;
  static constexpr int STAGE_LD = WIDEN ? (ROW_BYTES + 15) / 16 * 16 : LD;
  static constexpr int STAGE = KT * STAGE_LD;  // elements of C per staged K or V tile
  static_assert(ROW_BYTES % 8 == 0, "head dimension must be a whole number of 8-byte copies");

  // THREADS threads start copying tokens [t0, t0 + KT) of K and V; those outside [lo, hi) become zeros, since a
  // weight of 0 does not hide a NaN in an unwritten slot. Table entries outside [lo, hi) are not read. t0 is a multiple
  // of KT below hi, and not below lo by a whole tile.
  template <int THREADS>
  static __device__ __forceinline__ void fetch(C* sk, C* sv, const C* k, const C* v, const int* table,
                                               i64 block_stride, int t0, int lo, int hi, int thread) {
    constexpr int N = KT * VECS;
    constexpr bool ONE_BLOCK = BS % KT == 0;  // the tile is one run of memory behind a single table entry
    const i64 run = ONE_BLOCK ? table[t0 / BS] * block_stride + t0 % BS * D : 0;
#pragma unroll
    for (int i = 0; i < (N + THREADS - 1) / THREADS; i++) {
      const int e = i * THREADS + thread, r = e / VECS, c = e % VECS * VE, t = t0 + r;
      if (N % THREADS != 0 && e >= N) break;
      const bool live = t >= lo && t < hi;
      i64 at = 0;
      if constexpr (ONE_BLOCK)
        at = run + r * D + c;
      else if (live)
        at = table[t / BS] * block_stride + t % BS * D + c;
      ptx::cp_async<VB>(sk + r * STAGE_LD + c, k + at, live);
      ptx::cp_async<VB>(sv + r * STAGE_LD + c, v + at, live);
    }
  }

  // Columns D .. DP - 1 enter the products: they must be zeros, not whatever shared memory held.
  static __device__ __forceinline__ void clear_padding(T* tile, int thread, int threads) {
    if constexpr (DP != D)
      for (int e = thread; e < KT * (DP - D); e += threads)
        tile[e / (DP - D) * LD + D + e % (DP - D)] = from_float<T>(0.f);
  }

  // 8-bit staging tile to 16-bit tile, eight elements at a time.
  static __device__ __forceinline__ void widen(T* tile, const C* staged, int thread, int threads) {
    if constexpr (WIDEN)
      for (int e = thread; e < KT * (D / 8); e += threads) {
        const int r = e / (D / 8), c = e % (D / 8) * 8;
        const uint2 codes = *reinterpret_cast<const uint2*>(staged + r * STAGE_LD + c);
        *reinterpret_cast<uint4*>(tile + r * LD + c) =
            make_uint4(widen_pair<T, C>(codes.x & 0xffffu), widen_pair<T, C>(codes.x >> 16),
                       widen_pair<T, C>(codes.y & 0xffffu), widen_pair<T, C>(codes.y >> 16));
      }
  }
};

// State of one warp's 16 rows. Lane 4 * g + t holds, of rows g and g + 8, the elements that the PTX ISA gives it.
template <class T, int D, int KT, bool CAP> struct MmaAttention {
  static constexpr int DP = (D + 15) / 16 * 16, LD = DP + 8, KS = DP / 16, NT = KT / 16;
  static constexpr bool Q_IN_REGISTERS = D <= 128;              // above, accumulators alone take 96 to 128 registers
  static constexpr int Q_ELEMS = Q_IN_REGISTERS ? 0 : 16 * LD;  // shared memory per warp

  unsigned qa[Q_IN_REGISTERS ? KS : 1][4];
  float acc[DP / 8][4], m[2], l[2];
  int lane, g, t;
  T* q_tile;

  // rows: pointers to rows g and g + 8 (D elements each), null for rows that are not there.
  __device__ __forceinline__ void init(const T* const (&rows)[2], T* q_shared) {
    lane = threadIdx.x % 32;
    g = lane / 4;
    t = lane % 4;
    q_tile = q_shared;
    m[0] = m[1] = NEG_INF;
    l[0] = l[1] = 0.f;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = 0.f;
#pragma unroll
    for (int k = 0; k < KS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int c = k * 16 + t * 2 + 8 * (i >> 1);
        const T* row = rows[i & 1];
        const unsigned w = row != nullptr && c < D ? *reinterpret_cast<const unsigned*>(row + c) : 0u;
        if constexpr (Q_IN_REGISTERS)
          qa[k][i] = w;
        else
          *reinterpret_cast<unsigned*>(q_tile + (g + 8 * (i & 1)) * LD + c) = w;
      }
    if constexpr (!Q_IN_REGISTERS) __syncwarp();
  }

  // Row g + 8 * r sees tokens [lo[r], hi[r]); masked: whether any token of the tile lies outside some row's range.
  __device__ __forceinline__ void step(const T* sk, const T* sv, int t0, const int (&lo)[2], const int (&hi)[2],
                                       bool masked, float scale, float softcap) {
    float s[2 * NT][4];
#pragma unroll
    for (int n = 0; n < 2 * NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = 0.f;
#pragma unroll
    for (int k = 0; k < KS; k++) {
      if constexpr (!Q_IN_REGISTERS)
        ptx::ldmatrix_x4<false>(qa[0], q_tile + ((lane & 7) + 8 * ((lane >> 3) & 1)) * LD + k * 16 + 8 * (lane >> 4));
#pragma unroll
      for (int n = 0; n < NT; n++) {
        unsigned b[4];  // tokens 0-7, depth 0-7 | tokens 0-7, depth 8-15 | tokens 8-15, depth 0-7 | the rest
        ptx::ldmatrix_x4<false>(b,
                                sk + (n * 16 + (lane & 7) + 8 * (lane >> 4)) * LD + k * 16 + 8 * ((lane >> 3) & 1));
        ptx::mma_16816<T>(s[2 * n], qa[Q_IN_REGISTERS ? k : 0], b[0], b[1]);
        ptx::mma_16816<T>(s[2 * n + 1], qa[Q_IN_REGISTERS ? k : 0], b[2], b[3]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = m[r];
#pragma unroll
      for (int n = 0; n < 2 * NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& x = s[n][2 * r + j];
          x = finish_score<CAP>(x, scale, softcap);
          const int token = t0 + n * 8 + t * 2 + j;
          if (masked && (token < lo[r] || token >= hi[r])) x = NEG_INF;
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
      const float ref = finite_or_zero(top), f = ptx::ex2(m[r] - ref);
      m[r] = top;
      l[r] *= f;
#pragma unroll
      for (int n = 0; n < 2 * NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& x = s[n][2 * r + j];
          x = ptx::ex2(x - ref);
          l[r] += x;
        }
#pragma unroll
      for (int n = 0; n < DP / 8; n++) {
        acc[n][2 * r] *= f;
        acc[n][2 * r + 1] *= f;
      }
    }
#pragma unroll
    for (int k = 0; k < NT; k++) {
      // The scores' layout is that of the A operand: no shuffle between the two products.
      const unsigned p[4] = {pack_pair<T>(s[2 * k][0], s[2 * k][1]), pack_pair<T>(s[2 * k][2], s[2 * k][3]),
                             pack_pair<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                             pack_pair<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < DP / 16; n++) {
        unsigned b[4];  // transposed: tokens 0-7, dims 0-7 | tokens 8-15, dims 0-7 | tokens 0-7, dims 8-15 | the rest
        ptx::ldmatrix_x4<true>(b, sv + (k * 16 + (lane & 7) + 8 * ((lane >> 3) & 1)) * LD + n * 16 + 8 * (lane >> 4));
        ptx::mma_16816<T>(acc[2 * n], p, b[0], b[1]);
        ptx::mma_16816<T>(acc[2 * n + 1], p, b[2], b[3]);
      }
    }
  }

  // The four lanes of a row hold a quarter of its sum each.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      l[r] += __shfl_xor_sync(FULL_WARP, l[r], 1);
      l[r] += __shfl_xor_sync(FULL_WARP, l[r], 2);
    }
  }
};
