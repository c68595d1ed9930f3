#include "kernels.h"

#include <cstring>

namespace shoal {

extern const Kernels kernels_generic;
#ifdef SHOAL_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels* kernels_for(const char* isa) {
  if (std::strcmp(isa, "generic") == 0) return &kernels_generic;
#ifdef SHOAL_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (std::strcmp(isa, "avx2") == 0 && avx2) return &kernels_avx2;
  if (std::strcmp(isa, "avx512") == 0 && avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return &kernels_avx512;
  }
#endif
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels* const best = [] {
    for (const char* isa : {"avx512", "avx2"}) {
      if (const Kernels* found = kernels_for(isa)) return found;
    }
    return &kernels_generic;
  }();
  return *best;
}

}  // namespace shoal
