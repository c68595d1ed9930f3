#pragma once
// Ids of a batch split per table and shard, for the thread that prepares batches.
#include <cstdint>

#include "ops_shard_rules.h"

namespace shoal {

struct FidBatch {
  const std::int64_t* ids;
  const std::int64_t* splits;  // (n_features + 1) in ids
  std::int64_t n_features, n_shards;
  ShardRule rule;  // floormod or unsigned_mod
};

// Features' tables and row widths, and what the counting gives: per (feature, shard) where its ids
// begin in its buffer's list, and where its rows begin in the buffer, in floats.
struct FidPlan {
  const std::int64_t* tables;  // (n_features)
  const std::int64_t* widths;  // (n_features)
  std::int64_t n_tables;
  std::int64_t* counts;     // (n_features, n_shards), ids
  std::int64_t* begins;     // (n_features, n_shards)
  std::int64_t* floats;     // (n_features, n_shards)
  std::int64_t* fid_sizes;  // (n_tables, n_shards)
  std::int64_t* emb_sizes;  // (n_tables, n_shards), floats
};

// Each id's place among the ids of its feature and shard goes to `places`, its buffer
// (table * n_shards + shard) to `buffers`. With `unique`, equal ids of a feature share a place.
// The splits are checked.
void count_fids(const FidBatch& batch, const FidPlan& plan, bool unique, std::int64_t* places,
                std::int32_t* buffers, int threads);

// Writes the lists, table-major, and turns places into places of rows, in floats.
void fill_fids(const FidBatch& batch, const FidPlan& plan, std::int64_t* places,
               const std::int32_t* buffers, std::int64_t* lists, int threads);

}  // namespace shoal
