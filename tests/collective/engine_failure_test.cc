// SPDX-License-Identifier: Apache-2.0
//
// Engines when something is wrong: NaN and Inf, ranks that disagree, ranks that leave, damaged
// bytes. Every rank must end with an error, soon, and with memories as they were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "bitopk/engine.h"
#include "tests/support/run_engines.h"

namespace bitopk {
namespace {

using ::testing::AllOf;
using testing::Buffer;
using ::testing::HasSubstr;
using testing::Job;
using testing::Outcome;
using testing::RunEngines;
using testing::Transport;
using testing::TryEngines;

using Memories = std::vector<std::vector<float>>;

Config ConfigOf(ExchangeKind exchange) {
  Config config;
  config.spec.up.density = 0.06;
  config.spec.down.density = 0.06;
  config.spec.dense_below = 100;
  config.spec.exchange = exchange;
  config.check_every = 1;
  return config;
}

// A unit in histogram rounds, two whole ones (a message each) and small dense tensors.
Job JobOf(ExchangeKind exchange) {
  Job job;
  job.tensors = {{"large", 40000}, {"medium", 4099}, {"other", 3000}, {"bias", 50}, {"gain", 10}};
  job.config = ConfigOf(exchange);
  job.config.bucket_bytes = 20000;
  return job;
}

template <typename E>
bool Is(const std::exception_ptr& error) {
  if (error == nullptr) return false;
  try {
    std::rethrow_exception(error);
  } catch (const E&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Memories of one rank: both kinds, without a collective.
Memories MemoriesOf(Engine& engine) {
  Memories memories = testing::WorkerMemory(engine);
  for (auto& share : testing::ServerShare(engine)) memories.push_back(std::move(share));
  return memories;
}

constexpr ExchangeKind kExchanges[] = {ExchangeKind::kAllgather, ExchangeKind::kSharded,
                                       ExchangeKind::kDense};

class EngineFailure : public ::testing::TestWithParam<std::tuple<Transport, int>> {
 protected:
  Transport transport() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  void Run(const Config& config, const std::function<void(Engine&)>& body) const {
    RunEngines(transport(), world_size(), config, body);
  }
};

const auto kTransports = ::testing::Values(Transport::kGloo, Transport::kInProcess);

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Transport, int>>& test) {
  return TransportName(std::get<0>(test.param)) + std::to_string(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(, EngineFailure,
                         ::testing::Combine(kTransports,
                                            ::testing::ValuesIn(testing::WorldSizes())),
                         NameOf);

// One step in which the last rank's gradient of `tensor` holds `value`; returns the results.
std::vector<Buffer> PoisonedStep(Engine& engine, const Job& job, int step, std::size_t tensor,
                                 float value) {
  std::vector<Buffer> values;
  for (std::size_t i = 0; i < job.tensors.size(); ++i) {
    values.push_back(job.Gradient(engine.rank(), step, i));
  }
  if (engine.rank() == engine.size() - 1) {
    std::memcpy(values[tensor].data() + 7 * sizeof value, &value, sizeof value);
  }
  engine.BeginStep(job.op, job.scale(step));
  for (std::size_t i = 0; i < job.tensors.size(); ++i) {
    engine.Submit(i, {values[i].data(), values[i].data()});
  }
  engine.EndStep();
  engine.Wait();
  return values;
}

float EntryOf(const Buffer& bytes, std::size_t entry) {
  float value;
  std::memcpy(&value, bytes.data() + entry * sizeof value, sizeof value);
  return value;
}

// Steps 0 and 1, a poisoned one, and steps 2 and 3: these must be as if the poisoned one had never
// been.
void ExpectNoTraceOf(const std::function<void(Engine&, const Job&)>& poisoned_step, const Job& job,
                     Transport transport, int world_size) {
  const std::vector<testing::Record> expected = testing::RunJob(transport, world_size, job);
  std::vector<testing::Record> records(expected.size());
  RunEngines(transport, world_size, job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    testing::Record& record = records[static_cast<std::size_t>(engine.rank())];
    for (int step = 0; step < job.num_steps; ++step) {
      if (step == 2) {
        const Memories before = MemoriesOf(engine);
        poisoned_step(engine, job);
        EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), before));
      }
      record.results.push_back(RunStep(engine, job, step));
      record.worker_memory.push_back(testing::WorkerMemory(engine));
      record.server_memory.push_back(engine.GatherServerMemory());
    }
    EXPECT_EQ(engine.stats().dropped_steps, 1U);
    EXPECT_EQ(engine.stats().steps, static_cast<std::uint64_t>(job.num_steps) + 1);
  });
  testing::ExpectSameRecords(records, expected, "around the dropped step");
}

TEST_P(EngineFailure, NanInASmallDenseTensorDropsTheMemoriesOfAll) {
  for (const ExchangeKind exchange : kExchanges) {
    Job job = JobOf(exchange);
    job.num_steps = 4;
    const auto poisoned = [](Engine& engine, const Job& j) {
      Job other = j;  // other gradients and another scale than the steps around
      other.first_step = 90;
      other.scale = [](int) { return 0.3; };
      const auto results = PoisonedStep(engine, other, 0, 4, std::nanf(""));
      EXPECT_TRUE(std::isnan(EntryOf(results[4], 7)));
      EXPECT_FALSE(std::isnan(EntryOf(results[4], 6)));
    };
    ExpectNoTraceOf(poisoned, job, transport(), world_size());
  }
}

TEST_P(EngineFailure, InfInACompressedTensorIsSeenAndDropsTheMemoriesOfAll) {
  for (const ExchangeKind exchange : kExchanges) {
    for (const std::size_t tensor : {0U, 1U}) {
      Job job = JobOf(exchange);
      job.num_steps = 3;
      const auto poisoned = [tensor](Engine& engine, const Job& j) {
        Job other = j;
        other.first_step = 90;
        const auto results =
            PoisonedStep(engine, other, 0, tensor, -std::numeric_limits<float>::infinity());
        EXPECT_EQ(EntryOf(results[tensor], 7), -std::numeric_limits<float>::infinity());
      };
      ExpectNoTraceOf(poisoned, job, transport(), world_size());
    }
  }
}

TEST_P(EngineFailure, ASumThatOverflowsDropsTheMemoriesOfAll) {
  if (world_size() == 1) return;
  for (const ExchangeKind exchange : kExchanges) {
    Job job = JobOf(exchange);
    job.op = Op::kSum;
    const auto poisoned = [](Engine& engine, const Job& j) {
      std::vector<float> large(4099, 3e38F);
      std::vector<float> result(4099);
      engine.BeginStep(j.op);
      engine.Submit(1, {large.data(), result.data()});
      engine.EndStep();
      engine.Wait();
      EXPECT_TRUE(std::isinf(result[0]));
    };
    ExpectNoTraceOf(poisoned, job, transport(), world_size());
  }
}

TEST_P(EngineFailure, UnderSkipEveryResultIsZero) {
  for (const ExchangeKind exchange : kExchanges) {
    Job job = JobOf(exchange);
    job.config.nonfinite = NonFinitePolicy::kSkip;
    const auto poisoned = [](Engine& engine, const Job& j) {
      for (const Buffer& result : PoisonedStep(engine, j, 7, 1, std::nanf(""))) {
        EXPECT_TRUE(result == Buffer(result.size(), 0));
      }
    };
    ExpectNoTraceOf(poisoned, job, transport(), world_size());
  }
}

TEST_P(EngineFailure, UnderRaiseEveryRankThrowsAndTheNextStepIsFine) {
  for (const ExchangeKind exchange : kExchanges) {
    for (const std::size_t tensor : {0U, 3U}) {
      Job job = JobOf(exchange);
      job.config.nonfinite = NonFinitePolicy::kRaise;
      const auto poisoned = [tensor](Engine& engine, const Job& j) {
        try {
          PoisonedStep(engine, j, 7, tensor, std::nanf(""));
          ADD_FAILURE() << "no exception";
        } catch (const NonFiniteGradientError& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr("gradients of rank " + std::to_string(engine.size() - 1)));
        }
      };
      ExpectNoTraceOf(poisoned, job, transport(), world_size());
    }
  }
}

// What takes at least two ranks.
class EngineDisagreement : public EngineFailure {
 protected:
  int odd() const { return world_size() - 1; }

  // Every rank fails at the start with InvalidArgumentError, in words that match.
  template <typename Matcher>
  void ExpectRefused(const std::function<void(Job&)>& change, const Matcher& words) const {
    const Job job = JobOf(ExchangeKind::kSharded);
    Job other = job;
    change(other);
    const Outcome outcome = TryEngines(
        transport(), world_size(),
        [&](int rank) { return rank == odd() ? other.config : job.config; },
        [&](Engine& engine) {
          engine.Register(engine.rank() == odd() ? other.tensors : job.tensors);
          engine.Wait();
        });
    for (int rank = 0; rank < world_size(); ++rank) {
      EXPECT_TRUE(Is<InvalidArgumentError>(outcome.errors[static_cast<std::size_t>(rank)]));
      EXPECT_THAT(outcome.message(rank),
                  AllOf(words, HasSubstr("rank 0 has"),
                        HasSubstr("rank " + std::to_string(odd()) + " has")));
    }
  }

  // Two good steps, then one in which `step` makes the odd rank differ: all fail, memories stay.
  void ExpectAllFail(ExchangeKind exchange, const std::string& words,
                     const std::function<void(Engine&, const Job&, bool)>& step) const {
    const Job job = JobOf(exchange);
    const Outcome outcome = TryEngines(
        transport(), world_size(), [&](int) { return job.config; },
        [&](Engine& engine) {
          engine.Register(job.tensors);
          for (int i = 0; i < 2; ++i) RunStep(engine, job, i);
          const Memories before = MemoriesOf(engine);
          try {
            step(engine, job, engine.rank() == odd());
          } catch (const Error&) {
            EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), before));
            EXPECT_THROW(engine.BeginStep(job.op), CommunicationError);
            throw;
          }
        });
    for (int rank = 0; rank < world_size(); ++rank) {
      EXPECT_TRUE(Is<CommunicationError>(outcome.errors[static_cast<std::size_t>(rank)]));
      EXPECT_THAT(outcome.message(rank),
                  AllOf(HasSubstr("rank " + std::to_string(odd())), HasSubstr(words)));
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, EngineDisagreement,
                         ::testing::Combine(kTransports,
                                            ::testing::ValuesIn(testing::WorldSizes(2))),
                         NameOf);

TEST_P(EngineDisagreement, DifferentTensorsAreRefusedByAll) {
  ExpectRefused(
      [](Job& job) { job.tensors[1].num_entries = 4100; },
      AllOf(HasSubstr("\"medium\" float32[4099]"), HasSubstr("\"medium\" float32[4100]")));
  ExpectRefused([](Job& job) { job.tensors.pop_back(); },
                AllOf(HasSubstr("\"gain\" float32[10]"), HasSubstr("nothing")));
  ExpectRefused([](Job& job) { std::swap(job.tensors[0], job.tensors[1]); }, HasSubstr("large"));
  ExpectRefused([](Job& job) { job.tensors[2].dtype = DType::kInt32; }, HasSubstr("int32[3000]"));
}

TEST_P(EngineDisagreement, DifferentSettingsAreRefusedByAll) {
  ExpectRefused([](Job& job) { job.config.spec.up.density = 0.07; },
                AllOf(HasSubstr("density=0.07"), HasSubstr("density=0.06")));
  ExpectRefused([](Job& job) { job.config.seed = 3; }, HasSubstr("seed=3"));
  ExpectRefused([](Job& job) { job.config.nonfinite = NonFinitePolicy::kSkip; }, HasSubstr("skip"));
  ExpectRefused([](Job& job) { job.config.bucket_bytes = 7; }, HasSubstr("bucket_bytes=7"));
  ExpectRefused(
      [](Job& job) {
        job.config.rules = {{"x*", job.config.spec}};
      },
      HasSubstr("rule \"x*\""));
}

TEST_P(EngineDisagreement, DifferentScalesAreAnErrorOnAll) {
  for (const ExchangeKind exchange : kExchanges) {
    ExpectAllFail(exchange, "op average and scale 2",
                  [](Engine& engine, const Job& job, bool is_odd) {
                    Job other = job;
                    if (is_odd) other.scale = [](int) { return 2.0; };
                    RunStep(engine, other, 2);
                  });
  }
}

TEST_P(EngineDisagreement, DifferentDensitiesAreAnErrorOnAll) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    ExpectAllFail(exchange, "set_density", [](Engine& engine, const Job& job, bool is_odd) {
      engine.SetDensity(is_odd ? 0.02 : 0.03, 0.03);
      RunStep(engine, job, 2);
    });
  }
}

TEST_P(EngineDisagreement, DifferentOperationsAreAnErrorOnAll) {
  const Job job = JobOf(ExchangeKind::kSharded);
  const Outcome outcome = TryEngines(
      transport(), world_size(), [&](int) { return job.config; },
      [&](Engine& engine) {
        engine.Register(job.tensors);
        Job other = job;
        if (engine.rank() == odd()) other.op = Op::kSum;
        RunStep(engine, other, 0);
      });
  for (const auto& error : outcome.errors) EXPECT_TRUE(Is<CommunicationError>(error));
}

TEST_P(EngineDisagreement, ARankThatClosesItsEngineInAStepIsNamed) {
  for (const ExchangeKind exchange : kExchanges) {
    const Job job = JobOf(exchange);
    const auto begin = std::chrono::steady_clock::now();
    const Outcome outcome = TryEngines(
        transport(), world_size(), [&](int) { return job.config; },
        [&](Engine& engine) {
          engine.Register(job.tensors);
          for (int i = 0; i < 2; ++i) RunStep(engine, job, i);
          if (engine.rank() == odd()) {
            // Some messages of the step are complete, others wait for tensors that never come.
            const Buffer gradient = job.Gradient(engine.rank(), 2, 4);
            const Buffer other = job.Gradient(engine.rank(), 2, 2);
            engine.BeginStep(job.op);
            engine.Submit(4, {gradient.data(), nullptr});
            engine.Submit(2, {other.data(), nullptr});
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            return;
          }
          const Memories before = MemoriesOf(engine);
          try {
            RunStep(engine, job, 2);
          } catch (const Error&) {
            EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), before));
            throw;
          }
        });
    for (int rank = 0; rank < odd(); ++rank) {
      EXPECT_TRUE(Is<CommunicationError>(outcome.errors[static_cast<std::size_t>(rank)]));
      EXPECT_THAT(outcome.message(rank), HasSubstr("rank " + std::to_string(odd())));
    }
    EXPECT_EQ(outcome.errors.back(), nullptr) << outcome.message(odd());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kTestTimeout / 2);
  }
}

TEST_P(EngineDisagreement, ARankThatDoesNotComeIsNamedWhenTheTimeIsUp) {
  const Job job = JobOf(ExchangeKind::kSharded);
  std::atomic<int> done{0};
  const Outcome outcome = TryEngines(
      transport(), world_size(), [&](int) { return job.config; },
      [&](Engine& engine) {
        engine.Register(job.tensors);
        RunStep(engine, job, 0);
        if (engine.rank() == odd()) {
          while (done < odd()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          return;
        }
        try {
          RunStep(engine, job, 1);
        } catch (...) {
          ++done;
          throw;
        }
        ++done;
      },
      std::chrono::milliseconds(2000));
  for (int rank = 0; rank < odd(); ++rank) {
    EXPECT_TRUE(Is<CommunicationError>(outcome.errors[static_cast<std::size_t>(rank)]));
    EXPECT_THAT(outcome.message(rank),
                HasSubstr("no answer from rank " + std::to_string(odd()) + " within 2 s"));
  }
}

// A step that is done stays done when something after it fails: its result is in the weights
// already.
TEST_P(EngineDisagreement, AFailureBetweenStepsLeavesTheLastStepAlone) {
  const Job job = JobOf(ExchangeKind::kSharded);
  TryEngines(
      transport(), world_size(), [&](int) { return job.config; },
      [&](Engine& engine) {
        engine.Register(job.tensors);
        RunStep(engine, job, 0);
        const Memories before = MemoriesOf(engine);
        RunStep(engine, job, 1);
        if (engine.rank() == odd()) return;
        const Memories after = MemoriesOf(engine);
        EXPECT_THROW(engine.GatherServerMemory(), CommunicationError);
        EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), after));
        EXPECT_EQ(engine.SaveState().schedule_step, 2U);
        engine.Rollback();
        EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), before));
      });
}

// Bytes that change on their way to rank 1.
class EngineDamage : public EngineDisagreement {
 protected:
  static constexpr int kVictim = 1;

  // Two good steps, then steps until one fails; in the third, `tamper` spoils what the victim
  // receives.
  Outcome RunDamaged(const Job& job, const testing::TamperingCommunicator::Tamper& tamper) const {
    return TryEngines(
        transport(), world_size(), [&](int) { return job.config; },
        [&](Engine& engine) {
          engine.Register(job.tensors);
          for (int i = 0; i < 2; ++i) RunStep(engine, job, i);
          const Memories before = MemoriesOf(engine);
          try {
            RunStep(engine, job, 2);
          } catch (const Error&) {
            EXPECT_TRUE(testing::SameBits(MemoriesOf(engine), before));
            throw;
          }
          RunStep(engine, job, 3);
        },
        testing::kTestTimeout,
        [&](Communicator& inner) -> std::unique_ptr<Communicator> {
          if (inner.rank() != kVictim) return testing::Forward(inner);
          return std::make_unique<testing::TamperingCommunicator>(inner, tamper);
        });
  }

  // Tampers with every message of the phase in step 3 (the steps count from 1), from rank 0.
  static testing::TamperingCommunicator::Tamper In(Phase phase,
                                                   const std::function<void(Buffer&)>& change) {
    return [phase, change](const MessageTag& tag, int from, Buffer& bytes) {
      if (tag.phase != phase || tag.step != 3 || from != 0 || bytes.empty()) return false;
      change(bytes);
      return true;
    };
  }

  void ExpectRefused(const Outcome& outcome, const std::string& what) const {
    for (int rank = 0; rank < world_size(); ++rank) {
      const std::exception_ptr& error = outcome.errors[static_cast<std::size_t>(rank)];
      if (rank == kVictim) {
        EXPECT_TRUE(Is<WireFormatError>(error)) << what << ": " << outcome.message(rank);
      } else {
        EXPECT_TRUE(Is<CommunicationError>(error)) << what << ": " << outcome.message(rank);
        EXPECT_THAT(outcome.message(rank), HasSubstr("rank 1 aborted")) << what;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, EngineDamage, ::testing::Combine(kTransports, ::testing::Values(2, 3)),
                         NameOf);

struct Damage {
  const char* name;
  std::function<void(Buffer&)> change;
};

std::vector<Damage> Damages() {
  return {{"one byte less", [](Buffer& b) { b.pop_back(); }},
          {"one byte more", [](Buffer& b) { b.push_back(0); }},
          {"nothing", [](Buffer& b) { b.clear(); }},
          {"half", [](Buffer& b) { b.resize(b.size() / 2); }},
          {"one byte", [](Buffer& b) { b.resize(1); }}};
}

std::vector<Damage> PacketDamages() {
  std::vector<Damage> damages = Damages();
  damages.push_back({"number of entries", [](Buffer& b) { b[0] ^= 1; }});
  damages.push_back({"huge number of entries", [](Buffer& b) { b[3] = 0xff; }});
  damages.push_back({"index bytes", [](Buffer& b) { b[4] ^= 1; }});
  damages.push_back({"huge index bytes", [](Buffer& b) { b[7] = 0xff; }});
  damages.push_back({"value format", [](Buffer& b) { b[8] ^= 1; }});
  damages.push_back({"version", [](Buffer& b) { b[9] = 9; }});
  damages.push_back({"reserved", [](Buffer& b) { b[11] = 1; }});
  damages.push_back({"zeros", [](Buffer& b) { std::fill(b.begin(), b.end(), std::uint8_t{0}); }});
  return damages;
}

TEST_P(EngineDamage, InUplinkPacketsIsRefused) {
  for (const ExchangeKind exchange : {ExchangeKind::kAllgather, ExchangeKind::kSharded}) {
    for (const Damage& damage : PacketDamages()) {
      ExpectRefused(RunDamaged(JobOf(exchange), In(Phase::kUplink, damage.change)),
                    internal::StrCat(ExchangeName(exchange), ", ", damage.name));
    }
  }
}

TEST_P(EngineDamage, InDownlinkPacketsIsRefused) {
  for (const Damage& damage : PacketDamages()) {
    ExpectRefused(RunDamaged(JobOf(ExchangeKind::kSharded), In(Phase::kDownlink, damage.change)),
                  damage.name);
  }
}

TEST_P(EngineDamage, InDenseMessagesIsRefused) {
  for (const Damage& damage : Damages()) {
    ExpectRefused(RunDamaged(JobOf(ExchangeKind::kSharded), In(Phase::kDense, damage.change)),
                  damage.name);
  }
}

TEST_P(EngineDamage, InTheAgreementAtStartIsAnError) {
  const Outcome outcome =
      RunDamaged(JobOf(ExchangeKind::kSharded), [](const MessageTag& tag, int from, Buffer& bytes) {
        if (tag.phase != Phase::kAgreement || tag.step != 0 || from != 0) return false;
        bytes[3] ^= 1;
        return true;
      });
  for (const std::exception_ptr& error : outcome.errors) EXPECT_TRUE(Is<Error>(error));
}

// Values of other bits are values: only the comparison of results can see them, where ranks differ.
TEST_P(EngineDamage, OfValuesIsFoundByTheComparisonOfResults) {
  const Outcome outcome = RunDamaged(JobOf(ExchangeKind::kAllgather),
                                     In(Phase::kUplink, [](Buffer& b) { b.back() ^= 0x40; }));
  for (int rank = 0; rank < world_size(); ++rank) {
    EXPECT_TRUE(Is<ReplicaDivergenceError>(outcome.errors[static_cast<std::size_t>(rank)]))
        << outcome.message(rank);
  }
}

// Any byte of any message, uplink or downlink: ranks may agree on a wrong value, but they fail
// together or not at all, and no rank hangs or crashes.
TEST_P(EngineDamage, OfAnyByteEndsTheSameWayOnAllRanks) {
  std::mt19937 random(11);
  std::cout << "seed 11\n";
  const int rounds = transport() == Transport::kGloo || testing::kSanitized ? 10 : 60;
  for (int round = 0; round < rounds; ++round) {
    const auto exchange = kExchanges[round % 2];
    const auto seed = random();
    const auto flip = [seed](Buffer& b) {
      std::mt19937 own(seed);
      for (unsigned i = 0; i <= seed % 4; ++i) b[own() % b.size()] ^= 1U << own() % 8;
    };
    const Phase phase = round % 4 == 3 ? Phase::kDownlink : Phase::kUplink;
    const Outcome outcome = RunDamaged(JobOf(exchange), In(phase, flip));
    for (int rank = 0; rank < world_size(); ++rank) {
      const std::exception_ptr& error = outcome.errors[static_cast<std::size_t>(rank)];
      EXPECT_EQ(error == nullptr, outcome.first == nullptr) << "round " << round;
      EXPECT_TRUE(error == nullptr || Is<Error>(error)) << outcome.message(rank);
    }
  }
}

// A rank that lies in the histograms makes the ranks keep other entries; packets stay bounded and
// checked.
TEST_P(EngineDamage, OfHistogramsHangsNobody) {
  class Liar final : public testing::ForwardingCommunicator {
   public:
    Liar(Communicator& inner, unsigned seed) : ForwardingCommunicator(inner), random_(seed) {}
    void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override {
      ForwardingCommunicator::AllReduceSum(tag, counts);
      if (tag.step == 3) counts[random_() % counts.size()] += random_() % 5000;
    }

   private:
    std::mt19937 random_;
  };
  const Job job = JobOf(ExchangeKind::kSharded);
  for (unsigned seed = 0; seed < 10; ++seed) {
    const Outcome outcome = TryEngines(
        transport(), world_size(), [&](int) { return job.config; },
        [&](Engine& engine) {
          engine.Register(job.tensors);
          for (int i = 0; i < 4; ++i) RunStep(engine, job, i);
        },
        std::chrono::milliseconds(20000),
        [&](Communicator& inner) -> std::unique_ptr<Communicator> {
          if (inner.rank() != kVictim) return testing::Forward(inner);
          return std::make_unique<Liar>(inner, seed);
        });
    for (int rank = 0; rank < world_size(); ++rank) {
      const std::exception_ptr& error = outcome.errors[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(error == nullptr || Is<Error>(error)) << outcome.message(rank);
    }
  }
}

}  // namespace
}  // namespace bitopk
