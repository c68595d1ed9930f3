// Shard: rows leaving and entering whole.
#include <algorithm>
#include <cstring>

#include "prefetch.h"
#include "shard.h"

namespace shoal {

static Exported copy_rows(const Table& table, const std::vector<std::int32_t>& rows) {
  const RowView view = table.view().rows;
  const std::size_t weight = row_bytes(view.dtype, view.dim);
  const std::size_t state = view.state_width * (view.dtype == DType::f64 ? 8 : 4);
  Exported out;
  out.n = static_cast<std::int64_t>(rows.size());
  out.ids.resize(rows.size());
  out.versions.resize(rows.size());
  out.seen.resize(rows.size());
  out.counts.resize(rows.size());
  out.weights.resize(rows.size() * weight);
  out.state.resize(rows.size() * state);
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) {
      const auto next = static_cast<std::uint32_t>(rows[i + kAhead]);
      prefetch_row(weight_row(view, next), weight);
      prefetch_row(state_row(view, next), state);
      __builtin_prefetch(&row_id(view, next));
      __builtin_prefetch(&row_seen(view, next));
    }
    const auto row = static_cast<std::uint32_t>(rows[i]);
    out.ids[i] = row_id(view, row);
    out.versions[i] = row_version(view, row);
    out.seen[i] = row_seen(view, row).seconds;
    out.counts[i] = row_seen(view, row).count;
    std::memcpy(out.weights.data() + i * weight, weight_row(view, row), weight);
    if (state > 0) std::memcpy(out.state.data() + i * state, state_row(view, row), state);
  }
  return out;
}

Exported Shard::export_rows(int t, const std::int64_t* only) {
  const WriteGuard guard(lock_);
  const Table& table = tables_[t];
  std::vector<std::int32_t> rows;
  if (only == nullptr) {
    rows = table.rows_by_hash();
  } else if (const std::int32_t row = table.index().find(*only); row != kNoRow) {
    rows.push_back(row);
  }
  return copy_rows(table, rows);
}

void Shard::load_rows(int t, const Table::Columns& rows, int threads) {
  const WriteGuard guard(lock_);
  tables_[t].load(rows, threads);
  if (rows.n == 0) return;
  ++membership_;
  // Rows bring versions of an earlier life, which no cursor of this one covers.
  incarnation_ = new_incarnation();
  // Stamps to come must not lie before those that came in.
  const auto latest = *std::max_element(rows.versions, rows.versions + rows.n);
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
