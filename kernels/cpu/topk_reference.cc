// SPDX-License-Identifier: Apache-2.0
#include "bitopk/kernels/topk_reference.h"

#include <algorithm>
#include <numeric>

#include "bitopk/kernels/topk.h"

namespace bitopk::kernels::reference {

Entries SelectTopK(Span<const float> x, std::size_t k, bool nonzero_only) {
  std::vector<std::uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return MagnitudeKey(x[a]) > MagnitudeKey(x[b]);
  });
  order.resize(std::min(k, x.size()));
  if (nonzero_only) {
    while (!order.empty() && x[order.back()] == 0.0F) order.pop_back();
  }
  std::sort(order.begin(), order.end());
  Entries out;
  out.indices = order;
  for (const std::uint32_t i : order) out.values.push_back(x[i]);
  return out;
}

Entries CompressTopK(const float* gradient, Span<const float> memory, float factor, std::size_t k,
                     Span<float> new_memory) {
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const float scaled = memory[i] * factor;
    new_memory[i] = scaled + (gradient != nullptr ? gradient[i] : 0.0F);
  }
  Entries out = SelectTopK(new_memory, k, /*nonzero_only=*/true);
  for (const std::uint32_t i : out.indices) new_memory[i] = 0.0F;
  return out;
}

}  // namespace bitopk::kernels::reference
