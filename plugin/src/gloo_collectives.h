// SPDX-License-Identifier: Apache-2.0
//
// GlooCommunicator: the collectives over connected pairs. Made by GlooBootstrap.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bitopk/communicator.h"
#include "plugin/src/gloo_context.h"
#include "plugin/src/gloo_peer_watch.h"
#include "plugin/src/gloo_wait_ticker.h"

namespace bitopk::internal {

/// Thread-safety as Communicator. A failed call tells all peers whom it blames, closes all
/// connections, and returns only when gloo can no longer touch the caller's memory.
class GlooCommunicator final : public Communicator {
 public:
  /// REQUIRES: all pairs of `context` are connected. Checks by a collective call that all ranks
  /// hold the same `world_digest`.
  GlooCommunicator(std::shared_ptr<PairContext> context, std::chrono::milliseconds timeout,
                   std::uint64_t world_digest);
  ~GlooCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }

  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override;
  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override;
  void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override;
  void AllReduceDense(const MessageTag& tag, Span<float> values) override;
  void Abort(const std::string& reason) noexcept override;
  Waiting waiting() const override;
  std::uint64_t bytes_sent() const override { return bytes_sent_; }
  std::uint64_t bytes_received() const override { return bytes_received_; }

 private:
  using Clock = std::chrono::steady_clock;

  // One message under way: `remaining` chunks of it are to complete.
  struct Operation {
    UnboundBuffer* buffer;
    int peer;
    bool is_receive;
    bool is_header;
    std::size_t remaining;
    std::size_t num_bytes;
    Clock::time_point since;
  };

  struct Peer {
    std::vector<std::uint8_t> header_out;  // with room for a payload of kInlineBytes
    std::vector<std::uint8_t> header_in;
    std::unique_ptr<UnboundBuffer> header_send;
    std::unique_ptr<UnboundBuffer> header_receive;
    bool header_posted = false;  // the receive of the next exchange
    std::unique_ptr<UnboundBuffer> payload_send;
    std::unique_ptr<UnboundBuffer> payload_receive;
    std::unique_ptr<UnboundBuffer> range_send;  // of a reduction's second half
    std::unique_ptr<UnboundBuffer> range_receive;
    int num_pending = 0;         // operations
    Clock::time_point progress;  // when an operation with this peer last completed
  };

  // What the headers of the exchange under way are checked against.
  struct Expectation {
    MessageTag tag;
    std::size_t max_bytes = 0;
    bool is_reduction = false;
    std::uint16_t flags = 0;  // of a reduction: the same on all ranks
    ReceiveBuffer* receive = nullptr;
  };

  enum class State { kAlive, kDying, kDead };

  // Why a call fails: found by this rank or told by a peer.
  struct Verdict {
    int blamed;
    std::string text;
    std::string suffix;
  };

  template <typename Body>
  void Call(const MessageTag& tag, const Body& body);
  void RequireAlive() const;
  void ReleasePayloads();

  template <typename PartFor>
  void Exchange(const Expectation& expected, std::uint16_t flags, const PartFor& part_for);
  void AgreeOnEntries(const MessageTag& tag, std::size_t num_entries);
  void OnHeader(int peer);

  void PostHeaderReceives();
  void PostReceive(int peer, UnboundBuffer& buffer, std::uint64_t slot);
  void PostSend(int peer, UnboundBuffer& buffer, std::uint64_t slot, std::size_t num_bytes);
  void Track(int peer, UnboundBuffer& buffer, bool is_receive, bool is_header,
             std::size_t num_bytes);
  void CompleteAll();
  bool WaitOnce(std::size_t index);

  void LookAround();
  void DrainClosedPeer(int peer);
  void CheckOverdue();
  void TellWhomThisRankAwaits(const std::vector<int>& awaited);
  [[noreturn]] void ThrowSilent(const std::vector<int>& overdue);
  [[noreturn]] void ThrowLost(int peer);

  std::string Suffix(const std::string& more = {}) const;
  std::string Fail(const std::string& cause, int blamed, const std::string& text) noexcept;
  void CloseAll() noexcept;

  Peer& peer_of(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  // Slots of an exchange; slots 0 and 4 are PeerWatch's, and the largest ones are gloo's own.
  std::uint64_t header_slot() const { return 4 * exchange_ + 1; }
  std::uint64_t payload_slot() const { return 4 * exchange_ + 2; }
  std::uint64_t range_slot() const { return 4 * exchange_ + 3; }
  // The n-th peer to talk to, n = 1 ... size - 1; starts with the next rank, so that not all begin
  // with the same.
  int NthPeer(int n) const { return (rank_ + n) % size_; }

  const std::shared_ptr<PairContext> context_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;

  std::vector<Peer> peers_;  // by rank; this rank's is unused
  std::vector<Operation> operations_;
  std::size_t num_pending_ = 0;
  Expectation expected_;
  std::uint64_t exchange_ = 0;  // number of the exchange whose headers are posted
  std::uint32_t next_ring_ = 0;
  Clock::time_point first_loss_;  // when a peer was first seen gone without goodbye
  bool told_whom_it_awaits_ = false;
  ReceiveBuffer received_ranges_;  // of a reduction
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};

  mutable std::mutex state_mutex_;
  std::condition_variable state_changed_;
  State state_ = State::kAlive;
  std::string cause_;

  mutable std::mutex waiting_mutex_;
  bool is_waiting_ = false;
  MessageTag waiting_tag_;
  Clock::time_point waiting_since_;
  std::vector<bool> waited_for_;  // by rank

  std::uint8_t never_sent_ = 0;
  std::unique_ptr<UnboundBuffer> closer_;
  PeerWatch watch_;
  WaitTicker ticker_;
};

}  // namespace bitopk::internal
