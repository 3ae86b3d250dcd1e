// SPDX-License-Identifier: Apache-2.0
#include "bitopk/environment.h"

#include <cstdlib>
#include <string>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

std::uint64_t Number(const char* name, const char* text) {
  const std::string digits(text);
  const bool valid = !digits.empty() && digits.size() <= 18 &&
                     digits.find_first_not_of("0123456789") == std::string::npos;
  BITOPK_CHECK_ARG(valid, name, " must be a number of steps; got \"", digits, "\"");
  return std::stoull(digits);
}

}  // namespace

Config WithEnvironment(Config config) {
  if (const char* isa = std::getenv("BITOPK_ISA")) config.isa = kernels::IsaFromName(isa);
  if (const char* steps = std::getenv("BITOPK_CHECK_EVERY")) {
    config.check_every = Number("BITOPK_CHECK_EVERY", steps);
  }
  return config;
}

}  // namespace bitopk
