// half, bfloat16 and the encoder of the 8-bit floats; conversions round to nearest even, as the hardware's do.
#pragma once
#include "types.h"

struct __half {
  unsigned short b;
  __half() = default;
  __half(float f) {
    _Float16 h = (_Float16)f;
    memcpy(&b, &h, 2);
  }
  operator float() const {
    _Float16 h;
    memcpy(&h, &b, 2);
    return (float)h;
  }
};
struct __nv_bfloat16 {
  unsigned short b;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) b = 0x7fff;
    else b = (unsigned short)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  operator float() const {
    unsigned u = (unsigned)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};
struct alignas(4) __half2 { __half x, y; };
inline __half __float2half_rn(float f) { return __half(f); }
inline float __half2float(__half h) { return h; }
inline float2 __half22float2(__half2 h) { return float2{h.x, h.y}; }
inline __half2 __floats2half2_rn(float a, float b) { return __half2{__half(a), __half(b)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return __half2{__half((float)a.x * b.x), __half((float)a.y * b.y)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline float __bfloat162float(__nv_bfloat16 h) { return h; }

typedef unsigned char __nv_fp8_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// Sign, exponent and M mantissa bits; a value above the largest finite one saturates, NaN stays NaN.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float f, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
  const bool e4 = kind == __NV_E4M3;
  const int mantissa = e4 ? 3 : 2, bias = e4 ? 7 : 15, largest = e4 ? 0x7e : 0x7b;
  const int sign = std::signbit(f) ? 0x80 : 0;
  if (std::isnan(f)) return e4 ? 0x7f : 0x7e;
  const double x = std::fabs((double)f);
  if (x == 0) return (unsigned char)sign;
  int e = std::max((int)std::ilogb(x), 1 - bias);                  // subnormals share the smallest exponent
  double steps = std::nearbyint(std::ldexp(std::min(x, 1e9), mantissa - e));   // in units of the last place
  if (steps >= std::ldexp(2.0, mantissa)) {                        // rounded up into the next binade
    steps /= 2;
    e++;
  }
  const int code = ((e + bias) << mantissa) + (int)steps - (1 << mantissa);   // no hidden bit in subnormals
  return (unsigned char)(sign | std::min(code, largest));
}
