// CUDA's vector types, with their alignments.
#pragma once
#include "platform.h"

#define EMU_VEC2(N, T, A)      \
  struct alignas(A) N { T x, y; }; \
  inline N make_##N(T x, T y) { return N{x, y}; }
#define EMU_VEC4(N, T, A)            \
  struct alignas(A) N { T x, y, z, w; }; \
  inline N make_##N(T x, T y, T z, T w) { return N{x, y, z, w}; }
EMU_VEC2(float2, float, 8)
EMU_VEC4(float4, float, 16)
EMU_VEC2(int2, int, 8)
EMU_VEC4(int4, int, 16)
EMU_VEC2(uint2, unsigned, 8)
EMU_VEC4(uint4, unsigned, 16)

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
