// SPDX-License-Identifier: Apache-2.0
#include "bitopk/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

const char* ValueFormatName(kernels::ValueFormat format) {
  switch (format) {
    case kernels::ValueFormat::kFloat32:
      return "float32";
    case kernels::ValueFormat::kFloat16:
      return "float16";
    case kernels::ValueFormat::kBfloat16:
      return "bfloat16";
  }
  return "unknown";
}

const char* NonFiniteName(NonFinitePolicy policy) {
  switch (policy) {
    case NonFinitePolicy::kPropagate:
      return "propagate";
    case NonFinitePolicy::kSkip:
      return "skip";
    case NonFinitePolicy::kRaise:
      return "raise";
  }
  return "unknown";
}

void ValidateSparsity(const char* name, const Sparsity& sparsity) {
  BITOPK_CHECK_ARG((sparsity.density != 0.0) != (sparsity.k != 0), "Config: ", name,
                   " needs exactly one of density and k; got density=", sparsity.density,
                   ", k=", sparsity.k);
  BITOPK_CHECK_ARG(sparsity.k != 0 || (sparsity.density > 0.0 && sparsity.density <= 1.0),
                   "Config: ", name, " density must be in (0, 1]; got ", sparsity.density);
}

void ValidateSpec(const CompressionSpec& spec) {
  if (spec.method == Method::kTopK) {
    ValidateSparsity("uplink", spec.up);
    ValidateSparsity("downlink", spec.down);
  }
  BITOPK_CHECK_ARG(spec.memory_decay >= 0.0 && spec.memory_decay <= 1.0,
                   "Config: memory_decay must be in [0, 1]; got ", spec.memory_decay);
}

// The shortest decimal that reads back as `value`: 0.06, not 0.059999999999999998.
std::string Decimal(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

void DescribeSpec(std::ostream& out, const CompressionSpec& spec) {
  out << (spec.method == Method::kTopK ? "topk" : "dense")
      << " density=" << Decimal(spec.up.density) << " k=" << spec.up.k
      << " density_down=" << Decimal(spec.down.density) << " k_down=" << spec.down.k
      << " scope=" << (spec.scope == Scope::kTensor ? "tensor" : "global")
      << " value_format=" << ValueFormatName(spec.value_format)
      << " exchange=" << ExchangeName(spec.exchange) << " dense_fallback=" << spec.dense_fallback
      << " worker_memory=" << spec.worker_memory << " server_memory=" << spec.server_memory
      << " memory_decay=" << Decimal(spec.memory_decay) << " start_step=" << spec.start_step
      << " dense_below=" << spec.dense_below;
}

// Where the set that starts behind `open` ends: its closing bracket, or null if it has none.
const char* EndOfSet(const char* open) {
  const char* at = *open == '!' ? open + 1 : open;
  if (*at == ']') ++at;  // as the first character it stands for itself
  while (*at != '\0' && *at != ']') ++at;
  return *at == ']' ? at : nullptr;
}

bool InSet(const char* set, const char* end, char c) {
  const bool negated = *set == '!';
  if (negated) ++set;
  bool found = false;
  for (; set < end; ++set) {
    if (set + 2 < end && set[1] == '-') {
      found = found || (set[0] <= c && c <= set[2]);
      set += 2;
    } else {
      found = found || *set == c;
    }
  }
  return found != negated;
}

bool MatchesFrom(const char* pattern, const char* name) {
  while (*pattern != '\0') {
    if (*pattern == '*') {
      for (const char* rest = name;; ++rest) {
        if (MatchesFrom(pattern + 1, rest)) return true;
        if (*rest == '\0') return false;
      }
    }
    if (*name == '\0') return false;
    const char* const end = *pattern == '[' ? EndOfSet(pattern + 1) : nullptr;
    if (end != nullptr) {
      if (!InSet(pattern + 1, end, *name)) return false;
      pattern = end;
    } else if (*pattern != '?' && *pattern != *name) {
      return false;
    }
    ++pattern;
    ++name;
  }
  return *name == '\0';
}

}  // namespace

bool MatchesPattern(const std::string& pattern, const std::string& name) {
  return MatchesFrom(pattern.c_str(), name.c_str());
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

std::size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  return 0;
}

const char* ExchangeName(ExchangeKind exchange) {
  switch (exchange) {
    case ExchangeKind::kAuto:
      return "auto";
    case ExchangeKind::kAllgather:
      return "allgather";
    case ExchangeKind::kSharded:
      return "sharded";
    case ExchangeKind::kDense:
      return "dense";
  }
  return "unknown";
}

std::size_t Sparsity::EntriesOf(std::size_t num_entries) const {
  if (k != 0) return static_cast<std::size_t>(std::min<std::uint64_t>(k, num_entries));
  const auto rounded =
      static_cast<std::size_t>(std::floor(density * static_cast<double>(num_entries) + 0.5));
  return std::min(num_entries, std::max<std::size_t>(1, rounded));
}

void Config::Validate() const {
  ValidateSpec(spec);
  for (const Rule& rule : rules) ValidateSpec(rule.spec);
  BITOPK_CHECK_ARG(bucket_bytes >= 1, "Config: bucket_bytes must be at least 1; got ",
                   bucket_bytes);
}

std::string Config::Describe() const {
  std::ostringstream out;
  out << "compression: ";
  DescribeSpec(out, spec);
  for (const Rule& rule : rules) {
    out << "\nrule \"" << rule.pattern << "\": ";
    DescribeSpec(out, rule.spec);
  }
  out << "\nnonfinite=" << NonFiniteName(nonfinite) << "\nseed=" << seed
      << "\nbucket_bytes=" << bucket_bytes << "\ncheck_every=" << check_every;
  return out.str();
}

}  // namespace bitopk
