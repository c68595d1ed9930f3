#include "index.h"

#include <algorithm>
#include <cstring>

namespace shoal {
namespace {

constexpr std::uint32_t kFirstLines = 4;
constexpr std::uint32_t kOverflowOne = 1U << 8;
constexpr std::uint32_t kSlotMask = (1U << kSlots) - 1;
constexpr int kHashBits = 48;        // stripes use hash bits 47 downwards, buckets the 16 above
constexpr int kMaxBits = 16;
constexpr std::size_t kSplitRows = 32 * 1024;    // a stripe below this never splits
constexpr std::size_t kMaxStripeRows = 1 << 20;  // above this always, to bound one rehash

// Large stripes fill whole huge pages: probes of lines in small ones wait for page tables as well.
std::uint32_t whole_pages(std::uint32_t lines) {
  constexpr std::uint32_t kPage = (std::uint32_t{2} << 20) / sizeof(Line);
  return lines < kPage ? lines : (lines + kPage - 1) / kPage * kPage;
}

std::uint32_t grown(std::uint32_t lines) {
  return lines < 64 ? lines * 2 : whole_pages(lines + lines / 4);
}

void place(Line* lines, std::uint32_t count, std::uint64_t hash, std::int64_t id,
           std::int32_t row) {
  std::uint64_t at = (hash & 0xffffffffULL) * count >> 32;
  while ((lines[at].meta & kSlotMask) == kSlotMask) {
    lines[at].meta += kOverflowOne;
    if (++at == count) at = 0;
  }
  Line& line = lines[at];
  const int slot = __builtin_ctz(~line.meta & kSlotMask);
  line.keys[slot] = id;
  line.rows[slot] = row;
  line.meta |= 1U << slot;
}

}  // namespace

Index::Index(std::uint64_t salt)
    : salt_(salt), directory_(1, 0), stripes_(1), views_(1, StripeView{}) {
  resize(0, kFirstLines);
}

void Index::clear() {
  // Stripes stay, as the arena's blocks do: a cleared table is about to be filled again.
  for (std::size_t i = 0; i < stripes_.size(); ++i) {
    std::memset(static_cast<void*>(views_[i].lines), 0, views_[i].count * sizeof(Line));
    stripes_[i].size = 0;
  }
}

IndexView Index::view() const {
  return IndexView{views_.data(), directory_.data(), salt_, kHashBits - bits_,
                   static_cast<std::uint32_t>((std::uint64_t{1} << bits_) - 1)};
}

std::uint32_t Index::slot_of(std::uint64_t hash) const {
  return static_cast<std::uint32_t>((hash >> (kHashBits - bits_)) & ((1ULL << bits_) - 1));
}

std::int32_t Index::find(std::int64_t id) const {
  const std::uint64_t hash = hash_of(id, salt_);
  const StripeView* stripe = nullptr;
  const Line* line = home_line(view(), hash, stripe);
  return probe(stripe, line, id);
}

void Index::set_limit(std::uint32_t stripe) {
  // Stripes fill at the same pace, so equal limits would make all of them grow in one step. The
  // golden-ratio sequence spreads limits over the ratio of one growth (1.25).
  Stripe& s = stripes_[stripe];
  const double spread = static_cast<double>((s.prefix + 1) * 0x9E3779B9U) / 4294967296.0;
  const double load = stripes_.size() == 1 ? 0.80 : 0.66 + 0.16 * spread;
  s.limit = static_cast<std::uint32_t>(load * kSlots * views_[stripe].count);
}

void Index::resize(std::uint32_t stripe, std::uint32_t lines) {
  const std::size_t bytes = static_cast<std::size_t>(lines) * sizeof(Line);
  // The lines of a small table; a large one's stripes are of many sizes, which fit no other's.
  Block block = stripes_.size() == 1 ? Block::packed(bytes, true) : Block(bytes);
  Line* fresh = reinterpret_cast<Line*>(block.data());
  each_of(views_[stripe], [&](std::int64_t id, std::int32_t row) {
    place(fresh, lines, hash_of(id, salt_), id, row);
  });
  stripes_[stripe].block = std::move(block);
  views_[stripe].lines = fresh;
  views_[stripe].count = lines;
  set_limit(stripe);
}

void Index::insert(std::int64_t id, std::int32_t row) {
  const std::uint64_t hash = hash_of(id, salt_);
  const std::uint32_t stripe = directory_[slot_of(hash)];
  if (stripes_[stripe].size >= stripes_[stripe].limit) {
    const std::uint32_t lines = views_[stripe].count;
    resize(stripe, grown(lines));
  }
  place(views_[stripe].lines, views_[stripe].count, hash, id, row);
  ++stripes_[stripe].size;
}

std::int32_t Index::erase(std::int64_t id) {
  const std::uint64_t hash = hash_of(id, salt_);
  const std::uint32_t stripe = directory_[slot_of(hash)];
  Line* lines = views_[stripe].lines;
  const std::uint32_t count = views_[stripe].count;
  const std::uint64_t home = (hash & 0xffffffffULL) * count >> 32;
  std::uint64_t at = home;
  for (std::uint32_t step = 0; step < count; ++step) {
    const unsigned hit = match(&lines[at], id);
    if (hit != 0) {
      const int slot = __builtin_ctz(hit);
      lines[at].meta &= ~(1U << slot);
      for (std::uint64_t past = home; past != at; past = past + 1 == count ? 0 : past + 1) {
        lines[past].meta -= kOverflowOne;
      }
      --stripes_[stripe].size;
      return lines[at].rows[slot];
    }
    if ((lines[at].meta >> 8) == 0) return kNoRow;
    if (++at == count) at = 0;
  }
  return kNoRow;
}

std::int32_t* Index::at(std::int64_t id) {
  const StripeView* stripe = nullptr;
  const Line* line = home_line(view(), hash_of(id, salt_), stripe);
  return const_cast<std::int32_t*>(probe_at(stripe, line, id));
}

void Index::count(std::int64_t id, std::vector<std::uint32_t>& fresh) const {
  fresh.resize(stripes_.size(), 0);
  ++fresh[directory_[slot_of(hash_of(id, salt_))]];
}

void Index::make_room(const std::int64_t* ids, std::size_t n) {
  std::vector<std::uint32_t> fresh(stripes_.size(), 0);
  for (std::size_t i = 0; i < n; ++i) count(ids[i], fresh);
  make_room(fresh);
}

void Index::make_room(const std::vector<std::uint32_t>& fresh) {
  for (std::uint32_t stripe = 0; stripe < stripes_.size(); ++stripe) {
    std::uint32_t lines = views_[stripe].count;
    // As insert() would grow it, in one go.
    const double load = static_cast<double>(stripes_[stripe].limit) / lines;
    while (stripes_[stripe].size + fresh[stripe] > static_cast<std::uint32_t>(load * lines)) {
      lines = grown(lines);
    }
    if (lines != views_[stripe].count) resize(stripe, lines);
  }
}

void Index::split(std::uint32_t stripe) {
  if (stripes_[stripe].depth == bits_) {
    std::vector<std::uint32_t> doubled(directory_.size() * 2);
    for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
    directory_ = std::move(doubled);
    ++bits_;
  }
  const StripeView view = views_[stripe];
  // Halves of a small stripe may be uneven enough to overflow a tight split.
  const std::uint32_t lines =
      stripes_[stripe].size < 1024 ? view.count
                                   : whole_pages(view.count / 2 + view.count / 16 + 1);
  // All memory first: a refusal must find the stripe as it was.
  Block blocks[2] = {Block(std::size_t{lines} * sizeof(Line)),
                     Block(std::size_t{lines} * sizeof(Line))};
  stripes_.reserve(stripes_.size() + 1);
  views_.reserve(views_.size() + 1);
  const Stripe old = std::move(stripes_[stripe]);
  const int depth = old.depth + 1;
  const std::uint32_t sibling = static_cast<std::uint32_t>(stripes_.size());
  stripes_.emplace_back();
  views_.emplace_back();
  const std::uint32_t halves[2] = {stripe, sibling};
  for (int half = 0; half < 2; ++half) {
    Stripe fresh;
    fresh.block = std::move(blocks[half]);
    fresh.depth = depth;
    fresh.prefix = old.prefix * 2 + half;
    views_[halves[half]] = StripeView{reinterpret_cast<Line*>(fresh.block.data()), lines, 0};
    stripes_[halves[half]] = std::move(fresh);
    set_limit(halves[half]);
  }
  each_of(view, [&](std::int64_t id, std::int32_t row) {
    const std::uint64_t hash = hash_of(id, salt_);
    const std::uint32_t target = halves[(hash >> (kHashBits - depth)) & 1];
    place(views_[target].lines, lines, hash, id, row);
    ++stripes_[target].size;
  });
  const std::uint32_t width = 1U << (bits_ - depth);
  const std::uint32_t first = stripes_[sibling].prefix * width;
  for (std::uint32_t i = 0; i < width; ++i) directory_[first + i] = sibling;
}

void Index::rebalance() {
  const std::size_t share =
      std::min(kMaxStripeRows, std::max(kSplitRows, size() / 32));
  const std::size_t before = stripes_.size();
  for (std::uint32_t i = 0; i < before; ++i) {
    if (stripes_[i].size > share && stripes_[i].depth < kMaxBits) split(i);
  }
}

void Index::reserve(std::size_t rows) {
  if (rows <= size()) return;
  const std::size_t share = std::min(kMaxStripeRows, std::max(kSplitRows, rows / 32));
  int bits = 0;
  // Uneven stripes stay below their share, or rebalance() would split them on the way there.
  while (bits < kMaxBits && (rows >> bits) > share - share / 8) ++bits;
  bool again = true;
  while (again) {
    again = false;
    const std::size_t before = stripes_.size();
    for (std::uint32_t i = 0; i < before; ++i) {
      if (stripes_[i].depth < bits) {
        split(i);
        again = true;
      }
    }
  }
  const std::size_t each = (rows >> bits) + 1;
  for (std::uint32_t i = 0; i < stripes_.size(); ++i) {
    // Below the lowest limit, with room for uneven stripes: reserved rows never cause a resize.
    const std::size_t lines = (each * 100) / (62 * kSlots) + 8;
    if (lines > views_[i].count) resize(i, whole_pages(static_cast<std::uint32_t>(lines)));
  }
}

int Index::partition_bits() const {
  int bits = kPartitionBits;
  for (const Stripe& stripe : stripes_) bits = std::min(bits, stripe.depth);
  return bits;
}

std::size_t Index::size() const {
  std::size_t total = 0;
  for (const Stripe& stripe : stripes_) total += stripe.size;
  return total;
}

std::size_t Index::slots() const {
  std::size_t total = 0;
  for (const StripeView& view : views_) total += std::size_t{kSlots} * view.count;
  return total;
}

std::size_t Index::bytes() const {
  std::size_t total = 0;
  for (const Stripe& stripe : stripes_) total += stripe.block.bytes();
  return total + stripes_.size() * (sizeof(Stripe) + sizeof(StripeView)) + directory_.size() * 4;
}

}  // namespace shoal
