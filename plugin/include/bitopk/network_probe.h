// SPDX-License-Identifier: Apache-2.0
//
// What the links between ranks can do, measured over the communicator that training uses.
#pragma once

#include <cstddef>
#include <vector>

#include "bitopk/communicator.h"

namespace bitopk {

/// Of one rank.
struct LinkSpeed {
  double latency_seconds = 0.0;        // of a small allgather, median
  double send_bytes_per_second = 0.0;  // to the next rank, while all ranks send; 0 for one rank
};

/// Collective: all ranks measure at once and learn what each measured (shape [size()], the same on
/// all). Takes 3 small warm-ups, 21 small allgathers and 4 messages of `payload_bytes` to the next
/// rank. Measured with a clock, so never the same twice: decisions made of it must be agreed upon.
/// @throws CommunicationError, WireFormatError
std::vector<LinkSpeed> ProbeNetwork(Communicator& comm, std::size_t payload_bytes,
                                    ReceiveBuffer& receive);

}  // namespace bitopk
