#pragma once
// A page of changes, as shoal.table.changes reads it.
#include <nanobind/nanobind.h>

namespace shoal {

void bind_changes(nanobind::module_& m);

}  // namespace shoal
