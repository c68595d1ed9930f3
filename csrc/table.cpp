#include "table.h"

#include <algorithm>
#include <tuple>

#include "buffers.h"
#include "ops_ids.h"
#include "threads.h"
#include "rows_impl.h"

namespace shoal {
Table::Table(TableSpec spec)
    : spec_(std::move(spec)),
      index_(spec_.salt),
      arena_(spec_.dim, spec_.state_width, spec_.dtype),
      admission_(spec_.admission, spec_.salt) {
  plain_ = spec_.dtype == DType::f32 || spec_.dtype == DType::f64;
  for (const Segment& s : spec_.segments) {
    plain_ = plain_ && s.retriever.kind == RetrieverKind::identity;
  }
  if (spec_.expected_rows > 0) reserve(spec_.expected_rows);
}

void Table::reserve(std::int64_t rows) {
  const auto live = static_cast<std::int64_t>(index_.size());
  if (spec_.capacity_rows > 0) rows = std::min(rows, spec_.capacity_rows);
  if (rows <= live) return;
  arena_.reserve(static_cast<std::size_t>(rows - live));
  index_.reserve(static_cast<std::size_t>(rows));
}

TableView Table::view() const {
  return TableView{arena_.view(), spec_.segments.data(), static_cast<int>(spec_.segments.size()),
                   spec_.state.data(), spec_.key, spec_.first_column, plain_};
}

void Table::find_unique(Insert& job) {
  const std::size_t n = job.positions.size();
  const Scratch<std::int64_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = job.ids[job.positions[i]];
  job.number.resize(n);
  const Scratch<std::uint32_t> slots(span_slots(static_cast<std::int64_t>(n)));
  const Scratch<Distinct> found(n + 1);
  const auto unique = static_cast<std::size_t>(dedup_span(
      ids.data(), static_cast<std::int64_t>(n), slots.data(), found.data(), job.number.data()));
  for (std::size_t u = 1; u <= unique; ++u) {
    job.unique.push_back(found[u].id);
    job.unique_counts.push_back(job.counts == nullptr ? found[u].count : 0);
  }
  for (std::size_t i = 0; job.counts != nullptr && i < n; ++i) {
    job.unique_counts[job.number[i]] += job.counts[job.positions[i]];
  }
}

std::int64_t Table::over_budget(std::int64_t wanted) const {
  if (spec_.capacity_rows <= 0) return 0;
  const auto live = static_cast<std::int64_t>(index_.size());
  return std::max<std::int64_t>(0, live + wanted - spec_.capacity_rows);
}

void Table::check_room(const Insert& job) const {
  const std::int64_t over = over_budget(job.wanted);
  if (over == 0) return;
  const auto live = static_cast<std::int64_t>(index_.size());
  const std::int64_t held = std::count(job.pinned.begin(), job.pinned.end(), true);
  if (spec_.on_full == OnFull::raise || over > live - held) {
    throw TableFullError(spec_, spec_.on_full == OnFull::raise ? live : held, job.wanted);
  }
}

void Table::prepare(Insert& job) {
  find_unique(job);
  const auto total = static_cast<std::int64_t>(job.unique.size());
  job.counted = admission_.enabled() && !job.admit_all;
  job.unique_rows.assign(job.unique.size(), 0);
  job.wanted = total;
  if (job.counted) {
    admission_.add(job.unique.data(), job.unique_counts.data(), total);
    for (std::int64_t u = 0; u < total; ++u) {
      if (admission_.admitted(job.unique[u])) continue;
      job.unique_rows[u] = kNoRow;
      --job.wanted;
    }
  }
  try {
    check_room(job);
    arena_.reserve(static_cast<std::size_t>(job.wanted - over_budget(job.wanted)));
    job.placed_ids.reserve(job.unique.size());
    for (std::size_t u = 0; u < job.unique.size(); ++u) {
      if (job.unique_rows[u] != kNoRow) job.placed_ids.push_back(job.unique[u]);
    }
    index_.make_room(job.placed_ids.data(), job.placed_ids.size());
    job.placed_rows.resize(job.placed_ids.size());
  } catch (...) {  // rethrown once the occurrences are taken back
    cancel(job);
    throw;
  }
}

void Table::cancel(Insert& job) {
  if (!job.counted) return;
  admission_.undo(job.unique.data(), job.unique_counts.data(),
                  static_cast<std::int64_t>(job.unique.size()));
}

void Table::commit(Insert& job) {
  const std::int64_t over = over_budget(job.wanted);
  if (over > 0) {
    // A scan costs the table, not the rows it finds, so large tables evict a little ahead.
    counters_.evicted += evict_lowest(over + spec_.capacity_rows / 64, job.pinned);
  }
  if (admission_.enabled()) {
    for (std::size_t u = 0; u < job.unique.size(); ++u) {
      if (job.unique_rows[u] != kNoRow) admission_.forget(job.unique[u]);
    }
  }
  counters_.inserted += job.wanted;
  counters_.refused += static_cast<std::int64_t>(job.unique.size()) - job.wanted;
  if (job.wanted > 0) {
    loaded_.only = false;
    place(job);
  }
  for (std::size_t i = 0; i < job.positions.size(); ++i) {
    job.rows[job.positions[i]] = job.unique_rows[job.number[i]];
  }
}

void Table::place(Insert& job) {
  constexpr std::size_t kParallel = 2048;
  const TableView table = view();
  const std::vector<std::int64_t>& unique = job.unique;
  std::vector<std::int32_t>& rows = job.unique_rows;
  const int bits = unique.size() < kParallel ? 0 : index_.partition_bits();
  std::vector<std::int64_t>& ids = job.placed_ids;
  std::vector<std::int32_t>& numbers = job.placed_rows;
  const StripeParts starts = by_stripe(
      bits,
      [&](const auto& visit) {
        for (std::size_t u = 0; u < rows.size(); ++u) {
          if (rows[u] != kNoRow) visit(unique[u], u);
        }
      },
      [&](std::size_t u, std::size_t to) {
        ids[to] = unique[u];
        rows[u] = static_cast<std::int32_t>(to);
      });
  const std::size_t parts = std::size_t{1} << bits;
  // Rows are numbered in this order, so that a part writes neighbours.
  for (std::size_t i = 0; i < starts[parts]; ++i) numbers[i] = arena_.take();
  for (std::int32_t& row : rows) {
    if (row != kNoRow) row = numbers[static_cast<std::size_t>(row)];
  }
  const bool large = starts[parts] * table.rows.weight_stride >= kLargeBytes;
  Pool::instance().run(static_cast<std::int64_t>(parts), job.threads, [&](std::int64_t p, int) {
    const std::size_t start = starts[p], n = starts[p + 1] - start;
    index_rows(ids.data() + start, numbers.data() + start, n);
    kernels().init_rows(table, ids.data() + start, numbers.data() + start,
                        static_cast<std::int64_t>(n), job.step, large);
  });
  index_.rebalance();
}

void Table::index_rows(const std::int64_t* ids, const std::int32_t* rows, std::size_t n) {
  constexpr std::size_t kAhead = 32;
  const IndexView lines = index_.view();
  for (std::size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const StripeView* stripe = nullptr;
      __builtin_prefetch(home_line(lines, hash(ids[i + kAhead]), stripe), 1, 2);
    }
    index_.insert(ids[i], rows[i]);
  }
}

std::int64_t Table::evict_lowest(std::int64_t n, const std::vector<bool>& pinned) {
  struct Victim {
    std::uint32_t score, second;
    std::uint64_t hash;
    std::int64_t id;
    bool operator<(const Victim& o) const {
      return std::tie(score, second, hash) < std::tie(o.score, o.second, o.hash);
    }
  };
  const RowView rows = arena_.view();
  std::vector<Victim> victims;
  victims.reserve(index_.size());
  each_row([&](std::uint32_t row) {
    if (row < pinned.size() && pinned[row]) return;
    const LastSeen seen = row_seen(rows, row);
    const std::int64_t id = row_id(rows, row);
    const bool lru = spec_.on_full == OnFull::lru;
    victims.push_back(Victim{lru ? seen.seconds : seen.count, lru ? seen.count : seen.seconds,
                             hash(id), id});
  });
  const auto many = std::min<std::int64_t>(n, static_cast<std::int64_t>(victims.size()));
  if (many < static_cast<std::int64_t>(victims.size())) {
    std::nth_element(victims.begin(), victims.begin() + many, victims.end());
  }
  for (std::int64_t i = 0; i < many; ++i) erase(victims[i].id);
  return many;
}

Keeper Table::keeper() const {
  if (open_ == nullptr) return Keeper{};
  return Keeper{[](const void* context, const RowView& view, const std::int32_t* rows,
                   const std::uint32_t* versions, std::uint32_t n) {
                  const auto& table = *static_cast<const Table*>(context);
                  table.open_->keep(table.number_, view, rows, versions, n);
                },
                this};
}

void Table::write_row(std::int32_t row, const char* values, bool add, StepParams step) {
  keep(row);
  const RowView rows = arena_.view();
  const auto at = static_cast<std::uint32_t>(row);
  char* stored = weight_row(rows, at);
  const int d = spec_.dim;
  if (spec_.dtype == DType::f64) {
    auto* to = reinterpret_cast<double*>(stored);
    const auto* from = reinterpret_cast<const double*>(values);
    for (int i = 0; i < d; ++i) to[i] = add ? to[i] + from[i] : from[i];
  } else {
    std::vector<float> sum(static_cast<std::size_t>(d), 0.0F);
    if (add) load_weights(spec_.dtype, stored, sum.data(), d);
    const auto* from = reinterpret_cast<const float*>(values);
    for (int i = 0; i < d; ++i) sum[i] = add ? sum[i] + from[i] : from[i];
    store_nearest(spec_.dtype, sum.data(), stored, d);
  }
  row_version(rows, at) = step.version;
  raise_maximum(row_maximum(rows, at), step.version);
  LastSeen& seen = row_seen(rows, at);
  seen.seconds = std::max(seen.seconds, step.event_time_s);
}

bool Table::erase(std::int64_t id) {
  const std::int32_t row = index_.erase(id);
  if (row == kNoRow) return false;
  keep(row);
  if (log_ != nullptr) log_->append(number_, id);
  arena_.give_back(row);
  return true;
}

bool Table::remove(std::int64_t id, const std::vector<bool>& pinned) {
  const std::int32_t row = pinned.empty() ? kNoRow : index_.find(id);
  return (row == kNoRow || !pinned[row]) && erase(id);
}

std::int64_t Table::evict_expired(std::int64_t now_s, const std::vector<bool>& pinned) {
  if (!spec_.expires) return 0;
  const RowView rows = arena_.view();
  std::int64_t dropped = 0;
  each_row([&](std::uint32_t row) {
    if (row < pinned.size() && pinned[row]) return;
    const std::int64_t id = row_id(rows, row);
    const std::int64_t ttl = spec_.ttl_s.of(id);
    if (ttl < 0 || now_s - static_cast<std::int64_t>(row_seen(rows, row).seconds) < ttl) return;
    erase(id);
    ++dropped;
  });
  counters_.evicted += dropped;
  return dropped;
}

void Table::clear() {
  if (log_ != nullptr) {
    each_row([&](std::uint32_t row) {
      keep(static_cast<std::int32_t>(row));
      log_->append(number_, row_id(arena_.view(), row));
    });
  }
  index_.clear();
  arena_.clear();
  loaded_ = Loaded{};
  admission_.clear();
}

std::vector<std::uint32_t> Table::rows_by_hash() const {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> order;
  order.reserve(index_.size());
  const RowView rows = arena_.view();
  each_row([&](std::uint32_t row) { order.emplace_back(hash(row_id(rows, row)), row); });
  std::sort(order.begin(), order.end());
  std::vector<std::uint32_t> result(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) result[i] = order[i].second;
  return result;
}

}  // namespace shoal
