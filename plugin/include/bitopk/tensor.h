// SPDX-License-Identifier: Apache-2.0
//
// How tensors are described and handed to an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "bitopk/config.h"
#include "bitopk/kernels/values.h"

namespace bitopk {

/// What an engine knows of a tensor. The name is its identity across ranks and restarts.
struct TensorSpec {
  std::string name;
  std::size_t num_entries = 0;
  DType dtype = DType::kFloat32;
  /// The caller's own type, if it is narrower than float32: results are rounded to it, and the
  /// server memory keeps the rounding error. Where there is no such memory (or the tensor travels
  /// dense), a result beyond the type's range counts as non-finite, as it would in a dense
  /// allreduce.
  kernels::ValueFormat result_format = kernels::ValueFormat::kFloat32;
};

/// Where the entries of a submitted tensor live. Device memory will get its own enumerator.
enum class Device : std::uint8_t { kHost };

/// A contiguous gradient that the caller keeps alive and unchanged until the step is done, and
/// where the result goes; the two may be the same memory, otherwise they must not overlap. `ready`
/// is the event after which `gradient` may be read on devices that have such (null on the host).
struct TensorSubmission {
  const void* gradient = nullptr;
  void* result = nullptr;
  Device device = Device::kHost;
  void* ready = nullptr;
};

}  // namespace bitopk
