// SPDX-License-Identifier: Apache-2.0
//
// Each error class of the library as a Python exception of the same name.
#include "bindings.h"

namespace bitopk::python {
namespace py = pybind11;

namespace {

// Kept for the life of the interpreter: translators may run during its shutdown.
struct Exceptions {
  PyObject* base;
  PyObject* invalid_argument;
  PyObject* wire_format;
  PyObject* communication;
  PyObject* non_finite;
  PyObject* divergence;
};
Exceptions exceptions;

PyObject* NewException(py::module_& module, const char* name, py::handle bases, const char* doc) {
  const std::string qualified = std::string("bitopk.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.attr(name) = py::handle(type);
  return type;
}

}  // namespace

void RegisterErrors(py::module_& module) {
  exceptions.base =
      NewException(module, "Error", PyExc_RuntimeError, "Base of all errors raised by bitopk.");
  const py::handle base(exceptions.base);
  exceptions.invalid_argument = NewException(
      module, "InvalidArgumentError", py::make_tuple(base, py::handle(PyExc_ValueError)),
      "The caller passed something that cannot be served; nothing was changed.");
  exceptions.wire_format = NewException(module, "WireFormatError", base,
                                        "A peer sent bytes that break the wire format.");
  exceptions.communication =
      NewException(module, "CommunicationError", base,
                   "A peer died, did not answer in time, or disagrees about what comes next.");
  exceptions.non_finite = NewException(module, "NonFiniteGradientError", base,
                                       "A gradient held NaN or Inf and the policy is \"raise\".");
  exceptions.divergence =
      NewException(module, "ReplicaDivergence", base, "Ranks hold different results.");

  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 wants a function of this type
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const InvalidArgumentError& error) {
      PyErr_SetString(exceptions.invalid_argument, error.what());
    } catch (const WireFormatError& error) {
      PyErr_SetString(exceptions.wire_format, error.what());
    } catch (const CommunicationError& error) {
      PyErr_SetString(exceptions.communication, error.what());
    } catch (const NonFiniteGradientError& error) {
      PyErr_SetString(exceptions.non_finite, error.what());
    } catch (const ReplicaDivergenceError& error) {
      PyErr_SetString(exceptions.divergence, error.what());
    } catch (const Error& error) {
      PyErr_SetString(exceptions.base, error.what());
    }
  });
}

Span<float> FloatView(const py::array& array, const char* what, bool writable) {
  BITOPK_CHECK_ARG(py::isinstance<py::array_t<float>>(array), what, ": must be float32; got ",
                   std::string(py::str(array.dtype())));
  BITOPK_CHECK_ARG((array.flags() & py::array::c_style) != 0, what, ": must be C-contiguous");
  BITOPK_CHECK_ARG(!writable || array.writeable(), what, ": must be writable");
  return {static_cast<float*>(const_cast<void*>(array.data())),
          static_cast<std::size_t>(array.size())};
}

DType DTypeOf(const py::array& array, const std::string& what) {
  if (py::isinstance<py::array_t<float>>(array)) return DType::kFloat32;
  if (py::isinstance<py::array_t<double>>(array)) return DType::kFloat64;
  if (py::isinstance<py::array_t<std::int32_t>>(array)) return DType::kInt32;
  if (py::isinstance<py::array_t<std::int64_t>>(array)) return DType::kInt64;
  throw InvalidArgumentError(
      what + ": must be float32, float64, int32 or int64 in native byte order; got " +
      std::string(py::str(array.dtype())));
}

}  // namespace bitopk::python
