// Shard: cuts that keep what lies before them.
#include <algorithm>
#include <stdexcept>

#include "shard.h"

namespace shoal {
namespace {

constexpr std::int64_t kRead = 1 << 16;  // deletions read at a time

}  // namespace

std::shared_ptr<Snapshot> Shard::snapshot(const ChangeCursor* since, Snapshot::Options options) {
  const WriteGuard guard(lock_);
  if (snapshot_) throw SnapshotRefused(SnapshotRefused::Why::open);
  const bool kept = deletions_.open() && !deletions_.broken();
  std::uint32_t from = 0;
  if (since != nullptr) {
    if (since->incarnation != incarnation_) {
      throw SnapshotRefused(SnapshotRefused::Why::incarnation);
    }
    if (!kept || since->from < deletions_.floor() || since->from >= epoch_) {
      throw SnapshotRefused(SnapshotRefused::Why::forgotten);
    }
    from = since->from;
  }
  check_epochs();
  std::vector<std::vector<std::int64_t>> deleted(tables_.size());
  if (since != nullptr) collect_deleted(from, deleted);
  auto snapshot = std::make_shared<Snapshot>(*this, from, epoch_, std::move(deleted), options);
  if (!kept) {
    // Deletions of before are not known, so that cursors of before are worth nothing.
    incarnation_ = new_incarnation();
    deletions_.start(epoch_);
  }
  deletions_.set_epoch(++epoch_);
  snapshot_ = snapshot;
  for (Table& table : tables_) table.keep_in(&snapshot_->images());
  return snapshot;
}

void Shard::collect_deleted(std::uint32_t from,
                            std::vector<std::vector<std::int64_t>>& deleted) const {
  const std::int64_t stop = deletions_.after(epoch_);
  for (std::int64_t at = deletions_.after(from); at < stop; at += kRead) {
    std::vector<std::vector<std::int64_t>> ids(tables_.size());
    for (const Deletion& deletion : deletions_.read(at, std::min(kRead, stop - at))) {
      ids[deletion.table].push_back(deletion.id);
    }
    for (int t = 0; t < size(); ++t) {
      std::vector<std::int32_t> rows(ids[t].size());
      kernels().probe(tables_[t].index().view(), ids[t].data(),
                      static_cast<std::int64_t>(rows.size()), rows.data());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] == kNoRow) deleted[t].push_back(ids[t][i]);
      }
    }
  }
}

void Shard::close(const Snapshot& snapshot) {
  std::shared_ptr<Snapshot> closed;  // dies without the lock: its thread may be writing
  const WriteGuard guard(lock_);
  if (snapshot_.get() != &snapshot) return;
  for (Table& table : tables_) table.keep_in(nullptr);
  closed = std::move(snapshot_);
  snapshot_.reset();
}

ChangeCursor Shard::resume(std::uint32_t epoch) {
  const WriteGuard guard(lock_);
  for (const Table& table : tables_) {
    if (table.arena().latest() > epoch) throw std::invalid_argument("epoch");
  }
  incarnation_ = new_incarnation();
  epoch_ = std::max(epoch_, epoch + 1);
  deletions_.start(epoch);
  deletions_.set_epoch(epoch_);
  return ChangeCursor{incarnation_, epoch, epoch, 0};
}

}  // namespace shoal
