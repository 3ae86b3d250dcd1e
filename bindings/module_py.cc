// SPDX-License-Identifier: Apache-2.0
//
// The Python module bitopk._core.
#include "bindings.h"
#include "bitopk/version.h"

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = bitopk::Version();
  bitopk::python::RegisterErrors(module);
  bitopk::python::RegisterTopK(module);
  bitopk::python::RegisterConfig(module);
  bitopk::python::RegisterEngine(module);
  bitopk::python::RegisterLentCommunicator(module);
}
