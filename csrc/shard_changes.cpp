// Shard: what changed in a span of closed epochs, page by page.
//
// Why a page needs no snapshot: `to` is closed, so whatever happens to a row after the scan began is
// stamped or logged above `to`, and the consumer's next span finds it. A row lies at one number while
// it lives, so pages in order of number miss none.
#include <algorithm>
#include <random>
#include <stdexcept>

#include "shard.h"

namespace shoal {
namespace {

// What one page looks at, at most: a writer waits that long.
constexpr std::int64_t kDeletions = std::int64_t{1} << 16;
constexpr std::size_t kVersions = std::size_t{1} << 22;
constexpr std::int64_t kRead = 4096;  // records read at a time

// Positions below are numbers of deletions, those from here on are rows: kRows + (table << 32 | row).
constexpr std::int64_t kRows = std::int64_t{1} << 62;

}  // namespace

std::int64_t new_incarnation() {
  std::random_device source;
  std::uint64_t drawn = 0;
  while (drawn == 0) {
    drawn = ((std::uint64_t{source()} << 32) | source()) >> 1;
  }
  return static_cast<std::int64_t>(drawn);
}

std::int64_t Shard::incarnation() {
  const ReadGuard guard(lock_);
  return incarnation_;
}

void Shard::release(std::uint32_t epoch) {
  const WriteGuard guard(lock_);
  const std::uint32_t closed = std::min(epoch, epoch_ - 1);
  if (snapshot_ && closed > snapshot_->since()) snapshot_->take_log();
  deletions_.release(closed);
}

void Shard::stop_changes() {
  const WriteGuard guard(lock_);
  if (snapshot_) snapshot_->take_log();
  deletions_.stop();
}

ChangePage Shard::changes(const ChangeCursor& cursor, std::int64_t limit) {
  for (;;) {
    {
      const ReadGuard guard(lock_);
      if (deletions_.open() && !deletions_.broken()) return changes_locked(cursor, limit);
    }
    const WriteGuard guard(lock_);
    if (deletions_.open() && !deletions_.broken()) continue;
    // Deletions of before are not known, so that cursors of before are worth nothing.
    incarnation_ = new_incarnation();
    restart_log(epoch_ - 1);
  }
}

ChangePage Shard::changes_locked(ChangeCursor cursor, std::int64_t limit) const {
  const std::uint32_t closed = epoch_ - 1;
  const bool known = cursor.incarnation == incarnation_ &&
                     (cursor.from == 0 || cursor.from >= deletions_.floor());
  if (!known) cursor = ChangeCursor{incarnation_, 0, closed, 0};
  if (cursor.from > cursor.to || cursor.to > closed || cursor.position < 0) {
    throw std::invalid_argument("cursor");
  }
  if (cursor.from == cursor.to && cursor.position == 0) cursor.to = closed;
  ChangePage page;
  page.rows.resize(tables_.size());
  page.deleted.resize(tables_.size());
  page.next = cursor;
  page.restarted = cursor.from == 0 && cursor.position == 0;
  if (cursor.position < kRows) {
    // Who starts from nothing has nothing to delete.
    if (cursor.from > 0) limit -= read_deletions(page, limit);
    if (cursor.from == 0) page.next.position = kRows;
  }
  if (page.next.position >= kRows) read_rows(page, limit);
  return page;
}

std::int64_t Shard::read_deletions(ChangePage& page, std::int64_t limit) const {
  const std::int64_t stop = deletions_.after(page.next.to);
  std::int64_t at = std::max(page.next.position, deletions_.after(page.next.from));
  const std::int64_t last = std::min(stop, at + kDeletions);
  std::int64_t taken = 0;
  while (at < last && taken < limit) {
    for (const Deletion& deletion : deletions_.read(at, std::min(kRead, last - at))) {
      if (taken == limit) break;
      ++at;
      if (tables_[deletion.table].index().find(deletion.id) != kNoRow) continue;
      page.deleted[deletion.table].push_back(deletion.id);
      ++taken;
    }
  }
  page.next.position = at >= stop ? kRows : at;
  return taken;
}

void Shard::read_rows(ChangePage& page, std::int64_t limit) const {
  ChangeCursor& next = page.next;
  std::size_t versions = kVersions;
  auto t = static_cast<std::size_t>((next.position - kRows) >> 32);
  auto row = static_cast<std::size_t>((next.position - kRows) & 0xffffffff);
  for (; t < tables_.size(); ++t, row = 0) {
    const Arena& arena = tables_[t].arena();
    std::vector<std::int32_t> found;
    row = arena.changed(row, next.from, next.to, static_cast<std::size_t>(limit), versions, found);
    limit -= static_cast<std::int64_t>(found.size());
    page.rows[t] = copy_rows(tables_[t], found);
    if (row < arena.high_water()) {
      next.position = kRows + static_cast<std::int64_t>((t << 32) | row);
      return;
    }
  }
  page.done = true;
  next = ChangeCursor{next.incarnation, next.to, next.to, 0};
}

}  // namespace shoal
