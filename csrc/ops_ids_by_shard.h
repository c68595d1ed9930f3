#pragma once
// Ids of many lists made distinct and packed by the shard each goes to.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops_ids.h"
#include "ops_shard_rules.h"

namespace shoal {

// Distinct ids of each of K lists, grouped by shard, then by list, in order of first appearance.
// Known once it exists: unique(), and bad(): kGood, or the first position (over all lists) whose
// given shard is not in [0, num_shards); nothing is written then. offsets [N] is the caller's.
class FusedReorder {
 public:
  // [K]: ids, their number, and the width of a row of each list's table.
  FusedReorder(const std::vector<const std::int64_t*>& ids,
               const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& dims,
               std::int64_t num_shards, ShardRule rule, const std::int64_t* shards,
               std::int64_t* offsets, int threads);
  std::int64_t unique() const { return unique_; }
  std::int64_t bad() const { return bad_; }
  // ids, counts [unique()]; sizes [num_shards, K].
  void write(std::int64_t* ids, std::int64_t* counts, std::int64_t* sizes);

 private:
  std::int64_t first_bad_shard() const;
  void dedup_list(std::size_t list, std::uint32_t* slots);
  void shard_list(std::size_t list);
  void place(std::size_t list, std::int64_t* ids, std::int64_t* counts);
  bool small(std::size_t list) const { return dedup_alone(lengths_[list], threads_); }

  std::vector<const std::int64_t*> ids_;
  std::vector<std::int64_t> lengths_, dims_;
  std::int64_t num_shards_;
  ShardRule rule_;
  const std::int64_t* shards_;
  std::int64_t* offsets_;
  int threads_;
  std::vector<std::int64_t> starts_;     // [K + 1] over all lists
  std::vector<std::int64_t> found_;      // [K] distinct ids
  std::vector<std::int64_t> sizes_;      // [K, num_shards]
  std::vector<std::int64_t> rows_;       // [K, num_shards]: first row of each group
  std::vector<std::int64_t> floats_;     // [K, num_shards]: where that row starts in the buffer
  Scratch<Distinct> distinct_;           // list k from starts_[k] + k: entry 0 is spare
  Scratch<std::uint32_t> owners_;
  std::int64_t unique_ = 0;
  std::int64_t bad_ = kGood;
};

}  // namespace shoal
