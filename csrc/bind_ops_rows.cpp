#include "bind.h"
#include "ops_flat.h"
#include "ops_rows.h"

namespace shoal {

void bind_rows_ops(nanobind::module_& m) {
  m.def("match_rows", Wired<&match_rows>::call, Release());
  m.def("gather_rows", Wired<&gather_rows>::call, Release());
  m.def("scatter_rows_f32", Wired<&scatter_rows<float>>::call, Release());
  m.def("scatter_rows_f64", Wired<&scatter_rows<double>>::call, Release());
  m.def("gather_flat", Wired<&gather_flat>::call, Release());
  m.def("scatter_flat_f32", Wired<&scatter_flat<float>>::call, Release());
  m.def("scatter_flat_f64", Wired<&scatter_flat<double>>::call, Release());
  m.def("check_map", Wired<&check_map>::call, Release());
  m.def("fill_offsets", Wired<&fill_offsets>::call, Release());
  m.def("sum_offsets_f32", Wired<&sum_offsets<float>>::call, Release());
  m.def("sum_offsets_f64", Wired<&sum_offsets<double>>::call, Release());
}

}  // namespace shoal
