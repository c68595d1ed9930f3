// Table: rows that come in whole, many at a time.
#include <algorithm>
#include <cstring>

#include "buffers.h"
#include "threads.h"
#include "prefetch.h"
#include "stream.h"
#include "table.h"

namespace shoal {
namespace {

constexpr std::int64_t kPiece = 4096;            // rows a thread takes at a time
constexpr std::size_t kEntered = std::size_t{1} << 19;  // ids put in order and indexed at a time
constexpr std::size_t kStreamed = 64 << 10;      // bytes from which stores go past the caches
constexpr int kIndexAlone = 4;                   // threads up to which one of them has the index

template <class Body>
void in_pieces(std::int64_t n, int threads, const Body& body) {
  Pool::instance().run((n + kPiece - 1) / kPiece, threads, [&](std::int64_t k, int) {
    body(k * kPiece, std::min((k + 1) * kPiece, n));
  });
}

// Many rows do not stay in a cache until they are read, so they need not go through one.
void copy_rows_in(char* to, std::size_t stride, const char* from, std::size_t width,
                  std::int64_t n) {
  const std::size_t bytes = width * static_cast<std::size_t>(n);
  if (stride == width && bytes >= kStreamed && streamable(to, stride)) {
    stream_bytes(to, from, bytes);
  } else if (stride == width) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  } else {
    for (std::int64_t i = 0; i < n && width > 0; ++i) {
      std::memcpy(to + i * stride, from + i * width, width);
    }
  }
}

}  // namespace

bool ordered_by_hash(const std::int64_t* ids, std::int64_t n, std::uint64_t salt) {
  std::uint64_t before = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t hash = hash_of(ids[i], salt);
    if (i > 0 && hash <= before) return false;
    before = hash;
  }
  return true;
}

void Table::load(const RowColumns& from, std::int64_t count, int threads) {
  if (count == 0) return;
  const auto n = static_cast<std::size_t>(count);
  const Scratch<std::int32_t> rows(n);
  // Files come in order of hash: what lies above all that was loaded is not there yet.
  const bool ordered = ordered_by_hash(from.ids, count, spec_.salt);
  const bool above =
      ordered && (index_.size() == 0 || (loaded_.only && loaded_.last < hash(from.ids[0])));
  if (above) {
    std::fill_n(rows.data(), n, kNoRow);
  } else {
    in_pieces(count, threads, [&](std::int64_t start, std::int64_t stop) {
      kernels().probe(index_.view(), from.ids + start, stop - start, rows.data() + start,
                      nullptr);
    });
  }
  std::vector<std::uint32_t> fresh;
  fresh.reserve(static_cast<std::size_t>(std::count(rows.data(), rows.data() + n, kNoRow)));
  for (std::size_t i = 0; i < n; ++i) {
    if (rows[i] == kNoRow) fresh.push_back(static_cast<std::uint32_t>(i));
  }
  make_rows(from.ids, rows.data(), count, static_cast<std::int64_t>(fresh.size()));
  if (open_ != nullptr) open_->make_bits(number_);
  // In order of input: what comes together lies together.
  for (const std::uint32_t i : fresh) rows[i] = arena_.take();
  loaded_.only = above;
  if (above) loaded_.last = hash(from.ids[n - 1]);
  enter(from, count, fresh, rows.data(), threads);
  if (open_ != nullptr) {
    for (std::size_t i = 0; i < n; ++i) {
      open_->overwrite(number_, static_cast<std::uint32_t>(rows[i]));
    }
  }
}

// All memory for the rows that are not there.
void Table::make_rows(const std::int64_t* ids, const std::int32_t* rows, std::int64_t n,
                      std::int64_t fresh) {
  const auto live = static_cast<std::int64_t>(index_.size());
  if (spec_.capacity_rows > 0 && live + fresh > spec_.capacity_rows) {
    throw TableFullError(spec_, live, fresh);
  }
  if (fresh == 0) return;
  arena_.reserve(static_cast<std::size_t>(fresh));
  // Stripes for many more rows at once; a little at a time they grow by quarters.
  if (fresh > live) index_.reserve(static_cast<std::size_t>(live + fresh));
  std::vector<std::uint32_t> counts;
  for (std::int64_t i = 0; i < n; ++i) {
    if (rows[i] == kNoRow) index_.count(ids[i], counts);
  }
  index_.make_room(counts);
}

void Table::enter(const RowColumns& from, std::int64_t count,
                  const std::vector<std::uint32_t>& fresh, const std::int32_t* rows, int threads) {
  // One thread fills the index while the others copy; many share it out by stripes.
  const int bits = threads > kIndexAlone ? index_.partition_bits() : 0;
  const std::size_t parts = std::size_t{1} << bits;
  const Scratch<std::int64_t> ids(std::min(fresh.size(), kEntered));
  const Scratch<std::int32_t> numbers(ids.size());
  const auto n = static_cast<std::size_t>(count);
  std::size_t at = 0;
  for (std::size_t start = 0; start < n; start += kEntered) {
    const std::size_t stop = std::min(n, start + kEntered);
    const std::size_t end = std::lower_bound(fresh.begin() + at, fresh.end(), stop) - fresh.begin();
    const StripeParts starts = by_stripe(
        bits,
        [&](const auto& visit) {
          for (std::size_t k = at; k < end; ++k) visit(from.ids[fresh[k]], fresh[k]);
        },
        [&](std::size_t i, std::size_t to) {
          ids[to] = from.ids[i];
          numbers[to] = rows[i];
        });
    at = end;
    const std::size_t pieces = (stop - start + kPiece - 1) / kPiece;
    Pool::instance().run(static_cast<std::int64_t>(parts + pieces), threads, [&](std::int64_t k, int) {
      const auto item = static_cast<std::size_t>(k);
      if (item < parts) {
        const std::size_t first = starts[item];
        index_rows(&ids[first], &numbers[first], starts[item + 1] - first);
        return;
      }
      const std::size_t first = start + (item - parts) * kPiece;
      copy_in(from, rows, static_cast<std::int64_t>(first),
              static_cast<std::int64_t>(std::min(first + kPiece, stop)));
    });
  }
  index_.rebalance();
}

void Table::copy_in(const RowColumns& from, const std::int32_t* rows, std::int64_t start,
                    std::int64_t stop) const {
  if (open_ != nullptr) {
    open_->keep(number_, arena_.view(), rows + start, nullptr,
                  static_cast<std::uint32_t>(stop - start));
  }
  for (std::int64_t i = start; i < stop;) {
    const auto row = static_cast<std::size_t>(rows[i]);
    const std::int64_t most =
        std::min(stop - i, static_cast<std::int64_t>(arena_.block_stop(row) - row));
    std::int64_t n = 1;
    while (n < most && rows[i + n] == rows[i] + n) ++n;
    copy_run(from, i, static_cast<std::uint32_t>(row), n);
    i += n;
  }
  end_stream();
}

// Rows of consecutive numbers in one block.
void Table::copy_run(const RowColumns& from, std::int64_t at, std::uint32_t row,
                     std::int64_t n) const {
  const RowView view = arena_.view();
  const BlockView& block = block_view(view, row);
  const std::size_t weights = weight_bytes(view), state = state_bytes(view);
  copy_rows_in(block.weights + row * view.weight_stride, view.weight_stride,
               from.weights + at * weights, weights, n);
  copy_rows_in(block.state + row * view.state_stride, view.state_stride, from.state + at * state,
               state, n);
  std::copy_n(from.ids + at, n, reinterpret_cast<std::int64_t*>(block.ids) + row);
  auto* seen = reinterpret_cast<LastSeen*>(block.seen) + row;
  auto* versions = reinterpret_cast<std::uint32_t*>(block.versions) + row;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto version = static_cast<std::uint32_t>(from.versions[at + i]);
    versions[i] = std::max<std::uint32_t>(version, 1);
    raise_maximum_together(row_maximum(view, row + static_cast<std::uint32_t>(i)), versions[i]);
    seen[i] = LastSeen{static_cast<std::uint32_t>(from.seen_s[at + i]),
                       static_cast<std::uint32_t>(from.counts[at + i])};
  }
}

}  // namespace shoal
