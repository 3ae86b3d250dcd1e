// SPDX-License-Identifier: Apache-2.0
//
// Engine, and the ways to connect ranks. Every call that can wait releases the GIL.
#include <pybind11/stl.h>

#include <chrono>

#include "bindings.h"
#include "bitopk/engine.h"
#include "bitopk/gloo_communicator.h"
#include "bitopk/in_process.h"

namespace bitopk::python {
namespace py = pybind11;

namespace {

std::chrono::milliseconds Milliseconds(double seconds) {
  BITOPK_CHECK_ARG(seconds > 0.0 && seconds < 1e9,
                   "timeout: must be a positive number of seconds; got ", seconds);
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
}

std::vector<std::uint8_t> FromBytes(const py::bytes& bytes) {
  const std::string_view view = bytes;
  return {view.begin(), view.end()};
}

py::bytes ToBytes(const std::vector<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

GlooOptions Options(const std::string& interface, const std::string& hostname, double timeout) {
  GlooOptions options;
  options.interface = interface;
  options.hostname = hostname;
  options.timeout = Milliseconds(timeout);
  return options;
}

std::unique_ptr<Engine> ConnectBootstrap(GlooBootstrap& bootstrap,
                                         const std::vector<py::bytes>& addresses,
                                         const Config& config) {
  std::vector<std::vector<std::uint8_t>> all;
  for (const py::bytes& address : addresses) all.push_back(FromBytes(address));
  const py::gil_scoped_release release;
  return std::make_unique<Engine>(bootstrap.Connect(all), config);
}

std::vector<std::unique_ptr<Engine>> InProcessEngines(int world_size, const Config& config,
                                                      double timeout) {
  const py::gil_scoped_release release;
  InProcessGroup group(world_size, Milliseconds(timeout));
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank = 0; rank < world_size; ++rank) {
    engines.push_back(std::make_unique<Engine>(group.communicator(rank), config));
  }
  return engines;
}

void Register(Engine& engine, const std::vector<std::pair<std::string, py::array>>& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, array] : tensors) {
    specs.push_back(
        {name, static_cast<std::size_t>(array.size()), DTypeOf(array, "tensor \"" + name + "\"")});
  }
  engine.Register(std::move(specs));
}

// The caller keeps both arrays alive until the step is done.
void Submit(Engine& engine, std::size_t tensor, const py::array& gradient,
            const std::optional<py::array>& result) {
  BITOPK_CHECK_ARG(tensor < engine.tensors().size(), "submit: tensor ", tensor, " of ",
                   engine.tensors().size());
  const TensorSpec& spec = engine.tensors()[tensor];
  const auto check = [&](const py::array& array, const char* what) {
    const std::string where = std::string(what) + " of \"" + spec.name + "\"";
    const DType dtype = DTypeOf(array, where);
    BITOPK_CHECK_ARG(dtype == spec.dtype, where, ": registered as ", DTypeName(spec.dtype),
                     "; got ", DTypeName(dtype));
    BITOPK_CHECK_ARG(static_cast<std::size_t>(array.size()) == spec.num_entries, where,
                     ": registered with ", spec.num_entries, " entries; got ", array.size());
    BITOPK_CHECK_ARG((array.flags() & py::array::c_style) != 0, where, ": must be C-contiguous");
  };
  check(gradient, "gradient");
  TensorSubmission submission;
  submission.gradient = gradient.data();
  if (result) {
    check(*result, "result");
    BITOPK_CHECK_ARG(result->writeable(), "result of \"", spec.name, "\": must be writable");
    submission.result = const_cast<void*>(result->data());
  }
  engine.Submit(tensor, submission);
}

py::object ArrayOrNone(const std::vector<float>& values) {
  if (values.empty()) return py::none();
  return py::array_t<float>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::vector<float> VectorOf(const py::object& array) {
  if (array.is_none()) return {};
  const Span<float> view =
      FloatView(py::cast<py::array>(array), "state: memory", /*writable=*/false);
  return {view.begin(), view.end()};
}

py::dict SaveState(Engine& engine) {
  EngineState state;
  {
    const py::gil_scoped_release release;
    state = engine.SaveState();
  }
  py::dict out;
  out["rank"] = state.rank;
  out["world_size"] = state.world_size;
  out["description"] = state.description;
  out["scale"] = state.scale;
  out["schedule_step"] = state.schedule_step;
  py::list worker;
  for (const auto& memory : state.worker_memory) worker.append(ArrayOrNone(memory));
  out["worker_memory"] = worker;
  py::list server;
  for (const auto& memory : state.server_memory) server.append(ArrayOrNone(memory));
  out["server_memory"] = server;
  return out;
}

void LoadState(Engine& engine, const py::dict& in) {
  EngineState state;
  state.rank = py::cast<int>(in["rank"]);
  state.world_size = py::cast<int>(in["world_size"]);
  state.description = py::cast<std::string>(in["description"]);
  state.scale = py::cast<double>(in["scale"]);
  state.schedule_step = py::cast<std::uint64_t>(in["schedule_step"]);
  for (const py::handle memory : py::cast<py::list>(in["worker_memory"])) {
    state.worker_memory.push_back(VectorOf(py::reinterpret_borrow<py::object>(memory)));
  }
  for (const py::handle memory : py::cast<py::list>(in["server_memory"])) {
    state.server_memory.push_back(VectorOf(py::reinterpret_borrow<py::object>(memory)));
  }
  const py::gil_scoped_release release;
  engine.LoadState(state);
}

py::dict StatsDict(Engine& engine) {
  Stats stats;
  {
    const py::gil_scoped_release release;
    stats = engine.stats();
  }
  py::dict out;
  out["steps"] = stats.steps;
  out["dropped_steps"] = stats.dropped_steps;
  out["bytes_sent"] = stats.bytes_sent;
  out["bytes_received"] = stats.bytes_received;
  out["entries_up"] = stats.entries_up;
  out["entries_down"] = stats.entries_down;
  out["dense_bytes"] = stats.dense_bytes;
  out["compression_ratio"] = stats.compression_ratio();
  out["contraction_up"] = stats.contraction_up;
  out["contraction_down"] = stats.contraction_down;
  out["residual_norm"] = stats.residual_norm;
  py::dict seconds;
  for (std::size_t stage = 0; stage < kNumStages; ++stage) {
    seconds[StageName(static_cast<Stage>(stage))] = stats.seconds[stage];
  }
  out["seconds"] = seconds;
  return out;
}

py::list GatherServerMemory(Engine& engine) {
  std::vector<std::vector<float>> whole;
  {
    const py::gil_scoped_release release;
    whole = engine.GatherServerMemory();
  }
  py::list out;
  for (const auto& memory : whole) out.append(ArrayOrNone(memory));
  return out;
}

std::vector<py::bytes> AllGather(Engine& engine, const py::bytes& bytes) {
  const std::vector<std::uint8_t> own = FromBytes(bytes);
  std::vector<std::vector<std::uint8_t>> parts;
  {
    const py::gil_scoped_release release;
    parts = engine.AllGather(own);
  }
  std::vector<py::bytes> out;
  for (const auto& part : parts) out.push_back(ToBytes(part));
  return out;
}

// (ranks, what, seconds) of the wait under way.
py::tuple WaitingTuple(const Engine& engine) {
  const Communicator::Waiting waiting = engine.waiting();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - waiting.since).count();
  return py::make_tuple(waiting.ranks, waiting.what, waiting.ranks.empty() ? 0.0 : seconds);
}

}  // namespace

void RegisterEngine(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Engine>(module, "Engine")
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("size", &Engine::size)
      .def("register", &Register)
      .def("begin_step", &Engine::BeginStep, Release())
      .def("submit", &Submit, py::arg("tensor"), py::arg("gradient").noconvert(),
           py::arg("result").noconvert())
      .def("end_step", &Engine::EndStep)
      .def("is_completed", py::overload_cast<>(&Engine::IsCompleted, py::const_))
      .def("is_tensor_completed", py::overload_cast<std::size_t>(&Engine::IsCompleted, py::const_))
      .def("wait_for",
           [](Engine& engine, double seconds) {
             const py::gil_scoped_release release;
             return engine.WaitFor(Milliseconds(seconds));
           })
      .def("commit", &Engine::Commit, Release())
      .def("rollback", &Engine::Rollback, Release())
      .def("read_worker_memory",
           [](Engine& engine, std::size_t tensor, const py::array& out) {
             const Span<float> view = FloatView(out, "read_worker_memory: out", /*writable=*/true);
             const py::gil_scoped_release release;
             engine.ReadWorkerMemory(tensor, view);
           })
      .def("read_server_share",
           [](Engine& engine, std::size_t tensor, const py::array& out) {
             const Span<float> view = FloatView(out, "read_server_share: out", /*writable=*/true);
             const py::gil_scoped_release release;
             engine.ReadServerShare(tensor, view);
           })
      .def("gather_server_memory", &GatherServerMemory)
      .def("set_density", &Engine::SetDensity, Release())
      .def("save_state", &SaveState)
      .def("load_state", &LoadState)
      .def("stats", &StatsDict)
      .def_property_readonly("decisions", &Engine::decisions)
      .def_property_readonly("warnings", &Engine::warnings)
      .def("waiting", &WaitingTuple)
      .def("all_gather", &AllGather);

  py::class_<GlooBootstrap>(module, "GlooBootstrap")
      .def(py::init([](int rank, int size, const std::string& interface,
                       const std::string& hostname, double timeout) {
             return std::make_unique<GlooBootstrap>(rank, size,
                                                    Options(interface, hostname, timeout));
           }),
           py::arg("rank"), py::arg("size"), py::arg("interface"), py::arg("hostname"),
           py::arg("timeout"))
      .def_property_readonly("address", [](const GlooBootstrap& b) { return ToBytes(b.address()); })
      .def_property_readonly("interface_description", &GlooBootstrap::interface_description)
      .def("connect", &ConnectBootstrap, py::arg("addresses"), py::arg("config"));

  module.def("in_process_engines", &InProcessEngines, py::arg("world_size"), py::arg("config"),
             py::arg("timeout"));
  module.def(
      "connect_file_store",
      [](const std::string& directory, int rank, int size, const std::string& interface,
         const std::string& hostname, double timeout, const Config& config) {
        const py::gil_scoped_release release;
        return std::make_unique<Engine>(
            ConnectThroughFileStore(directory, rank, size, Options(interface, hostname, timeout)),
            config);
      },
      py::arg("directory"), py::arg("rank"), py::arg("size"), py::arg("interface"),
      py::arg("hostname"), py::arg("timeout"), py::arg("config"));
}

}  // namespace bitopk::python
