// The functions of cuda/ptx.cuh on the CPU. cp.async data lands only at the wait, so a missing or short wait leaves
// the NaN poison of shared memory to be found; fragments lie as the PTX ISA's tables for mma.m16n8k16 and ldmatrix say.
#pragma once
#include "device.h"
#include "floats.h"

namespace ptx {
template <int BYTES>
inline void cp_async(void* dst, const void* src, bool pred, EMU_LOC) {
  if ((size_t)dst % BYTES || (pred && (size_t)src % BYTES))
    emu::fail("cp.async of %d bytes misaligned %s:%d", BYTES, file, line);
  EMU_RT_BEGIN;
  emu::R.cur->cp.push_back({dst, src, BYTES, pred ? (unsigned)BYTES : 0u, -1});
  EMU_RT_END;
}
inline void cp_async_commit() {
  EMU_RT_BEGIN;
  auto* c = emu::R.cur;
  for (auto& e : c->cp)
    if (e.group < 0) e.group = c->cp_group;
  c->cp_group++;
  EMU_RT_END;
}
template <class W>
inline void emu_land(const emu::Fiber::Cp& e) {
  *(W*)e.dst = e.bytes ? *(const W*)e.src : W();
}
template <int N>
inline void cp_async_wait() {
  EMU_RT_BEGIN;
  auto* c = emu::R.cur;
  size_t k = 0;
  for (size_t i = 0; i < c->cp.size(); i++) {
    auto e = c->cp[i];
    if (e.group >= 0 && e.group < c->cp_group - N) {
      EMU_RT_END;  // the copy itself is the kernel's access: race-checked and attributed to this thread
      if (e.n == 16) emu_land<uint4>(e);
      else emu_land<uint2>(e);
      EMU_RT_BEGIN;
    } else {
      c->cp[k++] = e;
    }
  }
  c->cp.resize(k);
  EMU_RT_END;
}
inline float ex2(float x) { return exp2f(x); }

struct EmuMma {
  unsigned a[4], b[2];
  float c[4];
  bool bf16;
};
inline float emu_widen(unsigned short h, bool bf16) {
  if (bf16) return emu_bits<float>((unsigned)h << 16);
  _Float16 x;
  memcpy(&x, &h, 2);
  return (float)x;
}
// D[16x8] = A[16x16] B[16x8] + C
inline void fin_mma(emu::Fiber** L, unsigned) {
  float A[16][16], B[16][8], C[16][8];
  for (int l = 0; l < 32; l++) {
    const EmuMma* m = (const EmuMma*)L[l]->pin;
    int g = l >> 2, t = l & 3;
    for (int i = 0; i < 4; i++)
      for (int h = 0; h < 2; h++)
        A[g + 8 * (i & 1)][t * 2 + h + 8 * (i >> 1)] = emu_widen((unsigned short)(m->a[i] >> (16 * h)), m->bf16);
    for (int i = 0; i < 2; i++)
      for (int h = 0; h < 2; h++)
        B[t * 2 + h + 8 * i][g] = emu_widen((unsigned short)(m->b[i] >> (16 * h)), m->bf16);
    for (int i = 0; i < 4; i++) C[g + 8 * (i >> 1)][t * 2 + (i & 1)] = m->c[i];
  }
  for (int r = 0; r < 16; r++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) C[r][n] += A[r][k] * B[k][n];
  for (int l = 0; l < 32; l++) {
    float* d = (float*)L[l]->pout;
    int g = l >> 2, t = l & 3;
    for (int i = 0; i < 4; i++) d[i] = C[g + 8 * (i >> 1)][t * 2 + (i & 1)];
  }
}
template <class T>
inline void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, EMU_LOC) {
  EmuMma m;
  memcpy(m.a, a, 16);
  m.b[0] = b0;
  m.b[1] = b1;
  memcpy(m.c, d, 16);
  m.bf16 = std::is_same<T, __nv_bfloat16>::value;
  float out[4];
  EMU_RT_BEGIN;
  emu::R.cur->pin = &m;
  emu::R.cur->pout = out;
  emu::rendezvous(emu::OP_MMA, 0xffffffffu, fin_mma, file, line);
  memcpy(d, out, 16);
  EMU_RT_END;
}
// x4: lane 8 * i + r holds row r of matrix i
template <bool TRANS>
inline void fin_ldm(emu::Fiber** L, unsigned) {
  for (int l = 0; l < 32; l++) {
    unsigned* o = (unsigned*)L[l]->pout;
    for (int i = 0; i < 4; i++) {
      unsigned short h[2];
      for (int e = 0; e < 2; e++) {
        int r = TRANS ? (l & 3) * 2 + e : l >> 2, c = TRANS ? l >> 2 : (l & 3) * 2 + e;
        memcpy(&h[e], (const char*)L[8 * i + r]->pin + 2 * c, 2);
      }
      o[i] = h[0] | (unsigned)h[1] << 16;
    }
  }
}
template <bool TRANS>
inline void ldmatrix_x4(unsigned (&r)[4], const void* p, EMU_LOC) {
  if ((size_t)p % 16) emu::fail("ldmatrix row address misaligned %s:%d", file, line);
  unsigned o[4];
  uint4 row = *(const uint4*)p;
  EMU_RT_BEGIN;
  emu::R.cur->pin = &row;
  emu::R.cur->pout = o;
  emu::rendezvous(emu::OP_LDM, 0xffffffffu, fin_ldm<TRANS>, file, line);
  memcpy(r, o, 16);
  EMU_RT_END;
}
}  // namespace ptx
