// SPDX-License-Identifier: Apache-2.0
//
// Broken packets and index streams, seeded and so the same in every run: each either decodes to a
// list that keeps all promises or throws WireFormatError, and index streams exactly as the plain
// reference decides. Run it under AddressSanitizer: every input lies in an allocation of its own
// size.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>

#include "bitopk/kernels/codec_reference.h"
#include "bitopk/kernels/error.h"
#include "bitopk/packet.h"
#include "tests/support/index_lists.h"

namespace bitopk {
namespace {

using kernels::kChunkPositions;
using kernels::ValueFormat;
using ByteVector = std::vector<std::uint8_t>;
using Indices = std::vector<std::uint32_t>;
using Random = std::mt19937_64;

constexpr std::size_t kUniverses[] = {1, 2, 37, 1000, 65535, 65536, 65537, 140000};
constexpr double kDensities[] = {0.0, 0.0005, 0.01, 0.1, 0.6, 1.0};

std::size_t Below(std::size_t end, Random* random) { return (*random)() % end; }

// `bytes` after a few changes of the kinds that links, bugs and attackers make.
ByteVector Mutate(ByteVector bytes, Random* random) {
  const std::size_t num_changes = 1 + Below(3, random);
  for (std::size_t change = 0; change < num_changes; ++change) {
    const std::size_t at = bytes.empty() ? 0 : Below(bytes.size(), random);
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (Below(6, random)) {
      case 0:  // cut
        bytes.resize(at);
        break;
      case 1:  // one bit, often in the header
        if (!bytes.empty()) {
          const std::size_t early =
              Below(4, random) == 0 ? at : Below(std::min<std::size_t>(bytes.size(), 24), random);
          bytes[early] = static_cast<std::uint8_t>(bytes[early] ^ 1U << Below(8, random));
        }
        break;
      case 2:  // one byte
        if (!bytes.empty()) *place = static_cast<std::uint8_t>((*random)());
        break;
      case 3:  // extremes
        if (!bytes.empty()) *place = Below(2, random) == 0 ? 0x00 : 0xff;
        break;
      case 4:  // a byte more
        bytes.insert(place, static_cast<std::uint8_t>((*random)()));
        break;
      case 5:  // a byte less
        if (!bytes.empty()) bytes.erase(place);
        break;
    }
  }
  return bytes;
}

ByteVector RandomBytes(std::size_t num_bytes, Random* random) {
  ByteVector bytes(num_bytes);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>((*random)());
  return bytes;
}

// Chunk buffers of exactly the size that the interface asks for.
struct Chunk {
  std::unique_ptr<std::uint16_t[]> positions{new std::uint16_t[kChunkPositions]};
  std::unique_ptr<float[]> values{new float[kChunkPositions]};
};

// The list in a stream, or false if the stream was refused.
bool TryDecode(const ByteVector& stream, std::size_t num_indices, std::size_t num_positions,
               Chunk* chunk, Indices* indices) {
  indices->clear();
  try {
    kernels::IndexDecoder decoder(stream, num_indices, num_positions);
    for (std::size_t c = 0; c < kernels::NumChunks(num_positions); ++c) {
      const std::size_t count = decoder.NextChunk(chunk->positions.get());
      for (std::size_t i = 0; i < count; ++i) {
        indices->push_back(static_cast<std::uint32_t>(c * kChunkPositions + chunk->positions[i]));
      }
    }
    return true;
  } catch (const WireFormatError&) {
    return false;
  }
}

bool TryReference(const ByteVector& stream, std::size_t num_indices, std::size_t num_positions,
                  Indices* indices) {
  try {
    *indices = kernels::reference::DecodeIndices(stream, num_indices, num_positions);
    return true;
  } catch (const WireFormatError&) {
    return false;
  }
}

void ExpectSameVerdict(const ByteVector& stream, std::size_t num_indices, std::size_t num_positions,
                       Chunk* chunk, int* num_accepted) {
  Indices got;
  Indices expected;
  ByteVector exact(stream.begin(), stream.end());
  exact.shrink_to_fit();
  const bool accepted = TryDecode(exact, num_indices, num_positions, chunk, &got);
  ASSERT_EQ(accepted, TryReference(exact, num_indices, num_positions, &expected));
  if (!accepted) return;
  ++*num_accepted;
  ASSERT_EQ(got, expected);
}

TEST(IndexStreamFuzz, AgreesWithTheReferenceOnMutatedStreams) {
  Chunk chunk;
  int num_accepted = 0;
  for (std::size_t n : kUniverses) {
    for (double density : kDensities) {
      Random random(n * 31 + static_cast<std::size_t>(density * 10000));
      const Indices indices = testing::RandomIndices(n, density, static_cast<unsigned>(n));
      const ByteVector stream = kernels::reference::EncodeIndices(indices, n);
      for (int round = 0; round < 60; ++round) {
        SCOPED_TRACE(std::to_string(n) + " positions, density " + std::to_string(density) +
                     ", round " + std::to_string(round));
        const std::size_t announced = indices.size() + (Below(8, &random) == 0 ? 1 : 0);
        ASSERT_NO_FATAL_FAILURE(
            ExpectSameVerdict(Mutate(stream, &random), announced, n, &chunk, &num_accepted));
      }
    }
  }
  EXPECT_GT(num_accepted, 0) << "no mutation kept a stream valid: too rough to test acceptance";
}

TEST(IndexStreamFuzz, AgreesWithTheReferenceOnRandomBytes) {
  Random random(1);
  Chunk chunk;
  int num_accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    const std::size_t n = 1 + Below(12, &random);
    const ByteVector stream = RandomBytes(Below(8, &random), &random);
    ASSERT_NO_FATAL_FAILURE(
        ExpectSameVerdict(stream, Below(n + 1, &random), n, &chunk, &num_accepted));
  }
  EXPECT_GT(num_accepted, 0);
}

// Reads a packet up to its end and checks the promises of the reader. False if it was refused.
bool ReadPacket(const ByteVector& message, std::size_t num_positions, std::size_t max_entries,
                ValueFormat format, Chunk* chunk) {
  try {
    PacketReader reader(message, num_positions, max_entries, format);
    EXPECT_LE(reader.num_entries(), max_entries);
    EXPECT_LE(reader.packet_bytes(), message.size());
    std::size_t total = 0;
    for (std::size_t c = 0; c < kernels::NumChunks(num_positions); ++c) {
      const std::size_t count = reader.NextChunk(chunk->positions.get(), chunk->values.get());
      total += count;
      for (std::size_t i = 1; i < count; ++i) {
        EXPECT_LT(chunk->positions[i - 1], chunk->positions[i]);
      }
      if (count > 0) {
        EXPECT_LT(c * kChunkPositions + chunk->positions[count - 1], num_positions);
      }
    }
    EXPECT_EQ(total, reader.num_entries());
    return true;
  } catch (const WireFormatError&) {
    return false;
  }
}

TEST(PacketFuzz, MutatedPacketsAreReadOrRefused) {
  Chunk chunk;
  int num_read = 0;
  for (ValueFormat format :
       {ValueFormat::kFloat32, ValueFormat::kFloat16, ValueFormat::kBfloat16}) {
    for (std::size_t n : kUniverses) {
      for (double density : kDensities) {
        Random random(n * 37 + static_cast<std::size_t>(density * 10000));
        const Indices indices = testing::RandomIndices(n, density, static_cast<unsigned>(n));
        std::vector<float> values(indices.size(), 1.0F);
        ByteVector packet(MaxPacketBytes(indices.size(), n, format));
        packet.resize(WritePacket(indices, values, n, format, packet));
        for (int round = 0; round < 60; ++round) {
          ByteVector message = Mutate(packet, &random);
          message.shrink_to_fit();
          num_read += ReadPacket(message, n, n, format, &chunk) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(num_read, 0);
}

TEST(PacketFuzz, RandomBytesAfterAValidHeaderAreReadOrRefused) {
  Chunk chunk;
  Random random(2);
  for (int round = 0; round < 20000; ++round) {
    const std::size_t index_bytes = Below(200, &random);
    const std::size_t num_entries = Below(50, &random);
    ByteVector message = {static_cast<std::uint8_t>(num_entries),
                          0,
                          0,
                          0,
                          static_cast<std::uint8_t>(index_bytes),
                          0,
                          0,
                          0,
                          0,
                          1,
                          0,
                          0};
    const ByteVector rest = RandomBytes(index_bytes + 4 * num_entries, &random);
    message.insert(message.end(), rest.begin(), rest.end());
    message.shrink_to_fit();
    ReadPacket(message, kUniverses[Below(std::size(kUniverses), &random)], 1000,
               ValueFormat::kFloat32, &chunk);
  }
}

TEST(PacketFuzz, RandomBytesAreReadOrRefused) {
  Chunk chunk;
  Random random(3);
  for (int round = 0; round < 100000; ++round) {
    ByteVector message = RandomBytes(Below(40, &random), &random);
    message.shrink_to_fit();
    ReadPacket(message, 70000, 1000, ValueFormat::kFloat32, &chunk);
  }
}

}  // namespace
}  // namespace bitopk
