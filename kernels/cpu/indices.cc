// SPDX-License-Identifier: Apache-2.0
//
// The index codec on the CPU, in portable C++ with 64-bit words. The loops over entries are free
// functions on raw memory (FindChunkEnd, PackLowBits, WriteOnes; FindOnes, AddLowBits,
// IsAscendingBelow), so that a SIMD variant replaces those and keeps the grammar, which lives in
// the two functions that call them.
#include "bitopk/kernels/indices.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <functional>

#include "bitopk/kernels/error.h"
#include "kernels/cpu/index_grammar.h"

namespace bitopk::kernels {
namespace {

static_assert(sizeof(std::size_t) >= 8, "universes of 2^32 positions need 64-bit sizes");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "streams are read as little-endian words");

constexpr std::size_t kSlotMask = kChunkPositions - 1;

// ---------------------------------------------------------------------------------------------
// Encoder

// Appends bits to a byte string, the first bit at the lowest position.
class BitWriter {
 public:
  explicit BitWriter(MutableBytes out)
      : begin_(out.data()), out_(out.data()), end_(out.data() + out.size()) {}

  // REQUIRES: num_bits <= 64, bits < 2^num_bits.
  void Put(std::uint64_t bits, unsigned num_bits) {
    pending_ |= bits << num_pending_;
    num_pending_ += num_bits;
    if (num_pending_ >= 64) {
      std::memcpy(out_, &pending_, 8);
      out_ += 8;
      num_pending_ -= 64;
      // Shifted twice because the whole shift may be 64, when all of `bits` went out.
      pending_ = bits >> 1 >> (num_bits - num_pending_ - 1);
    }
  }

  // For loops that keep the state elsewhere: `num_pending()` bits of `pending()` belong at
  // next_byte(), and the `bytes_left()` bytes from there on may be overwritten.
  std::uint8_t* next_byte() const { return out_; }
  std::size_t bytes_left() const { return static_cast<std::size_t>(end_ - out_); }
  std::uint64_t pending() const { return pending_; }
  unsigned num_pending() const { return num_pending_; }
  // REQUIRES: num_pending < 64, and `pending` is zero beyond them.
  void Set(std::uint8_t* next_byte, std::uint64_t pending, unsigned num_pending) {
    out_ = next_byte;
    pending_ = pending;
    num_pending_ = num_pending;
  }

  // Pads the last byte with zeros and returns the bytes written. Call once.
  std::size_t Finish() {
    const std::size_t num_bytes = (num_pending_ + 7) / 8;
    if (num_bytes > 0) std::memcpy(out_, &pending_, num_bytes);  // an empty output may be null
    return static_cast<std::size_t>(out_ - begin_) + num_bytes;
  }

 private:
  std::uint8_t* begin_;
  std::uint8_t* out_;
  std::uint8_t* end_;
  std::uint64_t pending_ = 0;
  unsigned num_pending_ = 0;  // < 64
};

// How many of `indices` (shape [n], ascending) are below `end`. `guess` is where to look first:
// near the answer, a handful of steps; anywhere, O(log n).
std::size_t FindChunkEnd(const std::uint32_t* indices, std::size_t n, std::uint64_t end,
                         std::size_t guess) {
  std::size_t low = 0;   // everything before it is below `end`
  std::size_t high = n;  // everything from it on is not
  std::size_t step = guess / 8 + 8;
  std::size_t probe = std::min(guess, n);
  if (probe < n && indices[probe] < end) {
    while (probe < n && indices[probe] < end) {
      low = probe + 1;
      probe = n - probe > step ? probe + step : n;
      step *= 2;
    }
    high = probe;
  } else {
    while (probe > 0 && indices[probe - 1] >= end) {
      high = probe - 1;
      probe = probe > step ? probe - step : 0;
      step *= 2;
    }
    low = probe;
  }
  // Binary search without unpredictable branches.
  const std::uint32_t* base = indices + low;
  std::size_t left = high - low;
  while (left > 0) {
    const std::size_t half = (left + 1) / 2;
    base = base[half - 1] < end ? base + half : base;
    left -= half;
  }
  return static_cast<std::size_t>(base - indices);
}

// Two neighbours of a list, the first in the low half.
std::uint64_t LoadPair(const std::uint32_t* indices) {
  std::uint64_t pair;
  std::memcpy(&pair, indices, 8);
  return pair;
}

// Appends the low `low_bits` bits of each of `indices` (shape [n]). REQUIRES: 1 <= low_bits <= 16.
void PackLowBits(const std::uint32_t* indices, std::size_t n, unsigned low_bits,
                 BitWriter* writer) {
  BitWriter out = *writer;  // a local copy stays in registers
  const std::uint64_t mask = (std::uint64_t{1} << low_bits) - 1;
  const std::uint64_t both = mask | mask << 32;
  const std::uint64_t packed = mask | mask << low_bits;
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const std::uint64_t first = LoadPair(indices + i) & both;
    const std::uint64_t second = LoadPair(indices + i + 2) & both;
    out.Put(((first | first >> (32 - low_bits)) & packed) |
                ((second | second >> (32 - low_bits)) & packed) << 2 * low_bits,
            4 * low_bits);
  }
  for (; i < n; ++i) out.Put(indices[i] & mask, low_bits);
  *writer = out;
}

// Appends `num_bits` bits that are 1 at place (indices[i] mod 65536) / 2^low_bits + Rank * i for
// each i in [0, n), and 0 elsewhere. REQUIRES: places ascend strictly below num_bits; n >= 1;
// low_bits <= 12.
template <unsigned Rank>
void WriteOnes(const std::uint32_t* indices, std::size_t n, unsigned low_bits, std::size_t num_bits,
               BitWriter* writer) {
  constexpr std::size_t kGroup = 8;
  constexpr std::uint64_t kBoth = 0x0000000100000001U;
  // Bits count from the writer's next byte. `word` holds those from `begin`, a multiple of 8, on.
  std::uint8_t* const out = writer->next_byte();
  const std::size_t offset = writer->num_pending();
  const std::size_t end = offset + num_bits;
  const std::size_t writable_bits = 8 * writer->bytes_left();
  std::uint64_t word = writer->pending();
  std::size_t begin = 0;
  std::size_t i = 0;
  while (i < n) {
    const auto place = [&](std::size_t j) {
      return offset + Rank * j + ((indices[j] & kSlotMask) >> low_bits);
    };
    const std::size_t first = place(i);
    const std::size_t group_begin = first & ~std::size_t{7};
    if (i + kGroup <= n && group_begin - begin < 64 && begin + 64 <= writable_bits &&
        place(i + kGroup - 1) - group_begin < 64) {
      // Near enough to share a word. The store writes too far, and later ones repair that: so
      // whether a word is full needs no branch, which would be hard to predict.
      std::memcpy(out + begin / 8, &word, 8);
      word >>= group_begin - begin;
      begin = group_begin;
      // Places two by two, in halves of 32 bits. Only their last 6 bits count: the low bits that
      // the shift moves from one half to the other arrive above bit 19 and carry nothing on.
      std::uint64_t add = ((offset + Rank * i - begin) & 63) * kBoth + (std::uint64_t{Rank} << 32);
      for (std::size_t j = 0; j < kGroup; j += 2, add += 2 * Rank * kBoth) {
        const std::uint64_t slots = LoadPair(indices + i + j) & kSlotMask * kBoth;
        const std::uint64_t places = (slots >> low_bits) + add;
        word |= std::uint64_t{1} << (places & 63) | std::uint64_t{1} << (places >> 32 & 63);
      }
      i += kGroup;
    } else {
      for (; first - begin >= 64; begin += 64) {
        std::memcpy(out + begin / 8, &word, 8);
        word = 0;
      }
      word |= std::uint64_t{1} << (first - begin);
      ++i;
    }
  }
  for (; end - begin >= 64; begin += 64) {
    std::memcpy(out + begin / 8, &word, 8);
    word = 0;
  }
  writer->Set(out + begin / 8, word, static_cast<unsigned>(end - begin));
}

void PutRuns(bool full, std::size_t num_chunks, BitWriter* writer) {
  while (num_chunks > 0) {
    const std::size_t run = std::min(num_chunks, kMaxRunChunks);
    writer->Put(kRunCode | (full ? 1U : 0U) << kCodeBits, kCodeBits + 1);
    writer->Put(run - 1, kRunBits);
    num_chunks -= run;
  }
}

// One chunk that is neither empty nor full, its positions being `indices` (shape [n]) modulo 65536.
void PutChunk(const std::uint32_t* indices, std::size_t n, std::size_t chunk_positions,
              BitWriter* writer) {
  const unsigned code = SmallestCode(n, chunk_positions);
  const unsigned width = FloorLog2(n);
  writer->Put(code | width << kCodeBits, kCodeBits + kCountWidthBits);
  writer->Put(n - (std::size_t{1} << width), width);
  if (code == kRawCode) {
    PackLowBits(indices, n, kRawBits, writer);
  } else if (code == kBitmapCode) {
    WriteOnes</*Rank=*/0>(indices, n, /*low_bits=*/0, chunk_positions, writer);
  } else {
    if (code > 0) PackLowBits(indices, n, code, writer);
    WriteOnes</*Rank=*/1>(indices, n, code, UpperBits(n, chunk_positions, code), writer);
  }
}

// Whether a chunk that starts at `start` is full, its first position being indices[0].
// REQUIRES: indices ascend strictly, n >= 1, indices[0] >= start.
bool IsFull(const std::uint32_t* indices, std::size_t n, std::uint64_t start,
            std::size_t chunk_positions) {
  return indices[0] == start && n >= chunk_positions &&
         indices[chunk_positions - 1] == start + chunk_positions - 1;
}

// ---------------------------------------------------------------------------------------------
// Decoder

std::uint64_t Load64(const std::uint8_t* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

// 64 bits of `in` from `bit_position` on; bits beyond the end read as 0.
std::uint64_t Peek64(Bytes in, std::size_t bit_position) {
  const std::size_t byte = bit_position / 8;
  const unsigned shift = bit_position % 8;
  if (in.size() >= 9 && byte <= in.size() - 9) {
    const std::uint64_t next = in.data()[byte + 8];
    return Load64(in.data() + byte) >> shift | next << 1 << (63 - shift);
  }
  std::uint64_t low = 0;
  std::uint64_t next = 0;
  if (byte < in.size())
    std::memcpy(&low, in.data() + byte, std::min<std::size_t>(8, in.size() - byte));
  if (in.size() > 8 && byte < in.size() - 8) next = in.data()[byte + 8];
  return low >> shift | next << 1 << (63 - shift);
}

// For each byte: the places of its ones, less `Rank` times the number of ones before each, as four
// and four lanes of 16 bits (0 where there is none), and how many there are.
template <unsigned Rank>
struct OnesOfByte {
  std::uint64_t places[256][2] = {};
  std::uint8_t count[256] = {};

  constexpr OnesOfByte() {
    for (unsigned byte = 0; byte < 256; ++byte) {
      unsigned found = 0;
      for (unsigned bit = 0; bit < 8; ++bit) {
        if ((byte >> bit & 1) == 0) continue;
        const std::uint64_t place = bit - Rank * found;
        places[byte][found / 4] |= place << (found % 4 * 16);
        ++found;
      }
      count[byte] = static_cast<std::uint8_t>(found);
    }
  }
};
template <unsigned Rank>
constexpr OnesOfByte<Rank> kOnesOfByte{};

// Looks for exactly `n` ones among the `num_bits` bits from `bit_position` on, and writes the place
// of each, less `Rank` times the number of ones before it, to `out` (shape [kChunkPositions]).
// Returns false if there are more or fewer. REQUIRES: the bits are within `in`; of `n` such ones,
// each result fits 16 bits.
template <unsigned Rank>
bool FindOnes(Bytes in, std::size_t bit_position, std::size_t num_bits, std::size_t n,
              std::uint16_t* out) {
  std::size_t found = 0;
  for (std::size_t start = 0; start < num_bits; start += 64) {
    std::uint64_t word = Peek64(in, bit_position + start);
    if (num_bits - start < 64) word &= (std::uint64_t{1} << (num_bits - start)) - 1;
    if (found + 64 + 8 <= kChunkPositions) {
      // A byte at a time and without a branch: what is written too much is overwritten by the next.
      for (unsigned i = 0; i < 64; i += 8, word >>= 8) {
        const std::uint64_t* places = kOnesOfByte<Rank>.places[word & 0xff];
        const std::uint64_t base = (start + i - Rank * found) * 0x0001000100010001U;
        const std::uint64_t lanes[2] = {places[0] + base, places[1] + base};
        std::memcpy(out + found, lanes, 16);
        found += kOnesOfByte<Rank>.count[word & 0xff];
      }
    } else {
      for (; word != 0 && found < kChunkPositions; word &= word - 1) {
        const auto bit = static_cast<unsigned>(__builtin_ctzll(word));
        out[found] = static_cast<std::uint16_t>(start + bit - Rank * found);
        ++found;
      }
      if (word != 0) return false;
    }
  }
  return found == n;
}

// For each i in [0, n): out[i] = out[i] * 2^low_bits + the i-th field of `low_bits` bits from
// `bit_position` on. REQUIRES: the bits are within `in`, 1 <= low_bits <= 12, and each result fits.
void AddLowBits(Bytes in, std::size_t bit_position, unsigned low_bits, std::size_t n,
                std::uint16_t* out) {
  const std::uint64_t mask = (std::uint64_t{1} << low_bits) - 1;
  std::size_t i = 0;
  // Four fields (at most 48 bits, and up to 7 before them) go from one word to four lanes of 16
  // bits, by halves.
  const unsigned spread = 16 - low_bits;
  const std::uint64_t first_pair = mask | mask << low_bits;
  const std::uint64_t second_pair = first_pair << 2 * low_bits;
  const std::uint64_t even_lanes = mask | mask << 32;
  const std::uint64_t odd_fields = even_lanes << low_bits;
  for (; i + 4 <= n; i += 4, bit_position += 4 * low_bits) {
    if (in.size() < 8 || bit_position / 8 > in.size() - 8) break;
    std::uint64_t lanes = Load64(in.data() + bit_position / 8) >> (bit_position % 8);
    lanes = (lanes & first_pair) | (lanes & second_pair) << 2 * spread;
    lanes = (lanes & even_lanes) | (lanes & odd_fields) << spread;
    std::uint64_t upper;
    std::memcpy(&upper, out + i, 8);
    lanes |= upper << low_bits;
    std::memcpy(out + i, &lanes, 8);
  }
  for (; i < n; ++i, bit_position += low_bits) {
    const std::uint64_t low = Peek64(in, bit_position) & mask;
    out[i] = static_cast<std::uint16_t>(std::uint64_t{out[i]} << low_bits | low);
  }
}

// Whether `positions` (shape [n], n >= 1) ascend strictly and all are below `chunk_positions`.
bool IsAscendingBelow(const std::uint16_t* positions, std::size_t n, std::size_t chunk_positions) {
  std::uint16_t descents = 0;
  for (std::size_t i = 1; i < n; ++i) {
    descents |= static_cast<std::uint16_t>(positions[i] <= positions[i - 1]);
  }
  return descents == 0 && positions[n - 1] < chunk_positions;
}

}  // namespace

std::size_t MaxIndexBytes(std::size_t num_indices, std::size_t num_positions) {
  const std::size_t num_chunks = NumChunks(num_positions);
  const std::size_t num_runs_at_least = num_chunks / kMaxRunChunks + 1;
  // Each chunk with entries costs a header or a run, and may end a run of empty ones before it.
  const std::size_t busy_chunks = std::min(num_indices, num_chunks);
  const std::size_t header_bits =
      busy_chunks * (kMaxChunkHeaderBits + kRunHeaderBits) + num_runs_at_least * kRunHeaderBits;
  const std::size_t body_bits =
      num_indices > num_positions / kRawBits ? num_positions : num_indices * std::size_t{kRawBits};
  return num_positions == 0 ? 0 : (header_bits + body_bits + 7) / 8;
}

std::size_t EncodeIndices(Span<const std::uint32_t> indices, std::size_t num_positions,
                          MutableBytes out) {
  assert(num_positions <= std::size_t{1} << 32);
  assert(out.size() >= MaxIndexBytes(indices.size(), num_positions));
  assert(std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) ==
         indices.end());
  assert(indices.empty() || indices[indices.size() - 1] < num_positions);

  BitWriter writer(out);
  const std::uint32_t* next = indices.data();
  std::size_t left = indices.size();
  std::size_t guess = 0;
  std::size_t chunk = 0;
  const std::size_t num_chunks = NumChunks(num_positions);
  const auto chunk_positions = [num_positions](std::size_t c) {
    return std::min(kChunkPositions, num_positions - c * kChunkPositions);
  };
  while (chunk < num_chunks) {
    const std::size_t next_busy = left == 0 ? num_chunks : *next / kChunkPositions;
    PutRuns(/*full=*/false, next_busy - chunk, &writer);
    chunk = next_busy;

    const std::size_t first_full = chunk;
    while (left > 0 && IsFull(next, left, chunk * kChunkPositions, chunk_positions(chunk))) {
      next += chunk_positions(chunk);
      left -= chunk_positions(chunk);
      ++chunk;
    }
    PutRuns(/*full=*/true, chunk - first_full, &writer);

    if (left > 0 && *next / kChunkPositions == chunk) {
      const std::size_t count =
          FindChunkEnd(next, left, (chunk + std::uint64_t{1}) * kChunkPositions, guess);
      PutChunk(next, count, chunk_positions(chunk), &writer);
      next += count;
      left -= count;
      guess = count;
      ++chunk;
    }
  }
  return writer.Finish();
}

IndexDecoder::IndexDecoder(Bytes in, std::size_t num_indices, std::size_t num_positions)
    : in_(in), indices_left_(num_indices), positions_left_(num_positions) {
  if (num_indices > num_positions) {
    throw WireFormatError(internal::StrCat("IndexDecoder: more indices than positions; got ",
                                           num_indices, " of ", num_positions));
  }
  if (num_positions == 0) CheckEnd();
}

std::size_t IndexDecoder::NextChunk(std::uint16_t* out) {
  assert(positions_left_ > 0);
  const std::size_t chunk_positions = std::min(kChunkPositions, positions_left_);
  const std::size_t count = DecodeChunk(chunk_positions, out);
  indices_left_ -= count;
  positions_left_ -= chunk_positions;
  if (positions_left_ == 0) CheckEnd();
  return count;
}

// Decodes one chunk and returns its count, which is at most indices_left_.
std::size_t IndexDecoder::DecodeChunk(std::size_t chunk_positions, std::uint16_t* out) {
  unsigned code = kRunCode;
  if (run_chunks_left_ == 0) {
    code = static_cast<unsigned>(ReadBits(kCodeBits));
    if (code == kRunCode) StartRun();
  }
  if (code == kRunCode) {
    --run_chunks_left_;
    if (!run_is_full_) return 0;
    for (std::size_t i = 0; i < chunk_positions; ++i) out[i] = static_cast<std::uint16_t>(i);
    return chunk_positions;
  }

  const auto width = static_cast<unsigned>(ReadBits(kCountWidthBits));
  const std::size_t count = std::size_t{1} << width | ReadBits(width);
  const std::size_t max_count = std::min(chunk_positions, indices_left_);
  if (count > max_count) {
    throw WireFormatError(internal::StrCat("IndexDecoder: too many indices in a chunk; got ", count,
                                           ", expected at most ", max_count));
  }
  bool found = true;
  if (code == kRawCode) {
    RequireBits(count * kRawBits);
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = static_cast<std::uint16_t>(Peek64(in_, bit_position_ + i * kRawBits));
    }
    bit_position_ += count * kRawBits;
  } else if (code == kBitmapCode) {
    RequireBits(chunk_positions);
    found = FindOnes</*Rank=*/0>(in_, bit_position_, chunk_positions, count, out);
    bit_position_ += chunk_positions;
  } else {
    const std::size_t upper_bits = UpperBits(count, chunk_positions, code);
    RequireBits(count * code + upper_bits);
    found = FindOnes</*Rank=*/1>(in_, bit_position_ + count * code, upper_bits, count, out);
    if (found && code > 0) AddLowBits(in_, bit_position_, code, count, out);
    bit_position_ += count * code + upper_bits;
  }
  if (!found || !IsAscendingBelow(out, count, chunk_positions)) {
    throw WireFormatError(internal::StrCat("IndexDecoder: expected ", count,
                                           " strictly ascending positions below ", chunk_positions,
                                           ", got others (code ", code, ")"));
  }
  return count;
}

void IndexDecoder::StartRun() {
  run_is_full_ = ReadBits(1) != 0;
  run_chunks_left_ = ReadBits(kRunBits) + 1;
  if (run_chunks_left_ > NumChunks(positions_left_)) {
    throw WireFormatError(internal::StrCat("IndexDecoder: run beyond the end; got ",
                                           run_chunks_left_, " chunks, expected at most ",
                                           NumChunks(positions_left_)));
  }
  const std::size_t run_positions = std::min(run_chunks_left_ * kChunkPositions, positions_left_);
  if (run_is_full_ && run_positions > indices_left_) {
    throw WireFormatError(internal::StrCat("IndexDecoder: too many indices in a run; got ",
                                           run_positions, ", expected at most ", indices_left_));
  }
}

std::uint64_t IndexDecoder::ReadBits(unsigned num_bits) {
  RequireBits(num_bits);
  const std::uint64_t word = Peek64(in_, bit_position_);
  bit_position_ += num_bits;
  return word & ((std::uint64_t{1} << num_bits) - 1);
}

void IndexDecoder::RequireBits(std::size_t num_bits) const {
  const std::size_t bits_left = in_.size() * 8 - bit_position_;
  if (num_bits > bits_left) {
    throw WireFormatError(internal::StrCat("IndexDecoder: stream ends early; got ", bits_left,
                                           " more bits, expected ", num_bits));
  }
}

void IndexDecoder::CheckEnd() const {
  if (indices_left_ != 0) {
    throw WireFormatError(
        internal::StrCat("IndexDecoder: too few indices; expected ", indices_left_, " more"));
  }
  const std::size_t bits_left = in_.size() * 8 - bit_position_;
  if (bits_left >= 8 || Peek64(in_, bit_position_) != 0) {
    throw WireFormatError(
        internal::StrCat("IndexDecoder: expected the end of the stream and zero bits "
                         "up to the next byte, got ",
                         bits_left, " more bits"));
  }
}

}  // namespace bitopk::kernels
