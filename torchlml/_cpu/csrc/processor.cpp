// Detects the x86-64 level that the processor and the operating system support. It does not use __builtin_cpu_supports,
// which needs a compiler library that is not linked on Windows. The code is in a separate file, because the macros in
// <cpuid.h> break Windows headers.
#ifdef TORCHLML_X86_LEVELS

#include <cpuid.h>

#include "kernels.h"

namespace torchlml {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

// Reads one leaf of CPUID. The registers are zero if the processor does not support the leaf.
Registers cpuid(unsigned leaf) {
  Registers r;
  __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// Returns a bit mask of the register sets that the operating system saves on a context switch.
unsigned saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }
constexpr unsigned bit(int i) { return 1u << i; }

}  // namespace

int processor_level() {
  constexpr unsigned fma = bit(12), movbe = bit(22), osxsave = bit(27), avx = bit(28), f16c = bit(29);  // leaf 1, c
  constexpr unsigned bmi = bit(3), avx2 = bit(5), bmi2 = bit(8);                                        // leaf 7, b
  constexpr unsigned avx512 = bit(16) | bit(17) | bit(28) | bit(30) | bit(31);  // F, DQ, CD, BW, VL: leaf 7, b
  constexpr unsigned lzcnt = bit(5);                                            // leaf 0x80000001, c
  if (!all(cpuid(1).c, fma | movbe | osxsave | avx | f16c)) return 1;
  if (!all(cpuid(7).b, bmi | avx2 | bmi2) || !all(cpuid(0x80000001).c, lzcnt)) return 1;
  const unsigned saved = saved_registers();
  if (!all(saved, 0x06)) return 1;                             // xmm, ymm
  return all(cpuid(7).b, avx512) && all(saved, 0xe6) ? 4 : 3;  // also the mask registers and zmm
}

}  // namespace torchlml

#endif
