// SPDX-License-Identifier: Apache-2.0
//
// The value codecs on the CPU. The narrow formats round through Eigen, whose conversions are to
// nearest even; saturation and the one NaN are ours.
#include "bitopk/kernels/values.h"

#include <Eigen/Core>
#include <cassert>
#include <cstring>

namespace bitopk::kernels {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are copied as little-endian");

constexpr std::uint32_t kSignBit = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7f800000U;

std::uint32_t ToBits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float FromBits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `value` with a finite magnitude limited to the one with `max_bits`. Bits of magnitudes order as
// the magnitudes do.
float Saturate(float value, std::uint32_t max_bits) {
  const std::uint32_t magnitude = ToBits(value) & ~kSignBit;
  const bool too_large = magnitude > max_bits && magnitude < kInfinity;
  return too_large ? FromBits((ToBits(value) & kSignBit) | max_bits) : value;
}

// Each format: the type on the wire, its bits from a float, and the float of its bits.
struct Float32 {
  using Wire = std::uint32_t;
  static Wire Encode(float value) {
    const std::uint32_t bits = ToBits(value);
    return (bits & ~kSignBit) > kInfinity ? kCanonicalNan : bits;
  }
  static float Decode(Wire bits) {
    return FromBits((bits & ~kSignBit) > kInfinity ? kCanonicalNan : bits);
  }
};

struct Float16 {
  using Wire = std::uint16_t;
  static Wire Encode(float value) {
    if ((ToBits(value) & ~kSignBit) > kInfinity) return 0x7e00;
    constexpr std::uint32_t kMaxFinite = 0x477fe000U;  // 65504
    return Eigen::numext::bit_cast<Wire>(Eigen::half(Saturate(value, kMaxFinite)));
  }
  static float Decode(Wire bits) {
    if ((bits & 0x7fff) > 0x7c00) return FromBits(kCanonicalNan);
    return static_cast<float>(Eigen::numext::bit_cast<Eigen::half>(bits));
  }
};

struct Bfloat16 {
  using Wire = std::uint16_t;
  static Wire Encode(float value) {
    if ((ToBits(value) & ~kSignBit) > kInfinity) return 0x7fc0;
    constexpr std::uint32_t kMaxFinite = 0x7f7f0000U;
    return Eigen::numext::bit_cast<Wire>(Eigen::bfloat16(Saturate(value, kMaxFinite)));
  }
  static float Decode(Wire bits) { return Float32::Decode(static_cast<std::uint32_t>(bits) << 16); }
};

template <typename Format>
void EncodeAll(Span<float> values, std::uint8_t* out) {
  using Wire = typename Format::Wire;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Wire wire = Format::Encode(values[i]);
    std::memcpy(out + i * sizeof(Wire), &wire, sizeof(Wire));
    values[i] = Format::Decode(wire);
  }
}

template <typename Format>
void DecodeAll(const std::uint8_t* in, Span<float> out) {
  using Wire = typename Format::Wire;
  for (std::size_t i = 0; i < out.size(); ++i) {
    Wire wire;
    std::memcpy(&wire, in + i * sizeof(Wire), sizeof(Wire));
    out[i] = Format::Decode(wire);
  }
}

}  // namespace

void EncodeValues(ValueFormat format, Span<float> values, MutableBytes out) {
  assert(out.size() >= values.size() * ValueBytes(format));
  switch (format) {
    case ValueFormat::kFloat32:
      return EncodeAll<Float32>(values, out.data());
    case ValueFormat::kFloat16:
      return EncodeAll<Float16>(values, out.data());
    case ValueFormat::kBfloat16:
      return EncodeAll<Bfloat16>(values, out.data());
  }
}

void DecodeValues(ValueFormat format, Bytes in, Span<float> out) {
  assert(in.size() >= out.size() * ValueBytes(format));
  switch (format) {
    case ValueFormat::kFloat32:
      return DecodeAll<Float32>(in.data(), out);
    case ValueFormat::kFloat16:
      return DecodeAll<Float16>(in.data(), out);
    case ValueFormat::kBfloat16:
      return DecodeAll<Bfloat16>(in.data(), out);
  }
}

float RoundToFormat(ValueFormat format, float value) {
  switch (format) {
    case ValueFormat::kFloat32:
      return Float32::Decode(Float32::Encode(value));
    case ValueFormat::kFloat16:
      return Float16::Decode(Float16::Encode(value));
    case ValueFormat::kBfloat16:
      return Bfloat16::Decode(Bfloat16::Encode(value));
  }
  return value;
}

}  // namespace bitopk::kernels
