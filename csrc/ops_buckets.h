#pragma once
// A stable partition of items into buckets by several threads. The order inside a bucket is that of
// the items, so sums over a bucket do not depend on the number of threads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "buffers.h"
#include "threads.h"

namespace shoal {

// Equal shares of [0, items), in order.
struct Shares {
  std::int64_t items;
  std::int64_t count;

  std::int64_t begin(std::int64_t share) const {
    return items / count * share + std::min(share, items % count);
  }
  std::int64_t end(std::int64_t share) const { return begin(share + 1); }
};

// Shares of about `size` items each, at least one.
inline Shares shares_of(std::int64_t items, std::int64_t size) {
  return Shares{items, std::max<std::int64_t>(1, items / std::max<std::int64_t>(1, size))};
}

// Items before each list of so many, and in all.
inline std::vector<std::int64_t> splits_of(const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> splits(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), splits.begin() + 1);
  return splits;
}

// The first non-negative one, or -1.
inline std::int64_t first_of(const std::vector<std::int64_t>& places) {
  for (const std::int64_t place : places) {
    if (place >= 0) return place;
  }
  return -1;
}

// body(share, begin, end) on every share; returns the smallest non-negative value it returned, or
// -1. A body reports its first bad item that way and may stop there.
template <class Body>
std::int64_t over_shares(const Shares& shares, int threads, const Body& body) {
  std::vector<std::int64_t> bad(static_cast<std::size_t>(shares.count), -1);
  Pool::instance().run(shares.count, threads, [&](std::int64_t share, int) {
    bad[static_cast<std::size_t>(share)] = body(share, shares.begin(share), shares.end(share));
  });
  return first_of(bad);
}

template <class Record>
struct Buckets {
  std::vector<std::int64_t> starts;           // [buckets + 1]
  std::unique_ptr<Scratch<Record>> records;
  std::int64_t bad = -1;  // the first bad item; there are no records then

  const Record* begin(std::int64_t bucket) const {
    return records->data() + starts[static_cast<std::size_t>(bucket)];
  }
  std::int64_t size(std::int64_t bucket) const {
    return starts[static_cast<std::size_t>(bucket) + 1] - starts[static_cast<std::size_t>(bucket)];
  }
};

// route(begin, end, put) calls put(bucket, record) for the items of a share, in order, and returns
// the first bad one, or -1. It runs twice: to count, and to place. room(total) is where the records
// go; starts [buckets + 1] where each bucket's begin. The first bad item, or -1.
template <class Record, class Room, class Route>
std::int64_t partition_into(const Shares& shares, std::int64_t buckets, int threads,
                            std::int64_t* starts, const Room& room, const Route& route) {
  std::vector<std::int64_t> next(static_cast<std::size_t>(shares.count * buckets), 0);
  const std::int64_t bad = over_shares(
      shares, threads, [&](std::int64_t share, std::int64_t begin, std::int64_t end) {
        std::int64_t* counts = next.data() + share * buckets;
        return route(begin, end,
                     [counts](std::int64_t bucket, const Record&) { ++counts[bucket]; });
      });
  if (bad >= 0) return bad;
  std::int64_t total = 0;
  for (std::int64_t bucket = 0; bucket < buckets; ++bucket) {
    starts[bucket] = total;
    for (std::int64_t share = 0; share < shares.count; ++share) {
      total += std::exchange(next[static_cast<std::size_t>(share * buckets + bucket)], total);
    }
  }
  starts[buckets] = total;
  Record* records = room(total);
  return over_shares(
      shares, threads, [&](std::int64_t share, std::int64_t begin, std::int64_t end) {
        std::int64_t* places = next.data() + share * buckets;
        return route(begin, end, [places, records](std::int64_t bucket, const Record& record) {
          records[places[bucket]++] = record;
        });
      });
}

template <class Record, class Route>
Buckets<Record> in_buckets(std::int64_t items, std::int64_t buckets, int threads,
                           const Route& route) {
  Buckets<Record> result;
  result.starts.resize(static_cast<std::size_t>(buckets) + 1);
  const auto room = [&result](std::int64_t total) {
    result.records = std::make_unique<Scratch<Record>>(total);
    return result.records->data();
  };
  const Shares shares{items, threads > 1 ? 4 * threads : 1};
  result.bad = partition_into<Record>(shares, buckets, threads, result.starts.data(), room, route);
  return result;
}

}  // namespace shoal
