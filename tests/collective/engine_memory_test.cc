// SPDX-License-Identifier: Apache-2.0
//
// What callers may do to the memories of an engine between steps: other scales by tensor, giving
// back results, narrow result types, loading for another number of ranks, several engines over the
// same connections.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "bitopk/engine.h"
#include "bitopk/kernels/values.h"
#include "bitopk/shared_communicator.h"
#include "tests/support/run_engines.h"

namespace bitopk {
namespace {

using testing::Buffer;
using ::testing::HasSubstr;
using testing::Job;
using testing::Record;
using testing::RunEngines;
using testing::Transport;
using testing::Values;

constexpr std::size_t kLarge = 45001;  // one unit in histogram rounds at density 0.06

std::vector<TensorSpec> Tensors() { return {{"large", kLarge}, {"small", 2000}, {"tiny", 3}}; }

Config ConfigOf(ExchangeKind exchange) {
  Config config;
  config.spec.up.density = 0.06;
  config.spec.down.density = 0.06;
  config.spec.dense_below = 0;
  config.spec.exchange = exchange;
  return config;
}

class EngineMemoryTest : public ::testing::TestWithParam<std::tuple<ExchangeKind, int>> {
 protected:
  ExchangeKind exchange() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  Job MakeJob() const {
    Job job;
    job.tensors = Tensors();
    job.config = ConfigOf(exchange());
    return job;
  }
};

INSTANTIATE_TEST_SUITE_P(, EngineMemoryTest,
                         ::testing::Combine(::testing::Values(ExchangeKind::kAllgather,
                                                              ExchangeKind::kSharded),
                                            ::testing::ValuesIn(testing::WorldSizes())),
                         [](const auto& test) {
                           return std::string(ExchangeName(std::get<0>(test.param))) +
                                  std::to_string(std::get<1>(test.param));
                         });

std::vector<float> Floats(const Buffer& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// One step whose tensors have scales of their own; returns the results.
std::vector<Buffer> ScaledStep(Engine& engine, const Job& job, int step,
                               const std::vector<double>& tensor_scales) {
  std::vector<Buffer> values;
  engine.BeginStep(job.op, 1.0, tensor_scales);
  for (std::size_t i = 0; i < job.tensors.size(); ++i)
    values.push_back(job.Gradient(engine.rank(), step, i));
  for (std::size_t i = 0; i < job.tensors.size(); ++i)
    engine.Submit(i, {values[i].data(), values[i].data()});
  engine.EndStep();
  engine.Wait();
  return values;
}

TEST_P(EngineMemoryTest, ATensorWithAScaleOfItsOwnIsAsIfAllHadIt) {
  const Job job = MakeJob();
  const auto scale_of = [](std::size_t tensor, int step) {
    return step < 2 ? 1.0 : 0.5 * static_cast<double>(tensor + 1);
  };
  for (std::size_t chosen = 0; chosen < job.tensors.size(); ++chosen) {
    Job alike = job;
    alike.num_steps = 4;
    alike.scale = [&](int step) { return scale_of(chosen, step); };
    const std::vector<Record> expected = RunJob(Transport::kInProcess, world_size(), alike);
    RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      const Record& same = expected[static_cast<std::size_t>(engine.rank())];
      for (int step = 0; step < 4; ++step) {
        std::vector<double> scales;
        for (std::size_t i = 0; i < job.tensors.size(); ++i) scales.push_back(scale_of(i, step));
        const auto results = ScaledStep(engine, job, step, scales);
        const auto number = static_cast<std::size_t>(step);
        EXPECT_EQ(results[chosen], same.results[number][chosen]);
        EXPECT_EQ(testing::WorkerMemory(engine)[chosen], same.worker_memory[number][chosen]);
      }
      const EngineState state = engine.SaveState();
      EXPECT_EQ(state.tensor_scales[chosen], scale_of(chosen, 3));
    });
  }
}

TEST_P(EngineMemoryTest, RefusesScalesThatDifferWithinAUnit) {
  Job job = MakeJob();
  job.config.spec.scope = Scope::kGlobal;
  RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    EXPECT_THROW(engine.BeginStep(Op::kAverage, 1.0, std::vector<double>{1.0}),
                 InvalidArgumentError);
    try {
      engine.BeginStep(Op::kAverage, 1.0, std::vector<double>{1.0, 2.0, 1.0});
      ADD_FAILURE() << "no exception";
    } catch (const InvalidArgumentError& error) {
      EXPECT_THAT(error.what(), HasSubstr("\"small\""));
    }
    ScaledStep(engine, job, 0, {2.0, 2.0, 2.0});
  });
}

TEST_P(EngineMemoryTest, WhatIsGivenBackIsInTheMemoryUntilARollback) {
  const Job job = MakeJob();
  RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    RunStep(engine, job, 0);
    const auto before = testing::WorkerMemory(engine);
    const auto results = RunStep(engine, job, 1);
    auto expected = testing::WorkerMemory(engine);
    const std::vector<float> values = Floats(results[1]);
    for (std::size_t i = 0; i < values.size(); ++i) expected[1][i] += 0.5F * values[i];
    EXPECT_TRUE(engine.ReturnToWorkerMemory(1, values, 0.5F));
    EXPECT_TRUE(testing::SameBits(testing::WorkerMemory(engine), expected));
    engine.Rollback();
    EXPECT_TRUE(testing::SameBits(testing::WorkerMemory(engine), before));
  });
}

TEST_P(EngineMemoryTest, ResultsFitANarrowTypeAndTheMemoryKeepsTheRest) {
  for (const auto format : {kernels::ValueFormat::kFloat16, kernels::ValueFormat::kBfloat16}) {
    Job wide = MakeJob();
    wide.num_steps = 1;
    wide.values = [](int) { return Values::kLayered; };
    Job narrow = wide;
    for (TensorSpec& tensor : narrow.tensors) tensor.result_format = format;
    const auto expected = RunJob(Transport::kInProcess, world_size(), wide);
    const auto actual = RunJob(Transport::kInProcess, world_size(), narrow);
    testing::ExpectSameOnAllRanks(actual);
    for (std::size_t tensor = 0; tensor < wide.tensors.size(); ++tensor) {
      const auto exact = Floats(expected[0].results[0][tensor]);
      const auto rounded = Floats(actual[0].results[0][tensor]);
      const auto& memory = actual[0].server_memory[0][tensor];
      const auto& exact_memory = expected[0].server_memory[0][tensor];
      for (std::size_t i = 0; i < exact.size(); ++i) {
        ASSERT_EQ(rounded[i], kernels::RoundToFormat(format, exact[i]));
        const float kept = memory.empty() ? 0.0F : memory[i];
        const float exact_kept = exact_memory.empty() ? 0.0F : exact_memory[i];
        ASSERT_EQ(kept, exact[i] != 0.0F ? exact[i] - rounded[i] : exact_kept);
      }
    }
  }
}

TEST_P(EngineMemoryTest, AResultBeyondANarrowTypeSaturatesOrIsNonFinite) {
  for (const bool memory : {true, false}) {
    Job job = MakeJob();
    job.tensors = {{"x", 100}};
    job.tensors[0].result_format = kernels::ValueFormat::kFloat16;
    job.config.spec.server_memory = memory;
    RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      std::vector<float> gradient(100, 1e5F);
      engine.BeginStep(Op::kAverage);
      engine.Submit(0, {gradient.data(), gradient.data()});
      engine.EndStep();
      engine.Wait();
      EXPECT_EQ(gradient[0], memory ? 65504.0F : HUGE_VALF);
      EXPECT_EQ(engine.stats().dropped_steps, memory ? 0U : 1U);
      const auto whole = engine.GatherServerMemory();
      EXPECT_EQ(whole[0][0], memory ? 1e5F - 65504.0F : 0.0F);
    });
  }
}

TEST_P(EngineMemoryTest, AWholeServerMemoryLoadsOnAnyNumberOfRanks) {
  const Job job = MakeJob();
  EngineState state;
  std::vector<std::vector<float>> whole;
  RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    for (int step = 0; step < 3; ++step) RunStep(engine, job, step);
    const auto gathered = engine.GatherServerMemory();
    if (engine.rank() != 0) return;
    state = engine.SaveState();
    whole = gathered;
  });
  for (const int new_size : {1, 2, 4}) {
    RunEngines(Transport::kInProcess, new_size, job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      EngineState own = state;
      own.rank = engine.rank();
      own.world_size = new_size;
      own.server_memory = whole;
      own.whole_server_memory = true;
      engine.LoadState(own);
      EXPECT_TRUE(testing::SameBits(engine.GatherServerMemory(), whole));
      RunStep(engine, job, 3);
      EXPECT_EQ(engine.SaveState().schedule_step, 4U);
    });
  }
}

TEST_P(EngineMemoryTest, TheLayoutSaysWhoServesWhat) {
  const Job job = MakeJob();
  RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    RunStep(engine, job, 0);
    const EngineState state = engine.SaveState();
    const auto whole = engine.GatherServerMemory();
    for (std::size_t tensor = 0; tensor < job.tensors.size(); ++tensor) {
      const ServerLayout layout = engine.server_layout(tensor);
      std::vector<float> own;
      for (std::size_t i = 0; i < whole[tensor].size(); ++i) {
        const std::uint64_t owner =
            ((layout.offset + i) / layout.block + layout.first_owner) % layout.owners;
        if (layout.owners == 1 || owner == static_cast<std::uint64_t>(engine.rank()))
          own.push_back(whole[tensor][i]);
      }
      EXPECT_TRUE(state.server_memory[tensor].empty() || state.server_memory[tensor] == own);
    }
  });
}

TEST_P(EngineMemoryTest, BytesGoToWhomTheyAreFor) {
  const Job job = MakeJob();
  RunEngines(Transport::kInProcess, world_size(), job.config, [&](Engine& engine) {
    std::vector<Buffer> parts;
    for (int to = 0; to < world_size(); ++to)
      parts.emplace_back(static_cast<std::size_t>(to), static_cast<std::uint8_t>(engine.rank()));
    const auto received = engine.AllToAll(parts);
    for (int from = 0; from < world_size(); ++from) {
      EXPECT_EQ(received[static_cast<std::size_t>(from)],
                Buffer(static_cast<std::size_t>(engine.rank()), static_cast<std::uint8_t>(from)));
    }
    EXPECT_THROW(engine.AllToAll(std::vector<Buffer>(99)), InvalidArgumentError);
  });
}

TEST_P(EngineMemoryTest, TwoEnginesShareConnections) {
  const Job job = MakeJob();
  const auto expected = RunJob(Transport::kInProcess, world_size(), job);
  const testing::Outcome outcome = testing::TryRanks(
      Transport::kGloo, world_size(),
      [&](Communicator& communicator) {
        // The test's communicator outlives both engines.
        const std::shared_ptr<Communicator> shared(testing::Forward(communicator));
        Engine first(std::make_unique<SharedCommunicator>(shared), job.config);
        Engine second(std::make_unique<SharedCommunicator>(shared), job.config);
        first.Register(job.tensors);
        first.Wait();
        second.Register(job.tensors);
        second.Wait();
        const Record& same = expected[static_cast<std::size_t>(first.rank())];
        for (int step = 0; step < job.num_steps; ++step) {
          for (Engine* engine : {&first, &second})
            EXPECT_EQ(RunStep(*engine, job, step), same.results[static_cast<std::size_t>(step)]);
        }
      },
      testing::kTestTimeout);
  if (outcome.first != nullptr) std::rethrow_exception(outcome.first);
}

TEST(EngineAbort, EndsTheStepAndLeavesTheMemoriesReadable) {
  Config config = ConfigOf(ExchangeKind::kSharded);
  std::atomic<int> ready{0};  // an abort may fail the last step of a rank that is still in it
  const testing::Outcome outcome = testing::TryEngines(
      Transport::kInProcess, 2, [&](int) { return config; },
      [&](Engine& engine) {
        Job job;
        job.tensors = Tensors();
        engine.Register(job.tensors);
        RunStep(engine, job, 0);
        const auto before = testing::WorkerMemory(engine);
        engine.BeginStep(Op::kAverage);
        ++ready;
        while (ready < 2) std::this_thread::yield();
        if (engine.rank() == 0) engine.Abort("rank 0 has enough");
        engine.EndStep();
        EXPECT_THROW(engine.Wait(), CommunicationError);
        EXPECT_TRUE(testing::SameBits(testing::WorkerMemory(engine), before));
      });
  if (outcome.first != nullptr) std::rethrow_exception(outcome.first);
}

}  // namespace
}  // namespace bitopk
