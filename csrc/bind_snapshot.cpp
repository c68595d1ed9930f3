// Rows as they were at a snapshot point, as shoal.table.cpu_snapshot reads them.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <tuple>

#include "background.h"
#include "shard.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// Closed with its Python object at the latest; it keeps the shard alive until then.
class PySnapshot {
 public:
  std::shared_ptr<Shard> owner;
  std::mutex reading;

  PySnapshot(std::shared_ptr<Shard> o, std::shared_ptr<Snapshot> s)
      : owner(std::move(o)), snapshot_(std::move(s)) {}
  PySnapshot(const PySnapshot&) = delete;
  PySnapshot& operator=(const PySnapshot&) = delete;
  ~PySnapshot() { close(); }

  // Frees its memory and its file, which takes as long as both are large.
  void close() {
    const std::lock_guard guard(reading);
    std::shared_ptr<Snapshot> closed;
    {
      const std::lock_guard held(holding_);
      closed = std::move(snapshot_);
      snapshot_.reset();
    }
    if (closed) owner->close(*closed);
  }
  // The snapshot, which stays while it is held.
  std::shared_ptr<Snapshot> open() {
    const std::lock_guard held(holding_);
    if (!snapshot_) throw std::logic_error("a closed snapshot was read");
    return snapshot_;
  }

 private:
  std::mutex holding_;
  std::shared_ptr<Snapshot> snapshot_;  // none once closed
  ForkHook hook_{this, [](void* self) noexcept {
                   auto& snapshot = *static_cast<PySnapshot*>(self);
                   renew(snapshot.reading);
                   renew(snapshot.holding_);
                 }};
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
  return std::make_unique<PySnapshot>(std::move(s), std::move(snapshot));
}

}  // namespace

void bind_snapshot(nb::module_& m, nb::class_<Shard>& shard) {
  nb::exception<SnapshotRefused>(m, "SnapshotRefused");
  m.attr("MOST_SNAPSHOTS") = OpenSnapshots::kMost;
  m.def("give_way", &give_way);
  nb::class_<PySnapshot>(m, "Snapshot")
      .def_prop_ro("version", [](PySnapshot& s) { return s.open()->version(); })
      .def_prop_ro("since", [](PySnapshot& s) { return s.open()->since(); })
      .def("stats",
           [](PySnapshot& s) {
             const PreImageStats stats = s.open()->stats();
             return std::make_tuple(stats.rows, stats.spilled_bytes, stats.waited_s);
           })
      .def("histogram",
           [](PySnapshot& s, int t, int bits, Address counts, int threads) {
             const std::lock_guard guard(s.reading);
             const std::vector<std::int64_t> found = s.open()->histogram(t, bits, threads);
             std::copy(found.begin(), found.end(), at<std::int64_t>(counts));
           },
           Release())
      .def("find",
           [](PySnapshot& s, int t, std::uint64_t first, std::uint64_t last, int threads) {
             const std::lock_guard guard(s.reading);
             return s.open()->find(t, first, last, threads);
           },
           Release())
      .def("read",
           [](PySnapshot& s, const std::vector<Address>& to, int threads) {
             const std::lock_guard guard(s.reading);
             s.open()->read(columns_at(to), threads);
           },
           Release())
      .def("deleted_count",
           [](PySnapshot& s, int t) {
             const std::lock_guard guard(s.reading);
             return s.open()->deleted(t).size();
           },
           Release())
      .def("copy_deleted",
           [](PySnapshot& s, int t, Address to) {
             const std::lock_guard guard(s.reading);
             const std::shared_ptr<Snapshot> snapshot = s.open();
             const std::vector<std::int64_t>& ids = snapshot->deleted(t);
             if (!ids.empty()) std::memcpy(at<void>(to), ids.data(), ids.size() * 8);
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
