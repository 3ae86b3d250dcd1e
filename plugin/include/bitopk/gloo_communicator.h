// SPDX-License-Identifier: Apache-2.0
//
// Communicator over Gloo's TCP pairs, one process (or thread) a rank. There is no rendezvous of its
// own: each rank makes its addresses, whatever launched the ranks carries them around once, and the
// pairs connect.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bitopk/communicator.h"

namespace bitopk {

/// Where a rank listens and how long it waits.
struct GlooOptions {
  /// Network interface to bind to, e.g. "eth0"; empty: see `hostname`.
  std::string interface;
  /// Name or address of this host to bind to, e.g. "10.0.0.7". If both are empty: the address of
  /// the host name unless that is a loopback address, else the first interface that is up and not
  /// loopback, else loopback.
  std::string hostname;
  /// Longest wait for a peer, when connecting and in every collective: a time-out means that this
  /// rank waited that long for a peer, and nothing it awaited from that peer was completed
  /// meanwhile.
  std::chrono::milliseconds timeout{60000};
};

/// First half of connecting: listens with one socket for each peer. Not thread-safe.
///
/// Gloo accepts the first connection to each of these sockets, without asking who it is, and closes
/// the socket then. So between construction and Connect a stranger can spoil the start (an error
/// that names the rank), and one that speaks Gloo's protocol can end the process; use a trusted
/// network. Nothing listens after Connect.
class GlooBootstrap {
 public:
  /// @throws InvalidArgumentError  if rank, size, interface or host name do not make sense on this
  /// host.
  GlooBootstrap(int rank, int size, const GlooOptions& options = {});
  ~GlooBootstrap();
  GlooBootstrap(GlooBootstrap&&) noexcept;
  GlooBootstrap& operator=(GlooBootstrap&&) noexcept;

  /// What all other ranks need to reach this one; about 130 bytes a rank.
  const std::vector<std::uint8_t>& address() const;

  /// The interface and address that this rank is bound to, e.g. "eth0 (10.0.0.7)".
  const std::string& interface_description() const;

  /// Connects to all peers and checks that all ranks are one world. To be called once, by all
  /// ranks.
  /// @param addresses  address() of every rank, in rank order, this rank's included.
  /// @throws InvalidArgumentError  if the addresses are not those of such a world.
  /// @throws CommunicationError    naming a rank that could not be reached within the time-out.
  std::unique_ptr<Communicator> Connect(const std::vector<std::vector<std::uint8_t>>& addresses);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Connects ranks that share a directory (created if missing; use a fresh one for each run), for
/// one machine.
/// @throws CommunicationError  naming the ranks whose addresses did not appear within the time-out.
/// @throws InvalidArgumentError  as GlooBootstrap, or if the directory was used before.
std::unique_ptr<Communicator> ConnectThroughFileStore(const std::string& directory, int rank,
                                                      int size, const GlooOptions& options = {});

}  // namespace bitopk
