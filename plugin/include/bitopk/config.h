// SPDX-License-Identifier: Apache-2.0
//
// Settings of an engine: plain values, validated once at construction. The Python class
// bitopk.Compression maps onto them one to one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bitopk/kernels/isa.h"
#include "bitopk/kernels/values.h"

namespace bitopk {

enum class Op : std::uint8_t { kAverage, kSum };
enum class DType : std::uint8_t { kFloat32, kFloat64, kInt32, kInt64 };
enum class Method : std::uint8_t { kTopK, kDense };
enum class Scope : std::uint8_t { kTensor, kGlobal };
enum class ExchangeKind : std::uint8_t { kAuto, kAllgather, kSharded, kDense };
enum class NonFinitePolicy : std::uint8_t { kPropagate, kSkip, kRaise };

const char* DTypeName(DType dtype);
std::size_t DTypeBytes(DType dtype);
const char* ExchangeName(ExchangeKind exchange);

/// How many of a unit's entries to keep: a share of them or a number.
struct Sparsity {
  double density = 0.0;  // in (0, 1]; 0 when `k` is given
  std::uint64_t k = 0;   // >= 1; 0 when `density` is given

  /// min(d, max(1, round(density * d))) with halves up, or min(d, k); 0 for d = 0.
  std::size_t EntriesOf(std::size_t num_entries) const;
};

/// How one group of tensors is compressed.
struct CompressionSpec {
  Method method = Method::kTopK;
  Sparsity up;
  Sparsity down;  // keeping every entry means unidirectional: the sum is not compressed and travels
                  // as float32
  Scope scope = Scope::kTensor;
  kernels::ValueFormat value_format = kernels::ValueFormat::kFloat32;
  ExchangeKind exchange = ExchangeKind::kAuto;
  bool dense_fallback = false;
  bool worker_memory = true;
  bool server_memory = true;
  double memory_decay = 1.0;         // multiplies both old memories in every step
  std::uint64_t start_step = 0;      // dense before this step
  std::uint64_t dense_below = 1024;  // tensors with fewer entries travel dense
};

/// Tensors whose name matches `pattern` (glob: * ? [...]) are compressed as `spec`. The first match
/// wins.
struct Rule {
  std::string pattern;
  CompressionSpec spec;
};

/// Whether `name` as a whole matches the glob `pattern`: * any text, ? any character, [abc] or
/// [a-c] one of these,
/// [!abc] none of these; everything else, the backslash included, stands for itself. Python's
/// fnmatchcase.
bool MatchesPattern(const std::string& pattern, const std::string& name);

struct Config {
  CompressionSpec spec;
  std::vector<Rule> rules;
  NonFinitePolicy nonfinite = NonFinitePolicy::kPropagate;
  std::uint64_t seed = 0;
  std::size_t bucket_bytes = std::size_t{32}
                             << 20;  // dense bytes of the units that share a message
  std::uint64_t check_every =
      100;  // steps between comparisons of the result across ranks; 0: never
  kernels::Isa isa = kernels::BestIsa();

  /// @throws InvalidArgumentError naming the field, what was given and what is allowed.
  void Validate() const;
  /// The settings that must be equal on all ranks, one per line, for the agreement at start and its
  /// errors.
  std::string Describe() const;
};

}  // namespace bitopk
