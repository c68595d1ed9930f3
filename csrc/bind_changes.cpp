#include "bind_changes.h"

#include <nanobind/stl/tuple.h>

#include <cstring>
#include <tuple>

#include "shard.h"

namespace nb = nanobind;

namespace shoal {

void bind_changes(nb::module_& m) {
  nb::class_<ChangePage>(m, "ChangePage")
      .def_ro("done", &ChangePage::done)
      .def_ro("restarted", &ChangePage::restarted)
      .def_prop_ro("cursor",
                   [](const ChangePage& page) {
                     const ChangeCursor& next = page.next;
                     return std::make_tuple(next.incarnation, next.from, next.to, next.position);
                   })
      .def("rows", [](const ChangePage& page, int t) { return &page.rows.at(t); },
           nb::rv_policy::reference_internal)
      .def("deleted_count", [](const ChangePage& page, int t) { return page.deleted.at(t).size(); })
      .def("copy_deleted", [](const ChangePage& page, int t, std::uintptr_t to) {
        const std::vector<std::int64_t>& ids = page.deleted.at(t);
        if (!ids.empty()) std::memcpy(reinterpret_cast<void*>(to), ids.data(), ids.size() * 8);
      });
}

}  // namespace shoal
