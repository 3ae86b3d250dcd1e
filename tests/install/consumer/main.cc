// SPDX-License-Identifier: Apache-2.0
//
// consumer RANK WORLD_SIZE STORE: one rank of a job that uses the installed library. Exits with 0
// if all is as it should be. Started twice by ../install_test.sh; STORE is an empty folder in which
// the ranks meet.
#include <bitopk/config.h>
#include <bitopk/engine.h>
#include <bitopk/gloo_communicator.h>
#include <bitopk/kernels/error.h>
#include <bitopk/kernels/indices.h>
#include <bitopk/tensor.h>
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

// One bidirectional step over Gloo: rank r has r + 1 in entry 3 of 8 and 0.25 in entry 5. One entry
// goes up and one comes back, so the average of entry 3 arrives everywhere and entry 5 stays in the
// memories.
void AllreduceAcrossRanks(int rank, int world_size, const std::string& store) {
  bitopk::GlooOptions options;
  options.hostname = "127.0.0.1";
  bitopk::Config config;
  config.spec.up.k = 1;
  config.spec.down.k = 1;
  config.spec.dense_below = 0;
  bitopk::Engine engine(bitopk::ConnectThroughFileStore(store, rank, world_size, options), config);
  engine.Register({{"weight", 8, bitopk::DType::kFloat32}});

  std::vector<float> gradient(8, 0.0F);
  gradient[3] = static_cast<float>(rank + 1);
  gradient[5] = 0.25F;
  std::vector<float> result(8, -1.0F);
  engine.BeginStep(bitopk::Op::kAverage);
  bitopk::TensorSubmission submission;
  submission.gradient = gradient.data();
  submission.result = result.data();
  engine.Submit(0, submission);
  engine.EndStep();
  engine.Wait();

  std::vector<float> expected(8, 0.0F);
  expected[3] = static_cast<float>(world_size + 1) / 2.0F;
  if (result != expected) {
    throw bitopk::Error("the average is wrong");
  }
  std::vector<float> memory(8, -1.0F);
  engine.ReadWorkerMemory(0, memory);
  gradient[3] = 0.0F;
  if (memory != gradient) {
    throw bitopk::Error("the memory is not what was left out");
  }
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
