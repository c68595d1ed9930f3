#include "bind.h"

#include <stdexcept>

#include "crc32.h"

namespace nb = nanobind;

namespace shoal {
namespace {

using Checksum = std::uint32_t (*)(std::uint32_t before, const void* data, std::size_t bytes);

// Contiguous memory of an object, held until this ends.
class Buffer {
 public:
  explicit Buffer(const nb::object& object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  void* data() const { return view_.buf; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

template <Checksum of>
std::uint32_t checksum(const nb::object& object, std::uint32_t before) {
  const Buffer buffer(object);
  const nb::gil_scoped_release release;
  return of(before, buffer.data(), buffer.bytes());
}

std::uint32_t copy(const nb::object& to, const nb::object& object, std::uint32_t before) {
  const Buffer target(to, PyBUF_WRITABLE), buffer(object);
  if (target.bytes() != buffer.bytes()) throw std::invalid_argument("buffers of other sizes");
  const nb::gil_scoped_release release;
  return crc32_copy(before, target.data(), buffer.data(), buffer.bytes());
}

}  // namespace

void bind_checksums(nb::module_& m) {
  using namespace nb::literals;
  m.def("crc32", &checksum<crc32>, "data"_a, "before"_a = 0);
  m.def("crc32_copy", &copy, "to"_a, "data"_a, "before"_a = 0);
  m.def("crc32_by_tables", &checksum<crc32_by_tables>, "data"_a, "before"_a = 0);
}

}  // namespace shoal
