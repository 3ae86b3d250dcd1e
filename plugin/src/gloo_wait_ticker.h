// SPDX-License-Identifier: Apache-2.0
//
// WaitTicker: gloo waits for one message at a time and can neither wait for any of several nor for
// a peer's death. This thread interrupts the wait of the Gloo communicator now and then, so that it
// can look around.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "plugin/src/gloo_context.h"

namespace bitopk::internal {

/// Owns a thread, which sleeps while nobody waits. One waiter at a time.
class WaitTicker {
 public:
  explicit WaitTicker(std::chrono::milliseconds tick) : tick_(tick), thread_([this] { Run(); }) {}

  ~WaitTicker() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  WaitTicker(const WaitTicker&) = delete;
  WaitTicker& operator=(const WaitTicker&) = delete;

  /// Waits for one receive (or send) of `buffer`. Returns false if it was interrupted after one to
  /// two ticks, or rarely at once. Throws gloo's exceptions.
  bool Wait(UnboundBuffer& buffer, bool is_receive) {
    Begin(buffer, is_receive);
    bool done = false;
    try {
      done = is_receive ? buffer.waitRecv(nullptr, kForever) : buffer.waitSend(nullptr, kForever);
    } catch (...) {
      End();
      throw;
    }
    End();
    return done;
  }

 private:
  void Begin(UnboundBuffer& buffer, bool is_receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffer_ = &buffer;
    is_receive_ = is_receive;
    ++wait_id_;
    if (idle_) changed_.notify_one();
  }

  void End() {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffer_ = nullptr;
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      idle_ = true;
      changed_.wait(lock, [this] { return stop_ || buffer_ != nullptr; });
      idle_ = false;
      const std::uint64_t seen = wait_id_;
      changed_.wait_for(lock, tick_, [this] { return stop_; });
      if (stop_ || buffer_ == nullptr || wait_id_ != seen) continue;
      if (is_receive_) {
        buffer_->abortWaitRecv();
      } else {
        buffer_->abortWaitSend();
      }
    }
  }

  const std::chrono::milliseconds tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  UnboundBuffer* buffer_ = nullptr;
  bool is_receive_ = false;
  std::uint64_t wait_id_ = 0;
  bool idle_ = false;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace bitopk::internal
