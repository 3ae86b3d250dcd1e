// SPDX-License-Identifier: Apache-2.0
//
// Value codecs: how the kept entries of a gradient travel. Rounding is to nearest even and
// saturates: a finite value stays finite. NaN travels as the one quiet NaN of the format.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitopk/kernels/span.h"

namespace bitopk::kernels {

enum class ValueFormat : std::uint8_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

/// The bits of the NaN that every NaN becomes when it travels.
inline constexpr std::uint32_t kCanonicalNan = 0x7fc00000U;

/// Bytes that one value takes on the wire.
constexpr std::size_t ValueBytes(ValueFormat format) {
  return format == ValueFormat::kFloat32 ? 4 : 2;
}

/// Writes `values` to `out` (little-endian, shape [values.size() * ValueBytes(format)]) and
/// replaces each value by what the receiver will decode, so that the caller can keep the
/// difference. `out` may be unaligned and must not overlap `values`. Thread-safe; does not
/// allocate.
void EncodeValues(ValueFormat format, Span<float> values, MutableBytes out);

/// Reads `out.size()` values from `in` (shape [out.size() * ValueBytes(format)], may be unaligned).
/// Every bit pattern is legal; NaNs become kCanonicalNan. Thread-safe; does not allocate.
void DecodeValues(ValueFormat format, Bytes in, Span<float> out);

/// What the receiver of `value` decodes: EncodeValues and DecodeValues of one entry.
float RoundToFormat(ValueFormat format, float value);

}  // namespace bitopk::kernels
