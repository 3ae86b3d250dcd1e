// SPDX-License-Identifier: Apache-2.0
//
// The scan in plain C++: the reference that every vector variant must equal bit for bit.
#include <cstring>

#include "kernels/cpu/scan.h"

namespace bitopk::kernels {
namespace {

ScanResult ScanScalar(const ScanTask& task) {
  const std::int32_t high = task.corrected == nullptr ? task.high : kKeyMask;
  ScanResult result;
  for (; result.consumed < task.num_entries && result.appended < task.room; ++result.consumed) {
    const std::size_t i = result.consumed;
    float a = task.gradient != nullptr ? task.gradient[i] : 0.0F;
    if (task.memory != nullptr) {
      const float scaled = task.memory[i] * task.factor;
      a = task.gradient != nullptr ? scaled + a : scaled + 0.0F;
    }
    std::int32_t key;
    std::memcpy(&key, &a, sizeof key);
    key &= kKeyMask;
    const bool candidate = key > task.low && key <= high;
    if (candidate) {
      task.indices[result.appended] = task.first_index + static_cast<std::uint32_t>(i);
      task.values[result.appended] = a;
      ++result.appended;
    }
    if (task.corrected != nullptr) task.corrected[i] = candidate ? 0.0F : a;
  }
  return result;
}

}  // namespace

const ScanVariant kScalarScan = {Isa::kScalar, "scalar", &ScanScalar};

}  // namespace bitopk::kernels
