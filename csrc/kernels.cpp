#include "kernels.h"

namespace shoal {

extern const Kernels kernels_generic;
#ifdef SHOAL_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels& kernels() {
  static const Kernels* const best = [] {
#ifdef SHOAL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
      const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
      return avx512 ? &kernels_avx512 : &kernels_avx2;
    }
#endif
    return &kernels_generic;
  }();
  return *best;
}

}  // namespace shoal
