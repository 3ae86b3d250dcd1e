// SPDX-License-Identifier: Apache-2.0
//
// The index codec: the bytes of plugin/WIRE_FORMAT.md, section 3, the same bytes as the plain
// reference for every kind of list, and a refusal of every stream that breaks the format.
#include "bitopk/kernels/indices.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "bitopk/kernels/codec_reference.h"
#include "bitopk/kernels/error.h"
#include "kernels/cpu/index_grammar.h"
#include "tests/support/index_lists.h"

namespace bitopk::kernels {
namespace {

using testing::BitString;
using testing::ClusteredIndices;
using testing::RandomIndices;
using testing::RandomIndicesExactly;
using ByteVector = std::vector<std::uint8_t>;
using Indices = std::vector<std::uint32_t>;

ByteVector Encode(const Indices& indices, std::size_t num_positions) {
  ByteVector out(MaxIndexBytes(indices.size(), num_positions));
  out.resize(EncodeIndices(indices, num_positions, out));
  return out;
}

Indices Decode(const ByteVector& stream, std::size_t num_indices, std::size_t num_positions) {
  IndexDecoder decoder(stream, num_indices, num_positions);
  Indices indices;
  std::vector<std::uint16_t> chunk(kChunkPositions);
  for (std::size_t c = 0; c < NumChunks(num_positions); ++c) {
    const std::size_t count = decoder.NextChunk(chunk.data());
    for (std::size_t i = 0; i < count; ++i) {
      indices.push_back(static_cast<std::uint32_t>(c * kChunkPositions + chunk[i]));
    }
  }
  return indices;
}

struct List {
  std::string name;
  Indices indices;
  std::size_t num_positions;
};

std::vector<List> AllKindsOfLists() {
  std::vector<List> lists;
  for (std::size_t n : {0, 1, 2, 1000, 65535, 65536, 65537, 200000}) {
    const std::string suffix = " of " + std::to_string(n);
    for (double density : {0.0, 0.00002, 0.001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999, 1.0}) {
      lists.push_back({"density " + std::to_string(density) + suffix,
                       RandomIndices(n, density, static_cast<unsigned>(n)), n});
    }
    lists.push_back({"clustered" + suffix, ClusteredIndices(n, static_cast<unsigned>(n)), n});
    if (n > 0) lists.push_back({"first" + suffix, {0}, n});
    if (n > 1) {
      const auto last = static_cast<std::uint32_t>(n - 1);
      lists.push_back({"last" + suffix, {last}, n});
      lists.push_back({"first and last" + suffix, {0, last}, n});
      Indices all_but_last = RandomIndices(n, 1.0, 0);
      all_but_last.pop_back();
      lists.push_back({"all but the last" + suffix, all_but_last, n});
    }
  }
  return lists;
}

TEST(IndexCodec, WritesTheWorkedExampleOfTheWireFormat) {
  EXPECT_EQ(Encode({3, 17, 18, 64, 130}, 200), (ByteVector{0x25, 0x8d, 0x28, 0x81, 0x38, 0x09}));
}

TEST(IndexCodec, ReadsTheWorkedExampleOfTheWireFormat) {
  EXPECT_EQ(Decode({0x25, 0x8d, 0x28, 0x81, 0x38, 0x09}, 5, 200), (Indices{3, 17, 18, 64, 130}));
}

TEST(IndexCodec, WritesTheBytesOfTheReference) {
  for (const List& list : AllKindsOfLists()) {
    SCOPED_TRACE(list.name);
    EXPECT_EQ(Encode(list.indices, list.num_positions),
              reference::EncodeIndices(list.indices, list.num_positions));
  }
}

TEST(IndexCodec, WritesTheBytesOfTheReferenceWhereTheFormChanges) {
  for (std::size_t n : {100, 4096, 65535, 65536}) {
    for (std::size_t count = 2; count < n; ++count) {
      if (SmallestCode(count, n) == SmallestCode(count - 1, n)) continue;
      for (std::size_t c : {count - 1, count}) {
        SCOPED_TRACE(std::to_string(c) + " of " + std::to_string(n));
        const Indices indices = RandomIndicesExactly(c, n, static_cast<unsigned>(c));
        ASSERT_EQ(indices.size(), c);
        EXPECT_EQ(Encode(indices, n), reference::EncodeIndices(indices, n));
      }
    }
  }
}

TEST(IndexCodec, ReadsWhatItWrote) {
  for (const List& list : AllKindsOfLists()) {
    SCOPED_TRACE(list.name);
    const ByteVector stream = Encode(list.indices, list.num_positions);
    EXPECT_EQ(Decode(stream, list.indices.size(), list.num_positions), list.indices);
  }
}

TEST(IndexCodec, StaysWithinTheAnnouncedBound) {
  for (const List& list : AllKindsOfLists()) {
    SCOPED_TRACE(list.name);
    EXPECT_LE(reference::EncodeIndices(list.indices, list.num_positions).size(),
              MaxIndexBytes(list.indices.size(), list.num_positions));
  }
}

TEST(IndexCodec, StaysWithinTheAnnouncedBoundWhenFullAndEmptyChunksAlternate) {
  const std::size_t n = 20 * kChunkPositions;
  Indices indices;
  for (std::size_t i = 0; i < n; ++i) {
    if (i / kChunkPositions % 2 == 1) indices.push_back(static_cast<std::uint32_t>(i));
  }
  EXPECT_EQ(Encode(indices, n), reference::EncodeIndices(indices, n));
  EXPECT_LE(reference::EncodeIndices(indices, n).size(), MaxIndexBytes(indices.size(), n));
}

TEST(IndexCodec, StaysWithinTheAnnouncedBoundWhenEverySecondChunkHasOneIndex) {
  Indices indices;
  for (std::uint32_t chunk = 1; chunk < 4000; chunk += 2) indices.push_back(chunk * 65536 + 7);
  const std::size_t n = 4000 * kChunkPositions;
  EXPECT_LE(reference::EncodeIndices(indices, n).size(), MaxIndexBytes(indices.size(), n));
}

TEST(IndexCodec, WritesNothingForAnEmptyUniverse) {
  EXPECT_TRUE(Encode({}, 0).empty());
  EXPECT_EQ(MaxIndexBytes(0, 0), 0U);
}

TEST(IndexCodec, CodesAnEmptyListOfTheLargestUniverseAsOneRun) {
  const std::size_t n = std::size_t{1} << 32;
  EXPECT_EQ(Encode({}, n), BitString().Put(15, 4).Put(0, 1).Put(65535, 16).bytes());
  EXPECT_TRUE(Decode(Encode({}, n), 0, n).empty());
}

TEST(IndexCodec, CodesTheEndsOfTheLargestUniverse) {
  const std::size_t n = std::size_t{1} << 32;
  const Indices ends = {0, 0x80000000U, 0xffffffffU};
  EXPECT_EQ(Encode(ends, n), reference::EncodeIndices(ends, n));
  EXPECT_EQ(Decode(Encode(ends, n), 3, n), ends);
}

TEST(IndexCodec, WritesNoByteBeyondItsOutput) {
  for (double density : {0.0, 0.0001, 0.01, 0.6, 1.0}) {
    const Indices indices = RandomIndices(200000, density, 1);
    const std::size_t max_bytes = MaxIndexBytes(indices.size(), 200000);
    ByteVector out(max_bytes + 64, 0xa5);
    EncodeIndices(indices, 200000, MutableBytes(out.data(), max_bytes));
    EXPECT_EQ(ByteVector(out.end() - 64, out.end()), ByteVector(64, 0xa5));
  }
}

TEST(IndexCodec, WritesToAnyAlignment) {
  const Indices indices = RandomIndices(200000, 0.01, 2);
  const ByteVector expected = Encode(indices, 200000);
  const std::size_t max_bytes = MaxIndexBytes(indices.size(), 200000);
  for (std::size_t offset = 1; offset < 8; ++offset) {
    ByteVector out(max_bytes + offset);
    EncodeIndices(indices, 200000, MutableBytes(out.data() + offset, max_bytes));
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                           out.begin() + static_cast<std::ptrdiff_t>(offset)));
  }
}

TEST(IndexCodec, TakesLessThanSixTenthsOfABitAboveTheEntropy) {
  for (double density : {0.001, 0.01, 0.05}) {
    const std::size_t n = 10'000'000;
    const Indices indices = RandomIndices(n, density, 3);
    const double p = static_cast<double>(indices.size()) / static_cast<double>(n);
    const double entropy = -(std::log2(p) + (1 - p) / p * std::log2(1 - p));
    const double bits = 8.0 * static_cast<double>(Encode(indices, n).size());
    // Beside Elias-Fano's own excess, a chunk's header of 8 bits and half of its count.
    const double header = 16.0 / (p * kChunkPositions);
    EXPECT_LT(bits / static_cast<double>(indices.size()), entropy + 0.6 + header) << density;
  }
}

// Headers for streams written by hand.
BitString Chunk(unsigned code, unsigned count) {
  const unsigned width = FloorLog2(count);
  return BitString().Put(code, 4).Put(width, 4).Put(count - (1U << width), width);
}
BitString ChunkRun(bool full, unsigned num_chunks) {
  return BitString().Put(15, 4).Put(full ? 1 : 0, 1).Put(num_chunks - 1, 16);
}

TEST(IndexDecoder, AcceptsABitmapWhereAnotherFormIsSmaller) {
  EXPECT_EQ(Decode(Chunk(14, 2).Put(0b1000000001, 100).bytes(), 2, 100), (Indices{0, 9}));
}

TEST(IndexDecoder, AcceptsRawPositionsWhereAnotherFormIsSmaller) {
  EXPECT_EQ(Decode(Chunk(13, 3).Put(0, 16).Put(7, 16).Put(99, 16).bytes(), 3, 100),
            (Indices{0, 7, 99}));
}

TEST(IndexDecoder, AcceptsAnyNumberOfLowBits) {
  for (unsigned low_bits = 0; low_bits <= 12; ++low_bits) {
    BitString stream = Chunk(low_bits, 2);
    stream.Put(5, low_bits).Put(99, low_bits);
    const unsigned first = 5U >> low_bits;
    const unsigned second = 99U >> low_bits;
    for (unsigned upper = 0; upper < 2 + (99U >> low_bits); ++upper) {
      stream.Put(upper == first || upper == second + 1 ? 1 : 0, 1);
    }
    EXPECT_EQ(Decode(stream.bytes(), 2, 100), (Indices{5, 99})) << low_bits;
  }
}

TEST(IndexDecoder, AcceptsMoreThanHalfOfAChunkWithoutLowBits) {
  // The last words of the upper parts are decoded near the end of the caller's buffer.
  const std::size_t count = 65535;
  BitString stream = Chunk(0, count);
  Indices all_but_one;
  for (std::uint32_t position = 0; position < 65536; ++position) {
    if (position > 0) stream.Put(0, 1);
    if (position == 40000) continue;
    stream.Put(1, 1);
    all_but_one.push_back(position);
  }
  EXPECT_EQ(Decode(stream.bytes(), count, 65536), all_but_one);
}

TEST(IndexDecoder, AcceptsRunsThatCouldHaveBeenMerged) {
  EXPECT_TRUE(Decode(ChunkRun(false, 1).Put(15, 4).Put(0, 17).bytes(), 0, 100000).empty());
}

TEST(IndexDecoder, AcceptsAFullChunkThatIsNotCodedAsARun) {
  EXPECT_EQ(Decode(Chunk(14, 3).Put(0b111, 3).bytes(), 3, 3), (Indices{0, 1, 2}));
}

// A stream that breaks the format: the reference refuses it too.
void ExpectRefused(const ByteVector& stream, std::size_t num_indices, std::size_t num_positions) {
  EXPECT_THROW(Decode(stream, num_indices, num_positions), WireFormatError);
  EXPECT_THROW(reference::DecodeIndices(stream, num_indices, num_positions), WireFormatError);
}

TEST(IndexDecoder, RejectsMoreIndicesThanPositions) {
  EXPECT_THROW(IndexDecoder({}, 4, 3), WireFormatError);
}

TEST(IndexDecoder, RejectsBytesOfAnEmptyUniverse) {
  const ByteVector one_byte = {0};
  EXPECT_THROW(IndexDecoder(one_byte, 0, 0), WireFormatError);
}

TEST(IndexDecoder, RejectsRawPositionsThatRepeat) {
  ExpectRefused(Chunk(13, 2).Put(7, 16).Put(7, 16).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsRawPositionsThatDescend) {
  ExpectRefused(Chunk(13, 3).Put(8, 16).Put(7, 16).Put(9, 16).bytes(), 3, 100);
}

TEST(IndexDecoder, RejectsARawPositionBeyondTheUniverse) {
  ExpectRefused(Chunk(13, 1).Put(100, 16).bytes(), 1, 100);
}

TEST(IndexDecoder, RejectsLowBitsThatRepeatUnderEqualUpperParts) {
  ExpectRefused(Chunk(6, 2).Put(5, 6).Put(5, 6).Put(0b011, 3).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsLowBitsThatDescendUnderEqualUpperParts) {
  ExpectRefused(Chunk(6, 2).Put(5, 6).Put(4, 6).Put(0b011, 3).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsLowBitsThatReachBeyondTheUniverse) {
  ExpectRefused(Chunk(6, 2).Put(5, 6).Put(36, 6).Put(0b101, 3).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsTooFewUpperParts) {
  ExpectRefused(Chunk(6, 2).Put(5, 6).Put(6, 6).Put(0b001, 3).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsTooManyUpperParts) {
  ExpectRefused(Chunk(6, 2).Put(5, 6).Put(6, 6).Put(0b111, 3).bytes(), 2, 100);
}

TEST(IndexDecoder, RejectsABitmapWithTooFewOnes) {
  ExpectRefused(Chunk(14, 3).Put(0b11, 100).bytes(), 3, 100);
}

TEST(IndexDecoder, RejectsABitmapWithTooManyOnes) {
  ExpectRefused(Chunk(14, 1).Put(0b11, 100).bytes(), 1, 100);
}

TEST(IndexDecoder, RejectsACountBeyondTheChunk) {
  ExpectRefused(Chunk(14, 4).Put(0b111, 3).Put(1, 1).bytes(), 3, 3);
}

TEST(IndexDecoder, RejectsACountBeyondTheAnnouncedIndices) {
  ExpectRefused(Chunk(13, 2).Put(7, 16).Put(8, 16).bytes(), 1, 100);
}

TEST(IndexDecoder, RejectsFewerIndicesThanAnnounced) {
  ExpectRefused(Chunk(13, 2).Put(7, 16).Put(8, 16).bytes(), 3, 100);
}

TEST(IndexDecoder, RejectsARunBeyondTheUniverse) {
  ExpectRefused(ChunkRun(false, 3).bytes(), 0, 2 * kChunkPositions);
}

TEST(IndexDecoder, RejectsAFullRunBeyondTheAnnouncedIndices) {
  ExpectRefused(ChunkRun(true, 2).bytes(), kChunkPositions, 2 * kChunkPositions);
}

TEST(IndexDecoder, RejectsPaddingThatIsNotZero) {
  for (unsigned bit = 5; bit < 8; ++bit) {
    ByteVector stream = ChunkRun(false, 1).bytes();
    stream.back() = static_cast<std::uint8_t>(stream.back() | 1U << bit);
    ExpectRefused(stream, 0, 100);
  }
}

TEST(IndexDecoder, RejectsALeftoverByte) {
  ByteVector stream = ChunkRun(false, 1).bytes();
  stream.push_back(0);
  ExpectRefused(stream, 0, 100);
}

TEST(IndexDecoder, RejectsEveryTruncation) {
  for (double density : {0.0001, 0.01, 0.5, 1.0}) {
    const std::size_t n = 70000;
    const Indices indices = RandomIndices(n, density, 4);
    const ByteVector stream = Encode(indices, n);
    const std::size_t step = stream.size() / 300 + 1;
    for (std::size_t num_bytes = 0; num_bytes < stream.size(); num_bytes += step) {
      // A vector of its own, so that AddressSanitizer sees a read beyond it.
      const ByteVector cut(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(num_bytes));
      EXPECT_THROW(Decode(cut, indices.size(), n), WireFormatError) << density << " " << num_bytes;
    }
  }
}

TEST(IndexDecoder, SaysWhatItGotAndExpected) {
  try {
    Decode(Chunk(13, 2).Put(7, 16).Put(8, 16).bytes(), 1, 100);
    FAIL() << "accepted";
  } catch (const WireFormatError& error) {
    EXPECT_STREQ(error.what(),
                 "IndexDecoder: too many indices in a chunk; got 2, expected at most 1");
  }
}

}  // namespace
}  // namespace bitopk::kernels
