// SPDX-License-Identifier: Apache-2.0
#include "bitopk/engine.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "bitopk/kernels/error.h"
#include "plugin/src/agreement.h"
#include "plugin/src/exchange.h"

namespace bitopk {
namespace {

constexpr std::size_t kMaxUserBytes = std::size_t{1} << 40;

// Where parts of a unit's memory lie in a tensor's array.
void CopyMemory(const UnitTensor& part, Span<const float> memory, Span<float> out) {
  if (part.num_entries == 0) return;
  if (memory.empty()) {
    std::fill(out.begin(), out.end(), 0.0F);
  } else {
    std::memcpy(out.data(), memory.data() + part.offset, part.num_entries * sizeof(float));
  }
}

double SumOfSquares(Span<const float> values) {
  double total = 0.0;
  for (const float value : values) total += static_cast<double>(value) * value;
  return total;
}

}  // namespace

class Engine::Impl {
 public:
  Impl(std::unique_ptr<Communicator> communicator, Config config)
      : comm_(std::move(communicator)), config_(std::move(config)), workspace_(config_.isa) {
    config_.Validate();
    thread_ = std::thread([this] { Serve(); });
  }

  ~Impl() {
    bool busy;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      busy = running_ || !tasks_.empty();
      tasks_.clear();
    }
    if (busy)
      comm_->Abort(internal::StrCat("rank ", comm_->rank(), " closed its engine during a step"));
    changed_.notify_all();
    thread_.join();
  }

  void Register(std::vector<TensorSpec> tensors) {
    BITOPK_CHECK_ARG(!registered_, "Engine::Register: tensors were registered before (rank ",
                     comm_->rank(), " of ", comm_->size(), ")");
    std::set<std::string> names;
    for (const TensorSpec& tensor : tensors) {
      BITOPK_CHECK_ARG(names.insert(tensor.name).second,
                       "Engine::Register: two tensors are called \"", tensor.name, "\"");
    }
    plan_ = MakePlan(tensors, config_, comm_->rank(), comm_->size());
    ApplyDensity();
    tensors_ = std::move(tensors);
    registered_ = true;
    submissions_.resize(tensors_.size());
    submitted_.assign(tensors_.size(), 0);
    missing_.assign(plan_.buckets.size(), 0);
    bucket_done_.assign(plan_.buckets.size(), 0);
    for (const TensorSpec& tensor : tensors_)
      dense_bytes_ += tensor.num_entries * DTypeBytes(tensor.dtype);
    Post([this] {
      AgreeOnDescription(*comm_, config_.Describe() + '\n' + DescribeTensors(tensors_),
                         workspace_.uplink);
    });
  }

  void BeginStep(Op op, double scale, Span<const double> tensor_scales) {
    BITOPK_CHECK_ARG(registered_, "Engine::BeginStep: register tensors first");
    CheckScales(scale, tensor_scales);
    BITOPK_CHECK_ARG(steps_begun_ == 0 || op == op_,
                     "Engine::BeginStep: the operation was fixed as ",
                     op_ == Op::kAverage ? "average" : "sum", " by the first step; got ",
                     op == Op::kAverage ? "average" : "sum");
    Wait();
    CheckScaleRatios(scale, tensor_scales);  // before the commit: a refused call changes nothing
    CommitPending();
    op_ = op;
    pending_scale_ = scale;
    for (Unit& unit : plan_.units) unit.pending_scale = UnitScale(unit, scale, tensor_scales);
    ++steps_begun_;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open_ = true;
      step_done_ = false;
      std::fill(submissions_.begin(), submissions_.end(), TensorSubmission{});
      std::fill(submitted_.begin(), submitted_.end(), 0);
      std::fill(bucket_done_.begin(), bucket_done_.end(), 0);
      std::fill(missing_.begin(), missing_.end(), 0);
      for (const std::size_t bucket : plan_.bucket_of_tensor) ++missing_[bucket];
    }
    Post([this] { RunStep(); });
  }

  void Submit(std::size_t tensor, const TensorSubmission& submission) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!open_ && error_ != nullptr) return;  // the step failed meanwhile; Wait tells
      BITOPK_CHECK_ARG(open_, "Engine::Submit: no step is open");
      BITOPK_CHECK_ARG(tensor < tensors_.size(), "Engine::Submit: tensor ", tensor, " of ",
                       tensors_.size());
      BITOPK_CHECK_ARG(submitted_[tensor] == 0, "Engine::Submit: \"", tensors_[tensor].name,
                       "\" was submitted before in this step");
      submissions_[tensor] = submission;
      submitted_[tensor] = 1;
      if (--missing_[plan_.bucket_of_tensor[tensor]] > 0) return;
    }
    changed_.notify_all();
  }

  void EndStep() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!open_ && error_ != nullptr) return;  // the step failed meanwhile; Wait tells
      BITOPK_CHECK_ARG(open_, "Engine::EndStep: no step is open");
      open_ = false;
    }
    changed_.notify_all();
  }

  bool IsCompleted(std::size_t tensor) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return step_done_ || bucket_done_.at(plan_.bucket_of_tensor.at(tensor)) != 0;
  }
  bool IsCompleted() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Idle();
  }

  void Wait() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      CheckEnded();
      changed_.wait(lock, [this] { return Idle(); });
    }
    RethrowError();
  }

  bool WaitFor(std::chrono::milliseconds duration) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      CheckEnded();
      if (!changed_.wait_for(lock, duration, [this] { return Idle(); })) return false;
    }
    RethrowError();
    return true;
  }

  void Commit() {
    WaitIdle();
    CommitPending();
  }

  void Rollback() {
    WaitIdle();
    DropPending();
  }

  bool ReturnToWorkerMemory(std::size_t tensor, Span<const float> values, float factor) {
    const UnitTensor& part = PartOf(tensor, values.size(), "ReturnToWorkerMemory");
    WaitIdle();
    Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    if (!unit.compressed || !unit.spec.worker_memory) return false;
    float* const memory = unit.worker.latest() + part.offset;
    for (std::size_t i = 0; i < values.size(); ++i) memory[i] += values[i] * factor;
    return true;
  }

  void ReadWorkerMemory(std::size_t tensor, Span<float> out) {
    const UnitTensor& part = PartOf(tensor, out.size(), "ReadWorkerMemory");
    WaitIdle();
    const Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    CopyMemory(part, unit.compressed ? unit.worker.view() : Span<const float>(), out);
  }

  void ReadServerShare(std::size_t tensor, Span<float> out) {
    const UnitTensor& part = PartOf(tensor, out.size(), "ReadServerShare");
    WaitIdle();
    const Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    if (unit.compressed) AddShare(unit, part, ShareNumber(unit), unit.server.memory(), out);
  }

  std::vector<std::vector<float>> GatherServerMemory() {
    CheckUsable();
    std::vector<std::uint8_t> own;
    WaitIdle();
    for (const Unit& unit : plan_.units) {
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(unit.server.memory().data());
      const std::size_t positions =
          unit.compressed ? unit.shares.NumPositions(ShareNumber(unit)) : 0;
      if (unit.server.memory().empty()) {
        own.insert(own.end(), positions * sizeof(float), 0);
      } else {
        own.insert(own.end(), bytes, bytes + positions * sizeof(float));
      }
    }
    const auto parts = AllGather(own);
    std::vector<std::vector<float>> whole(tensors_.size());
    for (std::size_t owner = 0; owner < parts.size(); ++owner) AddOwner(owner, parts[owner], whole);
    return whole;
  }

  void SetDensity(double density, double density_down) {
    WaitIdle();
    BITOPK_CHECK_ARG(density > 0.0 && density <= 1.0,
                     "Engine::SetDensity: density must be in (0, 1]; got ", density);
    BITOPK_CHECK_ARG(density_down > 0.0 && density_down <= 1.0,
                     "Engine::SetDensity: density_down must be in (0, 1]; got ", density_down);
    density_ = {density, 0};
    density_down_ = {density_down, 0};
    ApplyDensity();
  }

  std::uint64_t schedule_step() {
    WaitIdle();
    return schedule_step_ + (pending_ ? 1 : 0);
  }

  EngineState SaveState() {
    WaitIdle();
    EngineState state;
    state.rank = comm_->rank();
    state.world_size = comm_->size();
    state.density = density_;
    state.density_down = density_down_;
    state.tensors = DescribeTensors(tensors_);
    state.settings = config_.Describe();
    state.scale = pending_ ? pending_scale_ : scale_;
    state.schedule_step = schedule_step_ + (pending_ ? 1 : 0);
    state.worker_memory.resize(tensors_.size());
    state.server_memory.resize(tensors_.size());
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      const Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
      if (state.scale > 0.0) {
        const double unit_scale = pending_ ? unit.pending_scale : unit.scale;
        state.tensor_scales.push_back(unit.compressed ? unit_scale / state.scale : 1.0);
      }
      const UnitTensor& part = PartOf(tensor, tensors_[tensor].num_entries, "SaveState");
      if (unit.compressed && unit.worker.in_use()) {
        state.worker_memory[tensor].resize(part.num_entries);
        CopyMemory(part, unit.worker.view(), state.worker_memory[tensor]);
      }
      const Span<const float> share = unit.server.memory();
      if (unit.compressed && !share.empty()) {
        ForEachServed(unit, part, [&](std::size_t, std::size_t position, std::size_t count) {
          state.server_memory[tensor].insert(state.server_memory[tensor].end(),
                                             share.begin() + position,
                                             share.begin() + position + count);
        });
      }
    }
    return state;
  }

  void LoadState(const EngineState& state) {
    BITOPK_CHECK_ARG(registered_, "Engine::LoadState: register tensors first");
    WaitIdle();
    CheckState(state);
    DropPending();
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) LoadTensor(state, tensor);
    for (Unit& unit : plan_.units) {
      // A step may have filled it, whatever start_step was then. Equal on all ranks.
      unit.memory_in_use = unit.compressed && state.schedule_step > 0;
      unit.scale = UnitScale(unit, state.scale, state.tensor_scales);
    }
    density_ = state.density;
    density_down_ = state.density_down;
    ApplyDensity();
    scale_ = state.scale;
    schedule_step_ = state.schedule_step;
  }

  ServerLayout server_layout(std::size_t tensor) const {
    const UnitTensor& part = PartOf(tensor, tensors_.at(tensor).num_entries, "server_layout");
    const ShareMap& shares = plan_.units[plan_.unit_of_tensor[tensor]].shares;
    return {shares.block(), shares.num_owners(), shares.first_owner(), part.offset};
  }

  Stats stats() {
    WaitIdle();
    Stats stats = stats_;
    stats.bytes_sent = comm_->bytes_sent();
    stats.bytes_received = comm_->bytes_received();
    AddNorms(stats);
    return stats;
  }

  Communicator& comm() const { return *comm_; }
  const Config& config() const { return config_; }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const Plan& plan() const { return plan_; }

  std::vector<std::vector<std::uint8_t>> AllGather(Bytes bytes) {
    CheckUsable();
    Post([this, bytes] {
      MessageTag tag;
      tag.step = steps_begun_;
      comm_->AllGatherV(tag, bytes, 0, kMaxUserBytes, workspace_.uplink);
    });
    Wait();
    return ReceivedParts();
  }

  std::vector<std::vector<std::uint8_t>> AllToAll(
      const std::vector<std::vector<std::uint8_t>>& parts) {
    CheckUsable();
    BITOPK_CHECK_ARG(parts.size() == static_cast<std::size_t>(comm_->size()),
                     "Engine::AllToAll: got ", parts.size(), " parts for ", comm_->size(),
                     " ranks");
    std::vector<Bytes> views(parts.begin(), parts.end());
    Post([this, &views] {
      MessageTag tag;
      tag.message = 1;
      tag.step = steps_begun_;
      comm_->AllToAllV(tag, views, 0, kMaxUserBytes, workspace_.uplink);
    });
    Wait();
    return ReceivedParts();
  }

  std::vector<LinkSpeed> MeasureNetwork(std::size_t payload_bytes) {
    CheckUsable();
    std::vector<LinkSpeed> links;
    Post([&] { links = ProbeNetwork(*comm_, payload_bytes, workspace_.uplink); });
    Wait();
    return links;
  }

 private:
  std::vector<std::vector<std::uint8_t>> ReceivedParts() const {
    std::vector<std::vector<std::uint8_t>> parts;
    for (int rank = 0; rank < comm_->size(); ++rank) {
      const Bytes part = workspace_.uplink.part(rank);
      parts.emplace_back(part.begin(), part.end());
    }
    return parts;
  }

  // The communication thread.
  void Serve() {
    // Denormals must not be flushed, whatever the thread that created us had set: ranks would
    // differ.
    std::fesetenv(FE_DFL_ENV);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      running_ = true;
      lock.unlock();
      std::exception_ptr error = Run(task);
      lock.lock();
      running_ = false;
      step_done_ = true;
      if (error != nullptr) {
        error_ = error;
        open_ = false;
      }
      changed_.notify_all();
    }
  }

  // Runs a task. What breaks the agreement among ranks ends the communicator, here and for the
  // peers.
  std::exception_ptr Run(const std::function<void()>& task) {
    if (dead_ != nullptr) return dead_;
    try {
      task();
      return nullptr;
    } catch (const NonFiniteGradientError&) {
      return std::current_exception();  // a verdict that all ranks share; the next step may follow
    } catch (const InvalidArgumentError&) {
      return dead_ = std::current_exception();  // all ranks found it: no peer needs to be told
    } catch (const ReplicaDivergenceError&) {
      return dead_ = std::current_exception();
    } catch (const std::exception& error) {
      comm_->Abort(error.what());
      dead_ = std::current_exception();
      return dead_;
    }
  }

  void Post(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  // REQUIRES: mutex_ is held, here and in CheckEnded.
  bool Idle() const { return tasks_.empty() && !running_; }

  static void CheckScale(double scale) {
    BITOPK_CHECK_ARG(std::isfinite(scale) && scale > 0.0,
                     "Engine::BeginStep: scale must be finite and positive; got ", scale);
  }

  void CheckScales(double scale, Span<const double> tensor_scales) const {
    CheckScale(scale);
    if (tensor_scales.empty()) return;
    BITOPK_CHECK_ARG(tensor_scales.size() == tensors_.size(), "Engine::BeginStep: got ",
                     tensor_scales.size(), " tensor scales for ", tensors_.size(), " tensors");
    for (const double factor : tensor_scales) CheckScale(scale * factor);
    for (const Unit& unit : plan_.units) {
      if (!unit.compressed) continue;
      const std::size_t first = unit.tensors.front().tensor;
      for (const UnitTensor& part : unit.tensors) {
        BITOPK_CHECK_ARG(tensor_scales[part.tensor] == tensor_scales[first],
                         "Engine::BeginStep: \"", tensors_[first].name, "\" and \"",
                         tensors_[part.tensor].name,
                         "\" are selected together (scope global) but have the scales ",
                         tensor_scales[first], " and ", tensor_scales[part.tensor]);
      }
    }
  }

  static double UnitScale(const Unit& unit, double scale, Span<const double> tensor_scales) {
    if (tensor_scales.empty() || unit.tensors.empty()) return scale;
    return scale * tensor_scales[unit.tensors.front().tensor];
  }

  // Memories are multiplied by the ratio as float32: it must not turn them into Inf, NaN or
  // nothing.
  void CheckScaleRatios(double scale, Span<const double> tensor_scales) const {
    for (const Unit& unit : plan_.units) {
      const double last = pending_ ? unit.pending_scale : unit.scale;
      if (last == 0.0 || !unit.compressed) continue;
      const double next = UnitScale(unit, scale, tensor_scales);
      const auto ratio = static_cast<float>(next / last);
      BITOPK_CHECK_ARG(std::isfinite(ratio) && ratio > 0.0F, "Engine::BeginStep: scale went from ",
                       last, " to ", next, "; their ratio must be a positive float32");
    }
  }

  void CheckEnded() const {
    BITOPK_CHECK_ARG(!open_, "Engine: the step under way must end (EndStep) before anything else");
  }

  void WaitIdle() {
    std::unique_lock<std::mutex> lock(mutex_);
    CheckEnded();
    changed_.wait(lock, [this] { return Idle(); });
  }

  void CheckUsable() {
    WaitIdle();
    if (dead_ != nullptr) std::rethrow_exception(dead_);
  }

  void RethrowError() {
    std::exception_ptr error;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      error = std::exchange(error_, nullptr);
    }
    if (error == nullptr) error = dead_;
    if (error != nullptr) std::rethrow_exception(error);
  }

  // A step that fails leaves no trace in the memories; a finished one stays when something after it
  // fails.
  void RunStep() {
    try {
      LaunchBuckets();
    } catch (...) {
      DropPending();
      throw;
    }
  }

  void LaunchBuckets() {
    StepContext context{*comm_, plan_, workspace_, submissions_, stats_};
    context.step = steps_begun_;
    context.schedule_step = schedule_step_;
    context.op = op_;
    context.scale = pending_scale_;
    context.nonfinite_ranks.assign(context.size(), false);
    context.hash_result = config_.check_every > 0 &&
                          (steps_begun_ - 1) % config_.check_every == 0 && comm_->size() > 1;
    pending_ = true;
    for (std::size_t bucket = 0; bucket < plan_.buckets.size(); ++bucket) {
      WaitUntilReady(bucket);
      RunBucket(context, plan_.buckets[bucket], static_cast<std::uint32_t>(bucket));
      if (config_.nonfinite == NonFinitePolicy::kPropagate) Complete(bucket);
    }
    if (context.hash_result)
      CompareResults(*comm_, steps_begun_, context.result_hash, workspace_.uplink);
    ++stats_.steps;
    stats_.dense_bytes += dense_bytes_ * 2 * (context.size() - 1) / context.size();
    if (context.nonfinite) Reject(context);
  }

  void WaitUntilReady(std::size_t bucket) {
    StageTimer timer(stats_, Stage::kWait);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || !open_ || missing_[bucket] == 0; });
    if (stopping_) throw CommunicationError("the engine was closed during a step");
  }

  void Complete(std::size_t bucket) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      bucket_done_[bucket] = 1;
    }
    changed_.notify_all();
  }

  // NaN or Inf somewhere: the step leaves no trace in any memory.
  void Reject(StepContext& context) {
    DropPending();
    ++stats_.dropped_steps;
    if (config_.nonfinite == NonFinitePolicy::kPropagate) return;
    if (config_.nonfinite == NonFinitePolicy::kSkip) {
      for (const Unit& unit : plan_.units) ClearResults(context, unit);
      return;
    }
    std::string ranks;
    for (std::size_t rank = 0; rank < context.size(); ++rank) {
      if (context.nonfinite_ranks[rank]) ranks += internal::StrCat(ranks.empty() ? "" : ", ", rank);
    }
    throw NonFiniteGradientError(internal::StrCat(
        "step ", steps_begun_, ": NaN or Inf in ",
        ranks.empty() ? "the sum over ranks" : "the gradients of rank " + ranks,
        "; memories are as before the step (rank ", comm_->rank(), " of ", comm_->size(), ")"));
  }

  // The densities of SetDensity, or those of the settings while it has not been called.
  void ApplyDensity() {
    const bool changed = density_.density > 0.0;
    for (Unit& unit : plan_.units) {
      if (!unit.compressed || unit.from_rule) continue;
      unit.spec.up = changed ? density_ : config_.spec.up;
      unit.spec.down = changed ? density_down_ : config_.spec.down;
      SetEntriesToKeep(unit);
    }
  }

  void CommitPending() {
    if (!pending_) return;
    for (Unit& unit : plan_.units) {
      unit.worker.Commit();
      unit.server.Commit();
      unit.scale = unit.pending_scale;
    }
    pending_ = false;
    scale_ = pending_scale_;
    ++schedule_step_;
  }

  void DropPending() {
    if (!pending_) return;
    for (Unit& unit : plan_.units) {
      unit.worker.Rollback();
      unit.server.Rollback();
    }
    pending_ = false;
  }

  const UnitTensor& PartOf(std::size_t tensor, std::size_t num_entries, const char* where) const {
    BITOPK_CHECK_ARG(tensor < tensors_.size(), "Engine::", where, ": tensor ", tensor, " of ",
                     tensors_.size());
    BITOPK_CHECK_ARG(num_entries == tensors_[tensor].num_entries, "Engine::", where, ": \"",
                     tensors_[tensor].name, "\" has ", tensors_[tensor].num_entries,
                     " entries; got room for ", num_entries);
    const Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    return *std::find_if(unit.tensors.begin(), unit.tensors.end(),
                         [&](const UnitTensor& part) { return part.tensor == tensor; });
  }

  std::size_t ShareNumber(const Unit& unit) const {
    return unit.shares.replicated() ? 0 : static_cast<std::size_t>(comm_->rank());
  }

  // Calls f(first entry in the tensor, first position in the share, count) for each contiguous
  // piece of the share of `owner` that belongs to `part`.
  template <typename F>
  static void ForEachPieceOf(const Unit& unit, const UnitTensor& part, std::size_t owner, F f) {
    unit.shares.ForEachPiece(
        owner, [&](std::size_t entry, std::size_t position, std::size_t count) {
          const std::size_t from = std::max(entry, part.offset);
          const std::size_t to = std::min(entry + count, part.offset + part.num_entries);
          if (from < to) f(from - part.offset, position + (from - entry), to - from);
        });
  }

  template <typename F>
  void ForEachServed(const Unit& unit, const UnitTensor& part, F f) const {
    ForEachPieceOf(unit, part, ShareNumber(unit), f);
  }

  // Copies those entries of a share that belong to `part` to the tensor's array.
  static void AddShare(const Unit& unit, const UnitTensor& part, std::size_t owner,
                       Span<const float> share, Span<float> out) {
    if (share.empty()) return;
    ForEachPieceOf(unit, part, owner,
                   [&](std::size_t entry, std::size_t position, std::size_t count) {
                     std::copy_n(share.begin() + position, count, out.begin() + entry);
                   });
  }

  void AddOwner(std::size_t owner, const std::vector<std::uint8_t>& bytes,
                std::vector<std::vector<float>>& whole) const {
    std::size_t offset = 0;
    std::vector<float> share;
    for (const Unit& unit : plan_.units) {
      if (!unit.compressed) continue;
      const std::size_t number = unit.shares.replicated() ? 0 : owner;
      share.resize(unit.shares.NumPositions(number));
      if (bytes.size() - offset < share.size() * sizeof(float)) {
        throw WireFormatError(internal::StrCat("server memory of rank ", owner, ": got ",
                                               bytes.size(), " bytes, expected more"));
      }
      if (!share.empty())
        std::memcpy(share.data(), bytes.data() + offset, share.size() * sizeof(float));
      offset += share.size() * sizeof(float);
      for (const UnitTensor& part : unit.tensors) {
        whole[part.tensor].resize(part.num_entries);
        AddShare(unit, part, number, share, whole[part.tensor]);
      }
    }
  }

  void CheckState(const EngineState& state) const {
    BITOPK_CHECK_ARG(state.world_size == comm_->size() && state.rank == comm_->rank(),
                     "Engine::LoadState: the state is of rank ", state.rank, " of ",
                     state.world_size, "; this is rank ", comm_->rank(), " of ", comm_->size());
    const std::string tensors = DescribeTensors(tensors_);
    if (state.tensors != tensors) {
      const Difference lines = FirstDifference(state.tensors, tensors);
      throw InvalidArgumentError("Engine::LoadState: the state has " + lines.left +
                                 "; this engine has " + lines.right);
    }
    for (const Sparsity& density : {state.density, state.density_down}) {
      BITOPK_CHECK_ARG(density.k == 0 && density.density >= 0.0 && density.density <= 1.0,
                       "Engine::LoadState: density is ", density.density);
    }
    BITOPK_CHECK_ARG(std::isfinite(state.scale) && state.scale >= 0.0,
                     "Engine::LoadState: scale is ", state.scale);
    BITOPK_CHECK_ARG(state.tensor_scales.empty() || state.tensor_scales.size() == tensors_.size(),
                     "Engine::LoadState: got ", state.tensor_scales.size(), " tensor scales for ",
                     tensors_.size(), " tensors");
    if (state.scale > 0.0) CheckScales(state.scale, state.tensor_scales);
    BITOPK_CHECK_ARG(state.worker_memory.size() == tensors_.size() &&
                         state.server_memory.size() == tensors_.size(),
                     "Engine::LoadState: got ", state.worker_memory.size(), " worker and ",
                     state.server_memory.size(), " server memories, expected ", tensors_.size());
    for (std::size_t tensor = 0; tensor < tensors_.size(); ++tensor) CheckMemories(state, tensor);
  }

  void CheckMemories(const EngineState& state, std::size_t tensor) const {
    const std::string& name = tensors_[tensor].name;
    const Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    const UnitTensor& part = PartOf(tensor, tensors_[tensor].num_entries, "LoadState");
    std::size_t served = part.num_entries;
    if (!state.whole_server_memory) {
      served = 0;
      ForEachServed(unit, part, [&](auto, auto, std::size_t count) { served += count; });
    }
    const auto check = [&](const char* what, std::size_t got, std::size_t expected, bool kept) {
      BITOPK_CHECK_ARG(got == 0 || got == expected, "Engine::LoadState: ", what, " memory of \"",
                       name, "\" has ", got, " entries, expected ", expected);
      BITOPK_CHECK_ARG(got == 0 || kept, "Engine::LoadState: the state has a ", what,
                       " memory of \"", name, "\", which these settings have no place for");
    };
    check("worker", state.worker_memory[tensor].size(), part.num_entries,
          unit.compressed && unit.spec.worker_memory);
    check("server", state.server_memory[tensor].size(), served,
          unit.compressed && unit.spec.server_memory);
  }

  // REQUIRES: CheckState passed.
  void LoadTensor(const EngineState& state, std::size_t tensor) {
    const UnitTensor& part = PartOf(tensor, tensors_[tensor].num_entries, "LoadState");
    Unit& unit = plan_.units[plan_.unit_of_tensor[tensor]];
    if (!unit.compressed) return;
    const std::vector<float>& worker = state.worker_memory[tensor];
    if (!worker.empty() || unit.worker.in_use()) {
      float* const out = unit.worker.current() + part.offset;
      std::fill_n(out, part.num_entries, 0.0F);
      std::copy(worker.begin(), worker.end(), out);
    }
    const std::vector<float>& server = state.server_memory[tensor];
    if (server.empty() && unit.server.memory().empty()) return;
    const Span<float> out = unit.server.MutableMemory();
    std::size_t next = 0;
    ForEachServed(unit, part, [&](std::size_t entry, std::size_t position, std::size_t count) {
      const std::size_t from = state.whole_server_memory ? entry : next;
      if (server.empty()) {
        std::fill_n(out.begin() + position, count, 0.0F);
      } else {
        std::copy_n(server.begin() + static_cast<std::ptrdiff_t>(from), count,
                    out.begin() + position);
      }
      next += count;
    });
  }

  // Contraction and norms from what the memories hold, so that no step pays for them. For x = kept
  // + left out: |x|^2 = |left out|^2 - |rounding of the kept|^2 + |kept|^2.
  void AddNorms(Stats& stats) const {
    double up_left = 0.0;
    double up_total = 0.0;
    double down_left = 0.0;
    double down_total = 0.0;
    double residual = 0.0;
    for (const Unit& unit : plan_.units) {
      if (!unit.compressed || !unit.memory_in_use) continue;
      if (unit.spec.worker_memory) {
        const double left = SumOfSquares(unit.worker.view());
        residual += left;
        up_left += left;
        up_total += left - unit.sent_error_square + unit.sent_square;
      } else {
        up_left += unit.gradient_square - unit.sent_square + unit.sent_error_square;
        up_total += unit.gradient_square;
      }
      if (!unit.server.memory().empty()) {
        const double left = SumOfSquares(unit.server.memory());
        down_left += left;
        down_total += left - unit.server.kept_error_square() + unit.server.kept_square();
      } else {
        down_total += unit.server.total_square_without_memory();
        down_left += unit.server.total_square_without_memory() - unit.server.kept_square() +
                     unit.server.kept_error_square();
      }
    }
    stats.contraction_up = 1.0 - up_left / up_total;
    stats.contraction_down = 1.0 - down_left / down_total;
    stats.residual_norm = std::sqrt(residual);
  }

  std::unique_ptr<Communicator> comm_;
  Config config_;
  ExchangeWorkspace workspace_;

  // Fixed by Register.
  bool registered_ = false;
  std::vector<TensorSpec> tensors_;
  Plan plan_;  // its memories belong to the communication thread while a task runs, else to the
               // caller
  std::uint64_t dense_bytes_ = 0;

  // Between steps, the caller's; during a step, the communication thread's.
  Op op_ = Op::kAverage;
  double scale_ = 0.0;  // of the last committed step; 0 before the first
  double pending_scale_ = 0.0;
  Sparsity density_;  // of SetDensity; 0 before
  Sparsity density_down_;
  std::uint64_t steps_begun_ = 0;
  std::uint64_t schedule_step_ = 0;  // committed steps
  bool pending_ = false;             // a finished step awaits Commit or Rollback
  Stats stats_;
  std::exception_ptr dead_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_ (a tensor's submission is read without it once its bucket is ready).
  std::deque<std::function<void()>> tasks_;
  bool running_ = false;
  bool stopping_ = false;
  bool open_ = false;
  bool step_done_ = true;
  std::vector<TensorSubmission> submissions_;
  std::vector<char> submitted_;
  std::vector<std::size_t> missing_;  // tensors not submitted yet, by bucket
  std::vector<char> bucket_done_;
  std::exception_ptr error_;

  std::thread thread_;
};

Engine::Engine(std::unique_ptr<Communicator> communicator, Config config)
    : impl_(std::make_unique<Impl>(std::move(communicator), std::move(config))) {}
Engine::~Engine() = default;

int Engine::rank() const { return impl_->comm().rank(); }
int Engine::size() const { return impl_->comm().size(); }
const Config& Engine::config() const { return impl_->config(); }
void Engine::Register(std::vector<TensorSpec> tensors) { impl_->Register(std::move(tensors)); }
const std::vector<TensorSpec>& Engine::tensors() const { return impl_->tensors(); }
void Engine::BeginStep(Op op, double scale, Span<const double> tensor_scales) {
  impl_->BeginStep(op, scale, tensor_scales);
}
void Engine::Submit(std::size_t tensor, const TensorSubmission& submission) {
  impl_->Submit(tensor, submission);
}
void Engine::EndStep() { impl_->EndStep(); }
bool Engine::IsCompleted(std::size_t tensor) const { return impl_->IsCompleted(tensor); }
bool Engine::IsCompleted() const { return impl_->IsCompleted(); }
void Engine::Wait() { impl_->Wait(); }
bool Engine::WaitFor(std::chrono::milliseconds duration) { return impl_->WaitFor(duration); }
void Engine::Commit() { impl_->Commit(); }
void Engine::Rollback() { impl_->Rollback(); }
bool Engine::ReturnToWorkerMemory(std::size_t tensor, Span<const float> values, float factor) {
  return impl_->ReturnToWorkerMemory(tensor, values, factor);
}
void Engine::ReadWorkerMemory(std::size_t tensor, Span<float> out) {
  impl_->ReadWorkerMemory(tensor, out);
}
void Engine::ReadServerShare(std::size_t tensor, Span<float> out) {
  impl_->ReadServerShare(tensor, out);
}
std::vector<std::vector<float>> Engine::GatherServerMemory() { return impl_->GatherServerMemory(); }
void Engine::SetDensity(double density, double density_down) {
  impl_->SetDensity(density, density_down);
}
EngineState Engine::SaveState() { return impl_->SaveState(); }
void Engine::LoadState(const EngineState& state) { impl_->LoadState(state); }
std::uint64_t Engine::schedule_step() { return impl_->schedule_step(); }
ServerLayout Engine::server_layout(std::size_t tensor) const {
  return impl_->server_layout(tensor);
}
Stats Engine::stats() { return impl_->stats(); }
std::vector<std::string> Engine::decisions() const { return impl_->plan().decisions; }
std::vector<std::string> Engine::warnings() const { return impl_->plan().warnings; }
Communicator::Waiting Engine::waiting() const { return impl_->comm().waiting(); }
std::vector<std::vector<std::uint8_t>> Engine::AllGather(Span<const std::uint8_t> bytes) {
  return impl_->AllGather(bytes);
}
std::vector<std::vector<std::uint8_t>> Engine::AllToAll(
    const std::vector<std::vector<std::uint8_t>>& parts) {
  return impl_->AllToAll(parts);
}
std::vector<LinkSpeed> Engine::MeasureNetwork(std::size_t payload_bytes) {
  return impl_->MeasureNetwork(payload_bytes);
}
void Engine::Abort(const std::string& reason) noexcept { impl_->comm().Abort(reason); }

}  // namespace bitopk
