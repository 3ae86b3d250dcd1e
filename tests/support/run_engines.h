// SPDX-License-Identifier: Apache-2.0
//
// Engines of all ranks of a world, a thread each, and jobs: some steps on random gradients, with a
// record of all that a rank saw.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bitopk/engine.h"
#include "bitopk/kernels/error.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/run_ranks.h"
#include "tests/support/vectors.h"

namespace bitopk::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
/// The same code runs with fewer ranks and steps where each takes ten times as long.
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// World sizes of at least `smallest` that collective tests of engines run with.
inline std::vector<int> WorldSizes(int smallest = 1) {
  std::vector<int> sizes;
  for (const int size : kSanitized ? std::vector<int>{3} : std::vector<int>{1, 2, 3, 8}) {
    if (size >= smallest) sizes.push_back(size);
  }
  return sizes;
}

using Buffer = std::vector<std::uint8_t>;
/// Puts a communicator around one that outlives it.
using Wrap = std::function<std::unique_ptr<Communicator>(Communicator&)>;

inline std::unique_ptr<Communicator> Forward(Communicator& inner) {
  return std::make_unique<ForwardingCommunicator>(inner);
}

/// Runs `body` with the engine of every rank; the engine and its communicator end with it.
inline Outcome TryEngines(Transport transport, int world_size,
                          const std::function<Config(int)>& config,
                          const std::function<void(Engine&)>& body,
                          std::chrono::milliseconds timeout = kTestTimeout,
                          const Wrap& wrap = Forward) {
  return TryRanks(
      transport, world_size,
      [&](Communicator& communicator) {
        Engine engine(wrap(communicator), config(communicator.rank()));
        body(engine);
      },
      timeout);
}

inline void RunEngines(Transport transport, int world_size, const Config& config,
                       const std::function<void(Engine&)>& body) {
  const Outcome outcome = TryEngines(
      transport, world_size, [&](int) { return config; }, body);
  if (outcome.first != nullptr) std::rethrow_exception(outcome.first);
}

/// A random gradient as bytes of the tensor's type. Values that integers share fit all types.
inline Buffer RandomGradient(const TensorSpec& tensor, std::uint64_t seed, Values kind) {
  Buffer bytes(tensor.num_entries * DTypeBytes(tensor.dtype));
  const std::vector<float> values = RandomValues(seed, tensor.num_entries, kind);
  const auto store = [&](auto zero) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float factor = std::is_integral_v<decltype(zero)> ? 1000.0F : 1.0F;
      const auto value = static_cast<decltype(zero)>(values[i] * factor);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
  };
  switch (tensor.dtype) {
    case DType::kFloat32:
      store(float{});
      break;
    case DType::kFloat64:
      store(double{});
      break;
    case DType::kInt32:
      store(std::int32_t{});
      break;
    case DType::kInt64:
      store(std::int64_t{});
      break;
  }
  return bytes;
}

enum class Order {
  kForward,    // one thread, registration order
  kScrambled,  // two threads, another order on each rank and in each step
};

struct Job {
  std::vector<TensorSpec> tensors;
  Config config;
  Op op = Op::kAverage;
  int num_steps = 3;
  int first_step = 0;  // number of the first step, for gradients and scales
  Order order = Order::kForward;
  bool in_place = false;
  std::function<Values(int)> values = [](int) { return Values::kNormal; };  // by step
  std::function<double(int)> scale = [](int) { return 1.0; };
  std::function<bool(int, int, std::size_t)> submits;  // rank, step, tensor; null: everything

  std::uint64_t Seed(int rank, int step, std::size_t tensor) const {
    return 1000003U * static_cast<std::uint64_t>(first_step + step) + 1009U * tensor +
           static_cast<std::uint64_t>(rank);
  }
  Buffer Gradient(int rank, int step, std::size_t tensor) const {
    return RandomGradient(tensors[tensor], Seed(rank, step, tensor), values(first_step + step));
  }
};

/// What one rank saw.
struct Record {
  std::vector<std::vector<Buffer>> results;                    // by step and tensor
  std::vector<std::vector<std::vector<float>>> worker_memory;  // by step and tensor
  std::vector<std::vector<std::vector<float>>> server_memory;  // by step and tensor, whole
  Stats stats;
};

inline std::vector<std::vector<float>> WorkerMemory(Engine& engine) {
  std::vector<std::vector<float>> memory;
  for (std::size_t tensor = 0; tensor < engine.tensors().size(); ++tensor) {
    memory.emplace_back(engine.tensors()[tensor].num_entries, -1.0F);
    engine.ReadWorkerMemory(tensor, memory.back());
  }
  return memory;
}

/// This rank's share, zeros elsewhere. Not a collective.
inline std::vector<std::vector<float>> ServerShare(Engine& engine) {
  std::vector<std::vector<float>> memory;
  for (std::size_t tensor = 0; tensor < engine.tensors().size(); ++tensor) {
    memory.emplace_back(engine.tensors()[tensor].num_entries, 0.0F);
    engine.ReadServerShare(tensor, memory.back());
  }
  return memory;
}

/// Submits `numbers` in an order of its own, from two threads.
inline void SubmitScrambled(Engine& engine, const std::vector<TensorSubmission>& submissions,
                            std::vector<std::size_t> numbers, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::shuffle(numbers.begin(), numbers.end(), random);
  const auto half = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::thread other([&] {
    std::for_each(numbers.begin(), half, [&](std::size_t i) { engine.Submit(i, submissions[i]); });
  });
  std::for_each(half, numbers.end(), [&](std::size_t i) { engine.Submit(i, submissions[i]); });
  other.join();
}

/// One step of a job. Results of tensors that are not submitted stay empty.
inline std::vector<Buffer> RunStep(Engine& engine, const Job& job, int step) {
  std::vector<Buffer> gradients(job.tensors.size());
  std::vector<Buffer> results(job.tensors.size());
  std::vector<TensorSubmission> submissions(job.tensors.size());
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < job.tensors.size(); ++i) {
    if (job.submits != nullptr && !job.submits(engine.rank(), step, i)) continue;
    gradients[i] = job.Gradient(engine.rank(), step, i);
    if (job.in_place) results[i] = gradients[i];
    if (!job.in_place) results[i].assign(gradients[i].size(), 0xaa);
    submissions[i].gradient = job.in_place ? results[i].data() : gradients[i].data();
    submissions[i].result = results[i].data();
    numbers.push_back(i);
  }
  const std::vector<Buffer> unchanged = gradients;
  engine.BeginStep(job.op, job.scale(job.first_step + step));
  if (job.order == Order::kScrambled) {
    SubmitScrambled(engine, submissions, numbers, job.Seed(engine.rank(), step, 77));
  } else {
    for (const std::size_t i : numbers) engine.Submit(i, submissions[i]);
  }
  engine.EndStep();
  engine.Wait();
  EXPECT_TRUE(job.in_place || gradients == unchanged);
  return results;
}

/// Runs a job on an engine whose tensors are registered.
inline Record RunSteps(Engine& engine, const Job& job) {
  Record record;
  for (int step = 0; step < job.num_steps; ++step) {
    record.results.push_back(RunStep(engine, job, step));
    record.worker_memory.push_back(WorkerMemory(engine));
    record.server_memory.push_back(engine.GatherServerMemory());
  }
  record.stats = engine.stats();
  return record;
}

/// Runs a job on all ranks.
inline std::vector<Record> RunJob(Transport transport, int world_size, const Job& job) {
  std::vector<Record> records(static_cast<std::size_t>(world_size));
  RunEngines(transport, world_size, job.config, [&](Engine& engine) {
    engine.Register(job.tensors);
    records[static_cast<std::size_t>(engine.rank())] = RunSteps(engine, job);
  });
  return records;
}

inline bool SameBits(const std::vector<std::vector<float>>& a,
                     const std::vector<std::vector<float>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return BitsOf(x) == BitsOf(y); });
}

/// The same results and memories, bit for bit, on every rank.
inline void ExpectSameRecords(const std::vector<Record>& actual,
                              const std::vector<Record>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t rank = 0; rank < actual.size(); ++rank) {
    ASSERT_EQ(actual[rank].results.size(), expected[rank].results.size());
    for (std::size_t step = 0; step < actual[rank].results.size(); ++step) {
      const std::string where = bitopk::internal::StrCat(what, ": rank ", rank, ", step ", step);
      ASSERT_TRUE(actual[rank].results[step] == expected[rank].results[step])
          << where << ": results";
      ASSERT_TRUE(SameBits(actual[rank].worker_memory[step], expected[rank].worker_memory[step]))
          << where << ": worker memory";
      ASSERT_TRUE(SameBits(actual[rank].server_memory[step], expected[rank].server_memory[step]))
          << where << ": server memory";
    }
  }
}

/// All ranks hold the same results and the same server memory.
inline void ExpectSameOnAllRanks(const std::vector<Record>& records) {
  for (std::size_t rank = 1; rank < records.size(); ++rank) {
    for (std::size_t step = 0; step < records[0].results.size(); ++step) {
      ASSERT_TRUE(records[rank].results[step] == records[0].results[step])
          << "rank " << rank << ", step " << step;
      ASSERT_TRUE(SameBits(records[rank].server_memory[step], records[0].server_memory[step]))
          << "rank " << rank << ", step " << step;
    }
  }
}

}  // namespace bitopk::testing
