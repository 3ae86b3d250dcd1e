// SPDX-License-Identifier: Apache-2.0
//
// Which rank serves which entries of a unit, and where an entry sits in its server's share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bitopk/kernels/span.h"

namespace bitopk {

/// Entries dealt to owners together. Small, so that a layer with large gradients does not fall to
/// one owner.
inline constexpr std::size_t kDealtBlock = 1024;

/// The layout of one unit of `num_entries` over `num_owners` shares. Immutable; thread-safe.
class ShareMap {
 public:
  ShareMap() = default;
  /// Every rank holds the whole unit in a share of its own (the simulated server): one owner,
  /// number 0.
  static ShareMap Replicated(std::size_t num_entries);
  /// All entries belong to `owner`.
  static ShareMap Whole(std::size_t num_entries, std::size_t num_owners, std::size_t owner);
  /// Blocks of kDealtBlock entries are dealt to the owners in turn; owner `first_owner` gets block
  /// 0.
  static ShareMap Dealt(std::size_t num_entries, std::size_t num_owners, std::size_t first_owner);

  std::size_t num_owners() const { return num_owners_; }
  std::size_t num_entries() const { return num_entries_; }
  /// Entries dealt together: entry e belongs to owner (e / block + first_owner) % num_owners.
  std::size_t block() const { return dealt_ ? kDealtBlock : (num_entries_ > 0 ? num_entries_ : 1); }
  std::size_t first_owner() const { return first_owner_; }
  bool dealt() const { return dealt_; }
  bool replicated() const { return replicated_; }

  /// Entries in the share of `owner`.
  std::size_t NumPositions(std::size_t owner) const;
  /// The unit's entry at `position` of the share of `owner`. Ascending in `position`.
  std::size_t EntryAt(std::size_t owner, std::size_t position) const;

  /// Sorts the ascending list `entries` (shape [k]) by owner: writes positions and values, owner
  /// after owner, and the start of each owner's part to `starts` (shape [num_owners + 1]).
  /// Positions ascend within a part.
  void Split(Span<const std::uint32_t> entries, Span<const float> values,
             std::vector<std::uint32_t>& positions, std::vector<float>& split_values,
             std::vector<std::size_t>& starts) const;

  /// Calls f(first entry in the unit, first position in the share, count) for each contiguous piece
  /// of a share.
  template <typename F>
  void ForEachPiece(std::size_t owner, F f) const {
    const std::size_t positions = NumPositions(owner);
    const std::size_t step = dealt_ ? kDealtBlock : positions;
    for (std::size_t p = 0; p < positions; p += step) {
      f(EntryAt(owner, p), p, step < positions - p ? step : positions - p);
    }
  }

 private:
  std::size_t OwnerOfBlock(std::size_t block) const { return (block + first_owner_) % num_owners_; }

  std::size_t num_entries_ = 0;
  std::size_t num_owners_ = 1;
  std::size_t first_owner_ = 0;
  bool dealt_ = false;
  bool replicated_ = false;
};

}  // namespace bitopk
