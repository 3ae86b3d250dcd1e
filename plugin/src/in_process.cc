// SPDX-License-Identifier: Apache-2.0
//
// InProcessGroup: every call is a meeting of all ranks. A rank publishes views of what it sends and
// waits for the others; then each checks and copies what the others published; then all wait until
// everyone is done, since the views are of memory that the callers reuse.
#include "bitopk/in_process.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "plugin/src/ranges.h"

namespace bitopk {
namespace internal {
namespace {

using Clock = std::chrono::steady_clock;

enum class Operation : std::uint8_t { kAllToAll, kAllGather, kReduceSum, kReduceDense };

// What a rank brings to a meeting.
struct Published {
  MessageTag tag;
  Operation operation = Operation::kAllToAll;
  std::uint16_t flags = 0;
  Span<const Bytes> parts;  // kAllToAll
  Bytes bytes;              // the other operations
};

}  // namespace

// Thread-safe. What is published is written by its rank before it enters a meeting and read by
// others inside it.
class InProcessState {
 public:
  InProcessState(int num_ranks, std::chrono::milliseconds longest_wait)
      : world_size(num_ranks),
        timeout(longest_wait),
        published(static_cast<std::size_t>(num_ranks)),
        partial_sums(static_cast<std::size_t>(num_ranks)),
        members_(static_cast<std::size_t>(num_ranks)) {}

  void Take(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    BITOPK_CHECK_ARG(!member(rank).taken,
                     "InProcessGroup: each communicator is taken once; got rank ", rank, " again");
    member(rank).taken = true;
  }

  // Waits until all ranks have entered. Throws if that does not happen; then no rank is inside.
  void Enter(int rank, const MessageTag& tag) {
    std::unique_lock<std::mutex> lock(mutex_);
    ThrowIfDead();
    for (int peer = 0; peer < world_size; ++peer) {
      if (member(peer).left) Die(StrCat(DescribeTag(tag), ": ", LeftText(peer), Suffix(rank)));
    }
    ThrowIfDead();
    member(rank).entered = true;
    member(rank).tag = tag;
    member(rank).since = Clock::now();
    if (++num_entered_ == world_size) {
      num_entered_ = 0;
      num_inside_ = world_size;
      for (Member& each : members_) each.entered = false;
      ++meeting_;
      changed_.notify_all();
      return;
    }
    const std::uint64_t before = meeting_;
    const bool in_time = changed_.wait_until(lock, member(rank).since + timeout,
                                             [&] { return meeting_ != before || dead_; });
    if (meeting_ != before)
      return;  // even if it died since: the others count on this rank to pass Leave
    if (!in_time) {
      Die(StrCat(DescribeTag(tag), ": no answer from ", ListRanks(Missing()), " within ",
                 DurationText(timeout), Suffix(rank)));
    }
    ThrowIfDead();
  }

  // Waits until all ranks are done with the meeting. Everyone inside calls it, failed or not.
  void Leave() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t meeting = meeting_;
    if (--num_inside_ == 0) {
      ++ended_;
      changed_.notify_all();
    }
    // Work inside a meeting is bounded (checks and copies), so this wait is too.
    changed_.wait(lock, [&] { return ended_ >= meeting; });
  }

  void Die(const std::string& cause) {
    if (dead_) return;
    dead_ = true;
    cause_ = cause;
    changed_.notify_all();
  }

  void Fail(const std::string& cause) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Die(cause);
  }

  void Retire(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    member(rank).left = true;
    for (const Member& each : members_) {
      if (each.entered) {  // it waits for a rank that will not come
        Die(StrCat(DescribeTag(each.tag), ": ", LeftText(rank)));
        return;
      }
    }
  }

  void CheckAlive() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ThrowIfDead();
  }

  Communicator::Waiting WaitingOf(int rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Communicator::Waiting waiting;
    if (!member(rank).entered) return waiting;
    waiting.ranks = Missing();
    waiting.what = DescribeTag(member(rank).tag);
    waiting.since = member(rank).since;
    return waiting;
  }

  std::string Suffix(int rank) const { return StrCat(" (rank ", rank, " of ", world_size, ")"); }

  const int world_size;
  const std::chrono::milliseconds timeout;
  std::vector<Published> published;
  std::vector<std::vector<std::uint8_t>> partial_sums;  // of each rank's range, in a reduction

 private:
  struct Member {
    bool taken = false;
    bool left = false;
    bool entered = false;
    MessageTag tag;
    Clock::time_point since;
  };

  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  const Member& member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }

  std::vector<int> Missing() const {
    std::vector<int> missing;
    for (int rank = 0; rank < world_size; ++rank) {
      if (!member(rank).entered) missing.push_back(rank);
    }
    return missing;
  }

  static std::string LeftText(int rank) {
    return StrCat("rank ", rank, " has closed its communicator");
  }

  void ThrowIfDead() const {
    if (dead_) throw CommunicationError(cause_);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  std::uint64_t meeting_ = 0;  // meetings begun
  std::uint64_t ended_ = 0;    // meetings that all ranks have left
  int num_entered_ = 0;
  int num_inside_ = 0;
  bool dead_ = false;
  std::string cause_;
};

namespace {

// One rank's end. Thread-safety as Communicator says.
class InProcessCommunicator final : public Communicator {
 public:
  InProcessCommunicator(std::shared_ptr<InProcessState> state, int rank)
      : state_(std::move(state)), rank_(rank) {}

  ~InProcessCommunicator() override { state_->Retire(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return state_->world_size; }
  std::chrono::milliseconds timeout() const override { return state_->timeout; }

  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override {
    BITOPK_CHECK_ARG(send.size() == static_cast<std::size_t>(size()),
                     "AllToAllV: one part for each rank; got ", send.size(), ", expected ", size());
    Published mine;
    mine.tag = tag;
    mine.operation = Operation::kAllToAll;
    mine.flags = flags;
    mine.parts = send;
    Gather(mine, max_bytes, receive);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_) CountSent(kHeaderBytes + send[static_cast<std::size_t>(peer)].size());
    }
  }

  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override {
    Published mine;
    mine.tag = tag;
    mine.operation = Operation::kAllGather;
    mine.flags = flags;
    mine.bytes = send;
    Gather(mine, max_bytes, receive);
    CountSent(num_peers() * (kHeaderBytes + send.size()));
  }

  void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override {
    Reduce(tag, Operation::kReduceSum, counts);
    const std::size_t own = sizeof(std::uint64_t) * RangeOf(counts.size(), size(), rank_).count;
    const std::size_t others = sizeof(std::uint64_t) * counts.size() - own;
    CountSent(num_peers() * (kHeaderBytes + own) + others);
    CountReceived(num_peers() * (kHeaderBytes + own) + others);
  }

  void AllReduceDense(const MessageTag& tag, Span<float> values) override {
    Reduce(tag, Operation::kReduceDense, values);
    CountSent(num_peers() * kHeaderBytes + RingBytes(values.size() * sizeof(float), size()));
    CountReceived(num_peers() * kHeaderBytes + RingBytes(values.size() * sizeof(float), size()));
  }

  void Abort(const std::string& reason) noexcept override {
    try {
      state_->Fail(StrCat("rank ", rank_, " aborted: ", reason));
    } catch (...) {
    }
  }

  Waiting waiting() const override { return state_->WaitingOf(rank_); }
  std::uint64_t bytes_sent() const override { return bytes_sent_; }
  std::uint64_t bytes_received() const override { return bytes_received_; }

 private:
  std::size_t num_peers() const { return static_cast<std::size_t>(size()) - 1; }
  const Published& published(int rank) const {
    return state_->published[static_cast<std::size_t>(rank)];
  }
  void CountSent(std::size_t num_bytes) { bytes_sent_ += num_bytes; }
  void CountReceived(std::size_t num_bytes) { bytes_received_ += num_bytes; }

  // Runs `work` while all ranks' published views are valid.
  template <typename Work>
  void Meet(const Published& mine, const Work& work) {
    state_->CheckAlive();
    state_->published[static_cast<std::size_t>(rank_)] = mine;
    state_->Enter(rank_, mine.tag);
    try {
      work();
    } catch (const std::exception& error) {
      state_->Fail(error.what());
      state_->Leave();
      throw;
    }
    state_->Leave();
    state_->CheckAlive();  // a rank that failed inside takes the others with it
  }

  void Gather(const Published& mine, std::size_t max_bytes, ReceiveBuffer& receive) {
    Meet(mine, [&] {
      receive.Reset(size());
      for (int peer = 0; peer < size(); ++peer) {
        const Bytes part = PartFrom(peer, mine, max_bytes);
        receive.SetFlags(peer, published(peer).flags);
        if (peer == rank_) {
          receive.SetView(peer, part);
          continue;
        }
        const MutableBytes copy = receive.Allocate(peer, part.size());
        if (!part.empty()) std::memcpy(copy.data(), part.data(), part.size());
        CountReceived(kHeaderBytes + part.size());
      }
    });
  }

  Bytes PartFrom(int peer, const Published& mine, std::size_t max_bytes) const {
    const Published& other = published(peer);
    const bool whole = other.operation != Operation::kAllToAll;
    const Bytes part = whole ? other.bytes : other.parts[static_cast<std::size_t>(rank_)];
    if (peer != rank_) CheckPeer(peer, mine, part.size(), max_bytes);
    return part;
  }

  void CheckPeer(int peer, const Published& mine, std::size_t num_bytes,
                 std::size_t max_bytes) const {
    const Published& other = published(peer);
    MessageHeader header;
    header.tag = other.tag;
    header.flags = other.flags;
    header.rank = static_cast<std::uint32_t>(peer);
    header.payload_bytes = num_bytes;
    CheckHeader(header, mine.tag, peer, rank_, max_bytes);
    if (other.operation != mine.operation) {
      throw CommunicationError(StrCat(DescribeTag(mine.tag), ": rank ", peer, " and rank ", rank_,
                                      " make different collective calls"));
    }
  }

  // sums[i] += part[i]; by memcpy since `sums` is storage of bytes.
  template <typename T>
  static void AddTo(std::size_t count, const std::uint8_t* part, std::uint8_t* sums) {
    for (std::size_t i = 0; i < count; ++i) {
      T sum;
      T value;
      std::memcpy(&sum, sums + i * sizeof(T), sizeof(T));
      std::memcpy(&value, part + i * sizeof(T), sizeof(T));
      sum += value;
      std::memcpy(sums + i * sizeof(T), &sum, sizeof(T));
    }
  }

  // In the meeting each rank adds its range over all ranks, in rank order; then all copy the
  // ranges' sums.
  template <typename T>
  void Reduce(const MessageTag& tag, Operation operation, Span<T> values) {
    Published mine;
    mine.tag = tag;
    mine.operation = operation;
    mine.bytes =
        Bytes(reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(T));
    std::vector<std::uint8_t>& sums = state_->partial_sums[static_cast<std::size_t>(rank_)];
    Meet(mine, [&] {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank_) CheckPeer(peer, mine, 0, 0);
        if (published(peer).bytes.size() != mine.bytes.size()) {
          throw CommunicationError(StrCat(
              DescribeTag(tag), ": all ranks pass the same number of entries; rank ", peer, " has ",
              published(peer).bytes.size() / sizeof(T), ", rank ", rank_, " ", values.size()));
        }
      }
      const Range range = RangeOf(values.size(), size(), rank_);
      sums.assign(range.count * sizeof(T), 0);
      for (int peer = 0; peer < size(); ++peer) {
        const std::uint8_t* const part = published(peer).bytes.data() + range.begin * sizeof(T);
        AddTo<T>(range.count, part, sums.data());
      }
    });
    // No meeting closes this: the sums are rewritten only inside the next one, which begins when
    // all have copied.
    for (int owner = 0; owner < size(); ++owner) {
      const Range range = RangeOf(values.size(), size(), owner);
      if (range.count == 0) continue;
      std::memcpy(values.data() + range.begin,
                  state_->partial_sums[static_cast<std::size_t>(owner)].data(),
                  range.count * sizeof(T));
    }
  }

  const std::shared_ptr<InProcessState> state_;
  const int rank_;
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
};

}  // namespace
}  // namespace internal

InProcessGroup::InProcessGroup(int world_size, std::chrono::milliseconds timeout) {
  BITOPK_CHECK_ARG(world_size >= 1, "InProcessGroup: world size; got ", world_size,
                   ", expected at least 1");
  BITOPK_CHECK_ARG(timeout.count() > 0, "InProcessGroup: time-out; got ", timeout.count(),
                   " ms, expected more than 0");
  state_ = std::make_shared<internal::InProcessState>(world_size, timeout);
}

int InProcessGroup::size() const { return state_->world_size; }

std::unique_ptr<Communicator> InProcessGroup::communicator(int rank) {
  BITOPK_CHECK_ARG(rank >= 0 && rank < size(), "InProcessGroup: rank; got ", rank,
                   ", expected 0 <= rank < ", size());
  state_->Take(rank);
  return std::make_unique<internal::InProcessCommunicator>(state_, rank);
}

}  // namespace bitopk
