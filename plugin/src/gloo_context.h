// SPDX-License-Identifier: Apache-2.0
//
// What the gloo_*.cc files share: a gloo context whose pairs we connect ourselves, and protection
// from SIGPIPE.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>

#include <chrono>
#include <csignal>
#include <ctime>
#include <memory>
#include <utility>

namespace bitopk::internal {

/// gloo closes all pairs of a context when a wait for one message times out; we decide ourselves
/// what a time-out means, so gloo's waits are practically endless (100 hours: longer ones overflow
/// its clock arithmetic).
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(100);

using UnboundBuffer = gloo::transport::UnboundBuffer;

/// A context of pairs that listen from construction on; whoever owns it connects them. Thread-safe
/// as gloo::Context.
class PairContext final : public gloo::Context {
 public:
  PairContext(int my_rank, int world_size, std::shared_ptr<gloo::transport::Device> device,
              std::chrono::milliseconds connect_timeout)
      : gloo::Context(my_rank, world_size) {
    device_ = std::move(device);
    transportContext_ = device_->createContext(my_rank, world_size);
    // gloo waits for five times the pair's time-out when connecting.
    transportContext_->setTimeout(std::max(connect_timeout / 5, std::chrono::milliseconds(1)));
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != my_rank) transportContext_->createPair(peer);
    }
    transportContext_->setTimeout(connect_timeout);
    setTimeout(connect_timeout);
  }
};

/// While one lives, a peer's closed connection does not send SIGPIPE to the process through the
/// calling thread, whose signal mask is restored at the end. Threads started meanwhile (gloo's)
/// keep the signal blocked.
class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &old_mask_);
  }
  ~SigpipeBlock() {
    if (!was_pending_) {
      const timespec no_wait = {};
      sigtimedwait(&sigpipe_, nullptr, &no_wait);
    }
    pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  sigset_t sigpipe_;
  sigset_t old_mask_;
  bool was_pending_ = false;
};

}  // namespace bitopk::internal
