// SPDX-License-Identifier: Apache-2.0
//
// Engines of several ranks: what they compute and in which order, over Gloo and in process. What
// happens when something breaks is in engine_failure_test.cc.
#include "bitopk/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/support/run_engines.h"

namespace bitopk {
namespace {

using testing::Buffer;
using testing::ExpectSameOnAllRanks;
using testing::ExpectSameRecords;
using ::testing::HasSubstr;
using testing::Job;
using testing::Order;
using testing::Record;
using testing::RunEngines;
using testing::RunJob;
using testing::RunSteps;
using testing::Transport;
using testing::Values;

constexpr std::size_t kLarge = 45001;

Config ConfigOf(ExchangeKind exchange, double density = 0.06) {
  Config config;
  config.spec.up.density = density;
  config.spec.down.density = density;
  config.spec.dense_below = 0;
  config.spec.exchange = exchange;
  config.check_every = 1;
  return config;
}

// At density 0.06: one unit in histogram rounds, some that go whole to one owner, and what travels
// dense.
std::vector<TensorSpec> Tensors() {
  return {{"large", kLarge},
          {"medium", 4099},
          {"none", 0},
          {"count", 300, DType::kInt64},
          {"block", 1025},
          {"tiny", 3},
          {"statistics", 77, DType::kFloat64}};
}

// Normal values, ties and layers in turn.
Values Mixed(int step) { return static_cast<Values>(step % 3); }

Job JobOf(const Config& config) {
  Job job;
  job.tensors = Tensors();
  job.config = config;
  job.values = Mixed;
  return job;
}

class EngineTest : public ::testing::TestWithParam<std::tuple<Transport, int>> {
 protected:
  Transport transport() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  std::vector<Record> Run(const Job& job) const { return RunJob(transport(), world_size(), job); }
};

INSTANTIATE_TEST_SUITE_P(, EngineTest,
                         ::testing::Combine(::testing::Values(Transport::kGloo,
                                                              Transport::kInProcess),
                                            ::testing::ValuesIn(testing::WorldSizes())),
                         [](const auto& test) {
                           return std::string(testing::TransportName(std::get<0>(test.param))) +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(EngineTest, ShardedEqualsAllgatherInEveryValueFormat) {
  for (const auto format : {kernels::ValueFormat::kFloat32, kernels::ValueFormat::kFloat16,
                            kernels::ValueFormat::kBfloat16}) {
    std::vector<std::vector<Record>> records;
    for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
      Job job = JobOf(ConfigOf(exchange));
      job.config.spec.value_format = format;
      job.num_steps = testing::kSanitized ? 4 : 20;
      job.op = world_size() == 3 ? Op::kSum : Op::kAverage;
      job.scale = [](int step) { return step % 5 == 4 ? 0.75 : 1.0; };
      records.push_back(Run(job));
      ExpectSameOnAllRanks(records.back());
    }
    ExpectSameRecords(records[1], records[0],
                      internal::StrCat("format ", static_cast<int>(format)));
  }
}

TEST_P(EngineTest, ShardedEqualsAllgatherForOtherSettings) {
  const auto compare = [&](const char* what, const std::function<void(Config&)>& change) {
    std::vector<std::vector<Record>> records;
    for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
      Job job = JobOf(ConfigOf(exchange));
      change(job.config);
      records.push_back(Run(job));
      ExpectSameOnAllRanks(records.back());
    }
    ExpectSameRecords(records[1], records[0], what);
  };
  compare("unidirectional", [](Config& config) { config.spec.down.density = 1.0; });
  compare("global", [](Config& config) { config.spec.scope = Scope::kGlobal; });
  compare("no worker memory", [](Config& config) { config.spec.worker_memory = false; });
  compare("no server memory", [](Config& config) { config.spec.server_memory = false; });
  compare("decay", [](Config& config) { config.spec.memory_decay = 0.9; });
  compare("few up, many down", [](Config& config) { config.spec.up = {0.0, 5}; });
}

TEST_P(EngineTest, DensityOneIsTheDenseSumInRankOrder) {
  std::vector<std::vector<Record>> records;
  for (const ExchangeKind exchange :
       {ExchangeKind::kDense, ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    records.push_back(Run(JobOf(ConfigOf(exchange, 1.0))));
    ExpectSameOnAllRanks(records.back());
  }
  ExpectSameRecords(records[1], records[0], "allgather");
  ExpectSameRecords(records[2], records[0], "sharded");
  const Job job = JobOf(ConfigOf(ExchangeKind::kDense));
  for (int step = 0; step < job.num_steps; ++step) {
    std::vector<float> sum(kLarge, 0.0F);
    for (int rank = 0; rank < world_size(); ++rank) {
      const Buffer gradient = job.Gradient(rank, step, 0);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        float value;
        std::memcpy(&value, gradient.data() + i * sizeof value, sizeof value);
        sum[i] += value;
      }
    }
    for (float& entry : sum) entry /= static_cast<float>(world_size());
    const Buffer& result = records[0][0].results[static_cast<std::size_t>(step)][0];
    EXPECT_EQ(std::memcmp(result.data(), sum.data(), result.size()), 0);
  }
}

TEST_P(EngineTest, OrderOfSubmissionChangesNothing) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    Job job = JobOf(ConfigOf(exchange));
    job.config.bucket_bytes = 20000;
    const std::vector<Record> expected = Run(job);
    job.order = Order::kScrambled;
    job.num_steps = 3;
    ExpectSameRecords(Run(job), expected, ExchangeName(exchange));
  }
}

TEST_P(EngineTest, BucketBytesChangeNothing) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    Job job = JobOf(ConfigOf(exchange));
    const std::vector<Record> expected = Run(job);
    for (const std::size_t bucket_bytes : {1U, 5000U, 20000U}) {
      job.config.bucket_bytes = bucket_bytes;
      ExpectSameRecords(Run(job), expected, internal::StrCat(bucket_bytes, " bytes"));
    }
  }
}

TEST_P(EngineTest, ResultsInPlaceAreTheSame) {
  for (const ExchangeKind exchange :
       {ExchangeKind::kAllgather, ExchangeKind::kSharded, ExchangeKind::kDense}) {
    Job job = JobOf(ConfigOf(exchange));
    const std::vector<Record> expected = Run(job);
    job.in_place = true;
    ExpectSameRecords(Run(job), expected, ExchangeName(exchange));
  }
}

// A tensor that a rank leaves out counts as zeros there, and its memory still drains.
TEST_P(EngineTest, AnUnsubmittedTensorCountsAsZeros) {
  for (const ExchangeKind exchange :
       {ExchangeKind::kAllgather, ExchangeKind::kSharded, ExchangeKind::kDense}) {
    Job job = JobOf(ConfigOf(exchange));
    const auto left_out = [](int rank, int step, std::size_t tensor) {
      return step > 0 && (static_cast<std::size_t>(rank) + tensor) % 2 == 0;
    };
    std::vector<std::vector<std::vector<float>>> expected(static_cast<std::size_t>(world_size()));
    std::vector<std::vector<Buffer>> results(static_cast<std::size_t>(world_size()));
    RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      const auto rank = static_cast<std::size_t>(engine.rank());
      for (int step = 0; step < 3; ++step) {
        std::vector<Buffer> gradients;
        engine.BeginStep(job.op);
        for (std::size_t i = 0; i < job.tensors.size(); ++i) {
          gradients.push_back(job.Gradient(engine.rank(), step, i));
          if (left_out(engine.rank(), step, i)) {
            std::fill(gradients[i].begin(), gradients[i].end(), std::uint8_t{0});
          }
        }
        for (std::size_t i = 0; i < job.tensors.size(); ++i) {
          engine.Submit(i, {gradients[i].data(), gradients[i].data()});
        }
        engine.EndStep();
        engine.Wait();
        results[rank] = std::move(gradients);
      }
      expected[rank] = testing::WorkerMemory(engine);
    });
    job.submits = [&](int rank, int step, std::size_t tensor) {
      return !left_out(rank, step, tensor);
    };
    const std::vector<Record> records = Run(job);
    for (std::size_t rank = 0; rank < records.size(); ++rank) {
      EXPECT_TRUE(testing::SameBits(records[rank].worker_memory.back(), expected[rank]));
      for (std::size_t i = 0; i < job.tensors.size(); ++i) {
        if (!job.submits(static_cast<int>(rank), 2, i)) continue;
        EXPECT_TRUE(records[rank].results[2][i] == results[rank][i]) << "tensor " << i;
      }
    }
  }
}

TEST_P(EngineTest, StepsWithoutTensorsAndTensorsWithoutEntriesWork) {
  Job job;
  job.config = ConfigOf(ExchangeKind::kSharded);
  ExpectSameOnAllRanks(Run(job));
  job.tensors = {{"none", 0}, {"nothing", 0, DType::kInt32}};
  ExpectSameOnAllRanks(Run(job));
}

TEST_P(EngineTest, IsDenseBeforeItsStartStep) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    Job job = JobOf(ConfigOf(exchange));
    job.config.spec.start_step = 2;
    job.num_steps = 4;
    const std::vector<Record> late = Run(job);
    ExpectSameOnAllRanks(late);
    Job dense = JobOf(ConfigOf(ExchangeKind::kDense));
    dense.num_steps = 2;
    const std::vector<Record> before = Run(dense);
    Job sparse = JobOf(ConfigOf(exchange));
    sparse.first_step = 2;
    sparse.num_steps = 2;
    const std::vector<Record> after = Run(sparse);
    for (std::size_t rank = 0; rank < late.size(); ++rank) {
      const auto& results = late[rank].results;
      EXPECT_TRUE(results[0] == before[rank].results[0]);
      EXPECT_TRUE(results[1] == before[rank].results[1]);
      // From there on it is a fresh job with the gradients of these steps.
      EXPECT_TRUE(results[2] == after[rank].results[0]);
      EXPECT_TRUE(results[3] == after[rank].results[1]);
      EXPECT_TRUE(testing::SameBits(late[rank].worker_memory[3], after[rank].worker_memory[1]));
    }
  }
}

TEST_P(EngineTest, ARolledBackStepLeavesNoTrace) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    Job job = JobOf(ConfigOf(exchange));
    job.num_steps = 4;
    const std::vector<Record> expected = Run(job);
    std::vector<Record> records(expected.size());
    RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      Record& record = records[static_cast<std::size_t>(engine.rank())];
      for (int step = 0; step < 4; ++step) {
        Job other = job;  // other gradients and another scale
        other.first_step = 100;
        other.scale = [](int) { return 0.3; };
        RunStep(engine, other, step);
        engine.Rollback();
        record.results.push_back(RunStep(engine, job, step));
        if (step % 2 == 0) engine.Commit();  // else the next step does
        record.worker_memory.push_back(testing::WorkerMemory(engine));
        record.server_memory.push_back(engine.GatherServerMemory());
      }
    });
    ExpectSameRecords(records, expected, ExchangeName(exchange));
  }
}

TEST_P(EngineTest, GoesOnBitForBitFromASavedState) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    for (const std::uint64_t start_step : {0U, 1U}) {
      Job job = JobOf(ConfigOf(exchange));
      job.num_steps = 5;
      job.config.spec.start_step = start_step;
      job.scale = [](int step) { return 1.0 + step; };
      const std::vector<Record> expected = Run(job);
      std::vector<EngineState> states(expected.size());
      Job part = job;
      part.num_steps = 3;
      RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
        engine.Register(job.tensors);
        RunSteps(engine, part);
        states[static_cast<std::size_t>(engine.rank())] = engine.SaveState();
      });
      part.first_step = 3;
      part.num_steps = 2;
      std::vector<Record> records(expected.size());
      RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
        engine.Register(job.tensors);
        Job noise = job;  // a past of its own, which the state replaces
        noise.first_step = 50;
        noise.num_steps = 2;
        RunSteps(engine, noise);
        engine.LoadState(states[static_cast<std::size_t>(engine.rank())]);
        records[static_cast<std::size_t>(engine.rank())] = RunSteps(engine, part);
      });
      std::vector<Record> rest = expected;
      for (Record& record : rest) {
        record.results.erase(record.results.begin(), record.results.begin() + 3);
        record.worker_memory.erase(record.worker_memory.begin(), record.worker_memory.begin() + 3);
        record.server_memory.erase(record.server_memory.begin(), record.server_memory.begin() + 3);
      }
      ExpectSameRecords(records, rest, ExchangeName(exchange));
    }
  }
}

TEST_P(EngineTest, SetDensityHoldsFromTheNextStepOnButNotForRules) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    Config config = ConfigOf(exchange, 0.5);
    config.rules = {{"ruled", ConfigOf(exchange, 0.25).spec}};
    RunEngines(transport(), world_size(), config, [&](Engine& engine) {
      Job job;
      job.tensors = {{"free", 10000}, {"ruled", 4000}};
      engine.Register(job.tensors);
      RunStep(engine, job, 0);
      EXPECT_EQ(engine.stats().entries_up, 6000U);
      EXPECT_EQ(engine.stats().entries_down, 6000U);
      engine.SetDensity(0.02, 0.01);
      RunStep(engine, job, 1);
      EXPECT_EQ(engine.stats().entries_up, 6000U + 1200U);
      EXPECT_EQ(engine.stats().entries_down, 6000U + 1100U);
      EXPECT_THROW(engine.SetDensity(0.0, 0.5), InvalidArgumentError);
      EXPECT_THROW(engine.SetDensity(0.5, 1.5), InvalidArgumentError);
      EXPECT_THROW(engine.SetDensity(std::nan(""), 0.5), InvalidArgumentError);
      RunStep(engine, job, 2);
      EXPECT_EQ(engine.stats().entries_up, 6000U + 2400U);
    });
  }
}

TEST_P(EngineTest, SetDensityHoldsAlsoBeforeTensorsAreRegistered) {
  RunEngines(transport(), world_size(), ConfigOf(ExchangeKind::kSharded, 0.5), [](Engine& engine) {
    Job job;
    job.tensors = {{"x", 10000}};
    engine.SetDensity(0.02, 0.01);
    engine.Register(job.tensors);
    RunStep(engine, job, 0);
    EXPECT_EQ(engine.stats().entries_up, 200U);
    EXPECT_EQ(engine.stats().entries_down, 100U);
  });
}

TEST_P(EngineTest, CountsTheBytesThatItsCommunicatorWasAskedToSend) {
  for (const ExchangeKind exchange :
       {ExchangeKind::kAllgather, ExchangeKind::kSharded, ExchangeKind::kDense}) {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(world_size()));
    std::atomic<std::uint64_t> sent{0};
    std::atomic<std::uint64_t> received{0};
    const Job job = JobOf(ConfigOf(exchange));
    const testing::Outcome outcome = testing::TryEngines(
        transport(), world_size(), [&](int) { return job.config; },
        [&](Engine& engine) {
          engine.Register(job.tensors);
          const Record record = RunSteps(engine, job);
          EXPECT_EQ(record.stats.bytes_sent, counts[static_cast<std::size_t>(engine.rank())]);
          EXPECT_EQ(record.stats.steps, 3U);
          sent += record.stats.bytes_sent;
          received += record.stats.bytes_received;
        },
        testing::kTestTimeout,
        [&](Communicator& inner) {
          return std::make_unique<testing::CountingCommunicator>(
              inner, &counts[static_cast<std::size_t>(inner.rank())]);
        });
    ASSERT_EQ(outcome.first, nullptr) << outcome.message(0);
    EXPECT_EQ(sent, received);
    EXPECT_EQ(sent > 0, world_size() > 1);
  }
}

TEST_P(EngineTest, WorkerMemoryPlusWhatWasSentIsTheCorrectedGradient) {
  Job job;
  job.tensors = {{"x", 5000}};
  job.num_steps = 1;
  job.config = ConfigOf(ExchangeKind::kSharded, 0.1);
  const std::vector<Record> records = Run(job);
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    const std::vector<float> gradient =
        testing::RandomValues(job.Seed(static_cast<int>(rank), 0, 0), 5000, Values::kNormal);
    std::vector<float> left = gradient;
    for (const std::uint32_t i : testing::SortedTopK(gradient, 500)) left[i] = 0.0F;
    EXPECT_TRUE(testing::BitsOf(records[rank].worker_memory[0][0]) == testing::BitsOf(left));
  }
}

// Waits until `done`, but not for ever.
template <typename Done>
bool Eventually(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + testing::kTestTimeout / 2;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Runs a step of three tensors of a bucket each, of which the last registered one is submitted
// first.
void RunOpenStep(Engine& engine, const std::function<void(Engine&)>& while_open) {
  engine.Register({{"first", 5000}, {"second", 5000}, {"third", 5000}});
  for (int step = 0; step < 2; ++step) {
    std::vector<std::vector<float>> values(3, std::vector<float>(5000, 1.0F));
    engine.BeginStep(Op::kSum);
    EXPECT_FALSE(engine.IsCompleted());
    engine.Submit(2, {values[2].data(), values[2].data()});
    while_open(engine);
    EXPECT_FALSE(engine.IsCompleted(0));
    EXPECT_FALSE(engine.IsCompleted(1));
    engine.Submit(1, {values[1].data(), values[1].data()});
    engine.Submit(0, {values[0].data(), values[0].data()});
    engine.EndStep();
    engine.Wait();
    EXPECT_TRUE(engine.IsCompleted());
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(engine.IsCompleted(i));
  }
}

Config BucketPerTensor(NonFinitePolicy policy) {
  Config config = ConfigOf(ExchangeKind::kSharded);
  config.bucket_bytes = 1;
  config.nonfinite = policy;
  return config;
}

TEST_P(EngineTest, ATensorCompletesWhileLaterOnesAreMissing) {
  RunEngines(
      transport(), world_size(), BucketPerTensor(NonFinitePolicy::kPropagate), [](Engine& engine) {
        RunOpenStep(engine,
                    [](Engine& e) { EXPECT_TRUE(Eventually([&] { return e.IsCompleted(2); })); });
      });
}

TEST_P(EngineTest, NothingCompletesBeforeTheVerdictUnderSkipAndRaise) {
  for (const NonFinitePolicy policy : {NonFinitePolicy::kSkip, NonFinitePolicy::kRaise}) {
    RunEngines(transport(), world_size(), BucketPerTensor(policy), [](Engine& engine) {
      RunOpenStep(engine, [](Engine& e) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_FALSE(e.IsCompleted(2));
      });
    });
  }
}

// A fused unit of small tensors spans the model. It must not hold up large ones that are ready
// before.
TEST_P(EngineTest, ATensorCompletesWhileSmallOnesAreMissing) {
  Config config = BucketPerTensor(NonFinitePolicy::kPropagate);
  config.bucket_bytes = 30000;
  config.spec.dense_below = 100;
  RunEngines(transport(), world_size(), config, [](Engine& engine) {
    engine.Register({{"first.bias", 10}, {"first", 5000}, {"last", 5000}, {"last.bias", 10}});
    std::vector<std::vector<float>> values(4, std::vector<float>(5000, 1.0F));
    engine.BeginStep(Op::kSum);
    for (const std::size_t i : {3U, 2U, 1U}) engine.Submit(i, {values[i].data(), values[i].data()});
    EXPECT_TRUE(Eventually([&] { return engine.IsCompleted(2); }));
    engine.Submit(0, {values[0].data(), values[0].data()});
    engine.EndStep();
    engine.Wait();
  });
}

TEST_P(EngineTest, WrongCallsAreRefusedAndHurtNobody) {
  const Job job = JobOf(ConfigOf(ExchangeKind::kSharded));
  const std::vector<Record> expected = Run(job);
  std::vector<Record> records(expected.size());
  RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
    EXPECT_THROW(engine.BeginStep(Op::kAverage), InvalidArgumentError);
    EXPECT_THROW(engine.Register({{"x", 1}, {"x", 2}}), InvalidArgumentError);
    engine.Register(job.tensors);
    EXPECT_THROW(engine.Register(job.tensors), InvalidArgumentError);
    EXPECT_THROW(engine.Submit(0, {}), InvalidArgumentError);
    EXPECT_THROW(engine.EndStep(), InvalidArgumentError);
    for (const double scale : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
      EXPECT_THROW(engine.BeginStep(Op::kAverage, scale), InvalidArgumentError);
    }
    Record& record = records[static_cast<std::size_t>(engine.rank())];
    for (int step = 0; step < job.num_steps; ++step) {
      std::vector<Buffer> values;
      for (std::size_t i = 0; i < job.tensors.size(); ++i) {
        values.push_back(job.Gradient(engine.rank(), step, i));
      }
      engine.BeginStep(job.op);
      EXPECT_THROW(engine.BeginStep(job.op), InvalidArgumentError);
      EXPECT_THROW(engine.Wait(), InvalidArgumentError);
      EXPECT_THROW(engine.Submit(job.tensors.size(), {}), InvalidArgumentError);
      for (std::size_t i = 0; i < job.tensors.size(); ++i) {
        engine.Submit(i, {values[i].data(), values[i].data()});
        EXPECT_THROW(engine.Submit(i, {}), InvalidArgumentError);
      }
      engine.EndStep();
      EXPECT_THROW(engine.EndStep(), InvalidArgumentError);
      EXPECT_THROW(engine.Submit(0, {}), InvalidArgumentError);
      EXPECT_THROW(engine.BeginStep(Op::kSum), InvalidArgumentError);
      engine.Wait();
      std::vector<float> room(kLarge - 1);
      EXPECT_THROW(engine.ReadWorkerMemory(0, room), InvalidArgumentError);
      EXPECT_THROW(engine.ReadServerShare(99, room), InvalidArgumentError);
      record.results.push_back(std::move(values));
      record.worker_memory.push_back(testing::WorkerMemory(engine));
      record.server_memory.push_back(engine.GatherServerMemory());
    }
  });
  ExpectSameRecords(records, expected, "after refusals");
}

TEST_P(EngineTest, RefusesTheStateOfAnotherJobUnchanged) {
  Job other = JobOf(ConfigOf(ExchangeKind::kSharded));
  other.tensors[1].num_entries = 4100;
  std::vector<EngineState> states(static_cast<std::size_t>(world_size()));
  RunEngines(transport(), world_size(), other.config, [&](Engine& engine) {
    engine.Register(other.tensors);
    RunSteps(engine, other);
    states[static_cast<std::size_t>(engine.rank())] = engine.SaveState();
  });
  const Job job = JobOf(ConfigOf(ExchangeKind::kSharded));
  RunEngines(transport(), world_size(), job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    RunSteps(engine, job);
    const auto worker = testing::WorkerMemory(engine);
    const auto server = testing::ServerShare(engine);
    const EngineState own = engine.SaveState();
    const auto refuses = [&](const EngineState& state, const char* words) {
      try {
        engine.LoadState(state);
        ADD_FAILURE() << "no exception, expected " << words;
      } catch (const InvalidArgumentError& error) {
        EXPECT_THAT(error.what(), HasSubstr(words));
      }
      EXPECT_TRUE(testing::SameBits(testing::WorkerMemory(engine), worker));
      EXPECT_TRUE(testing::SameBits(testing::ServerShare(engine), server));
    };
    refuses(states[static_cast<std::size_t>(engine.rank())], "\"medium\" float32[4100]");
    EngineState bad = own;
    bad.rank += 1;
    refuses(bad, "rank");
    bad = own;
    bad.world_size += 1;
    refuses(bad, "of");
    bad = own;
    bad.scale = std::nan("");
    refuses(bad, "scale");
    bad = own;
    bad.worker_memory[0].pop_back();
    refuses(bad, "large");
    bad = own;
    bad.worker_memory.pop_back();
    refuses(bad, "memories");
    bad = own;
    bad.server_memory[0].push_back(0.0F);
    refuses(bad, "server memory of \"large\"");
    bad = own;
    bad.tensor_scales.back() = -1.0;
    refuses(bad, "scale");
    engine.Rollback();  // the last step was still pending
    EXPECT_EQ(engine.SaveState().schedule_step, own.schedule_step - 1);
  });
}

// Issue: bytes sent per rank and step, against the entropy of the indices and four bytes a value.
TEST(EngineTraffic, OfTheShardedExchangeStaysNearTheBound) {
  if (testing::kSanitized) GTEST_SKIP() << "counts bytes, which no sanitizer changes";
  constexpr int kRanks = 8;
  constexpr std::size_t kEntries = 1000000;
  const double bound = (10000.0 + 10000.0) * (kRanks - 1) / kRanks * (4 + 8.6 / 8);
  for (const auto& [values, limit] :
       {std::pair{Values::kNormal, 1.25}, std::pair{Values::kLayered, 1.5}}) {
    Job job;
    job.tensors = {{"x", kEntries}};
    job.config = ConfigOf(ExchangeKind::kSharded, 0.01);
    job.config.check_every = 0;
    job.values = [kind = values](int) { return kind; };
    double most = 0.0;
    std::mutex mutex;
    RunEngines(Transport::kInProcess, kRanks, job.config, [&](Engine& engine) {
      engine.Register(job.tensors);
      engine.Wait();
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t before = engine.stats().bytes_sent;
        RunStep(engine, job, step);
        const auto sent = static_cast<double>(engine.stats().bytes_sent - before);
        const std::lock_guard<std::mutex> lock(mutex);
        most = std::max(most, sent / bound);
      }
    });
    EXPECT_LE(most, limit);
    EXPECT_GE(most, 0.9) << "too little to be true";
    std::cout << "most bytes sent, against the bound: " << most << '\n';
  }
}

}  // namespace
}  // namespace bitopk
