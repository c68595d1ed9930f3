#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind_ops.h"
#include "ops_ids.h"
#include "ops_reorder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

using Address = std::uintptr_t;
using Release = nb::call_guard<nb::gil_scoped_release>;

const std::int64_t* ids_at(Address address) { return at_address<const std::int64_t>(address); }
std::int64_t* out_at(Address address) { return at_address<std::int64_t>(address); }

std::unique_ptr<FusedReorder> fused_reorder(const std::vector<Address>& ids,
                                            std::vector<std::int64_t> lengths,
                                            std::vector<std::int64_t> dims, std::int64_t shards,
                                            int rule, Address given, Address offsets,
                                            int threads) {
  IdLists lists{{}, std::move(lengths), std::move(dims)};
  for (const Address address : ids) lists.ids.push_back(ids_at(address));
  return std::make_unique<FusedReorder>(std::move(lists), shards, static_cast<ShardRule>(rule),
                                        ids_at(given), out_at(offsets), threads);
}

void bind_reorder(nb::module_& m) {
  m.def(
      "partition",
      [](Address shards, bool wide, std::int64_t n, std::int64_t num, Address order, Address sizes,
         int threads) {
        return wide ? partition(at_address<const std::int64_t>(shards), n, num, out_at(order),
                                out_at(sizes), threads)
                    : partition(at_address<const std::int32_t>(shards), n, num, out_at(order),
                                out_at(sizes), threads);
      },
      Release());
  m.def(
      "move_rows",
      [](bool take, Address rows, Address order, std::int64_t n, std::size_t bytes, Address out,
         int threads) {
        return (take ? take_rows : put_rows)(at_address<const char>(rows), ids_at(order), n, bytes,
                                             at_address<char>(out), threads);
      },
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
}

}  // namespace

void bind_ids_ops(nb::module_& m) {
  nb::class_<Dedup>(m, "Dedup")
      .def(nb::new_([](Address ids, std::int64_t n, Address inverse, int threads) {
             return Dedup::of(ids_at(ids), n, out_at(inverse), threads);
           }),
           Release())
      .def_prop_ro("unique", &Dedup::unique)
      .def("write",
           [](Dedup& d, Address ids, Address counts) { d.write(out_at(ids), out_at(counts)); },
           Release());
  m.def(
      "value_rowids",
      [](Address offsets, std::int64_t rows, std::int64_t n, Address out, int threads) {
        return value_rowids(ids_at(offsets), rows, n, out_at(out), threads);
      },
      Release());
  m.def(
      "normalize_merged_split",
      [](Address splits, std::int64_t total, Address sizes, std::int64_t parts, Address out) {
        return normalize_merged_split(ids_at(splits), total, ids_at(sizes), parts, out_at(out));
      },
      Release());
  bind_reorder(m);
}

}  // namespace shoal
