// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/server.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

std::size_t NextChunk(PacketReader& packet, std::size_t rank, ServerWorkspace& workspace) {
  try {
    return packet.NextChunk(workspace.positions.data(), workspace.values.data());
  } catch (const WireFormatError& error) {
    throw WireFormatError(internal::StrCat("packet of rank ", rank, ": ", error.what()));
  }
}

}  // namespace

void Server::Add(std::vector<PacketReader>& packets, const Aggregation& aggregation,
                 bool keeps_everything, ServerWorkspace& workspace) {
  const bool adds_something =
      std::any_of(packets.begin(), packets.end(),
                  [](const PacketReader& packet) { return packet.num_entries() > 0; });
  uses_memory_ = has_memory_ && (!memory_.empty() || (adds_something && !keeps_everything));
  union_positions_.clear();
  union_values_.clear();
  if (uses_memory_) {
    if (memory_.empty()) memory_ = MemoryBuffer(num_positions_);
    ScaleMemory(aggregation.memory_factor);
  }
  for (std::size_t first = 0; first < num_positions_; first += kernels::kChunkPositions) {
    AddChunk(first, packets, aggregation.divisor, uses_memory_, workspace);
  }
}

// Sums go to a tile of one chunk, so that random writes stay in the cache; only touched entries are
// read back and cleared.
void Server::AddChunk(std::size_t first, std::vector<PacketReader>& packets, float divisor,
                      bool to_memory, ServerWorkspace& workspace) {
  float* const sums = workspace.sums.data();
  std::uint64_t* const touched = workspace.touched.data();
  for (std::size_t rank = 0; rank < packets.size(); ++rank) {
    const std::size_t count = NextChunk(packets[rank], rank, workspace);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t position = workspace.positions[i];
      sums[position] += workspace.values[i];
      touched[position / 64] |= std::uint64_t{1} << (position % 64);
    }
  }
  for (std::size_t word = 0; word < workspace.touched.size(); ++word) {
    for (std::uint64_t bits = touched[word]; bits != 0; bits &= bits - 1) {
      const std::size_t tile = word * 64 + static_cast<std::size_t>(__builtin_ctzll(bits));
      const auto position = static_cast<std::uint32_t>(first + tile);
      const float sum = sums[tile] / divisor;
      sums[tile] = 0.0F;
      if (to_memory) {
        float& entry = memory_.data()[position];
        Log(position, entry);
        entry += sum;
      } else if (sum != 0.0F) {
        union_positions_.push_back(position);
        union_values_.push_back(sum);
      }
    }
    touched[word] = 0;
  }
}

// Multiplying may turn a tiny negative entry into -0; adding +0 makes it the +0 that memory *
// factor + s is.
void Server::ScaleMemory(float factor) {
  if (factor == 1.0F) return;
  if (backup_.empty()) backup_ = MemoryBuffer(num_positions_);
  std::swap(memory_, backup_);
  backup_valid_ = true;
  for (std::size_t i = 0; i < num_positions_; ++i) {
    const float scaled = backup_.data()[i] * factor;
    memory_.data()[i] = scaled + 0.0F;
  }
}

void Server::FindCandidates(std::size_t k, ServerWorkspace& workspace) {
  const Span<const float> q = uses_memory_ ? memory() : Span<const float>(union_values_);
  const kernels::SelectedEntries selected = kernels::SelectNonzeroTopK(q, k, workspace.topk);
  candidate_positions_.assign(selected.indices.begin(), selected.indices.end());
  candidate_values_.assign(selected.values.begin(), selected.values.end());
  kept_square_ = kept_error_square_ = union_square_ = 0.0;
  if (uses_memory_) return;
  for (std::uint32_t& position : candidate_positions_) position = union_positions_[position];
  for (const float value : union_values_) union_square_ += static_cast<double>(value) * value;
}

void Server::Keep(Span<const std::uint32_t> kept, Span<const float> values) {
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const float q = candidate_values_[kept[i]];
    const float error = q - values[i];
    kept_square_ += static_cast<double>(q) * q;
    kept_error_square_ += static_cast<double>(error) * error;
    if (!uses_memory_) continue;
    const std::uint32_t position = candidate_positions_[kept[i]];
    Log(position, q);
    memory_.data()[position] = error;
  }
}

void Server::Commit() {
  log_positions_.clear();
  log_values_.clear();
  backup_valid_ = false;
}

void Server::Rollback() {
  if (backup_valid_) {
    std::swap(memory_, backup_);
  } else {
    for (std::size_t i = log_positions_.size(); i-- > 0;)
      memory_.data()[log_positions_[i]] = log_values_[i];
  }
  Commit();
}

Span<const float> Server::Drain(float memory_factor) {
  if (memory_.empty()) return {};
  if (backup_.empty()) backup_ = MemoryBuffer(num_positions_);
  std::swap(memory_, backup_);
  backup_valid_ = true;
  std::memset(memory_.data(), 0, num_positions_ * sizeof(float));
  if (memory_factor != 1.0F) {
    // The backup must stay as it was for a rollback, so scale into candidate storage, which this
    // step does not use.
    candidate_values_.resize(num_positions_);
    for (std::size_t i = 0; i < num_positions_; ++i)
      candidate_values_[i] = backup_.data()[i] * memory_factor;
    return candidate_values_;
  }
  return backup_.span();
}

Span<float> Server::MutableMemory() {
  if (memory_.empty()) memory_ = MemoryBuffer(num_positions_);
  return memory_.span();
}

}  // namespace bitopk
