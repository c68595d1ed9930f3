#include "bind.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "shared_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

// Of one part: where its rows are and go, the bytes of a row, rows to and from each rank.
using Part = std::tuple<Address, Address, std::size_t, Sizes, Sizes>;

void add_runs(std::vector<Message>& messages, Address at, const Sizes& rows, std::size_t row_bytes) {
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const std::size_t count = static_cast<std::size_t>(rows[rank]) * row_bytes;
    messages[rank].add(Bytes{reinterpret_cast<char*>(at), count});
    at += count;
  }
}

std::shared_ptr<SharedCall> call_of(const std::vector<Part>& parts, std::size_t ranks,
                                    std::uint32_t tag) {
  auto call = std::make_shared<SharedCall>();
  call->sends.resize(ranks);
  call->receives.resize(ranks);
  call->tag = tag;
  for (const auto& [data, result, row_bytes, send, receive] : parts) {
    if (send.size() != ranks || receive.size() != ranks) throw std::invalid_argument("splits");
    add_runs(call->sends, data, send, row_bytes);
    add_runs(call->receives, result, receive, row_bytes);
  }
  return call;
}

const char* word(Fault fault) {
  constexpr const char* kWords[] = {"", "timeout", "dead", "closed", "failed", "mismatch"};
  return kWords[static_cast<std::size_t>(fault)];
}

std::shared_ptr<SharedRegion> region_of(const std::string& name, std::uint64_t token,
                                        int world_size, std::size_t slot_bytes) {
  try {
    return world_size > 0 ? SharedRegion::create(name, token, world_size, slot_bytes)
                          : SharedRegion::open(name, token);
  } catch (const SharedMemoryError& error) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code, error.what()).ptr());
    throw nb::python_error();
  }
}

}  // namespace

void bind_shared_memory(nb::module_& m) {
  m.def("pooled_bytes", &pooled<std::uint8_t, std::size_t>, "bytes"_a);
  nb::class_<SharedRegion>(m, "SharedRegion")
      .def_static("create", &region_of, "name"_a, "token"_a, "world_size"_a, "slot_bytes"_a)
      .def_static("open", [](const std::string& name,
                             std::uint64_t token) { return region_of(name, token, 0, 0); })
      .def_static("unlink", &SharedRegion::unlink)
      .def_prop_ro("world_size", &SharedRegion::world_size)
      .def_prop_ro("slot_bytes", &SharedRegion::slot_bytes);
  nb::class_<SharedCall>(m, "SharedCall");
  nb::class_<SharedGroup>(m, "SharedGroup")
      .def("__init__",
           [](SharedGroup* self, std::shared_ptr<SharedRegion> region, int rank, double timeout_s) {
             new (self) SharedGroup(std::move(region), rank,
                                    static_cast<std::int64_t>(timeout_s * 1e9));
           })
      .def("watch_peers", &SharedGroup::watch_peers)
      .def("start",
           [](SharedGroup& group, const std::vector<Part>& parts, std::size_t ranks,
              std::uint32_t tag) {
             auto call = call_of(parts, ranks, tag);
             const nb::gil_scoped_release free;
             group.start(call);
             return call;
           })
      .def("wait",
           [](SharedGroup& group, SharedCall& call, double most_s) {
             return group.wait(call, static_cast<std::int64_t>(most_s * 1e9));
           },
           Release())
      .def("failure",
           [](const SharedGroup& group) {
             const Failure f = group.failure();
             return nb::make_tuple(word(f.fault), f.peer, word(f.theirs), f.blamed, f.detail);
           })
      .def("close", &SharedGroup::close, Release());
}

}  // namespace shoal
