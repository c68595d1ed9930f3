#pragma once
// Collective calls of the ranks of one host. Addresses arrive checked by shoal.comm.shared_memory.
#include <nanobind/nanobind.h>

namespace shoal {

void bind_shared_memory(nanobind::module_& m);

}  // namespace shoal
