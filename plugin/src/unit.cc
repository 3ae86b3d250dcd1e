// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/unit.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "bitopk/kernels/error.h"
#include "bitopk/packet.h"

namespace bitopk {
namespace {

// Below this many bytes received per rank, two messages cost less than the rounds of the sharded
// exchange.
constexpr double kAllgatherUpToBytes = 64.0 * 1024;
// Index and value of an entry at a density of about 0.01.
constexpr double kBytesPerEntry = 5.1;

// The rule that serves a tensor: its number, or -1 for the general settings.
int RuleFor(const Config& config, const std::string& name) {
  for (std::size_t i = 0; i < config.rules.size(); ++i) {
    if (MatchesPattern(config.rules[i].pattern, name)) return static_cast<int>(i);
  }
  return -1;
}

const CompressionSpec& SpecOf(const Config& config, int rule) {
  return rule < 0 ? config.spec : config.rules[static_cast<std::size_t>(rule)].spec;
}

bool TravelsDense(const TensorSpec& tensor, const CompressionSpec& spec) {
  return spec.method == Method::kDense || tensor.dtype != DType::kFloat32 ||
         tensor.num_entries == 0 || tensor.num_entries < spec.dense_below;
}

// Results must be the same numbers on the wire and in the caller's own type, or the memory would
// keep the error of a value that nobody gets.
void CheckFormats(const TensorSpec& tensor, const CompressionSpec& spec) {
  using kernels::ValueFormat;
  BITOPK_CHECK_ARG(tensor.result_format == ValueFormat::kFloat32 ||
                       spec.value_format == ValueFormat::kFloat32 ||
                       tensor.result_format == spec.value_format,
                   "tensor \"", tensor.name, "\" is ",
                   tensor.result_format == ValueFormat::kFloat16 ? "float16" : "bfloat16",
                   ": its value_format must be that or float32, not the other 16-bit format");
}

void Append(Unit& unit, std::size_t number, const TensorSpec& tensor) {
  unit.tensors.push_back({number, unit.num_entries, tensor.num_entries, tensor.result_format});
  unit.num_entries += tensor.num_entries;
}

// Bytes that a rank sends in one step, for the choice of exchange.
struct PredictedBytes {
  double allgather;
  double sharded;
  double dense;
};

PredictedBytes Predict(const Unit& unit, int world_size) {
  const double peers = world_size - 1;
  const double up = static_cast<double>(unit.k_up) * kBytesPerEntry;
  const double down = unit.unidirectional()
                          ? std::min(static_cast<double>(unit.num_entries),
                                     world_size * static_cast<double>(unit.k_up)) *
                                kBytesPerEntry
                          : static_cast<double>(unit.k_down) * kBytesPerEntry;
  return {peers * up, (up + down) * peers / world_size,
          8.0 * static_cast<double>(unit.num_entries) * peers / world_size};
}

// The choice never changes a result, so it may follow any rule that is the same on all ranks.
void ChooseExchange(Unit& unit, const std::string& name, int world_size, Plan& plan) {
  unit.exchange = unit.spec.exchange;
  if (unit.exchange == ExchangeKind::kDense) return;
  const PredictedBytes bytes = Predict(unit, world_size);
  if (unit.exchange == ExchangeKind::kAuto) {
    const bool few = bytes.allgather <= kAllgatherUpToBytes || bytes.allgather <= bytes.sharded;
    unit.exchange = few ? ExchangeKind::kAllgather : ExchangeKind::kSharded;
    plan.decisions.push_back(
        internal::StrCat("unit \"", name, "\" (", unit.num_entries, " entries, k=", unit.k_up,
                         " up, ", unit.k_down, " down): ", ExchangeName(unit.exchange),
                         ", predicted bytes sent per rank and step: allgather ",
                         static_cast<std::uint64_t>(bytes.allgather), ", sharded ",
                         static_cast<std::uint64_t>(bytes.sharded), ", dense ",
                         static_cast<std::uint64_t>(bytes.dense)));
  }
  const double chosen = unit.exchange == ExchangeKind::kAllgather ? bytes.allgather : bytes.sharded;
  if (world_size == 1 || chosen < bytes.dense) return;
  if (unit.spec.exchange == ExchangeKind::kAuto && unit.spec.dense_fallback) {
    unit.exchange = ExchangeKind::kDense;
    plan.decisions.push_back("unit \"" + name + "\": dense instead, which sends fewer bytes");
  } else {
    plan.warnings.push_back(
        "unit \"" + name +
        "\": compression sends more bytes than a dense allreduce would; lower the density or "
        "use dense_fallback=True");
  }
}

void AddCompressedUnit(Unit unit, const std::string& name, int rank, int world_size, Plan& plan) {
  const std::size_t number = plan.units.size();
  const auto owners = static_cast<std::size_t>(world_size);
  unit.compressed = true;
  SetEntriesToKeep(unit);
  ChooseExchange(unit, name, world_size, plan);
  if (unit.exchange == ExchangeKind::kAllgather) {
    unit.shares = ShareMap::Replicated(unit.num_entries);
  } else if (unit.exchange == ExchangeKind::kSharded &&
             std::max(unit.k_up, unit.k_down) < kWholeBelowEntries) {
    unit.shares = ShareMap::Whole(unit.num_entries, owners, number);
  } else {
    unit.shares = ShareMap::Dealt(unit.num_entries, owners, number);
  }
  unit.worker = WorkerMemory(unit.num_entries);
  const std::size_t share = unit.shares.replicated() ? 0 : static_cast<std::size_t>(rank);
  unit.server = Server(unit.shares.NumPositions(share), unit.spec.server_memory);
  for (const UnitTensor& part : unit.tensors) plan.unit_of_tensor[part.tensor] = number;
  plan.units.push_back(std::move(unit));
}

// Dense tensors of one type and format, fused up to the size of a message.
void AddDenseUnits(const std::vector<TensorSpec>& tensors, const std::vector<int>& rules,
                   const Config& config, int world_size, Plan& plan) {
  std::map<std::pair<DType, kernels::ValueFormat>, Unit> open;
  const auto close = [&](Unit& unit) {
    const std::size_t number = plan.units.size();
    unit.shares = ShareMap::Dealt(unit.num_entries, static_cast<std::size_t>(world_size), number);
    for (const UnitTensor& part : unit.tensors) plan.unit_of_tensor[part.tensor] = number;
    plan.units.push_back(std::move(unit));
    unit = Unit();
  };
  for (std::size_t i = tensors.size(); i-- > 0;) {
    const CompressionSpec& spec = SpecOf(config, rules[i]);
    if (!TravelsDense(tensors[i], spec)) continue;
    // Only the dense method narrows what travels dense: under topK there is no memory for the
    // rounding error.
    const bool narrow = spec.method == Method::kDense && tensors[i].dtype == DType::kFloat32;
    const auto format = narrow ? spec.value_format : kernels::ValueFormat::kFloat32;
    Unit& unit = open[{tensors[i].dtype, format}];
    const std::size_t bytes = DTypeBytes(tensors[i].dtype);
    if (!unit.tensors.empty() &&
        (unit.num_entries + tensors[i].num_entries) * bytes > config.bucket_bytes)
      close(unit);
    unit.dtype = tensors[i].dtype;
    unit.spec.method = Method::kDense;
    unit.spec.value_format = format;
    Append(unit, i, tensors[i]);
  }
  for (auto& [key, unit] : open) {
    if (!unit.tensors.empty()) close(unit);
  }
}

bool SameMessage(const Unit& a, const Unit& b) {
  return a.compressed == b.compressed && a.exchange == b.exchange &&
         a.spec.start_step == b.spec.start_step;
}

// Packs units into messages of at most bucket_bytes (or one unit). Gradients appear last registered
// first, so a unit is complete with its first registered tensor: one that spans the model must not
// hold up those that are ready before.
void FillBuckets(const std::vector<TensorSpec>& tensors, std::size_t bucket_bytes, Plan& plan) {
  std::vector<std::size_t> order;
  std::vector<bool> placed(plan.units.size(), false);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t unit = plan.unit_of_tensor[i];
    if (!placed[unit]) order.push_back(unit);
    placed[unit] = true;
  }
  std::reverse(order.begin(), order.end());
  for (const std::size_t number : order) {
    const Unit& unit = plan.units[number];
    const std::size_t bytes = unit.num_entries * DTypeBytes(unit.dtype);
    const bool fits = !plan.buckets.empty() &&
                      SameMessage(plan.units[plan.buckets.back().units.front()], unit) &&
                      plan.buckets.back().dense_bytes + bytes <= bucket_bytes;
    if (!fits) plan.buckets.emplace_back();
    plan.buckets.back().units.push_back(number);
    plan.buckets.back().dense_bytes += bytes;
    for (const UnitTensor& part : unit.tensors)
      plan.bucket_of_tensor[part.tensor] = plan.buckets.size() - 1;
  }
}

}  // namespace

const UnitTensor& Unit::TensorAt(std::size_t entry) const {
  // The last tensor that starts at or before the entry; empty ones before it start there too.
  const auto after = std::upper_bound(
      tensors.begin(), tensors.end(), entry,
      [](std::size_t wanted, const UnitTensor& tensor) { return wanted < tensor.offset; });
  return *(after - 1);
}

void SetEntriesToKeep(Unit& unit) {
  unit.k_up = unit.spec.up.EntriesOf(unit.num_entries);
  unit.k_down = unit.spec.down.EntriesOf(unit.num_entries);
}

Plan MakePlan(const std::vector<TensorSpec>& tensors, const Config& config, int rank,
              int world_size) {
  Plan plan;
  plan.bucket_of_tensor.resize(tensors.size());
  plan.unit_of_tensor.resize(tensors.size());
  std::vector<int> rules;
  for (const TensorSpec& tensor : tensors) rules.push_back(RuleFor(config, tensor.name));

  std::map<int, Unit> global_units;  // by rule; added when the first tensor of the rule comes up
  std::vector<std::pair<Unit, std::string>> units;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const CompressionSpec& spec = SpecOf(config, rules[i]);
    if (TravelsDense(tensors[i], spec)) continue;
    CheckFormats(tensors[i], spec);
    BITOPK_CHECK_ARG(
        tensors[i].num_entries <= (std::uint64_t{1} << 32), "tensor \"", tensors[i].name,
        "\": at most 2^32 entries can be compressed as one unit; got ", tensors[i].num_entries);
    if (spec.scope == Scope::kGlobal) {
      Append(global_units[rules[i]], i, tensors[i]);
      continue;
    }
    Unit unit;
    unit.spec = spec;
    unit.from_rule = rules[i] >= 0;
    Append(unit, i, tensors[i]);
    units.emplace_back(std::move(unit), tensors[i].name);
  }
  for (auto& [rule, unit] : global_units) {
    BITOPK_CHECK_ARG(unit.num_entries <= (std::uint64_t{1} << 32),
                     "scope \"global\": at most 2^32 entries can be compressed as one unit; got ",
                     unit.num_entries);
    unit.spec = SpecOf(config, rule);
    unit.from_rule = rule >= 0;
    units.emplace_back(std::move(unit),
                       rule < 0 ? "global" : config.rules[static_cast<std::size_t>(rule)].pattern);
  }
  for (auto& [unit, name] : units) AddCompressedUnit(std::move(unit), name, rank, world_size, plan);
  AddDenseUnits(tensors, rules, config, world_size, plan);
  FillBuckets(tensors, config.bucket_bytes, plan);
  return plan;
}

std::uint64_t BucketDigest(const Plan& plan, const Bucket& bucket, std::uint64_t schedule_step,
                           Op op, double scale) {
  std::uint64_t hash = HashBytes(&scale, sizeof scale, HashBytes(&op, sizeof op));
  for (const std::size_t number : bucket.units) {
    const Unit& unit = plan.units[number];
    std::uint64_t unit_scale;
    std::memcpy(&unit_scale, &unit.pending_scale, sizeof unit_scale);
    const std::uint64_t fields[] = {number,
                                    unit.compressed ? unit_scale : 0,
                                    unit.num_entries,
                                    unit.k_up,
                                    unit.k_down,
                                    static_cast<std::uint64_t>(unit.dtype),
                                    static_cast<std::uint64_t>(unit.spec.value_format),
                                    static_cast<std::uint64_t>(unit.ExchangeAt(schedule_step)),
                                    unit.memory_in_use ? 1U : 0U};
    hash = HashBytes(fields, sizeof fields, hash);
  }
  return hash;
}

void GradientSegments(const Unit& unit, const std::vector<TensorSubmission>& submissions,
                      std::vector<kernels::GradientSegment>& segments) {
  segments.clear();
  for (const UnitTensor& part : unit.tensors) {
    segments.push_back(
        {static_cast<const float*>(submissions[part.tensor].gradient), part.num_entries});
  }
}

std::uint64_t HashBytes(const void* data, std::size_t num_bytes, std::uint64_t hash) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    hash ^= bytes[i];
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace bitopk
