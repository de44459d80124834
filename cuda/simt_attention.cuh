// Attention of a few query rows over one sequence's tokens on CUDA cores: the routine that the one-pass, the
// split and the float32 prompt kernels share, so that a row gives the same bits in each of them.
//
// A warp is cut into 32 / G groups of G lanes. A group owns one token at a time; its lanes own NV vectors of V
// elements of the head dimension each. Every group keeps its own running maximum, sum and weighted V sum (online
// softmax), so the loop needs only the log2(G) shuffles of the dot product; groups and warps are merged at the end.
// Which group sees a token depends on its position alone, never on the block size or on other sequences.
#pragma once
#include "common.cuh"

// Lanes and vectors per token row: the choice that leaves the fewest lanes idle, then the one nearest to 16
// elements per lane (fewer cost shuffles, more cost registers). cuda_launch.py mirrors it to plan query rows.
template <class C, int D> struct RowShape {
  static constexpr int V = sizeof(C) == 1 ? 8 : 16 / sizeof(C);
  static constexpr int NVEC = D / V;
  static_assert(D % V == 0, "head dimension must be a whole number of vectors");
  static constexpr int lanes(int nv) {
    int g = 1;
    while (g * nv < NVEC) g *= 2;
    return g;
  }
  static constexpr int vectors() {
    int best = 0, best_cost = 1 << 30;
    for (int nv = 1; nv <= 6; nv++) {
      const int g = lanes(nv), e = nv * V;
      const int cost = (g * nv - NVEC) * 64 + (e > 16 ? e - 16 : 16 - e);
      if (g <= 32 && e <= 24 && cost < best_cost) {
        best = nv;
        best_cost = cost;
      }
    }
    return best;
  }
  static constexpr int NV = vectors();
  static constexpr int G = lanes(NV);
  static constexpr int R = 32 / G;                // tokens side by side in a warp
  static constexpr int P = NV >= 4 ? 1 : 4 / NV;  // tokens one after the other, loads of all in flight at once
  static constexpr int TW = R * P;                // tokens per warp and step
  static constexpr int E = NV * V;                // elements per lane
};

template <class C> struct CacheView {
  const C* k;  // layer's keys, at this kv head
  const C* v;
  const int* table;  // this sequence's block numbers
  i64 block_stride;
};

template <class T, class C, int D, int BS, int NW, int ROWS, bool CAP> struct SimtAttention {
  typedef RowShape<C, D> S;
  typedef typename RawOf<S::V * sizeof(C)>::type Raw;
  static constexpr int V = S::V, G = S::G, NV = S::NV, R = S::R, P = S::P, TW = S::TW;

  // What the warps hand over; one per thread block, in shared memory.
  struct Merge {
    float m[NW][ROWS], l[NW][ROWS], o[NW][ROWS][D];
  };

  float q[ROWS][S::E], acc[ROWS][S::E], m[ROWS], l[ROWS];
  int warp, col, row;

  __device__ __forceinline__ SimtAttention() {
    const int lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    col = lane % G;
    row = lane / G;
  }

  __device__ __forceinline__ bool has_vector(int j) const { return col + j * G < S::NVEC; }

  // src: D elements, 16-byte aligned, or null for a row that is not there.
  __device__ __forceinline__ void load_query(int r, const T* src) {
    m[r] = NEG_INF;
    l[r] = 0.f;
#pragma unroll
    for (int j = 0; j < NV; j++) {
#pragma unroll
      for (int i = 0; i < V; i++) q[r][j * V + i] = acc[r][j * V + i] = 0.f;
      if (src != nullptr && has_vector(j)) load_floats<T, V>(src + (col + j * G) * V, q[r] + j * V);
    }
  }

  // Tokens [lo, hi); row r sees [row_lo[r], row_hi[r]) of them. Nothing outside [lo, hi) is read, table entries
  // included: registers of absent tokens hold zeros, since an unwritten slot may hold NaN and 0 * NaN is NaN.
  __device__ __forceinline__ void run(const CacheView<C>& cache, int lo, int hi, const int (&row_lo)[ROWS],
                                      const int (&row_hi)[ROWS], float scale, float softcap) {
    for (int t0 = (lo / TW + warp) * TW; t0 < hi; t0 += NW * TW) {
      constexpr bool ONE_BLOCK = BS % TW == 0;  // one table entry serves the whole step
      const i64 run = ONE_BLOCK ? cache.table[t0 / BS] * cache.block_stride + t0 % BS * D : 0;
      Raw kr[P][NV], vr[P][NV];
#pragma unroll
      for (int p = 0; p < P; p++) {
        const int t = t0 + p * R + row;
        const bool live = t >= lo && t < hi;
        i64 at = run + (t - t0) * D + col * V;
        if (!ONE_BLOCK && live) at = cache.table[t / BS] * cache.block_stride + t % BS * D + col * V;
#pragma unroll
        for (int j = 0; j < NV; j++) {
          kr[p][j] = vr[p][j] = Raw();
          if (live && has_vector(j)) {
            kr[p][j] = *reinterpret_cast<const Raw*>(cache.k + at + j * G * V);
            vr[p][j] = *reinterpret_cast<const Raw*>(cache.v + at + j * G * V);
          }
        }
      }
      float score[ROWS][P];
#pragma unroll
      for (int p = 0; p < P; p++) {
        float kf[S::E];
#pragma unroll
        for (int j = 0; j < NV; j++) unpack<C>(kr[p][j], kf + j * V);
        const int t = t0 + p * R + row;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float x = 0.f;
#pragma unroll
          for (int i = 0; i < S::E; i++) x += q[r][i] * kf[i];
#pragma unroll
          for (int o = G / 2; o > 0; o >>= 1) x += __shfl_xor_sync(FULL_WARP, x, o);
          score[r][p] = t >= row_lo[r] && t < row_hi[r] ? finish_score<CAP>(x, scale, softcap) : NEG_INF;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float top = m[r];
#pragma unroll
        for (int p = 0; p < P; p++) top = fmaxf(top, score[r][p]);
        const float ref = finite_or_zero(top), f = ptx::ex2(m[r] - ref);
        m[r] = top;
        l[r] *= f;
#pragma unroll
        for (int i = 0; i < S::E; i++) acc[r][i] *= f;
#pragma unroll
        for (int p = 0; p < P; p++) {
          score[r][p] = ptx::ex2(score[r][p] - ref);
          l[r] += score[r][p];
        }
      }
#pragma unroll
      for (int p = 0; p < P; p++) {
        float vf[S::E];
#pragma unroll
        for (int j = 0; j < NV; j++) unpack<C>(vr[p][j], vf + j * V);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < S::E; i++) acc[r][i] += score[r][p] * vf[i];
      }
    }
  }

  // Groups of the warp into one, then each warp's share into shared memory. Ends with a block barrier.
  __device__ __forceinline__ void merge_into(Merge& s) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float top = m[r];
#pragma unroll
      for (int o = 16; o >= G; o >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, o));
      const float f = ptx::ex2(m[r] - finite_or_zero(top));
      l[r] *= f;
#pragma unroll
      for (int i = 0; i < S::E; i++) acc[r][i] *= f;
#pragma unroll
      for (int o = 16; o >= G; o >>= 1) {
        l[r] += __shfl_xor_sync(FULL_WARP, l[r], o);
#pragma unroll
        for (int i = 0; i < S::E; i++) acc[r][i] += __shfl_xor_sync(FULL_WARP, acc[r][i], o);
      }
      if (row == 0) {
#pragma unroll
        for (int j = 0; j < NV; j++)
          if (has_vector(j)) {
#pragma unroll
            for (int i = 0; i < V; i++) s.o[warp][r][(col + j * G) * V + i] = acc[r][j * V + i];
          }
        if (col == 0) {
          s.m[warp][r] = top;
          s.l[warp][r] = l[r];
        }
      }
    }
    __syncthreads();
  }

  // Maximum, sum and element d of row r over all warps, in warp order; after merge_into.
  static __device__ __forceinline__ void merged(const Merge& s, int r, int d, float& top, float& sum, float& o) {
    top = NEG_INF;
    sum = o = 0.f;
#pragma unroll
    for (int w = 0; w < NW; w++) top = fmaxf(top, s.m[w][r]);
    const float ref = finite_or_zero(top);
#pragma unroll
    for (int w = 0; w < NW; w++) {
      const float f = ptx::ex2(s.m[w][r] - ref);
      sum += f * s.l[w][r];
      o += f * s.o[w][r][d];
    }
  }
};
