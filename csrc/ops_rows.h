#pragma once
// Rows by id and by index. Every function returns the position of the first bad or missing item,
// or -1; where one is bad, the output is not to be read.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

// index[i] = the first row whose id is query[i], or -1 (and the first such i is returned).
std::int64_t match_rows(const std::int64_t* ids, std::int64_t rows, const std::int64_t* query,
                        std::int64_t n, std::int64_t* index, int threads);

// out[i] = row index[i] of several arrays of `counts` rows, numbered through.
std::int64_t gather_rows(const std::vector<const char*>& arrays,
                         const std::vector<std::int64_t>& counts, std::size_t row_bytes,
                         const std::int64_t* index, std::int64_t n, char* out, int threads);

// out[r] = sum of grad[i] over all i with index[i] == r, in order of i.
template <class T>
std::int64_t scatter_rows(const T* grad, const std::int64_t* index, std::int64_t n,
                          std::int64_t rows, std::int64_t dim, T* out, int threads);

}  // namespace shoal
