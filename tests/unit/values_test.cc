// SPDX-License-Identifier: Apache-2.0
//
// The value codecs: rounding to nearest even, saturation, and what happens to Inf and NaN.
#include "bitopk/kernels/values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "bitopk/kernels/codec_reference.h"

namespace bitopk::kernels {
namespace {

using ByteVector = std::vector<std::uint8_t>;
using Floats = std::vector<float>;
constexpr ValueFormat kFormats[] = {ValueFormat::kFloat32, ValueFormat::kFloat16,
                                    ValueFormat::kBfloat16};
constexpr ValueFormat kNarrowFormats[] = {ValueFormat::kFloat16, ValueFormat::kBfloat16};
constexpr float kInf = std::numeric_limits<float>::infinity();

float FromBits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

std::uint32_t ToBits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

std::vector<std::uint32_t> ToBits(const Floats& values) {
  std::vector<std::uint32_t> bits;
  for (float value : values) bits.push_back(ToBits(value));
  return bits;
}

ByteVector Encode(ValueFormat format, Floats values) {
  ByteVector out(values.size() * ValueBytes(format));
  EncodeValues(format, values, out);
  return out;
}

Floats Decode(ValueFormat format, const ByteVector& in) {
  Floats out(in.size() / ValueBytes(format));
  DecodeValues(format, in, out);
  return out;
}

// Every finite value of a format, the middle to the next one, and the floats beside both.
Floats ValuesThatRoundingDependsOn(ValueFormat format) {
  Floats values;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const ByteVector wire = {static_cast<std::uint8_t>(bits & 0xff),
                             static_cast<std::uint8_t>(bits >> 8)};
    const ByteVector next = {static_cast<std::uint8_t>((bits + 1) & 0xff),
                             static_cast<std::uint8_t>((bits + 1) >> 8)};
    const float value = reference::DecodeValues(format, wire, 1)[0];
    if (!std::isfinite(value)) continue;
    const auto above = static_cast<double>(reference::DecodeValues(format, next, 1)[0]);
    const auto middle = static_cast<float>((static_cast<double>(value) + above) / 2);
    for (float x : {value, std::isfinite(middle) ? middle : value}) {
      values.push_back(x);
      values.push_back(std::nextafter(x, kInf));
      values.push_back(std::nextafter(x, -kInf));
    }
  }
  return values;
}

Floats ArbitraryBits(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  Floats values;
  for (std::size_t i = 0; i < n; ++i)
    values.push_back(FromBits(static_cast<std::uint32_t>(random())));
  return values;
}

TEST(Values, AreLittleEndian) {
  EXPECT_EQ(Encode(ValueFormat::kFloat32, {-2.5F}), (ByteVector{0x00, 0x00, 0x20, 0xc0}));
  EXPECT_EQ(Encode(ValueFormat::kFloat16, {-2.5F}), (ByteVector{0x00, 0xc1}));
  EXPECT_EQ(Encode(ValueFormat::kBfloat16, {-2.5F}), (ByteVector{0x20, 0xc0}));
}

TEST(Values, PassFloat32Unchanged) {
  const std::vector<std::uint32_t> bits = {0x00000000, 0x80000000, 0x00000001, 0x807fffff,
                                           0x3f800000, 0x7f7fffff, 0x7f800000, 0xff800000};
  Floats values;
  for (std::uint32_t b : bits) values.push_back(FromBits(b));
  EXPECT_EQ(ToBits(Decode(ValueFormat::kFloat32, Encode(ValueFormat::kFloat32, values))), bits);
}

TEST(Values, EncodeEveryNanAsOne) {
  const Floats nans = {FromBits(0x7fc00000), FromBits(0xffc00000), FromBits(0x7f800001),
                       FromBits(0xffffffff)};
  const ByteVector expected32 = {0, 0, 0xc0, 0x7f};
  for (float nan : nans) {
    EXPECT_EQ(Encode(ValueFormat::kFloat32, {nan}), expected32);
    EXPECT_EQ(Encode(ValueFormat::kFloat16, {nan}), (ByteVector{0x00, 0x7e}));
    EXPECT_EQ(Encode(ValueFormat::kBfloat16, {nan}), (ByteVector{0xc0, 0x7f}));
  }
}

TEST(Values, DecodeEveryNanToOne) {
  EXPECT_EQ(ToBits(Decode(ValueFormat::kFloat32, {0x01, 0x00, 0x80, 0xff})[0]), kCanonicalNan);
  EXPECT_EQ(ToBits(Decode(ValueFormat::kFloat16, {0x01, 0xfc})[0]), kCanonicalNan);
  EXPECT_EQ(ToBits(Decode(ValueFormat::kBfloat16, {0x81, 0xff})[0]), kCanonicalNan);
}

TEST(Values, KeepInfinity) {
  for (ValueFormat format : kFormats) {
    EXPECT_EQ(RoundToFormat(format, kInf), kInf);
    EXPECT_EQ(RoundToFormat(format, -kInf), -kInf);
  }
}

TEST(Values, SaturateInsteadOfOverflowing) {
  const float max = std::numeric_limits<float>::max();
  EXPECT_EQ(RoundToFormat(ValueFormat::kFloat16, 65520.0F), 65504.0F);
  EXPECT_EQ(RoundToFormat(ValueFormat::kFloat16, -max), -65504.0F);
  EXPECT_EQ(ToBits(RoundToFormat(ValueFormat::kBfloat16, max)), 0x7f7f0000U);
  EXPECT_EQ(ToBits(RoundToFormat(ValueFormat::kBfloat16, -max)), 0xff7f0000U);
}

TEST(Values, RoundTiesToEven) {
  EXPECT_EQ(RoundToFormat(ValueFormat::kFloat16, 2049.0F), 2048.0F);
  EXPECT_EQ(RoundToFormat(ValueFormat::kFloat16, 2051.0F), 2052.0F);
  EXPECT_EQ(RoundToFormat(ValueFormat::kBfloat16, 257.0F), 256.0F);
  EXPECT_EQ(RoundToFormat(ValueFormat::kBfloat16, 259.0F), 260.0F);
}

TEST(Values, KeepTheSignOfZero) {
  for (ValueFormat format : kFormats) {
    EXPECT_EQ(ToBits(RoundToFormat(format, -0.0F)), 0x80000000U);
    EXPECT_EQ(ToBits(RoundToFormat(format, 0.0F)), 0U);
  }
}

TEST(Values, EncodeLikeTheReferenceWhereRoundingChanges) {
  for (ValueFormat format : kNarrowFormats) {
    const Floats values = ValuesThatRoundingDependsOn(format);
    EXPECT_EQ(Encode(format, values), reference::EncodeValues(format, values));
  }
}

TEST(Values, EncodeArbitraryBitsLikeTheReference) {
  for (ValueFormat format : kFormats) {
    const Floats values = ArbitraryBits(300000, /*seed=*/1);
    EXPECT_EQ(Encode(format, values), reference::EncodeValues(format, values));
  }
}

TEST(Values, DecodeEveryPatternOfANarrowFormatLikeTheReference) {
  ByteVector all;
  for (unsigned bits = 0; bits < 65536; ++bits) {
    all.push_back(static_cast<std::uint8_t>(bits & 0xff));
    all.push_back(static_cast<std::uint8_t>(bits >> 8));
  }
  for (ValueFormat format : kNarrowFormats) {
    EXPECT_EQ(ToBits(Decode(format, all)), ToBits(reference::DecodeValues(format, all, 65536)));
  }
}

TEST(Values, AreReplacedByWhatTheReceiverDecodes) {
  for (ValueFormat format : kFormats) {
    Floats values = ArbitraryBits(10000, /*seed=*/2);
    ByteVector wire(values.size() * ValueBytes(format));
    EncodeValues(format, values, wire);
    EXPECT_EQ(ToBits(values), ToBits(Decode(format, wire)));
  }
}

TEST(Values, DoNotChangeWhenTheyTravelAgain) {
  for (ValueFormat format : kFormats) {
    const Floats once = Decode(format, Encode(format, ArbitraryBits(10000, /*seed=*/3)));
    EXPECT_EQ(ToBits(Decode(format, Encode(format, once))), ToBits(once));
  }
}

TEST(Values, RoundOneByOneAsInBulk) {
  for (ValueFormat format : kFormats) {
    const Floats values = ArbitraryBits(10000, /*seed=*/4);
    const Floats bulk = Decode(format, Encode(format, values));
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(ToBits(RoundToFormat(format, values[i])), ToBits(bulk[i])) << ToBits(values[i]);
    }
  }
}

TEST(Values, TravelAtAnyAlignment) {
  for (ValueFormat format : kFormats) {
    const Floats values = {1.0F, -2.5F, 3.0F, 0.125F, 7.0F};
    const std::size_t num_bytes = values.size() * ValueBytes(format);
    for (std::size_t offset = 1; offset < 4; ++offset) {
      ByteVector wire(num_bytes + offset);
      Floats sent = values;
      Floats received(values.size());
      EncodeValues(format, sent, MutableBytes(wire.data() + offset, num_bytes));
      DecodeValues(format, Bytes(wire.data() + offset, num_bytes), received);
      EXPECT_EQ(received, values);
    }
  }
}

TEST(Values, MayBeNone) {
  for (ValueFormat format : kFormats) {
    EncodeValues(format, {}, {});
    DecodeValues(format, {}, {});
  }
}

}  // namespace
}  // namespace bitopk::kernels
