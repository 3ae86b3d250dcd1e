// SPDX-License-Identifier: Apache-2.0
//
// Engine: one rank's end of bidirectional topK. Tensors are registered by name, submitted in any
// order, and launched in one order that is the same on every rank, by a communication thread. See
// the README for a complete program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/config.h"
#include "bitopk/kernels/span.h"
#include "bitopk/network_probe.h"
#include "bitopk/stats.h"
#include "bitopk/tensor.h"

namespace bitopk {

/// What `Engine::SaveState` returns: all that a later run needs to go on bit for bit, of this rank.
struct EngineState {
  int rank = 0;
  int world_size = 0;
  std::string tensors;   // description; must match when loading
  std::string settings;  // description; for whoever wants to know what differs
  Sparsity density;      // of SetDensity; both 0 if it was not called
  Sparsity density_down;
  double scale = 0.0;                 // of the last step; 0: no step yet
  std::vector<double> tensor_scales;  // by tensor, relative to `scale`; empty: 1
  std::uint64_t schedule_step = 0;
  std::vector<std::vector<float>> worker_memory;  // by tensor; empty where there is none
  /// By tensor: the entries that this rank serves, ascending (see ServerLayout), or, with
  /// `whole_server_memory`, all of them; empty where there is none.
  std::vector<std::vector<float>> server_memory;
  bool whole_server_memory = false;
};

/// Who serves the entries of a tensor: entry i belongs to rank ((offset + i) / block + first_owner)
/// % owners, or to every rank if there is one owner.
struct ServerLayout {
  std::uint64_t block = 1;
  std::uint64_t owners = 1;
  std::uint64_t first_owner = 0;
  std::uint64_t offset = 0;
};

/// One rank. All ranks construct it with equal settings, register equal tensors and make the same
/// steps.
///
/// A step is BeginStep, Submit for any of the tensors in any order, EndStep, Wait. Results are
/// bit-identical on all ranks and do not depend on timing, order of submission or bucket size.
///
/// Thread-safety: Submit may be called from several threads; everything else from one thread at a
/// time. Errors of the communication thread surface in the next call that waits. After
/// CommunicationError or WireFormatError the engine only serves memories, state and statistics; the
/// step that failed is rolled back.
class Engine {
 public:
  /// @throws InvalidArgumentError  if a setting is out of range or this processor lacks config.isa.
  Engine(std::unique_ptr<Communicator> communicator, Config config);
  /// Stops the communication thread; a step under way is aborted, which the peers see as the death
  /// of this rank.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const;
  int size() const;
  const Config& config() const;

  /// Fixes the set of tensors, in registration order, once. The communication thread then compares
  /// it and the settings with those of all ranks; a difference is an InvalidArgumentError on every
  /// rank in the next Wait, naming both sides. Sizes may be 0. Allocates no memories yet.
  /// @throws InvalidArgumentError  on a duplicate or second registration.
  void Register(std::vector<TensorSpec> tensors);
  const std::vector<TensorSpec>& tensors() const;

  /// Commits the last step and starts the next; waits for the last one to finish first. `scale` is
  /// the factor by which this step's gradients are multiplied relative to the memories' own unit;
  /// `tensor_scales` (one per tensor, or none) multiplies it further, for learning rates that
  /// differ between tensors. Equal on all ranks.
  /// @throws InvalidArgumentError  if a scale is not finite and positive or differs within a unit
  /// of selection, or `op` differs from the first step's.
  void BeginStep(Op op, double scale = 1.0, Span<const double> tensor_scales = {});

  /// Hands over tensor number `tensor` of the registration order. Its memory stays the caller's and
  /// must stay valid until the step is done. A null result means that the result is not wanted.
  /// @throws InvalidArgumentError  outside a step, for an unknown number or a second submission in
  /// a step.
  void Submit(std::size_t tensor, const TensorSubmission& submission);

  /// No more tensors in this step: those not submitted count as zeros.
  void EndStep();

  /// Whether the result of `tensor` is written (or the step failed; Wait tells). Never blocks.
  bool IsCompleted(std::size_t tensor) const;
  bool IsCompleted() const;

  /// Waits until the last step, and everything before it, is done. Bounded: each wait for a peer
  /// ends at the communicator's time-out.
  /// @throws CommunicationError, WireFormatError, NonFiniteGradientError, ReplicaDivergenceError,
  /// InvalidArgumentError
  void Wait();
  /// As Wait, for at most `duration`; returns whether it is done.
  bool WaitFor(std::chrono::milliseconds duration);

  /// Makes the last step final, or drops it: memories, schedule and scale are then as if it had
  /// never been. Both wait for it.
  void Commit();
  void Rollback();

  /// Gives back what a caller could not use of a result: adds values * factor (shape of the tensor)
  /// to this rank's worker memory as it stands after the last step, and is committed or rolled back
  /// with it. Returns whether the tensor has such a memory; nothing happens if not.
  bool ReturnToWorkerMemory(std::size_t tensor, Span<const float> values, float factor);

  /// Copies the worker memory of a tensor (shape of the tensor) as it stands after the last step.
  void ReadWorkerMemory(std::size_t tensor, Span<float> out);
  /// Writes this rank's share of the server memory of a tensor to `out` (shape of the tensor):
  /// entries that other ranks serve are left alone. Starting from zeros, the union over ranks is
  /// the whole memory; with the allgather exchange one rank has it all.
  void ReadServerShare(std::size_t tensor, Span<float> out);
  /// Collective: the whole server memory of all tensors, by tensor (empty for those that have
  /// none).
  std::vector<std::vector<float>> GatherServerMemory();

  /// Other densities from the next step on, for all units that follow the general settings (not a
  /// rule). Call it on all ranks before the same step. @throws InvalidArgumentError if out of (0,
  /// 1].
  void SetDensity(double density, double density_down);

  /// Steps that count for start_step: those committed, and the last one unless it was dropped.
  std::uint64_t schedule_step();
  EngineState SaveState();
  /// Settings may differ from those of the state, as long as every memory finds its place.
  /// @throws InvalidArgumentError naming what differs, before anything is changed.
  void LoadState(const EngineState& state);
  ServerLayout server_layout(std::size_t tensor) const;

  Stats stats();
  /// Why exchanges were chosen, and settings that cost more than they save; filled by Register.
  std::vector<std::string> decisions() const;
  std::vector<std::string> warnings() const;
  /// Whom the communication thread is waiting for, since when.
  Communicator::Waiting waiting() const;

  /// Collective allgather of bytes through the engine's communicator; for callers that gather
  /// state.
  std::vector<std::vector<std::uint8_t>> AllGather(Span<const std::uint8_t> bytes);
  /// Collective: sends parts[r] (shape [size()]) to rank r and returns what each rank sent to this
  /// one.
  std::vector<std::vector<std::uint8_t>> AllToAll(
      const std::vector<std::vector<std::uint8_t>>& parts);

  /// Collective, between steps: see ProbeNetwork.
  std::vector<LinkSpeed> MeasureNetwork(std::size_t payload_bytes);

  /// Ends the engine's communication with `reason`, on the peers too, as far as they can be
  /// reached; a step under way fails. Memories, state and statistics stay readable. Any thread;
  /// idempotent.
  void Abort(const std::string& reason) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bitopk
