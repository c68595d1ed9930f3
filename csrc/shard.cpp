#include "shard.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace shoal {
namespace {

constexpr std::int64_t kChunk = 4096;  // ids a thread takes at a time

// Of a row as it is read.
std::size_t value_bytes(const Table& t) { return t.spec().dim * real_bytes(t.spec().dtype); }

// Ranges of positions or bags of all groups, cut into pieces of at most kChunk.
struct Piece {
  int group;
  std::int64_t start, stop;
};

std::vector<Piece> pieces_of(const Groups& groups) {
  std::vector<Piece> pieces;
  for (int g = 0; g < groups.count; ++g) {
    for (std::int64_t at = groups.splits[g]; at < groups.splits[g + 1]; at += kChunk) {
      pieces.push_back(Piece{g, at, std::min(at + kChunk, groups.splits[g + 1])});
    }
  }
  return pieces;
}

// Groups of pieces worth one hand-over between threads.
template <class Body>
void run_pieces(const std::vector<Piece>& pieces, std::int64_t total, int threads,
                const Body& body) {
  if (total <= kChunk) threads = 1;
  const std::int64_t batch =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(pieces.size()) / (threads * 8));
  const std::int64_t items = (static_cast<std::int64_t>(pieces.size()) + batch - 1) / batch;
  Pool::instance().run(items, threads, [&](std::int64_t item, int lane) {
    const auto stop = std::min<std::int64_t>((item + 1) * batch, pieces.size());
    for (std::int64_t i = item * batch; i < stop; ++i) body(pieces[i], lane);
  });
}

}  // namespace

Shard::Shard(std::vector<TableSpec> specs) : incarnation_(new_incarnation()) {
  tables_.reserve(specs.size());
  for (TableSpec& spec : specs) tables_.emplace_back(std::move(spec));
  for (int t = 0; t < size(); ++t) tables_[t].log_deletions(&deletions_, t);
}

void Shard::check_versions() const {
  if (version_ == std::numeric_limits<std::uint32_t>::max()) {
    throw std::overflow_error("a shard has at most 2^32 - 1 versions");
  }
}

std::uint32_t Shard::close_version() {
  const WriteGuard guard(lock_);
  check_versions();
  next_version();
  return version_ - 1;
}

void Shard::probe(const Groups& groups, std::int32_t* rows, std::int64_t* absent,
                  int threads) const {
  run_pieces(pieces_of(groups), groups.n, threads, [&](const Piece& piece, int) {
    const Table& table = tables_[groups.tables[piece.group]];
    kernels().probe(table.index().view(), groups.ids + piece.start, piece.stop - piece.start,
                    rows + piece.start, absent == nullptr ? nullptr : absent + piece.start);
  });
}

void Shard::find(const Groups& groups, const std::vector<void*>& outputs, std::uint8_t* found,
                 int threads) {
  const ReadGuard guard(lock_);
  run_pieces(pieces_of(groups), groups.n, threads, [&](const Piece& piece, int) {
    const Table& table = tables_[groups.tables[piece.group]];
    const TableView view = table.view();
    const std::int64_t n = piece.stop - piece.start;
    const std::int64_t first = piece.start - groups.splits[piece.group];
    const std::size_t bytes = value_bytes(table);
    char* out = static_cast<char*>(outputs[piece.group]) + first * bytes;
    if (view.plain) {
      kernels().find_copy(table.index().view(), view.rows, groups.ids + piece.start, n, out,
                          found + piece.start, static_cast<std::size_t>(groups.n) * bytes >= kLargeBytes);
      return;
    }
    std::vector<std::int32_t> rows(static_cast<std::size_t>(n));
    std::vector<char> scratch(2 * bytes + 64);
    kernels().probe(table.index().view(), groups.ids + piece.start, n, rows.data(),
                    nullptr);
    for (std::int64_t i = 0; i < n; ++i) found[piece.start + i] = rows[i] != kNoRow;
    const PlanSlice whole = whole_row(view.rows.dim);
    void* target = out;
    const GatherJob job{view, rows.data(), groups.ids + piece.start, nullptr, 0, n, nullptr,
                        PoolSpec{kSum, 0, &whole, 1}, &target, true, last_step_};
    kernels().gather(job, 0, n, scratch.data());
  });
}

void Shard::gather_rows(const Groups& groups, const std::int32_t* rows, bool absent_is_zero,
                        const GatherArgs& args) const {
  std::size_t widest = 0;
  for (int g = 0; g < groups.count; ++g) {
    widest = std::max(widest, 2 * value_bytes(tables_[groups.tables[g]]) + 64);
  }
  std::vector<std::vector<char>> scratch(static_cast<std::size_t>(std::max(args.threads, 1)));
  const auto one = [&](int g, std::int64_t start, std::int64_t stop, int lane) {
    if (scratch[lane].empty()) scratch[lane].resize(widest);
    const TableView view = tables_[groups.tables[g]].view();
    GatherJob job{view, rows, groups.ids, nullptr, groups.splits[g], groups.splits[g + 1],
                  args.weights, PoolSpec{}, args.outputs, absent_is_zero, args.global_step};
    const PlanSlice whole = whole_row(view.rows.dim);
    if (args.plan == nullptr) {
      job.pool = PoolSpec{kSum, 0, &whole, 1};
      job.outputs = args.outputs + g;
    } else {
      job.offsets = args.offsets + g * args.bags;
      job.pool = args.plan->pools[g];
    }
    kernels().gather(job, start, stop, scratch[lane].data());
  };
  if (args.plan == nullptr) {
    run_pieces(pieces_of(groups), groups.n, args.threads, [&](const Piece& p, int lane) {
      one(p.group, p.start - groups.splits[p.group], p.stop - groups.splits[p.group], lane);
    });
    return;
  }
  const int threads = groups.n <= kChunk && args.bags * groups.count <= kChunk ? 1 : args.threads;
  if (!args.plan->adds && groups.count >= threads * 8) {
    // Many small groups: whole ones keep more rows under way at a time than slices of all.
    const std::int64_t parts = threads == 1 ? 1 : threads * 4;
    Pool::instance().run(parts, threads, [&](std::int64_t part, int lane) {
      const auto stop = static_cast<int>(groups.count * (part + 1) / parts);
      for (auto g = static_cast<int>(groups.count * part / parts); g < stop; ++g) {
        one(g, 0, args.bags, lane);
      }
    });
    return;
  }
  // Groups may add into one output, so a thread takes a range of bags over all groups.
  const std::int64_t ranges = std::min<std::int64_t>(
      args.bags, threads == 1 ? 1 : std::max<std::int64_t>(threads * 4, groups.n / (4 * kChunk)));
  Pool::instance().run(ranges, threads, [&](std::int64_t range, int lane) {
    const std::int64_t start = args.bags * range / ranges;
    const std::int64_t stop = args.bags * (range + 1) / ranges;
    for (int g = 0; g < groups.count; ++g) one(g, start, stop, lane);
  });
}

void Shard::find_pooled(const Groups& groups, GatherArgs args) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(groups.n));
  const ReadGuard guard(lock_);
  args.global_step = last_step_;
  probe(groups, rows.data(), nullptr, args.threads);
  gather_rows(groups, rows.data(), true, args);
}

void Shard::gather(const Ticket& ticket, const GatherArgs& args) {
  const ReadGuard guard(lock_);
  if (!ticket.live) throw TicketStateError();
  gather_rows(ticket.groups(), ticket.rows.data(), false, args);
}

std::unique_ptr<Ticket> Shard::open(const Groups& groups, const std::int64_t* counts,
                                    StepParams step) {
  auto ticket = std::make_unique<Ticket>();
  ticket->shard = this;
  ticket->rows.assign(static_cast<std::size_t>(groups.n), kNoRow);
  ticket->ids.reset(new std::int64_t[static_cast<std::size_t>(groups.n)]);  // written where absent
  ticket->splits.assign(groups.splits, groups.splits + groups.count + 1);
  ticket->tables.assign(groups.tables, groups.tables + groups.count);
  if (counts != nullptr) ticket->counts.assign(counts, counts + groups.n);
  ticket->event_time_s = step.event_time_s;
  ticket->live = true;
  const std::lock_guard guard(tickets_mutex_);
  tickets_.insert(ticket.get());
  return ticket;
}

Ticket::~Ticket() {
  if (shard != nullptr) shard->end(*this);
}

void Shard::end(Ticket& ticket) {
  if (tickets_mutex_.broken()) return;
  const std::lock_guard guard(tickets_mutex_);
  if (!ticket.live) return;
  ticket.live = false;
  tickets_.erase(&ticket);
}

std::vector<bool> Shard::pinned(int t) const {
  std::vector<bool> held(tables_[t].arena().high_water(), false);
  const std::lock_guard guard(tickets_mutex_);
  for (const Ticket* ticket : tickets_) {
    for (std::size_t g = 0; g < ticket->tables.size(); ++g) {
      if (ticket->tables[g] != t) continue;
      for (std::int64_t i = ticket->splits[g]; i < ticket->splits[g + 1]; ++i) {
        if (ticket->rows[i] >= 0) held[ticket->rows[i]] = true;
      }
    }
  }
  return held;
}

bool Shard::pinned_table(int t) const {
  const std::lock_guard guard(tickets_mutex_);
  return std::any_of(tickets_.begin(), tickets_.end(), [t](const Ticket* ticket) {
    return std::find(ticket->tables.begin(), ticket->tables.end(), t) != ticket->tables.end();
  });
}

std::unique_ptr<Ticket> Shard::find_or_init(const Groups& groups, const std::int64_t* counts,
                                            bool admit_all, StepParams step, int threads) {
  std::unique_ptr<Ticket> ticket = open(groups, counts, step);
  std::uint64_t members = 0;
  {
    const ReadGuard guard(lock_);
    members = membership_;
    probe(groups, ticket->rows.data(), ticket->ids.get(), threads);
  }
  const auto absent = std::find(ticket->rows.begin(), ticket->rows.end(), kNoRow);
  if (absent == ticket->rows.end()) return ticket;
  const WriteGuard guard(lock_);
  insert_missing(*ticket, members == membership_, admit_all, step, threads);
  return ticket;
}

void Shard::insert_missing(Ticket& ticket, bool probed, bool admit_all, StepParams step,
                           int threads) {
  step.version = version_;
  std::vector<std::vector<std::int64_t>> missing(tables_.size());
  for (std::size_t g = 0; g < ticket.tables.size(); ++g) {
    const int t = ticket.tables[g];
    for (std::int64_t i = ticket.splits[g]; i < ticket.splits[g + 1]; ++i) {
      if (ticket.rows[i] >= 0) continue;
      ticket.missing.push_back(i);
      // Another lookup may have inserted it between our probe and this lock.
      if (!probed) ticket.rows[i] = tables_[t].index().find(ticket.ids[i]);
      if (ticket.rows[i] < 0) missing[t].push_back(i);
    }
  }
  std::vector<std::pair<int, Table::Insert>> jobs;
  for (int t = 0; t < size(); ++t) {
    if (missing[t].empty()) continue;
    Table::Insert job{ticket.ids.get(), ticket.counts.empty() ? nullptr : ticket.counts.data(),
                      ticket.rows.data(), std::move(missing[t]), admit_all, step, threads};
    if (tables_[t].spec().capacity_rows > 0) job.pinned = pinned(t);
    jobs.emplace_back(t, std::move(job));
  }
  std::size_t prepared = 0;
  try {
    for (; prepared < jobs.size(); ++prepared) {
      tables_[jobs[prepared].first].prepare(jobs[prepared].second);
    }
  } catch (...) {  // rethrown once the tables prepared before are as they were
    for (std::size_t i = 0; i < prepared; ++i) tables_[jobs[i].first].cancel(jobs[i].second);
    throw;
  }
  ++membership_;
  for (auto& [t, job] : jobs) tables_[t].commit(job);
}

std::int64_t Shard::evict(std::int64_t now_s) {
  const WriteGuard guard(lock_);
  std::int64_t dropped = 0;
  ++membership_;
  for (int t = 0; t < size(); ++t) {
    if (tables_[t].spec().expires) dropped += tables_[t].evict_expired(now_s, pinned(t));
  }
  return dropped;
}

std::int64_t Shard::remove(const Groups& groups) {
  const WriteGuard guard(lock_);
  ++membership_;
  std::int64_t dropped = 0;
  for (int g = 0; g < groups.count; ++g) {
    const int t = groups.tables[g];
    const std::vector<bool> held = pinned_table(t) ? pinned(t) : std::vector<bool>();
    for (std::int64_t i = groups.splits[g]; i < groups.splits[g + 1]; ++i) {
      dropped += tables_[t].remove(groups.ids[i], held);
    }
  }
  return dropped;
}

void Shard::write(const Groups& groups, Write mode, const void* const* values,
                  std::int32_t* status, StepParams step, int threads) {
  // Rows are found before they are written, so the ticket both pins and remembers them.
  const std::unique_ptr<Ticket> ticket = find_or_init(groups, nullptr, true, step, threads);
  const WriteGuard guard(lock_);
  step.version = version_;
  std::vector<bool> fresh(static_cast<std::size_t>(groups.n), false);
  for (const std::int64_t i : ticket->missing) fresh[i] = true;
  for (int g = 0; g < groups.count; ++g) {
    Table& table = tables_[groups.tables[g]];
    const TableView view = table.view();
    const std::int64_t start = groups.splits[g];
    for (std::int64_t i = start; i < groups.splits[g + 1]; ++i) {
      const std::int32_t row = ticket->rows[i];
      if (mode == Write::reinitialize) {
        status[i] = fresh[i] ? 0 : 1;
        table.keep(row);
        LastSeen& seen = row_seen(view.rows, static_cast<std::uint32_t>(row));
        const LastSeen before = seen;
        const std::int64_t id = row_id(view.rows, static_cast<std::uint32_t>(row));
        kernels().init_rows(view, &id, &row, 1, step, false);
        seen = LastSeen{std::max(before.seconds, step.event_time_s), before.count};
        continue;
      }
      const std::size_t bytes = value_bytes(table);
      const char* value = static_cast<const char*>(values[g]) + (i - start) * bytes;
      table.write_row(row, value, mode == Write::add, step);
    }
  }
}

}  // namespace shoal
