// SPDX-License-Identifier: Apache-2.0
//
// The exchanges: what happens to one bucket in one step, from gradients to results. All three give
// every rank the same bytes; allgather and sharded give the same bytes as each other. Called by the
// engine's communication thread.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/kernels/topk.h"
#include "bitopk/packet.h"
#include "bitopk/stats.h"
#include "plugin/src/server.h"
#include "plugin/src/threshold.h"
#include "plugin/src/unit.h"

namespace bitopk {

/// Header flag: this rank saw NaN or Inf in what it sends.
inline constexpr std::uint16_t kFlagNonFinite = 1;

/// Bytes that grow by appending and keep their capacity; new bytes are not initialised. One thread
/// at a time.
class ByteBuffer {
 public:
  void Clear() { size_ = 0; }
  /// Room for `num_bytes` more behind what was appended; not part of it until Advance.
  MutableBytes Reserve(std::size_t num_bytes);
  void Advance(std::size_t num_bytes) { size_ += num_bytes; }
  Bytes bytes() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<std::uint8_t[]> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Scratch of one engine, reused by all buckets and steps.
struct ExchangeWorkspace {
  explicit ExchangeWorkspace(kernels::Isa isa) : topk(isa), server(isa) {}

  kernels::TopKWorkspace topk;
  ServerWorkspace server;
  std::vector<kernels::GradientSegment> segments;
  std::vector<std::uint32_t> positions;
  std::vector<float> values;
  std::vector<std::size_t> starts;
  std::vector<std::uint32_t> kept;
  std::vector<PacketReader> readers;
  std::vector<std::size_t> offsets;  // of the next packet in each rank's message
  std::vector<ByteBuffer> send;      // one per receiving rank
  std::vector<Bytes> send_views;
  ByteBuffer broadcast;
  std::vector<ThresholdQuery> queries;
  std::vector<std::uint64_t> counts;
  ByteBuffer dense_flat;
  ReceiveBuffer uplink;
  ReceiveBuffer downlink;
};

/// One step as the exchanges see it.
struct StepContext {
  Communicator& comm;
  Plan& plan;
  ExchangeWorkspace& workspace;
  const std::vector<TensorSubmission>& tensors;
  Stats& stats;
  std::uint64_t step = 0;           // launches so far; part of every header
  std::uint64_t schedule_step = 0;  // steps that count for start_step
  Op op = Op::kAverage;
  double scale = 1.0;  // of this step's gradients; must be equal on all ranks
  bool hash_result = false;

  // Findings of the step.
  std::vector<bool> nonfinite_ranks = {};  // whose gradients held NaN or Inf
  bool nonfinite = false;                  // these, or the sum overflowed
  std::uint64_t result_hash = 0;

  std::size_t rank() const { return static_cast<std::size_t>(comm.rank()); }
  std::size_t size() const { return static_cast<std::size_t>(comm.size()); }
  float MemoryFactor(const Unit& unit) const {
    const double ratio = unit.scale == 0.0 ? 1.0 : unit.pending_scale / unit.scale;
    return static_cast<float>(ratio * unit.spec.memory_decay);
  }
  float Divisor() const { return op == Op::kAverage ? static_cast<float>(comm.size()) : 1.0F; }
};

/// Adds the time until its end of life to a stage.
class StageTimer {
 public:
  StageTimer(Stats& stats, Stage stage)
      : seconds_(stats.seconds[static_cast<std::size_t>(stage)]),
        start_(std::chrono::steady_clock::now()) {}
  ~StageTimer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

/// Runs `bucket` (number `message` of the launch order) by the exchange that the schedule demands:
/// gradients are read, memories advance (not yet committed) and results are written. Cost for k =
/// k_up = k_down, per rank: allgather sends (N-1) k entries in 2 steps; sharded about 2 k (N-1)/N
/// entries in 4 steps and, for units of at least kWholeBelowEntries kept entries, at most 12
/// histogram rounds of 2 steps; dense 2 d (N-1)/N entries in 4 steps.
/// @throws CommunicationError, WireFormatError; memories are then to be rolled back.
void RunBucket(StepContext& context, Bucket& bucket, std::uint32_t message);

// The parts, one file each.
void RunAllgather(StepContext& context, Bucket& bucket, MessageTag tag);
void RunSharded(StepContext& context, Bucket& bucket, MessageTag tag);
void RunDense(StepContext& context, Bucket& bucket, MessageTag tag);

// What they share (exchange.cc).

/// The worker's half: topK of memory + gradient; the memory keeps the rest, rounding included.
/// Values are as the receiver decodes them. Sets `nonfinite` if one of them is.
kernels::SelectedEntries CompressUnit(StepContext& context, Unit& unit, bool& nonfinite);

/// Appends one packet to `out`.
void AppendPacket(Span<const std::uint32_t> positions, Span<float> values,
                  std::size_t num_positions, kernels::ValueFormat format, ByteBuffer& out);

/// Lets the unit's server add the packets that lie at workspace.offsets in `received`, and moves
/// the offsets on.
void AddPackets(StepContext& context, Unit& unit, const ReceiveBuffer& received, std::size_t share);

/// Throws WireFormatError unless the packets end where the message of `rank` ends.
void CheckUsedUp(Bytes message, std::size_t used, int rank);
/// The same for all messages of `received`, whose packets end at workspace.offsets.
void CheckAllUsedUp(StepContext& context, const ReceiveBuffer& received);

/// Sends down the candidates numbered workspace.kept: fills workspace.positions and values (as
/// decoded) and tells the server.
void KeepCandidates(StepContext& context, Unit& unit);

/// Rounds the entry's result to the type that its tensor has at the caller's. Without `keeps_error`
/// (no memory takes what is missing) a value beyond the type's range becomes Inf.
float RoundResult(const Unit& unit, std::size_t entry, float value, bool keeps_error);

/// Zeroes the results of a unit.
void ClearResults(StepContext& context, const Unit& unit);
/// Writes entries (ascending numbers in the unit) to the results.
void WriteResults(StepContext& context, const Unit& unit, Span<const std::uint32_t> entries,
                  Span<const float> values);

/// Takes over what the headers of a received message say about NaN and Inf.
void NoteFlags(StepContext& context, const ReceiveBuffer& received, bool from_gradients);

}  // namespace bitopk
