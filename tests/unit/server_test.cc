// SPDX-License-Identifier: Apache-2.0
//
// The server of a share against plain dense loops, bit for bit.
#include "plugin/src/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"
#include "tests/support/vectors.h"

namespace bitopk {
namespace {

using kernels::ValueFormat;
using testing::BitsOf;
using ::testing::HasSubstr;
using testing::RandomValues;
using testing::SortedTopK;
using testing::Values;

constexpr std::size_t kSizes[] = {1, 65536, 65537, 200000};

// What the ranks send: dense vectors, of which about one entry in `every` travels.
struct Uplink {
  std::vector<std::vector<float>> dense;
  std::vector<std::vector<std::uint8_t>> packets;

  std::vector<PacketReader> Readers(std::size_t num_positions) const {
    std::vector<PacketReader> readers;
    for (const auto& packet : packets) {
      readers.emplace_back(packet, num_positions, num_positions, ValueFormat::kFloat32);
    }
    return readers;
  }
};

Uplink MakeUplink(std::uint64_t seed, std::size_t num_ranks, std::size_t num_positions,
                  Values kind = Values::kNormal, std::size_t every = 9) {
  Uplink uplink;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<float> dense = RandomValues(100 * seed + rank, num_positions, kind);
    std::vector<std::uint32_t> positions;
    std::vector<float> values;
    for (std::uint32_t i = 0; i < num_positions; ++i) {
      if ((i * 7919 + rank * 31 + seed) % every != 0) dense[i] = 0.0F;
      if (dense[i] == 0.0F) continue;
      positions.push_back(i);
      values.push_back(dense[i]);
    }
    std::vector<std::uint8_t> packet(
        MaxPacketBytes(values.size(), num_positions, ValueFormat::kFloat32));
    packet.resize(WritePacket(positions, values, num_positions, ValueFormat::kFloat32, packet));
    uplink.dense.push_back(std::move(dense));
    uplink.packets.push_back(std::move(packet));
  }
  return uplink;
}

// The server of the formulas. [ZDL22, algorithm 9]
class DenseServer {
 public:
  DenseServer(std::size_t num_positions, bool has_memory)
      : has_memory_(has_memory), memory_(num_positions, 0.0F) {}

  // q, of which the entries at `kept` go down as `sent`.
  std::vector<float> Add(const Uplink& uplink, const Aggregation& aggregation) const {
    std::vector<float> q(memory_.size());
    for (std::size_t i = 0; i < q.size(); ++i) {
      float sum = 0.0F;
      for (const auto& dense : uplink.dense) sum += dense[i];
      sum /= aggregation.divisor;
      const float old = memory_[i] * aggregation.memory_factor;
      q[i] = has_memory_ ? old + sum : sum;
    }
    return q;
  }
  void Keep(std::vector<float> q, const std::vector<std::uint32_t>& kept,
            const std::vector<float>& sent) {
    for (std::size_t i = 0; i < kept.size(); ++i) q[kept[i]] -= sent[i];
    if (has_memory_) memory_ = std::move(q);
  }
  const std::vector<float>& memory() const { return memory_; }

 private:
  bool has_memory_;
  std::vector<float> memory_;
};

std::vector<std::uint32_t> AllOf(const Server& server) {
  std::vector<std::uint32_t> kept(server.candidate_positions().size());
  std::iota(kept.begin(), kept.end(), 0U);
  return kept;
}

// One step; every candidate but each `skip`-th goes down, in `format`.
void Step(Server& server, ServerWorkspace& workspace, const Uplink& uplink,
          const Aggregation& aggregation, std::size_t num_positions, std::size_t k,
          std::size_t skip = 0, ValueFormat format = ValueFormat::kFloat32) {
  std::vector<PacketReader> readers = uplink.Readers(num_positions);
  server.Add(readers, aggregation, /*keeps_everything=*/false, workspace);
  server.FindCandidates(k, workspace);
  std::vector<std::uint32_t> kept;
  std::vector<float> sent;
  for (const std::uint32_t number : AllOf(server)) {
    if (skip != 0 && number % skip == 0) continue;
    kept.push_back(number);
    sent.push_back(kernels::RoundToFormat(format, server.candidate_values()[number]));
  }
  server.Keep(kept, sent);
}

std::vector<float> MemoryOf(const Server& server) {
  return {server.memory().begin(), server.memory().end()};
}

void ExpectBits(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(BitsOf(actual[i]), BitsOf(expected[i]))
        << "entry " << i << ": " << actual[i] << " against " << expected[i];
  }
}

void ExpectFormulas(std::size_t num_positions, bool has_memory, std::size_t num_ranks,
                    const Aggregation& aggregation, Values kind) {
  SCOPED_TRACE(internal::StrCat(num_positions, " positions, ", num_ranks, " ranks, memory ",
                                has_memory, ", factor ", aggregation.memory_factor));
  ServerWorkspace workspace(kernels::BestIsa());
  Server server(num_positions, has_memory);
  DenseServer expected(num_positions, has_memory);
  const std::size_t k = num_positions / 20 + 1;
  for (std::uint64_t step = 0; step < 3; ++step) {
    const Uplink uplink = MakeUplink(step, num_ranks, num_positions, kind);
    const std::vector<float> q = expected.Add(uplink, aggregation);
    Step(server, workspace, uplink, aggregation, num_positions, k);
    const std::vector<std::uint32_t> kept = SortedTopK(q, k);
    std::vector<float> sent;
    for (const std::uint32_t entry : kept) sent.push_back(q[entry]);
    EXPECT_EQ(server.candidate_positions(), kept);
    ExpectBits(server.candidate_values(), sent);
    expected.Keep(q, kept, sent);
    if (has_memory) ExpectBits(MemoryOf(server), expected.memory());
    server.Commit();
  }
  EXPECT_EQ(server.memory().empty(), !has_memory);
}

TEST(Server, AddsInRankOrderAndKeepsTheRest) {
  for (const std::size_t num_positions : kSizes) {
    for (const bool has_memory : {true, false}) {
      ExpectFormulas(num_positions, has_memory, 1, {1.0F, 1.0F}, Values::kNormal);
      ExpectFormulas(num_positions, has_memory, 3, {3.0F, 1.0F}, Values::kNormal);
      ExpectFormulas(num_positions, has_memory, 8, {8.0F, 1.0F}, Values::kFew);
      ExpectFormulas(num_positions, has_memory, 5, {1.0F, 1.0F}, Values::kDenormal);
    }
  }
}

TEST(Server, MultipliesTheOldMemory) {
  for (const std::size_t num_positions : kSizes) {
    for (const float factor : {0.5F, 0.3F, 4.0F, 0.0F}) {
      ExpectFormulas(num_positions, true, 3, {3.0F, factor}, Values::kNormal);
      ExpectFormulas(num_positions, true, 2, {1.0F, factor}, Values::kFew);
      ExpectFormulas(num_positions, true, 2, {1.0F, factor}, Values::kDenormal);
    }
  }
}

TEST(Server, KeepsWhatOtherOwnersOutvoteAndWhatRoundingTakes) {
  constexpr std::size_t kPositions = 70000;
  ServerWorkspace workspace(kernels::BestIsa());
  Server server(kPositions, true);
  DenseServer expected(kPositions, true);
  const Aggregation average{2.0F, 1.0F};
  for (std::uint64_t step = 0; step < 3; ++step) {
    const Uplink uplink = MakeUplink(step, 2, kPositions);
    const std::vector<float> q = expected.Add(uplink, average);
    Step(server, workspace, uplink, average, kPositions, 5000, /*skip=*/3, ValueFormat::kBfloat16);
    std::vector<std::uint32_t> kept;
    std::vector<float> sent;
    const std::vector<std::uint32_t> candidates = SortedTopK(q, 5000);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (i % 3 == 0) continue;
      kept.push_back(candidates[i]);
      sent.push_back(kernels::RoundToFormat(ValueFormat::kBfloat16, q[candidates[i]]));
    }
    expected.Keep(q, kept, sent);
    ExpectBits(MemoryOf(server), expected.memory());
    server.Commit();
  }
}

TEST(Server, LeavesTheWorkspaceClean) {
  ServerWorkspace workspace(kernels::BestIsa());
  for (const std::size_t num_positions : {200000U, 1U, 65537U}) {
    Server server(num_positions, false);
    Step(server, workspace, MakeUplink(1, 3, num_positions), {}, num_positions, 10);
    EXPECT_EQ(workspace.sums, std::vector<float>(kernels::kChunkPositions, 0.0F));
    EXPECT_EQ(workspace.touched, std::vector<std::uint64_t>(kernels::kChunkPositions / 64, 0));
  }
}

TEST(Server, DoesNotAllocateAMemoryThatNeverHoldsAnything) {
  ServerWorkspace workspace(kernels::BestIsa());
  Server server(1000, true);
  const Uplink uplink = MakeUplink(1, 2, 1000);
  std::vector<PacketReader> readers = uplink.Readers(1000);
  server.Add(readers, {}, /*keeps_everything=*/true, workspace);
  server.FindCandidates(1000, workspace);
  EXPECT_TRUE(server.memory().empty());
  EXPECT_EQ(server.candidate_positions(),
            SortedTopK(DenseServer(1000, true).Add(uplink, {}), 1000));
  server.Rollback();
  server.Commit();
  EXPECT_TRUE(server.memory().empty());
}

TEST(Server, SendsAnExistingMemoryWhenEverythingIsKept) {
  ServerWorkspace workspace(kernels::BestIsa());
  Server server(1000, true);
  DenseServer expected(1000, true);
  const Uplink first = MakeUplink(1, 2, 1000);
  Step(server, workspace, first, {}, 1000, 5);
  server.Commit();
  std::vector<float> q = expected.Add(first, {});
  std::vector<std::uint32_t> kept = SortedTopK(q, 5);
  std::vector<float> sent;
  for (const std::uint32_t entry : kept) sent.push_back(q[entry]);
  expected.Keep(q, kept, sent);

  const Uplink second = MakeUplink(2, 2, 1000);
  std::vector<PacketReader> readers = second.Readers(1000);
  server.Add(readers, {}, /*keeps_everything=*/true, workspace);
  server.FindCandidates(1000, workspace);
  q = expected.Add(second, {});
  EXPECT_EQ(server.candidate_positions(), SortedTopK(q, 1000));
  server.Keep(AllOf(server), server.candidate_values());
  ExpectBits(MemoryOf(server), std::vector<float>(1000, 0.0F));
}

// A server with a few steps behind it, and one that takes a different next step and rolls it back.
class ServerRollback : public ::testing::TestWithParam<std::size_t> {
 protected:
  ServerRollback() {
    for (std::uint64_t step = 0; step < 2; ++step) {
      Next(server_, step, {2.0F, 1.0F});
      Next(twin_, step, {2.0F, 1.0F});
      server_.Commit();
      twin_.Commit();
    }
  }

  std::size_t num_positions() const { return GetParam(); }
  void Next(Server& server, std::uint64_t step, const Aggregation& aggregation) {
    Step(server, workspace_, MakeUplink(step, 2, num_positions(), Values::kNormal, 3), aggregation,
         num_positions(), num_positions() / 50 + 1, /*skip=*/4, ValueFormat::kFloat16);
  }
  // What was rolled back left no trace, now or in two more steps.
  void ExpectNoTrace() {
    for (std::uint64_t step = 10; step < 12; ++step) {
      ExpectBits(MemoryOf(server_), MemoryOf(twin_));
      const Aggregation aggregation{2.0F, step == 11 ? 0.3F : 1.0F};
      Next(server_, step, aggregation);
      Next(twin_, step, aggregation);
      EXPECT_EQ(server_.candidate_positions(), twin_.candidate_positions());
      ExpectBits(server_.candidate_values(), twin_.candidate_values());
      server_.Commit();
      twin_.Commit();
    }
    ExpectBits(MemoryOf(server_), MemoryOf(twin_));
  }

  ServerWorkspace workspace_{kernels::BestIsa()};
  Server server_{GetParam(), true};
  Server twin_{GetParam(), true};
};

INSTANTIATE_TEST_SUITE_P(, ServerRollback, ::testing::ValuesIn(kSizes));

TEST_P(ServerRollback, LeavesNoTrace) {
  Next(server_, 5, {2.0F, 1.0F});
  server_.Rollback();
  ExpectNoTrace();
}

TEST_P(ServerRollback, LeavesNoTraceOfScaling) {
  Next(server_, 5, {2.0F, 0.3F});
  server_.Rollback();
  ExpectNoTrace();
}

TEST_P(ServerRollback, LeavesNoTraceOfADrain) {
  for (const float factor : {1.0F, 0.3F}) {
    const std::vector<float> before = MemoryOf(server_);
    const Span<const float> drained = server_.Drain(factor);
    for (std::size_t i = 0; i < before.size(); ++i) {
      ASSERT_EQ(drained[i], before[i] * factor) << i;
    }
    ExpectBits(MemoryOf(server_), std::vector<float>(num_positions(), 0.0F));
    server_.Rollback();
    ExpectNoTrace();
  }
}

TEST_P(ServerRollback, OfAStepAfterADrainGoesBackToTheDrain) {
  server_.Drain(1.0F);
  server_.Commit();
  Next(server_, 5, {2.0F, 1.0F});
  server_.Rollback();
  ExpectBits(MemoryOf(server_), std::vector<float>(num_positions(), 0.0F));
}

TEST_P(ServerRollback, TwiceIsOnce) {
  Next(server_, 5, {2.0F, 0.5F});
  server_.Rollback();
  server_.Rollback();
  ExpectNoTrace();
}

TEST_P(ServerRollback, DoesNothingAfterACommit) {
  Next(server_, 5, {2.0F, 0.5F});
  Next(twin_, 5, {2.0F, 0.5F});
  server_.Commit();
  twin_.Commit();
  server_.Rollback();
  ExpectNoTrace();
}

TEST_P(ServerRollback, OfTheFirstStepLeavesZeros) {
  Server fresh(num_positions(), true);
  Next(fresh, 5, {2.0F, 1.0F});
  fresh.Rollback();
  for (const float entry : MemoryOf(fresh)) ASSERT_EQ(BitsOf(entry), 0U);
}

TEST_P(ServerRollback, RestoresAfterADamagedPacket) {
  Uplink uplink = MakeUplink(5, 2, num_positions(), Values::kNormal, 3);
  // All ones: a run of full chunks that goes on beyond the share.
  std::fill(uplink.packets[1].begin() + kPacketHeaderBytes, uplink.packets[1].end(),
            std::uint8_t{0xff});
  std::vector<PacketReader> readers = uplink.Readers(num_positions());
  ServerWorkspace other(kernels::BestIsa());
  try {
    server_.Add(readers, {2.0F, 0.5F}, false, other);
    FAIL() << "no exception";
  } catch (const WireFormatError& error) {
    EXPECT_THAT(error.what(), HasSubstr("packet of rank 1"));
  }
  server_.Rollback();
  ExpectNoTrace();
}

TEST(Server, NamesTheRankOfADamagedPacket) {
  ServerWorkspace workspace(kernels::BestIsa());
  for (std::size_t rank = 0; rank < 3; ++rank) {
    Uplink uplink = MakeUplink(1, 3, 200000);
    // The code of the first chunk becomes a run of chunks beyond the unit.
    uplink.packets[rank][kPacketHeaderBytes] = 0xff;
    uplink.packets[rank][kPacketHeaderBytes + 1] = 0xff;
    Server server(200000, true);
    std::vector<PacketReader> readers = uplink.Readers(200000);
    try {
      ServerWorkspace fresh(kernels::BestIsa());
      server.Add(readers, {}, false, fresh);
      FAIL() << "no exception";
    } catch (const WireFormatError& error) {
      EXPECT_THAT(error.what(), HasSubstr("packet of rank " + std::to_string(rank) + ":"));
    }
  }
}

TEST(Server, CountsWhatItKept) {
  ServerWorkspace workspace(kernels::BestIsa());
  Server server(3, false);
  std::vector<float> values = {3.0F, 4.0F};
  const std::vector<std::uint32_t> positions = {0, 2};
  std::vector<std::uint8_t> packet(MaxPacketBytes(2, 3, ValueFormat::kFloat32));
  packet.resize(WritePacket(positions, values, 3, ValueFormat::kFloat32, packet));
  std::vector<PacketReader> readers;
  readers.emplace_back(packet, 3, 3, ValueFormat::kFloat32);
  server.Add(readers, {}, false, workspace);
  server.FindCandidates(1, workspace);
  const std::vector<std::uint32_t> kept = {0};
  const std::vector<float> sent = {3.5F};
  server.Keep(kept, sent);
  EXPECT_EQ(server.kept_square(), 16.0);
  EXPECT_EQ(server.kept_error_square(), 0.25);
  EXPECT_EQ(server.total_square_without_memory(), 25.0);
}

}  // namespace
}  // namespace bitopk
