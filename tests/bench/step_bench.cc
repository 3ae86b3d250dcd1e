// SPDX-License-Identifier: Apache-2.0
//
// The worker's half of a step, memory + gradient to wire bytes, beside the cheapest thing that
// touches the same memory: `r += g`. Each repetition times both, one after the other, and the
// counters give medians of the pairs, so that a machine whose speed drifts does not spoil the
// ratio.
//
// Data are new in every repetition: the memory is the one that the last step left, gradients come
// from a pool.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bitopk/kernels/topk.h"
#include "bitopk/packet.h"
#include "plugin/src/memory_buffer.h"

namespace bitopk {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The baseline uses the widest vectors too, so that it is no straw man.
#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default"), noinline))
#endif
void Add(float* sum, const float* gradient, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += gradient[i];
}

enum class Data { kNormal, kLayered, kAllEqual, kFewValues, kAscending, kMostlyZero };

void Fill(Data data, Span<float> out, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < out.size(); ++i) {
    switch (data) {
      case Data::kNormal:
        out[i] = normal(random);
        break;
      case Data::kLayered:
        out[i] = normal(random) *
                 std::exp(1.5F * std::sin(static_cast<float>(i * 20 / out.size()) * 7.0F));
        break;
      case Data::kAllEqual:
        out[i] = 1.0F;
        break;
      case Data::kFewValues:
        out[i] = static_cast<float>(random() % 8) - 3.5F;
        break;
      case Data::kAscending:
        out[i] = static_cast<float>(i + 1);
        break;
      case Data::kMostlyZero:
        out[i] = random() % 2000 == 0 ? normal(random) : 0.0F;
        break;
    }
  }
}

// One gradient after the other from a pool that does not fit the caches more than the vectors
// themselves do.
class Gradients {
 public:
  Gradients(Data data, std::size_t n)
      : n_(n), pool_(std::max(2 * n, std::size_t{6400000}) / n * n) {
    Fill(data, pool_.span(), 1);
  }
  const float* Next() {
    const float* gradient = pool_.data() + at_;
    at_ = at_ + 2 * n_ <= pool_.size() ? at_ + n_ : 0;
    return gradient;
  }

 private:
  std::size_t n_;
  MemoryBuffer pool_;
  std::size_t at_ = 0;
};

// Arguments: entries, density in entries per thousand.
void BM_Step(benchmark::State& state, Data data, kernels::Isa isa) {
  const auto n = static_cast<std::size_t>(state.range(0));
  const auto k = static_cast<std::size_t>(
      std::llround(static_cast<double>(n) * static_cast<double>(state.range(1)) / 1e3));
  Gradients gradients(data, n);
  MemoryBuffer memory(n);
  MemoryBuffer next(n);
  MemoryBuffer sum(n);
  std::vector<std::uint8_t> wire(MaxPacketBytes(k, n, kernels::ValueFormat::kFloat32));
  kernels::TopKWorkspace workspace(isa);
  std::vector<double> ratios;
  std::vector<double> adds;
  std::vector<double> copies;
  std::size_t wire_bytes = 0;
  for (auto _ : state) {
    const float* const gradient = gradients.Next();
    auto start = Clock::now();
    Add(sum.data(), gradient, n);
    benchmark::ClobberMemory();
    adds.push_back(Seconds(start));
    start = Clock::now();
    std::memcpy(next.data(), gradient, n * sizeof(float));
    benchmark::ClobberMemory();
    copies.push_back(Seconds(start));

    const kernels::GradientSegment segment{gradient, n};
    start = Clock::now();
    const auto sent =
        kernels::CompressTopK({&segment, 1}, memory.data(), 1.0F, k, next.data(), workspace);
    wire_bytes = WritePacket(sent.indices, sent.values, n, kernels::ValueFormat::kFloat32, wire);
    const double seconds = Seconds(start);
    ratios.push_back(seconds / adds.back());
    state.SetIterationTime(seconds);
    std::swap(memory, next);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * n * 12));
  state.SetLabel(kernels::IsaName(isa));
  state.counters["over_add"] = Median(ratios);
  state.counters["add_ms"] = 1e3 * Median(adds);
  state.counters["memcpy_ms"] = 1e3 * Median(copies);
  state.counters["wire_bytes"] = static_cast<double>(wire_bytes);
}

void Register(const char* name, Data data, kernels::Isa isa,
              const std::vector<std::int64_t>& sizes) {
  const std::string full = std::string("BM_Step/") + name + "/" + kernels::IsaName(isa);
  auto* bench = benchmark::RegisterBenchmark(
      full.c_str(), [=](benchmark::State& state) { BM_Step(state, data, isa); });
  bench->ArgNames({"n", "per_mille"})->UseManualTime()->Unit(benchmark::kMillisecond);
  for (const std::int64_t n : sizes) {
    for (const std::int64_t per_mille : {1, 10, 50}) bench->Args({n, per_mille});
  }
}

const bool kRegistered = [] {
  for (const kernels::Isa isa : kernels::SupportedIsas())
    Register("normal", Data::kNormal, isa, {100000, 1000000, 25000000});
  const kernels::Isa best = kernels::BestIsa();
  Register("layered", Data::kLayered, best, {1000000, 25000000});
  Register("all_equal", Data::kAllEqual, best, {25000000});
  Register("few_values", Data::kFewValues, best, {25000000});
  Register("ascending", Data::kAscending, best, {25000000});
  Register("mostly_zero", Data::kMostlyZero, best, {25000000});
  return true;
}();

}  // namespace
}  // namespace bitopk
