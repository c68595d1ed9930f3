#include "snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "prefetch.h"
#include "shard.h"
#include "stream.h"

namespace shoal {
namespace {

constexpr std::size_t kStretch = std::size_t{1} << 13;  // rows scanned under the lock at a time
constexpr std::size_t kPiece = 1024;                    // rows copied before they are checked
constexpr int kMostBins = 12;                           // as bits
constexpr std::size_t kBinRows = 1024;
constexpr int kMostBits = 20;  // of a histogram
constexpr std::size_t kCountRows = 16;
constexpr std::int64_t kLogged = 1 << 12;  // deletions read, or looked up, under the lock at a time

std::uint64_t hash_of(std::int64_t id, std::uint64_t salt) {
  return mix64(static_cast<std::uint64_t>(id) ^ salt);
}

std::vector<PreImages::Form> forms_of(const Shard& shard) {
  std::vector<PreImages::Form> forms;
  for (int t = 0; t < shard.size(); ++t) {
    const Table& table = shard.table(t);
    const TableSpec& spec = table.spec();
    const std::size_t real = spec.dtype == DType::f64 ? 8 : 4;
    forms.push_back(PreImages::Form{spec.dim * element_bytes(spec.dtype), spec.state_width * real,
                                    spec.salt, table.arena().high_water()});
  }
  return forms;
}

// As many as leave about so many rows to a bin.
int bits_for(std::size_t rows, int most, std::size_t rows_a_bin) {
  int bits = 0;
  while (bits < most && (rows >> bits) > rows_a_bin) ++bits;
  return bits;
}

int bits_of(std::size_t bins) { return __builtin_ctzll(bins); }

// The first hash of a bin; of the bin past the last one: 0.
std::uint64_t bin_start(std::size_t bin, int bits) {
  return bits == 0 ? 0 : static_cast<std::uint64_t>(bin) << (64 - bits);
}

std::size_t bin_of(std::uint64_t hash, int bits) { return bits == 0 ? 0 : hash >> (64 - bits); }

}  // namespace

Snapshot::Snapshot(Shard& shard, std::uint32_t since, std::uint32_t epoch,
                   LogSpan log, Options options)
    : shard_(shard),
      since_(since),
      epoch_(epoch),
      window_rows_(std::max<std::size_t>(options.window_rows, 1)),
      images_(forms_of(shard), since, epoch, options.buffer_bytes),
      log_(log),
      deleted_(static_cast<std::size_t>(shard.size())),
      deleted_ready_(deleted_.size(), false),
      counts_(deleted_.size()),
      bins_(deleted_.size()) {
  for (int t = 0; t < shard.size(); ++t) highs_.push_back(shard.table(t).arena().high_water());
}

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
    if (*row_maximum(view, row) > since_) {
      const auto* versions = reinterpret_cast<const std::uint32_t*>(block_view(view, row).versions);
      const std::size_t many =
          kernels().find_between(versions + row, end - row, since_, epoch_, rows + n);
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
  if (images_.overwritten(t)) {
    const auto gone = [&](const Entry& e) {
      return !images_.unchanged(t, e.row, row_version(view, e.row));
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
    clocks[k] = images_.tick();
    const std::size_t start = static_cast<std::size_t>(k) * kStretch;
    scan_rows(t, start, std::min(start + kStretch, high), first, last, found);
  });
  const std::uint64_t salt = shard_.table(t).spec().salt;
  // What changed before the scan passed it was not found there.
  images_.visit(shard_.lock(), t, first, last, [&](const PreImage& image, const char*, const char*) {
    if (image.clock >= clocks[image.row / kStretch]) return;
    const Entry entry{hash_of(image.id, salt), image.row};
    found(&entry, 1);
  });
}

void Snapshot::count(int t, int bits, int threads, std::uint32_t* counts) {
  scan(t, 0, ~std::uint64_t{0}, threads, [&](const Entry* rows, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      std::atomic_ref(counts[bin_of(rows[i].hash, bits)]).fetch_add(1, std::memory_order_relaxed);
    }
  });
}

// Counted once, finely, for whatever is asked of it: each scan of the ids costs memory traffic, and
// holds the lock every now and then.
const std::vector<std::uint32_t>& Snapshot::counts(int t, int threads) {
  if (counts_[t].empty()) {
    const int bits = bits_for(highs_[t], kMostBits, kCountRows);
    std::vector<std::uint32_t> fine(std::size_t{1} << bits, 0);
    count(t, bits, threads, fine.data());
    counts_[t] = std::move(fine);
  }
  return counts_[t];
}

void Snapshot::histogram(int t, int bits, std::int64_t* to, int threads) {
  std::vector<std::uint32_t> finer;
  const std::vector<std::uint32_t>* from = &counts(t, threads);
  if (bits > bits_of(from->size())) {  // of a few rows
    finer.assign(std::size_t{1} << bits, 0);
    count(t, bits, threads, finer.data());
    from = &finer;
  }
  const int shift = bits_of(from->size()) - bits;
  for (std::size_t i = 0; i < from->size(); ++i) to[i >> shift] += (*from)[i];
}

const std::vector<std::uint32_t>& Snapshot::bins(int t, int threads) {
  if (!bins_[t].empty()) return bins_[t];
  const std::vector<std::uint32_t>& fine = counts(t, threads);
  const int bits = bits_for(highs_[t], kMostBins, kBinRows);
  std::vector<std::uint32_t> coarse(std::size_t{1} << bits, 0);
  const int shift = bits_of(fine.size()) - bits;
  for (std::size_t i = 0; i < fine.size(); ++i) coarse[i >> shift] += fine[i];
  return bins_[t] = std::move(coarse);
}

// A window of whole bins from the one `first` lies in; bins are counted, so that each row goes
// straight to its bin.
void Snapshot::build(int t, std::uint64_t first, int threads) {
  window_.table = -1;
  const std::vector<std::uint32_t>& counts = bins(t, threads);
  const int bits = bits_of(counts.size());
  const std::size_t start = bin_of(first, bits);
  std::vector<std::size_t> edges{0};
  while (start + edges.size() - 1 < counts.size()) {
    const std::size_t next = edges.back() + counts[start + edges.size() - 1];
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
  images_.check();
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

std::int64_t Snapshot::find(int t, std::uint64_t first, std::uint64_t last, int threads) {
  images_.check();
  found_.clear();
  found_table_ = t;
  found_first_ = first;
  found_last_ = last;
  for (;;) {
    if (window_.table != t || first < window_.first || first > window_.last) {
      build(t, first, threads);
    }
    const Entry* const rows = window_.rows->data();
    const std::uint64_t end = std::min(last, window_.last);
    const Entry* at = std::lower_bound(
        rows, rows + window_.n, first, [](const Entry& e, std::uint64_t h) { return e.hash < h; });
    const Entry* const stop = std::upper_bound(
        at, rows + window_.n, end, [](std::uint64_t h, const Entry& e) { return h < e.hash; });
    for (; at != stop; ++at) found_.push_back(at->row);
    if (end == last) break;
    first = end + 1;
  }
  return static_cast<std::int64_t>(found_.size());
}

void Snapshot::copy_piece(const RowView& view, std::size_t start, std::size_t stop,
                          const SnapshotColumns& to) const {
  constexpr std::size_t kAhead = 16;
  const std::size_t weights = view.dim * element_bytes(view.dtype);
  const std::size_t state = view.state_width * (view.dtype == DType::f64 ? 8 : 4);
  const bool streams = streamable(to.weights, weights) && streamable(to.state, state);
  const auto ask = [&](std::size_t i) {
    const std::uint32_t row = found_[i];
    const BlockView& block = block_view(view, row);
    __builtin_prefetch(block.versions + std::size_t{row} * 4);  // to be checked
    __builtin_prefetch(block.ids + std::size_t{row} * 8);
    __builtin_prefetch(block.seen + std::size_t{row} * 8);
    prefetch_once(block.weights + row * view.weight_stride, weights);
    prefetch_once(block.state + row * view.state_stride, state);
  };
  for (std::size_t i = start; i < std::min(start + kAhead, stop); ++i) ask(i);
  for (std::size_t i = start; i < stop; ++i) {
    if (i + kAhead < stop) ask(i + kAhead);
    const std::uint32_t row = found_[i];
    const LastSeen seen = row_seen(view, row);
    to.ids[i] = row_id(view, row);
    to.seen_s[i] = seen.seconds;
    to.counts[i] = seen.count;
    if (streams) {
      stream_bytes(to.weights + i * weights, weight_row(view, row), weights);
      stream_bytes(to.state + i * state, state_row(view, row), state);
    } else {
      std::memcpy(to.weights + i * weights, weight_row(view, row), weights);
      if (state > 0) std::memcpy(to.state + i * state, state_row(view, row), state);
    }
  }
  if (streams) end_stream();
}

// Versions are those seen under the lock: grouping gradients borrows them, and gives them back.
void Snapshot::check_piece(const RowView& view, std::size_t start, std::size_t stop,
                           const SnapshotColumns& to, std::vector<std::uint64_t>& missed) const {
  for (std::size_t i = start; i < stop; ++i) {
    const std::uint32_t row = found_[i];
    to.versions[i] = row_version(view, row);
    if (images_.unchanged(found_table_, row, row_version(view, row))) continue;
    missed.push_back(std::uint64_t{row} << 32 | i);
  }
}

// Rows are copied without the lock, so that a verb hardly waits: what was written meanwhile bears
// another version by the time the lock is had, for verbs hold it from before they write until after
// they stamp, and is not taken. Blocks of rows stay where they are; only their list may move.
void Snapshot::read(const SnapshotColumns& to, int threads) {
  const std::size_t n = found_.size();
  if (n >= std::size_t{1} << 32) throw std::length_error("a range of 2^32 rows");
  if (n == 0) return;
  RowView view;
  std::vector<BlockView> blocks;
  {
    const ReadGuard guard(shard_.lock());
    view = shard_.table(found_table_).view().rows;
    const auto top = static_cast<std::uint32_t>(highs_[found_table_] - 1);
    blocks.assign(view.blocks, view.blocks + block_of(view.geometry, top) + 1);
    view.blocks = blocks.data();
  }
  const std::size_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<std::vector<std::uint64_t>> missed(static_cast<std::size_t>(std::max(threads, 1)));
  Pool::instance().run(static_cast<std::int64_t>(pieces), threads, [&](std::int64_t k, int lane) {
    const std::size_t start = static_cast<std::size_t>(k) * kPiece;
    const std::size_t stop = std::min(start + kPiece, n);
#ifdef __SANITIZE_THREAD__  // which knows no copy that is thrown away
    const ReadGuard guard(shard_.lock());
    copy_piece(view, start, stop, to);
#else
    copy_piece(view, start, stop, to);
    const ReadGuard guard(shard_.lock());
#endif
    check_piece(view, start, stop, to, missed[lane]);
  });
  std::vector<std::uint64_t> all;
  for (const std::vector<std::uint64_t>& some : missed) {
    all.insert(all.end(), some.begin(), some.end());
  }
  if (!all.empty()) fill(to, all);
  images_.check();
}

void Snapshot::fill(const SnapshotColumns& to, const std::vector<std::uint64_t>& missed) {
  const TableSpec& spec = shard_.table(found_table_).spec();
  const std::size_t weights = spec.dim * element_bytes(spec.dtype);
  const std::size_t state = spec.state_width * (spec.dtype == DType::f64 ? 8 : 4);
  // Open addressing: row << 32 | place, all ones where free (no row has that number).
  std::size_t size = 16;
  while (size < 2 * missed.size()) size *= 2;
  std::vector<std::uint64_t> slots(size, ~std::uint64_t{0});
  const auto slot_of = [&](std::uint32_t row) { return (row * 0x9E3779B97F4A7C15ULL >> 20) & (size - 1); };
  for (const std::uint64_t entry : missed) {
    std::size_t at = slot_of(static_cast<std::uint32_t>(entry >> 32));
    while (slots[at] != ~std::uint64_t{0}) at = (at + 1) & (size - 1);
    slots[at] = entry;
  }
  std::size_t filled = 0;
  images_.visit(shard_.lock(), found_table_, found_first_, found_last_,
                [&](const PreImage& image, const char* from, const char* from_state) {
                  std::size_t at = slot_of(image.row);
                  while (slots[at] != ~std::uint64_t{0} && slots[at] >> 32 != image.row) {
                    at = (at + 1) & (size - 1);
                  }
                  if (slots[at] == ~std::uint64_t{0}) return;  // read before it changed
                  const std::size_t i = slots[at] & 0xffffffffU;
                  to.ids[i] = image.id;
                  to.versions[i] = image.version;
                  to.seen_s[i] = image.seen_s;
                  to.counts[i] = image.count;
                  std::memcpy(to.weights + i * weights, from, weights);
                  if (state > 0) std::memcpy(to.state + i * state, from_state, state);
                  ++filled;
                });
  images_.check();
  if (filled != missed.size()) throw std::logic_error("a snapshot lost rows that changed");
}

// Under the shard's lock.
void Snapshot::read_log(std::int64_t most) {
  const std::int64_t many = std::min(most, log_.stop - log_.first);
  const std::vector<Deletion> records = shard_.deletions().read(log_.first, many);
  for (const Deletion& deletion : records) deleted_[deletion.table].push_back(deletion.id);
  log_.first += many;
}

void Snapshot::take_log() noexcept {
  try {
    while (log_.first < log_.stop) read_log(kLogged);
  } catch (const std::exception&) {  // told by deleted()
    log_lost_ = true;
    log_.first = log_.stop;
  }
}

// A row of the cut lies where it did, unchanged, or was copied, be it because it was deleted since.
void Snapshot::drop_present(int t, std::vector<std::int64_t>& ids) {
  const Table& table = shard_.table(t);
  const std::uint64_t salt = table.spec().salt;
  std::vector<bool> present(ids.size(), false);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(kLogged));
  const auto n = static_cast<std::int64_t>(ids.size());
  for (std::int64_t at = 0; at < n; at += kLogged) {
    const std::int64_t many = std::min(kLogged, n - at);
    const ReadGuard guard(shard_.lock());
    const RowView view = table.view().rows;
    kernels().probe(table.index().view(), ids.data() + at, many, rows.data());
    for (std::int64_t i = 0; i < many; ++i) {
      if (rows[i] == kNoRow) continue;
      const auto row = static_cast<std::uint32_t>(rows[i]);
      present[at + i] = images_.unchanged(t, row, row_version(view, row));
    }
  }
  const auto below = [salt](std::int64_t id, std::uint64_t hash) { return hash_of(id, salt) < hash; };
  images_.visit(shard_.lock(), t, 0, ~std::uint64_t{0},
                [&](const PreImage& image, const char*, const char*) {
                  const auto at =
                      std::lower_bound(ids.begin(), ids.end(), hash_of(image.id, salt), below);
                  if (at != ids.end() && *at == image.id) present[at - ids.begin()] = true;
                });
  images_.check();
  std::size_t kept = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!present[i]) ids[kept++] = ids[i];
  }
  ids.resize(kept);
}

const std::vector<std::int64_t>& Snapshot::deleted(int t) {
  for (bool more = true; more;) {
    const ReadGuard guard(shard_.lock());
    if (log_lost_) throw std::runtime_error("the log of deletions could not be read");
    if (log_.first < log_.stop) read_log(kLogged);
    more = log_.first < log_.stop;
  }
  std::vector<std::int64_t>& ids = deleted_[t];
  if (!deleted_ready_[t]) {
    const std::uint64_t salt = shard_.table(t).spec().salt;
    std::sort(ids.begin(), ids.end(), [salt](std::int64_t a, std::int64_t b) {
      return hash_of(a, salt) < hash_of(b, salt);
    });
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (!ids.empty()) drop_present(t, ids);
    deleted_ready_[t] = true;
  }
  return ids;
}

}  // namespace shoal
