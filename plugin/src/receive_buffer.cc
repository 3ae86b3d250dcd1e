// SPDX-License-Identifier: Apache-2.0
//
// ReceiveBuffer: storage for what a collective delivers, kept from call to call.
#include "bitopk/communicator.h"

namespace bitopk {

void ReceiveBuffer::Reset(int num_ranks) {
  const auto n = static_cast<std::size_t>(num_ranks);
  parts_.assign(n, Bytes());
  flags_.assign(n, 0);
  if (storage_.size() < n) storage_.resize(n);
}

MutableBytes ReceiveBuffer::Allocate(int rank, std::size_t num_bytes) {
  const auto r = static_cast<std::size_t>(rank);
  std::vector<std::uint8_t>& storage = storage_[r];
  if (storage.size() < num_bytes) {
    storage.clear();  // nothing of the old contents is worth copying
    storage.resize(num_bytes);
  }
  parts_[r] = Bytes(storage.data(), num_bytes);
  return MutableBytes(storage.data(), num_bytes);
}

}  // namespace bitopk
