// SPDX-License-Identifier: Apache-2.0
//
// The one pass over memory that selection needs, in one variant per instruction set. Private to the
// kernels: topk.cc calls it, scan_simd.cc and scan_scalar.cc implement it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitopk/kernels/isa.h"

namespace bitopk::kernels {

/// Key by which entries are ranked: the bits without the sign. Keys of NaNs lie above kInfKey.
inline constexpr std::int32_t kKeyMask = 0x7fffffff;
inline constexpr std::int32_t kInfKey = 0x7f800000;
/// The one key that all NaNs share once they are ranked.
inline constexpr std::int32_t kNanKey = kInfKey + 1;

/// Entries that a variant may append beyond its last check of the room left; output arrays are this
/// much longer.
inline constexpr std::size_t kScanSlack = 128;

/// What one scan does, for i in [0, num_entries):
///   a = memory[i] * factor + gradient[i]      (two roundings; a missing operand counts as zero)
///   if low < key(a) <= high: append (first_index + i, a) to the candidates, and a leaves 0 in
///   `corrected` corrected[i] = a otherwise.
struct ScanTask {
  const float* memory = nullptr;  // null: zero
  float factor = 1.0F;
  const float* gradient = nullptr;  // null: zero; at least one of memory and gradient is given
  float* corrected = nullptr;       // null: not wanted. May equal `gradient` when memory is null.
  std::size_t num_entries = 0;
  std::uint32_t first_index = 0;
  std::int32_t low = 0;
  std::int32_t high = kKeyMask;  // looked at only when `corrected` is null
  bool expect_few = false;       // hint: most blocks of 64 hold no candidate
  bool stream = false;           // hint: `corrected` is larger than the caches, write around them
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  std::size_t room = 0;  // candidates that fit, kScanSlack not counted
};

struct ScanResult {
  std::size_t consumed = 0;  // entries looked at; fewer than num_entries when the room ran out
  std::size_t appended = 0;
};

/// A variant. `compiled_for` names the target it was really compiled for, so that tests can prove
/// which one ran.
struct ScanVariant {
  Isa isa;
  const char* compiled_for;
  ScanResult (*scan)(const ScanTask& task);
};

/// REQUIRES: `isa` is in SupportedIsas().
const ScanVariant& ScanVariantFor(Isa isa);

/// The reference: plain C++, one entry at a time.
extern const ScanVariant kScalarScan;

}  // namespace bitopk::kernels
