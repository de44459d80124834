// Meeting points of a warp: shuffles, __syncwarp and, with payloads of their own, mma and ldmatrix.
#pragma once
#include "runtime.h"
namespace emu {
inline Fiber* lane_of(unsigned warp, unsigned lane) {
  unsigned i = warp * 32 + lane;
  return i < R.nthreads ? &R.f[i] : nullptr;
}
typedef void (*Finish)(Fiber** lanes, unsigned mask);
inline void rendezvous(Op op, unsigned mask, Finish fin, const char* file, int line) {
#if defined(__SANITIZE_THREAD__)
  char* wo = &R.warp_obj[R.cur->warp];
  if (op == OP_SYNCWARP) __tsan_release(wo);
#endif
  EMU_RT_BEGIN;
  Fiber* c = R.cur;
  if (!(mask >> c->lane & 1)) fail("%s at %s:%d: calling lane not in mask %08x", opname(op), file, line, mask);
  c->op = op;
  c->mask = mask;
  c->file = file;
  c->line = line;
  c->st = WARP_WAIT;
  Fiber* L[32];
  bool all = true;
  for (unsigned l = 0; l < 32; l++) {
    L[l] = nullptr;
    if (!(mask >> l & 1)) continue;
    Fiber* f = lane_of(c->warp, l);
    L[l] = f;
    if (!f) {
      if (op != OP_SYNCWARP)
        fail("%s at %s:%d: mask %08x names lane %u which does not exist (block of %u threads)", opname(op), file,
             line, mask, l, R.nthreads);
      continue;
    }
    if (f->st == DONE) {
      fail("%s at %s:%d: mask %08x names lane %u which has exited", opname(op), file, line, mask, l);
    }
    if (f->st != WARP_WAIT) {
      all = false;
      continue;
    }
    if (f->op != op || f->mask != mask)
      fail("mismatched warp collectives: lane %u at %s mask %08x (%s:%d), lane %u at %s mask %08x (%s:%d)", c->lane,
           opname(op), mask, file, line, l, opname(f->op), f->mask, f->file, f->line);
  }
  if (all) {
    if (fin) fin(L, mask);
    for (unsigned l = 0; l < 32; l++)
      if (L[l]) L[l]->st = READY;
  } else
    yield_next(false);
  EMU_RT_END;
#if defined(__SANITIZE_THREAD__)
  if (op == OP_SYNCWARP) __tsan_acquire(wo);
#endif
}
inline void fin_shfl(Fiber** L, unsigned mask) {
  for (int l = 0; l < 32; l++) {
    if (!L[l]) continue;
    int s = L[l]->src;
    if (s < 0 || s > 31 || !L[s]) {
      R.cur = L[l];
      fail("__shfl_*_sync %s:%d: lane %d reads lane %d, not in mask %08x", L[l]->file, L[l]->line, l, s, mask);
    }
    L[l]->res = L[s]->val;
  }
}
template <class T>
inline T shfl(unsigned mask, T v, int src, const char* file, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shfl payload");
  EMU_RT_BEGIN;
  Fiber* c = R.cur;
  c->val = 0;
  memcpy(&c->val, &v, sizeof(T));
  c->src = src;
  rendezvous(OP_SHFL, mask, fin_shfl, file, line);
  T r;
  memcpy(&r, &c->res, sizeof(T));
  EMU_RT_END;
  return r;
}
}  // namespace emu
