// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/threshold.h"

#include <algorithm>

#include "bitopk/kernels/topk.h"

namespace bitopk {
namespace {

constexpr int kBinBits = 6;
constexpr std::size_t kBins = std::size_t{1} << kBinBits;
constexpr int kKeyBits = 31;
constexpr int kEntryBits = 32;

void Narrow(ThresholdQuery& query, std::size_t bin) {
  query.low += static_cast<std::uint64_t>(bin) << query.shift;
  const int shift = std::max(0, query.shift - kBinBits);
  query.num_bins = std::size_t{1} << (query.shift - shift);
  query.shift = shift;
}

// Adds this rank's candidates in the range under search to the bins.
void Count(const ThresholdQuery& query, std::size_t owner, std::uint64_t* bins) {
  for (std::size_t i = 0; i < query.values.size(); ++i) {
    const auto key = static_cast<std::uint64_t>(kernels::MagnitudeKey(query.values[i]));
    std::uint64_t at = key;
    if (query.among_ties) {
      if (key != static_cast<std::uint64_t>(query.key)) continue;
      at = query.shares->EntryAt(owner, query.positions[i]);
    }
    if (at < query.low) continue;
    const std::uint64_t bin = (at - query.low) >> query.shift;
    if (bin < query.num_bins) ++bins[bin];
  }
}

void StartAmongTies(ThresholdQuery& query) {
  query.among_ties = true;
  query.key = static_cast<std::int32_t>(query.low);
  query.low = 0;
  query.shift = kEntryBits - kBinBits;
  query.num_bins = kBins;
}

// From the largest key down: finds the bin that holds the wanted-th entry.
void DigestKeys(ThresholdQuery& query, const std::uint64_t* bins) {
  for (std::size_t bin = kBins; bin-- > 0;) {
    if (bins[bin] < query.wanted) {
      query.wanted -= bins[bin];
      continue;
    }
    const bool whole_bin = bins[bin] == query.wanted;
    if (whole_bin) {  // everything from the lower edge of this bin on is kept
      query.key =
          static_cast<std::int32_t>(query.low + (static_cast<std::uint64_t>(bin) << query.shift)) -
          1;
      query.done = true;
    } else if (query.shift == 0) {
      query.low += bin;
      StartAmongTies(query);
    } else {
      Narrow(query, bin);
    }
    return;
  }
  query.key = 0;  // fewer non-zero entries than k: all are kept
  query.done = true;
}

// From the lowest entry up: finds the entry that is the wanted-th among the ties.
void DigestTies(ThresholdQuery& query, const std::uint64_t* bins) {
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    if (bins[bin] < query.wanted) {
      query.wanted -= bins[bin];
      continue;
    }
    if (bins[bin] == query.wanted) {
      query.last_tie = query.low + (static_cast<std::uint64_t>(bin + 1) << query.shift) - 1;
      query.done = true;
    } else {
      Narrow(query, bin);
    }
    return;
  }
}

}  // namespace

void AgreeOnThresholds(Communicator& comm, const MessageTag& tag,
                       std::vector<ThresholdQuery>& queries, std::vector<std::uint64_t>& counts) {
  const auto owner = static_cast<std::size_t>(comm.rank());
  for (ThresholdQuery& query : queries) {
    query.shift = kKeyBits - kBinBits;
    query.num_bins = kBins;
    query.wanted = query.k;
  }
  std::size_t active = queries.size();
  while (active > 0) {
    counts.assign(active * kBins, 0);
    std::uint64_t* bins = counts.data();
    for (const ThresholdQuery& query : queries) {
      if (query.done) continue;
      Count(query, owner, bins);
      bins += kBins;
    }
    comm.AllReduceSum(tag, counts);
    bins = counts.data();
    for (ThresholdQuery& query : queries) {
      if (query.done) continue;
      query.among_ties ? DigestTies(query, bins) : DigestKeys(query, bins);
      bins += kBins;
      if (query.done) --active;
    }
  }
}

void KeptCandidates(const ThresholdQuery& query, std::size_t owner,
                    std::vector<std::uint32_t>& kept) {
  kept.clear();
  for (std::size_t i = 0; i < query.values.size(); ++i) {
    const std::int32_t key = kernels::MagnitudeKey(query.values[i]);
    const bool tie_kept = query.among_ties && key == query.key &&
                          query.shares->EntryAt(owner, query.positions[i]) <= query.last_tie;
    if (key > query.key || tie_kept) kept.push_back(static_cast<std::uint32_t>(i));
  }
}

}  // namespace bitopk
