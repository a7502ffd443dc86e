// Which instruction sets this binary holds and which of them the processor runs.
#include "kernels.h"

#if defined(TOKENMILL_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tokenmill {

const Kernels& portable_kernels();
#if defined(TOKENMILL_X86)
const Kernels& avx512_kernels();
const Kernels& avx2_kernels();
const Kernels& avxvnni_kernels();
#endif
#if defined(TOKENMILL_AMX)
const Kernels& amx_kernels();
#endif

namespace {

#if defined(TOKENMILL_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avxvnni() {
  if (!has_avx2()) return false;
  unsigned a = 7, b = 0, c = 1, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (a >> 4) & 1;  // leaf 7, subleaf 1: AVX-VNNI
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(TOKENMILL_AMX)
// The processor has it, the system saves its tiles, and this process asked for them, which Linux requires.
bool has_amx() {
  if (!has_avx512()) return false;
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25;
  if ((d & (tile | int8)) != (tile | int8)) return false;
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(TOKENMILL_X86)
  __builtin_cpu_init();
#if defined(TOKENMILL_AMX)
  if (has_amx()) found.push_back(&amx_kernels());
#endif
  if (has_avx512()) found.push_back(&avx512_kernels());
  if (has_avxvnni()) found.push_back(&avxvnni_kernels());
  if (has_avx2()) found.push_back(&avx2_kernels());
#endif
  found.push_back(&portable_kernels());
  return found;
}

}  // namespace

const Kernels& best_kernels() {
  static const Kernels* const best = runnable().front();
  return *best;
}

const Kernels* kernels_named(const std::string& name) {
  for (const Kernels* kernels : runnable())
    if (name == kernels->name) return kernels;
  return nullptr;
}

std::vector<std::string> runnable_kernels() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace tokenmill
