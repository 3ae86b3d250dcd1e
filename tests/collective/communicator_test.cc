// SPDX-License-Identifier: Apache-2.0
//
// The contract of Communicator, for every implementation and several world sizes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <numeric>
#include <string>
#include <tuple>

#include "tests/support/run_ranks.h"

namespace bitopk {
namespace {

using ::bitopk::testing::Outcome;
using ::bitopk::testing::RankBody;
using ::bitopk::testing::Transport;
using ::bitopk::testing::TransportName;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr std::size_t kNoLimit = std::size_t{1} << 30;

MessageTag Tag(std::uint64_t step, Phase phase = Phase::kUplink, std::uint32_t message = 0) {
  MessageTag tag;
  tag.phase = phase;
  tag.message = message;
  tag.step = step;
  tag.digest = 0xd1935;
  return tag;
}

// Bytes that tell who sent what to whom.
std::vector<std::uint8_t> Pattern(int from, int to, std::size_t num_bytes) {
  std::vector<std::uint8_t> bytes(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    bytes[i] = static_cast<std::uint8_t>(31 * from + 7 * to + static_cast<int>(i * i % 251));
  }
  return bytes;
}

std::vector<Bytes> Views(const std::vector<std::vector<std::uint8_t>>& parts) {
  return std::vector<Bytes>(parts.begin(), parts.end());
}

void ExpectPart(const ReceiveBuffer& received, int from,
                const std::vector<std::uint8_t>& expected) {
  const Bytes part = received.part(from);
  ASSERT_EQ(part.size(), expected.size()) << "from rank " << from;
  EXPECT_TRUE(expected.empty() || std::memcmp(part.data(), expected.data(), part.size()) == 0)
      << "from rank " << from;
}

// All ranks exchange parts of `num_bytes(from, to)` bytes and check what arrives, and the byte
// counters.
void ExchangeAndCheck(Communicator& comm, std::uint64_t step,
                      const std::function<std::size_t(int, int)>& num_bytes) {
  std::vector<std::vector<std::uint8_t>> parts;
  std::uint64_t sent = comm.bytes_sent();
  std::uint64_t taken = comm.bytes_received();
  for (int to = 0; to < comm.size(); ++to) {
    parts.push_back(Pattern(comm.rank(), to, num_bytes(comm.rank(), to)));
    if (to == comm.rank()) continue;
    sent += kHeaderBytes + parts.back().size();
    taken += kHeaderBytes + num_bytes(to, comm.rank());
  }
  ReceiveBuffer received;
  comm.AllToAllV(Tag(step), Views(parts), static_cast<std::uint16_t>(100 + comm.rank()), kNoLimit,
                 received);
  for (int from = 0; from < comm.size(); ++from) {
    ExpectPart(received, from, Pattern(from, comm.rank(), num_bytes(from, comm.rank())));
    EXPECT_EQ(received.flags(from), 100 + from);
  }
  EXPECT_EQ(comm.bytes_sent(), sent);
  EXPECT_EQ(comm.bytes_received(), taken);
}

class CommunicatorTest : public ::testing::TestWithParam<std::tuple<Transport, int>> {
 protected:
  Transport transport() const { return std::get<0>(GetParam()); }
  int world_size() const { return std::get<1>(GetParam()); }
  void Run(const RankBody& body) const { testing::RunRanks(transport(), world_size(), body); }
  Outcome Try(const RankBody& body,
              std::chrono::milliseconds timeout = testing::kTestTimeout) const {
    return testing::TryRanks(transport(), world_size(), body, timeout);
  }
  // Every rank failed with E (or a class of its own kind), in words that match.
  template <typename Matcher>
  void ExpectAllFailed(const Outcome& outcome, const Matcher& matcher) const {
    for (int rank = 0; rank < world_size(); ++rank) {
      EXPECT_THAT(outcome.message(rank), matcher) << "rank " << rank;
    }
  }
};

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Transport, int>>& info) {
  return TransportName(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param));
}

const auto kTransports = ::testing::Values(Transport::kGloo, Transport::kInProcess);

INSTANTIATE_TEST_SUITE_P(, CommunicatorTest,
                         ::testing::Combine(kTransports, ::testing::Values(1, 2, 3, 5, 8)), NameOf);

// What takes at least two ranks.
class PeersTest : public CommunicatorTest {};

INSTANTIATE_TEST_SUITE_P(, PeersTest,
                         ::testing::Combine(kTransports, ::testing::Values(2, 3, 5, 8)), NameOf);

TEST_P(CommunicatorTest, AllToAllDeliversEveryPart) {
  Run([](Communicator& comm) {
    ExchangeAndCheck(comm, 1, [](int, int) { return std::size_t{1000}; });
  });
}

TEST_P(CommunicatorTest, AllToAllDeliversUnevenAndEmptyParts) {
  Run([](Communicator& comm) {
    ExchangeAndCheck(comm, 1, [](int from, int to) {
      return static_cast<std::size_t>((from + 2 * to) % 3 == 0 ? 0 : 10000 * from + 777 * to + 1);
    });
  });
}

TEST_P(CommunicatorTest, AllToAllOfNothingIsLegal) {
  Run([](Communicator& comm) {
    for (std::uint64_t step = 0; step < 3; ++step) {
      ExchangeAndCheck(comm, step, [](int, int) { return std::size_t{0}; });
    }
  });
}

// Around the sizes at which a message is sent in another way.
TEST_P(CommunicatorTest, AllToAllDeliversPartsOfAnySize) {
  Run([](Communicator& comm) {
    for (const std::size_t size :
         {1U, 47U, 48U, 16383U, 16384U, 16385U, 1048575U, 1048576U, 1048577U}) {
      ExchangeAndCheck(comm, size, [size](int from, int to) {
        return size + static_cast<std::size_t>(from == 0 && to == 1);
      });
    }
  });
}

TEST_P(CommunicatorTest, AllToAllDeliversALargePart) {
  Run([](Communicator& comm) {
    ExchangeAndCheck(comm, 1, [](int from, int to) {
      return from == 0 && to != 0 ? std::size_t{8} << 20 : std::size_t{3};
    });
  });
}

TEST_P(CommunicatorTest, AllGatherDeliversTheSameBytesToAll) {
  Run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    ReceiveBuffer received;
    for (const std::size_t size : {std::size_t{0}, std::size_t{5}, std::size_t{100000}}) {
      const std::uint64_t sent = comm.bytes_sent();
      const auto size_of = [size](int rank) { return size * static_cast<std::size_t>(rank); };
      const auto mine = Pattern(comm.rank(), 0, size_of(comm.rank()));
      comm.AllGatherV(Tag(size), mine, 9, kNoLimit, received);
      for (int from = 0; from < comm.size(); ++from) {
        ExpectPart(received, from, Pattern(from, 0, size_of(from)));
        EXPECT_EQ(received.flags(from), 9);
      }
      EXPECT_EQ(comm.bytes_sent(), sent + (n - 1) * (kHeaderBytes + mine.size()));
    }
  });
}

TEST_P(CommunicatorTest, AllReduceSumAddsOnEveryRank) {
  Run([](Communicator& comm) {
    const auto n = static_cast<std::uint64_t>(comm.size());
    for (const std::size_t num_counts : {0U, 1U, 2U, 7U, 64U, 10001U}) {
      std::vector<std::uint64_t> counts(num_counts);
      std::iota(counts.begin(), counts.end(), std::uint64_t{1} << (comm.rank() + 50));
      comm.AllReduceSum(Tag(num_counts, Phase::kThreshold), counts);
      const std::uint64_t bases = ((std::uint64_t{1} << n) - 1) << 50;  // may wrap, as documented
      for (std::size_t i = 0; i < num_counts; ++i) ASSERT_EQ(counts[i], bases + n * i);
    }
  });
}

TEST_P(CommunicatorTest, AllReduceSumSendsTwoSharesAndOneHeader) {
  Run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    std::vector<std::uint64_t> counts(64, 1);
    const std::uint64_t sent = comm.bytes_sent();
    const std::uint64_t taken = comm.bytes_received();
    comm.AllReduceSum(Tag(1, Phase::kThreshold), counts);
    const std::size_t own = 8 * (64 / n + (static_cast<std::size_t>(comm.rank()) < 64 % n ? 1 : 0));
    const std::size_t expected = (n - 1) * (kHeaderBytes + own) + (8 * 64 - own);
    EXPECT_EQ(comm.bytes_sent() - sent, expected);
    EXPECT_EQ(comm.bytes_received() - taken, expected);
    if (n == 8) {
      EXPECT_LE(expected, 1300U);
    }
  });
}

TEST_P(CommunicatorTest, AllReduceDenseAddsOnEveryRank) {
  Run([](Communicator& comm) {
    const int n = comm.size();
    for (const std::size_t size : {0U, 1U, 3U, 1003U, 300000U}) {
      std::vector<float> values(size);
      for (std::size_t i = 0; i < size; ++i) {
        values[i] = static_cast<float>(static_cast<int>(i % 1000) * (comm.rank() + 1));
      }
      const std::uint64_t sent = comm.bytes_sent();
      comm.AllReduceDense(Tag(size, Phase::kDense), values);
      for (std::size_t i = 0; i < size; ++i) {
        ASSERT_EQ(values[i], static_cast<float>(static_cast<int>(i % 1000) * n * (n + 1) / 2));
      }
      const std::size_t ring = 2 * (4 * size - 4 * size / static_cast<std::size_t>(n));
      EXPECT_EQ(comm.bytes_sent() - sent, (static_cast<std::size_t>(n) - 1) * kHeaderBytes + ring);
    }
  });
}

TEST_P(CommunicatorTest, ManySmallCallsOfAllKinds) {
  Run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    ReceiveBuffer received;
    std::vector<std::vector<std::uint8_t>> parts(n);
    for (std::uint64_t step = 0; step < 2000; ++step) {
      for (std::size_t to = 0; to < n; ++to) {
        parts[to].assign((step + to) % 40, static_cast<std::uint8_t>(step + 3 * to));
      }
      if (step % 3 == 0) {
        std::vector<std::uint64_t> counts(step % 20, 1);
        comm.AllReduceSum(Tag(step), counts);
        for (const std::uint64_t count : counts) ASSERT_EQ(count, n);
      } else if (step % 3 == 1) {
        comm.AllGatherV(Tag(step), parts[0], 0, kNoLimit, received);
        for (int from = 0; from < comm.size(); ++from) ExpectPart(received, from, parts[0]);
      } else {
        comm.AllToAllV(Tag(step), Views(parts), 0, kNoLimit, received);
        for (int from = 0; from < comm.size(); ++from) {
          ExpectPart(received, from, parts[static_cast<std::size_t>(comm.rank())]);
        }
      }
    }
  });
}

TEST_P(CommunicatorTest, ARankMayLeaveWhileOthersFinishTheLastCall) {
  for (int round = 0; round < 5; ++round) {
    Run([](Communicator& comm) {
      ExchangeAndCheck(comm, 1, [](int from, int to) {
        return static_cast<std::size_t>(300000 * (1 + (from + to) % 3));
      });
    });
  }
}

TEST_P(PeersTest, DifferentCallsAreAnErrorThatNamesBothSides) {
  const int odd = world_size() - 1;
  const Outcome outcome = Try([odd](Communicator& comm) {
    ReceiveBuffer received;
    const bool is_odd = comm.rank() == odd;
    comm.AllGatherV(Tag(17, is_odd ? Phase::kDownlink : Phase::kUplink, is_odd ? 4 : 3), Bytes(), 0,
                    kNoLimit, received);
  });
  for (const std::exception_ptr& error : outcome.errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_THROW(std::rethrow_exception(error), CommunicationError);
  }
  ExpectAllFailed(outcome, HasSubstr("uplink of message 3, step 17"));
  ExpectAllFailed(outcome, HasSubstr("downlink of message 4, step 17"));
  ExpectAllFailed(outcome, HasSubstr("rank " + std::to_string(odd)));
}

TEST_P(PeersTest, DifferentDigestsAreAnErrorOnAllRanks) {
  const Outcome outcome = Try([](Communicator& comm) {
    ReceiveBuffer received;
    MessageTag tag = Tag(17);
    if (comm.rank() == 1) tag.digest = 0xbad;
    // Large parts are under way when the ranks disagree.
    const auto part = Pattern(0, 0, 3 << 20);
    comm.AllGatherV(tag, part, 0, kNoLimit, received);
  });
  ExpectAllFailed(outcome, HasSubstr("the digest of rank"));
  ExpectAllFailed(outcome, HasSubstr("0xbad"));
}

TEST_P(PeersTest, TooLargeAPartIsRefusedWithoutTakingMemory) {
  for (const std::size_t size : {101U, 5U << 20}) {
    const Outcome outcome = Try([size](Communicator& comm) {
      ReceiveBuffer received;
      const auto part = Pattern(0, 0, comm.rank() == 0 ? size : 100);
      try {
        comm.AllGatherV(Tag(1), part, 0, 100, received);
        comm.AllGatherV(Tag(2), Bytes(), 0, 100, received);  // where rank 0 hears of it
      } catch (...) {
        EXPECT_LE(received.part(0).size(), comm.rank() == 0 ? size : 100);
        throw;
      }
    });
    int refused = 0;
    for (int rank = 1; rank < world_size(); ++rank) {
      try {
        ASSERT_NE(outcome.errors[static_cast<std::size_t>(rank)], nullptr);
        std::rethrow_exception(outcome.errors[static_cast<std::size_t>(rank)]);
      } catch (const WireFormatError&) {
        ++refused;
      } catch (const CommunicationError&) {
      }
    }
    EXPECT_GE(refused, 1);
    ExpectAllFailed(outcome, HasSubstr("rank 0 announces " + std::to_string(size) + " bytes"));
  }
}

TEST_P(PeersTest, DifferentNumbersOfCountsAreAnErrorOnAllRanks) {
  for (const std::size_t more : {1U, 65536U}) {
    const Outcome outcome = Try([more](Communicator& comm) {
      std::vector<std::uint64_t> counts(64 + (comm.rank() == 1 ? more : 0), 1);
      comm.AllReduceSum(Tag(5, Phase::kThreshold), counts);
    });
    ExpectAllFailed(outcome, HasSubstr("threshold of message 0, step 5"));
    ExpectAllFailed(outcome, HasSubstr("rank 1"));
    ExpectAllFailed(outcome, AnyOf(HasSubstr("number of entries"), HasSubstr("digest")));
  }
}

TEST_P(CommunicatorTest, AbortFromAnotherThreadWakesEveryRank) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> ready{0};
  const int n = world_size();
  const Outcome outcome = Try([&ready, n](Communicator& comm) {
    ReceiveBuffer received;
    comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received);
    ++ready;
    if (comm.rank() != n - 1) {
      comm.AllGatherV(Tag(2), Bytes(), 0, kNoLimit, received);  // waits for the last rank
      return;
    }
    std::thread other([&] {
      while (ready < n) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      comm.Abort("the data loader failed");
      comm.Abort("and again");
    });
    other.join();
    comm.AllGatherV(Tag(2), Bytes(), 0, kNoLimit, received);
  });
  ExpectAllFailed(outcome,
                  HasSubstr("rank " + std::to_string(n - 1) + " aborted: the data loader failed"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST_P(PeersTest, AbortWakesABlockedCallOfTheSameRank) {
  std::atomic<bool> woken{false};
  const Outcome outcome = Try([&woken](Communicator& comm) {
    ReceiveBuffer received;
    if (comm.rank() != 0) {  // keeps rank 0 waiting
      while (!woken) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received);
      return;
    }
    std::thread other([&] {
      while (comm.waiting().ranks.empty()) std::this_thread::yield();
      comm.Abort("enough");
    });
    try {
      comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received);
      ADD_FAILURE() << "no exception";
    } catch (const CommunicationError&) {
      woken = true;
      other.join();
      throw;
    }
  });
  ExpectAllFailed(outcome, HasSubstr("rank 0 aborted: enough"));
}

TEST_P(CommunicatorTest, AfterAFailureEveryCallFailsWithTheFirstCause) {
  std::atomic<int> connected{0};
  Run([&connected](Communicator& comm) {
    ++connected;
    while (connected < comm.size()) std::this_thread::yield();
    comm.Abort("no reason");
    ReceiveBuffer received;
    std::vector<std::uint64_t> counts(3);
    std::vector<float> values(3);
    const std::vector<Bytes> parts(static_cast<std::size_t>(comm.size()));
    std::vector<std::function<void()>> calls = {
        [&] { comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received); },
        [&] { comm.AllToAllV(Tag(1), parts, 0, kNoLimit, received); },
        [&] { comm.AllReduceSum(Tag(1), counts); }, [&] { comm.AllReduceDense(Tag(1), values); }};
    std::string first;
    for (const auto& call : calls) {
      try {
        call();
        ADD_FAILURE() << "no exception";
      } catch (const CommunicationError& error) {
        EXPECT_THAT(error.what(), HasSubstr("aborted: no reason"));
        if (first.empty()) first = error.what();
        EXPECT_EQ(first, error.what());
      }
    }
  });
}

TEST_P(PeersTest, ARankThatLeavesEarlyIsNamed) {
  const Outcome outcome = Try([](Communicator& comm) {
    ReceiveBuffer received;
    comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received);
    if (comm.rank() == 1) return;
    comm.AllGatherV(Tag(2), Bytes(), 0, kNoLimit, received);
  });
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_THAT(outcome.message(rank), HasSubstr("rank 1 has closed its communicator"));
  }
}

TEST_P(PeersTest, ASilentRankIsNamedWhenTheTimeIsUp) {
  std::atomic<int> done{0};
  const int n = world_size();
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome = Try(
      [&done, n](Communicator& comm) {
        ReceiveBuffer received;
        comm.AllGatherV(Tag(1), Bytes(), 0, kNoLimit, received);
        if (comm.rank() == 1) {
          while (done < n - 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));
          return;
        }
        try {
          comm.AllGatherV(Tag(2), Bytes(), 0, kNoLimit, received);
        } catch (...) {
          ++done;
          throw;
        }
        ++done;
      },
      std::chrono::milliseconds(1500));
  for (int rank = 0; rank < n; ++rank) {
    if (rank == 1) continue;
    EXPECT_THAT(outcome.message(rank), HasSubstr("no answer from rank 1 within 1500 ms"));
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
}

TEST_P(PeersTest, TellsWhomItWaitsFor) {
  std::atomic<bool> seen{false};
  Run([&seen](Communicator& comm) {
    ReceiveBuffer received;
    EXPECT_TRUE(comm.waiting().ranks.empty());
    if (comm.rank() == 1) {
      while (!seen) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::thread observer;
    if (comm.rank() == 0) {
      observer = std::thread([&] {
        const auto end = std::chrono::steady_clock::now() + testing::kTestTimeout / 2;
        while (!seen && std::chrono::steady_clock::now() < end) {
          const Communicator::Waiting waiting = comm.waiting();
          if (waiting.ranks == std::vector<int>{1}) {
            EXPECT_EQ(waiting.what, "uplink of message 0, step 8");
            EXPECT_LE(waiting.since, std::chrono::steady_clock::now());
            seen = true;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        EXPECT_TRUE(seen.exchange(true)) << "never saw it wait for rank 1 alone";
      });
    }
    comm.AllGatherV(Tag(8), Bytes(), 0, kNoLimit, received);
    if (observer.joinable()) observer.join();
    EXPECT_TRUE(comm.waiting().ranks.empty());
  });
}

TEST_P(CommunicatorTest, AWrongNumberOfPartsHurtsNobody) {
  Run([](Communicator& comm) {
    ReceiveBuffer received;
    const std::vector<Bytes> parts(static_cast<std::size_t>(comm.size()) + 1);
    EXPECT_THROW(comm.AllToAllV(Tag(1), parts, 0, kNoLimit, received), InvalidArgumentError);
    ExchangeAndCheck(comm, 1, [](int, int) { return std::size_t{10}; });
  });
}

// One rank's thread is busy elsewhere while the others' bytes pile up; then it ends without a call.
TEST_P(PeersTest, DestructionDoesNotWaitForPeersThatAreStuck) {
  const Outcome outcome = Try([](Communicator& comm) {
    ReceiveBuffer received;
    const auto part = Pattern(0, 0, 8 << 20);
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      return;
    }
    comm.AllGatherV(Tag(1), part, 0, kNoLimit, received);
  });
  for (int rank = 1; rank < world_size(); ++rank) {
    EXPECT_THAT(outcome.message(rank), HasSubstr("rank 0")) << "rank " << rank;
  }
}

TEST(InProcessCommunicator, ServesAHundredRanks) {
  const auto begin = std::chrono::steady_clock::now();
  testing::RunRanks(Transport::kInProcess, 100, [](Communicator& comm) {
    for (std::uint64_t step = 0; step < 20; ++step) {
      ExchangeAndCheck(comm, step, [](int from, int to) {
        return static_cast<std::size_t>(from) + static_cast<std::size_t>(to);
      });
      std::vector<std::uint64_t> counts(64, 2);
      comm.AllReduceSum(Tag(step), counts);
      EXPECT_EQ(counts, std::vector<std::uint64_t>(64, 200));
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(InProcessGroup, RefusesNonsense) {
  EXPECT_THROW(InProcessGroup(0, std::chrono::seconds(1)), InvalidArgumentError);
  EXPECT_THROW(InProcessGroup(2, std::chrono::seconds(0)), InvalidArgumentError);
  InProcessGroup group(2, std::chrono::seconds(1));
  EXPECT_THROW(group.communicator(2), InvalidArgumentError);
  EXPECT_THROW(group.communicator(-1), InvalidArgumentError);
  const auto taken = group.communicator(0);
  EXPECT_THROW(group.communicator(0), InvalidArgumentError);
}

GlooOptions Loopback(std::chrono::milliseconds timeout = testing::kTestTimeout) {
  GlooOptions options;
  options.hostname = "127.0.0.1";
  options.timeout = timeout;
  return options;
}

TEST(GlooBootstrap, RefusesNonsense) {
  EXPECT_THROW(GlooBootstrap(2, 2, Loopback()), InvalidArgumentError);
  EXPECT_THROW(GlooBootstrap(-1, 2, Loopback()), InvalidArgumentError);
  EXPECT_THROW(GlooBootstrap(0, 2, Loopback(std::chrono::milliseconds(0))), InvalidArgumentError);
  GlooOptions options;
  options.interface = "no-such-interface";
  try {
    const GlooBootstrap bootstrap(0, 2, options);
    ADD_FAILURE() << "no exception";
  } catch (const InvalidArgumentError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no-such-interface"));
    EXPECT_THAT(error.what(), HasSubstr("lo"));
  }
  options.interface.clear();
  options.hostname = "no-such-host.invalid";
  EXPECT_THROW(GlooBootstrap(0, 2, options), InvalidArgumentError);
}

TEST(GlooBootstrap, NamesTheInterfaceItChose) {
  EXPECT_EQ(GlooBootstrap(0, 2, Loopback()).interface_description(), "lo (127.0.0.1)");
  GlooOptions options;
  options.interface = "lo";
  EXPECT_EQ(GlooBootstrap(0, 2, options).interface_description(), "lo (127.0.0.1)");
  EXPECT_FALSE(GlooBootstrap(0, 2).interface_description().empty());
}

TEST(GlooBootstrap, RefusesAddressesOfAnotherWorld) {
  GlooBootstrap first(0, 2, Loopback());
  GlooBootstrap second(1, 2, Loopback());
  GlooBootstrap other(1, 3, Loopback());
  const auto& a = first.address();
  const auto& b = second.address();
  EXPECT_THROW(first.Connect({a}), InvalidArgumentError);
  EXPECT_THROW(first.Connect({b, a}), InvalidArgumentError);
  EXPECT_THROW(first.Connect({a, other.address()}), InvalidArgumentError);
  EXPECT_THROW(first.Connect({a, {}}), InvalidArgumentError);
  EXPECT_THROW(first.Connect({a, std::vector<std::uint8_t>(b.begin(), b.end() - 1)}),
               InvalidArgumentError);
}

TEST(GlooBootstrap, NamesARankThatDoesNotConnect) {
  GlooBootstrap first(0, 2, Loopback(std::chrono::milliseconds(500)));
  GlooBootstrap second(1, 2, Loopback());
  try {
    first.Connect({first.address(), second.address()});
    ADD_FAILURE() << "no exception";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    EXPECT_THAT(error.what(), HasSubstr("500 ms"));
  }
}

TEST(GlooCommunicator, LeavesTheSignalMaskAlone) {
  testing::RunRanks(2, [](Communicator& comm) {
    sigset_t before;
    sigset_t after;
    sigemptyset(&before);
    sigemptyset(&after);
    pthread_sigmask(SIG_SETMASK, nullptr, &before);
    ExchangeAndCheck(comm, 1, [](int, int) { return std::size_t{10}; });
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    for (int signal = 1; signal < NSIG; ++signal) {
      EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal)) << signal;
    }
  });
}

}  // namespace
}  // namespace bitopk
