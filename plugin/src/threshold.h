// SPDX-License-Identifier: Apache-2.0
//
// How the ranks that serve the shares of a unit agree on its k largest entries without gathering
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/communicator.h"
#include "plugin/src/share_map.h"

namespace bitopk {

/// One unit: this rank's candidates, which contain all of its entries that can be among the k
/// largest, and the answer.
struct ThresholdQuery {
  Span<const std::uint32_t> positions;  // in this rank's share, shape [n]
  Span<const float> values;             // shape [n]
  const ShareMap* shares = nullptr;
  std::size_t k = 0;  // >= 1

  /// Answer: kept are the entries whose key exceeds `key`, and those equal to it that are numbered
  /// up to `last_tie`.
  std::int32_t key = 0;
  std::uint64_t last_tie = 0;

  // State of the search; see AgreeOnThresholds.
  bool done = false;
  bool among_ties = false;
  std::uint64_t low = 0;
  int shift = 0;             // bits of the range that one bin covers
  std::size_t num_bins = 0;  // that cover the range; the last round of a search may need only two
  std::size_t wanted = 0;
};

/// Answers all queries together: rounds of histograms of 64 bins a unit, summed over the ranks,
/// each round over the bin that holds the k-th largest key; if that key is shared by too many
/// entries, rounds over the entries' numbers follow (lower numbers win). At most 6 + 6 rounds of
/// 512 bytes a unit. All ranks call it with the same queries but for their candidates.
/// @throws CommunicationError
void AgreeOnThresholds(Communicator& comm, const MessageTag& tag,
                       std::vector<ThresholdQuery>& queries, std::vector<std::uint64_t>& counts);

/// The numbers of the candidates that the answer keeps.
void KeptCandidates(const ThresholdQuery& query, std::size_t owner,
                    std::vector<std::uint32_t>& kept);

}  // namespace bitopk
