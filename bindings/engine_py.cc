// SPDX-License-Identifier: Apache-2.0
//
// Engine, and the ways to connect ranks. Every call that can wait releases the GIL.
#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <tuple>

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

/// One tensor of a step: number, gradient, result or None.
using Submission = std::tuple<std::size_t, py::array, std::optional<py::array>>;

// An engine with the arrays of the step under way, which live as long as the engine may touch them,
// whatever Python drops or collects. The GIL is not held while anything waits.
class EngineHandle {
 public:
  explicit EngineHandle(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~EngineHandle() { Close(); }
  EngineHandle(const EngineHandle&) = delete;
  EngineHandle& operator=(const EngineHandle&) = delete;

  Engine& engine() const {
    if (engine_ == nullptr) throw Error("the group was closed");
    return *engine_;
  }

  void Close() {
    {
      const py::gil_scoped_release release;
      engine_.reset();
    }
    arrays_.clear();
  }

  void Register(const std::vector<std::pair<std::string, py::array>>& tensors) {
    std::vector<TensorSpec> specs;
    for (const auto& [name, array] : tensors) {
      specs.push_back({name, static_cast<std::size_t>(array.size()),
                       DTypeOf(array, "tensor \"" + name + "\"")});
    }
    engine().Register(std::move(specs));
  }

  // A whole step in one call, so that no interrupt leaves it half submitted. The step before must
  // be done.
  void StartStep(Op op, double scale, const std::vector<Submission>& submissions) {
    std::vector<TensorSubmission> checked;
    for (const auto& [tensor, gradient, result] : submissions) {
      checked.push_back(Check(tensor, gradient, result));
    }
    {
      const py::gil_scoped_release release;
      engine().BeginStep(op, scale);
    }
    arrays_ = submissions;
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < checked.size(); ++i) {
      engine().Submit(std::get<0>(submissions[i]), checked[i]);
    }
    engine().EndStep();
  }

 private:
  TensorSubmission Check(std::size_t tensor, const py::array& gradient,
                         const std::optional<py::array>& result) const {
    BITOPK_CHECK_ARG(tensor < engine().tensors().size(), "submit: tensor ", tensor, " of ",
                     engine().tensors().size());
    const TensorSpec& spec = engine().tensors()[tensor];
    CheckArray(spec, gradient, "gradient");
    TensorSubmission submission;
    submission.gradient = gradient.data();
    if (result) {
      CheckArray(spec, *result, "result");
      BITOPK_CHECK_ARG(result->writeable(), "result of \"", spec.name, "\": must be writable");
      submission.result = const_cast<void*>(result->data());
    }
    return submission;
  }

  static void CheckArray(const TensorSpec& spec, const py::array& array, const char* what) {
    const std::string where = std::string(what) + " of \"" + spec.name + "\"";
    const DType dtype = DTypeOf(array, where);
    BITOPK_CHECK_ARG(dtype == spec.dtype, where, ": registered as ", DTypeName(spec.dtype),
                     "; got ", DTypeName(dtype));
    BITOPK_CHECK_ARG(static_cast<std::size_t>(array.size()) == spec.num_entries, where,
                     ": registered with ", spec.num_entries, " entries; got ", array.size());
    BITOPK_CHECK_ARG((array.flags() & py::array::c_style) != 0, where, ": must be C-contiguous");
  }

  std::unique_ptr<Engine> engine_;
  std::vector<Submission> arrays_;
};

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
  return std::make_unique<EngineHandle>(std::make_unique<Engine>(bootstrap.Connect(all), config));
}

std::vector<std::unique_ptr<EngineHandle>> InProcessEngines(int world_size, const Config& config,
                                                            double timeout) {
  const py::gil_scoped_release release;
  InProcessGroup group(world_size, Milliseconds(timeout));
  std::vector<std::unique_ptr<EngineHandle>> engines;
  for (int rank = 0; rank < world_size; ++rank) {
    engines.push_back(
        std::make_unique<EngineHandle>(std::make_unique<Engine>(group.communicator(rank), config)));
  }
  return engines;
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
  out["density"] = state.density.density;
  out["density_down"] = state.density_down.density;
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
  state.density.density = py::cast<double>(in["density"]);
  state.density_down.density = py::cast<double>(in["density_down"]);
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
  py::class_<EngineHandle>(module, "Engine")
      .def_property_readonly("rank", [](const EngineHandle& h) { return h.engine().rank(); })
      .def_property_readonly("size", [](const EngineHandle& h) { return h.engine().size(); })
      .def_property_readonly("decisions",
                             [](const EngineHandle& h) { return h.engine().decisions(); })
      .def_property_readonly("warnings",
                             [](const EngineHandle& h) { return h.engine().warnings(); })
      .def("close", &EngineHandle::Close)
      .def("register", &EngineHandle::Register)
      .def("start_step", &EngineHandle::StartStep)
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
      .def("all_gather", [](const EngineHandle& h, const py::bytes& bytes) {
        return AllGather(h.engine(), bytes);
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
        return std::make_unique<EngineHandle>(std::make_unique<Engine>(
            ConnectThroughFileStore(directory, rank, size, Options(interface, hostname, timeout)),
            config));
      },
      py::arg("directory"), py::arg("rank"), py::arg("size"), py::arg("interface"),
      py::arg("hostname"), py::arg("timeout"), py::arg("config"));
}

}  // namespace bitopk::python
