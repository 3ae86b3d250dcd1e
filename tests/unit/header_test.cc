// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "bitopk/communicator.h"

namespace bitopk {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The example of plugin/WIRE_FORMAT.md, section 1.
const std::array<std::uint8_t, kHeaderBytes> kExample = {
    0x42, 0x4f, 0x54, 0x4b,                          // magic "BOTK"
    0x01,                                            // version
    0x01,                                            // phase: uplink
    0x05, 0x80,                                      // flags 0x8005
    0x02, 0x00, 0x00, 0x00,                          // rank 2
    0x03, 0x00, 0x00, 0x00,                          // message 3
    0x11, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  // step 17
    0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01,  // digest 0x0123456789abcdef
    0x00, 0x10, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00,  // 2^32 + 4096 bytes of payload
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xc0,  // a sum of gradients at scale 2
};

MessageHeader Example() {
  MessageHeader header;
  header.tag = {Phase::kUplink, 3, 17, 0x0123456789abcdefU, -2.0};
  header.flags = 0x8005;
  header.rank = 2;
  header.payload_bytes = (std::uint64_t{1} << 32) + 4096;
  return header;
}

std::vector<std::uint8_t> Encode(const MessageHeader& header) {
  std::vector<std::uint8_t> bytes(kHeaderBytes, 0xff);
  EncodeHeader(header, MutableBytes(bytes.data(), bytes.size()));
  return bytes;
}

template <typename E>
std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception of the expected type";
  return {};
}

TEST(Header, HasTheDocumentedBytes) {
  EXPECT_THAT(Encode(Example()), ::testing::ElementsAreArray(kExample));
}

TEST(Header, DecodesToWhatWasEncoded) {
  const MessageHeader header = DecodeHeader(Bytes(kExample.data(), kExample.size()));
  EXPECT_EQ(header.tag.phase, Phase::kUplink);
  EXPECT_EQ(header.tag.message, 3U);
  EXPECT_EQ(header.tag.step, 17U);
  EXPECT_EQ(header.tag.digest, 0x0123456789abcdefU);
  EXPECT_EQ(header.tag.scale, -2.0);
  EXPECT_EQ(header.flags, 0x8005);
  EXPECT_EQ(header.rank, 2U);
  EXPECT_EQ(header.payload_bytes, (std::uint64_t{1} << 32) + 4096);
}

TEST(Header, RefusesBytesThatAreNotAHeader) {
  struct Case {
    std::size_t offset;
    const char* names;
  };
  for (const Case& each :
       {Case{0, "magic"}, Case{3, "magic"}, Case{4, "version"}, Case{5, "phase"}}) {
    auto bytes = kExample;
    bytes[each.offset] = 0x7e;
    EXPECT_THAT(
        MessageOf<WireFormatError>([&] { DecodeHeader(Bytes(bytes.data(), bytes.size())); }),
        HasSubstr(each.names))
        << "offset " << each.offset;
  }
}

TEST(Header, RefusesAnotherLength) {
  EXPECT_THROW(DecodeHeader(Bytes(kExample.data(), kExample.size() - 1)), WireFormatError);
  EXPECT_THROW(DecodeHeader(Bytes()), WireFormatError);
}

TEST(CheckHeader, AcceptsTheSameCall) {
  const MessageHeader header = Example();
  EXPECT_NO_THROW(CheckHeader(header, header.tag, 2, 0, header.payload_bytes));
}

TEST(CheckHeader, NamesBothOperationsAndScales) {
  MessageTag mine = Example().tag;
  mine.scale = 3.0;
  const std::string message =
      MessageOf<CommunicationError>([&] { CheckHeader(Example(), mine, 2, 0, 1 << 20); });
  EXPECT_THAT(message, HasSubstr("rank 2 has op sum and scale 2"));
  EXPECT_THAT(message, HasSubstr("rank 0 has op average and scale 3"));
}

TEST(CheckHeader, NamesBothSidesOfAnotherCall) {
  MessageTag mine = Example().tag;
  mine.phase = Phase::kDownlink;
  mine.message = 4;
  EXPECT_THAT(MessageOf<CommunicationError>([&] { CheckHeader(Example(), mine, 2, 1, 1); }),
              AllOf(HasSubstr("rank 2 is in uplink of message 3, step 17"),
                    HasSubstr("rank 1 in downlink of message 4, step 17")));
}

TEST(CheckHeader, NamesBothDigests) {
  MessageTag mine = Example().tag;
  mine.digest = 0xfeed;
  EXPECT_THAT(MessageOf<CommunicationError>([&] { CheckHeader(Example(), mine, 2, 1, 1); }),
              AllOf(HasSubstr("rank 2 is 0x123456789abcdef"), HasSubstr("rank 1 0xfeed")));
}

TEST(CheckHeader, RefusesMoreBytesThanAllowed) {
  const MessageHeader header = Example();
  EXPECT_THAT(MessageOf<WireFormatError>([&] {
                CheckHeader(header, header.tag, 2, 1,
                            static_cast<std::size_t>(header.payload_bytes) - 1);
              }),
              AllOf(HasSubstr("rank 2"), HasSubstr("4294971392"), HasSubstr("4294971391")));
}

TEST(CheckHeader, RefusesAHeaderOfAnotherRank) {
  const MessageHeader header = Example();
  EXPECT_THAT(MessageOf<WireFormatError>([&] { CheckHeader(header, header.tag, 1, 0, SIZE_MAX); }),
              AllOf(HasSubstr("from rank 1"), HasSubstr("it is from rank 2")));
}

TEST(PhaseName, NamesEveryPhase) {
  EXPECT_STREQ(PhaseName(Phase::kAgreement), "agreement");
  EXPECT_STREQ(PhaseName(Phase::kUplink), "uplink");
  EXPECT_STREQ(PhaseName(Phase::kThreshold), "threshold");
  EXPECT_STREQ(PhaseName(Phase::kDownlink), "downlink");
  EXPECT_STREQ(PhaseName(Phase::kDense), "dense");
  EXPECT_STREQ(PhaseName(Phase::kUser), "user");
}

TEST(ReceiveBuffer, KeepsItsStorageFromCallToCall) {
  ReceiveBuffer buffer;
  buffer.Reset(2);
  const std::uint8_t* const large = buffer.Allocate(1, 1000).data();
  buffer.Reset(2);
  EXPECT_TRUE(buffer.part(1).empty());
  EXPECT_EQ(buffer.Allocate(1, 10).data(), large);
  EXPECT_EQ(buffer.part(1).size(), 10U);
  EXPECT_EQ(buffer.Allocate(1, 1000).data(), large);
}

TEST(ReceiveBuffer, DoesNotMoveTheStorageOfOtherRanks) {
  ReceiveBuffer buffer;
  buffer.Reset(3);
  const std::uint8_t* const first = buffer.Allocate(0, 8).data();
  buffer.Allocate(2, 1 << 20);
  EXPECT_EQ(buffer.part(0).data(), first);
}

}  // namespace
}  // namespace bitopk
