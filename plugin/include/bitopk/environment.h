// SPDX-License-Identifier: Apache-2.0
//
// The environment variables that the engine knows, read here and nowhere else. Explicit arguments
// win over them.
#pragma once

#include "bitopk/config.h"

namespace bitopk {

/// `config` with what the environment says:
///   BITOPK_ISA          scalar, neon, avx2 or avx512: forces the variant of the kernels
///   BITOPK_CHECK_EVERY  steps between comparisons of the results across ranks; 0 turns them off
/// @throws InvalidArgumentError  for a value that cannot be honoured.
Config WithEnvironment(Config config);

}  // namespace bitopk
