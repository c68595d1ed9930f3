#pragma once
// The rows of open snapshots, each of which shows a point of its own. A row of a point is either
// unchanged where it lies or has exactly one copy, which the oldest open snapshot that needs the row
// made; younger ones that need it, too, find it there.
//
// That is so because a row that has not changed since a point has not changed since any later one:
// whether a snapshot needs a copy follows from the copied row's version, and from the time of copying.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "threads.h"
#include "pre_images.h"

namespace shoal {

class OpenSnapshots;

// Of one snapshot: rows stamped in (since, version].
class KeptRows {
 public:
  KeptRows(std::vector<PreImages::Form> forms, std::uint32_t since, std::uint32_t version,
           std::size_t budget_bytes, OpenSnapshots& open);
  KeptRows(const KeptRows&) = delete;
  KeptRows& operator=(const KeptRows&) = delete;

  std::uint32_t since() const { return since_; }
  std::uint32_t version() const { return since_ + span_; }
  bool stamped(std::uint32_t version) const { return version - since_ - 1 < span_; }
  bool overwritten(int table) const { return !overwritten_[table].empty(); }
  // Whether a row with this version is still as it was at the point.
  bool unchanged(int table, std::uint32_t row, std::uint32_t version) const {
    if (!stamped(version) || row >= rows_[table]) return false;
    const std::vector<std::uint64_t>& bits = overwritten_[table];
    return bits.empty() || (bits[row / 64] >> (row % 64) & 1) == 0;
  }

  std::uint32_t tick() const;  // as OpenSnapshots::tick
  // Calls visit(image, weights, state) for the copies of its rows of a table with
  // first <= hash <= last; takes the shard's lock for a moment. Throws std::runtime_error when a file
  // failed.
  void visit(FairLock& lock, int table, std::uint64_t first, std::uint64_t last,
             const PreImages::Visit& visit) const;
  void check() const;  // throws std::runtime_error when a copy was lost
  const PreImages& images() const { return *images_; }  // the copies that it made

 private:
  friend class OpenSnapshots;
  struct Shared {
    std::shared_ptr<PreImages> images;  // of an older snapshot
    std::uint32_t clock = 0;            // when this one's point was
    std::size_t runs = 0;               // written by then
    std::atomic<bool> needed{false};    // there is a copy of this one's rows
  };
  void share(const PreImages& images);  // a copy of a row of this one goes there
  void leave(const PreImages& images);  // whose snapshot is closed
  // Those that hold copies of others: of one that is needed nothing changes any more.
  std::vector<const Shared*> sources() const;

  const std::uint32_t since_, span_;
  OpenSnapshots& open_;
  std::vector<std::size_t> rows_;  // numbers that rows of the point lie below
  std::vector<std::vector<std::uint64_t>> overwritten_;
  std::shared_ptr<PreImages> images_;
  static constexpr std::size_t kMostOthers = 7;
  std::array<Shared, kMostOthers> shared_;
  std::size_t others_ = 0;
};

// Those of a shard, oldest first. All methods run under its exclusive lock, keep() from
// several threads at once.
class OpenSnapshots {
 public:
  static constexpr std::size_t kMost = KeptRows::kMostOthers + 1;

  bool empty() const { return all_.empty(); }
  bool full() const { return all_.size() == kMost; }
  // A reader passes some rows: copies made from now on have a clock not earlier than it returns. May
  // be called at any time.
  std::uint32_t tick() { return clock_.fetch_add(1) + 1; }
  void open(std::shared_ptr<KeptRows> rows) { all_.push_back(std::move(rows)); }
  // What it copied stays for those that need some of it. False: it was closed before.
  bool close(const KeptRows& rows);

  // Copies those of the rows that an open snapshot needs; `versions`, or null: as stored.
  void keep(int table, const RowView& view, const std::int32_t* rows, const std::uint32_t* versions,
            std::uint32_t n) noexcept;
  // Rows that come in whole may bear versions of before a point: whatever lies at this number from
  // now on is not of any. make_bits() first, once a table: it throws std::bad_alloc.
  void make_bits(int table);
  void overwrite(int table, std::uint32_t row);

 private:
  friend class KeptRows;
  void keep_for(std::size_t k, int table, const RowView& view, const std::int32_t* rows,
                const std::uint32_t* versions, std::uint32_t n) noexcept;
  bool older_keeps(std::size_t k, int table, std::uint32_t row, std::uint32_t version) const;

  std::vector<std::shared_ptr<KeptRows>> all_;
  std::atomic<std::uint32_t> clock_{0};
};

}  // namespace shoal
