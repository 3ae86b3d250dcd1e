// SPDX-License-Identifier: Apache-2.0
//
// MakePlan: which tensors form which units, and which units share a message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"
#include "plugin/src/unit.h"

namespace bitopk {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CompressionSpec TopK(double density, double density_down) {
  CompressionSpec spec;
  spec.up.density = density;
  spec.down.density = density_down;
  spec.dense_below = 0;
  spec.exchange = ExchangeKind::kSharded;
  return spec;
}

Config ConfigOf(const CompressionSpec& spec) {
  Config config;
  config.spec = spec;
  return config;
}

std::vector<std::size_t> TensorsOf(const Unit& unit) {
  std::vector<std::size_t> numbers;
  for (const UnitTensor& part : unit.tensors) numbers.push_back(part.tensor);
  return numbers;
}

const Unit& UnitOf(const Plan& plan, std::size_t tensor) {
  return plan.units[plan.unit_of_tensor[tensor]];
}

// Every tensor is in one unit, every unit in one bucket, and the tables say which.
void ExpectComplete(const Plan& plan, const std::vector<TensorSpec>& tensors) {
  std::vector<int> in_unit(tensors.size(), 0);
  for (std::size_t number = 0; number < plan.units.size(); ++number) {
    const Unit& unit = plan.units[number];
    std::size_t offset = 0;
    for (const UnitTensor& part : unit.tensors) {
      ++in_unit[part.tensor];
      EXPECT_EQ(plan.unit_of_tensor[part.tensor], number);
      EXPECT_EQ(part.offset, offset);
      EXPECT_EQ(part.num_entries, tensors[part.tensor].num_entries);
      EXPECT_EQ(unit.dtype, tensors[part.tensor].dtype);
      offset += part.num_entries;
    }
    EXPECT_EQ(unit.num_entries, offset);
    EXPECT_EQ(unit.shares.num_entries(), offset);
  }
  EXPECT_EQ(in_unit, std::vector<int>(tensors.size(), 1));
  std::vector<int> in_bucket(plan.units.size(), 0);
  for (std::size_t number = 0; number < plan.buckets.size(); ++number) {
    for (const std::size_t unit : plan.buckets[number].units) {
      ++in_bucket[unit];
      for (const UnitTensor& part : plan.units[unit].tensors) {
        EXPECT_EQ(plan.bucket_of_tensor[part.tensor], number);
      }
    }
  }
  EXPECT_EQ(in_bucket, std::vector<int>(plan.units.size(), 1));
}

// No message exceeds the limit unless one unit alone does; one exchange a message, at every step.
void ExpectBucketsWithin(const Plan& plan, std::size_t bucket_bytes) {
  for (const Bucket& bucket : plan.buckets) {
    std::size_t bytes = 0;
    const Unit& first = plan.units[bucket.units.front()];
    for (const std::size_t number : bucket.units) {
      const Unit& unit = plan.units[number];
      bytes += unit.num_entries * DTypeBytes(unit.dtype);
      EXPECT_EQ(unit.compressed, first.compressed);
      for (const std::uint64_t step : {0, 1, 5, 10, 1000}) {
        EXPECT_EQ(unit.ExchangeAt(step), first.ExchangeAt(step));
      }
    }
    EXPECT_EQ(bucket.dense_bytes, bytes);
    EXPECT_TRUE(bytes <= bucket_bytes || bucket.units.size() == 1);
  }
}

TEST(Plan, ScopeTensorMakesAUnitOfEachTensor) {
  const std::vector<TensorSpec> tensors = {{"a", 5000}, {"b", 7000}, {"c", 3}};
  const Plan plan = MakePlan(tensors, ConfigOf(TopK(0.01, 0.02)), 0, 2);
  ExpectComplete(plan, tensors);
  ASSERT_THAT(plan.units, SizeIs(3));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(UnitOf(plan, i).compressed);
    EXPECT_FALSE(UnitOf(plan, i).from_rule);
    EXPECT_THAT(TensorsOf(UnitOf(plan, i)), ElementsAre(i));
  }
  EXPECT_EQ(UnitOf(plan, 0).k_up, 50U);
  EXPECT_EQ(UnitOf(plan, 0).k_down, 100U);
  EXPECT_EQ(UnitOf(plan, 2).k_up, 1U);
}

TEST(Plan, ScopeGlobalMakesOneUnitOfEachRuleInRegistrationOrder) {
  Config config = ConfigOf(TopK(0.01, 0.01));
  config.spec.scope = Scope::kGlobal;
  Rule rule{"conv*", TopK(0.1, 0.1)};
  rule.spec.scope = Scope::kGlobal;
  config.rules = {rule};
  const std::vector<TensorSpec> tensors = {
      {"fc1", 5000}, {"conv1", 2000}, {"fc2", 100}, {"conv2", 1000}, {"fc3", 1}};
  const Plan plan = MakePlan(tensors, config, 0, 2);
  ExpectComplete(plan, tensors);
  ASSERT_THAT(plan.units, SizeIs(2));
  EXPECT_THAT(TensorsOf(UnitOf(plan, 0)), ElementsAre(0, 2, 4));
  EXPECT_THAT(TensorsOf(UnitOf(plan, 1)), ElementsAre(1, 3));
  EXPECT_FALSE(UnitOf(plan, 0).from_rule);
  EXPECT_TRUE(UnitOf(plan, 1).from_rule);
  EXPECT_EQ(UnitOf(plan, 0).k_up, 51U);
  EXPECT_EQ(UnitOf(plan, 1).k_up, 300U);
}

TEST(Plan, TheFirstMatchingRuleWins) {
  Config config = ConfigOf(TopK(0.01, 0.01));
  CompressionSpec dense;
  dense.method = Method::kDense;
  config.rules = {{"*.bias", dense},
                  {"head.*", TopK(0.5, 0.5)},
                  {"*", TopK(0.25, 0.25)},
                  {"*", TopK(0.125, 0.125)}};
  const std::vector<TensorSpec> tensors = {
      {"head.bias", 4000}, {"head.weight", 4000}, {"body", 4000}, {"head", 4000}};
  const Plan plan = MakePlan(tensors, config, 0, 2);
  ExpectComplete(plan, tensors);
  EXPECT_FALSE(UnitOf(plan, 0).compressed);
  EXPECT_EQ(UnitOf(plan, 1).k_up, 2000U);
  EXPECT_EQ(UnitOf(plan, 2).k_up, 1000U);
  EXPECT_EQ(UnitOf(plan, 3).k_up, 1000U);
}

TEST(Plan, SmallTensorsTravelDenseAndFused) {
  Config config = ConfigOf(TopK(0.01, 0.01));
  config.spec.dense_below = 1024;
  const std::vector<TensorSpec> tensors = {
      {"a", 1023}, {"b", 1024}, {"c", 5}, {"d", 0}, {"e", 2000}};
  const Plan plan = MakePlan(tensors, config, 0, 2);
  ExpectComplete(plan, tensors);
  EXPECT_TRUE(UnitOf(plan, 1).compressed);
  EXPECT_TRUE(UnitOf(plan, 4).compressed);
  for (const std::size_t i : {0U, 2U, 3U}) EXPECT_FALSE(UnitOf(plan, i).compressed);
  EXPECT_EQ(plan.unit_of_tensor[0], plan.unit_of_tensor[2]);
  EXPECT_EQ(plan.unit_of_tensor[0], plan.unit_of_tensor[3]);
}

TEST(Plan, AnEmptyTensorIsNeverCompressed) {
  for (const Scope scope : {Scope::kTensor, Scope::kGlobal}) {
    Config config = ConfigOf(TopK(0.01, 0.01));
    config.spec.scope = scope;
    const std::vector<TensorSpec> tensors = {{"none", 0}};
    const Plan plan = MakePlan(tensors, config, 0, 2);
    ExpectComplete(plan, tensors);
    EXPECT_FALSE(UnitOf(plan, 0).compressed);
  }
}

TEST(Plan, OtherTypesTravelDenseEachInAUnitOfItsType) {
  const std::vector<TensorSpec> tensors = {{"f", 9000},
                                           {"i", 9000, DType::kInt32},
                                           {"l", 9000, DType::kInt64},
                                           {"d", 9000, DType::kFloat64},
                                           {"j", 10, DType::kInt32}};
  const Plan plan = MakePlan(tensors, ConfigOf(TopK(0.01, 0.01)), 0, 2);
  ExpectComplete(plan, tensors);
  EXPECT_THAT(plan.units, SizeIs(4));
  EXPECT_TRUE(UnitOf(plan, 0).compressed);
  for (std::size_t i = 1; i < 5; ++i) EXPECT_FALSE(UnitOf(plan, i).compressed);
  EXPECT_EQ(plan.unit_of_tensor[1], plan.unit_of_tensor[4]);
}

TEST(Plan, OnlyTheDenseMethodNarrowsWhatTravelsDense) {
  Config config = ConfigOf(TopK(0.01, 0.01));
  config.spec.dense_below = 1024;
  config.spec.value_format = kernels::ValueFormat::kFloat16;
  CompressionSpec half;
  half.method = Method::kDense;
  half.value_format = kernels::ValueFormat::kFloat16;
  config.rules = {{"half*", half}};
  const std::vector<TensorSpec> tensors = {
      {"small", 10}, {"half", 10}, {"half.count", 10, DType::kInt64}};
  const Plan plan = MakePlan(tensors, config, 0, 2);
  ExpectComplete(plan, tensors);
  EXPECT_EQ(UnitOf(plan, 0).spec.value_format, kernels::ValueFormat::kFloat32);
  EXPECT_EQ(UnitOf(plan, 1).spec.value_format, kernels::ValueFormat::kFloat16);
  EXPECT_EQ(UnitOf(plan, 2).spec.value_format, kernels::ValueFormat::kFloat32);
}

std::vector<TensorSpec> ManyTensors() {
  std::vector<TensorSpec> tensors;
  for (std::size_t i = 0; i < 60; ++i) {
    const DType dtype = i % 7 == 3 ? DType::kInt64 : DType::kFloat32;
    const char* kind = i % 5 == 0 ? "late." : i % 5 == 1 ? "gather." : "";
    tensors.push_back({kind + std::to_string(i), i * 397 % 3001, dtype});
  }
  return tensors;
}

Config MixedConfig() {
  Config config = ConfigOf(TopK(0.05, 0.02));
  config.spec.dense_below = 500;
  Rule late{"late.*", TopK(0.05, 0.05)};
  late.spec.start_step = 10;
  Rule gather{"gather.*", TopK(0.05, 0.05)};
  gather.spec.exchange = ExchangeKind::kAllgather;
  config.rules = {late, gather};
  return config;
}

TEST(Plan, BucketsStayWithinTheirSizeAndHoldOneKind) {
  const std::vector<TensorSpec> tensors = ManyTensors();
  for (const std::size_t bucket_bytes : {1U, 100U, 4096U, 20000U, 1U << 25}) {
    Config config = MixedConfig();
    config.bucket_bytes = bucket_bytes;
    const Plan plan = MakePlan(tensors, config, 1, 3);
    ExpectComplete(plan, tensors);
    ExpectBucketsWithin(plan, bucket_bytes);
  }
}

TEST(Plan, AWholeModelIsOneMessageIfItFits) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 50; ++i) tensors.push_back({std::to_string(i), 10000});
  const Plan plan = MakePlan(tensors, ConfigOf(TopK(0.05, 0.05)), 0, 2);
  ExpectComplete(plan, tensors);
  EXPECT_THAT(plan.buckets, SizeIs(1));
}

// Gradients appear from the last registered tensor to the first: a message is launched no later
// than those that backward completes after it.
TEST(Plan, BucketsAreLaunchedInTheOrderInWhichBackwardCompletesThem) {
  Config config = MixedConfig();
  config.bucket_bytes = 20000;
  const std::vector<TensorSpec> tensors = ManyTensors();
  const Plan plan = MakePlan(tensors, config, 0, 2);
  std::size_t previous = tensors.size();
  for (const Bucket& bucket : plan.buckets) {
    std::size_t last_to_appear = tensors.size();
    for (const std::size_t unit : bucket.units) {
      for (const std::size_t tensor : TensorsOf(plan.units[unit])) {
        last_to_appear = std::min(last_to_appear, tensor);
      }
    }
    EXPECT_LT(last_to_appear, previous);
    previous = last_to_appear;
  }
}

TEST(Plan, UnitsOfFewEntriesGoWholeToOwnersInTurn) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 9; ++i) tensors.push_back({std::to_string(i), 5000});
  const Plan plan = MakePlan(tensors, ConfigOf(TopK(0.01, 0.01)), 0, 3);
  std::vector<int> owned(3, 0);
  for (const Unit& unit : plan.units) {
    EXPECT_FALSE(unit.shares.dealt());
    for (std::size_t owner = 0; owner < 3; ++owner) {
      if (unit.shares.NumPositions(owner) == 5000) ++owned[owner];
    }
  }
  EXPECT_THAT(owned, ElementsAre(3, 3, 3));
}

TEST(Plan, UnitsOfManyEntriesAreDealt) {
  for (const std::size_t k : {kWholeBelowEntries - 1, kWholeBelowEntries}) {
    for (const bool up : {true, false}) {
      CompressionSpec spec = TopK(0, 0);
      spec.up = {0, up ? k : 1};
      spec.down = {0, up ? 1 : k};
      const Plan plan = MakePlan({{"x", 5000}}, ConfigOf(spec), 0, 3);
      EXPECT_EQ(plan.units[0].shares.dealt(), k >= kWholeBelowEntries);
    }
  }
}

TEST(Plan, AllgatherReplicatesTheServer) {
  CompressionSpec spec = TopK(0.9, 0.9);
  spec.exchange = ExchangeKind::kAllgather;
  const Plan plan = MakePlan({{"x", 5000}}, ConfigOf(spec), 1, 3);
  EXPECT_TRUE(plan.units[0].shares.replicated());
}

TEST(Sparsity, RoundsHalvesUp) {
  EXPECT_EQ((Sparsity{0.1, 0}.EntriesOf(24)), 2U);
  EXPECT_EQ((Sparsity{0.1, 0}.EntriesOf(25)), 3U);  // 2.5
  EXPECT_EQ((Sparsity{0.5, 0}.EntriesOf(3)), 2U);   // 1.5
  EXPECT_EQ((Sparsity{0.5, 0}.EntriesOf(5)), 3U);   // 2.5, not to even
  EXPECT_EQ((Sparsity{0.25, 0}.EntriesOf(1)), 1U);  // at least one
  EXPECT_EQ((Sparsity{1.0, 0}.EntriesOf(7)), 7U);
  EXPECT_EQ((Sparsity{1e-9, 0}.EntriesOf(1000)), 1U);
  EXPECT_EQ((Sparsity{0.5, 0}.EntriesOf(0)), 0U);
  EXPECT_EQ((Sparsity{0.0, 10}.EntriesOf(7)), 7U);
  EXPECT_EQ((Sparsity{0.0, 3}.EntriesOf(7)), 3U);
  EXPECT_EQ((Sparsity{0.0, 3}.EntriesOf(0)), 0U);
}

TEST(Plan, WarnsWhenCompressionSendsMoreThanDense) {
  for (const ExchangeKind exchange :
       {ExchangeKind::kAllgather, ExchangeKind::kSharded, ExchangeKind::kAuto}) {
    CompressionSpec spec = TopK(0.9, 0.9);
    spec.exchange = exchange;
    const Plan plan = MakePlan({{"fc1", 50000}}, ConfigOf(spec), 0, 4);
    ASSERT_THAT(plan.warnings, SizeIs(1)) << ExchangeName(exchange);
    EXPECT_THAT(plan.warnings[0], HasSubstr("fc1"));
    EXPECT_NE(plan.units[0].exchange, ExchangeKind::kDense);
  }
  EXPECT_THAT(MakePlan({{"fc1", 50000}}, ConfigOf(TopK(0.01, 0.01)), 0, 4).warnings, IsEmpty());
  EXPECT_THAT(MakePlan({{"fc1", 50000}}, ConfigOf(TopK(0.9, 0.9)), 0, 1).warnings, IsEmpty());
}

TEST(Plan, FallsBackToDenseIfAllowed) {
  CompressionSpec spec = TopK(0.9, 0.9);
  spec.exchange = ExchangeKind::kAuto;
  spec.dense_fallback = true;
  Config config = ConfigOf(spec);
  config.rules = {{"thin", TopK(0.001, 0.001)}};
  config.rules[0].spec.exchange = ExchangeKind::kAuto;
  config.rules[0].spec.dense_fallback = true;
  const Plan plan = MakePlan({{"fc1", 50000}, {"thin", 50000}}, config, 0, 4);
  EXPECT_EQ(UnitOf(plan, 0).exchange, ExchangeKind::kDense);
  EXPECT_NE(UnitOf(plan, 1).exchange, ExchangeKind::kDense);
  EXPECT_THAT(plan.warnings, IsEmpty());
  EXPECT_THAT(plan.decisions, ::testing::Contains(HasSubstr("fc1\": dense")));
}

TEST(Plan, AutoIsResolvedTheSameWayOnEveryRankAndSaysWhy) {
  CompressionSpec spec = TopK(0.01, 0.01);
  spec.exchange = ExchangeKind::kAuto;
  const std::vector<TensorSpec> tensors = {{"few", 5000}, {"many", 5000000}};
  for (int rank = 0; rank < 8; ++rank) {
    const Plan plan = MakePlan(tensors, ConfigOf(spec), rank, 8);
    EXPECT_EQ(UnitOf(plan, 0).exchange, ExchangeKind::kAllgather);
    EXPECT_EQ(UnitOf(plan, 1).exchange, ExchangeKind::kSharded);
    EXPECT_THAT(
        plan.decisions,
        ElementsAre(HasSubstr("\"few\" (5000 entries, k=50 up, 50 down): allgather"),
                    HasSubstr("\"many\" (5000000 entries, k=50000 up, 50000 down): sharded")));
  }
}

TEST(Plan, RefusesAUnitOfMoreThanTwoToThe32Entries) {
  const std::size_t half = (std::size_t{1} << 31) + 1;
  Config config = ConfigOf(TopK(0.01, 0.01));
  EXPECT_THROW(MakePlan({{"x", 2 * half}}, config, 0, 2), InvalidArgumentError);
  config.spec.scope = Scope::kGlobal;
  EXPECT_THROW(MakePlan({{"x", half}, {"y", half}}, config, 0, 2), InvalidArgumentError);
}

TEST(BucketDigest, ChangesWithEverythingThatMustBeEqual) {
  const std::vector<TensorSpec> tensors = {{"x", 5000}};
  const auto digest = [&](const CompressionSpec& spec, std::uint64_t step, Op op, double scale) {
    const Plan plan = MakePlan(tensors, ConfigOf(spec), 0, 2);
    return BucketDigest(plan, plan.buckets[0], step, op, scale);
  };
  CompressionSpec spec = TopK(0.01, 0.01);
  spec.start_step = 3;
  const std::uint64_t base = digest(spec, 3, Op::kSum, 1.0);
  EXPECT_EQ(digest(spec, 4, Op::kSum, 1.0), base);
  EXPECT_NE(digest(spec, 2, Op::kSum, 1.0), base);  // still dense
  EXPECT_NE(digest(spec, 3, Op::kAverage, 1.0), base);
  EXPECT_NE(digest(spec, 3, Op::kSum, 2.0), base);
  CompressionSpec other = spec;
  other.up.density = 0.02;
  EXPECT_NE(digest(other, 3, Op::kSum, 1.0), base);
  other = spec;
  other.down.density = 0.02;
  EXPECT_NE(digest(other, 3, Op::kSum, 1.0), base);
  other = spec;
  other.value_format = kernels::ValueFormat::kFloat16;
  EXPECT_NE(digest(other, 3, Op::kSum, 1.0), base);
  other = spec;
  other.exchange = ExchangeKind::kAllgather;
  EXPECT_NE(digest(other, 3, Op::kSum, 1.0), base);
}

}  // namespace
}  // namespace bitopk
