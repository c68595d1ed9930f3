#pragma once
// Rows as they were at a snapshot point, as shoal.table.cpu_snapshot reads them.
#include <nanobind/nanobind.h>

#include "bind_shard.h"

namespace shoal {

void bind_snapshot(nanobind::module_& m, nanobind::class_<PyShard>& shard);

}  // namespace shoal
