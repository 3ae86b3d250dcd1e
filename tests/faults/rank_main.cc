// SPDX-License-Identifier: Apache-2.0
//
// One rank of a job that faults_test starts as fresh processes and then hurts. Usage:
//   fault_rank loop DIRECTORY RANK SIZE TIMEOUT_MS PART_BYTES PAUSE_MS   collectives without end
//   fault_rank stranger                                                  somebody else connects
//   first
// Prints "connected" and then a line for each step. Exits with 3 after an error of this library,
// whose message is the last line.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bitopk/gloo_communicator.h"

namespace {

using bitopk::Bytes;
using bitopk::GlooBootstrap;
using bitopk::GlooOptions;

constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

GlooOptions Loopback(std::chrono::milliseconds timeout) {
  GlooOptions options;
  options.hostname = "127.0.0.1";
  options.timeout = timeout;
  return options;
}

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Loop(char** argv) {
  const int rank = std::atoi(argv[1]);
  const int size = std::atoi(argv[2]);
  const std::chrono::milliseconds timeout(std::atoi(argv[3]));
  const auto part_bytes = static_cast<std::size_t>(std::atoll(argv[4]));
  const std::chrono::milliseconds pause(std::atoi(argv[5]));
  const auto comm = bitopk::ConnectThroughFileStore(argv[0], rank, size, Loopback(timeout));
  Say("connected");
  const std::vector<std::uint8_t> part(part_bytes, static_cast<std::uint8_t>(rank));
  const std::vector<Bytes> parts(static_cast<std::size_t>(size), Bytes(part));
  std::vector<std::uint64_t> counts(64);
  bitopk::ReceiveBuffer received;
  bitopk::MessageTag tag;
  for (tag.step = 0;; ++tag.step) {
    tag.phase = bitopk::Phase::kUplink;
    comm->AllToAllV(tag, parts, 0, kMaxBytes, received);
    tag.phase = bitopk::Phase::kThreshold;
    comm->AllReduceSum(tag, counts);
    tag.phase = bitopk::Phase::kDownlink;
    comm->AllGatherV(tag, part, 0, kMaxBytes, received);
    Say("step " + std::to_string(tag.step));
    std::this_thread::sleep_for(pause);
  }
}

// Connects to every socket that `bootstrap` listens on, and writes random bytes there. The
// addresses are laid out as GlooBootstrap packs them: 20 bytes, then one gloo address a rank, which
// begins with a socket address.
void ConnectAsAStranger(const GlooBootstrap& bootstrap, int rank, int size, bool expect_refusal) {
  const std::vector<std::uint8_t>& packed = bootstrap.address();
  const std::size_t each_bytes = (packed.size() - 20) / static_cast<std::size_t>(size);
  std::mt19937 random(20240607);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    sockaddr_in address;
    std::memcpy(&address, packed.data() + 20 + static_cast<std::size_t>(peer) * each_bytes,
                sizeof(address));
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const bool refused =
        connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0;
    if (refused != expect_refusal) {
      Say(refused ? "the stranger was refused" : "the stranger was not refused");
      std::_Exit(4);
    }
    if (!refused) {
      std::vector<std::uint8_t> garbage(4096);
      for (std::uint8_t& byte : garbage) byte = static_cast<std::uint8_t>(random());
      if (send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL) < 0) std::_Exit(5);
    }
    close(fd);
  }
}

void Stranger() {
  const auto timeout = std::chrono::milliseconds(2000);
  {  // after Connect nothing listens any more
    GlooBootstrap zero(0, 2, Loopback(timeout));
    GlooBootstrap one(1, 2, Loopback(timeout));
    const std::vector<std::vector<std::uint8_t>> addresses = {zero.address(), one.address()};
    std::thread other([&] {
      const auto comm = one.Connect(addresses);
      bitopk::ReceiveBuffer received;
      comm->AllGatherV({}, Bytes(), 0, 0, received);
    });
    const auto comm = zero.Connect(addresses);
    ConnectAsAStranger(zero, 0, 2, true);
    ConnectAsAStranger(one, 1, 2, true);
    bitopk::ReceiveBuffer received;
    comm->AllGatherV({}, Bytes(), 0, 0, received);
    other.join();
    Say("connected");
  }
  GlooBootstrap zero(0, 2, Loopback(timeout));
  GlooBootstrap one(1, 2, Loopback(timeout));
  ConnectAsAStranger(zero, 0, 2, false);
  ConnectAsAStranger(one, 1, 2, false);
  const std::vector<std::vector<std::uint8_t>> addresses = {zero.address(), one.address()};
  std::thread other([&] {
    try {
      one.Connect(addresses);
      std::_Exit(6);
    } catch (const bitopk::CommunicationError&) {
    }
  });
  try {
    zero.Connect(addresses);
  } catch (...) {
    other.join();
    throw;
  }
  std::_Exit(7);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 8 && std::strcmp(argv[1], "loop") == 0) {
      Loop(argv + 2);
    } else if (argc == 2 && std::strcmp(argv[1], "stranger") == 0) {
      Stranger();
    }
    std::fprintf(stderr, "fault_rank: see the source for its arguments\n");
    return 2;
  } catch (const bitopk::Error& error) {
    Say(error.what());
    return 3;
  }
}
