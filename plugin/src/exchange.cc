// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace bitopk {
namespace {

bool IsFinite(float value) { return kernels::MagnitudeKey(value) < 0x7f800000; }

double SquareOfGradient(const std::vector<kernels::GradientSegment>& segments) {
  double total = 0.0;
  for (const auto& segment : segments) {
    for (std::size_t i = 0; segment.gradient != nullptr && i < segment.num_entries; ++i) {
      total += static_cast<double>(segment.gradient[i]) * segment.gradient[i];
    }
  }
  return total;
}

}  // namespace

MutableBytes ByteBuffer::Reserve(std::size_t num_bytes) {
  if (num_bytes > capacity_ - size_) {
    const std::size_t capacity = std::max(size_ + num_bytes, 2 * capacity_);
    std::unique_ptr<std::uint8_t[]> grown(new std::uint8_t[capacity]);
    if (size_ > 0) std::memcpy(grown.get(), data_.get(), size_);
    data_ = std::move(grown);
    capacity_ = capacity;
  }
  return {data_.get() + size_, num_bytes};
}

void RunBucket(StepContext& context, Bucket& bucket, std::uint32_t message) {
  MessageTag tag;
  tag.message = message;
  tag.step = context.step;
  tag.digest = BucketDigest(context.plan, bucket, context.schedule_step, context.op, context.scale);
  tag.scale = context.op == Op::kSum ? -context.scale : context.scale;
  switch (context.plan.units[bucket.units.front()].ExchangeAt(context.schedule_step)) {
    case ExchangeKind::kAllgather:
      RunAllgather(context, bucket, tag);
      return;
    case ExchangeKind::kSharded:
      RunSharded(context, bucket, tag);
      return;
    case ExchangeKind::kAuto:  // was resolved when the plan was made
    case ExchangeKind::kDense:
      RunDense(context, bucket, tag);
      return;
  }
}

kernels::SelectedEntries CompressUnit(StepContext& context, Unit& unit, bool& nonfinite) {
  ExchangeWorkspace& work = context.workspace;
  GradientSegments(unit, context.tensors, work.segments);
  unit.memory_in_use = true;
  unit.sent_square = unit.sent_error_square = unit.gradient_square = 0.0;
  const bool submitted =
      std::any_of(work.segments.begin(), work.segments.end(),
                  [](const kernels::GradientSegment& s) { return s.gradient != nullptr; });
  if (!submitted && !unit.worker.in_use()) return {};  // nothing to send, nothing to keep
  float* next = nullptr;
  kernels::SelectedEntries selected;
  if (unit.spec.worker_memory) {
    next = unit.worker.next();
    selected = kernels::CompressTopK(work.segments, unit.worker.current(),
                                     context.MemoryFactor(unit), unit.k_up, next, work.topk);
    unit.worker.MarkWritten();
  } else {
    selected = kernels::SelectNonzeroTopK(Span<const kernels::GradientSegment>(work.segments),
                                          unit.k_up, work.topk);
    unit.gradient_square = SquareOfGradient(work.segments);
  }
  for (std::size_t i = 0; i < selected.values.size(); ++i) {
    const float exact = selected.values[i];
    nonfinite = nonfinite || !IsFinite(exact);
    const float sent = kernels::RoundToFormat(unit.spec.value_format, exact);
    const float error = exact - sent;
    selected.values[i] = sent;
    unit.sent_square += static_cast<double>(exact) * exact;
    unit.sent_error_square += static_cast<double>(error) * error;
    if (next != nullptr && unit.spec.value_format != kernels::ValueFormat::kFloat32) {
      next[selected.indices[i]] = error;
    }
  }
  context.stats.entries_up += selected.values.size();
  return selected;
}

void AppendPacket(Span<const std::uint32_t> positions, Span<float> values,
                  std::size_t num_positions, kernels::ValueFormat format, ByteBuffer& out) {
  const MutableBytes room = out.Reserve(MaxPacketBytes(positions.size(), num_positions, format));
  out.Advance(WritePacket(positions, values, num_positions, format, room));
}

void AddPackets(StepContext& context, Unit& unit, const ReceiveBuffer& received,
                std::size_t share) {
  ExchangeWorkspace& work = context.workspace;
  const std::size_t positions = unit.shares.NumPositions(share);
  work.readers.clear();
  for (int rank = 0; rank < context.comm.size(); ++rank) {
    const Bytes message = received.part(rank);
    std::size_t& offset = work.offsets[static_cast<std::size_t>(rank)];
    work.readers.emplace_back(message.subspan(offset, message.size() - offset), positions,
                              std::min(unit.k_up, positions), unit.spec.value_format);
    offset += work.readers.back().packet_bytes();
  }
  const Aggregation aggregation{context.Divisor(), context.MemoryFactor(unit)};
  unit.server.Add(work.readers, aggregation, unit.unidirectional(), work.server);
}

void CheckUsedUp(Bytes message, std::size_t used, int rank) {
  if (used == message.size()) return;
  throw WireFormatError(internal::StrCat("message of rank ", rank, ": packets end after ", used,
                                         " bytes, got ", message.size()));
}

void CheckAllUsedUp(StepContext& context, const ReceiveBuffer& received) {
  for (int rank = 0; rank < context.comm.size(); ++rank) {
    CheckUsedUp(received.part(rank), context.workspace.offsets[static_cast<std::size_t>(rank)],
                rank);
  }
}

void KeepCandidates(StepContext& context, Unit& unit) {
  ExchangeWorkspace& work = context.workspace;
  const auto& positions = unit.server.candidate_positions();
  const auto& values = unit.server.candidate_values();
  work.positions.resize(work.kept.size());
  work.values.resize(work.kept.size());
  const bool narrow = unit.has_narrow_results();
  const bool keeps_error = unit.spec.server_memory && !unit.unidirectional();
  const std::size_t share = unit.shares.replicated() ? 0 : context.rank();
  for (std::size_t i = 0; i < work.kept.size(); ++i) {
    work.positions[i] = positions[work.kept[i]];
    work.values[i] = kernels::RoundToFormat(unit.downlink_format(), values[work.kept[i]]);
    if (narrow) {
      const std::size_t entry = unit.shares.EntryAt(share, work.positions[i]);
      work.values[i] = RoundResult(unit, entry, work.values[i], keeps_error);
    }
    context.nonfinite = context.nonfinite || !IsFinite(work.values[i]);
  }
  unit.server.Keep(work.kept, work.values);
}

float RoundResult(const Unit& unit, std::size_t entry, float value, bool keeps_error) {
  const kernels::ValueFormat format = unit.TensorAt(entry).result_format;
  const float rounded = kernels::RoundToFormat(format, value);
  if (keeps_error || !IsFinite(value)) return rounded;
  // Formats saturate; without a memory the caller's own conversion would give Inf.
  const float largest = kernels::RoundToFormat(format, std::numeric_limits<float>::max());
  return std::abs(value) > largest ? std::copysign(std::numeric_limits<float>::infinity(), value)
                                   : rounded;
}

void ClearResults(StepContext& context, const Unit& unit) {
  for (const UnitTensor& part : unit.tensors) {
    void* const result = context.tensors[part.tensor].result;
    if (result != nullptr && part.num_entries > 0) {
      std::memset(result, 0, part.num_entries * DTypeBytes(unit.dtype));
    }
  }
}

void WriteResults(StepContext& context, const Unit& unit, Span<const std::uint32_t> entries,
                  Span<const float> values) {
  context.stats.entries_down += entries.size();
  if (context.hash_result) {
    context.result_hash =
        HashBytes(entries.data(), entries.size() * sizeof(entries[0]), context.result_hash);
    context.result_hash =
        HashBytes(values.data(), values.size() * sizeof(values[0]), context.result_hash);
  }
  auto part = unit.tensors.begin();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    while (entries[i] >= part->offset + part->num_entries) ++part;
    auto* const result = static_cast<float*>(context.tensors[part->tensor].result);
    if (result != nullptr) result[entries[i] - part->offset] = values[i];
  }
}

void NoteFlags(StepContext& context, const ReceiveBuffer& received, bool from_gradients) {
  for (std::size_t rank = 0; rank < context.size(); ++rank) {
    if ((received.flags(static_cast<int>(rank)) & kFlagNonFinite) == 0) continue;
    context.nonfinite = true;
    if (from_gradients) context.nonfinite_ranks[rank] = true;
  }
}

}  // namespace bitopk
