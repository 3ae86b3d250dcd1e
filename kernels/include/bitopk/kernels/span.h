// SPDX-License-Identifier: Apache-2.0
//
// A view of contiguous memory that the caller owns: pointer and number of entries. C++17 has no
// std::span, so every layer of bitopk passes arrays in this type.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace bitopk {

/// A view of `size()` entries of T; copies share the memory. Not thread-safe beyond what T is.
template <typename T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T* data, std::size_t num_entries) : data_(data), size_(num_entries) {}
  /// Implicit from a vector of the same entry type (or of its mutable form, for a const view).
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<U (*)[], T (*)[]>>>
  constexpr Span(std::vector<U>& v) : data_(v.data()), size_(v.size()) {}
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<const U (*)[], T (*)[]>>>
  constexpr Span(const std::vector<U>& v) : data_(v.data()), size_(v.size()) {}
  template <typename U, typename = std::enable_if_t<std::is_convertible_v<U (*)[], T (*)[]>>>
  constexpr Span(Span<U> other) : data_(other.data()), size_(other.size()) {}

  constexpr T* data() const { return data_; }
  constexpr std::size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T* begin() const { return data_; }
  constexpr T* end() const { return data_ + size_; }
  constexpr T& operator[](std::size_t i) const {
    assert(i < size_);
    return data_[i];
  }
  /// The `count` entries from `offset` on. REQUIRES: offset + count <= size().
  constexpr Span subspan(std::size_t offset, std::size_t count) const {
    assert(offset <= size_ && count <= size_ - offset);
    return Span(data_ + offset, count);
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

using Bytes = Span<const std::uint8_t>;
using MutableBytes = Span<std::uint8_t>;

}  // namespace bitopk
