#pragma once
// What one step has to do, table by table: the items of its records, in parts a thread takes whole.
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "shard.h"

namespace shoal {

struct TableWork {
  int table = 0;
  std::vector<Source> sources;
  std::int64_t n = 0;
  int bits = 0;
  Items items{};                      // of all parts: order is null
  const std::uint32_t* order = nullptr;
  std::vector<std::size_t> starts;    // of each part, in items; one part: empty
  std::size_t first_lr = 0;
  bool counted = false;
  bool direct = true;                 // all sources are
};

struct Part {
  std::size_t work;
  std::size_t start;
  std::uint32_t n;
};

// The tables that the records touch, with their sources; `whole` holds slices of unpooled ones.
std::vector<TableWork> work_of(const Shard& shard, const std::vector<GradArgs*>& records,
                               std::deque<PlanSlice>& whole);

// Points at the ticket's rows where they serve as they are; writes rows, bags and sources of items
// into `lists` where not.
void list_items(TableWork& work, ItemLists& lists);

// Into how many parts (as bits) a table's items are cut.
int part_bits(const TableWork& work, int threads, bool in_place);

// Orders the items of every table that has several parts, in input order within a part.
void partition_items(std::vector<TableWork>& works, ItemLists& lists, int threads);

// Largest first: the last to start should be small.
std::vector<Part> parts_of(const std::vector<TableWork>& works);

Items items_of(const TableWork& work, const Part& part);

}  // namespace shoal
