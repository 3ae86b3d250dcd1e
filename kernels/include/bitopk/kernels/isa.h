// SPDX-License-Identifier: Apache-2.0
//
// Instruction sets that the kernels exist for, and which of them this machine has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitopk::kernels {

/// Variants of the vectorised kernels. kScalar is plain C++ and exists everywhere.
enum class Isa : std::uint8_t { kScalar = 0, kNeon = 1, kAvx2 = 2, kAvx512 = 3 };

/// "scalar", "neon", "avx2" or "avx512".
const char* IsaName(Isa isa);

/// Variants that are compiled in and that this processor runs, slowest first. Never empty.
std::vector<Isa> SupportedIsas();

/// The fastest of SupportedIsas().
Isa BestIsa();

/// The variant called `name`. @throws InvalidArgumentError if there is none of that name or this
/// processor lacks it; the message lists those it has.
Isa IsaFromName(const std::string& name);

}  // namespace bitopk::kernels
