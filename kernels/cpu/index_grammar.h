// SPDX-License-Identifier: Apache-2.0
//
// The numbers of the index grammar (plugin/WIRE_FORMAT.md, section 3) and the encoder's choice
// among a chunk's forms. Private to the CPU variants of the index codec.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bitopk::kernels {

inline constexpr unsigned kCodeBits = 4;
inline constexpr unsigned kMaxLowBits = 12;  // codes 0..12: Elias-Fano with that many low bits
inline constexpr unsigned kRawCode = 13;
inline constexpr unsigned kBitmapCode = 14;
inline constexpr unsigned kRunCode = 15;

inline constexpr unsigned kCountWidthBits = 4;
inline constexpr unsigned kRawBits = 16;
inline constexpr unsigned kRunBits = 16;
inline constexpr std::size_t kMaxRunChunks = 65536;
inline constexpr unsigned kRunHeaderBits = kCodeBits + 1 + kRunBits;
inline constexpr unsigned kMaxChunkHeaderBits = kCodeBits + kCountWidthBits + 15;

/// The largest w with 2^w <= n. REQUIRES: n >= 1.
inline unsigned FloorLog2(std::uint64_t n) {
  return 63U - static_cast<unsigned>(__builtin_clzll(n));
}

/// Bits of the upper parts of `count` positions: a one for each, and a zero for each step up.
inline std::size_t UpperBits(std::size_t count, std::size_t chunk_positions, unsigned low_bits) {
  return count + ((chunk_positions - 1) >> low_bits);
}

/// The code of the smallest form of a chunk, the lowest code among equals.
/// REQUIRES: 1 <= count < chunk_positions.
inline unsigned SmallestCode(std::size_t count, std::size_t chunk_positions) {
  // One low bit more costs `count` bits and saves half of the upper zeros: a convex function.
  unsigned low_bits = 0;
  std::size_t zeros = chunk_positions - 1;
  while (low_bits < kMaxLowBits && zeros - zeros / 2 > count) {
    zeros /= 2;
    ++low_bits;
  }
  const std::size_t elias_fano_bits = count * (low_bits + 1) + zeros;
  const std::size_t raw_bits = count * kRawBits;
  if (elias_fano_bits <= raw_bits && elias_fano_bits <= chunk_positions) return low_bits;
  return raw_bits <= chunk_positions ? kRawCode : kBitmapCode;
}

}  // namespace bitopk::kernels
