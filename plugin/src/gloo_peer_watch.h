// SPDX-License-Identifier: Apache-2.0
//
// PeerWatch: who is alive, and whom do the others blame? Each pair of ranks keeps one receive
// pending on a reserved slot for the one control message that a rank ever sends: goodbye, or abort
// with the rank that it blames. The pending receive also tells, without waiting, that a connection
// has closed. Used by the Gloo communicator.
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
  static constexpr std::uint64_t kControlSlot = 0;

  enum class Notice : std::uint8_t { kAbort = 1, kGoodbye = 2 };

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

  /// Sends the one control message to every peer that can be reached. `text` is cut if it is long.
  void Send(Notice notice, int blamed, const std::string& text);

  /// After Send: waits until the peers have closed or answered with a message of their own, at most
  /// for `longest`.
  void Linger(std::chrono::milliseconds longest);

  /// After Send: waits until the messages are with the operating system, at most for `longest`;
  /// closes all connections if it takes longer.
  void WaitSent(std::chrono::milliseconds longest);

 private:
  struct Peer;

  void PollPeer(int rank, Peer& peer);
  bool AllSettled() const;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null for this rank
  std::optional<Accusation> accusation_;
};

}  // namespace bitopk::internal
