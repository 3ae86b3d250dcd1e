// SPDX-License-Identifier: Apache-2.0
//
// What a rank has not sent of one unit: m in [ZDL22]. A step writes the new memory beside the old
// one; commit swaps them, rollback forgets the new one.
#pragma once

#include <cstddef>
#include <utility>

#include "plugin/src/memory_buffer.h"

namespace bitopk {

/// Two buffers of the unit's size, allocated at the first step that needs them (until then the
/// memory is zero). One thread at a time.
class WorkerMemory {
 public:
  WorkerMemory() = default;
  explicit WorkerMemory(std::size_t num_entries) : num_entries_(num_entries) {}

  /// The memory that a step starts from.
  float* current() { return Buffer(current_).data(); }
  /// Where a step writes the memory that it leaves; becomes visible by MarkWritten.
  float* next() { return Buffer(next_).data(); }
  void MarkWritten() { written_ = true; }

  void Commit() {
    if (written_) std::swap(current_, next_);
    written_ = false;
  }
  void Rollback() { written_ = false; }

  /// The memory as it stands after the last step that was not rolled back; empty while it was never
  /// used (zero).
  Span<const float> view() const { return (written_ ? next_ : current_).span(); }
  /// The same, writable, allocated.
  float* latest() { return Buffer(written_ ? next_ : current_).data(); }
  bool in_use() const { return !current_.empty(); }

 private:
  MemoryBuffer& Buffer(MemoryBuffer& buffer) {
    if (buffer.empty()) buffer = MemoryBuffer(num_entries_);
    return buffer;
  }

  std::size_t num_entries_ = 0;
  MemoryBuffer current_;
  MemoryBuffer next_;
  bool written_ = false;
};

}  // namespace bitopk
