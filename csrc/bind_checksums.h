#pragma once
// Checksums of whatever has the buffer protocol.
#include <nanobind/nanobind.h>

namespace shoal {

void bind_checksums(nanobind::module_& m);

}  // namespace shoal
