// SPDX-License-Identifier: Apache-2.0
//
// A full step of the engine beside Gloo's dense allreduce of the same tensor: a thread per rank,
// real Gloo over TCP on loopback. Each repetition times both, one after the other, as rank 0 sees
// them; counters give medians of the pairs. Loopback is the worst case for compression: its
// bandwidth costs nothing but copies.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bitopk/engine.h"
#include "tests/support/run_ranks.h"

namespace bitopk {
namespace {

using Clock = std::chrono::steady_clock;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Config ConfigFor(ExchangeKind exchange, double density) {
  Config config;
  config.spec.up.density = density;
  config.spec.down.density = density;
  config.spec.exchange = exchange;
  return config;
}

// One rank with an engine and a second connection for the baseline.
class Rank {
 public:
  Rank(std::unique_ptr<Communicator> baseline, std::unique_ptr<Communicator> engine,
       const Config& config, std::size_t n)
      : baseline_(std::move(baseline)),
        engine_(std::move(engine), config),
        gradient_(n),
        result_(n),
        dense_(n) {
    std::mt19937 random(static_cast<unsigned>(baseline_->rank()));
    std::normal_distribution<float> normal;
    for (float& entry : gradient_) entry = normal(random);
    engine_.Register({{"tensor", n, DType::kFloat32}});
  }

  // Returns false once rank 0 says stop. `times` gets the seconds of both.
  bool Step(bool go_on, double (&times)[2]) {
    if (!Meet(go_on)) return false;
    std::memcpy(dense_.data(), gradient_.data(), gradient_.size() * sizeof(float));
    Meet(true);
    auto start = Clock::now();
    baseline_->AllReduceDense(Tag(), dense_);
    times[0] = std::chrono::duration<double>(Clock::now() - start).count();
    Meet(true);
    start = Clock::now();
    engine_.BeginStep(Op::kAverage);
    engine_.Submit(0, {gradient_.data(), result_.data()});
    engine_.EndStep();
    engine_.Wait();
    times[1] = std::chrono::duration<double>(Clock::now() - start).count();
    return true;
  }

  Engine& engine() { return engine_; }

 private:
  MessageTag Tag() {
    MessageTag tag;
    tag.step = ++calls_;
    return tag;
  }
  bool Meet(bool go_on) {
    std::vector<std::uint64_t> votes = {go_on ? 0U : 1U};
    baseline_->AllReduceSum(Tag(), votes);
    return votes[0] == 0;
  }

  std::unique_ptr<Communicator> baseline_;
  Engine engine_;
  std::vector<float> gradient_;
  std::vector<float> result_;
  std::vector<float> dense_;
  std::uint64_t calls_ = 0;
};

// Arguments: ranks, entries, density in entries per thousand.
void BM_Exchange(benchmark::State& state, ExchangeKind exchange) {
  const int world_size = static_cast<int>(state.range(0));
  const auto n = static_cast<std::size_t>(state.range(1));
  const double density = static_cast<double>(state.range(2)) / 1000.0;
  const auto baseline =
      testing::MakeWorld(testing::Transport::kGloo, world_size, testing::kTestTimeout);
  const auto engines =
      testing::MakeWorld(testing::Transport::kGloo, world_size, testing::kTestTimeout);
  const auto make = [&](int rank) {
    auto first = baseline(rank);
    return std::make_unique<Rank>(std::move(first), engines(rank), ConfigFor(exchange, density), n);
  };
  std::vector<std::thread> others;
  for (int rank = 1; rank < world_size; ++rank) {
    others.emplace_back([&make, rank] {
      const auto self = make(rank);
      double times[2];
      while (self->Step(true, times)) {
      }
    });
  }
  const auto self = make(0);
  std::vector<double> dense;
  std::vector<double> ratios;
  double times[2];
  self->Step(true, times);  // not counted: buffers grow, the start is agreed
  const Stats before = self->engine().stats();
  for (auto _ : state) {
    self->Step(true, times);
    state.SetIterationTime(times[1]);
    dense.push_back(times[0]);
    ratios.push_back(times[1] / times[0]);
  }
  const Stats after = self->engine().stats();
  self->Step(false, times);
  for (std::thread& thread : others) thread.join();
  state.counters["over_dense"] = Median(ratios);
  state.counters["dense_ms"] = 1e3 * Median(dense);
  state.counters["bytes_sent"] = static_cast<double>(after.bytes_sent - before.bytes_sent) /
                                 static_cast<double>(state.iterations());
}

const bool kRegistered = [] {
  for (const ExchangeKind exchange :
       {ExchangeKind::kDense, ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    const std::string name = std::string("BM_Exchange/") + ExchangeName(exchange);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& state) { BM_Exchange(state, exchange); })
        ->ArgNames({"ranks", "n", "per_mille"})
        ->ArgsProduct({{2, 4}, {100000, 4000000}, {10}})
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
}  // namespace bitopk
