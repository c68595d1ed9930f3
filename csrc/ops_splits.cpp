#include "ops_splits.h"

#include <algorithm>

#include "ops_buckets.h"
#include "ops_copy.h"
#include "ops_ids.h"

namespace shoal {
namespace {

constexpr std::int64_t kWorthThreads = std::int64_t{1} << 15;
constexpr std::int64_t kRowsAhead = 16;

// Moves rows [start, stop); returns the first bad position or kGood.
template <bool kTake, class Width>
std::int64_t move_span(const char* rows, const std::int64_t* order, std::int64_t start,
                       std::int64_t stop, std::int64_t n, Width width, char* out) {
  const std::size_t bytes = width;
  for (std::int64_t i = start; i < stop; ++i) {
    if (i + kRowsAhead < stop) {
      // An address beyond the rows is never read, only fetched in vain.
      const auto far = reinterpret_cast<std::uintptr_t>(kTake ? rows : out) +
                       static_cast<std::size_t>(order[i + kRowsAhead]) * bytes;
      __builtin_prefetch(reinterpret_cast<const char*>(far), kTake ? 0 : 1);
    }
    const std::int64_t row = order[i];
    if (static_cast<std::uint64_t>(row) >= static_cast<std::uint64_t>(n)) return i;
    const std::size_t near = static_cast<std::size_t>(i) * bytes;
    const std::size_t far = static_cast<std::size_t>(row) * bytes;
    __builtin_memcpy(out + (kTake ? near : far), rows + (kTake ? far : near), bytes);
  }
  return kGood;
}

}  // namespace

template <class Shard>
std::int64_t partition(const Shard* shards, std::int64_t n, std::int64_t num, std::int64_t* order,
                       std::int64_t* sizes, int threads) {
  // A counter for each chunk and shard, which must stay few against the ids.
  const std::int64_t most = n < kWorthThreads ? 1 : std::max<std::int64_t>(1, n / (4 * num));
  const Shares shares{n, std::clamp<std::int64_t>(threads, 1, most)};
  std::vector<std::int64_t> starts(static_cast<std::size_t>(num) + 1);
  const auto room = [order](std::int64_t) { return order; };
  const std::int64_t bad = partition_into<std::int64_t>(
      shares, num, threads, starts.data(), room,
      [shards, num](std::int64_t begin, std::int64_t end, auto put) -> std::int64_t {
        for (std::int64_t i = begin; i < end; ++i) {
          const auto shard = static_cast<std::int64_t>(shards[i]);
          if (shard < 0 || shard >= num) return i;
          put(shard, i);
        }
        return kGood;
      });
  if (bad != kGood) return bad;
  for (std::int64_t s = 0; s < num; ++s) sizes[s] = starts[s + 1] - starts[s];
  return kGood;
}

template std::int64_t partition(const std::int32_t*, std::int64_t, std::int64_t, std::int64_t*,
                                std::int64_t*, int);
template std::int64_t partition(const std::int64_t*, std::int64_t, std::int64_t, std::int64_t*,
                                std::int64_t*, int);

std::int64_t move_rows(const char* rows, const std::int64_t* order, std::int64_t n,
                       std::size_t bytes, bool take, char* out, int threads) {
  const bool parallel = n * static_cast<std::int64_t>(bytes) >= kWorthThreads;
  const Shares shares{n, parallel ? std::min<std::int64_t>(n, threads * 4) : 1};
  return over_shares(shares, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    return with_bytes(bytes, [=](auto width) {
      return take ? move_span<true>(rows, order, begin, end, n, width, out)
                  : move_span<false>(rows, order, begin, end, n, width, out);
    });
  });
}

}  // namespace shoal
