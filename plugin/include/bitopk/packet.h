// SPDX-License-Identifier: Apache-2.0
//
// Packet: the kept entries of one unit (or of one owner's share of it) in one direction, as bytes.
// The payload of a message is a concatenation of packets in the order of its units. The exchanges
// write and read them; the layout is in plugin/WIRE_FORMAT.md, section 2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitopk/kernels/indices.h"
#include "bitopk/kernels/span.h"
#include "bitopk/kernels/values.h"

namespace bitopk {

/// Bytes in front of the index stream of every packet.
inline constexpr std::size_t kPacketHeaderBytes = 12;

/// Upper bound of the bytes that WritePacket writes.
std::size_t MaxPacketBytes(std::size_t num_entries, std::size_t num_positions,
                           kernels::ValueFormat format);

/// Writes one packet to `out` (shape >= MaxPacketBytes(k, num_positions, format)) and returns its
/// bytes; the rest of `out` may be overwritten.
///
/// Thread-safe; does not allocate; the arguments must not overlap.
/// @param indices        kept positions, shape [k], strictly ascending, each < num_positions.
/// @param values         their values, shape [k]; replaced by what the receiver decodes.
/// @param num_positions  size of the unit or share, at most 2^32; the receiver knows it.
/// @throws InvalidArgumentError  if the shapes differ, `out` is too short or a size exceeds the
/// format.
std::size_t WritePacket(Span<const std::uint32_t> indices, Span<float> values,
                        std::size_t num_positions, kernels::ValueFormat format, MutableBytes out);

/// Reads one packet, chunk after chunk of kernels::kChunkPositions positions. Bytes come from a
/// peer, so everything is checked before use. Keeps a view of the message; does not allocate; one
/// thread at a time.
class PacketReader {
 public:
  PacketReader() = default;

  /// @param message        bytes from the packet's first one on; more packets may follow it.
  /// @param num_positions  size of the unit or share, at most 2^32.
  /// @param max_entries    entries that the sender may have kept at most.
  /// @param expected       the value format agreed for this unit and direction.
  /// @throws WireFormatError  saying what it got and expected, if the header breaks the format or
  /// bytes of
  ///                          the packet are missing.
  PacketReader(Bytes message, std::size_t num_positions, std::size_t max_entries,
               kernels::ValueFormat expected);

  std::size_t num_entries() const { return num_entries_; }

  /// Bytes of the whole packet: the next one starts that much further on.
  std::size_t packet_bytes() const { return packet_bytes_; }

  /// Decodes the entries of the next chunk: positions relative to the chunk's start, strictly
  /// ascending, and values, both of shape [kernels::kChunkPositions] (entries beyond the count may
  /// be overwritten). Returns their count. The packet is valid only once the last of
  /// kernels::NumChunks(num_positions) calls has returned.
  /// REQUIRES: called at most that often, and not again after an exception.
  /// @throws WireFormatError  if the index stream breaks the format.
  std::size_t NextChunk(std::uint16_t* positions, float* values);

 private:
  kernels::IndexDecoder indices_;
  Bytes values_;  // those not yet decoded
  kernels::ValueFormat format_ = kernels::ValueFormat::kFloat32;
  std::size_t num_entries_ = 0;
  std::size_t packet_bytes_ = 0;
};

}  // namespace bitopk
