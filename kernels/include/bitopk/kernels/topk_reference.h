// SPDX-License-Identifier: Apache-2.0
//
// TopK in the plainest form: sort all entries. The tests hold every variant of topk.h against it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/kernels/span.h"

namespace bitopk::kernels::reference {

struct Entries {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};

/// The contract of topk.h by a full sort; zeros are left out if `nonzero_only`. Allocates; O(d log
/// d).
Entries SelectTopK(Span<const float> x, std::size_t k, bool nonzero_only);

/// CompressTopK by the formula: a = memory * factor + gradient, selection, new_memory = a without
/// the selected. All arrays have shape [d]; a null `gradient` stands for zeros.
Entries CompressTopK(const float* gradient, Span<const float> memory, float factor, std::size_t k,
                     Span<float> new_memory);

}  // namespace bitopk::kernels::reference
