#include "bind_ops.h"

namespace nb = nanobind;

namespace shoal {

void bind_ids_ops(nb::module_&) {}

}  // namespace shoal
