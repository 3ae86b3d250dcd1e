// SPDX-License-Identifier: Apache-2.0
//
// Selection against a full sort, for every instruction set of this machine.
#include "bitopk/kernels/topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "bitopk/kernels/error.h"
#include "bitopk/kernels/topk_reference.h"

namespace bitopk::kernels {
namespace {

std::vector<std::uint32_t> Bits(Span<const float> values) {
  std::vector<std::uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

enum class Data {
  kNormal,
  kAllEqual,
  kAllZero,
  kFewValues,
  kAscending,
  kDescending,
  kMostlyZero,
  kLayered,
  kNanAndInf,
  kDenormal,
};
constexpr Data kAllData[] = {
    Data::kNormal,     Data::kAllEqual,   Data::kAllZero, Data::kFewValues, Data::kAscending,
    Data::kDescending, Data::kMostlyZero, Data::kLayered, Data::kNanAndInf, Data::kDenormal};

std::vector<float> Make(Data data, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) {
    const float g = normal(random);
    switch (data) {
      case Data::kNormal:
        x[i] = g;
        break;
      case Data::kAllEqual:
        x[i] = (random() & 1) != 0 ? 2.5F : -2.5F;
        break;
      case Data::kAllZero:
        x[i] = (random() & 1) != 0 ? 0.0F : -0.0F;
        break;
      case Data::kFewValues:
        x[i] = static_cast<float>(static_cast<int>(random() % 8) - 4);
        break;
      case Data::kAscending:
        x[i] = static_cast<float>(i + 1) * 1e-3F;
        break;
      case Data::kDescending:
        x[i] = static_cast<float>(n - i) * -1e-3F;
        break;
      case Data::kMostlyZero:
        x[i] = random() % 2000 == 0 ? g : 0.0F;
        break;
      case Data::kLayered:
        x[i] = g * std::pow(100.0F, static_cast<float>(i * 5 / n) - 2.0F);
        break;
      case Data::kNanAndInf:
        x[i] = g;
        if (random() % 50 == 0) x[i] = std::numeric_limits<float>::infinity();
        if (random() % 50 == 0) x[i] = -std::numeric_limits<float>::quiet_NaN();
        break;
      case Data::kDenormal:
        x[i] = g * 1e-41F;
        break;
    }
  }
  return x;
}

std::vector<std::size_t> Counts(std::size_t n) {
  std::vector<std::size_t> counts = {0, 1, 2, n / 1000, n / 100, n / 20, n / 2, n};
  if (n > 0) counts.push_back(n - 1);
  counts.push_back(n + 5);
  return counts;
}

class TopK : public testing::TestWithParam<Isa> {
 protected:
  TopKWorkspace workspace_{GetParam()};
};

TEST_P(TopK, RunsTheVariantThatWasAskedFor) {
  const std::string compiled = workspace_.compiled_for();
  switch (GetParam()) {
    case Isa::kScalar:
      EXPECT_EQ(compiled, "scalar");
      break;
    case Isa::kNeon:
      EXPECT_EQ(compiled, "NEON");
      break;
    case Isa::kAvx2:
      EXPECT_EQ(compiled, "AVX2");
      break;
    case Isa::kAvx512:
      EXPECT_EQ(compiled, "AVX3");
      break;
  }
}

TEST_P(TopK, SelectsWhatAFullSortSelects) {
  for (const std::size_t n : {0, 1, 2, 15, 16, 17, 63, 64, 65, 1003, 8193, 70001}) {
    for (const Data data : kAllData) {
      const auto x = Make(data, n, static_cast<unsigned>(n));
      for (const std::size_t k : Counts(n)) {
        for (const bool nonzero : {false, true}) {
          const auto expected = reference::SelectTopK(x, k, nonzero);
          const auto got = nonzero ? SelectNonzeroTopK(Span<const float>(x), k, workspace_)
                                   : SelectTopK(x, k, workspace_);
          const std::vector<std::uint32_t> indices(got.indices.begin(), got.indices.end());
          ASSERT_EQ(indices, expected.indices) << "n=" << n << " k=" << k << " data=" << int(data);
          ASSERT_EQ(Bits(Span<float>(got.values)), Bits(expected.values))
              << "n=" << n << " k=" << k;
        }
      }
    }
  }
}

// Cuts [0, n) into pieces of uneven length, some without a gradient and some empty.
std::vector<GradientSegment> Pieces(const std::vector<float>& gradient, bool with_gaps) {
  std::vector<GradientSegment> pieces;
  std::size_t start = 0;
  for (std::size_t length = 1; start < gradient.size(); length = length * 3 + 1) {
    const std::size_t size = std::min(length, gradient.size() - start);
    const bool gap = with_gaps && pieces.size() % 3 == 2;
    pieces.push_back({gap ? nullptr : gradient.data() + start, size});
    pieces.push_back({nullptr, 0});
    start += size;
  }
  return pieces;
}

TEST_P(TopK, FusedStepEqualsTheFormula) {
  for (const std::size_t n : {1, 17, 64, 1003, 9001, 70001}) {
    for (const Data data : kAllData) {
      auto gradient = Make(data, n, 1);
      const auto memory = Make(data == Data::kNanAndInf ? Data::kNormal : data, n, 2);
      for (const float factor : {1.0F, 0.3F}) {
        for (const bool with_gaps : {false, true}) {
          const auto pieces = Pieces(gradient, with_gaps);
          auto dense = gradient;
          std::size_t start = 0;
          for (const auto& piece : pieces) {
            if (piece.gradient == nullptr) {
              std::fill_n(dense.begin() + static_cast<std::ptrdiff_t>(start), piece.num_entries,
                          0.0F);
            }
            start += piece.num_entries;
          }
          for (const std::size_t k : Counts(n)) {
            std::vector<float> expected_memory(n);
            std::vector<float> new_memory(n, 77.0F);
            const auto expected =
                reference::CompressTopK(dense.data(), memory, factor, k, expected_memory);
            const auto got =
                CompressTopK(pieces, memory.data(), factor, k, new_memory.data(), workspace_);
            const std::vector<std::uint32_t> indices(got.indices.begin(), got.indices.end());
            ASSERT_EQ(indices, expected.indices)
                << "n=" << n << " k=" << k << " data=" << int(data);
            ASSERT_EQ(Bits(Span<float>(got.values)), Bits(expected.values));
            ASSERT_EQ(Bits(new_memory), Bits(expected_memory))
                << "n=" << n << " k=" << k << " data=" << int(data);
          }
        }
      }
    }
  }
}

// The estimate samples runs at multiples of n / runs. Data that is large only there makes it far
// too high; data that is small only there makes it far too low.
TEST_P(TopK, SurvivesAnEstimateThatIsWrongBothWays) {
  const std::size_t n = 300007;
  const std::size_t runs = std::max<std::size_t>(4096, n / 16) / 64;
  for (const float sampled_value : {1000.0F, 0.0F}) {
    for (const bool aligned_memory : {true, false}) {
      auto gradient = Make(Data::kNormal, n, 3);
      for (std::size_t run = 0; run < runs; ++run) {
        for (std::size_t j = 0; j < 64; ++j) gradient[n / runs * run + j] *= sampled_value;
      }
      std::vector<float> memory(n, 0.0F);
      std::vector<float> new_memory(n + 1);
      float* out = new_memory.data() + (aligned_memory ? 0 : 1);
      const GradientSegment piece{gradient.data(), n};
      for (const std::size_t k : {std::size_t{3}, std::size_t{3000}, n / 10, n / 3}) {
        std::vector<float> expected_memory(n);
        const auto expected =
            reference::CompressTopK(gradient.data(), memory, 1.0F, k, expected_memory);
        const auto got = CompressTopK({&piece, 1}, memory.data(), 1.0F, k, out, workspace_);
        const std::vector<std::uint32_t> indices(got.indices.begin(), got.indices.end());
        ASSERT_EQ(indices, expected.indices) << "k=" << k;
        ASSERT_EQ(Bits(Span<float>(out, n)), Bits(expected_memory)) << "k=" << k;
        const auto alone = SelectNonzeroTopK(Span<const float>(gradient), k, workspace_);
        ASSERT_EQ(std::vector<std::uint32_t>(alone.indices.begin(), alone.indices.end()),
                  expected.indices);
      }
    }
  }
}

TEST_P(TopK, StreamsAroundTheCachesWithTheSameResult) {
  const std::size_t n = (1 << 20) + 77;
  const auto gradient = Make(Data::kLayered, n, 5);
  const auto memory = Make(Data::kNormal, n, 6);
  const std::vector<GradientSegment> pieces = {{gradient.data(), 1001},
                                               {gradient.data() + 1001, n - 1001}};
  for (const std::size_t k : {n / 1000, n / 20}) {
    std::vector<float> expected_memory(n);
    std::vector<float> new_memory(n);
    const auto expected =
        reference::CompressTopK(gradient.data(), memory, 1.0F, k, expected_memory);
    const auto got = CompressTopK(pieces, memory.data(), 1.0F, k, new_memory.data(), workspace_);
    ASSERT_EQ(std::vector<std::uint32_t>(got.indices.begin(), got.indices.end()), expected.indices);
    ASSERT_EQ(Bits(new_memory), Bits(expected_memory));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, TopK, testing::ValuesIn(SupportedIsas()),
                         [](const auto& isa) { return std::string(IsaName(isa.param)); });

TEST(Isa, AnUnknownNameIsRefusedWithTheKnownOnes) {
  try {
    IsaFromName("mmx");
    FAIL();
  } catch (const InvalidArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("scalar"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bitopk::kernels
