// A short wait without sleeping.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace tokenmill {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
bool spin_until(int turns, const Ready& ready) {
  for (int turn = 0; turn < turns; ++turn) {
    if (ready()) return true;
    relax();
  }
  return ready();
}

}  // namespace tokenmill
