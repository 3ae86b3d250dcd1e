// SPDX-License-Identifier: Apache-2.0
//
// Engine, and the ways to connect ranks. Every call that can wait releases the GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "bindings.h"
#include "bitopk/engine.h"
#include "bitopk/gloo_communicator.h"
#include "bitopk/in_process.h"
#include "engine_handle.h"

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

// One step of several ranks of this process: an interrupt cannot come between them.
void StartSteps(const std::vector<EngineHandle*>& handles, Op op, double scale,
                const std::vector<std::vector<Submission>>& submissions) {
  for (std::size_t rank = 0; rank < handles.size(); ++rank) {
    handles[rank]->StartStep(op, scale, submissions.at(rank));
  }
}

std::unique_ptr<EngineHandle> ConnectBootstrap(GlooBootstrap& bootstrap,
                                               const std::vector<py::bytes>& addresses,
                                               const Config& config) {
  std::vector<std::vector<std::uint8_t>> all;
  for (const py::bytes& address : addresses) all.push_back(FromBytes(address));
  const py::gil_scoped_release release;
  return std::make_unique<EngineHandle>(bootstrap.Connect(all), config);
}

std::vector<std::unique_ptr<EngineHandle>> InProcessEngines(int world_size, const Config& config,
                                                            double timeout) {
  InProcessGroup group(world_size, Milliseconds(timeout));
  std::vector<std::unique_ptr<EngineHandle>> engines;  // needs the GIL where it dies
  for (int rank = 0; rank < world_size; ++rank) {
    const py::gil_scoped_release release;
    engines.push_back(std::make_unique<EngineHandle>(group.communicator(rank), config));
  }
  return engines;
}

py::object ArrayOrNone(const std::vector<float>& values) {
  if (values.empty()) return py::none();
  auto array = NewArray<float>(values.size());
  std::copy(values.begin(), values.end(), array.mutable_data());
  return std::move(array);
}

std::vector<float> VectorOf(const py::object& array) {
  if (array.is_none()) return {};
  const Span<float> view =
      FloatView(py::cast<py::array>(array), "state: memory", /*writable=*/false);
  return {view.begin(), view.end()};
}

// Memories by name, without those that do not exist.
py::dict ByName(const Engine& engine, const std::vector<std::vector<float>>& memories) {
  py::dict out;
  for (std::size_t tensor = 0; tensor < memories.size(); ++tensor) {
    if (!memories[tensor].empty())
      out[py::str(engine.tensors()[tensor].name)] = ArrayOrNone(memories[tensor]);
  }
  return out;
}

std::vector<std::vector<float>> ByNumber(const Engine& engine, const py::dict& memories) {
  std::map<std::string, std::size_t> numbers;
  for (std::size_t i = 0; i < engine.tensors().size(); ++i) numbers[engine.tensors()[i].name] = i;
  std::vector<std::vector<float>> out(engine.tensors().size());
  for (const auto& [key, array] : memories) {
    const auto found = numbers.find(py::cast<std::string>(key));
    BITOPK_CHECK_ARG(found != numbers.end(), "load_state: the state has a memory of \"",
                     py::cast<std::string>(key), "\", which is no tensor of this engine");
    out[found->second] = VectorOf(py::reinterpret_borrow<py::object>(array));
  }
  return out;
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
  out["tensors"] = state.tensors;
  out["settings"] = state.settings;
  out["density"] = state.density.density;
  out["density_down"] = state.density_down.density;
  out["scale"] = state.scale;
  out["tensor_scales"] = state.tensor_scales;
  out["schedule_step"] = state.schedule_step;
  out["worker_memory"] = ByName(engine, state.worker_memory);
  out["server_memory"] = ByName(engine, state.server_memory);
  py::dict layout;
  for (std::size_t tensor = 0; tensor < engine.tensors().size(); ++tensor) {
    if (state.server_memory[tensor].empty() && engine.tensors()[tensor].num_entries == 0) continue;
    const ServerLayout part = engine.server_layout(tensor);
    py::list fields;
    for (const std::uint64_t field : {part.block, part.owners, part.first_owner, part.offset})
      fields.append(field);
    layout[py::str(engine.tensors()[tensor].name)] = fields;
  }
  out["server_layout"] = layout;
  return out;
}

void LoadState(Engine& engine, const py::dict& in) {
  EngineState state;
  state.rank = py::cast<int>(in["rank"]);
  state.world_size = py::cast<int>(in["world_size"]);
  state.tensors = py::cast<std::string>(in["tensors"]);
  state.settings = py::cast<std::string>(in["settings"]);
  state.density.density = py::cast<double>(in["density"]);
  state.density_down.density = py::cast<double>(in["density_down"]);
  state.scale = py::cast<double>(in["scale"]);
  state.tensor_scales = py::cast<std::vector<double>>(in["tensor_scales"]);
  state.schedule_step = py::cast<std::uint64_t>(in["schedule_step"]);
  state.worker_memory = ByNumber(engine, py::cast<py::dict>(in["worker_memory"]));
  state.server_memory = ByNumber(engine, py::cast<py::dict>(in["server_memory"]));
  state.whole_server_memory = py::cast<bool>(in["whole_server_memory"]);
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

std::vector<py::bytes> ToByteList(const std::vector<std::vector<std::uint8_t>>& parts) {
  std::vector<py::bytes> out;
  for (const auto& part : parts) out.push_back(ToBytes(part));
  return out;
}

std::vector<py::bytes> AllGather(Engine& engine, const py::bytes& bytes) {
  const std::vector<std::uint8_t> own = FromBytes(bytes);
  std::vector<std::vector<std::uint8_t>> parts;
  {
    const py::gil_scoped_release release;
    parts = engine.AllGather(own);
  }
  return ToByteList(parts);
}

std::vector<py::bytes> AllToAll(Engine& engine, const std::vector<py::bytes>& own) {
  std::vector<std::vector<std::uint8_t>> parts;
  for (const py::bytes& part : own) parts.push_back(FromBytes(part));
  {
    const py::gil_scoped_release release;
    parts = engine.AllToAll(parts);
  }
  return ToByteList(parts);
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
  py::class_<EngineHandle>(module, "Engine")
      .def_property_readonly("rank", [](const EngineHandle& h) { return h.engine().rank(); })
      .def_property_readonly("size", [](const EngineHandle& h) { return h.engine().size(); })
      .def_property_readonly("decisions",
                             [](const EngineHandle& h) { return h.engine().decisions(); })
      .def_property_readonly("settings",
                             [](const EngineHandle& h) { return h.engine().config().Describe(); })
      .def_property_readonly("warnings",
                             [](const EngineHandle& h) { return h.engine().warnings(); })
      .def("close", &EngineHandle::Close)
      .def_property_readonly("schedule_step",
                             [](const EngineHandle& h) {
                               const py::gil_scoped_release release;
                               return h.engine().schedule_step();
                             })
      .def("sibling",
           [](const EngineHandle& h, const Config& config) {
             const py::gil_scoped_release release;
             return h.Sibling(config);
           })
      .def("register", &EngineHandle::Register)
      .def("start_step", &EngineHandle::StartStep)
      .def("begin_step", &EngineHandle::BeginStep)
      .def("submit",
           [](EngineHandle& h, std::size_t tensor, const py::array& gradient,
              const std::optional<py::array>& result) {
             h.Submit({tensor, gradient, result});
           })
      .def("end_step", &EngineHandle::EndStep)
      .def("is_completed", [](const EngineHandle& h) { return h.engine().IsCompleted(); })
      .def("wait_for",
           [](const EngineHandle& h, double seconds) {
             const py::gil_scoped_release release;
             return h.engine().WaitFor(Milliseconds(seconds));
           })
      .def("commit",
           [](const EngineHandle& h) {
             const py::gil_scoped_release release;
             h.engine().Commit();
           })
      .def("rollback",
           [](const EngineHandle& h) {
             const py::gil_scoped_release release;
             h.engine().Rollback();
           })
      .def("return_to_worker_memory",
           [](const EngineHandle& h, std::size_t tensor, const py::array& values, float factor) {
             const Span<float> view =
                 FloatView(values, "return_to_worker_memory: values", /*writable=*/false);
             const py::gil_scoped_release release;
             return h.engine().ReturnToWorkerMemory(tensor, view, factor);
           })
      .def("read_worker_memory",
           [](const EngineHandle& h, std::size_t tensor, const py::array& out) {
             const Span<float> view = FloatView(out, "read_worker_memory: out", /*writable=*/true);
             const py::gil_scoped_release release;
             h.engine().ReadWorkerMemory(tensor, view);
           })
      .def("read_server_share",
           [](const EngineHandle& h, std::size_t tensor, const py::array& out) {
             const Span<float> view = FloatView(out, "read_server_share: out", /*writable=*/true);
             const py::gil_scoped_release release;
             h.engine().ReadServerShare(tensor, view);
           })
      .def("gather_server_memory",
           [](const EngineHandle& h) { return GatherServerMemory(h.engine()); })
      .def("set_density",
           [](const EngineHandle& h, double density, double density_down) {
             const py::gil_scoped_release release;
             h.engine().SetDensity(density, density_down);
           })
      .def("save_state", [](const EngineHandle& h) { return SaveState(h.engine()); })
      .def("load_state",
           [](const EngineHandle& h, const py::dict& state) { LoadState(h.engine(), state); })
      .def("stats", [](const EngineHandle& h) { return StatsDict(h.engine()); })
      .def("waiting", [](const EngineHandle& h) { return WaitingTuple(h.engine()); })
      .def("measure_network",
           [](const EngineHandle& h, std::size_t payload_bytes) {
             std::vector<LinkSpeed> links;
             {
               const py::gil_scoped_release release;
               links = h.engine().MeasureNetwork(payload_bytes);
             }
             py::list out;
             for (const LinkSpeed& link : links)
               out.append(py::make_tuple(link.latency_seconds, link.send_bytes_per_second));
             return out;
           })
      .def("abort",
           [](const EngineHandle& h, const std::string& reason) {
             const py::gil_scoped_release release;
             h.engine().Abort(reason);
           })
      .def("all_gather", [](const EngineHandle& h,
                            const py::bytes& bytes) { return AllGather(h.engine(), bytes); })
      .def("all_to_all", [](const EngineHandle& h, const std::vector<py::bytes>& parts) {
        return AllToAll(h.engine(), parts);
      });
  module.def("start_steps", &StartSteps);

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
        return std::make_unique<EngineHandle>(
            ConnectThroughFileStore(directory, rank, size, Options(interface, hostname, timeout)),
            config);
      },
      py::arg("directory"), py::arg("rank"), py::arg("size"), py::arg("interface"),
      py::arg("hostname"), py::arg("timeout"), py::arg("config"));
}

}  // namespace bitopk::python
