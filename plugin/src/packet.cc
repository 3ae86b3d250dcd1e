// SPDX-License-Identifier: Apache-2.0
//
// Packets: a header of 12 bytes, the index stream, the values. See plugin/WIRE_FORMAT.md,
// section 2.
#include "bitopk/packet.h"

#include <cstring>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are copied as little-endian");

constexpr std::uint8_t kPacketVersion = 1;

// The header as it lies on the wire: every field at its natural alignment, so without gaps.
struct PacketHeader {
  std::uint32_t num_entries;
  std::uint32_t index_bytes;
  std::uint8_t value_format;
  std::uint8_t version;
  std::uint16_t reserved;
};
static_assert(sizeof(PacketHeader) == kPacketHeaderBytes);

template <typename Got, typename Expected>
[[noreturn]] void ThrowMismatch(const char* what, const Got& got, const Expected& expected) {
  throw WireFormatError(
      internal::StrCat("PacketReader: ", what, "; got ", got, ", expected ", expected));
}

PacketHeader ReadHeader(Bytes message, kernels::ValueFormat format) {
  if (message.size() < kPacketHeaderBytes) {
    ThrowMismatch("bytes of the header", message.size(), kPacketHeaderBytes);
  }
  PacketHeader header;
  std::memcpy(&header, message.data(), kPacketHeaderBytes);
  if (header.version != kPacketVersion) {
    ThrowMismatch("version of the packet", int{header.version}, int{kPacketVersion});
  }
  if (header.value_format != static_cast<std::uint8_t>(format)) {
    ThrowMismatch("value format", int{header.value_format}, static_cast<int>(format));
  }
  if (header.reserved != 0) ThrowMismatch("reserved bytes of the header", header.reserved, 0);
  return header;
}

}  // namespace

std::size_t MaxPacketBytes(std::size_t num_entries, std::size_t num_positions,
                           kernels::ValueFormat format) {
  return kPacketHeaderBytes + kernels::MaxIndexBytes(num_entries, num_positions) +
         num_entries * kernels::ValueBytes(format);
}

std::size_t WritePacket(Span<const std::uint32_t> indices, Span<float> values,
                        std::size_t num_positions, kernels::ValueFormat format, MutableBytes out) {
  const std::size_t num_entries = indices.size();
  const std::size_t max_bytes = MaxPacketBytes(num_entries, num_positions, format);
  BITOPK_CHECK_ARG(values.size() == num_entries, "WritePacket: as many values as indices; got ",
                   values.size(), ", expected ", num_entries);
  BITOPK_CHECK_ARG(num_positions <= std::size_t{1} << 32 && num_entries <= UINT32_MAX,
                   "WritePacket: at most 2^32 positions and 2^32 - 1 entries; got ", num_positions,
                   " and ", num_entries);
  BITOPK_CHECK_ARG(out.size() >= max_bytes, "WritePacket: room for a packet; got ", out.size(),
                   " bytes, expected ", max_bytes);

  PacketHeader header = {};
  std::uint8_t* const index_begin = out.data() + kPacketHeaderBytes;
  const std::size_t index_bytes = kernels::EncodeIndices(
      indices, num_positions, MutableBytes(index_begin, out.size() - kPacketHeaderBytes));
  header.num_entries = static_cast<std::uint32_t>(num_entries);
  header.index_bytes = static_cast<std::uint32_t>(index_bytes);
  header.value_format = static_cast<std::uint8_t>(format);
  header.version = kPacketVersion;
  std::memcpy(out.data(), &header, kPacketHeaderBytes);

  const std::size_t value_bytes = num_entries * kernels::ValueBytes(format);
  kernels::EncodeValues(format, values, MutableBytes(index_begin + index_bytes, value_bytes));
  return kPacketHeaderBytes + index_bytes + value_bytes;
}

PacketReader::PacketReader(Bytes message, std::size_t num_positions, std::size_t max_entries,
                           kernels::ValueFormat expected)
    : format_(expected) {
  const PacketHeader header = ReadHeader(message, expected);
  if (header.num_entries > max_entries) {
    ThrowMismatch("entries of a packet", header.num_entries,
                  internal::StrCat("at most ", max_entries));
  }
  num_entries_ = header.num_entries;
  // Neither sum overflows: each part is below 2^35.
  const std::size_t value_bytes = num_entries_ * kernels::ValueBytes(expected);
  packet_bytes_ = kPacketHeaderBytes + header.index_bytes + value_bytes;
  if (packet_bytes_ > message.size()) {
    ThrowMismatch("bytes of a packet", message.size(),
                  internal::StrCat("at least ", packet_bytes_));
  }
  indices_ = kernels::IndexDecoder(message.subspan(kPacketHeaderBytes, header.index_bytes),
                                   num_entries_, num_positions);
  values_ = message.subspan(kPacketHeaderBytes + header.index_bytes, value_bytes);
}

std::size_t PacketReader::NextChunk(std::uint16_t* positions, float* values) {
  const std::size_t count = indices_.NextChunk(positions);
  const std::size_t value_bytes = count * kernels::ValueBytes(format_);
  kernels::DecodeValues(format_, values_.subspan(0, value_bytes), Span<float>(values, count));
  values_ = values_.subspan(value_bytes, values_.size() - value_bytes);
  return count;
}

}  // namespace bitopk
