// Shared memory, the loop over thread blocks, and the table of kernels with their argument types.
#pragma once
#include "collectives.h"
namespace emu {
inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
  {
    const void* ob;
    size_t os;
    __sanitizer_finish_switch_fiber(nullptr, &ob, &os);
    if (!R.mainf.stack) {
      R.mainf.stack = (char*)ob;
      R.mainf.linear = (unsigned)os;
    }
  }
#endif
  R.body(R.bodyarg);
#if defined(__SANITIZE_THREAD__)
  __tsan_release(R.grid_obj);
#endif
  EMU_RT_BEGIN;
  Fiber* c = R.cur;
  if (!c->cp.empty()) fail("thread exits with %zu cp.async copies not waited for", c->cp.size());
  c->st = DONE;
  R.ndone++;
  if (R.nblockwait && R.ndone + R.nblockwait == R.nthreads) deadlock();
  yield_next(true);
  abort();
}
inline void prepare(Fiber& f) {
#if defined(__SANITIZE_THREAD__)
  if (f.stack) {
    munmap(f.stack - 4096, STACK + 4096);
    f.stack = nullptr;
  }  // remapping resets the shadow of the old stack
#endif
  if (!f.stack) {
    f.stack = (char*)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          -1, 0);
    mprotect(f.stack, 4096, PROT_NONE);
    f.stack += 4096;
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(f.stack, STACK);
  f.fake = nullptr;
#endif
#if defined(__x86_64__)
  void** sp = (void**)(f.stack + STACK - 64);
  *--sp = nullptr;
  *--sp = (void*)&entry;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  f.sp = sp;
#else
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = f.stack;
  f.uc.uc_stack.ss_size = STACK;
  f.uc.uc_link = nullptr;
  makecontext(&f.uc, (void (*)())entry, 0);
#endif
#if defined(__SANITIZE_THREAD__)
  if (f.tf) __tsan_destroy_fiber(f.tf);
  f.tf = __tsan_create_fiber(0);
#endif
}
// static __shared__ arrays: heap block per array, poisoned with NaN bytes when a block first reaches the declaration
struct Shared {
  const void* key;
  unsigned char* p;
  size_t n;
  uint64_t serial;
};
inline std::vector<Shared> shareds;
inline void* shared_alloc(const void* key, size_t n) {
  EMU_RT_BEGIN;
  Shared* e = nullptr;
  for (auto& s : shareds)
    if (s.key == key) {
      e = &s;
      break;
    }
  if (!e) {
    shareds.push_back({key, nullptr, n, 0});
    e = &shareds.back();
  }
  if (e->serial != R.block_serial) {
    e->serial = R.block_serial;
    R.static_smem += n;
#if defined(__SANITIZE_THREAD__)
    e->p = (unsigned char*)aligned_alloc(128, (n + 127) / 128 * 128);  // fresh shadow per block
#elif defined(__SANITIZE_ADDRESS__)
    free(e->p);
    void* q = nullptr;
    if (posix_memalign(&q, 128, n)) abort();
    e->p = (unsigned char*)q;  // exact size: redzone right behind
#else
    if (!e->p) e->p = (unsigned char*)aligned_alloc(128, (n + 127) / 128 * 128);
#endif
    memset(e->p, 0xFF, n);
    if (R.static_smem > 48 * 1024) fail("static shared memory %zu > 48 KiB", (size_t)R.static_smem);
  }
  void* r = e->p;
  EMU_RT_END;
  return r;
}
inline bool run_grid(dim3 grid, dim3 block, size_t smem, void (*body)(void*), void* arg) {
  R.failed = false;
  R.err.clear();
  R.grid = grid;
  R.block = block;
  R.nthreads = block.x * block.y * block.z;
  if (R.nthreads == 0 || R.nthreads > 1024) {
    R.failed = true;
    R.err = "invalid configuration: block size";
    return false;
  }
  if (grid.y > 65535 || grid.z > 65535 || grid.x > 2147483647u || block.z > 64 || !grid.x || !grid.y || !grid.z) {
    R.failed = true;
    R.err = "invalid configuration: grid";
    return false;
  }
  if (smem > 227 * 1024) {
    R.failed = true;
    R.err = "invalid configuration: shared memory > 227 KiB";
    return false;
  }
  if (R.f.size() < R.nthreads) R.f.resize(R.nthreads);
  R.body = body;
  R.bodyarg = arg;
  R.order.resize(R.nthreads);
  EMU_RT_BEGIN;
  auto dyn_new = [&] {
    void* q = nullptr;
    if (smem && posix_memalign(&q, 1024, smem)) abort();
    R.dyn = (unsigned char*)q;
  };
  dyn_new();
#if defined(__SANITIZE_THREAD__)
  R.mainf.tf = __tsan_get_current_fiber();
#endif
  uint64_t rng = 0x9E3779B97F4A7C15ull * (uint64_t)(R.sched + 1);
  auto rnd = [&] {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
  };
  uint64_t nb = (uint64_t)grid.x * grid.y * grid.z;
  for (uint64_t k = 0; k < nb && !R.failed; k++) {
    uint64_t b = R.sched == 1 ? nb - 1 - k : k;
    R.bid = uint3{(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
    if (!R.only.empty() && std::find(R.only.begin(), R.only.end(), R.bid.x) == R.only.end()) continue;
    R.block_serial++;
    R.ndone = R.nblockwait = 0;
    R.static_smem = 0;
#if defined(__SANITIZE_THREAD__)
    if (k) dyn_new();
#endif
    if (smem) memset(R.dyn, 0xFF, smem);
    for (unsigned i = 0; i < R.nthreads; i++) {
      Fiber& f = R.f[i];
      f.linear = i;
      f.lane = i & 31;
      f.warp = i >> 5;
      f.st = READY;
      f.op = OP_NONE;
      f.cp.clear();
      f.cp_group = 0;
      f.tid = uint3{i % block.x, i / block.x % block.y, i / block.x / block.y};
      prepare(f);
      R.order[i] = R.sched == 1 ? R.nthreads - 1 - i : i;
    }
    if (R.sched >= 2)
      for (unsigned i = R.nthreads - 1; i > 0; i--) std::swap(R.order[i], R.order[rnd() % (i + 1)]);
    R.next_hint = 0;
    R.cur = &R.mainf;
    jump(&R.f[R.order[0]]);
  }
#if !defined(__SANITIZE_THREAD__)
  free(R.dyn);
#endif
  R.dyn = nullptr;
  EMU_RT_END;
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(R.grid_obj);
#endif
  return !R.failed;
}
inline unsigned char* dyn_smem() { return R.dyn; }

// ---- kernel table ----
template <class T>
std::string sigof() {
  if (std::is_pointer<T>::value) return "p";
  std::string s = std::is_floating_point<T>::value ? "f"
                  : std::is_integral<T>::value     ? (std::is_signed<T>::value ? "i" : "u")
                                                   : "s";
  return s + std::to_string(sizeof(T));
}
struct Kernel {
  std::string sig;
  bool (*run)(dim3, dim3, size_t, void**);
};
inline std::map<std::string, Kernel> table;
template <auto F>
struct Entry;
template <class... A, void (*F)(A...)>
struct Entry<F> {
  static std::string sig() {
    std::string s;
    ((s += (s.empty() ? "" : ",") + sigof<std::decay_t<A>>()), ...);
    return s;
  }
  template <size_t... I>
  static void call(void** a, std::index_sequence<I...>) {
    F(*reinterpret_cast<std::decay_t<A>*>(a[I])...);
  }
  static void body(void* a) { call((void**)a, std::index_sequence_for<A...>()); }
  static bool run(dim3 g, dim3 b, size_t s, void** a) { return run_grid(g, b, s, &body, a); }
};
struct Reg {
  Reg(const char* n, Kernel k) { table[n] = k; }
};
}  // namespace emu
#define EMU_CAT2(a, b) a##b
#define EMU_CAT(a, b) EMU_CAT2(a, b)
#define EMU_KERNEL(NAME, ...)                     \
  static emu::Reg EMU_CAT(emu_reg_, __COUNTER__)( \
      NAME, emu::Kernel{emu::Entry<(__VA_ARGS__)>::sig(), &emu::Entry<(__VA_ARGS__)>::run});
