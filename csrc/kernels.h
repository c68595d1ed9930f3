#pragma once
// The hot loops, compiled once per instruction set and chosen at load time by kernels().
#include <cstdint>

#include "index.h"
#include "layout.h"
#include "lookup.h"

namespace shoal {

constexpr std::size_t kLargeBytes = std::size_t{8} << 20;  // what is written past the caches

// How one group is pooled.
struct PoolSpec {
  std::int64_t pooling = kSum;
  std::int64_t length = 0;
  const PlanSlice* slices = nullptr;
  std::int64_t n_slices = 0;
};

// Rows of `dim` columns as they are.
inline PlanSlice whole_row(std::int64_t dim) { return {0, 0, dim, 0, 0, dim, 0, 0, dim}; }

// What a row is made of, beyond its address.
struct TableView {
  RowView rows;
  const Segment* segments = nullptr;
  int n_segments = 0;
  const double* state = nullptr;  // of a row that has had no step
  std::uint64_t key = 0;
  int first_column = 0;
  bool plain = true;  // weights are read as stored: fp32 or fp64, no retriever
};

// A caller's value, read once: another thread of his may be writing it.
inline std::int64_t read_once(const std::int64_t* at) {
  return __atomic_load_n(at, __ATOMIC_RELAXED);
}

// One group: positions of the ticket, how they form bags, where bags go.
// offsets == nullptr means one bag per position, starting at `first`. Offsets are the caller's:
// whatever they say, only positions [first, stop) are read.
struct GatherJob {
  TableView table;
  const std::int32_t* rows;   // by absolute position; kNoRow = absent
  const std::int64_t* ids;
  const std::int64_t* offsets;
  std::int64_t first, stop;
  const float* weights;
  PoolSpec pool;
  void* const* outputs;
  bool absent_is_zero;
  std::int64_t global_step;
};

struct Source {
  const std::int64_t* offsets;  // as in GatherJob
  std::int64_t first, stop;     // absolute positions
  std::int64_t bags;
  const std::int32_t* rows;     // by absolute position
  const float* weights;
  PoolSpec pool;
  const void* const* grads;
  double scale;
  const std::int64_t* counts;   // by absolute position, or null
  const void* seen;             // [n, D] weights at gradient time, or null
  bool counted_once;            // its positions count as occurrences: a ticket's do once a step
  std::uint32_t item_start;     // its first item among the table's
  // One slice of whole rows, no weights, factor 1: bag b's gradient lies whole at
  // direct + b * direct_stride bytes. Null otherwise.
  const char* direct;
  std::int64_t direct_stride;
};

// Items of one table: positions of its sources in order; a part of them is stepped at a time.
struct Items {
  const std::int32_t* rows;     // by item; kNoRow: nothing to step
  const std::uint32_t* bags;    // by item, or null: every item is the bag of its own number
  const std::uint32_t* sources; // by item, or null: all of source 0
  const std::uint32_t* order;   // the part's items, or null: the first n
  std::uint32_t n;              // of the part
};

struct StepParams {
  std::int64_t global_step = 0;
  std::uint32_t event_time_s = 0;
  std::uint32_t version = 1;
  int nan_policy = 0;  // 0 raise (sums are checked before), 1 skip, 2 clip
  double nan_clip = 1.0;
};

// Working memory of one part, n items long where not said otherwise.
struct ApplyScratch {
  std::int32_t* rows;        // unique rows, in order of first item
  std::uint32_t* versions;   // what the row's version was
  std::uint32_t* numbers;    // by item: its row's place in `rows`
  std::uint32_t* sorted;     // items row by row, each row's in their order
  std::uint32_t* stops;      // by row: where its items end in `sorted`
  // When gradients are not read in place.
  std::uint32_t* heads;      // the row's first item
  std::int64_t* counts;
  char* sums;                // [n] rows of `sum_stride` bytes
  std::size_t sum_stride;
  char* temp;                // one row of float or double
};

// Who wants rows as they are before they change, told their versions; null: nobody.
struct Keeper {
  void (*keep)(const void* context, const RowView&, const std::int32_t* rows,
               const std::uint32_t* versions, std::uint32_t n) = nullptr;
  const void* context = nullptr;
};

struct ApplyJob {
  TableView table;
  const Source* sources;
  const double* lrs;  // per segment
  StepParams step;
  bool counted;       // some source brings counts of its own
  bool in_place;      // all sources are direct and nothing changes a gradient before the rule
  Keeper keeper;
};

struct Kernels {
  const char* instruction_set;  // "avx512", "avx2" or "generic"
  // `absent`, unless null, gets the id at each position that has no row: the ids may change.
  void (*probe)(const IndexView&, const std::int64_t* ids, std::int64_t n, std::int32_t* rows,
                std::int64_t* absent);
  // Probe and copy whole fp32/fp64 rows; missing rows are zeroed. Returns how many were missing.
  // `large`: the whole output does not fit the caches anyway.
  std::int64_t (*find_copy)(const IndexView&, const RowView&, const std::int64_t* ids,
                            std::int64_t n, char* out, std::uint8_t* found, bool large);
  void (*gather)(const GatherJob&, std::int64_t bag_start, std::int64_t bag_stop, void* scratch);
  // Sums the part's gradients by row and steps each row once; returns how many rows the policy for
  // non-finite gradients skipped. Excludes every other use of the table's versions.
  std::int64_t (*apply)(const ApplyJob&, const Items&, const ApplyScratch&);
  // Sums only, into the scratch; returns how many rows there are. Same exclusion.
  std::uint32_t (*sum)(const ApplyJob&, const Items&, const ApplyScratch&);
  // `large`: the rows of the call, other parts included, do not fit the caches anyway.
  void (*init_rows)(const TableView&, const std::int64_t* ids, const std::int32_t* rows,
                    std::int64_t n, StepParams, bool large);
  // Writes the places of the versions in (from, to], of n, in order; returns how many there are.
  std::size_t (*find_between)(const std::uint32_t* versions, std::size_t n, std::uint32_t from,
                              std::uint32_t to, std::uint32_t* places);
  // The largest absolute value; infinity where one is not a number.
  double (*largest)(const void*, std::int64_t n, bool wide);
  // Four blake2b states over one block each; see text_hash_impl.h.
  void (*blake_blocks)(std::uint64_t* state, const std::uint64_t* words,
                       const std::uint64_t* counts, const std::uint64_t* last, bool brief);
};

const Kernels& kernels();

}  // namespace shoal
