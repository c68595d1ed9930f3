#include "bind_ops.h"

namespace nb = nanobind;

namespace shoal {

void bind_segment_ops(nb::module_&) {}

}  // namespace shoal
