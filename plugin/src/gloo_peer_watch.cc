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
  std::uint8_t text[kTextBytes];  // or a bit for each rank
  std::uint64_t end_mark;         // the last bytes to arrive; never zero
};
static_assert(sizeof(ControlMessage) == 512);

// Ranks beyond kTextBytes * 8 cannot be told; they are blamed by their neighbours only.
void SetBit(std::uint8_t* bits, int index) {
  const auto i = static_cast<std::size_t>(index);
  if (i / 8 < kTextBytes) bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] | 1U << (i % 8));
}

bool GetBit(const std::uint8_t* bits, int index) {
  const auto i = static_cast<std::size_t>(index);
  return i / 8 < kTextBytes && (bits[i / 8] >> (i % 8) & 1U) != 0;
}

// Whether the last bytes have arrived. gloo cannot say without waiting that a receive is complete,
// so this looks at memory that gloo's thread may be writing; the caller then lets gloo confirm.
__attribute__((no_sanitize("thread"))) bool EndMarkArrived(const ControlMessage& message) {
  return __atomic_load_n(&message.end_mark, __ATOMIC_ACQUIRE) == kEndMark;
}

}  // namespace

// One message in each direction.
struct PeerWatch::Channel {
  Channel(const std::shared_ptr<PairContext>& context, int rank, std::uint64_t slot_number)
      : slot(slot_number),
        receive(context->createUnboundBuffer(&incoming, sizeof(ControlMessage))),
        send(context->createUnboundBuffer(&outgoing, sizeof(ControlMessage))) {
    receive->recv(rank, slot);
  }

  // Whether the message is here, and was not before. Throws gloo's exceptions if it will not come.
  bool Poll() {
    if (heard) return false;
    if (!EndMarkArrived(incoming)) {
      // An aborted wait returns at once: it throws if the connection is closed and the message has
      // not come.
      receive->abortWaitRecv();
      receive->waitRecv(nullptr, kForever);
      return false;
    }
    receive->waitRecv(nullptr, kForever);
    heard = true;
    return incoming.magic == kMagic;
  }

  void Post(int rank, Notice notice, int blamed, const std::uint8_t* text, std::size_t text_bytes) {
    if (sending) return;
    outgoing.magic = kMagic;
    outgoing.blamed = blamed;
    outgoing.notice = static_cast<std::uint8_t>(notice);
    outgoing.text_bytes = static_cast<std::uint16_t>(text_bytes);
    std::memcpy(outgoing.text, text, text_bytes);
    outgoing.end_mark = kEndMark;
    send->send(rank, slot);
    sending = true;
  }

  const std::uint64_t slot;
  ControlMessage incoming = {};
  ControlMessage outgoing = {};
  bool sending = false;
  bool heard = false;
  std::unique_ptr<UnboundBuffer> receive;
  std::unique_ptr<UnboundBuffer> send;
};

struct PeerWatch::Peer {
  Peer(const std::shared_ptr<PairContext>& context, int rank)
      : last(context, rank, kLastSlot), suspicion(context, rank, kSuspicionSlot) {}

  Channel last;
  Channel suspicion;
  bool closed = false;
  bool goodbye = false;
  std::optional<std::vector<int>> awaited;
};

PeerWatch::PeerWatch(const std::shared_ptr<PairContext>& context) {
  peers_.resize(static_cast<std::size_t>(context->size));
  for (int rank = 0; rank < context->size; ++rank) {
    if (rank == context->rank) continue;
    peers_[static_cast<std::size_t>(rank)] = std::make_unique<Peer>(context, rank);
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
  if (peer.last.heard || peer.closed) return;
  try {
    if (peer.suspicion.Poll()) {
      peer.awaited.emplace();
      for (int other = 0; other < static_cast<int>(peers_.size()); ++other) {
        if (GetBit(peer.suspicion.incoming.text, other)) peer.awaited->push_back(other);
      }
    }
  } catch (const std::exception&) {  // closed, but the last message may be here
  }
  try {
    if (!peer.last.Poll()) return;
  } catch (const std::exception&) {
    peer.closed = true;
    return;
  }
  const ControlMessage& message = peer.last.incoming;
  if (message.notice == static_cast<std::uint8_t>(Notice::kGoodbye)) peer.goodbye = true;
  if (message.notice == static_cast<std::uint8_t>(Notice::kAbort) && !accusation_) {
    const std::size_t text_bytes = std::min<std::size_t>(message.text_bytes, kTextBytes);
    const auto* const text = reinterpret_cast<const char*>(message.text);
    accusation_ = Accusation{rank, message.blamed, std::string(text, text_bytes)};
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

std::optional<std::vector<int>> PeerWatch::suspicion(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)]->awaited;
}

bool PeerWatch::any_suspicion() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const std::unique_ptr<Peer>& peer) {
    return peer != nullptr && peer->awaited.has_value();
  });
}

void PeerWatch::SendSuspicion(const std::vector<int>& awaited) {
  std::array<std::uint8_t, kTextBytes> bits = {};
  for (const int rank : awaited) SetBit(bits.data(), rank);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank] == nullptr || peers_[rank]->closed) continue;
    try {
      peers_[rank]->suspicion.Post(static_cast<int>(rank), Notice::kSuspicion, 0, bits.data(),
                                   bits.size());
    } catch (const std::exception&) {  // the next Poll sees that it is closed
    }
  }
}

void PeerWatch::Send(Notice notice, int blamed, const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank] == nullptr || peers_[rank]->closed) continue;
    try {
      peers_[rank]->last.Post(static_cast<int>(rank), notice, blamed, bytes,
                              std::min(text.size(), kTextBytes));
    } catch (const std::exception&) {
    }
  }
}

bool PeerWatch::AllSettled() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(peers_.begin(), peers_.end(), [](const std::unique_ptr<Peer>& peer) {
    return peer == nullptr || peer->closed || peer->last.heard;
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
    if (peer == nullptr || !peer->last.sending) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    try {
      peer->last.send->waitSend(nullptr, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
    }
  }
}

}  // namespace bitopk::internal
