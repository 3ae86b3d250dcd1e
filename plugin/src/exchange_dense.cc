// SPDX-License-Identifier: Apache-2.0
//
// Uncompressed entries: alltoallv of blocks to their owners, sums in rank order, allgatherv of the
// sums. Serves tensors that are never compressed, and compressed units before their start step;
// what these hold in memories is sent too and becomes 0.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "plugin/src/exchange.h"

namespace bitopk {
namespace {

constexpr std::size_t kTile = 4096;  // entries converted at a time; stays in the first-level cache

// How entries of a unit travel: as they are, or float32 in a narrower format.
std::size_t WireBytes(const Unit& unit) {
  if (unit.dtype == DType::kFloat32) {
    return kernels::ValueBytes(unit.compressed ? kernels::ValueFormat::kFloat32
                                               : unit.spec.value_format);
  }
  return DTypeBytes(unit.dtype);
}

kernels::ValueFormat WireFormat(const Unit& unit) {
  return unit.compressed ? kernels::ValueFormat::kFloat32 : unit.spec.value_format;
}

// Blocks are dealt even where the server's share is a whole unit or a replica, as long as no memory
// depends on the layout.
ShareMap DenseShares(const Unit& unit, std::size_t world_size) {
  if (unit.shares.dealt() || (unit.memory_in_use && !unit.shares.replicated())) return unit.shares;
  return ShareMap::Dealt(unit.num_entries, world_size, 0);
}

void Encode(const Unit& unit, const std::uint8_t* entries, std::size_t count, std::uint8_t* out) {
  if (unit.dtype != DType::kFloat32) {
    if (count > 0) std::memcpy(out, entries, count * DTypeBytes(unit.dtype));
    return;
  }
  float tile[kTile];
  const std::size_t bytes = WireBytes(unit);
  for (std::size_t i = 0; i < count; i += kTile) {
    const std::size_t n = std::min(kTile, count - i);
    std::memcpy(tile, entries + i * sizeof(float), n * sizeof(float));
    kernels::EncodeValues(WireFormat(unit), {tile, n}, {out + i * bytes, n * bytes});
  }
}

template <typename T>
void Decode(const Unit& unit, const std::uint8_t* in, Span<T> out) {
  if constexpr (std::is_same_v<T, float>) {
    kernels::DecodeValues(WireFormat(unit), {in, out.size() * WireBytes(unit)}, out);
  } else {
    std::memcpy(out.data(), in, out.size() * sizeof(T));
  }
}

// Integer sums wrap; only unsigned arithmetic may.
template <typename T>
T Plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

// By the largest magnitude as an integer, which compilers vectorise; a sum of floats they may not
// reorder.
template <typename T>
bool AllFinite(Span<const T> values) {
  if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    constexpr Bits kMask = ~Bits{0} >> 1;
    const T infinity = std::numeric_limits<T>::infinity();
    Bits limit;
    std::memcpy(&limit, &infinity, sizeof limit);
    Bits largest = 0;
    for (const T value : values) {
      Bits bits;
      std::memcpy(&bits, &value, sizeof bits);
      largest = std::max(largest, bits & kMask);
    }
    return largest < limit;
  } else {
    return true;
  }
}

// Memory + gradient of a whole unit, contiguous, in workspace.dense_flat.
template <typename T>
Span<T> Corrected(StepContext& context, Unit& unit) {
  ByteBuffer& flat = context.workspace.dense_flat;
  flat.Clear();
  T* const out = reinterpret_cast<T*>(flat.Reserve(unit.num_entries * sizeof(T)).data());
  for (const UnitTensor& part : unit.tensors) {
    if (part.num_entries == 0) continue;
    const void* gradient = context.tensors[part.tensor].gradient;
    if (gradient != nullptr) {
      std::memcpy(out + part.offset, gradient, part.num_entries * sizeof(T));
    } else {
      std::memset(out + part.offset, 0, part.num_entries * sizeof(T));
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (unit.worker.in_use()) {
      const float factor = context.MemoryFactor(unit);
      const float* const memory = unit.worker.current();
      for (std::size_t i = 0; i < unit.num_entries; ++i) {
        const float scaled = memory[i] * factor;
        out[i] = scaled + out[i];
      }
      std::memset(unit.worker.next(), 0, unit.num_entries * sizeof(float));
      unit.worker.MarkWritten();
    }
  }
  return {out, unit.num_entries};
}

template <typename T>
bool SendEntries(StepContext& context, Unit& unit) {
  const Span<T> flat = Corrected<T>(context, unit);
  const ShareMap shares = DenseShares(unit, context.size());
  const std::size_t bytes = WireBytes(unit);
  for (std::size_t owner = 0; owner < context.size(); ++owner) {
    ByteBuffer& send = context.workspace.send[owner];
    shares.ForEachPiece(owner, [&](std::size_t entry, std::size_t, std::size_t count) {
      Encode(unit, reinterpret_cast<const std::uint8_t*>(flat.data() + entry), count,
             send.Reserve(count * bytes).data());
      send.Advance(count * bytes);
    });
  }
  return AllFinite(Span<const T>(flat));
}

// Adds this rank's share in rank order and appends the sum, as the receivers decode it, to
// workspace.broadcast.
template <typename T>
bool AddShare(StepContext& context, Unit& unit, std::size_t offset) {
  ExchangeWorkspace& work = context.workspace;
  const ShareMap shares = DenseShares(unit, context.size());
  const std::size_t positions = shares.NumPositions(context.rank());
  const std::size_t bytes = WireBytes(unit);
  Span<const float> memory;
  if (unit.compressed) memory = unit.server.Drain(context.MemoryFactor(unit));
  const bool narrow = unit.has_narrow_results();
  bool finite = true;
  T sum[kTile];
  T part[kTile];
  for (std::size_t first = 0; first < positions; first += kTile) {
    const std::size_t count = std::min(kTile, positions - first);
    std::fill_n(sum, count, T{0});
    for (int rank = 0; rank < context.comm.size(); ++rank) {
      Decode<T>(unit, work.uplink.part(rank).data() + offset + first * bytes, {part, count});
      for (std::size_t i = 0; i < count; ++i) sum[i] = Plus(sum[i], part[i]);
    }
    if (context.op == Op::kAverage) {
      for (std::size_t i = 0; i < count; ++i) sum[i] = sum[i] / static_cast<T>(context.comm.size());
    }
    if constexpr (std::is_same_v<T, float>) {
      for (std::size_t i = 0; !memory.empty() && i < count; ++i) {
        const std::size_t at =
            unit.shares.replicated() ? shares.EntryAt(context.rank(), first + i) : first + i;
        sum[i] = memory[at] + sum[i];
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      for (std::size_t i = 0; narrow && i < count; ++i) {
        const std::size_t entry = shares.EntryAt(context.rank(), first + i);
        sum[i] = RoundResult(unit, entry, sum[i], /*keeps_error=*/false);
      }
    }
    finite = finite && AllFinite(Span<const T>(sum, count));
    Encode(unit, reinterpret_cast<const std::uint8_t*>(sum), count,
           work.broadcast.Reserve(count * bytes).data());
    work.broadcast.Advance(count * bytes);
  }
  return finite;
}

template <typename T>
void WriteShare(StepContext& context, const Unit& unit, std::size_t owner, const std::uint8_t* in) {
  const ShareMap shares = DenseShares(unit, context.size());
  const std::size_t bytes = WireBytes(unit);
  auto part = unit.tensors.begin();
  shares.ForEachPiece(owner, [&](std::size_t entry, std::size_t position, std::size_t count) {
    while (count > 0) {
      while (entry >= part->offset + part->num_entries) ++part;
      const std::size_t n = std::min(count, part->offset + part->num_entries - entry);
      auto* const result = static_cast<T*>(context.tensors[part->tensor].result);
      if (result != nullptr)
        Decode<T>(unit, in + position * bytes, {result + (entry - part->offset), n});
      entry += n;
      position += n;
      count -= n;
    }
  });
}

template <typename F>
void WithType(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kInt32:
      return f(std::int32_t{});
    case DType::kInt64:
      return f(std::int64_t{});
  }
}

std::size_t ShareBytes(const StepContext& context, const Bucket& bucket, std::size_t owner) {
  std::size_t total = 0;
  for (const std::size_t number : bucket.units) {
    const Unit& unit = context.plan.units[number];
    total += DenseShares(unit, context.size()).NumPositions(owner) * WireBytes(unit);
  }
  return total;
}

void CheckSizes(const StepContext& context, const Bucket& bucket, const ReceiveBuffer& received,
                bool own_share) {
  for (std::size_t rank = 0; rank < context.size(); ++rank) {
    const std::size_t expected = ShareBytes(context, bucket, own_share ? context.rank() : rank);
    const std::size_t got = received.part(static_cast<int>(rank)).size();
    if (got != expected) {
      throw WireFormatError(internal::StrCat("dense message of rank ", rank, ": got ", got,
                                             " bytes, expected ", expected));
    }
  }
}

void SendBucket(StepContext& context, Bucket& bucket, MessageTag tag) {
  ExchangeWorkspace& work = context.workspace;
  work.send.resize(context.size());
  for (ByteBuffer& buffer : work.send) buffer.Clear();
  bool finite = true;
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    WithType(unit.dtype,
             [&](auto t) { finite = SendEntries<decltype(t)>(context, unit) && finite; });
  }
  work.send_views.clear();
  for (const ByteBuffer& buffer : work.send) work.send_views.push_back(buffer.bytes());
  context.comm.AllToAllV(tag, work.send_views, finite ? 0 : kFlagNonFinite,
                         ShareBytes(context, bucket, context.rank()), work.uplink);
  NoteFlags(context, work.uplink, /*from_gradients=*/true);
  CheckSizes(context, bucket, work.uplink, /*own_share=*/true);
}

void AddAndReturn(StepContext& context, Bucket& bucket, MessageTag tag) {
  ExchangeWorkspace& work = context.workspace;
  work.broadcast.Clear();
  bool finite = true;
  std::size_t offset = 0;
  std::size_t largest = 0;
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    WithType(unit.dtype,
             [&](auto t) { finite = AddShare<decltype(t)>(context, unit, offset) && finite; });
    offset += DenseShares(unit, context.size()).NumPositions(context.rank()) * WireBytes(unit);
  }
  for (std::size_t owner = 0; owner < context.size(); ++owner) {
    largest = std::max(largest, ShareBytes(context, bucket, owner));
  }
  context.comm.AllGatherV(tag, work.broadcast.bytes(), finite ? 0 : kFlagNonFinite, largest,
                          work.downlink);
  NoteFlags(context, work.downlink, /*from_gradients=*/false);
  CheckSizes(context, bucket, work.downlink, /*own_share=*/false);
}

}  // namespace

void RunDense(StepContext& context, Bucket& bucket, MessageTag tag) {
  StageTimer timer(context.stats, Stage::kDense);
  ExchangeWorkspace& work = context.workspace;
  tag.phase = Phase::kDense;
  SendBucket(context, bucket, tag);
  AddAndReturn(context, bucket, tag);
  for (std::size_t owner = 0; owner < context.size(); ++owner) {
    const Bytes message = work.downlink.part(static_cast<int>(owner));
    std::size_t offset = 0;
    for (const std::size_t number : bucket.units) {
      const Unit& unit = context.plan.units[number];
      WithType(unit.dtype, [&](auto t) {
        WriteShare<decltype(t)>(context, unit, owner, message.data() + offset);
      });
      offset += DenseShares(unit, context.size()).NumPositions(owner) * WireBytes(unit);
    }
  }
  if (context.hash_result) {
    for (int rank = 0; rank < context.comm.size(); ++rank) {
      const Bytes message = work.downlink.part(rank);
      context.result_hash = HashBytes(message.data(), message.size(), context.result_hash);
    }
  }
}

}  // namespace bitopk
