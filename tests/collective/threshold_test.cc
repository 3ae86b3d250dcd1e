// SPDX-License-Identifier: Apache-2.0
//
// AgreeOnThresholds against a full sort of the union of all candidates.
#include "plugin/src/threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"
#include "tests/support/run_ranks.h"
#include "tests/support/vectors.h"

namespace bitopk {
namespace {

using testing::RandomValues;
using testing::SortedTopK;
using testing::Transport;
using testing::Values;

struct Case {
  std::string name;
  std::vector<float> unit;  // every non-zero entry is a candidate of its owner
  std::size_t k = 1;
};

struct Share {
  std::vector<std::uint32_t> positions;
  std::vector<float> values;
};

Share ShareOf(const Case& c, const ShareMap& map, std::size_t owner) {
  Share share;
  for (std::uint32_t position = 0; position < map.NumPositions(owner); ++position) {
    const float value = c.unit[map.EntryAt(owner, position)];
    if (testing::SortKey(value) == 0) continue;
    share.positions.push_back(position);
    share.values.push_back(value);
  }
  return share;
}

// The entries that all owners together keep of each case, ascending; all queries go at once.
std::vector<std::vector<std::uint32_t>> KeptOf(const std::vector<Case>& cases, int world_size) {
  std::vector<std::vector<std::uint32_t>> kept(cases.size());
  std::mutex mutex;
  testing::RunRanks(Transport::kInProcess, world_size, [&](Communicator& comm) {
    const auto owner = static_cast<std::size_t>(comm.rank());
    std::vector<ShareMap> maps;
    std::vector<Share> shares;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      maps.push_back(
          ShareMap::Dealt(cases[i].unit.size(), static_cast<std::size_t>(comm.size()), i));
      shares.push_back(ShareOf(cases[i], maps.back(), owner));
    }
    std::vector<ThresholdQuery> queries(cases.size());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      queries[i].positions = Span<const std::uint32_t>(shares[i].positions);
      queries[i].values = Span<const float>(shares[i].values);
      queries[i].shares = &maps[i];
      queries[i].k = cases[i].k;
    }
    std::vector<std::uint64_t> counts;
    const std::uint64_t sent = comm.bytes_sent();
    AgreeOnThresholds(comm, MessageTag(), queries, counts);
    const auto peers = static_cast<std::uint64_t>(comm.size()) - 1;
    EXPECT_LE(comm.bytes_sent() - sent, 12 * (peers * kHeaderBytes + 1024 * cases.size()));
    std::vector<std::uint32_t> numbers;
    for (std::size_t i = 0; i < cases.size(); ++i) {
      KeptCandidates(queries[i], owner, numbers);
      const std::lock_guard<std::mutex> lock(mutex);
      for (const std::uint32_t number : numbers) {
        kept[i].push_back(
            static_cast<std::uint32_t>(maps[i].EntryAt(owner, shares[i].positions[number])));
      }
    }
  });
  for (auto& entries : kept) std::sort(entries.begin(), entries.end());
  return kept;
}

void ExpectTopK(const std::vector<Case>& cases, int world_size) {
  const std::vector<std::vector<std::uint32_t>> kept = KeptOf(cases, world_size);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::vector<std::uint32_t> expected = SortedTopK(cases[i].unit, cases[i].k);
    EXPECT_EQ(kept[i].size(), expected.size())
        << cases[i].name << ", k=" << cases[i].k << ", " << world_size << " ranks";
    EXPECT_TRUE(kept[i] == expected) << cases[i].name << ", k=" << cases[i].k;
  }
}

// The same vector with several numbers to keep, among them those next to its number of non-zeros.
std::vector<Case> Cases(const std::string& name, const std::vector<float>& unit) {
  const auto zeros = static_cast<std::size_t>(std::count(unit.begin(), unit.end(), 0.0F));
  const std::size_t nonzero = unit.size() - zeros;
  std::vector<Case> cases;
  for (const std::size_t k : {std::size_t{1}, std::size_t{2}, nonzero / 3, nonzero / 2, nonzero - 1,
                              nonzero, nonzero + 1, unit.size() + 7}) {
    if (k >= 1) cases.push_back({name, unit, k});
  }
  return cases;
}

class ThresholdTest : public ::testing::TestWithParam<int> {
 protected:
  void Expect(const std::string& name, const std::vector<float>& unit) const {
    ExpectTopK(Cases(name, unit), GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(, ThresholdTest, ::testing::Values(1, 2, 3, 8));

TEST_P(ThresholdTest, FindsTheLargestOfNormalValues) {
  Expect("normal", RandomValues(1, 20000, Values::kNormal));
  Expect("layered", RandomValues(2, 20001, Values::kLayered));
}

TEST_P(ThresholdTest, LowerNumbersWinTies) {
  Expect("few", RandomValues(3, 20000, Values::kFew));
  std::vector<float> unit = RandomValues(4, 9000, Values::kFew);
  for (std::size_t i = 0; i < unit.size(); i += 11) unit[i] = 0.5F;
  Expect("few and halves", unit);
}

TEST_P(ThresholdTest, LowerNumbersWinWhenAllAreEqual) {
  Expect("all equal", std::vector<float>(10000, -3.25F));
  Expect("all the largest", std::vector<float>(5000, std::numeric_limits<float>::max()));
  Expect("all the smallest", std::vector<float>(5000, 0x1p-149F));
}

TEST_P(ThresholdTest, TellsNeighbouringKeysApart) {
  Expect("denormal", RandomValues(5, 20000, Values::kDenormal));
  std::vector<float> unit(4096);
  for (std::size_t i = 0; i < unit.size(); ++i) {
    unit[i] = 1.0F + 0x1p-23F * static_cast<float>((i * 2654435761U) % 4096);
  }
  Expect("consecutive", unit);
}

TEST_P(ThresholdTest, RanksNanAboveInf) {
  std::vector<float> unit = RandomValues(6, 9000, Values::kNormal);
  for (std::size_t i = 0; i < unit.size(); i += 7)
    unit[i] = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 3; i < unit.size(); i += 70) unit[i] = std::nanf("1");
  Expect("NaN and Inf", unit);
  Expect("all NaN", std::vector<float>(3000, std::nanf("")));
}

TEST_P(ThresholdTest, KeepsAllWhereThereAreFewerThanK) {
  std::vector<float> unit(10000, 0.0F);
  Expect("zeros", unit);
  unit[9999] = 1e-40F;
  Expect("one", unit);
  Expect("a single entry", {2.0F});
  Expect("fewer blocks than ranks", RandomValues(7, 1025, Values::kNormal));
}

TEST_P(ThresholdTest, AnswersDifferentQueriesAtOnce) {
  std::vector<Case> cases;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const auto kind = static_cast<Values>(seed % 4);
    cases.push_back({"mixed", RandomValues(seed, 500 + 777 * seed, kind), 1 + 211 * seed});
  }
  ExpectTopK(cases, GetParam());
  ExpectTopK({}, GetParam());
}

}  // namespace
}  // namespace bitopk
