// What rows of the snapshot there are, by hash: counted, and put in order a window at a time.
#include <algorithm>
#include <array>
#include <stdexcept>

#include "hash.h"
#include "prefetch.h"
#include "shard.h"
#include "snapshot.h"

namespace shoal {
namespace {

constexpr std::size_t kStretch = std::size_t{1} << 13;  // rows scanned under the lock at a time
constexpr int kMostBins = 12;                           // as bits
constexpr std::size_t kBinRows = 1024;
constexpr int kMostBits = 20;  // of a histogram
constexpr std::size_t kCountRows = 256;  // to a bin: 4 bytes for each 128 rows at most

// As many as leave about so many rows to a bin.
int bits_for(std::size_t rows, int most, std::size_t rows_a_bin) {
  int bits = 0;
  while (bits < most && (rows >> bits) > rows_a_bin) ++bits;
  return bits;
}

// The first hash of a bin; of the bin past the last one: 0.
std::uint64_t bin_start(std::size_t bin, int bits) {
  return bits == 0 ? 0 : static_cast<std::uint64_t>(bin) << (64 - bits);
}

std::size_t bin_of(std::uint64_t hash, int bits) { return bits == 0 ? 0 : hash >> (64 - bits); }

}  // namespace

void Snapshot::scan_rows(int t, std::size_t start, std::size_t stop, std::uint64_t first,
                         std::uint64_t last, const Found& found) const {
  constexpr std::size_t kGroup = std::size_t{1} << kMaximumShift;
  const Table& table = shard_.table(t);
  const RowView view = table.view().rows;
  std::uint32_t rows[2 * kGroup];
  std::size_t n = 0;
  while (start < stop) {
    const auto row = static_cast<std::uint32_t>(start);
    const std::size_t end =
        std::min({stop, (start | (kGroup - 1)) + 1, table.arena().block_stop(start)});
    start = end;
    if (*row_maximum(view, row) > since()) {
      const auto* versions = reinterpret_cast<const std::uint32_t*>(block_view(view, row).versions);
      const std::size_t many =
          kernels().find_between(versions + row, end - row, since(), version(), rows + n);
      for (std::size_t i = 0; i < many; ++i) rows[n + i] += row;
      n += many;
    }
    if (n < kGroup && start < stop) continue;
    hash_rows(t, rows, n, first, last, found);
    n = 0;
  }
}

void Snapshot::hash_rows(int t, const std::uint32_t* rows, std::size_t many, std::uint64_t first,
                         std::uint64_t last, const Found& found) const {
  constexpr std::size_t kMost = std::size_t{2} << kMaximumShift, kAhead = 24;
  const Table& table = shard_.table(t);
  const RowView view = table.view().rows;
  const std::uint64_t salt = table.spec().salt, width = last - first;
  Entry batch[kMost];
  // Every row is written, those that are not wanted are written over: no branch to guess.
  std::size_t n = 0;
  for (std::size_t i = 0; i < many; ++i) {
    if (i + kAhead < many) __builtin_prefetch(&row_id(view, rows[i + kAhead]));
    const std::uint64_t hash = hash_of(row_id(view, rows[i]), salt);
    batch[n] = Entry{hash, rows[i]};
    n += static_cast<std::size_t>(hash - first <= width);
  }
  if (kept_->overwritten(t)) {
    const auto gone = [&](const Entry& e) {
      return !kept_->unchanged(t, e.row, row_version(view, e.row));
    };
    n = static_cast<std::size_t>(std::remove_if(batch, batch + n, gone) - batch);
  }
  if (n > 0) found(batch, n);
}

void Snapshot::scan(int t, std::uint64_t first, std::uint64_t last, int threads,
                    const Found& found) {
  const std::size_t high = highs_[t];
  const std::size_t stretches = (high + kStretch - 1) / kStretch;
  std::vector<std::uint32_t> clocks(stretches);
  Pool::instance().run(static_cast<std::int64_t>(stretches), threads, [&](std::int64_t k, int) {
    const ReadGuard guard(shard_.lock());
    clocks[k] = kept_->tick();
    const std::size_t start = static_cast<std::size_t>(k) * kStretch;
    scan_rows(t, start, std::min(start + kStretch, high), first, last, found);
  });
  const std::uint64_t salt = shard_.table(t).spec().salt;
  // What changed before the scan passed it was not found there.
  kept_->visit(shard_.lock(), t, first, last, [&](const PreImage& image, const char*, const char*) {
    if (!earlier(image.clock, clocks[image.row / kStretch])) return;
    const Entry entry{hash_of(image.id, salt), image.row};
    found(&entry, 1);
  });
}

// Counted once, as finely as whatever is asked later may want: each scan of the ids costs memory
// traffic, and holds the lock every now and then.
std::vector<std::int64_t> Snapshot::histogram(int t, int bits, int threads) {
  std::vector<std::uint32_t>& fine = counts_[t];
  if (fine.size() < std::size_t{1} << bits) {
    const int most = std::max(bits, bits_for(highs_[t], kMostBits, kCountRows));
    std::vector<std::uint32_t> counted(std::size_t{1} << most, 0);
    scan(t, 0, ~std::uint64_t{0}, threads, [&](const Entry* rows, std::size_t n) {
      for (std::size_t i = 0; i < n; ++i) {
        std::atomic_ref<std::uint32_t> bin(counted[bin_of(rows[i].hash, most)]);
        bin.fetch_add(1, std::memory_order_relaxed);
      }
    });
    fine = std::move(counted);
  }
  std::vector<std::int64_t> counts(std::size_t{1} << bits, 0);
  const int shift = __builtin_ctzll(fine.size()) - bits;
  for (std::size_t i = 0; i < fine.size(); ++i) counts[i >> shift] += fine[i];
  return counts;
}

// A window of whole bins from the one `first` lies in; bins are counted, so that each row goes
// straight to its bin.
void Snapshot::build(int t, std::uint64_t first, int threads) {
  window_.table = -1;
  const int bits = bits_for(highs_[t], kMostBins, kBinRows);
  const std::vector<std::int64_t> counts = histogram(t, bits, threads);
  const std::size_t start = bin_of(first, bits);
  std::vector<std::size_t> edges{0};
  while (start + edges.size() - 1 < counts.size()) {
    const auto here = static_cast<std::size_t>(counts[start + edges.size() - 1]);
    const std::size_t next = edges.back() + here;
    if (edges.size() > 1 && next > window_rows_) break;
    edges.push_back(next);
  }
  const std::size_t many = edges.size() - 1;
  const std::size_t n = edges.back();
  window_.first = bin_start(start, bits);
  window_.last = bin_start(start + many, bits) - 1;
  if (bits == 0) window_.last = ~std::uint64_t{0};
  if (!window_.rows || window_.rows->size() < n) {
    window_.rows.reset();
    window_.rows = std::make_unique<Scratch<Entry>>(n);
  }
  Entry* const rows = window_.rows->data();
  std::vector<std::size_t> at(edges.begin(), edges.end() - 1);
  scan(t, window_.first, window_.last, threads, [&](const Entry* found, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bin = bin_of(found[i].hash, bits) - start;
      const std::size_t to = std::atomic_ref(at[bin]).fetch_add(1, std::memory_order_relaxed);
      if (to >= edges[bin + 1]) throw std::logic_error("a snapshot met more rows than it counted");
      rows[to] = found[i];
    }
  });
  kept_->check();
  for (std::size_t bin = 0; bin < many; ++bin) {
    if (at[bin] != edges[bin + 1]) throw std::logic_error("a snapshot lost rows that it counted");
  }
  order(edges, bits, threads);
  window_.n = n;
  window_.table = t;
}

// Sorts each bin: into pieces of a few rows by the bits below the bin's, then piece by piece.
void Snapshot::order(const std::vector<std::size_t>& edges, int bits, int threads) {
  const auto before = [](const Entry& a, const Entry& b) { return a.hash < b.hash; };
  const auto many = static_cast<std::int64_t>(edges.size()) - 1;
  Entry* const rows = window_.rows->data();
  std::vector<std::vector<Entry>> copies(static_cast<std::size_t>(std::max(threads, 1)));
  Pool::instance().run(many, threads, [&](std::int64_t bin, int lane) {
    const std::size_t start = edges[bin], n = edges[bin + 1] - start;
    if (n < 32) {
      std::sort(rows + start, rows + start + n, before);
      return;
    }
    constexpr int kPieceBits = 9;
    std::array<std::uint32_t, (1U << kPieceBits) + 1> starts{};
    const auto piece_of = [&](std::uint64_t hash) { return hash << bits >> (64 - kPieceBits); };
    for (std::size_t i = start; i < start + n; ++i) ++starts[piece_of(rows[i].hash) + 1];
    for (std::size_t p = 1; p < starts.size(); ++p) starts[p] += starts[p - 1];
    std::vector<Entry>& copy = copies[lane];
    copy.assign(rows + start, rows + start + n);
    for (const Entry& entry : copy) rows[start + starts[piece_of(entry.hash)]++] = entry;
    std::uint32_t from = 0;  // starts[p] is by now where piece p ends
    for (std::size_t p = 0; p + 1 < starts.size(); ++p) {
      if (starts[p] - from > 1) std::sort(rows + start + from, rows + start + starts[p], before);
      from = starts[p];
    }
  });
}

}  // namespace shoal
