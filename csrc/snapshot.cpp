#include "snapshot.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "hash.h"
#include "prefetch.h"
#include "shard.h"
#include "stream.h"

namespace shoal {
namespace {

constexpr std::size_t kPiece = 1024;       // rows copied before they are checked
constexpr std::int64_t kLogged = 1 << 12;  // deletions read, or looked up, under the lock at a time

std::vector<PreImages::Form> forms_of(const Shard& shard) {
  std::vector<PreImages::Form> forms;
  for (int t = 0; t < shard.size(); ++t) {
    const Table& table = shard.table(t);
    const RowView view = table.view().rows;
    forms.push_back(PreImages::Form{weight_bytes(view), state_bytes(view), table.spec().salt,
                                    table.arena().high_water()});
  }
  return forms;
}

}  // namespace

Snapshot::Snapshot(Shard& shard, std::uint32_t since, std::uint32_t version,
                   LogSpan log, Options options, OpenSnapshots& open)
    : shard_(shard),
      window_rows_(std::max<std::size_t>(options.window_rows, 1)),
      kept_(std::make_shared<KeptRows>(forms_of(shard), since, version, options.buffer_bytes, open)),
      log_(log),
      deleted_(static_cast<std::size_t>(shard.size())),
      deleted_ready_(deleted_.size(), false),
      counts_(deleted_.size()) {
  for (int t = 0; t < shard.size(); ++t) highs_.push_back(shard.table(t).arena().high_water());
}

std::int64_t Snapshot::find(int t, std::uint64_t first, std::uint64_t last, int threads) {
  kept_->check();
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

template <bool kPastCaches>
void copy_rows(const RowView& view, const std::uint32_t* rows, std::size_t start, std::size_t stop,
               const RowColumns& to) {
  constexpr std::size_t kAhead = 16;
  constexpr int kLocality = kPastCaches ? 0 : 2;
  const std::size_t weights = weight_bytes(view);
  const std::size_t state = to.state == nullptr ? 0 : state_bytes(view);
  const bool streams = kPastCaches && to.state != nullptr && streamable(to.weights, weights) &&
                       streamable(to.state, state);
  // Forced inline: see prefetch.h.
  const auto ask = [&](std::size_t i) __attribute__((always_inline)) {
    const std::uint32_t row = rows[i];
    const BlockView& block = block_view(view, row);
    __builtin_prefetch(block.versions + std::size_t{row} * 4);
    __builtin_prefetch(block.ids + std::size_t{row} * 8);
    __builtin_prefetch(block.seen + std::size_t{row} * 8);
    prefetch_row<512, 64, kLocality>(block.weights + row * view.weight_stride, weights);
    if (state > 0) prefetch_row<512, 64, kLocality>(block.state + row * view.state_stride, state);
  };
  for (std::size_t i = start; i < std::min(start + kAhead, stop); ++i) ask(i);
  for (std::size_t i = start; i < stop; ++i) {
    if (i + kAhead < stop) ask(i + kAhead);
    const std::uint32_t row = rows[i];
    const LastSeen seen = row_seen(view, row);
    to.ids[i] = row_id(view, row);
    if constexpr (!kPastCaches) to.versions[i] = row_version(view, row);
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

template void copy_rows<true>(const RowView&, const std::uint32_t*, std::size_t, std::size_t,
                           const RowColumns&);
template void copy_rows<false>(const RowView&, const std::uint32_t*, std::size_t, std::size_t,
                           const RowColumns&);

// Versions are those seen under the lock: grouping gradients borrows them, and gives them back.
void Snapshot::check_piece(const RowView& view, std::size_t start, std::size_t stop,
                           const RowColumns& to, std::vector<std::uint64_t>& missed) const {
  for (std::size_t i = start; i < stop; ++i) {
    const std::uint32_t row = found_[i];
    to.versions[i] = row_version(view, row);
    if (kept_->unchanged(found_table_, row, row_version(view, row))) continue;
    missed.push_back(std::uint64_t{row} << 32 | i);
  }
}

// Rows are copied without the lock, so that a verb hardly waits: what was written meanwhile bears
// another version by the time the lock is had, for verbs hold it from before they write until after
// they stamp, and is not taken. Blocks of rows stay where they are; only their list may move.
void Snapshot::read(const RowColumns& to, int threads) {
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
    copy_rows<true>(view, found_.data(), start, stop, to);
#else
    copy_rows<true>(view, found_.data(), start, stop, to);
    const ReadGuard guard(shard_.lock());
#endif
    check_piece(view, start, stop, to, missed[lane]);
  });
  std::vector<std::uint64_t> all;
  for (const std::vector<std::uint64_t>& some : missed) {
    all.insert(all.end(), some.begin(), some.end());
  }
  if (!all.empty()) fill(to, all);
  kept_->check();
}

void Snapshot::fill(const RowColumns& to, const std::vector<std::uint64_t>& missed) {
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
  kept_->visit(shard_.lock(), found_table_, found_first_, found_last_,
                [&](const PreImage& image, const char* from, const char* from_state) {
                  std::size_t at = slot_of(image.row);
                  while (slots[at] != ~std::uint64_t{0} && slots[at] >> 32 != image.row) {
                    at = (at + 1) & (size - 1);
                  }
                  if (slots[at] == ~std::uint64_t{0}) return;  // read before it changed
                  const std::size_t i = slots[at] & 0xffffffffU;
                  kept_->images().put(image, from, from_state, to, i);
                  ++filled;
                });
  kept_->check();
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

// A row of the snapshot lies where it did, unchanged, or was copied, be it because it was deleted since.
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
    kernels().probe(table.index().view(), ids.data() + at, many, rows.data(), nullptr);
    for (std::int64_t i = 0; i < many; ++i) {
      if (rows[i] == kNoRow) continue;
      const auto row = static_cast<std::uint32_t>(rows[i]);
      present[at + i] = kept_->unchanged(t, row, row_version(view, row));
    }
  }
  const auto below = [salt](std::int64_t id, std::uint64_t hash) { return hash_of(id, salt) < hash; };
  kept_->visit(shard_.lock(), t, 0, ~std::uint64_t{0},
                [&](const PreImage& image, const char*, const char*) {
                  const auto at =
                      std::lower_bound(ids.begin(), ids.end(), hash_of(image.id, salt), below);
                  if (at != ids.end() && *at == image.id) present[at - ids.begin()] = true;
                });
  kept_->check();
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
