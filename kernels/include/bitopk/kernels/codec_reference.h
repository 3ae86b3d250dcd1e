// SPDX-License-Identifier: Apache-2.0
//
// Deliberately plain versions of the codecs, written bit by bit straight from
// plugin/WIRE_FORMAT.md. Tests hold every fast variant against them; nothing else calls them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/kernels/span.h"
#include "bitopk/kernels/values.h"

namespace bitopk::kernels::reference {

/// The canonical stream of `indices` (shape [k], strictly ascending, each < num_positions <= 2^32).
/// Thread-safe; allocates the result.
std::vector<std::uint8_t> EncodeIndices(Span<const std::uint32_t> indices,
                                        std::size_t num_positions);

/// The positions in a stream of `num_indices` of `num_positions` positions. Thread-safe; allocates.
/// @throws WireFormatError on any violation of the format.
std::vector<std::uint32_t> DecodeIndices(Bytes in, std::size_t num_indices,
                                         std::size_t num_positions);

/// The bytes of `values` on the wire, one by one. Thread-safe; allocates the result.
std::vector<std::uint8_t> EncodeValues(ValueFormat format, Span<const float> values);

/// The values that `in` (shape [num_values * ValueBytes(format)]) stands for. Thread-safe;
/// allocates.
std::vector<float> DecodeValues(ValueFormat format, Bytes in, std::size_t num_values);

}  // namespace bitopk::kernels::reference
