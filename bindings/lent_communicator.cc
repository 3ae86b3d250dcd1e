// SPDX-License-Identifier: Apache-2.0
//
// LentCommunicator: headers, checks and counters around collectives that Python lends.
#include "lent_communicator.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "bitopk/kernels/error.h"
#include "engine_handle.h"

namespace bitopk::python {
namespace py = pybind11;
using internal::StrCat;

namespace {

using Clock = std::chrono::steady_clock;

// How long the exit of the interpreter waits for a call that was aborted.
constexpr std::chrono::seconds kLongestExit(5);

// What Python raised, in the words that an error of ours would have. REQUIRES: the GIL is held.
std::string TextOf(const py::error_already_set& error, const std::string& what) noexcept {
  try {
    std::string text = py::str(error.value());
    const py::object ours = py::module_::import("bitopk._core").attr("CommunicationError");
    if (error.matches(ours)) return text;  // by agreement it begins with `what`
    return StrCat(what, ": ", std::string(py::str(error.type().attr("__name__"))), ": ", text);
  } catch (const std::exception&) {
    return what + ": an exception that has no text";
  }
}

// A contiguous view of a bytes-like object. REQUIRES: the GIL is held.
class BytesView {
 public:
  explicit BytesView(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  ~BytesView() { PyBuffer_Release(&view_); }
  BytesView(const BytesView&) = delete;
  BytesView& operator=(const BytesView&) = delete;

  Bytes bytes() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

py::object ViewOf(Bytes bytes) {
  static constexpr std::uint8_t kNothing = 0;  // Python wants an address even for no bytes
  const void* const data = bytes.empty() ? &kNothing : bytes.data();
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes.size()));
}

// The Python object, and who may call it when. Thread-safe.
//
// One call at a time is inside Python. Close lets the object go: at once if nobody is inside, else
// the call that is does so on its way out. The mutex is never held while a thread asks for the GIL.
class Collectives {
 public:
  // REQUIRES: the GIL is held.
  static std::shared_ptr<Collectives> Make(py::object object) {
    auto made = std::make_shared<Collectives>(std::move(object));
    // Exit handlers run while other threads can still get the GIL; later a thread that asked for it
    // would be ended in the middle of C++ code.
    made->at_exit_ = py::cpp_function([weak = std::weak_ptr<Collectives>(made)] {
      if (const auto self = weak.lock()) self->CloseAtExit();
    });
    py::module_::import("atexit").attr("register")(made->at_exit_);
    return made;
  }

  explicit Collectives(py::object object)
      : object_(std::move(object)),
        aborted_(py::cpp_function([flag = abort_flag_] { return flag->load(); })) {}

  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // Calls f(object, aborted) with the GIL. @throws CommunicationError with the text of a Python
  // exception, or if closed.
  template <typename F>
  void Use(const std::string& what, const F& f) {
    Enter(what);
    std::exception_ptr error;
    {
      const py::gil_scoped_acquire gil;
      try {
        f(object_, aborted_);
      } catch (const py::error_already_set& raised) {
        error = std::make_exception_ptr(CommunicationError(TextOf(raised, what)));
      } catch (const std::exception& other) {  // what came back is not what was asked for
        error = std::make_exception_ptr(CommunicationError(StrCat(what, ": ", other.what())));
      }
    }
    Leave();
    if (error != nullptr) std::rethrow_exception(error);
  }

  void Close() noexcept {
    abort_flag_->store(true);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
      if (inside_ || released_) return;
      inside_ = true;
    }
    Leave();
  }

 private:
  void Enter(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw CommunicationError(what + ": the lent collectives are closed");
    inside_ = true;
  }

  void Leave() noexcept {
    bool release = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      release = closed_;
      if (!release) inside_ = false;
    }
    if (release) {
      Release();
      const std::lock_guard<std::mutex> lock(mutex_);
      inside_ = false;
      released_ = true;
    }
    left_.notify_all();
  }

  // By the one who is inside.
  void Release() noexcept {
    const py::gil_scoped_acquire gil;
    try {
      object_.attr("close")();
    } catch (...) {  // the peers' time-outs remain
    }
    if (exiting_) {
      // The exit handler is running, and the object may hold what must not be destroyed before the
      // process ends: both are left to the end of the process.
      at_exit_.release();
      object_.release();
    } else {
      try {
        py::module_::import("atexit").attr("unregister")(at_exit_);
      } catch (...) {  // a handler that stays does nothing
      }
      at_exit_ = py::object();
      object_ = py::object();
    }
    aborted_ = py::object();
  }

  // REQUIRES: the GIL is held.
  void CloseAtExit() {
    exiting_ = true;
    Close();
    const py::gil_scoped_release release;
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait_for(lock, kLongestExit, [this] { return !inside_; });
  }

  const std::shared_ptr<std::atomic<bool>> abort_flag_ = std::make_shared<std::atomic<bool>>(false);
  py::object object_;
  py::object aborted_;
  py::object at_exit_;

  std::mutex mutex_;
  std::condition_variable left_;
  std::atomic<bool> exiting_{false};
  bool inside_ = false;
  bool closed_ = false;
  bool released_ = false;
};

// The first collective of every call is the same on all ranks, whatever they are in: an all_to_all
// of one record for each pair, with the header, the operation, the size of the largest part that
// the sender has for anyone, and the part if it fits. So every rank knows all senders' largest
// parts, and whether there is a second collective.
enum class Operation : std::uint8_t { kAllToAll, kAllGather, kReduceSum, kReduceDense };

constexpr std::size_t kRecordBytes = 1088;
constexpr std::size_t kOperationAt = kHeaderBytes;
constexpr std::size_t kLargestAt = kHeaderBytes + 8;
constexpr std::size_t kInlineAt = kHeaderBytes + 16;
constexpr std::size_t kInlineBytes = kRecordBytes - kInlineAt;
static_assert(kInlineBytes == 1024, "documented");

bool IsInline(std::size_t num_bytes) { return num_bytes <= kInlineBytes; }

// Bytes that one rank sends, and receives, in a ring allreduce.
std::size_t RingBytes(std::size_t num_bytes, int size) {
  return 2 * (num_bytes - num_bytes / static_cast<std::size_t>(size));
}

// What a rank announces in a call, and how much it takes.
struct Expectation {
  MessageTag tag;
  Operation operation = Operation::kAllToAll;
  std::uint16_t flags = 0;
  std::size_t max_bytes = 0;
};

class LentCommunicator final : public Communicator {
 public:
  LentCommunicator(int rank, int size, std::chrono::milliseconds timeout, py::object collectives)
      : rank_(rank),
        size_(size),
        timeout_(timeout),
        collectives_(Collectives::Make(std::move(collectives))),
        records_out_(static_cast<std::size_t>(size) * kRecordBytes),
        records_in_(records_out_.size()),
        sizes_(static_cast<std::size_t>(size)) {}

  ~LentCommunicator() override { collectives_->Close(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::chrono::milliseconds timeout() const override { return timeout_; }

  void AllToAllV(const MessageTag& tag, Span<const Bytes> send, std::uint16_t flags,
                 std::size_t max_bytes, ReceiveBuffer& receive) override {
    BITOPK_CHECK_ARG(send.size() == static_cast<std::size_t>(size_),
                     "AllToAllV: one part for each rank; got ", send.size(), ", expected ", size_);
    Call(tag, [&] {
      ExchangeParts(
          {tag, Operation::kAllToAll, flags, max_bytes},
          [&](int peer) { return send[static_cast<std::size_t>(peer)]; }, receive);
    });
  }

  void AllGatherV(const MessageTag& tag, Bytes send, std::uint16_t flags, std::size_t max_bytes,
                  ReceiveBuffer& receive) override {
    Call(tag, [&] {
      ExchangeParts(
          {tag, Operation::kAllGather, flags, max_bytes}, [&](int) { return send; }, receive);
    });
  }

  void AllReduceSum(const MessageTag& tag, Span<std::uint64_t> counts) override {
    const Bytes own(reinterpret_cast<const std::uint8_t*>(counts.data()),
                    counts.size() * sizeof(std::uint64_t));
    Call(tag, [&] {
      MeetForReduction(tag, Operation::kReduceSum, own, sizeof(std::uint64_t));
      if (size_ == 1) return;
      if (IsInline(own.size())) {
        for (int peer = 0; peer < size_; ++peer) {
          if (peer != rank_) AddInlineCounts(peer, counts);
        }
        Count(num_peers() * own.size(), num_peers() * own.size());
        return;
      }
      AllReduceByHost(tag, reinterpret_cast<std::int64_t*>(counts.data()), counts.size());
    });
  }

  void AllReduceDense(const MessageTag& tag, Span<float> values) override {
    const Bytes own(reinterpret_cast<const std::uint8_t*>(values.data()),
                    values.size() * sizeof(float));
    Call(tag, [&] {
      MeetForReduction(tag, Operation::kReduceDense, own, sizeof(float));
      if (size_ > 1 && !values.empty()) AllReduceByHost(tag, values.data(), values.size());
    });
  }

  void Abort(const std::string& reason) noexcept override {
    try {
      Fail(StrCat("rank ", rank_, " aborted: ", reason, Suffix()));
    } catch (...) {
    }
  }

  Waiting waiting() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Waiting waiting;
    if (!is_waiting_) return waiting;
    // Who of them is late, a host's collective does not tell.
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) waiting.ranks.push_back(peer);
    }
    waiting.what = DescribeTag(waiting_tag_);
    waiting.since = waiting_since_;
    return waiting;
  }

  std::uint64_t bytes_sent() const override { return bytes_sent_; }
  std::uint64_t bytes_received() const override { return bytes_received_; }

 private:
  std::size_t num_peers() const { return static_cast<std::size_t>(size_) - 1; }
  std::string Suffix() const { return StrCat(" (rank ", rank_, " of ", size_, ")"); }

  void Count(std::size_t sent, std::size_t received) {
    bytes_sent_ += sent;
    bytes_received_ += received;
  }

  // ---- One call ----

  template <typename Body>
  void Call(const MessageTag& tag, const Body& body) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (dead_) throw CommunicationError(cause_);
      is_waiting_ = true;
      waiting_tag_ = tag;
      waiting_since_ = Clock::now();
    }
    struct Cleanup {
      LentCommunicator* self;
      ~Cleanup() {
        const std::lock_guard<std::mutex> lock(self->mutex_);
        self->is_waiting_ = false;
      }
    } cleanup{this};
    try {
      body();
    } catch (const CommunicationError& error) {
      throw CommunicationError(Fail(error.what()));
    } catch (const std::exception& error) {
      Fail(error.what());
      throw;
    }
  }

  // Makes the communicator dead; returns the first cause. Waits for the GIL only if no call is
  // inside Python; a call that is sees the flag.
  std::string Fail(const std::string& cause) {
    std::string first;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!dead_) cause_ = cause;
      dead_ = true;
      first = cause_;
    }
    collectives_->Close();
    return first;
  }

  template <typename PartFor>
  void ExchangeParts(const Expectation& expected, const PartFor& part_for, ReceiveBuffer& receive) {
    receive.Reset(size_);
    receive.SetView(rank_, part_for(rank_));
    receive.SetFlags(rank_, expected.flags);
    if (size_ == 1) return;
    std::size_t largest = Meet(expected, part_for);
    std::size_t sent = 0;
    std::size_t received = 0;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      const std::size_t num_bytes = sizes_[static_cast<std::size_t>(peer)];
      receive.SetFlags(peer, HeaderFrom(peer).flags);
      sent += part_for(peer).size();
      received += num_bytes;
      if (num_bytes > 0 && IsInline(num_bytes)) {
        std::memcpy(receive.Allocate(peer, num_bytes).data(), RecordFrom(peer).data() + kInlineAt,
                    num_bytes);
      }
    }
    if (!IsInline(largest)) ExchangeLargeParts(expected, part_for, receive);
    Count(sent, received);
  }

  // ---- The first collective ----

  // Sends and checks the records; leaves in sizes_ what each peer announces. Returns the size of
  // the largest part that any rank has for any other.
  template <typename PartFor>
  std::size_t Meet(const Expectation& expected, const PartFor& part_for) {
    std::uint64_t largest = 0;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) largest = std::max<std::uint64_t>(largest, part_for(peer).size());
    }
    std::fill(records_out_.begin(), records_out_.end(), std::uint8_t{0});
    std::vector<Bytes> records;
    for (int peer = 0; peer < size_; ++peer) {
      const MutableBytes record(records_out_.data() + static_cast<std::size_t>(peer) * kRecordBytes,
                                kRecordBytes);
      records.emplace_back(record.data(), record.size());
      if (peer != rank_) WriteRecord(expected, part_for(peer), largest, record);
    }
    sizes_.assign(sizes_.size(), kRecordBytes);
    AllToAllByHost(expected.tag, records, [&](int peer, Bytes record) {
      std::memcpy(records_in_.data() + static_cast<std::size_t>(peer) * kRecordBytes, record.data(),
                  kRecordBytes);
    });
    Count(num_peers() * kHeaderBytes, num_peers() * kHeaderBytes);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      largest = std::max(largest, CheckRecord(expected, peer));
    }
    sizes_[static_cast<std::size_t>(rank_)] = 0;
    return largest;
  }

  void WriteRecord(const Expectation& expected, Bytes part, std::uint64_t largest,
                   MutableBytes record) const {
    MessageHeader header;
    header.tag = expected.tag;
    header.flags = expected.flags;
    header.rank = static_cast<std::uint32_t>(rank_);
    header.payload_bytes = part.size();
    EncodeHeader(header, record.subspan(0, kHeaderBytes));
    record[kOperationAt] = static_cast<std::uint8_t>(expected.operation);
    std::memcpy(record.data() + kLargestAt, &largest, sizeof largest);
    if (!part.empty() && IsInline(part.size())) {
      std::memcpy(record.data() + kInlineAt, part.data(), part.size());
    }
  }

  Bytes RecordFrom(int peer) const {
    return {records_in_.data() + static_cast<std::size_t>(peer) * kRecordBytes, kRecordBytes};
  }
  MessageHeader HeaderFrom(int peer) const {
    return DecodeHeader(RecordFrom(peer).subspan(0, kHeaderBytes));
  }

  // Notes the size in sizes_; returns the largest part that the peer has for anyone.
  std::uint64_t CheckRecord(const Expectation& expected, int peer) {
    const MessageTag& tag = expected.tag;
    const Bytes record = RecordFrom(peer);
    MessageHeader header;
    try {
      header = HeaderFrom(peer);
    } catch (const WireFormatError& error) {
      throw WireFormatError(StrCat(DescribeTag(tag), ": from rank ", peer, ": ", error.what()));
    }
    CheckHeader(header, tag, peer, rank_, expected.max_bytes);
    if (record[kOperationAt] != static_cast<std::uint8_t>(expected.operation)) {
      throw CommunicationError(StrCat(DescribeTag(tag), ": rank ", peer, " and rank ", rank_,
                                      " make different collective calls"));
    }
    std::uint64_t largest = 0;
    std::memcpy(&largest, record.data() + kLargestAt, sizeof largest);
    if (largest < header.payload_bytes) {
      throw WireFormatError(StrCat(DescribeTag(tag), ": rank ", peer, " announces ",
                                   header.payload_bytes, " bytes to rank ", rank_,
                                   ", but says that its largest part has ", largest));
    }
    sizes_[static_cast<std::size_t>(peer)] = static_cast<std::size_t>(header.payload_bytes);
    return largest;
  }

  // ---- The second collective ----

  template <typename PartFor>
  void ExchangeLargeParts(const Expectation& expected, const PartFor& part_for,
                          ReceiveBuffer& receive) {
    const auto unless_inline = [](Bytes part) { return IsInline(part.size()) ? Bytes() : part; };
    for (std::size_t& num_bytes : sizes_) num_bytes = IsInline(num_bytes) ? 0 : num_bytes;
    const auto take = [&](int peer, Bytes part) {
      if (!part.empty()) {
        std::memcpy(receive.Allocate(peer, part.size()).data(), part.data(), part.size());
      }
    };
    if (expected.operation == Operation::kAllGather) {
      const Bytes own = unless_inline(part_for(rank_));
      sizes_[static_cast<std::size_t>(rank_)] = own.size();
      AllGatherByHost(expected.tag, own, take);
      return;
    }
    std::vector<Bytes> parts;
    for (int peer = 0; peer < size_; ++peer) {
      parts.push_back(peer == rank_ ? Bytes() : unless_inline(part_for(peer)));
    }
    AllToAllByHost(expected.tag, parts, take);
  }

  // ---- Reductions ----

  // All ranks bring the same number of entries, or all fail.
  void MeetForReduction(const MessageTag& tag, Operation operation, Bytes own,
                        std::size_t entry_bytes) {
    if (size_ == 1) return;
    // Nothing is allocated by what is announced, and the message of inequality says more.
    constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
    Meet({tag, operation, 0, kNoLimit}, [&](int) { return own; });
    for (int peer = 0; peer < size_; ++peer) {
      const std::size_t num_bytes = sizes_[static_cast<std::size_t>(peer)];
      if (peer == rank_ || num_bytes == own.size()) continue;
      throw CommunicationError(StrCat(
          DescribeTag(tag), ": all ranks pass the same number of entries; rank ", peer, " has ",
          num_bytes / entry_bytes, ", rank ", rank_, " ", own.size() / entry_bytes));
    }
  }

  void AddInlineCounts(int peer, Span<std::uint64_t> counts) const {
    const std::uint8_t* const part = RecordFrom(peer).data() + kInlineAt;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      std::uint64_t value;
      std::memcpy(&value, part + i * sizeof value, sizeof value);
      counts[i] += value;
    }
  }

  // ---- Calls of Python ----

  double seconds() const { return std::chrono::duration<double>(timeout_).count(); }

  // Sends parts[r] to each rank; take(rank, bytes) gets what came, of sizes_[rank] bytes, but for
  // this rank's own.
  template <typename Take>
  void AllToAllByHost(const MessageTag& tag, const std::vector<Bytes>& parts, const Take& take) {
    const std::string what = DescribeTag(tag);
    collectives_->Use(what, [&](const py::object& object, const py::object& aborted) {
      py::list views;
      for (const Bytes part : parts) views.append(ViewOf(part));
      TakeAll(object.attr("all_to_all")(views, sizes_, what, seconds(), aborted), take);
    });
  }

  template <typename Take>
  void AllGatherByHost(const MessageTag& tag, Bytes own, const Take& take) {
    const std::string what = DescribeTag(tag);
    collectives_->Use(what, [&](const py::object& object, const py::object& aborted) {
      TakeAll(object.attr("all_gather")(ViewOf(own), sizes_, what, seconds(), aborted), take);
    });
  }

  template <typename T>
  void AllReduceByHost(const MessageTag& tag, T* values, std::size_t count) {
    const std::string what = DescribeTag(tag);
    collectives_->Use(what, [&](const py::object& object, const py::object& aborted) {
      // No py::array: pybind11 before 2.12 misreads the element size that NumPy 2 states.
      object.attr("all_reduce")(py::memoryview::from_buffer(values, {count}, {sizeof(T)}), what,
                                seconds(), aborted);
    });
    const std::size_t ring = RingBytes(count * sizeof(T), size_);
    Count(ring, ring);
  }

  template <typename Take>
  void TakeAll(const py::object& received, const Take& take) const {
    const auto parts = py::cast<py::sequence>(received);
    if (parts.size() != sizes_.size()) {
      throw Error(StrCat("the host returned ", parts.size(), " parts, expected ", sizes_.size()));
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      const auto p = static_cast<std::size_t>(peer);
      const py::object object = parts[p];
      const BytesView part(object);
      if (part.bytes().size() != sizes_[p]) {
        throw Error(StrCat("the host returned ", part.bytes().size(), " bytes from rank ", peer,
                           ", expected ", sizes_[p]));
      }
      take(peer, part.bytes());
    }
  }

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Collectives> collectives_;

  // Of the communication thread.
  std::vector<std::uint8_t> records_out_;
  std::vector<std::uint8_t> records_in_;
  std::vector<std::size_t> sizes_;  // bytes that each rank sends to this one
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};

  mutable std::mutex mutex_;
  bool dead_ = false;
  std::string cause_;
  bool is_waiting_ = false;
  MessageTag waiting_tag_;
  Clock::time_point waiting_since_;
};

}  // namespace

std::unique_ptr<Communicator> MakeLentCommunicator(int rank, int size, double timeout,
                                                   py::object collectives) {
  BITOPK_CHECK_ARG(size >= 1, "lent collectives: world size; got ", size, ", expected at least 1");
  BITOPK_CHECK_ARG(rank >= 0 && rank < size, "lent collectives: rank; got ", rank,
                   ", expected 0 <= rank < ", size);
  BITOPK_CHECK_ARG(timeout >= 0.001 && timeout < 1e9,
                   "lent collectives: timeout: must be a positive number of seconds; got ",
                   timeout);
  return std::make_unique<LentCommunicator>(
      rank, size, std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 1000.0)),
      std::move(collectives));
}

void RegisterLentCommunicator(py::module_& module) {
  module.def(
      "lent_engine",
      [](int rank, int size, double timeout, py::object collectives, const Config& config) {
        std::shared_ptr<Communicator> communicator =
            MakeLentCommunicator(rank, size, timeout, std::move(collectives));
        const py::gil_scoped_release release;
        return std::make_unique<EngineHandle>(std::move(communicator), config);
      },
      py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("collectives"),
      py::arg("config"));
}

}  // namespace bitopk::python
