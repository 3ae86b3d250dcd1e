// SPDX-License-Identifier: Apache-2.0
//
// The 48-byte header in front of every part; see plugin/WIRE_FORMAT.md, section 1.
#include <cassert>
#include <cstring>
#include <ios>

#include "bitopk/communicator.h"

namespace bitopk {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are copied as little-endian");

constexpr std::uint32_t kMagic = 0x4b544f42;  // "BOTK"
constexpr std::uint8_t kVersion = 1;
constexpr std::uint8_t kLastPhase = static_cast<std::uint8_t>(Phase::kUser);

// The header as it lies on the wire: every field at its natural alignment, so without gaps.
struct WireHeader {
  std::uint32_t magic;
  std::uint8_t version;
  std::uint8_t phase;
  std::uint16_t flags;
  std::uint32_t rank;
  std::uint32_t message;
  std::uint64_t step;
  std::uint64_t digest;
  std::uint64_t payload_bytes;
  double scale;
};
static_assert(sizeof(WireHeader) == kHeaderBytes);

[[noreturn]] void ThrowField(const char* field, std::uint64_t got, std::uint64_t expected) {
  throw WireFormatError(internal::StrCat("DecodeHeader: ", field, "; got 0x", std::hex, got,
                                         ", expected 0x", expected));
}

std::string DescribeStep(double scale) {
  return internal::StrCat("op ", scale < 0 ? "sum" : "average", " and scale ",
                          scale < 0 ? -scale : scale);
}

}  // namespace

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kAgreement:
      return "agreement";
    case Phase::kUplink:
      return "uplink";
    case Phase::kThreshold:
      return "threshold";
    case Phase::kDownlink:
      return "downlink";
    case Phase::kDense:
      return "dense";
    case Phase::kUser:
      return "user";
  }
  return "unknown phase";
}

std::string DescribeTag(const MessageTag& tag) {
  return internal::StrCat(PhaseName(tag.phase), " of message ", tag.message, ", step ", tag.step);
}

void EncodeHeader(const MessageHeader& header, MutableBytes out) {
  assert(out.size() == kHeaderBytes);
  WireHeader wire = {};
  wire.magic = kMagic;
  wire.version = kVersion;
  wire.phase = static_cast<std::uint8_t>(header.tag.phase);
  wire.flags = header.flags;
  wire.rank = header.rank;
  wire.message = header.tag.message;
  wire.step = header.tag.step;
  wire.digest = header.tag.digest;
  wire.payload_bytes = header.payload_bytes;
  wire.scale = header.tag.scale;
  std::memcpy(out.data(), &wire, kHeaderBytes);
}

MessageHeader DecodeHeader(Bytes in) {
  if (in.size() != kHeaderBytes) {
    throw WireFormatError(internal::StrCat("DecodeHeader: bytes of the header; got ", in.size(),
                                           ", expected ", kHeaderBytes));
  }
  WireHeader wire;
  std::memcpy(&wire, in.data(), kHeaderBytes);
  if (wire.magic != kMagic) ThrowField("magic number", wire.magic, kMagic);
  if (wire.version != kVersion) ThrowField("version of the header", wire.version, kVersion);
  if (wire.phase > kLastPhase) ThrowField("phase, at most", wire.phase, kLastPhase);

  MessageHeader header;
  header.tag.phase = static_cast<Phase>(wire.phase);
  header.tag.message = wire.message;
  header.tag.step = wire.step;
  header.tag.digest = wire.digest;
  header.tag.scale = wire.scale;
  header.flags = wire.flags;
  header.rank = wire.rank;
  header.payload_bytes = wire.payload_bytes;
  return header;
}

void CheckHeader(const MessageHeader& got, const MessageTag& expected, int rank, int my_rank,
                 std::size_t max_bytes) {
  const auto where = [&] { return DescribeTag(expected); };  // built only for errors
  if (got.rank != static_cast<std::uint32_t>(rank)) {
    throw WireFormatError(internal::StrCat(where(), ": a header on the link from rank ", rank,
                                           " to rank ", my_rank, " says it is from rank ",
                                           got.rank));
  }
  if (got.tag.phase != expected.phase || got.tag.message != expected.message ||
      got.tag.step != expected.step) {
    throw CommunicationError(internal::StrCat(where(), ": the ranks make different calls: rank ",
                                              rank, " is in ", DescribeTag(got.tag), ", rank ",
                                              my_rank, " in ", where()));
  }
  if (got.tag.scale != expected.scale) {  // true for NaN, too
    throw CommunicationError(internal::StrCat(where(), ": the ranks disagree about the step: rank ",
                                              rank, " has ", DescribeStep(got.tag.scale), ", rank ",
                                              my_rank, " has ", DescribeStep(expected.scale)));
  }
  if (got.tag.digest != expected.digest) {
    throw CommunicationError(internal::StrCat(
        where(), ": the ranks disagree about the units or their settings: the digest of rank ",
        rank, " is 0x", std::hex, got.tag.digest, std::dec, ", that of rank ", my_rank, " 0x",
        std::hex, expected.digest,
        ". Did only some of them call set_density, rollback or load_state_dict?"));
  }
  if (got.payload_bytes > max_bytes) {
    throw WireFormatError(internal::StrCat(where(), ": rank ", rank, " announces ",
                                           got.payload_bytes, " bytes to rank ", my_rank,
                                           ", expected at most ", max_bytes));
  }
}

}  // namespace bitopk
