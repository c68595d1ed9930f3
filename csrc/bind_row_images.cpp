// Copies of rows that somebody else takes, a GPU's, as shoal.table.cuda.snapshot_rows keeps them.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "deletion_log.h"
#include "hash.h"
#include "kept_rows.h"
#include "threads.h"

namespace nb = nanobind;

namespace shoal {
namespace {

constexpr std::size_t kWord = 8;  // records start at multiples of it

// Of a table: bytes of weights and of state, where state lies in a record, salt.
using TableForm = std::tuple<std::size_t, std::size_t, std::size_t, std::uint64_t>;

// Records of the open snapshots of a GPU shard, handed over as they lie: id, last seen and count, 16
// bytes more, weights, state.
struct RowImages {
  explicit RowImages(std::vector<TableForm> f) : forms(std::move(f)) {}

  // Of `n` records of a table: `places` in words from `records`.
  void keep(int table, Address records, Address places, Address versions, std::uint32_t n) {
    BlockView block{};
    auto* base = at<char>(records);
    block.ids = base;
    block.seen = base + kWord;
    block.weights = base + kHead;
    block.state = base + std::get<2>(forms.at(static_cast<std::size_t>(table)));
    RowView view;
    view.blocks = &block;
    view.weight_stride = view.state_stride = kWord;
    view.geometry = Geometry{31, 31};  // one block
    const WriteGuard guard(lock);
    open.keep(table, view, at<const std::int32_t>(places), at<const std::uint32_t>(versions), n);
  }

  std::vector<PreImages::Form> plain() const {
    std::vector<PreImages::Form> result;
    for (const auto& [weights, state, _, salt] : forms) {
      result.push_back({weights, state, salt, std::size_t{1} << 31});
    }
    return result;
  }

  static constexpr std::size_t kHead = 32;  // bytes before a record's weights
  const std::vector<TableForm> forms;
  FairLock lock;
  OpenSnapshots open;
};

// Those of one snapshot.
class SnapshotImages {
 public:
  // Records that are handed over from now on may be its rows.
  SnapshotImages(std::shared_ptr<RowImages> all, std::uint32_t since, std::uint32_t version,
                 std::size_t budget_bytes)
      : all_(std::move(all)) {
    const WriteGuard guard(all_->lock);
    if (all_->open.full()) throw std::length_error("open snapshots");
    rows_ = std::make_shared<KeptRows>(all_->plain(), since, version, budget_bytes, all_->open);
    all_->open.open(rows_);
  }
  SnapshotImages(const SnapshotImages&) = delete;
  SnapshotImages& operator=(const SnapshotImages&) = delete;
  ~SnapshotImages() { close(); }

  // No record is kept for it from now on, and nothing else may be called.
  void close() {
    const std::shared_ptr<KeptRows> closed = std::move(rows_);
    if (!closed || all_->lock.broken()) return;
    const WriteGuard guard(all_->lock);
    all_->open.close(*closed);
  }

  void check() const { rows_->check(); }

  std::tuple<std::int64_t, std::int64_t, double> stats() const {
    const PreImageStats stats = rows_->images().stats();
    return {stats.rows, stats.spilled_bytes, stats.waited_s};
  }

  // Adds rows kept before the clock stood at `before`, by the top bits of their hash.
  void histogram(int table, int bits, std::uint32_t before, Address counts) {
    const std::uint64_t salt = std::get<3>(form(table));
    auto* const bins = at<std::int64_t>(counts);
    visit(table, 0, std::numeric_limits<std::uint64_t>::max(),
          [&](const PreImage& image, const char*, const char*) {
            const std::uint64_t hash = hash_of(image.id, salt);
            if (earlier(image.clock, before)) ++bins[bits == 0 ? 0 : hash >> (64 - bits)];
          });
  }

  // Rows kept so far with first <= hash <= last; copy() then copies them, ordered by hash.
  std::size_t find(int table, std::uint64_t first, std::uint64_t last) {
    const auto& [weights, state, _, salt] = form(table);
    const std::size_t record = sizeof(PreImage) + weights + state;
    table_ = table;
    found_.clear();
    order_.clear();
    visit(table, first, last, [&](const PreImage& image, const char* w, const char* s) {
      order_.emplace_back(hash_of(image.id, salt), found_.size());
      const auto* head = reinterpret_cast<const char*>(&image);
      found_.insert(found_.end(), head, head + sizeof(image));
      found_.insert(found_.end(), w, w + weights);
      found_.insert(found_.end(), s, s + state);
    });
    std::sort(order_.begin(), order_.end());
    return found_.size() / record;
  }

  void copy(const Addresses& to) const {
    const std::size_t weights = std::get<0>(form(table_));
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const char* from = found_.data() + order_[i].second;
      PreImage image;
      std::memcpy(&image, from, sizeof(image));
      from += sizeof(image);
      rows_->images().put(image, from, from + weights, columns_at(to), i);
    }
  }

 private:
  const TableForm& form(int table) const {
    return all_->forms.at(static_cast<std::size_t>(table));
  }

  void visit(int table, std::uint64_t first, std::uint64_t last, const PreImages::Visit& each) {
    rows_->visit(all_->lock, table, first, last, each);
  }

  std::shared_ptr<RowImages> all_;
  std::shared_ptr<KeptRows> rows_;
  int table_ = 0;
  std::vector<char> found_;
  std::vector<std::pair<std::uint64_t, std::size_t>> order_;  // hash, and where in found_
};

}  // namespace

void bind_row_images(nb::module_& m) {
  nb::class_<RowImages>(m, "RowImages")
      .def(nb::init<std::vector<TableForm>>())
      .def("keep", &RowImages::keep, Release())
      .def("tick", [](RowImages& all) { return all.open.tick(); });
  nb::class_<SnapshotImages>(m, "SnapshotImages")
      .def(nb::init<std::shared_ptr<RowImages>, std::uint32_t, std::uint32_t, std::size_t>())
      .def("close", &SnapshotImages::close, Release())
      .def("check", &SnapshotImages::check)
      .def("stats", &SnapshotImages::stats)
      .def("histogram", &SnapshotImages::histogram, Release())
      .def("find", &SnapshotImages::find, Release())
      .def("copy", &SnapshotImages::copy, Release());
  nb::class_<DeletionLog>(m, "DeletionLog")
      .def(nb::init<>())
      .def(nb::init<std::size_t, std::int64_t>())
      .def(nb::init<std::size_t, std::int64_t, std::int64_t>())
      .def_prop_ro("kept", [](const DeletionLog& log) { return log.open() && !log.broken(); })
      .def_prop_ro("open", &DeletionLog::open)
      .def_prop_ro("floor", &DeletionLog::floor)
      .def("start", &DeletionLog::start)
      .def("stop", &DeletionLog::stop)
      .def("release", &DeletionLog::release)
      .def("hold", &DeletionLog::hold)
      .def("leave", &DeletionLog::leave)
      .def("excess", &DeletionLog::excess)
      .def("after", &DeletionLog::after)
      .def("append",
           [](DeletionLog& log, Address records, std::size_t n) {
             log.append(at<const Deletion>(records), n);
           })
      .def("read", [](const DeletionLog& log, std::int64_t first, std::int64_t n, Address to) {
        const std::vector<Deletion> records = log.read(first, n);
        std::copy(records.begin(), records.end(), at<Deletion>(to));
        return records.size();
      });
}

}  // namespace shoal
