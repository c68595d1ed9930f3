#include <nanobind/stl/unique_ptr.h>

#include "bind.h"
#include "examples.h"
#include "ops_ids.h"
#include "ops_ids_by_shard.h"
#include "ops_sparse_fids.h"
#include "ops_splits.h"
#include "text_ids.h"

namespace nb = nanobind;

namespace shoal {
namespace {

template <class T, class... Arguments>
std::unique_ptr<T> made(Arguments... arguments) {
  return std::make_unique<T>(arguments...);
}

using Ids = const std::int64_t*;
constexpr auto kFusedReorder =
    made<FusedReorder, const std::vector<Ids>&, const Sizes&, const Sizes&, std::int64_t, ShardRule,
         Ids, std::int64_t*, int>;
constexpr auto kFidSplit = made<FidSplit, Ids, Ids, std::int64_t, std::int64_t, ShardRule,
                                const std::vector<std::int64_t*>&, std::int64_t>;

}  // namespace

void bind_ids_ops(nb::module_& m) {
  m.def("example_offsets", &Wired<&example_offsets>::call, Release());
  m.def("example_ids", &Wired<&example_ids>::call, Release());
  m.def("ids_of_texts32", &Wired<&ids_of_texts<std::int32_t>>::call, Release());
  m.def("ids_of_texts64", &Wired<&ids_of_texts<std::int64_t>>::call, Release());
  nb::class_<Dedup>(m, "Dedup")
      .def(nb::new_(&Wired<&Dedup::of>::call), Release())
      .def_prop_ro("unique", &Dedup::unique)
      .def("write", &Wired<&Dedup::write>::call, Release());
  nb::class_<FusedReorder>(m, "FusedReorder")
      .def(nb::new_(&Wired<kFusedReorder>::call), Release())
      .def_prop_ro("unique", &FusedReorder::unique)
      .def_prop_ro("bad", &FusedReorder::bad)
      .def("write", &Wired<&FusedReorder::write>::call, Release());
  nb::class_<FidSplit>(m, "FidSplit")
      .def(nb::new_(&Wired<kFidSplit>::call))
      .def("count", &Wired<&FidSplit::count>::call, Release())
      .def("fill", &Wired<&FidSplit::fill>::call, Release());
  m.def("normalize_merged_split", Wired<&normalize_merged_split>::call, Release());
  m.def("partition_i32", Wired<&partition<std::int32_t>>::call, Release());
  m.def("partition_i64", Wired<&partition<std::int64_t>>::call, Release());
  m.def("move_rows", Wired<&move_rows>::call, Release());
}

}  // namespace shoal
