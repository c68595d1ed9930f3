#pragma once
// Memory that the ranks of one host share: a state for each rank, a ring of bytes for each ordered
// pair of ranks. A ring has one writer and one reader; neither ever waits inside it.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "descriptor.h"

namespace shoal {

// A call to the system failed: `code` is its errno.
struct SharedMemoryError : std::runtime_error {
  int code;
  SharedMemoryError(const std::string& what, int error);
};

enum class RankState : std::uint32_t { absent, attached, failed, closed };

// Why a rank stopped; bind_shared_memory.cpp has the words.
enum class Fault : std::uint32_t { none, timeout, dead, closed, failed, mismatch };

inline constexpr std::uint32_t kSlots = 4;
inline constexpr std::size_t kApart = 128;  // two lines: the next one is fetched with each

struct alignas(kApart) RankCell {
  std::atomic<std::uint32_t> state;  // RankState
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint32_t> fault;  // with `failed`: the Fault
  std::atomic<std::int32_t> blamed;  // and the rank that caused it
  alignas(kApart) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> asleep;
  std::atomic<std::int32_t> core;  // where it last ran; negative: unknown
};

// What a slot holds: bytes of the sender's call `call`, whose message to this reader has `whole`.
struct SlotInfo {
  std::uint64_t call;
  std::uint64_t whole;
  std::uint32_t tag;
  std::uint32_t bytes;
};

struct Ring {
  alignas(kApart) std::atomic<std::uint64_t> head;  // slots written
  alignas(kApart) std::atomic<std::uint64_t> tail;  // slots read
  alignas(kApart) SlotInfo slots[kSlots];
};

class SharedRegion {
 public:
  // One rank creates, the others open by the same name and token, which tells one job from another.
  static std::shared_ptr<SharedRegion> create(const std::string& name, std::uint64_t token,
                                              int world_size, std::size_t slot_bytes);
  static std::shared_ptr<SharedRegion> open(const std::string& name, std::uint64_t token);
  static void unlink(const std::string& name) noexcept;

  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  int world_size() const { return world_size_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  RankCell& cell(int rank) const;
  Ring& ring(int from, int to) const;
  char* slot(int from, int to, std::uint64_t index) const;

  // Notes the core that `rank`, the caller, runs on.
  int note_core(int rank) const;
  // Wakes `rank` if it sleeps; after whatever it waits for was stored with sequential consistency.
  void ring_bell(int rank) const;
  // Sleeps until a bell after `heard`, or `most_ns`.
  void sleep(int rank, std::uint32_t heard, std::int64_t most_ns) const;

 private:
  SharedRegion() = default;
  void map(int file, std::size_t bytes);
  std::size_t pair(int from, int to) const {
    return static_cast<std::size_t>(from * (world_size_ - 1) + to - (to > from ? 1 : 0));
  }

  char* base_ = nullptr;
  std::size_t bytes_ = 0;
  int world_size_ = 0;
  std::size_t slot_bytes_ = 0;
};

// Tells whether other processes still run, also those whose parent has not yet asked about them.
class Peers {
 public:
  void watch(int rank, int pid);
  bool gone(int rank) const;
  void forget() { peers_.clear(); }

 private:
  struct Peer {
    int rank, pid;
    Descriptor file;  // none where the system has no such thing
  };
  std::vector<Peer> peers_;
};

}  // namespace shoal
