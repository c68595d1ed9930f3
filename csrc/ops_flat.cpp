#include "ops_flat.h"

#include <cstring>

#include "ops_copy.h"
#include "ops_buckets.h"
#include "prefetch.h"

namespace shoal {
namespace {

constexpr std::int64_t kAhead = 32;  // rows asked for before their turn

// visit(list, first row, last row, first item) for each list's part of items [begin, end).
template <class Visit>
std::int64_t each_list(const Numbers& splits, std::int64_t begin, std::int64_t end,
                       const Visit& visit) {
  auto k = static_cast<std::size_t>(std::upper_bound(splits.begin(), splits.end(), begin) -
                                    splits.begin() - 1);
  for (std::int64_t at = begin; at < end; ++k) {
    const std::int64_t stop = std::min(end, splits[k + 1]);
    if (stop <= at) continue;
    const std::int64_t bad = visit(k, at - splits[k], stop - splits[k], splits[k]);
    if (bad >= 0) return bad;
    at = stop;
  }
  return -1;
}

std::int64_t widest(const Numbers& dims) {
  return dims.empty() ? 1 : *std::max_element(dims.begin(), dims.end());
}

// Part of a row that lies in one bucket of the flat buffer.
template <class T>
struct Piece {
  const T* from;
  std::int32_t place;
  std::int32_t width;
};

constexpr int kBucketShift = 16;
constexpr std::int64_t kBucketElements = std::int64_t{1} << kBucketShift;  // 256 KiB of floats

template <class T>
void sum_bucket(const Buckets<Piece<T>>& parts, std::int64_t bucket, std::int64_t count, T scale,
                T* out) {
  std::memset(out, 0, static_cast<std::size_t>(count) * sizeof(T));
  const Piece<T>* pieces = parts.begin(bucket);
  const std::int64_t size = parts.size(bucket);
  for (std::int64_t i = 0; i < size; ++i) {
    if (i + kAhead < size) {
      prefetch_row<1024>(pieces[i + kAhead].from,
                         static_cast<std::size_t>(pieces[i + kAhead].width) * sizeof(T));
    }
    add_row(out + pieces[i].place, pieces[i].from, pieces[i].width);
  }
  if (scale == T(1)) return;
  for (std::int64_t i = 0; i < count; ++i) out[i] *= scale;
}

struct OffsetMap {
  const std::int64_t *positions, *splits, *offsets, *offset_splits;
  const Numbers& dims;
  std::int64_t n, n_offsets, keys;

  OffsetMap(const NumberLists& map, const Numbers& sizes, const Numbers& widths)
      : positions(map[0]),
        splits(map[1]),
        offsets(map[2]),
        offset_splits(map[3]),
        dims(widths),
        n(sizes[0]),
        n_offsets(sizes[2]),
        keys(sizes[3] - 1) {}
};

// visit(row, position, first element, width) for positions [begin, end) of a map.
template <class Visit>
void each_position(const OffsetMap& map, std::int64_t begin, std::int64_t end,
                   const Visit& visit) {
  const auto groups = static_cast<std::int64_t>(map.dims.size());
  std::int64_t k = 0, element = 0;
  for (; k < groups && map.splits[k + 1] <= begin; ++k) {
    element += (map.splits[k + 1] - map.splits[k]) * map.dims[static_cast<std::size_t>(k)];
  }
  if (k < groups) element += (begin - map.splits[k]) * map.dims[static_cast<std::size_t>(k)];
  for (std::int64_t row = begin; row < end; ++row) {
    while (map.splits[k + 1] <= row) ++k;
    const std::int64_t width = map.dims[static_cast<std::size_t>(k)];
    visit(row, map.positions[row], element, width);
    element += width;
  }
}

// Shares of positions: about 64 KiB of values each.
Shares position_shares(const OffsetMap& map) {
  const auto n = map.splits[map.dims.size()];
  return shares_of(n, (64 << 10) / (16 * std::max<std::int64_t>(1, widest(map.dims))));
}

MapCheck check_splits(const OffsetMap& map, std::int64_t length) {
  const auto groups = static_cast<std::int64_t>(map.dims.size());
  std::int64_t elements = 0;
  if (map.splits[0] != 0) return {MapFault::splits, 0};
  for (std::int64_t k = 0; k < groups; ++k) {
    if (map.splits[k + 1] < map.splits[k]) return {MapFault::splits, k + 1};
    elements += (map.splits[k + 1] - map.splits[k]) * map.dims[static_cast<std::size_t>(k)];
  }
  if (map.splits[groups] != map.n) return {MapFault::splits, groups};
  if (elements != length) return {MapFault::length, elements};
  if (map.offset_splits[0] != 0) return {MapFault::offset_splits, 0};
  for (std::int64_t u = 0; u < map.keys; ++u) {
    if (map.offset_splits[u + 1] < map.offset_splits[u]) return {MapFault::offset_splits, u + 1};
  }
  if (map.offset_splits[map.keys] != map.n_offsets) return {MapFault::offset_splits, map.keys};
  return {none, -1};
}

MapCheck check(const OffsetMap& map, std::int64_t length, std::int64_t size, int threads) {
  const MapCheck found = check_splits(map, length);
  if (found.first != none) return found;
  const std::int64_t bad = over_shares(
      position_shares(map), threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        std::int64_t first = -1;
        each_position(map, begin, end,
                      [&](std::int64_t row, std::int64_t key, std::int64_t, std::int64_t width) {
                        if (first >= 0) return;
                        if (key < 0 || key >= map.keys) {
                          first = row;
                          return;
                        }
                        for (auto o = map.offset_splits[key]; o < map.offset_splits[key + 1]; ++o) {
                          if (map.offsets[o] < 0 || map.offsets[o] > size - width) first = row;
                        }
                      });
        return first;
      });
  if (bad < 0) return {none, -1};
  const std::int64_t key = map.positions[bad];
  if (key < 0 || key >= map.keys) return {MapFault::position, bad};
  std::int64_t width = 0;
  each_position(map, bad, bad + 1, [&](std::int64_t, std::int64_t, std::int64_t,
                                       std::int64_t found) { width = found; });
  std::int64_t at = map.offset_splits[key];
  while (map.offsets[at] >= 0 && map.offsets[at] <= size - width) ++at;
  return {MapFault::offset, at};
}

// each(first offset, last offset, element, width) for the positions of a map without a fault.
template <class Each>
MapCheck over_map(const NumberLists& tensors, const Numbers& sizes, const Numbers& dims,
                  std::int64_t length, std::int64_t size, int threads, const Each& each) {
  const OffsetMap map(tensors, sizes, dims);
  const MapCheck found = check(map, length, size, threads);
  if (found.first != none) return found;
  const Shares shares = position_shares(map);
  Pool::instance().run(shares.count, threads, [&](std::int64_t share, int) {
    each_position(map, shares.begin(share), shares.end(share),
                  [&](std::int64_t, std::int64_t key, std::int64_t element, std::int64_t width) {
                    each(map.offsets + map.offset_splits[key],
                         map.offsets + map.offset_splits[key + 1], element, width);
                  });
  });
  return found;
}

}  // namespace

std::int64_t gather_flat(const std::vector<char*>& rows, const NumberLists& all_offsets,
                         const Numbers& counts, const Numbers& dims, const char* flat,
                         std::int64_t size, std::size_t element_bytes, int threads) {
  const Numbers splits = splits_of(counts);
  const std::int64_t width = std::max<std::int64_t>(4, widest(dims));
  const Shares shares = shares_of(splits.back(), (64 << 10) / width);
  const auto copy_list = [&](std::size_t k, std::int64_t first, std::int64_t last,
                             std::int64_t start) -> std::int64_t {
    const std::int64_t* offsets = all_offsets[k];
    const std::int64_t limit = size - dims[k];
    const std::size_t bytes = static_cast<std::size_t>(dims[k]) * element_bytes;
    const bool stream = streams(rows[k], bytes, bytes * static_cast<std::size_t>(counts[k]));
    for (std::int64_t i = first; i < last; ++i) {
      if (offsets[i] < 0 || offsets[i] > limit) return start + i;
      if (i + kAhead < last) {
        prefetch_row<1024>(flat + offsets[i + kAhead] * static_cast<std::int64_t>(element_bytes),
                           bytes);
      }
      const char* from = flat + static_cast<std::size_t>(offsets[i]) * element_bytes;
      char* to = rows[k] + static_cast<std::size_t>(i) * bytes;
      stream ? stream_bytes(to, from, bytes) : copy_bytes(to, from, bytes);
    }
    if (stream) end_stream();
    return -1;
  };
  return over_shares(shares, threads, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    return each_list(splits, begin, end, copy_list);
  });
}

template <class T>
std::int64_t scatter_flat(const std::vector<const T*>& rows, const NumberLists& offsets,
                          const Numbers& counts, const Numbers& dims, T* flat, std::int64_t size,
                          T scale, int threads) {
  const Numbers splits = splits_of(counts);
  const std::int64_t buckets = ((size - 1) >> kBucketShift) + 1;
  const auto route = [&](std::int64_t begin, std::int64_t end, auto put) {
    return each_list(splits, begin, end, [&](std::size_t k, std::int64_t first, std::int64_t last,
                                            std::int64_t start) -> std::int64_t {
      const std::int64_t dim = dims[k], limit = size - dim;
      for (std::int64_t i = first; i < last; ++i) {
        const std::int64_t offset = offsets[k][i];
        if (offset < 0 || offset > limit) return start + i;
        const T* from = rows[k] + i * dim;
        for (std::int64_t done = 0; done < dim;) {
          const std::int64_t at = offset + done, bucket = at >> kBucketShift;
          const std::int64_t place = at - (bucket << kBucketShift);
          const std::int64_t width = std::min(dim - done, kBucketElements - place);
          put(bucket, Piece<T>{from + done, static_cast<std::int32_t>(place),
                               static_cast<std::int32_t>(width)});
          done += width;
        }
      }
      return -1;
    });
  };
  const std::int64_t items = splits.back();
  const int helpers = items < 2048 ? 1 : threads;
  const auto parts =
      in_buckets<Piece<T>>(items, std::max<std::int64_t>(buckets, 1), helpers, route);
  if (parts.bad >= 0) return parts.bad;
  // A large buffer is summed in a small one that stays in cache, and written past the cache.
  const bool stream = streams(flat, 16, static_cast<std::size_t>(size) * sizeof(T));
  const Scratch<T> sums(stream ? kBucketElements * helpers : 0);
  Pool::instance().run(size == 0 ? 0 : buckets, helpers, [&](std::int64_t b, int lane) {
    const std::int64_t start = b << kBucketShift, count = std::min(kBucketElements, size - start);
    T* to = stream ? sums.data() + kBucketElements * lane : flat + start;
    sum_bucket(parts, b, count, scale, to);
    if (!stream) return;
    stream_bytes(reinterpret_cast<char*>(flat + start), reinterpret_cast<const char*>(to),
                 static_cast<std::size_t>(count) * sizeof(T));
    end_stream();
  });
  return -1;
}

MapCheck check_map(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                   std::int64_t length, std::int64_t size, int threads) {
  return check(OffsetMap(map, sizes, dims), length, size, threads);
}

MapCheck fill_offsets(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                      std::int64_t length, std::int64_t size, const char* value, char* buffer,
                      std::size_t element_bytes, int threads) {
  return over_map(map, sizes, dims, length, size, threads,
                  [=](auto* at, auto* last, std::int64_t element, std::int64_t width) {
                    const std::size_t bytes = static_cast<std::size_t>(width) * element_bytes;
                    const char* from = value + static_cast<std::size_t>(element) * element_bytes;
                    for (; at < last; ++at) {
                      char* to = buffer + static_cast<std::size_t>(*at) * element_bytes;
                      copy_bytes(to, from, bytes);
                    }
                  });
}

template <class T>
MapCheck sum_offsets(const NumberLists& map, const Numbers& sizes, const Numbers& dims,
                     std::int64_t length, std::int64_t size, T* value, const T* buffer,
                     int threads) {
  return over_map(map, sizes, dims, length, size, threads,
                  [=](auto* at, auto* last, std::int64_t element, std::int64_t width) {
                    std::memset(value + element, 0, static_cast<std::size_t>(width) * sizeof(T));
                    for (; at < last; ++at) add_row(value + element, buffer + *at, width);
                  });
}

template std::int64_t scatter_flat(const std::vector<const float*>&, const NumberLists&,
                                   const Numbers&, const Numbers&, float*, std::int64_t, float,
                                   int);
template std::int64_t scatter_flat(const std::vector<const double*>&, const NumberLists&,
                                   const Numbers&, const Numbers&, double*, std::int64_t, double,
                                   int);
template MapCheck sum_offsets(const NumberLists&, const Numbers&, const Numbers&, std::int64_t,
                              std::int64_t, float*, const float*, int);
template MapCheck sum_offsets(const NumberLists&, const Numbers&, const Numbers&, std::int64_t,
                              std::int64_t, double*, const double*, int);

}  // namespace shoal
