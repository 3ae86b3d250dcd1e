// SPDX-License-Identifier: Apache-2.0
//
// Zeroed, cache-line-aligned float storage for the memories.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "bitopk/kernels/span.h"

namespace bitopk {

/// `size()` floats, aligned to 64 bytes, zero at the start. Movable.
class MemoryBuffer {
 public:
  MemoryBuffer() = default;
  explicit MemoryBuffer(std::size_t num_entries) : size_(num_entries) {
    if (num_entries == 0) return;
    const std::size_t bytes = (num_entries * sizeof(float) + 63) / 64 * 64;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes);
  }

  float* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Span<float> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace bitopk
