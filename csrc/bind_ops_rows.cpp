#include "bind_ops.h"

namespace nb = nanobind;

namespace shoal {

void bind_rows_ops(nb::module_&) {}

}  // namespace shoal
