// Fibers, their scheduling, the block barrier and the reports of what went wrong.
#pragma once
#include "types.h"
namespace emu {
enum State : uint8_t { READY, BLOCK_WAIT, WARP_WAIT, DONE };
enum Op : uint8_t { OP_NONE, OP_SYNCWARP, OP_SHFL, OP_MMA, OP_LDM };
struct Fiber {
  void* sp = nullptr;
  uint3 tid{0, 0, 0};
  unsigned linear = 0, lane = 0, warp = 0;
  State st = DONE;
  Op op = OP_NONE;
  unsigned mask = 0;
  int src = 0;  // source lane for shfl
  int line = 0;
  const char* file = "";
  uint64_t val = 0, res = 0;  // shfl payload/result (<=8 bytes)
  const void* pin = nullptr;
  void* pout = nullptr;  // payload pointers of wide collectives
  struct Cp {
    void* dst;
    const void* src;
    unsigned n, bytes;
    int group;
  };
  std::vector<Cp> cp;
  int cp_group = 0;  // cp.async queue
  char* stack = nullptr;
#if !defined(__x86_64__)
  ucontext_t uc;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tf = nullptr;
#endif
};
struct Rt {
  dim3 grid, block;
  uint3 bid{0, 0, 0};
  std::vector<Fiber> f;
  unsigned nthreads = 0, ndone = 0, nblockwait = 0;
  std::vector<unsigned> order;  // schedule order (permutation of threads)
  std::vector<unsigned> only;   // blockIdx.x to run, all when empty
  Fiber mainf;
  Fiber* cur = nullptr;
  void (*body)(void*) = nullptr;
  void* bodyarg = nullptr;
  unsigned char* dyn = nullptr;
  uint64_t block_serial = 0;
  bool failed = false;
  std::string err;
  uint64_t static_smem = 0;
  int sched = 0;       // 0 forward, 1 reverse, >=2 random with that seed
  char bar_obj[8];
  char grid_obj[8];
  char warp_obj[64];
  unsigned next_hint = 0;
};
inline Rt R;
inline size_t STACK =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    512 * 1024;
#else
    128 * 1024;
#endif

#if defined(__x86_64__)
extern "C" void emu_switch(void** from_sp, void* to_sp);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#endif
__attribute__((noinline)) inline void jump(Fiber* to, bool dying = false) {
  Fiber* from = R.cur;
  R.cur = to;
#if defined(__SANITIZE_ADDRESS__)
  const void* ob;
  size_t os;
  if (to == &R.mainf)
    __sanitizer_start_switch_fiber(dying ? nullptr : &from->fake, R.mainf.stack, (size_t)R.mainf.linear);
  else
    __sanitizer_start_switch_fiber(dying ? nullptr : &from->fake, to->stack, STACK);
#endif
#if defined(__SANITIZE_THREAD__)
  if (dying) EMU_RT_END;
  __tsan_switch_to_fiber(to->tf, 1);  // no happens-before: only barriers order threads
#endif
#if defined(__x86_64__)
  emu_switch(&from->sp, to->sp);
#else
  swapcontext(&from->uc, &to->uc);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(R.cur->fake, &ob, &os);
#endif
}
[[noreturn]] inline void fail(const char* fmt, ...) {
  char b[1024];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(b, sizeof b, fmt, ap);
  va_end(ap);
  if (!R.failed) {
    R.failed = true;
    char c[256];
    snprintf(c, sizeof c, " [block (%u,%u,%u)", R.bid.x, R.bid.y, R.bid.z);
    R.err = std::string(b) + c;
    if (R.cur && R.cur != &R.mainf) {
      snprintf(c, sizeof c, " thread (%u,%u,%u) warp %u lane %u", R.cur->tid.x, R.cur->tid.y, R.cur->tid.z,
               R.cur->warp, R.cur->lane);
      R.err += c;
    }
    R.err += "]";
  }
  jump(&R.mainf, true);
  abort();
}
inline const char* opname(Op o) {
  static const char* n[] = {"none", "__syncwarp", "__shfl_*_sync", "mma.sync", "ldmatrix"};
  return n[o];
}
[[noreturn]] inline void deadlock() {
  std::string s = "deadlock: ";
  std::map<std::string, std::pair<int, unsigned>> g;
  for (unsigned i = 0; i < R.nthreads; i++) {
    Fiber& f = R.f[i];
    char b[256];
    if (f.st == DONE)
      snprintf(b, sizeof b, "exited");
    else if (f.st == BLOCK_WAIT)
      snprintf(b, sizeof b, "at __syncthreads %s:%d", f.file, f.line);
    else if (f.st == WARP_WAIT)
      snprintf(b, sizeof b, "at %s mask %08x %s:%d", opname(f.op), f.mask, f.file, f.line);
    else
      snprintf(b, sizeof b, "ready?");
    auto& e = g[b];
    if (!e.first) e.second = i;
    e.first++;
  }
  for (auto& k : g) {
    char b[64];
    snprintf(b, sizeof b, "%d thread(s) (first %u) ", k.second.first, k.second.second);
    s += b + k.first + "; ";
  }
  fail("%s", s.c_str());
}
inline void release_barrier() {
  const Fiber* a = nullptr;
  for (auto i = 0u; i < R.nthreads; i++) {
    Fiber& f = R.f[i];
    if (f.st != BLOCK_WAIT) continue;
    if (!a)
      a = &f;
    else if (f.line != a->line || f.file != a->file)
      fail("divergent barrier: thread %u waits at __syncthreads %s:%d, thread %u at %s:%d", a->linear, a->file,
           a->line, f.linear, f.file, f.line);
  }
  if (R.ndone) deadlock();
  for (auto i = 0u; i < R.nthreads; i++)
    if (R.f[i].st == BLOCK_WAIT) R.f[i].st = READY;
  R.nblockwait = 0;
}
// pick the next runnable fiber after the current one in schedule order
inline void yield_next(bool dying) {
  for (;;) {
    unsigned n = R.nthreads, p = R.next_hint;
    for (unsigned k = 0; k < n; k++) {
      if (++p >= n) p = 0;
      Fiber& f = R.f[R.order[p]];
      if (f.st == READY) {
        R.next_hint = p;
        if (&f != R.cur) jump(&f, dying);
        return;
      }
    }
    if (R.ndone == n) {
      jump(&R.mainf, dying);
      return;
    }
    if (R.nblockwait && R.nblockwait + R.ndone == n) {
      release_barrier();
      if (!dying && R.cur->st == READY) return;
      continue;
    }
    deadlock();
  }
}
inline void block_barrier(const char* file, int line) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(R.bar_obj);
#endif
  EMU_RT_BEGIN;
  Fiber* c = R.cur;
  c->st = BLOCK_WAIT;
  c->file = file;
  c->line = line;
  R.nblockwait++;
  yield_next(false);
  EMU_RT_END;
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(R.bar_obj);
#endif
}
}  // namespace emu
