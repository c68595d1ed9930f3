#include "background.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#endif

namespace shoal {
#if defined(__linux__)
namespace {

constexpr int kNiceness = 10;

struct SchedAttr {  // of sched_setattr(2): the C library declares neither
  std::uint32_t size = sizeof(SchedAttr), policy = SCHED_BATCH;
  std::uint64_t flags = 0;
  std::int32_t nice = kNiceness;
  std::uint32_t priority = 0;
  // A thread that wakes cuts short one that runs only if its own slice is the shorter one (the usual
  // one has at most 3 ms): without this a step that slept waits for up to a tick. Not longer: threads
  // of a save wait for each other's slices, and training may wait for what one of them holds.
  std::uint64_t runtime_ns = 6'000'000, deadline = 0, period = 0;
};

}  // namespace

void give_way() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));  // glibc before 2.30 has no gettid
  errno = 0;
  const int own = getpriority(PRIO_PROCESS, thread);
  if (own == -1 && errno != 0) throw std::system_error(errno, std::generic_category());
  SchedAttr wanted;
  wanted.nice = std::max(own, kNiceness);
  if (sched_getscheduler(0) == SCHED_OTHER && syscall(SYS_sched_setattr, 0, &wanted, 0) == 0) return;
  // A sandbox may know niceness only, and somebody may have chosen another policy.
  if (setpriority(PRIO_PROCESS, thread, wanted.nice) != 0) {
    throw std::system_error(errno, std::generic_category());
  }
}
#else
void give_way() {}
#endif

}  // namespace shoal
