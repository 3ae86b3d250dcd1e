// SPDX-License-Identifier: Apache-2.0
//
// How the communicators divide a reduction among ranks, what that costs, and how they write ranks
// and times in messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"

namespace bitopk::internal {

struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// The entries that `rank` adds: consecutive ranges, the first `num_entries % world_size` one entry
/// longer.
inline Range RangeOf(std::size_t num_entries, int world_size, int rank) {
  const auto n = static_cast<std::size_t>(world_size);
  const auto r = static_cast<std::size_t>(rank);
  const std::size_t each = num_entries / n;
  const std::size_t longer = num_entries % n;
  return {r * each + (r < longer ? r : longer), each + (r < longer ? 1 : 0)};
}

/// Bytes that one rank sends (and receives) in a ring allreduce of `num_bytes`.
inline std::size_t RingBytes(std::size_t num_bytes, int world_size) {
  return 2 * (num_bytes - num_bytes / static_cast<std::size_t>(world_size));
}

/// "rank 2", "ranks 1 and 2", "ranks 1, 2 and 5".
inline std::string ListRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

/// "60 s", "250 ms".
inline std::string DurationText(std::chrono::milliseconds duration) {
  const auto ms = duration.count();
  return ms % 1000 == 0 ? StrCat(ms / 1000, " s") : StrCat(ms, " ms");
}

}  // namespace bitopk::internal
