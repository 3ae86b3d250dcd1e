// SPDX-License-Identifier: Apache-2.0
//
// PeerWatch: who is alive, and whom do the others blame? Each pair of ranks keeps receives pending
// on reserved slots, for the last message that a rank sends: goodbye, or abort with the rank that
// it blames; and for a suspicion: whom it waits for, when somebody has waited too long. The pending
// receives also tell, without waiting, that a connection has closed. Used by the Gloo communicator.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "plugin/src/gloo_context.h"

namespace bitopk::internal {

/// Thread-safe. Nothing throws after construction.
class PeerWatch {
 public:
  // Slots of the last message and of suspicions.
  static constexpr std::uint64_t kLastSlot = 0;
  static constexpr std::uint64_t kSuspicionSlot = 4;

  enum class Notice : std::uint8_t { kAbort = 1, kGoodbye = 2, kSuspicion = 3 };

  struct Accusation {
    int reporter = 0;
    int blamed = 0;
    std::string text;
  };

  /// REQUIRES: all pairs are connected. @throws gloo's exceptions if a peer has gone already.
  explicit PeerWatch(const std::shared_ptr<PairContext>& context);
  ~PeerWatch();

  /// Looks at all peers, without waiting.
  void Poll();

  /// As of the last Poll: the connection to `peer` is closed / it said goodbye / the first abort
  /// message that came.
  bool closed(int peer) const;
  bool said_goodbye(int peer) const;
  std::optional<Accusation> accusation() const;

  /// As of the last Poll: whom `peer` said to be waiting for; nothing if it said nothing. / Whether
  /// any peer did.
  std::optional<std::vector<int>> suspicion(int peer) const;
  bool any_suspicion() const;

  /// Tells every peer that can be reached whom this rank waits for. To be called once.
  void SendSuspicion(const std::vector<int>& awaited);

  /// Sends the last message to every peer that can be reached. `text` is cut if it is long. To be
  /// called once.
  void Send(Notice notice, int blamed, const std::string& text);

  /// After Send: waits until the peers have closed or answered with a message of their own, at most
  /// for `longest`.
  void Linger(std::chrono::milliseconds longest);

  /// After Send: waits until the messages are with the operating system, at most for `longest`;
  /// closes all connections if it takes longer.
  void WaitSent(std::chrono::milliseconds longest);

 private:
  struct Channel;
  struct Peer;

  void PollPeer(int rank, Peer& peer);
  bool AllSettled() const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null for this rank
  std::optional<Accusation> accusation_;
};

}  // namespace bitopk::internal
