// Built-in variables, synchronisation, warp shuffles and the math functions that the kernels use.
#pragma once
#include "launch.h"

#define threadIdx (emu::R.cur->tid)
#define blockIdx (emu::R.bid)
#define blockDim (emu::R.block)
#define gridDim (emu::R.grid)
#define EMU_LOC const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMU_LOC) { emu::block_barrier(file, line); }
inline void __syncwarp(unsigned m = 0xffffffffu, EMU_LOC) {
  emu::rendezvous(emu::OP_SYNCWARP, m, nullptr, file, line);
}
template <class T>
inline T __shfl_sync(unsigned m, T v, int s, int w = 32, EMU_LOC) {
  int l = emu::R.cur->lane;
  return emu::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1)), file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, EMU_LOC) {
  int l = emu::R.cur->lane, s = l ^ x;
  if (s / w > l / w) s = l;
  return emu::shfl(m, v, s, file, line);
}

using std::max;
using std::min;
template <class To, class From>
inline To emu_bits(From f) {
  To t;
  memcpy(&t, &f, 4);
  return t;
}
inline float __int_as_float(int i) { return emu_bits<float>(i); }
inline float __uint_as_float(unsigned i) { return emu_bits<float>(i); }
inline unsigned __float_as_uint(float f) { return emu_bits<unsigned>(f); }
