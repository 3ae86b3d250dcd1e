// SPDX-License-Identifier: Apache-2.0
#include "bitopk/kernels/isa.h"

#include "bitopk/kernels/error.h"

namespace bitopk::kernels {

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Isa BestIsa() { return SupportedIsas().back(); }

Isa IsaFromName(const std::string& name) {
  std::string known;
  for (const Isa isa : SupportedIsas()) {
    if (name == IsaName(isa)) return isa;
    known += known.empty() ? "" : ", ";
    known += IsaName(isa);
  }
  throw InvalidArgumentError("instruction set: got \"" + name + "\", this machine has " + known);
}

}  // namespace bitopk::kernels
