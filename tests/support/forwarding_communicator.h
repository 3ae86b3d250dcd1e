// SPDX-License-Identifier: Apache-2.0
//
// Communicators around another one, for tests that look at what passes or spoil it.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/shared_communicator.h"

namespace bitopk::testing {

/// Passes every call on to a communicator that must outlive it.
class ForwardingCommunicator : public SharedCommunicator {
 public:
  explicit ForwardingCommunicator(Communicator& inner)
      : SharedCommunicator(std::shared_ptr<Communicator>(std::shared_ptr<Communicator>(), &inner)) {
  }
};

/// Adds up what it is asked to send, headers by the formulas of communicator.h, to a count that
/// outlives it.
class CountingCommunicator final : public ForwardingCommunicator {
 public:
  CountingCommunicator(Communicator& inner, std::uint64_t* count)
      : ForwardingCommunicator(inner), count_(count) {
    *count_ = bytes_sent();  // of connecting
  }

  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override {
    ForwardingCommunicator::AllToAllV(tag, send, flags, max_bytes, receive);
    for (std::size_t to = 0; to < send.size(); ++to) {
      if (static_cast<int>(to) != rank()) *count_ += kHeaderBytes + send[to].size();
    }
  }
  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override {
    ForwardingCommunicator::AllGatherV(tag, send, flags, max_bytes, receive);
    *count_ += peers() * (kHeaderBytes + send.size());
  }
  // Each rank sends the others' ranges to their owners and the sums of its own range to all.
  void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override {
    ForwardingCommunicator::AllReduceSum(tag, counts);
    const std::size_t n = peers() + 1;
    const std::size_t longer = counts.size() % n > static_cast<std::size_t>(rank()) ? 1 : 0;
    const std::size_t own = counts.size() / n + longer;
    *count_ += peers() * kHeaderBytes + 8 * (counts.size() - own) + 8 * peers() * own;
  }

 private:
  std::size_t peers() const { return static_cast<std::size_t>(size()) - 1; }

  std::uint64_t* count_;
};

/// Changes parts after they were received, before the caller sees them.
class TamperingCommunicator final : public ForwardingCommunicator {
 public:
  /// Called with each part that came from `from`; returns whether it changed `bytes`.
  using Tamper =
      std::function<bool(const MessageTag& tag, int from, std::vector<std::uint8_t>& bytes)>;

  TamperingCommunicator(Communicator& inner, Tamper tamper)
      : ForwardingCommunicator(inner), tamper_(std::move(tamper)) {}

  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override {
    ForwardingCommunicator::AllToAllV(tag, send, flags, max_bytes, receive);
    Spoil(tag, receive);
  }
  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override {
    ForwardingCommunicator::AllGatherV(tag, send, flags, max_bytes, receive);
    Spoil(tag, receive);
  }

 private:
  void Spoil(const MessageTag& tag, ReceiveBuffer& receive) {
    for (int from = 0; from < size(); ++from) {
      std::vector<std::uint8_t> bytes(receive.part(from).begin(), receive.part(from).end());
      if (!tamper_(tag, from, bytes)) continue;
      const MutableBytes room = receive.Allocate(from, bytes.size());
      std::copy(bytes.begin(), bytes.end(), room.begin());
    }
  }

  Tamper tamper_;
};

}  // namespace bitopk::testing
