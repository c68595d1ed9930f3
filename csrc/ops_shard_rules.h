#pragma once
// Which shard an id goes to: the rules of src/shoal/placement.py, by number.
#include <cstdint>

#include "hash.h"

namespace shoal {

// given: the caller says it of each id. hash_ranges: a table has a line [2 + shards] of its salt,
// its number of shares R, and the shard of each share; an id's share is its hash's top 16 bits
// * R >> 16. The others: the id, or its 64 bits unsigned, modulo the shards.
enum class ShardRule : int { given = 0, floormod = 1, unsigned_mod = 2, hash_ranges = 3 };

// The shard of an id, by any rule but `given`.
class ShardOf {
 public:
  ShardOf(ShardRule rule, std::int64_t shards, const std::int64_t* line = nullptr)
      : rule_(rule),
        line_(line),
        divisor_(static_cast<std::uint64_t>(shards)),
        inverse_(~std::uint64_t{0} / divisor_),
        wrap_((~std::uint64_t{0} % divisor_ + 1) % divisor_) {}

  std::int64_t operator()(std::int64_t id) const {
    if (rule_ == ShardRule::hash_ranges) {
      const std::uint64_t hash = hash_of(id, static_cast<std::uint64_t>(line_[0]));
      return line_[2 + (((hash >> 48) * static_cast<std::uint64_t>(line_[1])) >> 16)];
    }
    // By multiplication: q is the quotient or one less.
    __extension__ using Wide = unsigned __int128;
    const auto x = static_cast<std::uint64_t>(id);
    const auto q = static_cast<std::uint64_t>((static_cast<Wide>(x) * inverse_) >> 64);
    std::uint64_t r = x - q * divisor_;
    if (r >= divisor_) r -= divisor_;
    // As Python's %: a negative id read as unsigned is 2^64 too large.
    if (rule_ == ShardRule::floormod && id < 0) r = r >= wrap_ ? r - wrap_ : r + divisor_ - wrap_;
    return static_cast<std::int64_t>(r);
  }

 private:
  ShardRule rule_;
  const std::int64_t* line_;
  std::uint64_t divisor_;
  std::uint64_t inverse_;
  std::uint64_t wrap_;  // 2^64 modulo the divisor
};

}  // namespace shoal
