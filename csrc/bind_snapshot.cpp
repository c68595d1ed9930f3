// Rows as they were at a snapshot point, as shoal.table.cpu.snapshot reads them.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "background.h"
#include "shard.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// Closed with its Python object at the latest; it keeps the shard alive until then. The locks of
// shoal.table.shard.Snapshot keep close() apart from all other calls, and reads from each other.
struct PySnapshot {
  std::shared_ptr<Shard> owner;
  std::shared_ptr<Snapshot> snapshot;

  ~PySnapshot() { close(); }
  // Frees its memory and its file, which takes as long as both are large.
  void close() {
    if (const std::shared_ptr<Snapshot> closed = std::move(snapshot)) owner->close(*closed);
  }
  Snapshot* operator->() const {
    if (!snapshot) throw std::logic_error("a closed snapshot was read");
    return snapshot.get();
  }
};

using Where = std::pair<std::int64_t, std::uint32_t>;

std::unique_ptr<PySnapshot> open(std::shared_ptr<Shard> s, const std::optional<Where>& since,
                                 std::size_t buffer_bytes, std::size_t window_rows) {
  std::shared_ptr<Snapshot> snapshot;
  {
    const nb::gil_scoped_release release;
    Cursor cursor;
    if (since) cursor = Cursor{since->first, since->second};
    snapshot = s->snapshot(since ? &cursor : nullptr,
                                 Snapshot::Options{buffer_bytes, window_rows});
  }
  return std::unique_ptr<PySnapshot>(new PySnapshot{std::move(s), std::move(snapshot)});
}

}  // namespace

void bind_snapshot(nb::module_& m, nb::class_<Shard>& shard) {
  nb::exception<SnapshotRefused>(m, "SnapshotRefused");
  m.attr("MOST_SNAPSHOTS") = OpenSnapshots::kMost;
  m.def("give_way", &give_way);
  nb::class_<PySnapshot>(m, "Snapshot")
      .def_prop_ro("version", [](PySnapshot& s) { return s->version(); })
      .def_prop_ro("since", [](PySnapshot& s) { return s->since(); })
      .def("stats",
           [](PySnapshot& s) {
             const PreImageStats stats = s->stats();
             return std::make_tuple(stats.rows, stats.spilled_bytes, stats.waited_s);
           })
      .def("histogram",
           [](PySnapshot& s, int t, int bits, Address counts, int threads) {
             const std::vector<std::int64_t> found = s->histogram(t, bits, threads);
             std::copy(found.begin(), found.end(), at<std::int64_t>(counts));
           },
           Release())
      .def("find",
           [](PySnapshot& s, int t, std::uint64_t first, std::uint64_t last, int threads) {
             return s->find(t, first, last, threads);
           },
           Release())
      .def("read",
           [](PySnapshot& s, const Addresses& to, int threads) {
             s->read(columns_at(to), threads);
           },
           Release())
      .def("deleted_count", [](PySnapshot& s, int t) { return s->deleted(t).size(); }, Release())
      .def("copy_deleted",
           [](PySnapshot& s, int t, Address to) {
             const std::vector<std::int64_t>& ids = s->deleted(t);
             std::copy(ids.begin(), ids.end(), at<std::int64_t>(to));
           },
           Release())
      .def("close", &PySnapshot::close, Release());
  shard.def("snapshot", &open, nb::arg("since").none(), nb::arg("buffer_bytes"),
            nb::arg("window_rows"));
  shard.def("resume",
            [](Shard& s, std::uint32_t version) {
              const Cursor cursor = s.resume(version);
              return Where(cursor.incarnation, cursor.version);
            },
            Release());
}

}  // namespace shoal
