// SPDX-License-Identifier: Apache-2.0
#include "bitopk/stats.h"

#include <limits>

namespace bitopk {

const char* StageName(Stage stage) {
  switch (stage) {
    case Stage::kCompress:
      return "compress";
    case Stage::kUplink:
      return "uplink";
    case Stage::kServer:
      return "server";
    case Stage::kThreshold:
      return "threshold";
    case Stage::kDownlink:
      return "downlink";
    case Stage::kDecode:
      return "decode";
    case Stage::kDense:
      return "dense";
    case Stage::kWait:
      return "wait";
  }
  return "unknown";
}

double Stats::compression_ratio() const {
  if (bytes_sent == 0) return dense_bytes == 0 ? 1.0 : std::numeric_limits<double>::infinity();
  return static_cast<double>(dense_bytes) / static_cast<double>(bytes_sent);
}

}  // namespace bitopk
