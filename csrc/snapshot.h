#pragma once
// The rows of a shard as they were when a version closed, read by table and range of hashes while
// verbs go on. Rows that did not change since are read where they lie; a row's version tells. The
// others are in KeptRows.
//
// Which rows there are is fixed at the snapshot point, so an index of a window of the hash space, once built,
// is right for good: (hash, row number), ordered, of at most 2^21 rows. It is built by scanning the
// ids for a short while at a time, and adding what had been copied away before the scan came by.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "buffers.h"
#include "kept_rows.h"

namespace shoal {

class Shard;
class Table;

// "full", "incarnation" or "forgotten": the Python side words it for people.
struct SnapshotRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Copies rows [start, stop) of the list. kPastCaches: past the caches, and without versions, which
// are to be looked at afterwards.
template <bool kPastCaches>
void copy_rows(const RowView& view, const std::uint32_t* rows, std::size_t start, std::size_t stop,
               const RowColumns& to);

class Snapshot {
 public:
  struct Options {
    std::size_t buffer_bytes = std::size_t{64} << 20;
    std::size_t window_rows = std::size_t{1} << 21;
  };
  // Records of the shard's log that tell what was deleted in the span.
  struct LogSpan {
    std::int64_t first = 0, stop = 0;
  };
  // Under the shard's exclusive lock.
  Snapshot(Shard& shard, std::uint32_t since, std::uint32_t version, LogSpan log, Options options,
           OpenSnapshots& open);

  std::uint32_t since() const { return kept_->since(); }
  std::uint32_t version() const { return kept_->version(); }
  const std::shared_ptr<KeptRows>& kept() const { return kept_; }
  PreImageStats stats() const { return kept_->images().stats(); }

  // Rows by the top bits of their hash.
  std::vector<std::int64_t> histogram(int t, int bits, int threads);
  // Finds the rows with first <= hash <= last and returns how many there are; read() then copies
  // those found last, ordered by hash.
  std::int64_t find(int t, std::uint64_t first, std::uint64_t last, int threads);
  // No state: rows are to be read again soon.
  void read(const RowColumns& to, int threads);
  // Ids of rows that were deleted in the span and have none at its end: ordered by hash, once each.
  // Throws std::runtime_error when the log's or the copies' file failed.
  const std::vector<std::int64_t>& deleted(int t);
  // Copies what is not read yet of the log, which is about to drop it; under the shard's exclusive
  // lock.
  void take_log() noexcept;

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint32_t row;
  };
  struct Window {
    int table = -1;
    std::uint64_t first = 0, last = 0;
    std::unique_ptr<Scratch<Entry>> rows;
    std::size_t n = 0;
  };
  using Found = std::function<void(const Entry* rows, std::size_t n)>;

  // Hands `found` each row of the snapshot with first <= hash <= last once; from several threads.
  void scan(int t, std::uint64_t first, std::uint64_t last, int threads, const Found& found);
  void scan_rows(int t, std::size_t start, std::size_t stop, std::uint64_t first,
                 std::uint64_t last, const Found& found) const;
  void hash_rows(int t, const std::uint32_t* rows, std::size_t many, std::uint64_t first,
                 std::uint64_t last, const Found& found) const;
  void build(int t, std::uint64_t first, int threads);
  void order(const std::vector<std::size_t>& edges, int bits, int threads);
  void check_piece(const RowView& view, std::size_t start, std::size_t stop,
                   const RowColumns& to, std::vector<std::uint64_t>& missed) const;
  void fill(const RowColumns& to, const std::vector<std::uint64_t>& missed);
  void read_log(std::int64_t most);
  void drop_present(int t, std::vector<std::int64_t>& ids);

  Shard& shard_;
  const std::size_t window_rows_;
  const std::shared_ptr<KeptRows> kept_;
  std::vector<std::size_t> highs_;  // numbers that rows of the snapshot lie below
  LogSpan log_;  // what is not read yet
  bool log_lost_ = false;
  std::vector<std::vector<std::int64_t>> deleted_;
  std::vector<bool> deleted_ready_;
  std::vector<std::vector<std::uint32_t>> counts_;  // rows by top bits, once a table is counted
  Window window_;
  int found_table_ = 0;
  std::uint64_t found_first_ = 0, found_last_ = 0;
  std::vector<std::uint32_t> found_;  // row numbers
};

}  // namespace shoal
