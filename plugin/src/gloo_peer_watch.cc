// SPDX-License-Identifier: Apache-2.0
//
// PeerWatch; see the header.
#include "plugin/src/gloo_peer_watch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <thread>

namespace bitopk::internal {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMagic = 0x43544f42;  // "BOTC"
constexpr std::uint64_t kEndMark = 0x646e652d6f746962;
constexpr std::size_t kTextBytes = 480;

// The control message as it lies on the wire, always whole: 512 bytes, little-endian.
struct ControlMessage {
  std::uint32_t magic;
  std::int32_t blamed;
  std::uint16_t text_bytes;
  std::uint8_t notice;
  std::uint8_t reserved[13];
  char text[kTextBytes];
  std::uint64_t end_mark;  // the last bytes to arrive; never zero
};
static_assert(sizeof(ControlMessage) == 512);

// Whether the last bytes have arrived. gloo cannot say without waiting that a receive is complete,
// so this looks at memory that gloo's thread may be writing; the caller then lets gloo confirm.
__attribute__((no_sanitize("thread"))) bool EndMarkArrived(const ControlMessage& message) {
  return __atomic_load_n(&message.end_mark, __ATOMIC_ACQUIRE) == kEndMark;
}

}  // namespace

struct PeerWatch::Peer {
  ControlMessage incoming = {};
  ControlMessage outgoing = {};
  std::unique_ptr<UnboundBuffer> receive;
  std::unique_ptr<UnboundBuffer> send;
  bool sending = false;
  bool closed = false;
  bool heard = false;  // its one message has come
  bool goodbye = false;
};

PeerWatch::PeerWatch(const std::shared_ptr<PairContext>& context) {
  peers_.resize(static_cast<std::size_t>(context->size));
  for (int rank = 0; rank < context->size; ++rank) {
    if (rank == context->rank) continue;
    auto peer = std::make_unique<Peer>();
    peer->receive = context->createUnboundBuffer(&peer->incoming, sizeof(ControlMessage));
    peer->send = context->createUnboundBuffer(&peer->outgoing, sizeof(ControlMessage));
    peer->receive->recv(rank, kControlSlot);
    peers_[static_cast<std::size_t>(rank)] = std::move(peer);
  }
}

PeerWatch::~PeerWatch() = default;

void PeerWatch::Poll() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank] != nullptr) PollPeer(static_cast<int>(rank), *peers_[rank]);
  }
}

void PeerWatch::PollPeer(int rank, Peer& peer) {
  if (peer.heard || peer.closed) return;
  try {
    if (!EndMarkArrived(peer.incoming)) {
      // An aborted wait returns at once: it throws if the connection is closed and the message has
      // not come.
      peer.receive->abortWaitRecv();
      peer.receive->waitRecv(nullptr, kForever);
      return;
    }
    peer.receive->waitRecv(nullptr, kForever);
  } catch (const std::exception&) {
    peer.closed = true;
    return;
  }
  peer.heard = true;
  const ControlMessage& message = peer.incoming;
  if (message.magic != kMagic) return;
  if (message.notice == static_cast<std::uint8_t>(Notice::kGoodbye)) peer.goodbye = true;
  if (message.notice == static_cast<std::uint8_t>(Notice::kAbort) && !accusation_) {
    const std::size_t text_bytes = std::min<std::size_t>(message.text_bytes, kTextBytes);
    accusation_ = Accusation{rank, message.blamed, std::string(message.text, text_bytes)};
  }
}

bool PeerWatch::closed(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)]->closed;
}

bool PeerWatch::said_goodbye(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)]->goodbye;
}

std::optional<PeerWatch::Accusation> PeerWatch::accusation() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return accusation_;
}

void PeerWatch::Send(Notice notice, int blamed, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank] == nullptr || peers_[rank]->sending || peers_[rank]->closed) continue;
    Peer& peer = *peers_[rank];
    peer.outgoing.magic = kMagic;
    peer.outgoing.blamed = blamed;
    peer.outgoing.notice = static_cast<std::uint8_t>(notice);
    const std::size_t text_bytes = std::min(text.size(), kTextBytes);
    peer.outgoing.text_bytes = static_cast<std::uint16_t>(text_bytes);
    std::memcpy(peer.outgoing.text, text.data(), text_bytes);
    peer.outgoing.end_mark = kEndMark;
    try {
      peer.send->send(static_cast<int>(rank), kControlSlot);
      peer.sending = true;
    } catch (const std::exception&) {
      peer.closed = true;
    }
  }
}

bool PeerWatch::AllSettled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(peers_.begin(), peers_.end(), [](const std::unique_ptr<Peer>& peer) {
    return peer == nullptr || peer->closed || peer->heard;
  });
}

void PeerWatch::Linger(std::chrono::milliseconds longest) {
  const auto end = Clock::now() + longest;
  for (Poll(); !AllSettled() && Clock::now() < end; Poll()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void PeerWatch::WaitSent(std::chrono::milliseconds longest) {
  const auto end = Clock::now() + longest;
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer == nullptr || !peer->sending) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    try {
      peer->send->waitSend(nullptr, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
    }
  }
}

}  // namespace bitopk::internal
