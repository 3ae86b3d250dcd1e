// SPDX-License-Identifier: Apache-2.0
//
// Exact, deterministic topK selection in one pass over memory, alone (SelectTopK) or fused with the
// update of an error memory (CompressTopK).
//
// The contract, the same for every instruction set and every history of the workspace:
//   which   the k entries with the largest magnitude; NaNs are equal to each other and rank above
//   Inf ties    at the k-th magnitude the lower index wins order   kept indices ascend
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/kernels/isa.h"
#include "bitopk/kernels/span.h"

namespace bitopk::kernels {

/// Rank of a value by magnitude: larger key, larger magnitude; all NaNs share one key above that of
/// Inf; 0 for zeros.
std::int32_t MagnitudeKey(float value);

/// What was selected, as views into the workspace: valid until its next use. Values may be
/// overwritten by the caller.
struct SelectedEntries {
  Span<std::uint32_t> indices;
  Span<float> values;
};

/// One piece of the gradient of a unit; pieces follow each other. A null `gradient` stands for
/// zeros.
struct GradientSegment {
  const float* gradient = nullptr;
  std::size_t num_entries = 0;
};

/// Buffers of a selection. They grow to what the largest call needs (about 2 k + 4,096 candidates
/// of 8 bytes, or all d if that is less, and up to 512 KiB of samples) and are reused, so that a
/// steady state does not allocate. Movable; one thread at a time.
class TopKWorkspace {
 public:
  /// @throws InvalidArgumentError if this processor lacks `isa`.
  explicit TopKWorkspace(Isa isa = BestIsa());

  Isa isa() const { return isa_; }
  /// Name of the target that the scan of this workspace was compiled for ("AVX2", ...), for tests
  /// that prove the variant.
  const char* compiled_for() const;

 private:
  friend class TopKSelector;
  Isa isa_;
  std::vector<std::uint32_t> indices_;
  std::vector<float> values_;
  std::vector<float> samples_;
  std::vector<std::int32_t> keys_;
  std::vector<std::uint32_t> boundary_;
  std::vector<std::uint32_t> histogram_;
};

/// Keeps the min(k, d) entries of `x` (shape [d], d <= 2^32) with the largest magnitude, zeros
/// included. The contract is above. O(d) time for any data; allocates only in `workspace`.
SelectedEntries SelectTopK(Span<const float> x, std::size_t k, TopKWorkspace& workspace);

/// As SelectTopK, but entries that are zero are never selected, so fewer than k may come back.
SelectedEntries SelectNonzeroTopK(Span<const float> x, std::size_t k, TopKWorkspace& workspace);

/// As SelectNonzeroTopK for a vector given in pieces.
SelectedEntries SelectNonzeroTopK(Span<const GradientSegment> x, std::size_t k,
                                  TopKWorkspace& workspace);

/// The worker's half of a step in one pass: with a = memory * memory_factor + gradient (each
/// operation rounded to float32; the product is exact and skipped in effect for factor 1), selects
/// the topK of a among its non-zero entries and writes to `new_memory` what was not selected: a, or
/// +0 where a was selected.
///
/// @param gradient       pieces that together have d entries, any alignment; not modified.
/// @param memory         shape [d]; the old memory, not modified.
/// @param k              entries to keep; more than d is d.
/// @param new_memory     shape [d]; overlaps nothing. Aligned to 64 bytes it is written fastest.
/// @return the selected entries of a, values exact.
/// [ZDL22, algorithm 8]; the one-pass method samples a threshold, appends candidates and prunes, so
/// the result never depends on the quality of the estimate. O(d) time for any data; allocates only
/// in `workspace`.
SelectedEntries CompressTopK(Span<const GradientSegment> gradient, const float* memory,
                             float memory_factor, std::size_t k, float* new_memory,
                             TopKWorkspace& workspace);

}  // namespace bitopk::kernels
