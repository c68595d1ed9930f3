#pragma once
// One table: index, rows, admission. Not thread-safe by itself; the shard's lock guards it.
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "admission.h"
#include "arena.h"
#include "deletion_log.h"
#include "index.h"
#include "kernels.h"
#include "kept_rows.h"

namespace shoal {

enum class OnFull : std::uint8_t { raise, lru, lfu };

struct TableSpec {
  std::string name;
  int dim = 0, state_width = 0;
  DType dtype = DType::f32;
  std::vector<Segment> segments;
  std::vector<double> state;  // [state_width], of a row that has had no step
  std::uint64_t salt = 0;
  std::uint64_t key = 0;           // mix64(seed ^ salt): what initial values are drawn with
  int first_column = 0;            // where this row starts in the row that columns count in
  std::int64_t capacity_rows = 0;  // 0: grows without limit
  OnFull on_full = OnFull::raise;
  std::int64_t expected_rows = 0;
  AdmissionSpec admission;
  bool expires = false;
  PerSlot ttl_s;  // negative: never
};

// The message is "kept capacity wanted on_full table": the Python side words it for people.
struct TableFullError : std::runtime_error {
  TableFullError(const TableSpec& spec, std::int64_t kept, std::int64_t wanted)
      : std::runtime_error(std::to_string(kept) + " " + std::to_string(spec.capacity_rows) + " " +
                           std::to_string(wanted) + " " + word_of(spec.on_full) + " " +
                           spec.name) {}

 private:
  static const char* word_of(OnFull on_full) {
    if (on_full == OnFull::raise) return "raise";
    return on_full == OnFull::lru ? "lru" : "lfu";
  }
};

struct TableCounters {
  std::int64_t inserted = 0, refused = 0, evicted = 0, nonfinite = 0;
};

// True when the hashes of the ids rise, so that no id is there twice.
bool ordered_by_hash(const std::int64_t* ids, std::int64_t n, std::uint64_t salt);

class Table {
 public:
  explicit Table(TableSpec spec);

  TableView view() const;
  const TableSpec& spec() const { return spec_; }
  const Index& index() const { return index_; }
  const Arena& arena() const { return arena_; }
  Admission& admission() { return admission_; }
  const Admission& admission() const { return admission_; }
  TableCounters& counters() { return counters_; }
  const TableCounters& counters() const { return counters_; }

  // Inserting the absent ids of a lookup takes two steps, so that a full table refuses before any
  // table of the call has changed: prepare() decides and checks, commit() or cancel() ends it.
  struct Insert {
    const std::int64_t* ids;
    const std::int64_t* counts;     // or null: 1 each
    std::int32_t* rows;             // gets the row, or keeps kNoRow where admission refuses
    std::vector<std::int64_t> positions;  // indices into ids, counts and rows
    bool admit_all;
    StepParams step;
    int threads;
    std::vector<bool> pinned{};     // rows that an eviction must spare
    // Set by prepare().
    std::vector<std::int64_t> unique{}, unique_counts{};
    std::vector<std::int64_t> number{};       // unique number of each position
    std::vector<std::int32_t> unique_rows{};  // kNoRow where refused
    std::vector<std::int64_t> placed_ids{};   // scratch of commit()
    std::vector<std::int32_t> placed_rows{};
    std::int64_t wanted = 0;
    bool counted = false;
  };
  void prepare(Insert& job);  // throws TableFullError or bad_alloc; the table is unchanged then
  void cancel(Insert& job);
  void commit(Insert& job);

  // Writes (or adds) a row of fp32/fp64 values; state stays.
  void write_row(std::int32_t row, const char* values, bool add, StepParams step);
  // Upserts rows of distinct ids. Throws TableFullError or bad_alloc; the table is unchanged then.
  void load(const RowColumns& from, std::int64_t n, int threads);

  bool erase(std::int64_t id);
  bool remove(std::int64_t id, const std::vector<bool>& pinned);
  std::int64_t evict_expired(std::int64_t now_s, const std::vector<bool>& pinned);
  void clear();
  // Ids that lose their row from now on go there, as of table `number`.
  void log_deletions(DeletionLog* log, int number) {
    log_ = log;
    number_ = number;
  }
  // From now on rows that are about to change are kept for these first; null: for none.
  void keep_in(OpenSnapshots* open) { open_ = open; }
  Keeper keeper() const;
  void keep(std::int32_t row) const {
    if (open_ != nullptr) open_->keep(number_, arena_.view(), &row, nullptr, 1);
  }
  // Live rows ordered by unsigned hash.
  std::vector<std::uint32_t> rows_by_hash() const;
  void reserve(std::int64_t rows);

 private:
  static void find_unique(Insert& job);
  // visit(row number) for the rows that somebody owns; it may give them back.
  template <class Visit>
  void each_row(const Visit& visit) const {
    const RowView rows = arena_.view();
    for (std::uint32_t row = 0; row < arena_.high_water(); ++row) {
      if (row_version(rows, row) != Arena::kFree) visit(row);
    }
  }
  using StripeParts = std::array<std::size_t, (1U << Index::kPartitionBits) + 1>;
  // Partitions items, stably, by the `bits` of the hash that choose a stripe, so that no two
  // threads share one: each(visit) calls visit(id, item) for all, put(item, place) gets them.
  // Returns where parts start.
  template <class Each, class Put>
  StripeParts by_stripe(int bits, const Each& each, const Put& put) const {
    const std::size_t parts = std::size_t{1} << bits;
    const auto part_of = [&](std::int64_t id) -> std::size_t {
      return bits == 0 ? 0 : (hash(id) >> (48 - bits)) & (parts - 1);
    };
    StripeParts starts{};
    each([&](std::int64_t id, std::size_t) { ++starts[part_of(id) + 1]; });
    for (std::size_t p = 0; p < parts; ++p) starts[p + 1] += starts[p];
    StripeParts next = starts;
    each([&](std::int64_t id, std::size_t item) { put(item, next[part_of(id)]++); });
    return starts;
  }
  // Enters rows of one part into the index.
  void index_rows(const std::int64_t* ids, const std::int32_t* rows, std::size_t n);
  void make_rows(const std::int64_t* ids, const std::int32_t* rows, std::int64_t n,
                 std::int64_t fresh);
  void enter(const RowColumns& from, std::int64_t n, const std::vector<std::uint32_t>& fresh,
             const std::int32_t* rows, int threads);
  void copy_in(const RowColumns& from, const std::int32_t* rows, std::int64_t start,
               std::int64_t stop) const;
  void copy_run(const RowColumns& from, std::int64_t at, std::uint32_t row, std::int64_t n) const;
  void check_room(const Insert& job) const;
  std::int64_t over_budget(std::int64_t wanted) const;
  std::int64_t evict_lowest(std::int64_t n, const std::vector<bool>& pinned);
  void place(Insert& job);

  std::uint64_t hash(std::int64_t id) const { return hash_of(id, spec_.salt); }

  // Whether all rows came by loads in order of hash, and the last one's.
  struct Loaded {
    bool only = true;
    std::uint64_t last = 0;
  };

  TableSpec spec_;
  Index index_;
  Arena arena_;
  Admission admission_;
  TableCounters counters_;
  bool plain_ = true;
  DeletionLog* log_ = nullptr;
  int number_ = 0;
  OpenSnapshots* open_ = nullptr;
  Loaded loaded_;
};

}  // namespace shoal
