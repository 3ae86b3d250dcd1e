// SPDX-License-Identifier: Apache-2.0
//
// Checks that all ranks mean the same thing, at start and now and then.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/tensor.h"

namespace bitopk {

/// Tensors in registration order as text, a line each.
std::string DescribeTensors(const std::vector<TensorSpec>& tensors);

/// The first line in which two descriptions differ, as "<left>" and "<right>"; "nothing" where one
/// of them ends.
struct Difference {
  std::string left;
  std::string right;
};
Difference FirstDifference(const std::string& left, const std::string& right);

/// Collective: compares `description` over the ranks (8 bytes each; the text travels only if hashes
/// differ).
/// @throws InvalidArgumentError  on every rank if they differ, naming two ranks and what each has.
void AgreeOnDescription(Communicator& comm, const std::string& description, ReceiveBuffer& receive);

/// Collective: compares a hash of the results of `step`.
/// @throws ReplicaDivergenceError  on every rank if they differ, naming the first rank that differs
/// from rank 0.
void CompareResults(Communicator& comm, std::uint64_t step, std::uint64_t hash,
                    ReceiveBuffer& receive);

}  // namespace bitopk
