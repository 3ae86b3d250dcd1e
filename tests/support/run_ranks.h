// SPDX-License-Identifier: Apache-2.0
//
// Runs a function as every rank of a world, a thread each, over real Gloo on loopback or over the
// in-process communicator. For collective tests.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bitopk/communicator.h"
#include "bitopk/gloo_communicator.h"
#include "bitopk/in_process.h"

namespace bitopk::testing {

enum class Transport { kGloo, kInProcess };

inline const char* TransportName(Transport transport) {
  return transport == Transport::kGloo ? "Gloo" : "InProcess";
}

/// Long enough for a busy machine under a sanitizer; nothing waits longer.
inline constexpr std::chrono::milliseconds kTestTimeout = std::chrono::seconds(60);

using RankBody = std::function<void(Communicator&)>;

/// Makes the communicators of a world: `make(rank)` is to be called by one thread a rank.
inline std::function<std::unique_ptr<Communicator>(int)> MakeWorld(
    Transport transport, int world_size, std::chrono::milliseconds timeout) {
  if (transport == Transport::kInProcess) {
    auto group = std::make_shared<InProcessGroup>(world_size, timeout);
    return [group](int rank) { return group->communicator(rank); };
  }
  GlooOptions options;
  options.hostname = "127.0.0.1";
  options.timeout = timeout;
  auto bootstraps = std::make_shared<std::vector<GlooBootstrap>>();
  auto addresses = std::make_shared<std::vector<std::vector<std::uint8_t>>>();
  for (int rank = 0; rank < world_size; ++rank) {
    bootstraps->emplace_back(rank, world_size, options);
    addresses->push_back(bootstraps->back().address());
  }
  return [bootstraps, addresses](int rank) {
    return (*bootstraps)[static_cast<std::size_t>(rank)].Connect(*addresses);
  };
}

/// What became of the ranks: the exception of each (null: none), and which came first.
struct Outcome {
  std::vector<std::exception_ptr> errors;
  std::exception_ptr first;

  /// The message of a rank's exception; empty if it had none.
  std::string message(int rank) const {
    const std::exception_ptr error = errors[static_cast<std::size_t>(rank)];
    if (error == nullptr) return {};
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      return caught.what();
    }
  }
};

/// Runs `body` as every rank and waits for all. Each rank's communicator ends with its body.
inline Outcome TryRanks(Transport transport, int world_size, const RankBody& body,
                        std::chrono::milliseconds timeout = kTestTimeout) {
  const auto make = MakeWorld(transport, world_size, timeout);
  Outcome outcome;
  outcome.errors.resize(static_cast<std::size_t>(world_size));
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const std::unique_ptr<Communicator> communicator = make(rank);
        try {
          body(*communicator);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex);
          outcome.errors[static_cast<std::size_t>(rank)] = std::current_exception();
          if (outcome.first == nullptr) outcome.first = std::current_exception();
        }
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        outcome.errors[static_cast<std::size_t>(rank)] = std::current_exception();
        if (outcome.first == nullptr) outcome.first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

/// Like TryRanks, and rethrows the exception that came first, if any.
inline void RunRanks(Transport transport, int world_size, const RankBody& body,
                     std::chrono::milliseconds timeout = kTestTimeout) {
  const Outcome outcome = TryRanks(transport, world_size, body, timeout);
  if (outcome.first != nullptr) std::rethrow_exception(outcome.first);
}

/// Over real Gloo.
inline void RunRanks(int world_size, const RankBody& body) {
  RunRanks(Transport::kGloo, world_size, body);
}

}  // namespace bitopk::testing
