#include "unnamed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace shoal {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw std::runtime_error(std::string(what) + " a temporary file: " +
                           (errno == 0 ? "it ended early" : std::strerror(errno)));
}

int opened() {
  const char* folder = std::getenv("TMPDIR");
  std::string path = folder == nullptr || *folder == '\0' ? "/tmp" : folder;
  path += "/shoal-XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) refuse("cannot make");
  unlink(path.c_str());
  fcntl(file, F_SETFD, FD_CLOEXEC);
  return file;
}

}  // namespace

UnnamedFile::UnnamedFile() : file_(opened()) {}

void UnnamedFile::write(const void* from, std::size_t bytes, std::uint64_t offset) const {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    errno = 0;
    const ssize_t wrote = pwrite(file_.number(), at, bytes, static_cast<off_t>(offset));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) refuse("cannot write");
    at += wrote;
    offset += static_cast<std::uint64_t>(wrote);
    bytes -= static_cast<std::size_t>(wrote);
  }
}

void UnnamedFile::read(void* to, std::size_t bytes, std::uint64_t offset) const {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    errno = 0;
    const ssize_t got = pread(file_.number(), at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) refuse("cannot read");
    at += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

}  // namespace shoal
