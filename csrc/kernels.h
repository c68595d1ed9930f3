#pragma once
// The hot loops, compiled once per instruction set and chosen at load time by kernels().
#include <cstdint>

#include "index.h"
#include "layout.h"

namespace shoal {

enum class Pooling : std::uint8_t { sum, mean, first_n };

// Columns [start, stop) of a row <-> `column` of dense output `output`; `add` sums into it.
struct Slice {
  int start, stop, output;
  std::int64_t column;
  bool add;
};

struct PoolSpec {
  Pooling pooling = Pooling::sum;
  int length = 1;
  const Slice* slices = nullptr;
  int n_slices = 0;
};

// What a row is made of, beyond its address.
struct TableView {
  RowView rows;
  const Segment* segments = nullptr;
  int n_segments = 0;
  std::uint64_t key = 0;
  bool plain = true;  // weights are read as stored: fp32 or fp64, no retriever
};

// One group: positions of the ticket, how they form bags, where bags go.
// offsets == nullptr means one bag per position, starting at `first`.
struct GatherJob {
  TableView table;
  const std::int32_t* rows;   // by absolute position; kNoRow = absent
  const std::int64_t* ids;
  const std::int64_t* offsets;
  std::int64_t first;
  const float* weights;
  PoolSpec pool;
  void* const* outputs;
  const std::int64_t* widths;
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
  const std::int64_t* widths;
  double scale;
  const std::int64_t* counts;   // by absolute position, or null
  const void* seen;             // [n, D] weights at gradient time, or null
  bool sighted;                 // its positions count as sights: a ticket's do once a step
  bool direct;                  // one slice of whole rows, no weights, factor 1: read in place
};

struct Item {
  std::int32_t row;
  std::uint32_t source;
  std::uint32_t bag;
  std::uint32_t position;  // relative to Source::first
};

struct StepParams {
  std::int64_t global_step = 0;
  std::uint32_t event_time_s = 0;
  std::uint32_t epoch = 1;
  int nan_policy = 0;  // 0 checked before, 1 skip, 2 clip
  double nan_clip = 1.0;
};

struct ApplyScratch {
  std::int32_t* slots;       // [slot_mask + 1] pairs (row, unique)
  std::uint32_t slot_mask;
  std::uint32_t* next;       // [m]
  std::uint32_t* head;       // [m]
  std::uint32_t* tail;       // [m]
  std::uint32_t* number;     // [m] items of a unique row
  void* buffer;              // 3 * (D + 16) float or double
};

struct ApplyJob {
  TableView table;
  const Source* sources;
  const double* lrs;  // per segment
  StepParams step;
  bool counted;       // some source brings counts of its own
};

// Sums only: unique rows in order of first item, their sums and counts.
struct SumOut {
  std::uint32_t unique;   // what the call without an output returned
  std::int32_t* rows;
  void* sums;             // [U, D] float or double
  std::int64_t* counts;
};

struct Kernels {
  const char* isa;
  void (*probe)(const IndexView&, const std::int64_t* ids, std::int64_t n, std::int32_t* rows);
  // Probe and copy whole fp32/fp64 rows; missing rows are zeroed. Returns how many were missing.
  std::int64_t (*find_copy)(const IndexView&, const RowView&, const std::int64_t* ids,
                            std::int64_t n, char* out, std::uint8_t* found);
  void (*gather)(const GatherJob&, std::int64_t bag_start, std::int64_t bag_stop, void* scratch);
  std::int64_t (*apply)(const ApplyJob&, const Item*, std::uint32_t m, ApplyScratch&);
  // Without an output: groups the items and returns how many rows they have. With one, right after
  // and over the same scratch: fills it.
  std::uint32_t (*sum)(const ApplyJob&, const Item*, std::uint32_t m, ApplyScratch&, SumOut*);
  void (*init_rows)(const TableView&, const std::int64_t* ids, const std::int32_t* rows,
                    std::int64_t n, StepParams);
  bool (*finite32)(const float*, std::int64_t n);
  bool (*finite64)(const double*, std::int64_t n);
};

const Kernels& kernels();
const Kernels* kernels_for(const char* isa);  // nullptr when this CPU or build lacks it

}  // namespace shoal
