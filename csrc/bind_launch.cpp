#include <cstdint>
#include <string>

#include "bind.h"

namespace nb = nanobind;

namespace shoal {
namespace {

// What an integer tells Triton besides its type: it needs 64 bits, is 1, is a multiple of 16.
char traits_of(PyObject* integer, bool only_width) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
  const bool wide = overflow != 0 || value != static_cast<std::int32_t>(value);
  if (only_width) return wide ? 1 : 0;
  return static_cast<char>((wide ? 1 : 0) | (value == 1 ? 2 : 0) | (value % 16 == 0 ? 4 : 0));
}

nb::tuple launch_values(const nb::tuple& arguments, const nb::bytes& fixed) {
  // Made once: Python finds an attribute by the identity of its name.
  static PyObject* const dtype = PyUnicode_InternFromString("dtype");
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  nb::list values;
  std::string key;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    nb::object value = nb::borrow(arguments[i]);
    nb::object kind = nb::borrow(value.type());
    char traits = 0;
    if (PyLong_CheckExact(value.ptr())) {
      traits = traits_of(value.ptr(), fixed.c_str()[i] != 0);
    } else if (PyObject* held = PyObject_GetAttr(value.ptr(), dtype)) {
      kind = nb::steal(held);
      PyObject* const self[] = {value.ptr()};
      value = nb::steal(PyObject_VectorcallMethod(data_ptr, self, 1, nullptr));
      if (!value.is_valid()) throw nb::python_error();
      traits = static_cast<char>(nb::cast<std::uint64_t>(value) & 15);
    } else {
      PyErr_Clear();
    }
    const PyObject* place = kind.ptr();  // types and dtypes stay where they are
    key.append(reinterpret_cast<const char*>(&place), sizeof place).push_back(traits);
    values.append(value);
  }
  return nb::make_tuple(nb::bytes(key.data(), key.size()), nb::tuple(values));
}

}  // namespace

void bind_launch(nb::module_& m) { m.def("launch_values", &launch_values); }

}  // namespace shoal
