// SPDX-License-Identifier: Apache-2.0
//
// Nanoseconds per index and per value, and bits per index beside the entropy, with memcpy of the
// same list as the baseline. The universe is large enough that no branch predictor learns a list by
// heart.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <random>

#include "bitopk/kernels/indices.h"
#include "bitopk/kernels/values.h"
#include "tests/support/index_lists.h"

namespace bitopk::kernels {
namespace {

constexpr std::size_t kPositions = std::size_t{1} << 26;

// The argument is the density in entries per thousand.
std::vector<std::uint32_t> List(const benchmark::State& state) {
  return testing::RandomIndices(kPositions, static_cast<double>(state.range(0)) / 1000, /*seed=*/1);
}

std::vector<std::uint8_t> Encoded(const std::vector<std::uint32_t>& indices) {
  std::vector<std::uint8_t> stream(MaxIndexBytes(indices.size(), kPositions));
  stream.resize(EncodeIndices(indices, kPositions, stream));
  return stream;
}

std::size_t DecodeAll(const std::vector<std::uint8_t>& stream, std::size_t num_indices,
                      std::uint16_t* chunk) {
  IndexDecoder decoder(stream, num_indices, kPositions);
  std::size_t total = 0;
  for (std::size_t c = 0; c < NumChunks(kPositions); ++c) {
    total += decoder.NextChunk(chunk);
    benchmark::DoNotOptimize(chunk[0]);
  }
  return total;
}

void CountTime(benchmark::State& state, std::size_t num_entries) {
  state.counters["k"] = static_cast<double>(num_entries);
  state.counters["time_per_entry"] = benchmark::Counter(
      static_cast<double>(num_entries),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void CountBits(benchmark::State& state, std::size_t num_indices, std::size_t num_bytes) {
  const auto k = static_cast<double>(num_indices);
  const double p = k / kPositions;
  state.counters["bits"] = 8 * static_cast<double>(num_bytes) / k;
  state.counters["entropy_bits"] = -(std::log2(p) + (1 - p) / p * std::log2(1 - p));
}

void BM_MemcpyIndices(benchmark::State& state) {
  const std::vector<std::uint32_t> indices = List(state);
  std::vector<std::uint32_t> copy(indices.size());
  for (auto _ : state) {
    std::memcpy(copy.data(), indices.data(), indices.size() * 4);
    benchmark::ClobberMemory();
  }
  CountTime(state, indices.size());
}
BENCHMARK(BM_MemcpyIndices)->ArgName("per_mille")->Arg(1)->Arg(10)->Arg(50);

void BM_EncodeIndices(benchmark::State& state) {
  const std::vector<std::uint32_t> indices = List(state);
  std::vector<std::uint8_t> out(MaxIndexBytes(indices.size(), kPositions));
  std::size_t num_bytes = 0;
  for (auto _ : state) {
    num_bytes = EncodeIndices(indices, kPositions, out);
    benchmark::ClobberMemory();
  }
  CountTime(state, indices.size());
  CountBits(state, indices.size(), num_bytes);
}
BENCHMARK(BM_EncodeIndices)->ArgName("per_mille")->Arg(1)->Arg(10)->Arg(50);

void BM_DecodeIndices(benchmark::State& state) {
  const std::vector<std::uint32_t> indices = List(state);
  const std::vector<std::uint8_t> stream = Encoded(indices);
  std::vector<std::uint16_t> chunk(kChunkPositions);
  if (DecodeAll(stream, indices.size(), chunk.data()) != indices.size()) {
    state.SkipWithError("decoded another number of indices");
  }
  for (auto _ : state) DecodeAll(stream, indices.size(), chunk.data());
  CountTime(state, indices.size());
  CountBits(state, indices.size(), stream.size());
}
BENCHMARK(BM_DecodeIndices)->ArgName("per_mille")->Arg(1)->Arg(10)->Arg(50);

std::vector<float> SomeValues() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(std::size_t{1} << 16);
  for (float& value : values) value = normal(random);
  return values;
}

// The argument is the ValueFormat.
void BM_EncodeValues(benchmark::State& state) {
  const auto format = static_cast<ValueFormat>(state.range(0));
  std::vector<float> values = SomeValues();
  std::vector<std::uint8_t> out(values.size() * ValueBytes(format));
  for (auto _ : state) {
    EncodeValues(format, values, out);
    benchmark::ClobberMemory();
  }
  CountTime(state, values.size());
}
BENCHMARK(BM_EncodeValues)->ArgName("format")->Arg(0)->Arg(1)->Arg(2);

void BM_DecodeValues(benchmark::State& state) {
  const auto format = static_cast<ValueFormat>(state.range(0));
  std::vector<float> values = SomeValues();
  std::vector<std::uint8_t> wire(values.size() * ValueBytes(format));
  EncodeValues(format, values, wire);
  for (auto _ : state) {
    DecodeValues(format, wire, values);
    benchmark::ClobberMemory();
  }
  CountTime(state, values.size());
}
BENCHMARK(BM_DecodeValues)->ArgName("format")->Arg(0)->Arg(1)->Arg(2);

}  // namespace
}  // namespace bitopk::kernels
