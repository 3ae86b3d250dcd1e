// SPDX-License-Identifier: Apache-2.0
//
// bitopk.topk: the selection alone.
#include <cstring>

#include "bindings.h"
#include "bitopk/environment.h"
#include "bitopk/kernels/topk.h"

namespace bitopk::python {
namespace py = pybind11;

void RegisterTopK(py::module_& module) {
  module.def(
      "topk",
      [](const py::array& x, std::size_t k) {
        BITOPK_CHECK_ARG(x.ndim() == 1, "topk: x must be 1-D; got dimensions: ", x.ndim());
        const Span<const float> view = FloatView(x, "topk: x", /*writable=*/false);
        kernels::TopKWorkspace workspace(WithEnvironment(Config()).isa);
        kernels::SelectedEntries selected;
        {
          const py::gil_scoped_release release;
          selected = kernels::SelectTopK(view, k, workspace);
        }
        auto indices = NewArray<std::uint32_t>(selected.indices.size());
        auto values = NewArray<float>(selected.values.size());
        if (!selected.indices.empty()) {
          std::memcpy(indices.mutable_data(), selected.indices.data(),
                      selected.indices.size() * sizeof(std::uint32_t));
          std::memcpy(values.mutable_data(), selected.values.data(),
                      selected.values.size() * sizeof(float));
        }
        return py::make_tuple(indices, values);
      },
      py::arg("x").noconvert(), py::arg("k"));
  // The target that the kernels in use were compiled for, as proof of what BITOPK_ISA did.
  module.def("compiled_for", [] {
    return std::string(kernels::TopKWorkspace(WithEnvironment(Config()).isa).compiled_for());
  });
  module.def("supported_isas", [] {
    py::list names;
    for (const kernels::Isa isa : kernels::SupportedIsas()) names.append(kernels::IsaName(isa));
    return names;
  });
}

}  // namespace bitopk::python
