// SPDX-License-Identifier: Apache-2.0
//
// Communicator: what moves bytes between ranks. The exchanges are written against this interface;
// gloo, threads of one process, and later NCCL or a host framework implement it. See
// gloo_communicator.h, in_process.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"
#include "bitopk/kernels/span.h"

namespace bitopk {

/// What a collective is for; part of every message header, so that ranks never pair different
/// messages.
enum class Phase : std::uint8_t {
  kAgreement = 0,  // description of tensors and settings, at start
  kUplink = 1,     // packets towards the rank that aggregates
  kThreshold = 2,  // histogram rounds of the downlink selection
  kDownlink = 3,   // kept entries of the sum, back to all
  kDense = 4,      // uncompressed entries
  kUser = 5,       // state that a caller gathers (server memory, checkpoints)
};

/// Name of a phase as it appears in error messages.
const char* PhaseName(Phase phase);

/// Identifies one collective call. All ranks must make the same calls in the same order with equal
/// tags.
struct MessageTag {
  Phase phase = Phase::kUser;
  std::uint32_t message = 0;  // index of the bucket in the step's launch order
  std::uint64_t step = 0;
  std::uint64_t digest = 0;  // hash of the units in the bucket and their settings
  double scale = 0.0;        // of the step's gradients, negative for a sum; 0 outside of steps
};

/// "uplink of message 3, step 17": how error messages begin.
std::string DescribeTag(const MessageTag& tag);

/// Where a collective puts what it received: one byte string per rank. Keep one per call site and
/// reuse it: storage grows to the largest message seen and is not released, so a steady state does
/// not allocate.
class ReceiveBuffer {
 public:
  /// Bytes of `rank`'s part; valid until the next collective that fills this buffer. The part of
  /// the calling rank is a copy of (or a view of) what it sent to itself.
  Bytes part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  /// Flags of the header that `rank` sent with its part.
  std::uint16_t flags(int rank) const { return flags_[static_cast<std::size_t>(rank)]; }

  // For implementations of Communicator only.
  void Reset(int num_ranks);
  /// Makes room for `num_bytes` from `rank` and returns it. Storage of other ranks does not move.
  MutableBytes Allocate(int rank, std::size_t num_bytes);
  void SetView(int rank, Bytes bytes) { parts_[static_cast<std::size_t>(rank)] = bytes; }
  void SetFlags(int rank, std::uint16_t flags) { flags_[static_cast<std::size_t>(rank)] = flags; }

 private:
  std::vector<Bytes> parts_;
  std::vector<std::uint16_t> flags_;
  std::vector<std::vector<std::uint8_t>> storage_;
};

/// Collective operations among `size()` ranks, one process or thread a rank.
///
/// Thread-safety: one collective at a time (the engine's communication thread makes them); Abort,
/// rank, size and the byte counters may be used from any thread. All collectives block until done,
/// an error, or the time-out. After any exception but InvalidArgumentError (which is thrown before
/// anything is sent) the communicator is dead, here and on all peers: every later call throws
/// CommunicationError with the first cause. After a failed call no thread of the communicator
/// touches the caller's memory any more.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  /// Sends `send[r]` to each rank r (shape [size()]; send[rank()] is delivered locally and not
  /// counted) and receives one part from each. `flags` travel in the header. Steps: 1 if no part is
  /// large (over Gloo: 16 KiB), else 2 (header, payload); bytes sent: the sum of the parts for
  /// others + (size-1) * header.
  /// @param max_bytes  largest part that a peer may announce; a larger one is a WireFormatError
  /// before any
  ///                   memory is taken.
  /// @throws CommunicationError  peer dead, silent for timeout(), or announcing another tag (names
  /// both sides).
  virtual void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                         std::size_t max_bytes, ReceiveBuffer& receive) = 0;

  /// Sends the same bytes to every rank. Bytes sent: (size-1) * (send.size() + header). Otherwise
  /// as AllToAllV.
  virtual void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags,
                          std::size_t max_bytes, ReceiveBuffer& receive) = 0;

  /// Replaces `counts` by the element-wise sum over ranks (modulo 2^64). All ranks pass the same
  /// number of counts. Reduce-scatter and allgather by direct messages: bytes sent about 2 *
  /// (size-1)/size * 8 * counts.size() + (size-1) * header.
  virtual void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) = 0;

  /// Sums `values` over ranks in an order of the implementation's choice: the fastest dense
  /// allreduce that it has. A baseline for measurements; training uses the dense exchange, whose
  /// order is fixed. All ranks pass the same number of values. Bytes sent: (size-1) * header + the
  /// ring's 2 * (bytes - bytes/size).
  virtual void AllReduceDense(const MessageTag& tag, Span<float> values) = 0;

  /// Makes the communicator dead with `reason`, here and, as far as they can be reached, on all
  /// peers, whose pending calls throw. Idempotent; never throws; callable from any thread.
  virtual void Abort(const std::string& reason) noexcept = 0;

  /// Ranks that this rank is waiting for now and since when (empty when it is not waiting); for
  /// "still waiting" reports.
  struct Waiting {
    std::vector<int> ranks;
    std::string what;
    std::chrono::steady_clock::time_point since;
  };
  virtual Waiting waiting() const = 0;

  /// Bytes that this rank put on and took from its links since construction, headers and forwarding
  /// included.
  virtual std::uint64_t bytes_sent() const = 0;
  virtual std::uint64_t bytes_received() const = 0;
};

/// Little-endian fixed-size header in front of every part; see plugin/WIRE_FORMAT.md, section 1.
inline constexpr std::size_t kHeaderBytes = 48;

struct MessageHeader {
  MessageTag tag;
  std::uint16_t flags = 0;
  std::uint32_t rank = 0;
  std::uint64_t payload_bytes = 0;
};

/// Writes `header` to `out` (shape [kHeaderBytes]).
void EncodeHeader(const MessageHeader& header, MutableBytes out);
/// Reads a header. @throws WireFormatError if magic, version, phase or reserved bytes are not as
/// documented.
MessageHeader DecodeHeader(Bytes in);
/// Checks that a header received from `rank` announces the call that this rank is in.
/// @throws CommunicationError naming both sides; WireFormatError if more than max_bytes are
/// announced or the sender's
///         rank is not `rank`.
void CheckHeader(const MessageHeader& got, const MessageTag& expected, int rank, int my_rank,
                 std::size_t max_bytes);

}  // namespace bitopk
