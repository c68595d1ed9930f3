#include "ops_rows.h"

#include <cstring>
#include <limits>

#include "hash.h"
#include "ops_copy.h"
#include "ops_buckets.h"
#include "prefetch.h"

namespace shoal {
namespace {

constexpr std::int64_t kWindow = 64;  // reads under way at once, at most
constexpr std::int64_t kAheadBytes = 16 << 10;
constexpr std::int64_t kAsked = 16;  // ids looked for at once

// Rows to ask for before their turn.
std::int64_t rows_ahead(std::size_t row_bytes) {
  return std::clamp<std::int64_t>(kAheadBytes / static_cast<std::int64_t>(row_bytes + 1), 8,
                                  kWindow);
}

struct Entry {
  std::int64_t id;
  std::int64_t row;  // -1: free
};

__extension__ typedef unsigned __int128 Product;

// Open addressing, in order of the hash: each bucket of the hash owns a range of slots, which one
// thread fills, in cache. What does not fit its range is added in turn afterwards.
class MatchTable {
 public:
  MatchTable(const std::int64_t* ids, std::int64_t rows, int threads);

  const Entry* home(std::int64_t id) const { return entries_->data() + slot(mixed(id)); }
  std::int64_t find(const Entry* entry, std::int64_t id) const {
    while (entry->id != id && entry->row >= 0) {
      if (++entry == entries_->data() + slots_) entry = entries_->data();
    }
    return entry->row;
  }

 private:
  static std::uint64_t mixed(std::int64_t id) { return mix64(static_cast<std::uint64_t>(id)); }
  std::int64_t slot(std::uint64_t hash) const {
    return static_cast<std::int64_t>((Product{hash} * static_cast<std::uint64_t>(slots_)) >> 64);
  }
  // The first slot of a bucket.
  std::int64_t edge(std::int64_t bucket) const {
    if (bucket >> bits_ > 0) return slots_;
    return slot(static_cast<std::uint64_t>(bucket) << (63 - bits_) << 1);
  }
  void fill(std::int64_t bucket, const Entry* from, std::int64_t count, std::vector<Entry>& rest);

  int bits_ = 0;
  std::int64_t slots_;
  std::unique_ptr<Scratch<Entry>> entries_;
};

MatchTable::MatchTable(const std::int64_t* ids, std::int64_t rows, int threads)
    : slots_(2 * rows + 1), entries_(std::make_unique<Scratch<Entry>>(slots_)) {
  while (bits_ < 10 && rows >> (12 + bits_) > 0) ++bits_;
  const int shift = 63 - bits_;
  const auto route = [&](std::int64_t begin, std::int64_t end, auto put) -> std::int64_t {
    for (std::int64_t i = begin; i < end; ++i) {
      put(static_cast<std::int64_t>(mixed(ids[i]) >> shift >> 1), Entry{ids[i], i});
    }
    return -1;
  };
  const std::int64_t buckets = std::int64_t{1} << bits_;
  const Buckets<Entry> parts = in_buckets<Entry>(rows, buckets, threads, route);
  std::vector<std::vector<Entry>> rest(static_cast<std::size_t>(buckets));
  Pool::instance().run(buckets, threads, [&](std::int64_t b, int) {
    fill(b, parts.begin(b), parts.size(b), rest[static_cast<std::size_t>(b)]);
  });
  for (const std::vector<Entry>& entries : rest) {
    for (const Entry& entry : entries) {
      std::int64_t at = slot(mixed(entry.id));
      Entry* table = entries_->data();
      while (table[at].row >= 0 && table[at].id != entry.id) at = at + 1 == slots_ ? 0 : at + 1;
      if (table[at].row < 0) table[at] = entry;
    }
  }
}

void MatchTable::fill(std::int64_t bucket, const Entry* from, std::int64_t count,
                      std::vector<Entry>& rest) {
  const std::int64_t first = edge(bucket), last = edge(bucket + 1);
  Entry* table = entries_->data();
  for (std::int64_t at = first; at < last; ++at) table[at] = Entry{0, -1};
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t at = slot(mixed(from[i].id));
    while (at < last && table[at].row >= 0 && table[at].id != from[i].id) ++at;
    if (at >= last) {
      rest.push_back(from[i]);
    } else if (table[at].row < 0) {
      table[at] = from[i];
    }
  }
}

// Where a row is: a coarse map of row numbers to arrays, then a step or two.
class ArrayFinder {
 public:
  ArrayFinder(const std::vector<const char*>& arrays, const std::vector<std::int64_t>& splits,
              std::size_t row_bytes)
      : arrays_(arrays), splits_(splits), row_bytes_(row_bytes) {
    while (splits.back() >> shift_ >= kCells) ++shift_;
    std::size_t array = 0;
    for (std::int64_t cell = 0; cell < kCells; ++cell) {
      while (array + 1 < arrays.size() && splits[array + 1] <= cell << shift_) ++array;
      first_[cell] = array;
    }
  }

  const char* row(std::int64_t row) const {
    std::size_t array = first_[row >> shift_];
    while (splits_[array + 1] <= row) ++array;
    return arrays_[array] + static_cast<std::size_t>(row - splits_[array]) * row_bytes_;
  }

 private:
  static constexpr std::int64_t kCells = 256;
  const std::vector<const char*>& arrays_;
  const std::vector<std::int64_t>& splits_;
  std::size_t row_bytes_;
  int shift_ = 0;
  std::size_t first_[kCells];
};

// copy(to, from) for every item of [begin, end), each source asked for some rows ahead of its turn.
template <class Source, class Copy>
std::int64_t copy_rows(const std::int64_t* index, std::int64_t begin, std::int64_t end,
                       std::int64_t rows, std::size_t bytes, char* out, const Source& source,
                       const Copy& copy) {
  const char* sources[kWindow];
  const std::int64_t ahead = rows_ahead(bytes);
  for (std::int64_t i = begin; i < end + ahead; ++i) {
    const std::int64_t done = i - ahead;
    if (done >= begin) {
      copy(out + static_cast<std::size_t>(done) * bytes, sources[done & (kWindow - 1)], bytes);
    }
    if (i < end) {
      const std::int64_t row = index[i];
      if (row < 0 || row >= rows) return i;
      const char* from = source(row);
      sources[i & (kWindow - 1)] = from;
      prefetch_row<1024>(from, bytes);
    }
  }
  return -1;
}

template <class Number>
struct Item {
  Number item;
  Number place;
};

// One thread's part of a scatter: columns [first, last) of a bucket's rows.
struct ColumnWork {
  std::int64_t bucket;
  std::int64_t first;
  std::int64_t last;
  std::int64_t cost;
};

// Heaviest first. A bucket that outweighs a thread's share (a hot row) is cut by columns, which
// leaves the order of every sum alone.
template <class Record>
std::vector<ColumnWork> column_work(const Buckets<Record>& parts, std::int64_t buckets,
                                    std::int64_t n, std::int64_t dim, int threads) {
  std::vector<ColumnWork> work;
  for (std::int64_t b = 0; b < buckets; ++b) {
    const std::int64_t size = parts.size(b);
    std::int64_t cuts = std::min<std::int64_t>(size * threads * 2 / std::max<std::int64_t>(n, 1),
                                               std::min<std::int64_t>(dim / 16, threads));
    cuts = std::max<std::int64_t>(cuts, 1);
    for (std::int64_t c = 0; c < cuts; ++c) {
      work.push_back(ColumnWork{b, dim * c / cuts, dim * (c + 1) / cuts, size / cuts});
    }
  }
  std::stable_sort(work.begin(), work.end(),
                   [](const ColumnWork& a, const ColumnWork& b) { return a.cost > b.cost; });
  return work;
}

template <class T>
struct Scatter {
  const T* grad;
  const std::int64_t* index;
  std::int64_t n;
  std::int64_t rows;
  std::int64_t dim;
  T* out;
  int threads;

  std::int64_t direct() const;
  template <class Number>
  std::int64_t by_buckets() const;
  template <class Record>
  void sum_bucket(const Record* records, std::int64_t size, std::int64_t count,
                  const ColumnWork& part, T* base) const;

  bool small() const {
    return rows * dim < (std::int64_t{1} << 20) && (threads == 1 || n * dim < (1 << 15));
  }
  // Rows of a bucket, as a shift: a bucket stays in the second-level cache, there are enough for
  // the threads to share, and not so many that placing the records thrashes.
  int bucket_shift() const {
    const std::int64_t row_bytes = dim * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t most = std::max<std::int64_t>((256 << 10) / row_bytes, 1);
    const std::int64_t shared = rows / (8 * threads);
    const std::int64_t wanted = std::max(std::min(most, shared), rows / 1024);
    int shift = 0;
    while (std::int64_t{2} << shift <= wanted) ++shift;
    return shift;
  }
};

template <class T>
std::int64_t Scatter<T>::direct() const {
  for (std::int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= rows) return i;
  }
  if (rows * dim > 0) std::memset(out, 0, static_cast<std::size_t>(rows * dim) * sizeof(T));
  for (std::int64_t i = 0; i < n; ++i) add_row(out + index[i] * dim, grad + i * dim, dim);
  return -1;
}

template <class T>
template <class Number>
std::int64_t Scatter<T>::by_buckets() const {
  using Record = Item<Number>;
  const int shift = bucket_shift();
  const std::int64_t buckets = ((rows - 1) >> shift) + 1;
  const std::int64_t inside = (std::int64_t{1} << shift) - 1;
  const auto route = [&](std::int64_t begin, std::int64_t end, auto put) -> std::int64_t {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = index[i];
      if (row < 0 || row >= rows) return i;
      put(row >> shift, Record{static_cast<Number>(i), static_cast<Number>(row & inside)});
    }
    return -1;
  };
  const Buckets<Record> parts = in_buckets<Record>(n, buckets, threads, route);
  if (parts.bad >= 0) return parts.bad;
  const std::vector<ColumnWork> work = column_work(parts, buckets, n, dim, threads);
  // A large output is summed in a small buffer that stays in cache, and written past the cache.
  const std::size_t out_bytes = static_cast<std::size_t>(rows * dim) * sizeof(T);
  const std::int64_t bucket_elements = (inside + 1) * dim;
  const std::size_t bucket_bytes = static_cast<std::size_t>(bucket_elements) * sizeof(T);
  const bool stream =
      streams(out, 16, out_bytes) && bucket_bytes % 16 == 0 && bucket_bytes <= (512 << 10);
  const Scratch<T> sums(stream ? bucket_elements * threads : 0);
  const auto items = static_cast<std::int64_t>(work.size());
  Pool::instance().run(items, threads, [&](std::int64_t w, int lane) {
    const ColumnWork& part = work[static_cast<std::size_t>(w)];
    const std::int64_t first_row = part.bucket << shift;
    T* target = out + first_row * dim;
    const bool whole = stream && part.last - part.first == dim;
    T* base = whole ? sums.data() + bucket_elements * lane : target;
    const std::int64_t count = std::min(inside + 1, rows - first_row);
    sum_bucket(parts.begin(part.bucket), parts.size(part.bucket), count, part, base);
    if (!whole) return;
    stream_bytes(reinterpret_cast<char*>(target), reinterpret_cast<const char*>(base),
                 static_cast<std::size_t>(count * dim) * sizeof(T));
    end_stream();
  });
  return -1;
}

template <class T>
template <class Record>
void Scatter<T>::sum_bucket(const Record* records, std::int64_t size, std::int64_t count,
                            const ColumnWork& part, T* base) const {
  const std::int64_t width = part.last - part.first;
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(T);
  base += part.first;
  const T* from = grad + part.first;
  for (std::int64_t r = 0; r < count; ++r) std::memset(base + r * dim, 0, bytes);
  const std::int64_t ahead = rows_ahead(bytes);
  for (std::int64_t i = 0; i < size; ++i) {
    if (i + ahead < size) {
      prefetch_row<1024>(from + static_cast<std::int64_t>(records[i + ahead].item) * dim, bytes);
    }
    add_row(base + static_cast<std::int64_t>(records[i].place) * dim,
            from + static_cast<std::int64_t>(records[i].item) * dim, width);
  }
}

}  // namespace

std::int64_t match_rows(const std::int64_t* ids, std::int64_t rows, const std::int64_t* query,
                        std::int64_t n, std::int64_t* index, int threads) {
  const MatchTable table(ids, rows, rows < 4096 ? 1 : threads);
  const Shares shares = shares_of(n, 4096);
  return over_shares(shares, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    const Entry* homes[kWindow];
    std::int64_t missing = -1;
    const auto ask = [&](std::int64_t i) {
      homes[i & (kWindow - 1)] = table.home(query[i]);
      __builtin_prefetch(homes[i & (kWindow - 1)]);
    };
    const auto answer = [&](std::int64_t i) {
      index[i] = table.find(homes[i & (kWindow - 1)], query[i]);
      if (index[i] < 0 && missing < 0) missing = i;
    };
    const std::int64_t ahead = std::min<std::int64_t>(kAsked, end - begin);
    for (std::int64_t i = begin; i < begin + ahead; ++i) ask(i);
    for (std::int64_t i = begin; i + ahead < end; ++i) {
      answer(i);
      ask(i + ahead);
    }
    for (std::int64_t i = end - ahead; i < end; ++i) answer(i);
    return missing;
  });
}

std::int64_t gather_rows(const std::vector<const char*>& arrays,
                         const std::vector<std::int64_t>& counts, std::size_t bytes,
                         const std::int64_t* index, std::int64_t n, char* out, int threads) {
  const std::vector<std::int64_t> splits = splits_of(counts);
  const std::int64_t rows = splits.back();
  const ArrayFinder finder(arrays, splits, bytes);
  const bool stream = streams(out, bytes, static_cast<std::size_t>(n) * bytes);
  const char* base = arrays.empty() ? nullptr : arrays[0];
  const auto one = [base, bytes](std::int64_t row) {
    return base + static_cast<std::size_t>(row) * bytes;
  };
  const auto many = [&finder](std::int64_t row) { return finder.row(row); };
  const Shares shares =
      shares_of(n, (256 << 10) / static_cast<std::int64_t>(std::max<std::size_t>(bytes, 16)));
  return over_shares(shares, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    const auto run = [&](const auto& source) {
      const auto past = [](char* to, const char* from, std::size_t size) {
        stream_bytes(to, from, size);
      };
      return stream ? copy_rows(index, begin, end, rows, bytes, out, source, past)
                    : copy_rows(index, begin, end, rows, bytes, out, source, copy_bytes);
    };
    const std::int64_t bad = arrays.size() == 1 ? run(one) : run(many);
    if (stream) end_stream();
    return bad;
  });
}

template <class T>
std::int64_t scatter_rows(const T* grad, const std::int64_t* index, std::int64_t n,
                          std::int64_t rows, std::int64_t dim, T* out, int threads) {
  const Scatter<T> scatter{grad, index, n, rows, dim, out, threads};
  if (scatter.small() || rows == 0 || dim == 0) return scatter.direct();
  if (n <= std::numeric_limits<std::uint32_t>::max()) return scatter.template by_buckets<std::uint32_t>();
  return scatter.template by_buckets<std::int64_t>();
}

template std::int64_t scatter_rows(const float*, const std::int64_t*, std::int64_t, std::int64_t,
                                   std::int64_t, float*, int);
template std::int64_t scatter_rows(const double*, const std::int64_t*, std::int64_t, std::int64_t,
                                   std::int64_t, double*, int);

}  // namespace shoal
