// SPDX-License-Identifier: Apache-2.0
#include "bitopk/network_probe.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

constexpr int kWarmUps = 3;
constexpr int kSmallMessages = 21;
constexpr int kLargeMessages = 4;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double MeasureLatency(Communicator& comm, MessageTag& tag, ReceiveBuffer& receive) {
  const std::uint8_t small[8] = {};
  std::vector<double> seconds;
  for (int i = 0; i < kWarmUps + kSmallMessages; ++i) {
    const auto start = Clock::now();
    comm.AllGatherV(tag, {small, sizeof small}, 0, sizeof small, receive);
    ++tag.message;
    if (i >= kWarmUps) seconds.push_back(SecondsSince(start));
  }
  std::nth_element(seconds.begin(), seconds.begin() + kSmallMessages / 2, seconds.end());
  return seconds[kSmallMessages / 2];
}

// The best of a few: whatever disturbs makes it slower, nothing makes it faster.
double MeasureBandwidth(Communicator& comm, std::size_t payload_bytes, MessageTag& tag,
                        ReceiveBuffer& receive) {
  if (comm.size() == 1) return 0.0;
  const std::vector<std::uint8_t> payload(payload_bytes);
  std::vector<Bytes> send(static_cast<std::size_t>(comm.size()));
  send[static_cast<std::size_t>((comm.rank() + 1) % comm.size())] = payload;
  double best = 0.0;
  for (int i = 0; i < kLargeMessages; ++i) {
    const auto start = Clock::now();
    comm.AllToAllV(tag, send, 0, payload_bytes, receive);
    ++tag.message;
    best = std::max(best, static_cast<double>(payload_bytes) / SecondsSince(start));
  }
  return best;
}

}  // namespace

std::vector<LinkSpeed> ProbeNetwork(Communicator& comm, std::size_t payload_bytes,
                                    ReceiveBuffer& receive) {
  MessageTag tag;
  tag.message = 1000;  // apart from what users gather
  const LinkSpeed own{MeasureLatency(comm, tag, receive),
                      MeasureBandwidth(comm, payload_bytes, tag, receive)};
  std::uint8_t bytes[sizeof own];
  std::memcpy(bytes, &own, sizeof own);
  comm.AllGatherV(tag, {bytes, sizeof bytes}, 0, sizeof bytes, receive);
  std::vector<LinkSpeed> all(static_cast<std::size_t>(comm.size()));
  for (int rank = 0; rank < comm.size(); ++rank) {
    const Bytes part = receive.part(rank);
    if (part.size() != sizeof own) {
      throw WireFormatError(internal::StrCat("network probe: rank ", rank, " sent ", part.size(),
                                             " bytes, expected ", sizeof own));
    }
    std::memcpy(&all[static_cast<std::size_t>(rank)], part.data(), sizeof own);
  }
  return all;
}

}  // namespace bitopk
