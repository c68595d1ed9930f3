// Linked into the core of a wheel (scripts/wheel.py): takes the place of symbols that glibc before
// 2.34 and libstdc++ before GCC 12 lack, by what they have, so that the wheel fits systems older
// than the one that builds it. The core exports none of them. For x86-64: versions of symbols, and
// `struct stat` as the kernel has it.

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <ctime>
#include <exception>
#include <mutex>
#include <new>
#include <string>

namespace {
std::string shared(const char* name) { return std::string("/dev/shm/") + (name + (*name == '/')); }
}  // namespace

extern "C" {
// Headers of libstdc++ read it: with 0, shared pointers count atomically in any process.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;

__asm__(".symver exp_of_old, exp@GLIBC_2.2.5");
double exp_of_old(double);
double exp(double x) noexcept { return exp_of_old(x); }

int fstat(int file, struct stat* found) noexcept {
  return static_cast<int>(syscall(SYS_fstat, file, found));
}

int shm_open(const char* name, int flags, mode_t mode) {
  return open(shared(name).c_str(), flags | O_NOFOLLOW | O_CLOEXEC, mode);
}

int shm_unlink(const char* name) { return unlink(shared(name).c_str()); }

// As libstdc++ waited before: longer if the wall clock is set back meanwhile.
int pthread_cond_clockwait(pthread_cond_t* changed, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  constexpr long kSecond = 1'000'000'000;
  timespec now{}, wall{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  const long left = wall.tv_nsec + until->tv_nsec - now.tv_nsec + kSecond;  // 0 to 3 seconds
  wall.tv_sec += until->tv_sec - now.tv_sec + left / kSecond - 1;
  wall.tv_nsec = left % kSecond;
  return pthread_cond_timedwait(changed, mutex, &wall);
}

// libstdc++'s own, by version: what the core has inline of that name calls the two below.
__asm__(".symver copy_of_old, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver end_of_old, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
void copy_of_old(void* to, const void* from);
void end_of_old(void* one);
}  // extern "C"

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

void condition_variable::wait(unique_lock<mutex>& lock) {
  pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}

void __exception_ptr::exception_ptr::_M_addref() noexcept {
  alignas(exception_ptr) char copy[sizeof(exception_ptr)];
  copy_of_old(copy, this);  // never ended: it is the reference
}

void __exception_ptr::exception_ptr::_M_release() noexcept {
  end_of_old(this);
  _M_exception_object = nullptr;
}
}  // namespace std
