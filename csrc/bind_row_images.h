#pragma once
// Copies of rows that somebody else takes, a GPU's, as shoal.table.row_images keeps them.
#include <nanobind/nanobind.h>

namespace shoal {

void bind_row_images(nanobind::module_& m);

}  // namespace shoal
