// SPDX-License-Identifier: Apache-2.0
//
// What the binding files share: one registration function per area, and checked views of NumPy
// arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "bitopk/kernels/error.h"
#include "bitopk/kernels/span.h"
#include "bitopk/tensor.h"

namespace bitopk::python {

void RegisterErrors(pybind11::module_& module);
void RegisterTopK(pybind11::module_& module);
void RegisterConfig(pybind11::module_& module);
void RegisterEngine(pybind11::module_& module);
void RegisterLentCommunicator(pybind11::module_& module);

/// The array's memory as float32. Nothing is converted or copied.
/// @throws InvalidArgumentError  unless it is float32, C-contiguous, in native byte order (and
/// writable if asked).
Span<float> FloatView(const pybind11::array& array, const char* what, bool writable);

/// A new array of shape [count], not initialised. The strides are given because pybind11
/// before 2.12 reads an element size of 0 from NumPy 2.
template <typename T>
pybind11::array_t<T> NewArray(std::size_t count) {
  return pybind11::array_t<T>({static_cast<pybind11::ssize_t>(count)},
                              {static_cast<pybind11::ssize_t>(sizeof(T))});
}

/// DType of an array. @throws InvalidArgumentError if the engine has none for it.
DType DTypeOf(const pybind11::array& array, const std::string& what);

}  // namespace bitopk::python
