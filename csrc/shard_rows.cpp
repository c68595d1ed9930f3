// Shard: rows leaving and entering whole.
#include <algorithm>

#include "shard.h"

namespace shoal {

Exported Shard::export_rows(int t, const std::int64_t* only) {
  const WriteGuard guard(lock_);
  const Table& table = tables_[t];
  std::vector<std::uint32_t> rows;
  if (only == nullptr) {
    rows = table.rows_by_hash();
  } else if (const std::int32_t row = table.index().find(*only); row != kNoRow) {
    rows.push_back(static_cast<std::uint32_t>(row));
  }
  const RowView view = table.view().rows;
  const std::size_t n = rows.size();
  using Numbers = std::vector<std::int64_t>;
  Exported out{static_cast<std::int64_t>(n), Numbers(n), Numbers(n), Numbers(n), Numbers(n),
               std::vector<char>(n * weight_bytes(view)), std::vector<char>(n * state_bytes(view))};
  copy_rows<false>(view, rows.data(), 0, n, out.columns());
  return out;
}

void Shard::load_rows(int t, std::int64_t n, const RowColumns& rows, int threads) {
  const WriteGuard guard(lock_);
  tables_[t].load(rows, n, threads);
  if (n == 0) return;
  ++membership_;
  // Rows bring versions of an earlier life, which no cursor of this one covers.
  incarnation_ = new_incarnation();
  // Stamps to come must not lie before those that came in.
  const auto latest = *std::max_element(rows.versions, rows.versions + n);
  version_ = std::max(version_, static_cast<std::uint32_t>(latest));
  deletions_.set_version(version_);
  if (deletions_.open()) restart_log(version_ - 1);
}

void Shard::expect(int t, std::int64_t rows) {
  const WriteGuard guard(lock_);
  tables_[t].reserve(rows);
}

void Shard::clear(int t) {
  const WriteGuard guard(lock_);
  if (pinned_table(t)) throw TicketStateError();
  ++membership_;
  tables_[t].clear();
}

}  // namespace shoal
