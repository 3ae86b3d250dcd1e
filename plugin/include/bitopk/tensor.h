// SPDX-License-Identifier: Apache-2.0
//
// How tensors are described and handed to an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "bitopk/config.h"

namespace bitopk {

/// What an engine knows of a tensor. The name is its identity across ranks and restarts.
struct TensorSpec {
  std::string name;
  std::size_t num_entries = 0;
  DType dtype = DType::kFloat32;
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
