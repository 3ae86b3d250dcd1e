// SPDX-License-Identifier: Apache-2.0
//
// The simulated server: every rank receives every uplink packet, adds them in rank order and runs
// the same server.
#include <algorithm>
#include <numeric>

#include "plugin/src/exchange.h"

namespace bitopk {

void RunAllgather(StepContext& context, Bucket& bucket, MessageTag tag) {
  ExchangeWorkspace& work = context.workspace;
  bool nonfinite = false;
  work.broadcast.Clear();
  std::size_t max_bytes = 0;
  {
    StageTimer timer(context.stats, Stage::kCompress);
    for (const std::size_t number : bucket.units) {
      Unit& unit = context.plan.units[number];
      const kernels::SelectedEntries sent = CompressUnit(context, unit, nonfinite);
      AppendPacket(sent.indices, sent.values, unit.num_entries, unit.spec.value_format,
                   work.broadcast);
      max_bytes += MaxPacketBytes(unit.k_up, unit.num_entries, unit.spec.value_format);
    }
  }
  {
    StageTimer timer(context.stats, Stage::kUplink);
    tag.phase = Phase::kUplink;
    context.comm.AllGatherV(tag, work.broadcast.bytes(), nonfinite ? kFlagNonFinite : 0, max_bytes,
                            work.uplink);
  }
  NoteFlags(context, work.uplink, /*from_gradients=*/true);
  StageTimer timer(context.stats, Stage::kServer);
  work.offsets.assign(context.size(), 0);
  for (const std::size_t number : bucket.units) {
    Unit& unit = context.plan.units[number];
    AddPackets(context, unit, work.uplink, /*share=*/0);
    unit.server.FindCandidates(unit.k_down, work.server);
    work.kept.resize(unit.server.candidate_positions().size());
    std::iota(work.kept.begin(), work.kept.end(), 0U);
    KeepCandidates(context, unit);
    ClearResults(context, unit);
    WriteResults(context, unit, work.positions, work.values);
  }
  CheckAllUsedUp(context, work.uplink);
}

}  // namespace bitopk
