// SPDX-License-Identifier: Apache-2.0
//
// The sharded server: each rank is the server of its share of every unit. Traffic per rank does not
// grow with the number of ranks.
#include <algorithm>
#include <numeric>

#include "plugin/src/exchange.h"
#include "plugin/src/threshold.h"

namespace bitopk {
namespace {

// Entries that an owner may send down for a unit.
std::size_t MaxDown(const Unit& unit, std::size_t owner) {
  return std::min(unit.k_down, unit.shares.NumPositions(owner));
}

// Compresses all units and sorts what is sent by owner.
bool CompressForOwners(StepContext& context, Bucket& bucket) {
  ExchangeWorkspace& work = context.workspace;
  work.send.resize(context.size());
  for (ByteBuffer& buffer : work.send) buffer.Clear();
  bool nonfinite = false;
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    const kernels::SelectedEntries sent = CompressUnit(context, unit, nonfinite);
    unit.shares.Split(sent.indices, sent.values, work.positions, work.values, work.starts);
    for (std::size_t owner = 0; owner < context.size(); ++owner) {
      const std::size_t positions = unit.shares.NumPositions(owner);
      if (positions == 0) continue;  // no share, no packet
      const std::size_t first = work.starts[owner];
      const std::size_t count = work.starts[owner + 1] - first;
      AppendPacket(Span<const std::uint32_t>(work.positions).subspan(first, count),
                   Span<float>(work.values).subspan(first, count), positions,
                   unit.spec.value_format, work.send[owner]);
    }
  }
  work.send_views.clear();
  for (const ByteBuffer& buffer : work.send) work.send_views.push_back(buffer.bytes());
  return nonfinite;
}

std::size_t MaxUplinkBytes(const StepContext& context, const Bucket& bucket) {
  std::size_t total = 0;
  for (const std::size_t number : bucket.units) {
    const Unit& unit = context.plan.units[number];
    const std::size_t positions = unit.shares.NumPositions(context.rank());
    total += MaxPacketBytes(std::min(unit.k_up, positions), positions, unit.spec.value_format);
  }
  return total;
}

std::size_t MaxDownlinkBytes(const StepContext& context, const Bucket& bucket) {
  std::size_t largest = 0;
  for (std::size_t owner = 0; owner < context.size(); ++owner) {
    std::size_t total = 0;
    for (const std::size_t number : bucket.units) {
      const Unit& unit = context.plan.units[number];
      total += MaxPacketBytes(MaxDown(unit, owner), unit.shares.NumPositions(owner),
                              unit.downlink_format());
    }
    largest = std::max(largest, total);
  }
  return largest;
}

void ServeShares(StepContext& context, Bucket& bucket) {
  ExchangeWorkspace& work = context.workspace;
  work.offsets.assign(context.size(), 0);
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    if (unit.shares.NumPositions(context.rank()) == 0) continue;
    AddPackets(context, unit, work.uplink, context.rank());
    unit.server.FindCandidates(unit.k_down, work.server);
  }
  CheckAllUsedUp(context, work.uplink);
}

bool NeedsAgreement(const Unit& unit) { return unit.shares.dealt() && !unit.unidirectional(); }

void Agree(StepContext& context, Bucket& bucket, MessageTag tag) {
  ExchangeWorkspace& work = context.workspace;
  work.queries.clear();
  for (const std::size_t number : bucket.units) {
    const Unit& unit = context.plan.units[number];
    if (!NeedsAgreement(unit)) continue;
    ThresholdQuery query;
    query.positions = Span<const std::uint32_t>(unit.server.candidate_positions());
    query.values = Span<const float>(unit.server.candidate_values());
    query.shares = &unit.shares;
    query.k = unit.k_down;
    work.queries.push_back(query);
  }
  tag.phase = Phase::kThreshold;
  AgreeOnThresholds(context.comm, tag, work.queries, work.counts);
}

// Writes what this rank's shares send down.
void EncodeDownlink(StepContext& context, Bucket& bucket) {
  ExchangeWorkspace& work = context.workspace;
  work.broadcast.Clear();
  auto query = work.queries.begin();
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    const bool agreed = NeedsAgreement(unit);
    const std::size_t positions = unit.shares.NumPositions(context.rank());
    if (positions > 0) {
      if (agreed) {
        KeptCandidates(*query, context.rank(), work.kept);
      } else {
        work.kept.resize(unit.server.candidate_positions().size());
        std::iota(work.kept.begin(), work.kept.end(), 0U);
      }
      KeepCandidates(context, unit);
      AppendPacket(work.positions, work.values, positions, unit.downlink_format(), work.broadcast);
    }
    if (agreed) ++query;
  }
}

void DecodePacket(StepContext& context, const Unit& unit, std::size_t owner, PacketReader& packet) {
  ExchangeWorkspace& work = context.workspace;
  const std::size_t positions = unit.shares.NumPositions(owner);
  for (std::size_t first = 0; first < positions; first += kernels::kChunkPositions) {
    const std::size_t count =
        packet.NextChunk(work.server.positions.data(), work.server.values.data());
    work.positions.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      work.positions[i] =
          static_cast<std::uint32_t>(unit.shares.EntryAt(owner, first + work.server.positions[i]));
    }
    WriteResults(context, unit, work.positions,
                 Span<const float>(work.server.values.data(), count));
  }
}

void DecodeDownlink(StepContext& context, Bucket& bucket) {
  ExchangeWorkspace& work = context.workspace;
  for (const std::size_t number : bucket.units) ClearResults(context, context.plan.units[number]);
  for (std::size_t owner = 0; owner < context.size(); ++owner) {
    const Bytes message = work.downlink.part(static_cast<int>(owner));
    std::size_t offset = 0;
    for (const std::size_t number : bucket.units) {
      const Unit& unit = context.plan.units[number];
      const std::size_t positions = unit.shares.NumPositions(owner);
      if (positions == 0) continue;
      PacketReader packet(message.subspan(offset, message.size() - offset), positions,
                          MaxDown(unit, owner), unit.downlink_format());
      offset += packet.packet_bytes();
      DecodePacket(context, unit, owner, packet);
    }
    CheckUsedUp(message, offset, static_cast<int>(owner));
  }
}

}  // namespace

void RunSharded(StepContext& context, Bucket& bucket, MessageTag tag) {
  ExchangeWorkspace& work = context.workspace;
  bool nonfinite = false;
  {
    StageTimer timer(context.stats, Stage::kCompress);
    nonfinite = CompressForOwners(context, bucket);
  }
  {
    StageTimer timer(context.stats, Stage::kUplink);
    tag.phase = Phase::kUplink;
    context.comm.AllToAllV(tag, work.send_views, nonfinite ? kFlagNonFinite : 0,
                           MaxUplinkBytes(context, bucket), work.uplink);
  }
  NoteFlags(context, work.uplink, /*from_gradients=*/true);
  {
    StageTimer timer(context.stats, Stage::kServer);
    ServeShares(context, bucket);
  }
  {
    StageTimer timer(context.stats, Stage::kThreshold);
    Agree(context, bucket, tag);
  }
  {
    StageTimer timer(context.stats, Stage::kServer);
    EncodeDownlink(context, bucket);
  }
  {
    StageTimer timer(context.stats, Stage::kDownlink);
    tag.phase = Phase::kDownlink;
    context.comm.AllGatherV(tag, work.broadcast.bytes(), context.nonfinite ? kFlagNonFinite : 0,
                            MaxDownlinkBytes(context, bucket), work.downlink);
  }
  NoteFlags(context, work.downlink, /*from_gradients=*/false);
  StageTimer timer(context.stats, Stage::kDecode);
  DecodeDownlink(context, bucket);
}

}  // namespace bitopk
