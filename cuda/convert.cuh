// Element types of queries (float, half, bfloat16) and of the cache (those and the two 8-bit floats),
// their conversion to float32, and 16- or 8-byte loads of several elements at once.
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

struct fp8_e4m3 {
  unsigned char bits;
};
struct fp8_e5m2 {
  unsigned char bits;
};

template <class A, class B> struct Same {
  static constexpr bool value = false;
};
template <class A> struct Same<A, A> {
  static constexpr bool value = true;
};
template <class C> struct IsFp8 {
  static constexpr bool value = false;
};
template <> struct IsFp8<fp8_e4m3> {
  static constexpr bool value = true;
};
template <> struct IsFp8<fp8_e5m2> {
  static constexpr bool value = true;
};

// Two 8-bit codes (low 16 bits) as halves, exactly. e5m2 is the upper byte of a half. e4m3 from compute capability 8.9
// on is converted by the hardware; before it the code's bits are moved into a half, whose exponent bias is 8 larger:
// value * 2^-8, subnormals included, so times 256. The NaN code would come out as 480 and gets its exponent bit.
__device__ __forceinline__ __half2 fp8_halves(unsigned two, fp8_e4m3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3));
#else
  const unsigned spread = (two & 0xffu) | ((two & 0xff00u) << 8), magnitude = spread & 0x007f007fu;
  unsigned w = ((spread & 0x00800080u) << 8) | (magnitude << 7);
  const __half2 h = __hmul2(*reinterpret_cast<const __half2*>(&w), __floats2half2_rn(256.f, 256.f));
  w = *reinterpret_cast<const unsigned*>(&h) | ((magnitude + 0x00010001u) & 0x00800080u) << 6;
  return *reinterpret_cast<const __half2*>(&w);
#endif
}
__device__ __forceinline__ __half2 fp8_halves(unsigned two, fp8_e5m2) {
  const unsigned w = ((two & 0xffu) << 8) | ((two & 0xff00u) << 16);
  return *reinterpret_cast<const __half2*>(&w);
}

template <int BYTES> struct RawOf;
template <> struct RawOf<16> {
  typedef uint4 type;
};
template <> struct RawOf<8> {
  typedef uint2 type;
};

// One word of memory as floats: N = 1, 2 or 4 elements.
template <class C> struct Word;
template <> struct Word<float> {
  static constexpr int N = 1;
  static __device__ __forceinline__ void unpack(unsigned w, float* o) { o[0] = __uint_as_float(w); }
};
template <> struct Word<__half> {
  static constexpr int N = 2;
  static __device__ __forceinline__ void unpack(unsigned w, float* o) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w));
    o[0] = f.x;
    o[1] = f.y;
  }
};
template <> struct Word<__nv_bfloat16> {
  static constexpr int N = 2;
  static __device__ __forceinline__ void unpack(unsigned w, float* o) {
    o[0] = __uint_as_float(w << 16);
    o[1] = __uint_as_float(w & 0xffff0000u);
  }
};
template <class F> struct Fp8Word {
  static constexpr int N = 4;
  static __device__ __forceinline__ void unpack(unsigned w, float* o) {
    const float2 a = __half22float2(fp8_halves(w & 0xffffu, F())), b = __half22float2(fp8_halves(w >> 16, F()));
    o[0] = a.x;
    o[1] = a.y;
    o[2] = b.x;
    o[3] = b.y;
  }
};
template <> struct Word<fp8_e4m3> : Fp8Word<fp8_e4m3> {};
template <> struct Word<fp8_e5m2> : Fp8Word<fp8_e5m2> {};

template <class C> __device__ __forceinline__ void unpack(uint4 u, float* o) {
  constexpr int N = Word<C>::N;
  Word<C>::unpack(u.x, o);
  Word<C>::unpack(u.y, o + N);
  Word<C>::unpack(u.z, o + 2 * N);
  Word<C>::unpack(u.w, o + 3 * N);
}
template <class C> __device__ __forceinline__ void unpack(uint2 u, float* o) {
  Word<C>::unpack(u.x, o);
  Word<C>::unpack(u.y, o + Word<C>::N);
}

// V elements of T at a 16-byte boundary as floats.
template <class T, int V> __device__ __forceinline__ void load_floats(const T* p, float* o) {
  constexpr int PER = 16 / sizeof(T);
  static_assert(V % PER == 0, "whole 16-byte loads");
#pragma unroll
  for (int i = 0; i < V / PER; i++) unpack<T>(reinterpret_cast<const uint4*>(p)[i], o + i * PER);
}

// float32 to the element type, round to nearest even; 8-bit floats saturate at their largest value.
template <class C> __device__ __forceinline__ C from_float(float f);
template <> __device__ __forceinline__ float from_float<float>(float f) { return f; }
template <> __device__ __forceinline__ __half from_float<__half>(float f) { return __float2half_rn(f); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float f) {
  return __float2bfloat16_rn(f);
}
template <> __device__ __forceinline__ fp8_e4m3 from_float<fp8_e4m3>(float f) {
  fp8_e4m3 r;
  r.bits = (unsigned char)__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3);
  return r;
}
template <> __device__ __forceinline__ fp8_e5m2 from_float<fp8_e5m2>(float f) {
  fp8_e5m2 r;
  r.bits = (unsigned char)__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E5M2);
  return r;
}

// Two floats as one word of two 16-bit elements, the first in the low half.
template <class T> __device__ __forceinline__ unsigned pack_pair(float a, float b) {
  static_assert(sizeof(T) == 2, "16-bit elements");
  T h[2] = {from_float<T>(a), from_float<T>(b)};
  return (unsigned)reinterpret_cast<unsigned short*>(h)[0] | (unsigned)reinterpret_cast<unsigned short*>(h)[1] << 16;
}

// Two 8-bit codes (low 16 bits) as one word of two 16-bit elements, exactly.
template <class T, class F> __device__ __forceinline__ unsigned widen_pair(unsigned two) {
  const __half2 h = fp8_halves(two, F());
  if constexpr (Same<T, __half>::value) return *reinterpret_cast<const unsigned*>(&h);
  const float2 f = __half22float2(h);
  return pack_pair<T>(f.x, f.y);
}
