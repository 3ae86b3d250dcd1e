// SPDX-License-Identifier: Apache-2.0
//
// consumer RANK WORLD_SIZE STORE: one rank of a job that uses the installed library. Exits with 0 if all is as it
// should be. Started twice by ../install_test.sh; STORE is an empty folder in which the ranks meet.
#include <bitopk/kernels/error.h>
#include <bitopk/kernels/indices.h>
#include <bitopk/version.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

// The index codec alone: what was coded comes back.
void RoundTripIndices() {
  const std::vector<std::uint32_t> indices = {3, 70, 4000, 65535};
  const std::size_t num_positions = 65536;
  std::vector<std::uint8_t> coded(bitopk::kernels::MaxIndexBytes(indices.size(), num_positions));
  coded.resize(bitopk::kernels::EncodeIndices(indices, num_positions, coded));
  bitopk::kernels::IndexDecoder decoder(coded, indices.size(), num_positions);
  std::vector<std::uint16_t> decoded(bitopk::kernels::kChunkPositions);
  decoded.resize(decoder.NextChunk(decoded.data()));
  if (std::vector<std::uint32_t>(decoded.begin(), decoded.end()) != indices) {
    throw bitopk::Error("indices changed on the way");
  }
}

// Two ranks over Gloo: every rank contributes its rank + 1 and gets the average.
// TODO: make the engine's call here once its header is public.
void AllreduceAcrossRanks(int rank, int world_size, const std::string& store) {
  static_cast<void>(rank);
  static_cast<void>(world_size);
  static_cast<void>(store);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: consumer RANK WORLD_SIZE STORE\n");
    return 2;
  }
  try {
    if (std::string(BITOPK_VERSION) != bitopk::Version()) {
      throw bitopk::Error("headers and library differ in version");
    }
    RoundTripIndices();
    AllreduceAcrossRanks(std::atoi(argv[1]), std::atoi(argv[2]), argv[3]);
  } catch (const bitopk::Error& error) {
    std::fprintf(stderr, "consumer, rank %s: %s\n", argv[1], error.what());
    return 1;
  }
  std::printf("consumer, rank %s of %s: bitopk %s\n", argv[1], argv[2], bitopk::Version());
  return 0;
}
