// SPDX-License-Identifier: Apache-2.0
//
// What an engine did so far, as seen from one rank.
#pragma once

#include <array>
#include <cstdint>

namespace bitopk {

/// Where the time of a step goes.
enum class Stage : std::uint8_t {
  kCompress,
  kUplink,
  kServer,
  kThreshold,
  kDownlink,
  kDecode,
  kDense,
  kWait
};
inline constexpr std::size_t kNumStages = 8;

/// "compress", "uplink", ...
const char* StageName(Stage stage);

struct Stats {
  std::uint64_t steps = 0;          // finished steps, dropped ones included
  std::uint64_t dropped_steps = 0;  // of these, steps dropped because of NaN or Inf
  // Put on this rank's links: headers, histograms and the agreement at start included.
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  // Entries of compressed tensors that this rank sent towards the servers, and those in the
  // results.
  std::uint64_t entries_up = 0;
  std::uint64_t entries_down = 0;
  // What a ring allreduce of the same tensors would have sent from this rank.
  std::uint64_t dense_bytes = 0;
  /// 1 - |x - C(x)|^2 / |x|^2 of the last step over all compressed tensors of this rank (up) and of
  /// the sums that this rank serves (down); NaN if there was none.
  double contraction_up = 0.0;
  double contraction_down = 0.0;
  double residual_norm = 0.0;                // of the worker memory as it stands
  std::array<double, kNumStages> seconds{};  // by Stage, since the start

  /// dense_bytes / bytes_sent; 1 when nothing had to be sent.
  double compression_ratio() const;
};

}  // namespace bitopk
