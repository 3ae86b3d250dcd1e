// SPDX-License-Identifier: Apache-2.0
//
// Communicator among threads of one process: for tests, LocalGroup and the simulator. No sockets;
// the ranks meet in memory and copy each other's parts.
#pragma once

#include <chrono>
#include <memory>

#include "bitopk/communicator.h"

namespace bitopk {

namespace internal {
class InProcessState;
}

/// The meeting place of `size()` ranks in one process. Its communicators keep what they share
/// alive, so the group may go first. Thread-safe.
///
/// Messages are checked, and bytes counted, by the rules and formulas of the Gloo communicator.
/// AllReduceDense adds in rank order. A communicator that is destroyed while peers wait for it
/// fails them with CommunicationError.
class InProcessGroup {
 public:
  /// @param timeout  how long a rank waits in a call for the others to arrive.
  /// @throws InvalidArgumentError  if world_size < 1 or timeout <= 0.
  InProcessGroup(int world_size, std::chrono::milliseconds timeout);

  int size() const;

  /// The communicator of `rank`, to be used by one thread at a time. Each rank's can be taken once.
  /// @throws InvalidArgumentError  if the rank is out of range or was taken before.
  std::unique_ptr<Communicator> communicator(int rank);

 private:
  std::shared_ptr<internal::InProcessState> state_;
};

}  // namespace bitopk
