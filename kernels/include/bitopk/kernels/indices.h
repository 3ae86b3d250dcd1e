// SPDX-License-Identifier: Apache-2.0
//
// Index codec: a strictly ascending list of positions in [0, num_positions) as a bit stream of
// chunks of 65,536 positions, each in the smallest of its forms (Elias-Fano, raw, bitmap, or a run
// of empty or full chunks). The grammar is in plugin/WIRE_FORMAT.md, section 3. About half a bit
// above the entropy per index for random positions, less for clustered ones. Packets use it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bitopk/kernels/span.h"

namespace bitopk::kernels {

/// Positions coded together; a chunk's positions fit 16 bits.
inline constexpr std::size_t kChunkPositions = 65536;

/// Chunks of a universe of `num_positions` positions; the last one may be shorter.
constexpr std::size_t NumChunks(std::size_t num_positions) {
  return num_positions / kChunkPositions + (num_positions % kChunkPositions != 0 ? 1 : 0);
}

/// Upper bound of the bytes that EncodeIndices writes for `num_indices` of `num_positions`
/// positions: at most 16 bits an index, or one bit a position, plus headers.
std::size_t MaxIndexBytes(std::size_t num_indices, std::size_t num_positions);

/// Codes `indices` (shape [k], strictly ascending, each < num_positions <= 2^32) into `out`
/// (shape >= MaxIndexBytes(k, num_positions)) and returns the bytes of the stream; unused bits of
/// its last byte are 0, and the rest of `out` may be overwritten. Canonical: equal lists give equal
/// bytes. Thread-safe; does not allocate; `out` must not overlap `indices`. REQUIRES the order,
/// range and shapes stated (asserted in debug builds).
std::size_t EncodeIndices(Span<const std::uint32_t> indices, std::size_t num_positions,
                          MutableBytes out);

/// Decodes one stream chunk by chunk. Bytes come from a peer, so everything is checked: the stream
/// ends where `in` ends (padding bits 0), holds exactly `num_indices` positions, and they ascend
/// strictly below `num_positions`. Any such stream is accepted, canonical or not. Keeps a view of
/// `in`; does not allocate; one thread at a time.
class IndexDecoder {
 public:
  IndexDecoder() = default;
  /// @param num_positions  size of the universe, at most 2^32.
  /// @throws WireFormatError if `num_indices` > `num_positions`, or `in` is not empty although
  ///         `num_positions` is 0.
  IndexDecoder(Bytes in, std::size_t num_indices, std::size_t num_positions);

  /// Writes the positions of the next chunk, relative to its start, to `out` (shape
  /// [kChunkPositions], whatever the count: entries beyond it may be overwritten) and returns how
  /// many there are (0 for an empty chunk). After the last chunk, verifies that the stream is used
  /// up. REQUIRES: called at most NumChunks(num_positions) times; a list is valid only once the
  /// last of them has returned.
  /// @throws WireFormatError on any violation of the format; do not call again afterwards.
  std::size_t NextChunk(std::uint16_t* out);

 private:
  std::uint64_t ReadBits(unsigned num_bits);
  void RequireBits(std::size_t num_bits) const;
  std::size_t DecodeChunk(std::size_t chunk_positions, std::uint16_t* out);
  void StartRun();
  void CheckEnd() const;

  Bytes in_;
  std::size_t bit_position_ = 0;
  std::size_t indices_left_ = 0;
  std::size_t positions_left_ = 0;
  std::size_t run_chunks_left_ = 0;  // of the run of empty or full chunks that is being read
  bool run_is_full_ = false;
};

}  // namespace bitopk::kernels
