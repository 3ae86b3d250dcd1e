// SPDX-License-Identifier: Apache-2.0
//
// The server of one share of one unit: adds the uplink packets in rank order, proposes candidates
// for the downlink and keeps in its memory what the downlink leaves out. [ZDL22, algorithm 9,
// server side]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/kernels/topk.h"
#include "bitopk/packet.h"
#include "plugin/src/memory_buffer.h"

namespace bitopk {

/// Scratch that the servers of one engine share: a tile of one chunk of positions, about 650 KiB.
/// One thread at a time.
struct ServerWorkspace {
  explicit ServerWorkspace(kernels::Isa isa) : topk(isa) {}

  std::vector<float> sums =
      std::vector<float>(kernels::kChunkPositions, 0.0F);  // zero between uses
  std::vector<std::uint64_t> touched = std::vector<std::uint64_t>(kernels::kChunkPositions / 64, 0);
  std::vector<std::uint16_t> positions = std::vector<std::uint16_t>(kernels::kChunkPositions);
  std::vector<float> values = std::vector<float>(kernels::kChunkPositions);
  kernels::TopKWorkspace topk;
};

/// How a sum becomes the result: nothing to divide by for a sum, N for an average.
struct Aggregation {
  float divisor = 1.0F;
  float memory_factor = 1.0F;  // multiplies the old memory
};

/// One share. Between commits it can go back to where the last commit left it: changed entries are
/// in an undo log, and a step that multiplies the whole memory keeps the old one. One thread at a
/// time.
///
/// A step calls Add, then Candidates, then Keep. With s the sum over ranks, starting from +0,
/// divided once: q = memory * factor + s; the candidates are the k largest non-zero entries of q;
/// Keep leaves q - v.
class Server {
 public:
  Server() = default;
  /// @param has_memory  whether what is not kept stays; otherwise it is forgotten.
  Server(std::size_t num_positions, bool has_memory)
      : num_positions_(num_positions), has_memory_(has_memory) {}

  /// Adds one packet per rank, in this order. `keeps_everything`: no entry will be left out of the
  /// downlink, so a memory that was never used stays unused. @throws WireFormatError on damaged
  /// packets.
  void Add(std::vector<PacketReader>& packets, const Aggregation& aggregation,
           bool keeps_everything, ServerWorkspace& workspace);

  /// Finds the min(k, non-zero) largest entries of q, ascending positions. Valid until the next
  /// Add.
  void FindCandidates(std::size_t k, ServerWorkspace& workspace);
  const std::vector<std::uint32_t>& candidate_positions() const { return candidate_positions_; }
  const std::vector<float>& candidate_values() const { return candidate_values_; }

  /// What went down: `values` as the receivers decode them, of the candidates numbered `kept`.
  /// Counts what they miss.
  void Keep(Span<const std::uint32_t> kept, Span<const float> values);

  void Commit();
  void Rollback();

  /// Takes the whole memory out for a dense step: returns it (empty if never used) and leaves
  /// zeros, until a Rollback.
  Span<const float> Drain(float memory_factor);

  /// The memory as it stands; empty while it was never used (zero).
  Span<const float> memory() const { return memory_.span(); }
  /// For loading a checkpoint: writable memory, allocated.
  Span<float> MutableMemory();

  /// Of the last step: sum of squares of the entries kept, and of what rounding took from them;
  /// |q|^2 without a memory.
  double kept_square() const { return kept_square_; }
  double kept_error_square() const { return kept_error_square_; }
  double total_square_without_memory() const { return union_square_; }

 private:
  void AddChunk(std::size_t first, std::vector<PacketReader>& packets, float divisor,
                bool to_memory, ServerWorkspace& workspace);
  void ScaleMemory(float factor);
  void Log(std::uint32_t position, float old) {
    log_positions_.push_back(position);
    log_values_.push_back(old);
  }

  std::size_t num_positions_ = 0;
  bool has_memory_ = false;
  MemoryBuffer memory_;
  MemoryBuffer backup_;  // of the memory before it was scaled
  bool backup_valid_ = false;
  std::vector<std::uint32_t> log_positions_;
  std::vector<float> log_values_;
  bool uses_memory_ = false;                    // of the step under way
  std::vector<std::uint32_t> union_positions_;  // non-zero q without a memory
  std::vector<float> union_values_;
  std::vector<std::uint32_t> candidate_positions_;
  std::vector<float> candidate_values_;
  double kept_square_ = 0.0;
  double kept_error_square_ = 0.0;
  double union_square_ = 0.0;
};

}  // namespace bitopk
