// How the harness calls a compiled module: in process through these C functions, or, for the sanitizer builds, as a
// program that reads one launch from a file and writes the buffers back.
#pragma once
#include "launch.h"

// only: the blockIdx.x to run, n of them; all with n = 0.
extern "C" int emu_launch(const char* name, const unsigned* g, const unsigned* b, size_t smem, void** args, int sched,
                          const unsigned* only, int n, char* err, int errn) {
  auto it = emu::table.find(name);
  if (it == emu::table.end()) {
    snprintf(err, errn, "no kernel %s", name);
    return 2;
  }
  emu::R.sched = sched;
  emu::R.only.assign(only, only + n);
  bool ok = it->second.run(dim3(g[0], g[1], g[2]), dim3(b[0], b[1], b[2]), smem, args);
  snprintf(err, errn, "%s", emu::R.err.c_str());
  return ok ? 0 : 1;
}
extern "C" const char* emu_sig(const char* name) {
  auto it = emu::table.find(name);
  return it == emu::table.end() ? nullptr : it->second.sig.c_str();
}

#ifdef EMU_EXE
// File: u32 name length, name | u32 grid[3], block[3] | u64 shared bytes | i32 schedule, count of arguments | for each
// argument: i32 kind, u64 bytes, data. Kinds: 0 scalar, 1 buffer (malloc'd to the exact size, so that a sanitizer sees
// its end), 2 null pointer, 3 the buffer of an earlier argument (data: i32 its number).
int main(int, char** av) {
  FILE* f = fopen(av[1], "rb");
  if (!f) return 9;
  auto rd = [&](void* p, size_t n) {
    if (n && fread(p, 1, n, f) != n) exit(9);
  };
  unsigned length, g[3], b[3];
  uint64_t smem;
  int head[2];
  rd(&length, 4);
  std::string name(length, 0);
  rd(&name[0], length);
  rd(g, 12);
  rd(b, 12);
  rd(&smem, 8);
  rd(head, 8);
  std::vector<void*> bufs(head[1]), args;
  std::vector<uint64_t> sizes(head[1], 0);
  for (int i = 0; i < head[1]; i++) {
    int kind;
    uint64_t n;
    rd(&kind, 4);
    rd(&n, 8);
    void* p = malloc(n ? n : 1);
    rd(p, n);
    bufs[i] = kind == 2 ? nullptr : kind == 3 ? bufs[*(int*)p] : p;
    if (kind == 1) sizes[i] = n;
    args.push_back(kind ? (void*)&bufs[i] : p);
  }
  fclose(f);
  char err[2048];
  int rc = emu_launch(name.c_str(), g, b, smem, args.data(), head[0], nullptr, 0, err, sizeof err);
  if (rc) {
    fprintf(stderr, "EMU: %s\n", err);
    _exit(rc);
  }
  f = fopen(av[2], "wb");
  for (int i = 0; i < head[1]; i++)
    if (sizes[i]) fwrite(bufs[i], 1, sizes[i], f);
  fclose(f);
  _exit(0);
}
#endif
