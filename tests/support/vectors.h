// SPDX-License-Identifier: Apache-2.0
//
// Random vectors of several kinds, an independent topK by sorting, and comparison of bits: for the
// tests of servers, thresholds and engines.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace bitopk::testing {

enum class Values {
  kNormal,   // standard normal
  kFew,      // -2, -1, 0, 1 or 2: ties everywhere
  kLayered,  // normal; eight contiguous layers whose scales differ by 100
  kDenormal  // multiples of the smallest denormal
};

inline std::vector<float> RandomValues(std::uint64_t seed, std::size_t num_entries, Values kind) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(num_entries);
  for (std::size_t i = 0; i < num_entries; ++i) {
    switch (kind) {
      case Values::kNormal:
        values[i] = normal(random);
        break;
      case Values::kFew:
        values[i] = static_cast<float>(static_cast<int>(random() % 5) - 2);
        break;
      case Values::kLayered:
        values[i] = normal(random) * (8 * i / num_entries % 2 == 0 ? 1.0F : 0.01F);
        break;
      case Values::kDenormal:
        values[i] = static_cast<float>(static_cast<int>(random() % 201) - 100) * 0x1p-149F;
        break;
    }
  }
  return values;
}

inline std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline std::vector<std::uint32_t> BitsOf(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits(values.size());
  if (!bits.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

/// Rank by magnitude as the contract has it: all NaNs equal and above Inf.
inline std::uint32_t SortKey(float value) {
  return std::isnan(value) ? 0x7fffffffU : BitsOf(value) & 0x7fffffffU;
}

/// The numbers of the min(k, non-zero) largest entries, ascending, by a full sort.
inline std::vector<std::uint32_t> SortedTopK(const std::vector<float>& x, std::size_t k) {
  std::vector<std::uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return SortKey(x[a]) > SortKey(x[b]); });
  order.resize(std::min(k, order.size()));
  while (!order.empty() && SortKey(x[order.back()]) == 0) order.pop_back();
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace bitopk::testing
