// SPDX-License-Identifier: Apache-2.0
//
// SharedCommunicator: lets several engines of one rank use the same connections, one after the
// other.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "bitopk/communicator.h"

namespace bitopk {

/// Forwards every call to a communicator that others hold too. All ranks must make the calls of all
/// holders in one order: an engine's step must be done before the next engine's begins.
class SharedCommunicator : public Communicator {
 public:
  explicit SharedCommunicator(std::shared_ptr<Communicator> target) : target_(std::move(target)) {}

  int rank() const override { return target_->rank(); }
  int size() const override { return target_->size(); }
  std::chrono::milliseconds timeout() const override { return target_->timeout(); }
  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override {
    target_->AllToAllV(tag, send, flags, max_bytes, receive);
  }
  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override {
    target_->AllGatherV(tag, send, flags, max_bytes, receive);
  }
  void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override {
    target_->AllReduceSum(tag, counts);
  }
  void AllReduceDense(const MessageTag& tag, Span<float> values) override {
    target_->AllReduceDense(tag, values);
  }
  void Abort(const std::string& reason) noexcept override { target_->Abort(reason); }
  Waiting waiting() const override { return target_->waiting(); }
  std::uint64_t bytes_sent() const override { return target_->bytes_sent(); }
  std::uint64_t bytes_received() const override { return target_->bytes_received(); }

 private:
  std::shared_ptr<Communicator> target_;
};

}  // namespace bitopk
