// SPDX-License-Identifier: Apache-2.0
//
// Unit: the entries among which one topK selects (a tensor, or all tensors of a rule), with its
// memories; or tensors that travel dense together. Bucket: units that share a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bitopk/config.h"
#include "bitopk/kernels/topk.h"
#include "bitopk/tensor.h"
#include "plugin/src/server.h"
#include "plugin/src/share_map.h"
#include "plugin/src/worker_memory.h"

namespace bitopk {

/// A unit that needs fewer entries than this goes whole to one server: cheaper than agreeing on a
/// threshold.
inline constexpr std::size_t kWholeBelowEntries = 2048;

/// One tensor as part of a unit.
struct UnitTensor {
  std::size_t tensor = 0;  // number in registration order
  std::size_t offset = 0;  // of its first entry in the unit
  std::size_t num_entries = 0;
  kernels::ValueFormat result_format = kernels::ValueFormat::kFloat32;
};

struct Unit {
  std::vector<UnitTensor> tensors;
  std::size_t num_entries = 0;
  DType dtype = DType::kFloat32;
  bool compressed = false;  // topK with memories; otherwise plain dense entries
  bool from_rule = false;
  CompressionSpec spec;
  ExchangeKind exchange = ExchangeKind::kDense;  // once compression has started
  ShareMap shares;
  std::size_t k_up = 0;
  std::size_t k_down = 0;
  WorkerMemory worker;
  Server server;  // this rank's share
  // Some step was compressed, or memories were loaded; equal on all ranks.
  bool memory_in_use = false;
  double scale = 0.0;  // unit of the memories, of the last committed step; 0 before the first
  double pending_scale = 0.0;  // of the step under way, or of the last one until it is committed

  // Sums of squares of the last step, for the statistics: of the entries sent, of what rounding
  // took from them, and of the whole gradient if there is no memory to derive it from.
  double sent_square = 0.0;
  double sent_error_square = 0.0;
  double gradient_square = 0.0;

  /// Whether some tensor's own type is narrower than float32.
  bool has_narrow_results() const {
    for (const UnitTensor& part : tensors)
      if (part.result_format != kernels::ValueFormat::kFloat32) return true;
    return false;
  }
  /// The tensor that holds an entry.
  const UnitTensor& TensorAt(std::size_t entry) const;
  bool unidirectional() const { return k_down >= num_entries; }
  /// The sum of a unidirectional unit is not compressed at all.
  kernels::ValueFormat downlink_format() const {
    return unidirectional() ? kernels::ValueFormat::kFloat32 : spec.value_format;
  }
  /// The exchange of step number `step` of the schedule.
  ExchangeKind ExchangeAt(std::uint64_t step) const {
    return compressed && step >= spec.start_step ? exchange : ExchangeKind::kDense;
  }
};

/// Units that share a message; all have the same exchange at every step.
struct Bucket {
  std::vector<std::size_t> units;
  std::size_t dense_bytes = 0;
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Bucket>
      buckets;  // in launch order: as backward completes them, last registered first
  std::vector<std::size_t> bucket_of_tensor;
  std::vector<std::size_t> unit_of_tensor;
  std::vector<std::string> decisions;  // why each exchange was chosen, for a log
  std::vector<std::string> warnings;
};

/// Forms units and buckets from tensors in registration order. Depends on nothing but its
/// arguments, so that all ranks agree.
Plan MakePlan(const std::vector<TensorSpec>& tensors, const Config& config, int rank,
              int world_size);

/// Sets k_up and k_down from the unit's spec.
void SetEntriesToKeep(Unit& unit);

/// Hash of all that must be equal on all ranks for a bucket's message to be understood.
std::uint64_t BucketDigest(const Plan& plan, const Bucket& bucket, std::uint64_t schedule_step,
                           Op op, double scale);

/// The gradient of a unit as pieces; tensors that were not submitted count as zeros. Reuses
/// `segments`.
void GradientSegments(const Unit& unit, const std::vector<TensorSubmission>& submissions,
                      std::vector<kernels::GradientSegment>& segments);

/// FNV-1a, 64 bits, continued from `hash`.
std::uint64_t HashBytes(const void* data, std::size_t num_bytes,
                        std::uint64_t hash = 0xcbf29ce484222325ULL);

}  // namespace bitopk
