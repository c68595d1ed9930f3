// Shard: cuts that keep what lies before them.
#include <algorithm>
#include <stdexcept>

#include "shard.h"

namespace shoal {

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
  Snapshot::LogSpan log;
  if (since != nullptr) log = Snapshot::LogSpan{deletions_.after(from), deletions_.after(epoch_)};
  auto snapshot = std::make_shared<Snapshot>(*this, from, epoch_, log, options);
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

void Shard::close(const Snapshot& snapshot) {
  std::shared_ptr<Snapshot> closed;  // dies without the lock: its thread may be writing
  if (lock_.broken()) return;
  const WriteGuard guard(lock_);
  if (snapshot_.get() != &snapshot) return;
  for (Table& table : tables_) table.keep_in(nullptr);
  closed = std::move(snapshot_);
  snapshot_.reset();
}

void Shard::restart_log(std::uint32_t floor) {
  if (snapshot_) snapshot_->take_log();
  deletions_.start(floor);
}

ChangeCursor Shard::resume(std::uint32_t epoch) {
  const WriteGuard guard(lock_);
  for (const Table& table : tables_) {
    if (table.arena().latest() > epoch) throw std::invalid_argument("epoch");
  }
  incarnation_ = new_incarnation();
  epoch_ = std::max(epoch_, epoch + 1);
  restart_log(epoch);
  deletions_.set_epoch(epoch_);
  return ChangeCursor{incarnation_, epoch, epoch, 0};
}

}  // namespace shoal
