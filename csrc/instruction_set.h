#pragma once

namespace shoal {

// Which kernels this machine runs: "avx512", "avx2" or "generic".
const char* instruction_set();

}  // namespace shoal
