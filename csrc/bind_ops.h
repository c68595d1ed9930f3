#pragma once
// The distribution operations, bound one family a file. Addresses arrive checked by shoal.ops.
#include <nanobind/nanobind.h>

#include <cstdint>

namespace shoal {

template <class T>
T* at_address(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_ids_ops(nanobind::module_& m);
void bind_rows_ops(nanobind::module_& m);
void bind_segment_ops(nanobind::module_& m);
void bind_layout_ops(nanobind::module_& m);

}  // namespace shoal
