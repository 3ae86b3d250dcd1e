// SPDX-License-Identifier: Apache-2.0
//
// Packets: the bytes of plugin/WIRE_FORMAT.md, section 2, and what the reader refuses.
#include "bitopk/packet.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "bitopk/kernels/error.h"
#include "tests/support/index_lists.h"

namespace bitopk {
namespace {

using kernels::kChunkPositions;
using kernels::ValueFormat;
using ByteVector = std::vector<std::uint8_t>;

struct Entries {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};

ByteVector Write(Entries* entries, std::size_t num_positions, ValueFormat format) {
  ByteVector out(MaxPacketBytes(entries->indices.size(), num_positions, format));
  out.resize(WritePacket(entries->indices, entries->values, num_positions, format, out));
  return out;
}

Entries ReadAll(PacketReader* reader, std::size_t num_positions) {
  Entries entries;
  std::vector<std::uint16_t> positions(kChunkPositions);
  std::vector<float> values(kChunkPositions);
  for (std::size_t c = 0; c < kernels::NumChunks(num_positions); ++c) {
    const std::size_t count = reader->NextChunk(positions.data(), values.data());
    for (std::size_t i = 0; i < count; ++i) {
      entries.indices.push_back(static_cast<std::uint32_t>(c * kChunkPositions + positions[i]));
      entries.values.push_back(values[i]);
    }
  }
  return entries;
}

Entries RandomEntries(std::size_t num_positions, double density, unsigned seed) {
  Entries entries;
  entries.indices = testing::RandomIndices(num_positions, density, seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < entries.indices.size(); ++i) entries.values.push_back(normal(random));
  return entries;
}

constexpr std::size_t kExamplePositions = 200000;

ByteVector ExampleBytes() {
  return {0x02, 0x00, 0x00, 0x00, 0x0b, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00,
          0x00, 0x2f, 0x00, 0xa0, 0x43, 0x01, 0xc0, 0xff, 0xff, 0x03, 0x00,
          0x00, 0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x20, 0xc0};
}

TEST(Packet, IsTheWorkedExampleOfTheWireFormat) {
  Entries entries = {{131077, 196607}, {1.0F, -2.5F}};
  EXPECT_EQ(Write(&entries, kExamplePositions, ValueFormat::kFloat32), ExampleBytes());
}

TEST(Packet, ReadsTheWorkedExampleOfTheWireFormat) {
  const ByteVector message = ExampleBytes();
  PacketReader reader(message, kExamplePositions, 2, ValueFormat::kFloat32);
  const Entries entries = ReadAll(&reader, kExamplePositions);
  EXPECT_EQ(entries.indices, (std::vector<std::uint32_t>{131077, 196607}));
  EXPECT_EQ(entries.values, (std::vector<float>{1.0F, -2.5F}));
}

TEST(Packet, ReturnsWhatTheSenderWasLeftWith) {
  for (ValueFormat format :
       {ValueFormat::kFloat32, ValueFormat::kFloat16, ValueFormat::kBfloat16}) {
    for (std::size_t n : {1, 1000, 65536, 65537, 300000}) {
      Entries sent = RandomEntries(n, 0.03, static_cast<unsigned>(n));
      const ByteVector message = Write(&sent, n, format);
      PacketReader reader(message, n, sent.indices.size(), format);
      const Entries received = ReadAll(&reader, n);
      EXPECT_EQ(received.indices, sent.indices);
      EXPECT_EQ(received.values, sent.values);
    }
  }
}

TEST(Packet, RoundsTheValuesOfTheSenderInNarrowFormats) {
  Entries entries = {{0, 1}, {2049.0F, 1e30F}};
  Write(&entries, 2, ValueFormat::kFloat16);
  EXPECT_EQ(entries.values, (std::vector<float>{2048.0F, 65504.0F}));
}

TEST(Packet, MayHoldNoEntries) {
  for (std::size_t n : {0, 1, 100000}) {
    Entries none;
    const ByteVector message = Write(&none, n, ValueFormat::kFloat32);
    PacketReader reader(message, n, 0, ValueFormat::kFloat32);
    EXPECT_EQ(reader.num_entries(), 0U);
    EXPECT_TRUE(ReadAll(&reader, n).indices.empty());
  }
}

TEST(Packet, IsFollowedByTheNextOne) {
  Entries first = RandomEntries(70000, 0.01, 1);
  Entries second = RandomEntries(500, 0.1, 2);
  ByteVector message = Write(&first, 70000, ValueFormat::kFloat16);
  const std::size_t first_bytes = message.size();
  const ByteVector next = Write(&second, 500, ValueFormat::kFloat32);
  message.insert(message.end(), next.begin(), next.end());

  const Bytes bytes = message;
  PacketReader reader(bytes, 70000, 70000, ValueFormat::kFloat16);
  EXPECT_EQ(reader.packet_bytes(), first_bytes);
  EXPECT_EQ(ReadAll(&reader, 70000).values, first.values);
  reader = PacketReader(bytes.subspan(first_bytes, next.size()), 500, 500, ValueFormat::kFloat32);
  EXPECT_EQ(reader.packet_bytes(), next.size());
  EXPECT_EQ(ReadAll(&reader, 500).values, second.values);
}

TEST(WritePacket, RefusesAnotherNumberOfValues) {
  Entries entries = {{0, 1}, {1.0F}};
  EXPECT_THROW(Write(&entries, 2, ValueFormat::kFloat32), InvalidArgumentError);
}

TEST(WritePacket, RefusesTooLittleRoom) {
  Entries entries = {{0, 1}, {1.0F, 2.0F}};
  ByteVector out(MaxPacketBytes(2, 2, ValueFormat::kFloat32) - 1);
  EXPECT_THROW(WritePacket(entries.indices, entries.values, 2, ValueFormat::kFloat32, out),
               InvalidArgumentError);
}

TEST(WritePacket, RefusesMoreThanTwoToThe32Positions) {
  Entries none;
  EXPECT_THROW(Write(&none, (std::size_t{1} << 32) + 1, ValueFormat::kFloat32),
               InvalidArgumentError);
}

// Reads a message that the example became by a change, up to the end.
void ReadExample(const ByteVector& message, std::size_t max_entries = 2,
                 ValueFormat format = ValueFormat::kFloat32,
                 std::size_t num_positions = kExamplePositions) {
  PacketReader reader(message, num_positions, max_entries, format);
  ReadAll(&reader, num_positions);
}

ByteVector ExampleWith(std::size_t offset, std::uint8_t byte) {
  ByteVector message = ExampleBytes();
  message[offset] = byte;
  return message;
}

TEST(PacketReader, RejectsEveryTruncation) {
  for (std::size_t num_bytes = 0; num_bytes < ExampleBytes().size(); ++num_bytes) {
    ByteVector message = ExampleBytes();
    message.resize(num_bytes);
    message.shrink_to_fit();
    EXPECT_THROW(PacketReader(message, kExamplePositions, 2, ValueFormat::kFloat32),
                 WireFormatError)
        << num_bytes;
  }
}

TEST(PacketReader, RejectsAnotherVersion) {
  EXPECT_THROW(ReadExample(ExampleWith(9, 2)), WireFormatError);
}

TEST(PacketReader, RejectsAnotherValueFormat) {
  EXPECT_THROW(ReadExample(ExampleBytes(), 2, ValueFormat::kFloat16), WireFormatError);
}

TEST(PacketReader, RejectsReservedBytesThatAreNotZero) {
  EXPECT_THROW(ReadExample(ExampleWith(10, 1)), WireFormatError);
  EXPECT_THROW(ReadExample(ExampleWith(11, 1)), WireFormatError);
}

TEST(PacketReader, RejectsMoreEntriesThanTheSenderMayKeep) {
  EXPECT_THROW(ReadExample(ExampleBytes(), 1), WireFormatError);
}

TEST(PacketReader, RejectsMoreEntriesThanPositions) {
  EXPECT_THROW(ReadExample(ExampleBytes(), 2, ValueFormat::kFloat32, 1), WireFormatError);
}

TEST(PacketReader, RejectsTheLargestCountsWithoutOverflow) {
  ByteVector message = ExampleBytes();
  std::fill_n(message.begin(), 8, std::uint8_t{0xff});
  const std::size_t all = std::size_t{1} << 32;
  EXPECT_THROW(PacketReader(message, all, all, ValueFormat::kFloat32), WireFormatError);
}

TEST(PacketReader, RejectsAnIndexBeyondTheUnit) {
  EXPECT_THROW(ReadExample(ExampleBytes(), 2, ValueFormat::kFloat32, 196607), WireFormatError);
}

TEST(PacketReader, RejectsAnIndexStreamOfAnotherLength) {
  // One entry less of 4 bytes, and the index stream longer by as much, is of the right size in all.
  ByteVector message = ExampleWith(0, 1);
  message[4] = 0x0f;
  EXPECT_THROW(ReadExample(message), WireFormatError);
}

TEST(PacketReader, SaysWhatItGotAndExpected) {
  try {
    ReadExample(ExampleWith(9, 7));
    FAIL() << "accepted";
  } catch (const WireFormatError& error) {
    EXPECT_STREQ(error.what(), "PacketReader: version of the packet; got 7, expected 1");
  }
}

}  // namespace
}  // namespace bitopk
