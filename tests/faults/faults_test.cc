// SPDX-License-Identifier: Apache-2.0
//
// What the surviving ranks see when a rank dies, stops or never comes. Ranks are fresh processes
// (rank_main.cc).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace bitopk {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kFailedWithAMessage = 3;
constexpr seconds kStartTimeout(60);

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (fs::temp_directory_path() / "bitopk_faults_XXXXXX").string();
    path_ = mkdtemp(name.data()) == nullptr ? "" : name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// A child process whose output goes to a file; killed if it is still there at the end.
class Process {
 public:
  Process(const fs::path& output, const std::vector<std::string>& arguments) : output_(output) {
    std::vector<char*> argv = {const_cast<char*>(BITOPK_FAULT_RANK)};
    for (const std::string& each : arguments) argv.push_back(const_cast<char*>(each.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT_EQ(posix_spawn(&pid_, BITOPK_FAULT_RANK, &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal) const { kill(pid_, signal); }

  // Exit status, 128 + signal, or -1 if it is still running after `longest`.
  int Wait(milliseconds longest) {
    const auto end = Clock::now() + longest;
    for (;;) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
      if (Clock::now() > end) return -1;
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  std::vector<std::string> Lines() const {
    std::ifstream file(output_);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

  bool WaitForLine(const std::string& line, milliseconds longest) const {
    const auto end = Clock::now() + longest;
    while (Clock::now() < end) {
      for (const std::string& each : Lines()) {
        if (each == line) return true;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }

 private:
  fs::path output_;
  pid_t pid_ = 0;
};

struct Job {
  int size = 3;
  int absent = -1;  // a rank that is not started
  milliseconds timeout{60000};
  std::size_t part_bytes = 1000;
  milliseconds pause{0};
};

class FaultsTest : public ::testing::Test {
 protected:
  void Start(const Job& job) {
    ranks_.resize(static_cast<std::size_t>(job.size));
    for (int rank = 0; rank < job.size; ++rank) {
      if (rank == job.absent) continue;
      ranks_[static_cast<std::size_t>(rank)] = std::make_unique<Process>(
          directory_.path() / ("output_" + std::to_string(rank)),
          std::vector<std::string>{
              "loop", (directory_.path() / "store").string(), std::to_string(rank),
              std::to_string(job.size), std::to_string(job.timeout.count()),
              std::to_string(job.part_bytes), std::to_string(job.pause.count())});
    }
  }
  void WaitForStep(int step) {
    for (const auto& rank : ranks_) {
      ASSERT_TRUE(rank->WaitForLine("step " + std::to_string(step), kStartTimeout));
    }
  }
  Process& rank(int r) { return *ranks_[static_cast<std::size_t>(r)]; }

  // All ranks but `culprit` exit within `longest`, with an error whose message matches.
  template <typename Matcher>
  void ExpectOthersFail(int culprit, milliseconds longest, const Matcher& matcher) {
    const auto end = Clock::now() + longest;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      if (r == culprit) continue;
      const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
      EXPECT_EQ(rank(r).Wait(std::max(left, milliseconds(1))), kFailedWithAMessage) << "rank " << r;
      const std::vector<std::string> lines = rank(r).Lines();
      ASSERT_FALSE(lines.empty()) << "rank " << r;
      EXPECT_THAT(lines.back(), matcher) << "rank " << r;
    }
  }

  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Process>> ranks_;
};

TEST_F(FaultsTest, AKilledRankIsNamedByAllOthers) {
  for (const int size : {2, 3, 4}) {
    for (const int victim : {0, size - 1}) {
      SCOPED_TRACE(testing::Message() << "rank " << victim << " of " << size);
      fs::remove_all(directory_.path() / "store");
      Job job;
      job.size = size;
      Start(job);
      WaitForStep(5);
      rank(victim).Signal(SIGKILL);
      ExpectOthersFail(
          victim, seconds(5),
          AllOf(HasSubstr(" of message 0, step "),
                HasSubstr("rank " + std::to_string(victim) + " closed its connection")));
      ranks_.clear();
    }
  }
}

TEST_F(FaultsTest, ARankKilledInTheMiddleOfALargeMessageIsNamed) {
  Job job;
  job.size = 4;
  job.part_bytes = 16 << 20;
  Start(job);
  WaitForStep(0);
  std::this_thread::sleep_for(milliseconds(30));
  rank(2).Signal(SIGKILL);
  ExpectOthersFail(2, seconds(8), HasSubstr("rank 2 closed its connection"));
}

TEST_F(FaultsTest, ARankKilledBetweenCallsIsNamedByTheNextCall) {
  Job job;
  job.pause = milliseconds(400);
  Start(job);
  WaitForStep(1);
  std::this_thread::sleep_for(milliseconds(100));
  rank(1).Signal(SIGKILL);
  ExpectOthersFail(1, seconds(5), HasSubstr("rank 1 closed its connection"));
}

TEST_F(FaultsTest, AStoppedRankIsNamedWhenTheTimeIsUp) {
  for (const std::size_t part_bytes : {std::size_t{1000}, std::size_t{16} << 20}) {
    SCOPED_TRACE(part_bytes);
    fs::remove_all(directory_.path() / "store");
    Job job;
    job.size = 4;
    job.timeout = seconds(3);
    job.part_bytes = part_bytes;
    Start(job);
    WaitForStep(0);
    const auto begin = Clock::now();
    rank(2).Signal(SIGSTOP);
    ExpectOthersFail(2, seconds(6), HasSubstr("no answer from rank 2 within 3 s"));
    EXPECT_LT(Clock::now() - begin, milliseconds(5000));
    ranks_.clear();
  }
}

TEST_F(FaultsTest, ARankThatIsStoppedForAWhileDoesNoHarm) {
  Job job;
  job.timeout = seconds(30);
  Start(job);
  WaitForStep(3);
  rank(1).Signal(SIGSTOP);
  std::this_thread::sleep_for(seconds(1));
  const std::size_t before = rank(0).Lines().size();
  rank(1).Signal(SIGCONT);
  EXPECT_TRUE(rank(0).WaitForLine("step " + std::to_string(before + 20), seconds(20)));
}

TEST_F(FaultsTest, ARankThatNeverStartsIsNamed) {
  Job job;
  job.size = 3;
  job.absent = 2;
  job.timeout = seconds(2);
  Start(job);
  ExpectOthersFail(2, seconds(5), HasSubstr("no sign of rank 2"));
}

TEST_F(FaultsTest, AStrangerAtTheDoorIsAnErrorAndNotACrash) {
  Process process(directory_.path() / "output", {"stranger"});
  EXPECT_EQ(process.Wait(seconds(60)), kFailedWithAMessage);
  const std::vector<std::string> lines = process.Lines();
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines.front(), "connected");
  EXPECT_THAT(lines.back(), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace bitopk
