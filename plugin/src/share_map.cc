// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/share_map.h"

#include <algorithm>

namespace bitopk {

ShareMap ShareMap::Replicated(std::size_t num_entries) {
  ShareMap map;
  map.num_entries_ = num_entries;
  map.replicated_ = true;
  return map;
}

ShareMap ShareMap::Whole(std::size_t num_entries, std::size_t num_owners, std::size_t owner) {
  ShareMap map;
  map.num_entries_ = num_entries;
  map.num_owners_ = num_owners;
  map.first_owner_ = owner % num_owners;
  return map;
}

ShareMap ShareMap::Dealt(std::size_t num_entries, std::size_t num_owners, std::size_t first_owner) {
  ShareMap map = Whole(num_entries, num_owners, first_owner);
  map.dealt_ = true;
  return map;
}

std::size_t ShareMap::NumPositions(std::size_t owner) const {
  if (!dealt_) return owner == first_owner_ ? num_entries_ : 0;
  const std::size_t first_block = (owner + num_owners_ - first_owner_) % num_owners_;
  const std::size_t blocks = (num_entries_ + kDealtBlock - 1) / kDealtBlock;
  if (first_block >= blocks) return 0;
  const std::size_t own_blocks = (blocks - first_block - 1) / num_owners_ + 1;
  const std::size_t last_block = first_block + (own_blocks - 1) * num_owners_;
  const std::size_t last_size = std::min(kDealtBlock, num_entries_ - last_block * kDealtBlock);
  return (own_blocks - 1) * kDealtBlock + last_size;
}

std::size_t ShareMap::EntryAt(std::size_t owner, std::size_t position) const {
  if (!dealt_) return position;
  const std::size_t first_block = (owner + num_owners_ - first_owner_) % num_owners_;
  const std::size_t block = first_block + position / kDealtBlock * num_owners_;
  return block * kDealtBlock + position % kDealtBlock;
}

void ShareMap::Split(Span<const std::uint32_t> entries, Span<const float> values,
                     std::vector<std::uint32_t>& positions, std::vector<float>& split_values,
                     std::vector<std::size_t>& starts) const {
  positions.resize(entries.size());
  split_values.resize(entries.size());
  starts.assign(num_owners_ + 1, 0);
  if (!dealt_) {
    std::copy(entries.begin(), entries.end(), positions.begin());
    std::copy(values.begin(), values.end(), split_values.begin());
    std::fill(starts.begin() + static_cast<std::ptrdiff_t>(first_owner_) + 1, starts.end(),
              entries.size());
    return;
  }
  for (const std::uint32_t entry : entries) ++starts[OwnerOfBlock(entry / kDealtBlock) + 1];
  for (std::size_t owner = 0; owner < num_owners_; ++owner) starts[owner + 1] += starts[owner];
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::size_t block = entries[i] / kDealtBlock;
    const std::size_t at = starts[OwnerOfBlock(block)]++;
    positions[at] =
        static_cast<std::uint32_t>(block / num_owners_ * kDealtBlock + entries[i] % kDealtBlock);
    split_values[at] = values[i];
  }
  // Each start has moved to the next owner's start: shift back.
  std::copy_backward(starts.begin(), starts.end() - 1, starts.end());
  starts[0] = 0;
}

}  // namespace bitopk
