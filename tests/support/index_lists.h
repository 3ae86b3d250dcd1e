// SPDX-License-Identifier: Apache-2.0
//
// Lists of kept positions, as tests and benchmarks of the codecs need them, and streams built by
// hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace bitopk::testing {

/// Positions kept independently with probability `density`, ascending. Time is that of the result.
inline std::vector<std::uint32_t> RandomIndices(std::size_t num_positions, double density,
                                                unsigned seed) {
  std::vector<std::uint32_t> indices;
  if (density <= 0) return indices;
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  const double log_miss = std::log1p(-std::min(density, 1.0));
  std::size_t position = 0;
  while (true) {
    if (density < 1) {
      const double gap = std::floor(std::log1p(-uniform(random)) / log_miss);
      if (gap >= static_cast<double>(num_positions)) break;
      position += static_cast<std::size_t>(gap);
    }
    if (position >= num_positions) break;
    indices.push_back(static_cast<std::uint32_t>(position++));
  }
  return indices;
}

/// Exactly `count` of `num_positions` positions, each list equally likely, ascending.
inline std::vector<std::uint32_t> RandomIndicesExactly(std::size_t count, std::size_t num_positions,
                                                       unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint32_t> indices;
  for (std::size_t position = 0; position < num_positions && indices.size() < count; ++position) {
    const std::size_t left = num_positions - position;
    if (random() % left < count - indices.size()) {
      indices.push_back(static_cast<std::uint32_t>(position));
    }
  }
  return indices;
}

/// Bursts of neighbours with long gaps between them, like the layers of a gradient.
inline std::vector<std::uint32_t> ClusteredIndices(std::size_t num_positions, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint32_t> indices;
  std::size_t position = random() % 1000;
  while (position < num_positions) {
    const std::size_t end = std::min<std::size_t>(num_positions, position + random() % 5000);
    for (; position < end; position += 1 + random() % 3) {
      indices.push_back(static_cast<std::uint32_t>(position));
    }
    position += random() % 100000;
  }
  return indices;
}

/// A bit stream built field by field, the first bit at the lowest position of the first byte.
class BitString {
 public:
  /// Bits of `value` beyond its 64 are 0.
  BitString& Put(std::uint64_t value, unsigned num_bits) {
    for (unsigned i = 0; i < num_bits; ++i) {
      if (num_bits_ % 8 == 0) bytes_.push_back(0);
      const std::uint64_t bit = i < 64 ? value >> i & 1U : 0;
      bytes_.back() = static_cast<std::uint8_t>(bytes_.back() | bit << (num_bits_ % 8));
      ++num_bits_;
    }
    return *this;
  }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
  std::size_t num_bits_ = 0;
};

}  // namespace bitopk::testing
