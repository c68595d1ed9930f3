#include "bind_ops.h"

namespace nb = nanobind;

namespace shoal {

void bind_layout_ops(nb::module_&) {}

}  // namespace shoal
