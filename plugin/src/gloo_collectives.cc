// SPDX-License-Identifier: Apache-2.0
//
// GlooCommunicator; see the header.
//
// The receives of the next exchange's headers are always posted, so that its first messages need
// half a round trip. A payload of up to kInlineBytes travels behind its header in one message (gloo
// takes messages that are shorter than the posted receive); a larger one in a second message, whose
// receive is posted when the header has told the size, because gloo ends the process when more
// arrives than was posted. Large payloads travel in chunks, so that a slow link that makes progress
// is no time-out. While the calling thread waits for one message, the ticker interrupts it: then it
// waits for another one, and looks for dead peers, messages of abort, and silence.
#include "plugin/src/gloo_collectives.h"

#include <gloo/allreduce.h>
#include <gloo/math.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "plugin/src/ranges.h"

namespace bitopk::internal {
namespace {

constexpr std::chrono::milliseconds kTick(20);
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
constexpr std::size_t kInlineBytes = std::size_t{16} << 10;
static_assert(kHeaderBytes + kInlineBytes <= kChunkBytes);

// How long a failing rank waits for its last message to reach the others before it closes the
// connections.
constexpr std::chrono::milliseconds kLinger(300);

// How long a rank that has waited too long listens to the others before it says whom it blames:
// longer than their ticks.
constexpr std::chrono::milliseconds kListen(350);

// A peer that is gone without goodbye, but of which the call under way needs nothing more: how long
// the call may go on.
constexpr std::chrono::milliseconds kGraceAfterLoss(2000);

std::uint64_t MixEntries(std::uint64_t digest, std::size_t num_entries) {
  return digest ^ (0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(num_entries) + 1));
}

std::size_t NumChunks(std::size_t num_bytes) { return (num_bytes + kChunkBytes - 1) / kChunkBytes; }

}  // namespace

GlooCommunicator::GlooCommunicator(std::shared_ptr<PairContext> context,
                                   std::chrono::milliseconds timeout, std::uint64_t world_digest)
    : context_(std::move(context)),
      rank_(context_->rank),
      size_(context_->size),
      timeout_(timeout),
      peers_(static_cast<std::size_t>(size_)),
      waited_for_(static_cast<std::size_t>(size_), false),
      closer_(context_->createUnboundBuffer(&never_sent_, sizeof(never_sent_))),
      watch_(context_),
      ticker_(kTick) {
  for (int n = 1; n < size_; ++n) {
    Peer& peer = peer_of(NthPeer(n));
    peer.header_out.resize(kHeaderBytes + kInlineBytes);
    peer.header_in.resize(kHeaderBytes + kInlineBytes);
    peer.header_send =
        context_->createUnboundBuffer(peer.header_out.data(), peer.header_out.size());
    peer.header_receive =
        context_->createUnboundBuffer(peer.header_in.data(), peer.header_in.size());
  }
  MessageTag tag;
  tag.phase = Phase::kAgreement;
  tag.message = UINT32_MAX;  // no bucket
  tag.digest = world_digest;
  ReceiveBuffer nothing;
  Call(tag, [&] { PostHeaderReceives(); });
  AllGatherV(tag, Bytes(), 0, 0, nothing);
  bytes_sent_ = 0;
  bytes_received_ = 0;
}

GlooCommunicator::~GlooCommunicator() {
  const SigpipeBlock no_sigpipe;
  bool alive = false;
  {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    alive = state_ == State::kAlive;
    state_ = State::kDead;
  }
  if (alive) {
    watch_.Send(PeerWatch::Notice::kGoodbye, rank_, "");
    watch_.WaitSent(kLinger);
    CloseAll();
  }
}

void GlooCommunicator::AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                                 std::size_t max_bytes, ReceiveBuffer& receive) {
  BITOPK_CHECK_ARG(send.size() == static_cast<std::size_t>(size_),
                   "AllToAllV: one part for each rank; got ", send.size(), ", expected ", size_);
  Expectation expected;
  expected.tag = tag;
  expected.max_bytes = max_bytes;
  expected.receive = &receive;
  Call(tag, [&] {
    Exchange(expected, flags, [&](int peer) { return send[static_cast<std::size_t>(peer)]; });
  });
}

void GlooCommunicator::AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags,
                                  std::size_t max_bytes, ReceiveBuffer& receive) {
  Expectation expected;
  expected.tag = tag;
  expected.max_bytes = max_bytes;
  expected.receive = &receive;
  Call(tag, [&] { Exchange(expected, flags, [&](int) { return send; }); });
}

void GlooCommunicator::AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) {
  const Range own = RangeOf(counts.size(), size_, rank_);
  const auto range_bytes = [&](int peer) {
    const Range range = RangeOf(counts.size(), size_, peer);
    return Bytes(reinterpret_cast<const std::uint8_t*>(counts.data() + range.begin),
                 range.count * sizeof(std::uint64_t));
  };
  Expectation expected;
  expected.tag = tag;
  expected.tag.digest = MixEntries(tag.digest, counts.size());
  expected.is_reduction = true;
  expected.flags = static_cast<std::uint16_t>(counts.size());
  expected.max_bytes = own.count * sizeof(std::uint64_t);
  expected.receive = &received_ranges_;
  Call(tag, [&] {
    // Second half, the allgather of the ranges' sums. Its messages have no headers, and its
    // receives are posted now: an owner sends its sums only after it has seen that this rank passes
    // as many counts, and has this rank's part.
    const std::uint64_t slot = range_slot();
    for (int n = 1; n < size_; ++n) {
      const Bytes range = range_bytes(NthPeer(n));
      Peer& peer = peer_of(NthPeer(n));
      peer.range_receive =
          context_->createUnboundBuffer(const_cast<std::uint8_t*>(range.data()), range.size());
      PostReceive(NthPeer(n), *peer.range_receive, slot);
    }

    Exchange(expected, expected.flags, range_bytes);
    for (int n = 1; n < size_; ++n) {
      const Bytes part = received_ranges_.part(NthPeer(n));
      if (part.size() != expected.max_bytes) {
        throw WireFormatError(StrCat(DescribeTag(tag), ": rank ", NthPeer(n), " sent ", part.size(),
                                     " bytes of counts, expected ", expected.max_bytes));
      }
      for (std::size_t i = 0; i < own.count; ++i) {
        std::uint64_t value;
        std::memcpy(&value, part.data() + i * sizeof(value), sizeof(value));
        counts[own.begin + i] += value;
      }
    }

    for (int n = 1; n < size_; ++n) {
      const Bytes range = range_bytes(rank_);
      Peer& peer = peer_of(NthPeer(n));
      peer.range_send =
          context_->createUnboundBuffer(const_cast<std::uint8_t*>(range.data()), range.size());
      PostSend(NthPeer(n), *peer.range_send, slot, range.size());
      Track(NthPeer(n), *peer.range_send, false, false, range.size());
      Track(NthPeer(n), *peer.range_receive, true, false, peer.range_receive->size);
    }
    CompleteAll();
  });
}

void GlooCommunicator::AllReduceDense(const MessageTag& tag, Span<float> values) {
  Call(tag, [&] {
    AgreeOnEntries(tag, values.size());
    if (size_ == 1 || values.empty()) return;
    gloo::AllreduceOptions options(context_);
    options.setOutput(values.data(), values.size());
    options.setReduceFunction(
        static_cast<void (*)(void*, const void*, const void*, std::size_t)>(&gloo::sum<float>));
    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    options.setTag(next_ring_++);
    options.setTimeout(timeout_);
    try {
      gloo::allreduce(options);
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), "Timed out") !=
          nullptr) {  // gloo's wait, which closed all connections
        throw Verdict{NthPeer(1),
                      StrCat("nothing came through the ring from rank ", NthPeer(1), " within ",
                             DurationText(timeout_)),
                      ""};
      }
      ThrowLost(NthPeer(1));  // the neighbour that this rank receives from
    }
    bytes_sent_ += RingBytes(values.size() * sizeof(float), size_);
    bytes_received_ += RingBytes(values.size() * sizeof(float), size_);
  });
}

void GlooCommunicator::AgreeOnEntries(const MessageTag& tag, std::size_t num_entries) {
  Expectation expected;
  expected.tag = tag;
  expected.tag.digest = MixEntries(tag.digest, num_entries);
  expected.is_reduction = true;
  expected.flags = static_cast<std::uint16_t>(num_entries);
  expected.receive = &received_ranges_;
  Exchange(expected, expected.flags, [](int) { return Bytes(); });
}

void GlooCommunicator::Abort(const std::string& reason) noexcept {
  try {
    const SigpipeBlock no_sigpipe;
    const std::string text = StrCat("rank ", rank_, " aborted: ", reason);
    Fail(text + Suffix(), rank_, text);
  } catch (...) {
  }
}

Communicator::Waiting GlooCommunicator::waiting() const {
  const std::lock_guard<std::mutex> lock(waiting_mutex_);
  Waiting waiting;
  if (!is_waiting_) return waiting;
  for (int peer = 0; peer < size_; ++peer) {
    if (waited_for_[static_cast<std::size_t>(peer)]) waiting.ranks.push_back(peer);
  }
  waiting.what = DescribeTag(waiting_tag_);
  waiting.since = waiting_since_;
  return waiting;
}

// ---- One call ----

template <typename Body>
void GlooCommunicator::Call(const MessageTag& tag, const Body& body) {
  RequireAlive();
  const SigpipeBlock no_sigpipe;
  struct Cleanup {
    GlooCommunicator* self;
    ~Cleanup() {
      {
        const std::lock_guard<std::mutex> lock(self->waiting_mutex_);
        self->is_waiting_ = false;
      }
      self->operations_.clear();
      self->num_pending_ = 0;
      self->ReleasePayloads();
    }
  } cleanup{this};
  {
    const std::lock_guard<std::mutex> lock(waiting_mutex_);
    is_waiting_ = true;
    waiting_tag_ = tag;
    waiting_since_ = Clock::now();
    waited_for_.assign(waited_for_.size(), false);
  }
  for (Peer& peer : peers_) peer.num_pending = 0;
  first_loss_ = Clock::time_point::max();
  try {
    body();
  } catch (const Verdict& verdict) {
    const std::string cause = StrCat(DescribeTag(tag), ": ", verdict.text, Suffix(verdict.suffix));
    throw CommunicationError(Fail(cause, verdict.blamed, verdict.text));
  } catch (const std::exception& error) {  // headers that do not match, or no memory
    Fail(error.what(), rank_, error.what());
    throw;
  }
}

void GlooCommunicator::RequireAlive() const {
  const std::lock_guard<std::mutex> lock(state_mutex_);
  if (state_ != State::kAlive) throw CommunicationError(cause_);
}

void GlooCommunicator::ReleasePayloads() {
  for (Peer& peer : peers_) {
    peer.payload_send.reset();
    peer.payload_receive.reset();
    peer.range_send.reset();
    peer.range_receive.reset();
  }
}

template <typename PartFor>
void GlooCommunicator::Exchange(const Expectation& expected, std::uint16_t flags,
                                const PartFor& part_for) {
  expected_ = expected;
  expected_.receive->Reset(size_);
  expected_.receive->SetView(rank_, part_for(rank_));
  expected_.receive->SetFlags(rank_, flags);

  MessageHeader header;
  header.tag = expected.tag;
  header.flags = flags;
  header.rank = static_cast<std::uint32_t>(rank_);
  for (int n = 1; n < size_; ++n) {
    const int to = NthPeer(n);
    Peer& peer = peer_of(to);
    const Bytes part = part_for(to);
    if (!peer.header_posted) ThrowLost(to);
    header.payload_bytes = part.size();
    EncodeHeader(header, MutableBytes(peer.header_out.data(), kHeaderBytes));
    std::size_t first_bytes = kHeaderBytes;
    if (!part.empty() && part.size() <= kInlineBytes) {
      std::memcpy(peer.header_out.data() + kHeaderBytes, part.data(), part.size());
      first_bytes += part.size();
    }
    PostSend(to, *peer.header_send, header_slot(), first_bytes);
    Track(to, *peer.header_send, false, true, first_bytes);
    Track(to, *peer.header_receive, true, true, kHeaderBytes);
    if (part.size() <= kInlineBytes) continue;
    // gloo only reads from a buffer that is sent.
    peer.payload_send =
        context_->createUnboundBuffer(const_cast<std::uint8_t*>(part.data()), part.size());
    PostSend(to, *peer.payload_send, payload_slot(), part.size());
  }
  // Headers are waited for first: a payload moves only when its receiver has seen the header, and
  // ranks that waited for a payload of each other, in a circle, would only go on when the ticker
  // interrupts.
  for (int n = 1; n < size_; ++n) {
    const Peer& peer = peer_of(NthPeer(n));
    if (peer.payload_send != nullptr) {
      Track(NthPeer(n), *peer.payload_send, false, false, peer.payload_send->size);
    }
  }
  CompleteAll();
  ++exchange_;
  PostHeaderReceives();
}

// A peer that has finished and gone is not this exchange's failure, only the next one's.
void GlooCommunicator::PostHeaderReceives() {
  for (int n = 1; n < size_; ++n) {
    Peer& peer = peer_of(NthPeer(n));
    try {
      peer.header_receive->recv(NthPeer(n), header_slot());
      peer.header_posted = true;
    } catch (const std::exception&) {
      peer.header_posted = false;
    }
  }
}

void GlooCommunicator::OnHeader(int rank) {
  Peer& peer = peer_of(rank);
  const MessageTag& tag = expected_.tag;
  MessageHeader header;
  try {
    header = DecodeHeader(Bytes(peer.header_in.data(), kHeaderBytes));
  } catch (const WireFormatError& error) {
    throw WireFormatError(StrCat(DescribeTag(tag), ": from rank ", rank, ": ", error.what()));
  }
  if (expected_.is_reduction && header.flags != expected_.flags && header.tag.step == tag.step &&
      header.tag.phase == tag.phase && header.tag.message == tag.message) {
    throw CommunicationError(
        StrCat(DescribeTag(tag), ": all ranks pass the same number of entries; rank ", rank,
               " has ", header.flags, ", rank ", rank_, " ", expected_.flags, " (modulo 65536)"));
  }
  CheckHeader(header, tag, rank, rank_, expected_.max_bytes);
  expected_.receive->SetFlags(rank, header.flags);
  const auto num_bytes = static_cast<std::size_t>(header.payload_bytes);
  if (num_bytes == 0) return;
  const MutableBytes room = expected_.receive->Allocate(rank, num_bytes);
  if (num_bytes <= kInlineBytes) {
    std::memcpy(room.data(), peer.header_in.data() + kHeaderBytes, num_bytes);
    bytes_received_ += num_bytes;
    return;
  }
  peer.payload_receive = context_->createUnboundBuffer(room.data(), room.size());
  PostReceive(rank, *peer.payload_receive, payload_slot());
  Track(rank, *peer.payload_receive, true, false, num_bytes);
}

// ---- Messages ----

void GlooCommunicator::PostReceive(int peer, UnboundBuffer& buffer, std::uint64_t slot) {
  try {
    for (std::size_t offset = 0; offset < buffer.size; offset += kChunkBytes) {
      buffer.recv(peer, slot, offset, std::min(kChunkBytes, buffer.size - offset));
    }
  } catch (const std::exception&) {
    ThrowLost(peer);
  }
}

void GlooCommunicator::PostSend(int peer, UnboundBuffer& buffer, std::uint64_t slot,
                                std::size_t num_bytes) {
  try {
    for (std::size_t offset = 0; offset < num_bytes; offset += kChunkBytes) {
      buffer.send(peer, slot, offset, std::min(kChunkBytes, num_bytes - offset));
    }
  } catch (const std::exception&) {
    ThrowLost(peer);
  }
}

void GlooCommunicator::Track(int peer, UnboundBuffer& buffer, bool is_receive, bool is_header,
                             std::size_t num_bytes) {
  if (num_bytes == 0) return;  // nothing was posted
  operations_.push_back(
      {&buffer, peer, is_receive, is_header, NumChunks(num_bytes), num_bytes, Clock::now()});
  ++num_pending_;
  if (peer_of(peer).num_pending++ == 0) {
    const std::lock_guard<std::mutex> lock(waiting_mutex_);
    waited_for_[static_cast<std::size_t>(peer)] = true;
  }
}

void GlooCommunicator::CompleteAll() {
  std::size_t index = 0;
  while (num_pending_ > 0) {
    while (operations_[index % operations_.size()].remaining == 0) ++index;
    index %= operations_.size();
    if (WaitOnce(index)) continue;
    LookAround();
    ++index;  // meanwhile another one may have completed
  }
  operations_.clear();
}

// Waits for one chunk of an operation; false if the ticker interrupted.
bool GlooCommunicator::WaitOnce(std::size_t index) {
  const Operation operation = operations_[index];  // a copy: OnHeader adds operations
  try {
    if (!ticker_.Wait(*operation.buffer, operation.is_receive)) return false;
  } catch (const std::exception&) {
    ThrowLost(operation.peer);
  }
  Peer& peer = peer_of(operation.peer);
  peer.progress = Clock::now();
  if (--operations_[index].remaining > 0) return true;
  (operation.is_receive ? bytes_received_ : bytes_sent_) += operation.num_bytes;
  --num_pending_;
  --peer.num_pending;
  if (operation.is_receive && operation.is_header) OnHeader(operation.peer);
  if (peer.num_pending == 0) {
    const std::lock_guard<std::mutex> lock(waiting_mutex_);
    waited_for_[static_cast<std::size_t>(operation.peer)] = false;
  }
  return true;
}

// ---- Failure ----

void GlooCommunicator::LookAround() {
  RequireAlive();  // Abort, from another thread
  watch_.Poll();
  if (watch_.accusation()) ThrowLost(rank_);
  for (int n = 1; n < size_; ++n) {
    const int peer = NthPeer(n);
    const bool goodbye = watch_.said_goodbye(peer);
    if (!goodbye && !watch_.closed(peer)) continue;
    DrainClosedPeer(peer);
    // What this call needed of the peer is here. The others may need it too, and say so soon.
    if (!goodbye) first_loss_ = std::min(first_loss_, Clock::now());
  }
  if (first_loss_ != Clock::time_point::max() && Clock::now() > first_loss_ + kGraceAfterLoss) {
    ThrowLost(rank_);
  }
  if (watch_.any_suspicion() && !told_whom_it_awaits_) {
    std::vector<int> awaited;
    for (const Operation& operation : operations_) {
      if (operation.remaining > 0 && operation.is_receive) awaited.push_back(operation.peer);
    }
    TellWhomThisRankAwaits(awaited);
  }
  CheckOverdue();
}

// Takes what a peer sent before it closed; throws if something is missing, since nothing more will
// come.
void GlooCommunicator::DrainClosedPeer(int peer) {
  for (std::size_t i = 0; i < operations_.size() && peer_of(peer).num_pending > 0; ++i) {
    if (operations_[i].peer != peer) continue;
    while (operations_[i].remaining > 0) {
      // An interruption may be left over from an earlier wait; a second one is not.
      if (!WaitOnce(i) && !WaitOnce(i)) ThrowLost(peer);
    }
  }
}

void GlooCommunicator::CheckOverdue() {
  const auto now = Clock::now();
  std::vector<int> silent;      // owe this rank something
  std::vector<int> not_taking;  // only take nothing of what this rank sends
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || peer_of(peer).num_pending == 0) continue;
    bool owes = false;
    bool takes_nothing = false;
    for (const Operation& operation : operations_) {
      if (operation.peer != peer || operation.remaining == 0) continue;
      if (now < std::max(operation.since, peer_of(peer).progress) + timeout_) continue;
      (operation.is_receive ? owes : takes_nothing) = true;
    }
    if (owes) silent.push_back(peer);
    if (takes_nothing && !owes) not_taking.push_back(peer);
  }
  const std::vector<int>& overdue = silent.empty() ? not_taking : silent;
  if (!overdue.empty()) ThrowSilent(overdue);
}

void GlooCommunicator::TellWhomThisRankAwaits(const std::vector<int>& awaited) {
  if (std::exchange(told_whom_it_awaits_, true)) return;
  watch_.SendSuspicion(awaited);
}

// The time is up. A rank that is overdue may itself wait for another one, since ranks can be a call
// apart: every rank that waits says for whom, and those who are waited for and say nothing are to
// blame.
void GlooCommunicator::ThrowSilent(const std::vector<int>& overdue) {
  TellWhomThisRankAwaits(overdue);
  for (const auto end = Clock::now() + kListen; Clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    RequireAlive();
    watch_.Poll();
    if (watch_.accusation()) ThrowLost(rank_);
  }
  std::vector<bool> awaited(static_cast<std::size_t>(size_), false);
  for (const int peer : overdue) awaited[static_cast<std::size_t>(peer)] = true;
  for (int n = 1; n < size_; ++n) {
    for (const int peer : watch_.suspicion(NthPeer(n)).value_or(std::vector<int>())) {
      awaited[static_cast<std::size_t>(peer)] = true;
    }
  }
  std::vector<int> blamed;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !awaited[static_cast<std::size_t>(peer)]) continue;
    if (!watch_.suspicion(peer)) blamed.push_back(peer);
  }
  if (blamed.empty()) blamed = overdue;
  throw Verdict{blamed[0],
                StrCat("no answer from ", ListRanks(blamed), " within ", DurationText(timeout_)),
                ""};
}

// Throws the reason why a connection broke: what a peer says, else what this rank sees. `peer` is
// the one whose connection broke, or this rank if it is not known.
void GlooCommunicator::ThrowLost(int peer) {
  RequireAlive();
  watch_.Poll();
  if (const auto accusation = watch_.accusation()) {
    throw Verdict{accusation->blamed, accusation->text,
                  accusation->reporter == accusation->blamed
                      ? std::string()
                      : StrCat("reported by rank ", accusation->reporter)};
  }
  std::vector<int> gone;
  for (int other = 0; other < size_; ++other) {
    if (other == rank_ || watch_.said_goodbye(other)) continue;
    if (other == peer || watch_.closed(other)) gone.push_back(other);
  }
  if (gone.empty()) {
    throw Verdict{peer, StrCat("rank ", peer, " has closed its communicator"), ""};
  }
  throw Verdict{gone[0],
                StrCat(ListRanks(gone),
                       gone.size() == 1 ? " closed its connection" : " closed their connections"),
                ""};
}

std::string GlooCommunicator::Suffix(const std::string& more) const {
  return StrCat(" (rank ", rank_, " of ", size_, more.empty() ? "" : "; ", more, ")");
}

// Makes the communicator dead and tells the peers; returns the first cause, which an earlier
// failure may have set.
std::string GlooCommunicator::Fail(const std::string& cause, int blamed,
                                   const std::string& text) noexcept {
  std::unique_lock<std::mutex> lock(state_mutex_);
  if (state_ != State::kAlive) {
    // Another thread is at it. It is done within the linger and the time to close the connections.
    state_changed_.wait_for(lock, std::chrono::seconds(10), [&] { return state_ == State::kDead; });
    return cause_;
  }
  state_ = State::kDying;
  cause_ = cause;
  lock.unlock();
  watch_.Send(PeerWatch::Notice::kAbort, blamed, text);
  watch_.Linger(kLinger);
  CloseAll();
  lock.lock();
  state_ = State::kDead;
  state_changed_.notify_all();
  return cause_;
}

// gloo's own close() resets connections, which would discard what is under way to the peers. A wait
// that times out closes all connections of the context in order, and wakes whoever waits on them.
void GlooCommunicator::CloseAll() noexcept {
  try {
    closer_->waitRecv(nullptr, std::chrono::milliseconds(1));
  } catch (...) {
  }
}

}  // namespace bitopk::internal
