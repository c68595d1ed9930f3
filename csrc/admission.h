#pragma once
// Occurrences of ids that have no row yet. Decisions are made once per step, after all of its
// occurrences were added. Oracle, with the formula of cells: tests/support/admission_counters.py.
#include <cstdint>
#include <utility>
#include <vector>

#include "index.h"

namespace shoal {

struct PerSlot {
  std::vector<std::pair<std::uint32_t, std::int64_t>> values;  // (slot, value), few
  std::int64_t otherwise = 0;
  int shift = 48;
  std::uint32_t mask = 0x7fff;

  std::int64_t of(std::int64_t id) const {
    if (values.empty()) return otherwise;
    const auto slot = static_cast<std::uint32_t>(static_cast<std::uint64_t>(id) >> shift) & mask;
    for (const auto& [key, value] : values) {
      if (key == slot) return value;
    }
    return otherwise;
  }
};

struct AdmissionSpec {
  bool enabled = false;
  bool sketch = false;
  PerSlot required;  // occurrences needed; 1 admits at first occurrence
  std::uint64_t width = 0;
  int depth = 0;
};

class Admission {
 public:
  Admission(AdmissionSpec spec, std::uint64_t salt);

  bool enabled() const { return spec_.enabled; }
  // Adds occurrences of distinct ids; undo() with the same arguments takes them back.
  void add(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n) {
    change(ids, counts, n, 1);
    counts_.rebalance();
  }
  void undo(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n) {
    change(ids, counts, n, -1);
  }
  bool admitted(std::int64_t id) const;
  void forget(std::int64_t id);
  void clear();

  // State that survives a restart: (id, count) pairs, or the cells.
  void export_exact(std::vector<std::int64_t>& ids, std::vector<std::int64_t>& counts) const;
  const std::vector<std::uint32_t>& cells() const { return cells_; }
  void load_exact(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n);
  void load_cells(const std::uint32_t* cells, std::size_t n);
  std::size_t bytes() const { return cells_.size() * 4 + counts_.bytes(); }

 private:
  void change(const std::int64_t* ids, const std::int64_t* counts, std::int64_t n, int sign);
  std::size_t cell_of(std::int64_t id, int row) const;

  AdmissionSpec spec_;
  std::uint64_t salt_;
  std::vector<std::uint32_t> cells_;
  Index counts_;  // id -> occurrences, in place of a row number
};

}  // namespace shoal
