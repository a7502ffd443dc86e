// Which instruction sets this binary contains and which of them the processor supports.
#include "kernels.h"

#include <initializer_list>

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
struct Registers {
  unsigned a, b, c, d;
  bool has(unsigned Registers::*name, std::initializer_list<int> bits) const {
    for (int bit : bits)
      if (!(this->*name >> bit & 1)) return false;
    return true;
  }
};

// Executes cpuid directly: not every compiler's runtime has __builtin_cpu_supports for shared objects.
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r{0, 0, 0, 0};
  asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(0), "c"(0));
  if (r.a < leaf) return {0, 0, 0, 0};
  asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(subleaf));
  return r;
}

// Whether the operating system saves these registers when it switches between threads.
bool saves(unsigned states) {
  if (!cpuid(1, 0).has(&Registers::c, {27})) return false;  // OSXSAVE: xgetbv is available
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & states) == states;
}

bool has_avx2() {
  constexpr unsigned sse = 1u << 1, avx = 1u << 2;
  return saves(sse | avx) && cpuid(1, 0).has(&Registers::c, {12, 28, 29})  // FMA, AVX, F16C
         && cpuid(7, 0).has(&Registers::b, {5});                          // AVX2
}
bool has_avxvnni() { return has_avx2() && cpuid(7, 1).has(&Registers::a, {4}); }
bool has_avx512() {
  constexpr unsigned masks = 1u << 5, upper_halves = 1u << 6, upper_registers = 1u << 7;
  const Registers found = cpuid(7, 0);
  return has_avx2() && saves(masks | upper_halves | upper_registers) &&
         found.has(&Registers::b, {16, 17, 30, 31})  // F, DQ, BW, VL
         && found.has(&Registers::c, {11});          // VNNI
}
#endif

#if defined(TOKENMILL_AMX)
// Whether the processor has AMX, the system saves its tiles, and this process got permission to use them (Linux).
bool has_amx() {
  if (!has_avx512()) return false;
  if (!cpuid(7, 0).has(&Registers::d, {24, 25})) return false;  // AMX-TILE, AMX-INT8
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> found;
#if defined(TOKENMILL_X86)
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
