// SPDX-License-Identifier: Apache-2.0
//
// The plain codecs: one bit, one position, one value at a time. Nothing is shared with the fast
// ones, not even the constants, so that an error in one cannot hide in the other.
#include "bitopk/kernels/codec_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "bitopk/kernels/error.h"
#include "bitopk/kernels/indices.h"

namespace bitopk::kernels::reference {
namespace {

using Bits = std::vector<bool>;

void Append(std::uint64_t value, unsigned num_bits, Bits* bits) {
  for (unsigned i = 0; i < num_bits; ++i) bits->push_back((value >> i & 1) != 0);
}

void AppendCount(std::size_t count, Bits* bits) {
  unsigned width = 0;
  while (count >> (width + 1) != 0) ++width;
  Append(width, 4, bits);
  Append(count, width, bits);  // the leading one is left out
}

Bits EliasFano(const std::vector<std::size_t>& chunk, std::size_t len, unsigned low_bits) {
  Bits bits;
  Append(low_bits, 4, &bits);
  AppendCount(chunk.size(), &bits);
  for (std::size_t position : chunk) Append(position, low_bits, &bits);
  const std::size_t upper_begin = bits.size();
  std::size_t upper = 0;
  for (std::size_t position : chunk) {
    for (; upper < position >> low_bits; ++upper) bits.push_back(false);
    bits.push_back(true);
  }
  bits.resize(upper_begin + chunk.size() + ((len - 1) >> low_bits), false);
  return bits;
}

Bits Raw(const std::vector<std::size_t>& chunk) {
  Bits bits;
  Append(13, 4, &bits);
  AppendCount(chunk.size(), &bits);
  for (std::size_t position : chunk) Append(position, 16, &bits);
  return bits;
}

Bits Bitmap(const std::vector<std::size_t>& chunk, std::size_t len) {
  Bits bits;
  Append(14, 4, &bits);
  AppendCount(chunk.size(), &bits);
  const std::size_t begin = bits.size();
  bits.resize(begin + len, false);
  for (std::size_t position : chunk) bits[begin + position] = true;
  return bits;
}

Bits SmallestForm(const std::vector<std::size_t>& chunk, std::size_t len) {
  Bits best = EliasFano(chunk, len, 0);
  const auto consider = [&best](Bits form) {
    if (form.size() < best.size()) best = std::move(form);
  };
  for (unsigned low_bits = 1; low_bits <= 12; ++low_bits) consider(EliasFano(chunk, len, low_bits));
  consider(Raw(chunk));
  consider(Bitmap(chunk, len));
  return best;
}

class Reader {
 public:
  explicit Reader(Bytes in) : in_(in) {}

  std::uint64_t Read(unsigned num_bits) {
    std::uint64_t value = 0;
    for (unsigned i = 0; i < num_bits; ++i) {
      if (next_ / 8 >= in_.size()) throw WireFormatError("reference: stream ends early");
      const std::uint64_t bit = in_[next_ / 8] >> (next_ % 8) & 1;
      value |= bit << i;
      ++next_;
    }
    return value;
  }

  void CheckEnd() {
    while (next_ % 8 != 0) {
      if (Read(1) != 0) throw WireFormatError("reference: padding is not zero");
    }
    if (next_ / 8 != in_.size()) throw WireFormatError("reference: bytes are left over");
  }

 private:
  Bytes in_;
  std::size_t next_ = 0;
};

std::vector<std::size_t> ReadChunk(unsigned code, std::size_t len, Reader* reader) {
  const auto width = static_cast<unsigned>(reader->Read(4));
  const std::size_t count = (std::size_t{1} << width) + reader->Read(width);
  if (count > len) throw WireFormatError("reference: count exceeds the chunk");
  std::vector<std::size_t> chunk;
  if (code == 13) {
    for (std::size_t i = 0; i < count; ++i) chunk.push_back(reader->Read(16));
  } else if (code == 14) {
    for (std::size_t position = 0; position < len; ++position) {
      if (reader->Read(1) != 0) chunk.push_back(position);
    }
  } else {
    std::vector<std::size_t> low;
    for (std::size_t i = 0; i < count; ++i) low.push_back(reader->Read(code));
    std::size_t upper = 0;
    for (std::size_t bit = 0; bit < count + ((len - 1) >> code); ++bit) {
      if (reader->Read(1) == 0) {
        ++upper;
      } else {
        if (chunk.size() == count) throw WireFormatError("reference: too many ones");
        chunk.push_back((upper << code) + low[chunk.size()]);
      }
    }
  }
  if (chunk.size() != count) throw WireFormatError("reference: wrong number of ones");
  return chunk;
}

// What `value` becomes when its significand keeps `digits` bits and its exponent is at least
// `min_exponent` (that of the smallest normal value), nearest even; exact in double arithmetic.
double RoundTo(double value, int digits, int min_exponent, double max_finite) {
  if (value == 0 || std::isinf(value)) return value;
  const int exponent = std::max(std::ilogb(value), min_exponent);
  const double unit = std::ldexp(1.0, exponent - (digits - 1));
  const double rounded = std::copysign(std::nearbyint(value / unit) * unit, value);
  return std::fabs(rounded) > max_finite ? std::copysign(max_finite, value) : rounded;
}

std::uint32_t Float32Bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return std::isnan(value) ? kCanonicalNan : bits;
}

// The bits of a value that is already one of the format: sign, `exponent_bits`, `fraction_bits`.
std::uint32_t SmallFloatBits(double value, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t sign = std::signbit(value) ? 1U << (exponent_bits + fraction_bits) : 0U;
  const std::uint32_t top_exponent = ((1U << exponent_bits) - 1) << fraction_bits;
  if (std::isnan(value)) return top_exponent | 1U << (fraction_bits - 1);
  if (std::isinf(value)) return sign | top_exponent;
  const double magnitude = std::fabs(value);
  const double min_normal = std::ldexp(1.0, 1 - bias);
  if (magnitude < min_normal) {
    return sign | static_cast<std::uint32_t>(std::ldexp(magnitude, bias - 1 + fraction_bits));
  }
  const int exponent = std::ilogb(magnitude);
  const double fraction = std::ldexp(magnitude, fraction_bits - exponent);  // with the leading one
  // The leading one of the fraction adds the last one to the exponent.
  return sign | ((static_cast<std::uint32_t>(exponent + bias - 1) << fraction_bits) +
                 static_cast<std::uint32_t>(fraction));
}

double SmallFloatValue(std::uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const std::uint32_t exponent = bits >> fraction_bits & ((1U << exponent_bits) - 1);
  const double sign = (bits >> (exponent_bits + fraction_bits) & 1) != 0 ? -1.0 : 1.0;
  if (exponent == (1U << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1U << fraction_bits),
                           static_cast<int>(exponent) - bias - fraction_bits);
}

std::uint32_t EncodeOne(ValueFormat format, float value) {
  switch (format) {
    case ValueFormat::kFloat32:
      return Float32Bits(value);
    case ValueFormat::kFloat16:
      return SmallFloatBits(std::isnan(value) ? value : RoundTo(value, 11, -14, 65504.0), 5, 10);
    case ValueFormat::kBfloat16:
      return SmallFloatBits(
          std::isnan(value) ? value : RoundTo(value, 8, -126, std::ldexp(255.0, 120)), 8, 7);
  }
  return 0;
}

float DecodeOne(ValueFormat format, std::uint32_t bits) {
  float value = 0;
  switch (format) {
    case ValueFormat::kFloat32:
      std::memcpy(&value, &bits, 4);
      break;
    case ValueFormat::kFloat16:
      value = static_cast<float>(SmallFloatValue(bits, 5, 10));
      break;
    case ValueFormat::kBfloat16:
      value = static_cast<float>(SmallFloatValue(bits, 8, 7));
      break;
  }
  if (std::isnan(value)) std::memcpy(&value, &kCanonicalNan, 4);
  return value;
}

}  // namespace

std::vector<std::uint8_t> EncodeIndices(Span<const std::uint32_t> indices,
                                        std::size_t num_positions) {
  const std::size_t num_chunks = NumChunks(num_positions);
  Bits bits;
  std::size_t next = 0;
  std::size_t run = 0;
  bool run_is_full = false;
  const auto end_run = [&] {
    if (run == 0) return;
    Append(15, 4, &bits);
    Append(run_is_full ? 1 : 0, 1, &bits);
    Append(run - 1, 16, &bits);
    run = 0;
  };
  for (std::size_t c = 0; c < num_chunks; ++c) {
    const std::size_t start = c * 65536;
    const std::size_t len = std::min<std::size_t>(65536, num_positions - start);
    std::vector<std::size_t> chunk;
    for (; next < indices.size() && indices[next] < start + len; ++next) {
      chunk.push_back(indices[next] - start);
    }
    if (chunk.empty() || chunk.size() == len) {
      if (run == 65536 || run_is_full == chunk.empty()) end_run();
      run_is_full = !chunk.empty();
      ++run;
    } else {
      end_run();
      const Bits form = SmallestForm(chunk, len);
      bits.insert(bits.end(), form.begin(), form.end());
    }
  }
  end_run();
  std::vector<std::uint8_t> out((bits.size() + 7) / 8, 0);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) out[i / 8] = static_cast<std::uint8_t>(out[i / 8] | 1U << (i % 8));
  }
  return out;
}

std::vector<std::uint32_t> DecodeIndices(Bytes in, std::size_t num_indices,
                                         std::size_t num_positions) {
  const std::size_t num_chunks = NumChunks(num_positions);
  std::vector<std::uint32_t> indices;
  Reader reader(in);
  const auto add = [&](std::size_t c, std::size_t position) {
    const std::size_t index = c * 65536 + position;
    if (index >= num_positions || position >= 65536) throw WireFormatError("reference: range");
    if (!indices.empty() && index <= indices.back()) throw WireFormatError("reference: order");
    if (indices.size() == num_indices) throw WireFormatError("reference: too many indices");
    indices.push_back(static_cast<std::uint32_t>(index));
  };
  for (std::size_t c = 0; c < num_chunks;) {
    const std::size_t len = std::min<std::size_t>(65536, num_positions - c * 65536);
    const auto code = static_cast<unsigned>(reader.Read(4));
    if (code == 15) {
      const bool full = reader.Read(1) != 0;
      const std::size_t run = reader.Read(16) + 1;
      if (run > num_chunks - c) throw WireFormatError("reference: run beyond the end");
      for (std::size_t i = 0; i < run; ++i, ++c) {
        const std::size_t run_len = std::min<std::size_t>(65536, num_positions - c * 65536);
        for (std::size_t position = 0; full && position < run_len; ++position) add(c, position);
      }
    } else {
      for (std::size_t position : ReadChunk(code, len, &reader)) add(c, position);
      ++c;
    }
  }
  reader.CheckEnd();
  if (indices.size() != num_indices) throw WireFormatError("reference: too few indices");
  return indices;
}

std::vector<std::uint8_t> EncodeValues(ValueFormat format, Span<const float> values) {
  std::vector<std::uint8_t> out;
  for (float value : values) {
    const std::uint32_t bits = EncodeOne(format, value);
    for (std::size_t byte = 0; byte < ValueBytes(format); ++byte) {
      out.push_back(static_cast<std::uint8_t>(bits >> (8 * byte) & 0xff));
    }
  }
  return out;
}

std::vector<float> DecodeValues(ValueFormat format, Bytes in, std::size_t num_values) {
  std::vector<float> out;
  for (std::size_t i = 0; i < num_values; ++i) {
    std::uint32_t bits = 0;
    for (std::size_t byte = 0; byte < ValueBytes(format); ++byte) {
      bits |= static_cast<std::uint32_t>(in[i * ValueBytes(format) + byte]) << (8 * byte);
    }
    out.push_back(DecodeOne(format, bits));
  }
  return out;
}

}  // namespace bitopk::kernels::reference
