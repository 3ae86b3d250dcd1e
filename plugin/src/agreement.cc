// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/agreement.h"

#include <cstring>
#include <sstream>

#include "bitopk/kernels/error.h"
#include "plugin/src/unit.h"

namespace bitopk {
namespace {

constexpr std::size_t kMaxDescriptionBytes = std::size_t{256} << 20;

Bytes AsBytes(const void* data, std::size_t num_bytes) {
  return {static_cast<const std::uint8_t*>(data), num_bytes};
}

// The first rank whose part differs from rank 0's; 0 if none does.
int FirstOtherRank(const Communicator& comm, const ReceiveBuffer& receive) {
  const Bytes first = receive.part(0);
  for (int rank = 1; rank < comm.size(); ++rank) {
    const Bytes part = receive.part(rank);
    if (part.size() != first.size() || std::memcmp(part.data(), first.data(), first.size()) != 0)
      return rank;
  }
  return 0;
}

std::string Text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

std::string DescribeTensors(const std::vector<TensorSpec>& tensors) {
  std::ostringstream out;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    out << (i == 0 ? "" : "\n") << "tensor " << i << ": \"" << tensors[i].name << "\" "
        << DTypeName(tensors[i].dtype) << '[' << tensors[i].num_entries << ']';
    if (tensors[i].result_format != kernels::ValueFormat::kFloat32)
      out << " results as format " << static_cast<int>(tensors[i].result_format);
  }
  return out.str();
}

Difference FirstDifference(const std::string& left, const std::string& right) {
  std::istringstream left_lines(left);
  std::istringstream right_lines(right);
  while (true) {
    Difference lines{"nothing", "nothing"};
    const bool more_left = static_cast<bool>(std::getline(left_lines, lines.left));
    const bool more_right = static_cast<bool>(std::getline(right_lines, lines.right));
    if (!more_left) lines.left = "nothing";
    if (!more_right) lines.right = "nothing";
    if (lines.left != lines.right || (!more_left && !more_right)) return lines;
  }
}

void AgreeOnDescription(Communicator& comm, const std::string& description,
                        ReceiveBuffer& receive) {
  MessageTag tag;
  tag.phase = Phase::kAgreement;
  const std::uint64_t hash = HashBytes(description.data(), description.size());
  comm.AllGatherV(tag, AsBytes(&hash, sizeof hash), 0, sizeof hash, receive);
  if (FirstOtherRank(comm, receive) == 0) return;
  tag.message = 1;
  comm.AllGatherV(tag, AsBytes(description.data(), description.size()), 0, kMaxDescriptionBytes,
                  receive);
  const int other = FirstOtherRank(comm, receive);
  const Difference lines = FirstDifference(Text(receive.part(0)), Text(receive.part(other)));
  throw InvalidArgumentError(internal::StrCat("start: ranks disagree: rank 0 has ", lines.left,
                                              "; rank ", other, " has ", lines.right, " (rank ",
                                              comm.rank(), " of ", comm.size(), ")"));
}

void CompareResults(Communicator& comm, std::uint64_t step, std::uint64_t hash,
                    ReceiveBuffer& receive) {
  MessageTag tag;
  tag.phase = Phase::kAgreement;
  tag.message = 2;
  tag.step = step;
  comm.AllGatherV(tag, AsBytes(&hash, sizeof hash), 0, sizeof hash, receive);
  const int other = FirstOtherRank(comm, receive);
  if (other == 0) return;
  throw ReplicaDivergenceError(
      internal::StrCat("step ", step, ": rank ", other, " holds other results than rank 0 (rank ",
                       comm.rank(), " of ", comm.size(), "); restore all ranks from a checkpoint"));
}

}  // namespace bitopk
