// SPDX-License-Identifier: Apache-2.0
//
// "Stream and prune": a threshold estimated from a sample decides what becomes a candidate in the
// one pass over memory; if the candidate buffer fills, it is pruned to the best k and the threshold
// rises; if too few were found (rare), a second pass takes the rest from a histogram. Every path
// ends in an exact selection among candidates, so the estimate changes the time and never the
// result.
#include "bitopk/kernels/topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bitopk/kernels/error.h"
#include "kernels/cpu/scan.h"

namespace bitopk::kernels {
namespace {

constexpr std::size_t kSampleRun = 64;  // contiguous entries a sample run takes
constexpr std::size_t kMaxSamples =
    131072;  // 2,048 runs: 0 misses of 123 on layered data, 0.03 of a pass
constexpr std::size_t kSampleFrom = 8192;            // smaller vectors are all candidates
constexpr std::size_t kStreamFromEntries = 1 << 20;  // 4 MiB: beyond, write around the caches
constexpr double kFewBelowDensity = 0.004;           // blocks of 64 mostly without a candidate
constexpr std::size_t kHistogramBins = 2048;
constexpr std::int32_t kEverything = -1;  // as exclusive lower bound: zeros included
constexpr std::int32_t kNonzero = 0;      // as exclusive lower bound: zeros excluded

std::int32_t RawKey(float value) {
  std::int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & kKeyMask;
}

// The k-th largest key and how many entries with exactly that key belong to the k.
struct Cut {
  std::int32_t key = 0;
  std::size_t ties = 0;
};

std::size_t SampleCount(std::size_t num_entries) {
  return std::min(kMaxSamples, std::max<std::size_t>(4096, num_entries / 16));
}

}  // namespace

std::int32_t MagnitudeKey(float value) { return std::min(RawKey(value), kNanKey); }

TopKWorkspace::TopKWorkspace(Isa isa) : isa_(isa) {
  const auto supported = SupportedIsas();
  BITOPK_CHECK_ARG(std::find(supported.begin(), supported.end(), isa) != supported.end(),
                   "TopKWorkspace: this processor lacks ", IsaName(isa));
}

const char* TopKWorkspace::compiled_for() const { return ScanVariantFor(isa_).compiled_for; }

// One selection. The vector is given as pieces, with or without a memory; see CompressTopK.
class TopKSelector {
 public:
  TopKSelector(Span<const GradientSegment> pieces, const float* memory, float factor,
               float* corrected, TopKWorkspace& workspace)
      : pieces_(pieces),
        memory_(memory),
        factor_(factor),
        corrected_(corrected),
        scan_(ScanVariantFor(workspace.isa_).scan),
        workspace_(workspace) {
    for (const GradientSegment& piece : pieces_) num_entries_ += piece.num_entries;
  }

  SelectedEntries Select(std::size_t k, std::int32_t lowest) {
    k = std::min(k, num_entries_);
    ReserveCandidates(k);
    if (k == 0) {  // nothing is kept, the memory is still to be written
      Collect(kKeyMask, kKeyMask, k);
      return {};
    }
    const std::int32_t threshold = EstimateThreshold(k, lowest);
    Region found = Collect(threshold, kKeyMask, k);
    if (found.count < k && threshold > lowest) AddRest(threshold, lowest, k, found);
    kept_ = Prune(found, k);
    return {Span<std::uint32_t>(workspace_.indices_.data(), kept_),
            Span<float>(workspace_.values_.data(), kept_)};
  }

 private:
  // A range of keys that holds the rank-th largest key.
  struct Bin {
    std::int32_t low = 0;
    std::int32_t high = 0;  // inclusive
    std::size_t count = 0;  // keys in the range
    std::size_t rank = 0;   // of the key sought among them
  };

  // Candidates [begin, begin + count) of the buffer, of which there may be `capacity`.
  struct Region {
    std::size_t begin;
    std::size_t count;
    std::size_t capacity;
    std::int32_t threshold;  // exclusive lower bound of keys to come
    std::int32_t floor;      // inclusive lower bound of the keys that are there
  };

  void ReserveCandidates(std::size_t k) {
    capacity_ = std::min(num_entries_, std::max(2 * k, k + 4096));
    // A second pass appends up to `capacity_` more behind the first pass's k - 1 at most.
    const std::size_t needed = capacity_ + k + kScanSlack;
    if (workspace_.indices_.size() < needed) {
      workspace_.indices_.resize(needed);
      workspace_.values_.resize(needed);
    }
    if (workspace_.histogram_.empty()) workspace_.histogram_.resize(2 * kHistogramBins);
  }

  // An exclusive lower bound that about k entries, and almost surely no fewer than k, exceed.
  std::int32_t EstimateThreshold(std::size_t k, std::int32_t lowest) {
    if (num_entries_ <= kSampleFrom || k > num_entries_ / 2) return lowest;
    const std::size_t sampled = Sample();
    const double fraction = static_cast<double>(k) / static_cast<double>(num_entries_);
    const double expected = static_cast<double>(sampled) * fraction;
    const auto rank =
        static_cast<std::size_t>(expected + 3.0 * std::sqrt(expected * (1.0 - fraction)) + 2.0);
    if (rank > sampled) return lowest;
    return std::max(lowest, KthSample(sampled, rank) - 1);
  }

  // The rank-th largest key of the sample: coarse bins first, so that only a few keys are looked at
  // exactly.
  std::int32_t KthSample(std::size_t count, std::size_t rank) {
    const float* const samples = workspace_.samples_.data();
    if (workspace_.keys_.size() < count) workspace_.keys_.resize(count);
    const Bin bin = CoarseBinOfRank({{samples, count}}, kKeyMask, rank);
    std::size_t inside = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t key = MagnitudeKey(samples[i]);
      workspace_.keys_[inside] = key;
      inside += key >= bin.low && key <= bin.high ? 1 : 0;
    }
    return KthKey(inside, bin.rank).key;
  }

  // Stratified runs of corrected entries into workspace_.samples_; returns how many entries.
  std::size_t Sample() {
    const std::size_t runs = SampleCount(num_entries_) / kSampleRun;
    if (workspace_.samples_.size() < runs * kSampleRun) workspace_.samples_.resize(kMaxSamples);
    float* out = workspace_.samples_.data();
    std::size_t piece = 0;
    std::size_t piece_start = 0;
    for (std::size_t run = 0; run < runs; ++run) {
      const std::size_t start = num_entries_ / runs * run;
      while (start >= piece_start + pieces_[piece].num_entries)
        piece_start += pieces_[piece++].num_entries;
      const std::size_t length =
          std::min(kSampleRun, piece_start + pieces_[piece].num_entries - start);
      out = CorrectRun(piece, start - piece_start, start, length, out);
    }
    return static_cast<std::size_t>(out - workspace_.samples_.data());
  }

  float* CorrectRun(std::size_t piece, std::size_t offset, std::size_t start, std::size_t length,
                    float* out) const {
    const float* gradient = pieces_[piece].gradient;
    for (std::size_t i = 0; i < length; ++i) {
      const float g = gradient != nullptr ? gradient[offset + i] : 0.0F;
      out[i] = memory_ != nullptr ? memory_[start + i] * factor_ + g : g;
    }
    return out + length;
  }

  // The pass: appends every entry with threshold < key <= high, pruning to the best k whenever the
  // buffer is full.
  Region Collect(std::int32_t threshold, std::int32_t high, std::size_t k) {
    Region region{0, 0, capacity_, threshold, std::min(threshold, kNanKey) + 1};
    std::size_t first = 0;
    for (const GradientSegment& piece : pieces_) {
      if (piece.gradient != nullptr || memory_ != nullptr) {
        ScanTask task = TaskFor(first);
        task.memory = memory_ != nullptr ? memory_ + first : nullptr;
        task.factor = factor_;
        task.gradient = piece.gradient;
        task.corrected = corrected_ != nullptr ? corrected_ + first : nullptr;
        task.high = high;
        task.expect_few =
            static_cast<double>(k) < kFewBelowDensity * static_cast<double>(num_entries_);
        task.stream = corrected_ != nullptr && num_entries_ >= kStreamFromEntries;
        ScanPiece(task, piece.num_entries, k, region);
      } else if (threshold < 0) {
        AppendZeros(first, piece.num_entries, k, region);
      }
      first += piece.num_entries;
    }
    return region;
  }

  static ScanTask TaskFor(std::size_t first) {
    ScanTask task;
    task.first_index = static_cast<std::uint32_t>(first);
    return task;
  }

  void ScanPiece(ScanTask task, std::size_t num_entries, std::size_t keep, Region& region) {
    while (num_entries > 0) {
      if (region.count >= region.capacity) RaiseThreshold(keep, region);
      task.num_entries = num_entries;
      task.low = region.threshold;
      task.indices = workspace_.indices_.data() + region.begin + region.count;
      task.values = workspace_.values_.data() + region.begin + region.count;
      task.room = region.capacity - region.count;
      const ScanResult done = scan_(task);
      region.count += done.appended;
      num_entries -= done.consumed;
      task.first_index += static_cast<std::uint32_t>(done.consumed);
      if (task.memory != nullptr) task.memory += done.consumed;
      if (task.gradient != nullptr) task.gradient += done.consumed;
      if (task.corrected != nullptr) task.corrected += done.consumed;
    }
  }

  // The buffer is full: keep its best, and from now on only what beats the last of them, since
  // later equals lose.
  void RaiseThreshold(std::size_t keep, Region& region) {
    region.count = Prune(region, keep);
    region.threshold = last_cut_.key == kNanKey ? kKeyMask : last_cut_.key;
    region.floor = last_cut_.key;
  }

  void AppendZeros(std::size_t first, std::size_t num_entries, std::size_t keep, Region& region) {
    for (std::size_t i = 0; i < num_entries; ++i) {
      if (region.count >= region.capacity) RaiseThreshold(keep, region);
      if (region.threshold >= 0) return;
      workspace_.indices_[region.begin + region.count] = static_cast<std::uint32_t>(first + i);
      workspace_.values_[region.begin + region.count] = 0.0F;
      ++region.count;
    }
  }

  // The estimate was too high: fewer than k entries, `found`, exceed it. Takes the largest of the
  // others from a second pass.
  void AddRest(std::int32_t threshold, std::int32_t lowest, std::size_t k, Region& found) {
    const std::size_t missing = k - found.count;
    std::vector<GradientSegment> rest(pieces_.begin(), pieces_.end());
    if (corrected_ != nullptr) rest = {{corrected_, num_entries_}};
    const std::int32_t low = std::max(lowest, CoarseBinOfRank(rest, threshold, missing).low - 1);
    Region region{found.count, 0, capacity_, low, low + 1};
    std::size_t first = 0;
    for (const GradientSegment& piece : rest) {
      ScanTask task = TaskFor(first);
      task.gradient = piece.gradient;
      task.corrected = corrected_;
      task.high =
          threshold;  // what the first pass took stays in x, but not in `corrected`, where it is 0
      if (piece.gradient != nullptr) {
        ScanPiece(task, piece.num_entries, missing, region);
      } else if (low < 0) {
        AppendZeros(first, piece.num_entries, missing, region);
      }
      first += piece.num_entries;
    }
    const std::size_t added = Prune(region, missing);
    MergeByIndex(found.count, added);
    found = {0, found.count + added, capacity_, lowest, lowest + 1};
  }

  // Bins of the exponent and three bits of the mantissa over the keys up to `high`. If fewer than
  // `rank` entries have one, the range is that of all of them.
  Bin CoarseBinOfRank(const std::vector<GradientSegment>& pieces, std::int32_t high,
                      std::size_t rank) {
    constexpr int kShift = 20;
    auto& bins = workspace_.histogram_;
    std::fill(bins.begin(), bins.end(), 0U);
    std::uint32_t* const tables[2] = {bins.data(), bins.data() + kHistogramBins};
    for (const GradientSegment& piece : pieces) {
      for (std::size_t i = 0; piece.gradient != nullptr && i < piece.num_entries; ++i) {
        const std::int32_t key = MagnitudeKey(piece.gradient[i]);
        tables[i & 1][static_cast<std::size_t>(key) >> kShift] += key <= high ? 1U : 0U;
      }
    }
    for (std::size_t bin = kHistogramBins; bin-- > 0;) {
      const std::size_t in_bin = bins[bin] + bins[kHistogramBins + bin];
      const auto low = static_cast<std::int32_t>(bin << kShift);
      if (in_bin >= rank) return {low, low + ((1 << kShift) - 1), in_bin, rank};
      rank -= in_bin;
    }
    return {0, kNanKey, 0, rank};
  }

  // Merges the two index-sorted lists [0, first) and [first, first + second) of the buffer.
  void MergeByIndex(std::size_t first, std::size_t second) {
    const std::vector<std::uint32_t> a(
        workspace_.indices_.begin(),
        workspace_.indices_.begin() + static_cast<std::ptrdiff_t>(first));
    const std::vector<float> a_values(
        workspace_.values_.begin(),
        workspace_.values_.begin() + static_cast<std::ptrdiff_t>(first));
    std::size_t i = 0;
    std::size_t j = first;
    const std::size_t end = first + second;
    // The output never overtakes the second list: `out` <= j always, since i <= first.
    for (std::size_t out = 0; out < end && i < first; ++out) {
      const bool take_second = j < end && workspace_.indices_[j] < a[i];
      workspace_.indices_[out] = take_second ? workspace_.indices_[j] : a[i];
      workspace_.values_[out] = take_second ? workspace_.values_[j] : a_values[i];
      if (take_second) {
        ++j;
      } else {
        ++i;
      }
    }
  }

  // Reduces candidates [begin, begin + count) to the best `keep`, in place and in order, and gives
  // the others back to the memory. Returns how many are left. A histogram settles all but one bin
  // at a glance; the few candidates of that bin are looked at exactly, and those of them that lose
  // are taken out afterwards.
  std::size_t Prune(const Region& region, std::size_t keep) {
    if (region.count <= keep) return region.count;
    std::uint32_t* const indices = workspace_.indices_.data() + region.begin;
    float* const values = workspace_.values_.data() + region.begin;
    const Bin bin = BinOfRank(values, region.count, keep, region.floor);
    if (workspace_.boundary_.size() < bin.count)
      workspace_.boundary_.resize(std::max(bin.count, 2 * workspace_.boundary_.size()));
    std::uint32_t* const boundary = workspace_.boundary_.data();
    std::size_t num_boundary = 0;
    std::size_t left = 0;
    for (std::size_t i = 0; i < region.count; ++i) {
      const std::uint32_t index = indices[i];
      const float value = values[i];
      const std::int32_t key = MagnitudeKey(value);
      indices[left] = index;
      values[left] = value;
      if (key < bin.low) {
        if (corrected_ != nullptr) corrected_[index] = value;
        continue;
      }
      if (key <= bin.high) boundary[num_boundary++] = static_cast<std::uint32_t>(left);
      ++left;
    }
    return DropFromBoundary(region, num_boundary, bin.rank, left);
  }

  // Of the candidates numbered boundary[0, num_boundary), all but the best `keep` go. Returns how
  // many candidates are left.
  std::size_t DropFromBoundary(const Region& region, std::size_t num_boundary, std::size_t keep,
                               std::size_t count) {
    std::uint32_t* const indices = workspace_.indices_.data() + region.begin;
    float* const values = workspace_.values_.data() + region.begin;
    const std::uint32_t* const boundary = workspace_.boundary_.data();
    if (workspace_.keys_.size() < num_boundary)
      workspace_.keys_.resize(std::max(num_boundary, 2 * workspace_.keys_.size()));
    for (std::size_t i = 0; i < num_boundary; ++i)
      workspace_.keys_[i] = MagnitudeKey(values[boundary[i]]);
    last_cut_ = KthKey(num_boundary, keep);
    std::size_t ties = last_cut_.ties;
    std::size_t left = num_boundary == 0 ? count : boundary[0];
    for (std::size_t i = 0; i < num_boundary; ++i) {
      const std::size_t at = boundary[i];
      const std::size_t next = i + 1 < num_boundary ? boundary[i + 1] : count;
      const std::int32_t key = MagnitudeKey(values[at]);
      const bool tie = key == last_cut_.key && ties > 0;
      ties -= tie ? 1 : 0;
      const bool kept = key > last_cut_.key || tie;
      if (!kept && corrected_ != nullptr) corrected_[indices[at]] = values[at];
      const std::size_t from = kept ? at : at + 1;
      if (left != from) {
        std::memmove(indices + left, indices + from, (next - from) * sizeof(std::uint32_t));
        std::memmove(values + left, values + from, (next - from) * sizeof(float));
      }
      left += next - from;
    }
    return left;
  }

  // Bins over the two octaves from `low` on, where a threshold's candidates lie, and one for all
  // beyond. REQUIRES: all keys >= low; 1 <= rank <= count.
  Bin BinOfRank(const float* values, std::size_t count, std::size_t rank, std::int32_t low) {
    constexpr int kShift = 13;
    constexpr auto kLast = static_cast<std::int32_t>(kHistogramBins - 1);
    auto& bins = workspace_.histogram_;
    std::fill(bins.begin(), bins.end(), 0U);
    std::uint32_t* const even = bins.data();
    std::uint32_t* const odd =
        bins.data() + kHistogramBins;  // two tables, so that equal bins in a row do not wait
    const auto bin_of = [=](float value) {
      return std::min((MagnitudeKey(value) - low) >> kShift, kLast);
    };
    std::size_t i = 0;
    for (; i + 2 <= count; i += 2) {
      ++even[bin_of(values[i])];
      ++odd[bin_of(values[i + 1])];
    }
    if (i < count) ++even[bin_of(values[i])];
    auto bin = kHistogramBins - 1;
    std::size_t in_bin = even[bin] + odd[bin];
    while (in_bin < rank) {
      rank -= in_bin;
      --bin;
      in_bin = even[bin] + odd[bin];
    }
    const std::int32_t bin_low = low + static_cast<std::int32_t>(bin << kShift);
    const std::int32_t bin_high =
        bin == kHistogramBins - 1 ? kNanKey : bin_low + ((1 << kShift) - 1);
    return {bin_low, bin_high, in_bin, rank};
  }

  // Exact rank-th largest of workspace_.keys_[0, count), whose order is lost. REQUIRES: 1 <= rank
  // <= count. Histograms over the range of keys present, each time only over the bin that holds the
  // answer.
  Cut KthKey(std::size_t count, std::size_t rank) {
    std::int32_t* const keys = workspace_.keys_.data();
    while (true) {
      std::int32_t lo = kKeyMask;
      std::int32_t hi = 0;
      for (std::size_t i = 0; i < count; ++i) {
        lo = std::min(lo, keys[i]);
        hi = std::max(hi, keys[i]);
      }
      int shift = 0;
      while (((hi - lo) >> shift) >= static_cast<std::int32_t>(kHistogramBins)) ++shift;
      auto& bins = workspace_.histogram_;
      std::fill(bins.begin(), bins.end(), 0U);
      for (std::size_t i = 0; i < count; ++i)
        ++bins[static_cast<std::size_t>((keys[i] - lo) >> shift)];
      auto bin = static_cast<std::size_t>((hi - lo) >> shift);
      while (bins[bin] < rank) rank -= bins[bin--];
      const std::int32_t bin_lo = lo + static_cast<std::int32_t>(bin << shift);
      if (shift == 0) return {bin_lo, rank};
      const std::int32_t bin_hi = std::min(hi, bin_lo + ((1 << shift) - 1));
      std::size_t inside = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t key = keys[i];
        keys[inside] = key;
        inside += key >= bin_lo && key <= bin_hi ? 1 : 0;
      }
      count = inside;
    }
  }

  Span<const GradientSegment> pieces_;
  const float* memory_;
  float factor_;
  float* corrected_;
  ScanResult (*scan_)(const ScanTask&);
  TopKWorkspace& workspace_;
  std::size_t num_entries_ = 0;
  std::size_t capacity_ = 0;
  std::size_t kept_ = 0;
  Cut last_cut_;
};

SelectedEntries SelectTopK(Span<const float> x, std::size_t k, TopKWorkspace& workspace) {
  const GradientSegment piece{x.data(), x.size()};
  return TopKSelector({&piece, 1}, nullptr, 1.0F, nullptr, workspace).Select(k, kEverything);
}

SelectedEntries SelectNonzeroTopK(Span<const float> x, std::size_t k, TopKWorkspace& workspace) {
  const GradientSegment piece{x.data(), x.size()};
  return SelectNonzeroTopK(Span<const GradientSegment>(&piece, 1), k, workspace);
}

SelectedEntries SelectNonzeroTopK(Span<const GradientSegment> x, std::size_t k,
                                  TopKWorkspace& workspace) {
  return TopKSelector(x, nullptr, 1.0F, nullptr, workspace).Select(k, kNonzero);
}

SelectedEntries CompressTopK(Span<const GradientSegment> gradient, const float* memory,
                             float memory_factor, std::size_t k, float* new_memory,
                             TopKWorkspace& workspace) {
  return TopKSelector(gradient, memory, memory_factor, new_memory, workspace).Select(k, kNonzero);
}

}  // namespace bitopk::kernels
