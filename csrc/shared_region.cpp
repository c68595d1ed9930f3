#include "shared_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace shoal {
namespace {

constexpr std::uint64_t kMagic = 0x53484f414c524731;  // "SHOALRG1"
constexpr std::size_t kPage = 4096;

struct Header {
  std::uint64_t token;
  std::uint64_t slot_bytes;
  std::int32_t world_size;
  std::atomic<std::uint64_t> magic;  // written last
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

constexpr std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

std::size_t cells_at() { return round_up(sizeof(Header), kApart); }
std::size_t rings_at(std::size_t world) { return cells_at() + world * sizeof(RankCell); }
std::size_t pairs(std::size_t world) { return world * (world - 1); }
std::size_t slots_at(std::size_t world) {
  return round_up(rings_at(world) + pairs(world) * sizeof(Ring), kPage);
}
std::size_t whole(std::size_t world, std::size_t slot_bytes) {
  return slots_at(world) + pairs(world) * kSlots * slot_bytes;
}

// Takes the memory now: a write to a page that a full file system cannot give kills the process.
void reserve(int file, std::size_t bytes) {
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) throw SharedMemoryError("ftruncate", errno);
#if defined(__linux__)
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  if (error != 0) throw SharedMemoryError("posix_fallocate", error);
#endif
}

}  // namespace

SharedMemoryError::SharedMemoryError(const std::string& what, int error)
    : std::runtime_error(what + ": " + std::strerror(error)), code(error) {}

void SharedRegion::map(int file, std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw SharedMemoryError("mmap", errno);
  base_ = static_cast<char*>(at);
  bytes_ = bytes;
}

std::shared_ptr<SharedRegion> SharedRegion::create(const std::string& name, std::uint64_t token,
                                                   int world_size, std::size_t slot_bytes) {
  const auto world = static_cast<std::size_t>(world_size);
  const Descriptor opened(shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  const int file = opened.number();
  if (file < 0) throw SharedMemoryError("shm_open", errno);
  std::shared_ptr<SharedRegion> region(new SharedRegion());
  try {
    reserve(file, whole(world, slot_bytes));
    region->map(file, whole(world, slot_bytes));
  } catch (...) {
    unlink(name);
    throw;
  }
  region->world_size_ = world_size;
  region->slot_bytes_ = slot_bytes;
  for (int rank = 0; rank < world_size; ++rank) {
    (new (&region->cell(rank)) RankCell{})->core.store(-1);
    for (int to = 0; to < world_size; ++to) {
      if (to != rank) new (&region->ring(rank, to)) Ring{};
    }
  }
  auto* header = new (region->base_) Header{token, slot_bytes, world_size, 0};
  header->magic.store(kMagic, std::memory_order_release);
  return region;
}

std::shared_ptr<SharedRegion> SharedRegion::open(const std::string& name, std::uint64_t token) {
  const Descriptor opened(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600));
  const int file = opened.number();
  if (file < 0) throw SharedMemoryError("shm_open", errno);
  struct stat found{};
  if (fstat(file, &found) != 0) throw SharedMemoryError("fstat", errno);
  std::shared_ptr<SharedRegion> region(new SharedRegion());
  if (static_cast<std::size_t>(found.st_size) < kPage) throw SharedMemoryError("size", EINVAL);
  region->map(file, static_cast<std::size_t>(found.st_size));
  const auto* header = reinterpret_cast<const Header*>(region->base_);
  if (header->magic.load(std::memory_order_acquire) != kMagic || header->token != token) {
    throw SharedMemoryError("token", EINVAL);
  }
  region->world_size_ = header->world_size;
  region->slot_bytes_ = header->slot_bytes;
  if (region->bytes_ < whole(static_cast<std::size_t>(header->world_size), header->slot_bytes)) {
    throw SharedMemoryError("size", EINVAL);
  }
  return region;
}

void SharedRegion::unlink(const std::string& name) noexcept { shm_unlink(name.c_str()); }

SharedRegion::~SharedRegion() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

RankCell& SharedRegion::cell(int rank) const {
  return reinterpret_cast<RankCell*>(base_ + cells_at())[rank];
}

Ring& SharedRegion::ring(int from, int to) const {
  char* rings = base_ + rings_at(static_cast<std::size_t>(world_size_));
  return reinterpret_cast<Ring*>(rings)[pair(from, to)];
}

char* SharedRegion::slot(int from, int to, std::uint64_t index) const {
  char* slots = base_ + slots_at(static_cast<std::size_t>(world_size_));
  return slots + (pair(from, to) * kSlots + index % kSlots) * slot_bytes_;
}

int SharedRegion::note_core(int rank) const {
#if defined(__linux__)
  const int core = sched_getcpu();
#else
  const int core = -1;
#endif
  std::atomic<std::int32_t>& noted = cell(rank).core;
  if (noted.load(std::memory_order_relaxed) != core) {
    noted.store(core, std::memory_order_relaxed);
  }
  return core;
}

void SharedRegion::ring_bell(int rank) const {
  RankCell& there = cell(rank);
  if (there.asleep.load() == 0) return;
  there.bell.fetch_add(1);
#if defined(__linux__)
  syscall(SYS_futex, &there.bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
#endif
}

void SharedRegion::sleep(int rank, std::uint32_t heard, std::int64_t most_ns) const {
  RankCell& here = cell(rank);
#if defined(__linux__)
  const timespec most{most_ns / 1'000'000'000, most_ns % 1'000'000'000};
  syscall(SYS_futex, &here.bell, FUTEX_WAIT, heard, &most, nullptr, 0);
#else
  constexpr std::int64_t kNap = 50'000;
  for (std::int64_t slept = 0; slept < most_ns && here.bell.load() == heard; slept += kNap) {
    const timespec nap{0, kNap};
    nanosleep(&nap, nullptr);
  }
#endif
}

void Peers::watch(int rank, int pid) {
  int file = -1;
#if defined(__linux__) && defined(SYS_pidfd_open)
  file = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
  peers_.push_back(Peer{rank, pid, Descriptor(file)});
}

bool Peers::gone(int rank) const {
  for (const Peer& peer : peers_) {
    if (peer.rank != rank) continue;
    if (peer.file.number() < 0) return kill(peer.pid, 0) != 0 && errno == ESRCH;
    pollfd asked{peer.file.number(), POLLIN, 0};
    return poll(&asked, 1, 0) == 1;
  }
  return false;
}

}  // namespace shoal
