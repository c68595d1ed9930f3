#include <nanobind/stl/unique_ptr.h>

#include "bind.h"
#include "ops_ids.h"
#include "ops_ids_by_shard.h"
#include "ops_sparse_fids.h"
#include "ops_splits.h"
#include "text_ids.h"

namespace nb = nanobind;

namespace shoal {
namespace {

std::int64_t* out_at(Address address) { return at<std::int64_t>(address); }

std::unique_ptr<FusedReorder> fused_reorder(const Addresses& ids, const Sizes& lengths,
                                            const Sizes& dims, std::int64_t shards, int rule,
                                            Address given, Address offsets, int threads) {
  IdLists lists{all_at<const std::int64_t>(ids), lengths, dims};
  return std::make_unique<FusedReorder>(std::move(lists), shards, static_cast<ShardRule>(rule),
                                        at<const std::int64_t>(given), out_at(offsets),
                                        threads);
}

// Ids of a batch and the tables of a FidPlan, in its order: counted, then written.
struct FidSplit {
  FidBatch batch;
  FidPlan plan;
};

std::unique_ptr<FidSplit> fid_split(Address ids, Address splits, std::int64_t n_features,
                                    std::int64_t n_shards, int rule, const Addresses& addresses,
                                    std::int64_t n_tables) {
  const auto at = all_at<std::int64_t>(addresses);
  return std::make_unique<FidSplit>(FidSplit{
      {out_at(ids), out_at(splits), n_features, n_shards, static_cast<ShardRule>(rule)},
      {at[0], at[1], n_tables, at[2], at[3], at[4], at[5], at[6]}});
}

}  // namespace

void bind_ids_ops(nb::module_& m) {
  m.def("ids_of_texts32", &Wired<&ids_of_texts<std::int32_t>>::call, Release());
  m.def("ids_of_texts64", &Wired<&ids_of_texts<std::int64_t>>::call, Release());
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
  nb::class_<FidSplit>(m, "FidSplit")
      .def(nb::new_(&fid_split))
      .def("count",
           [](const FidSplit& s, bool unique, Address places, Address buffers, int threads) {
             count_fids(s.batch, s.plan, unique, out_at(places),
                               at<std::int32_t>(buffers), threads);
           },
           Release())
      .def("fill",
           [](const FidSplit& s, Address places, Address buffers, Address lists, int threads) {
             fill_fids(s.batch, s.plan, out_at(places), at<const std::int32_t>(buffers),
                       out_at(lists), threads);
           },
           Release());
  m.def("normalize_merged_split", Wired<&normalize_merged_split>::call, Release());
  m.def("partition_i32", Wired<&partition<std::int32_t>>::call, Release());
  m.def("partition_i64", Wired<&partition<std::int64_t>>::call, Release());
  m.def("move_rows", Wired<&move_rows>::call, Release());
}

}  // namespace shoal
