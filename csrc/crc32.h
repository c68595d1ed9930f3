#pragma once
// CRC-32 as zlib and PNG have it (reflected, polynomial 0xEDB88320).
#include <cstddef>
#include <cstdint>

namespace shoal {

// Of what `before` is the checksum of (0: nothing), followed by these bytes.
std::uint32_t crc32(std::uint32_t before, const void* data, std::size_t bytes);

// The same, and a copy of the bytes, which do not overlap; past the caches, for nobody reads it soon.
std::uint32_t crc32_copy(std::uint32_t before, void* to, const void* data, std::size_t bytes);

// The same without carry-less multiplication, which a processor may lack.
std::uint32_t crc32_by_tables(std::uint32_t before, const void* data, std::size_t bytes);

}  // namespace shoal
