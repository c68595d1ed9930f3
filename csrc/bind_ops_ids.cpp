#include <nanobind/stl/unique_ptr.h>

#include "bind_ops.h"
#include "ops_ids.h"
#include "ops_reorder.h"

namespace nb = nanobind;

namespace shoal {
namespace {

std::int64_t* out_at(Address address) { return at_address<std::int64_t>(address); }

std::unique_ptr<FusedReorder> fused_reorder(const Addresses& ids, const Sizes& lengths,
                                            const Sizes& dims, std::int64_t shards, int rule,
                                            Address given, Address offsets, int threads) {
  IdLists lists{all_at<const std::int64_t>(ids), lengths, dims};
  return std::make_unique<FusedReorder>(std::move(lists), shards, static_cast<ShardRule>(rule),
                                        at_address<const std::int64_t>(given), out_at(offsets),
                                        threads);
}

}  // namespace

void bind_ids_ops(nb::module_& m) {
  nb::class_<Dedup>(m, "Dedup")
      .def(nb::new_(&Wired<&Dedup::of>::call), Release())
      .def_prop_ro("unique", &Dedup::unique)
      .def("write",
           [](Dedup& d, Address ids, Address counts) { d.write(out_at(ids), out_at(counts)); },
           Release());
  nb::class_<FusedReorder>(m, "FusedReorder")
      .def(nb::new_(&fused_reorder), Release())
      .def_prop_ro("unique", &FusedReorder::unique)
      .def_prop_ro("bad", &FusedReorder::bad)
      .def("write",
           [](FusedReorder& f, Address ids, Address counts, Address sizes) {
             f.write(out_at(ids), out_at(counts), out_at(sizes));
           },
           Release());
  m.def("normalize_merged_split", Wired<&normalize_merged_split>::call, Release());
  m.def("partition_i32", Wired<&partition<std::int32_t>>::call, Release());
  m.def("partition_i64", Wired<&partition<std::int64_t>>::call, Release());
  m.def("take_rows", Wired<&take_rows>::call, Release());
  m.def("put_rows", Wired<&put_rows>::call, Release());
}

}  // namespace shoal
