#pragma once
// Positions grouped by a shard that each is given, and rows moved in such an order. Which shard an
// id goes to: ops_shard_rules.h.
#include <cstddef>
#include <cstdint>

namespace shoal {

// The stable permutation that groups positions by shard, and the size of each group. Returns
// kGood, or the first position whose shard is not in [0, num).
template <class Shard>
std::int64_t partition(const Shard* shards, std::int64_t n, std::int64_t num, std::int64_t* order,
                       std::int64_t* sizes, int threads);

// out[i] = rows[order[i]] (take) or out[order[i]] = rows[i], rows of `bytes`. Returns kGood,
// or the first position whose order is not in [0, n); then `out` is partly written.
std::int64_t move_rows(const char* rows, const std::int64_t* order, std::int64_t n,
                       std::size_t bytes, bool take, char* out, int threads);

}  // namespace shoal
