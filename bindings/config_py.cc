// SPDX-License-Identifier: Apache-2.0
//
// Config and CompressionSpec as Python objects; filled by bitopk/_settings.py from a
// bitopk.Compression.
#include <pybind11/stl.h>

#include "bindings.h"
#include "bitopk/config.h"
#include "bitopk/environment.h"

namespace bitopk::python {
namespace py = pybind11;

void RegisterConfig(py::module_& module) {
  py::enum_<Op>(module, "Op").value("average", Op::kAverage).value("sum", Op::kSum);
  py::enum_<Method>(module, "Method").value("topk", Method::kTopK).value("dense", Method::kDense);
  py::enum_<Scope>(module, "Scope")
      .value("tensor", Scope::kTensor)
      .value("global_", Scope::kGlobal);
  py::enum_<ExchangeKind>(module, "Exchange")
      .value("auto", ExchangeKind::kAuto)
      .value("allgather", ExchangeKind::kAllgather)
      .value("sharded", ExchangeKind::kSharded)
      .value("dense", ExchangeKind::kDense);
  py::enum_<NonFinitePolicy>(module, "NonFinite")
      .value("propagate", NonFinitePolicy::kPropagate)
      .value("skip", NonFinitePolicy::kSkip)
      .value("raise_", NonFinitePolicy::kRaise);
  py::enum_<kernels::ValueFormat>(module, "ValueFormat")
      .value("float32", kernels::ValueFormat::kFloat32)
      .value("float16", kernels::ValueFormat::kFloat16)
      .value("bfloat16", kernels::ValueFormat::kBfloat16);

  module.def("matches_pattern", &MatchesPattern, py::arg("pattern"), py::arg("name"));

  py::class_<CompressionSpec>(module, "CompressionSpec")
      .def(py::init<>())
      .def_readwrite("method", &CompressionSpec::method)
      .def_property(
          "density", [](const CompressionSpec& s) { return s.up.density; },
          [](CompressionSpec& s, double density) { s.up.density = density; })
      .def_property(
          "density_down", [](const CompressionSpec& s) { return s.down.density; },
          [](CompressionSpec& s, double density) { s.down.density = density; })
      .def_property(
          "k", [](const CompressionSpec& s) { return s.up.k; },
          [](CompressionSpec& s, std::uint64_t k) { s.up.k = k; })
      .def_property(
          "k_down", [](const CompressionSpec& s) { return s.down.k; },
          [](CompressionSpec& s, std::uint64_t k) { s.down.k = k; })
      .def_readwrite("scope", &CompressionSpec::scope)
      .def_readwrite("value_format", &CompressionSpec::value_format)
      .def_readwrite("exchange", &CompressionSpec::exchange)
      .def_readwrite("dense_fallback", &CompressionSpec::dense_fallback)
      .def_readwrite("worker_memory", &CompressionSpec::worker_memory)
      .def_readwrite("server_memory", &CompressionSpec::server_memory)
      .def_readwrite("memory_decay", &CompressionSpec::memory_decay)
      .def_readwrite("start_step", &CompressionSpec::start_step)
      .def_readwrite("dense_below", &CompressionSpec::dense_below);

  py::class_<Config>(module, "Config")
      .def(py::init([] { return WithEnvironment(Config()); }))
      .def_readwrite("spec", &Config::spec)
      .def_readwrite("nonfinite", &Config::nonfinite)
      .def_readwrite("seed", &Config::seed)
      .def_readwrite("bucket_bytes", &Config::bucket_bytes)
      .def_readwrite("check_every", &Config::check_every)
      .def_property_readonly("isa",
                             [](const Config& c) { return std::string(kernels::IsaName(c.isa)); })
      .def("add_rule", [](Config& config, const std::string& pattern, const CompressionSpec& spec) {
        config.rules.push_back({pattern, spec});
      });
}

}  // namespace bitopk::python
