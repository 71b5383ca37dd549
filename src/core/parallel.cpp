#include "core/parallel.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace terrace {
namespace {

using Clock = std::chrono::steady_clock;
using RunBlock = void (*)(const void* loop, int64_t block);

// Longer than nearly all gaps between the loops of a training step, shorter than the time for which
// a processor is shared out between processes (some milliseconds).
constexpr Clock::duration kSpin = std::chrono::microseconds(100);

thread_local int64_t thread_number = 0;
thread_local bool in_loop = false;

// Rounding and the treatment of subnormal numbers.
unsigned FloatingPointMode() {
#ifdef __SSE2__
  return _mm_getcsr();
#else
  return 0;
#endif
}
void SetFloatingPointMode([[maybe_unused]] unsigned mode) {
#ifdef __SSE2__
  _mm_setcsr(mode);
#endif
}

void Pause() {
#ifdef __SSE2__
  _mm_pause();
#endif
}

// Whether `ready` became true within kSpin.
template <typename Ready>
bool Spin(const Ready& ready) {
  constexpr int kChecksBetweenClocks = 32;
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kChecksBetweenClocks; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (Clock::now() < end);
  return false;
}

// What is left to take of a loop: the loop's number in the upper half, and how many blocks nobody
// has taken in the lower one. In one word, so that a thread that was away while loops came and went
// cannot take a block of one loop with what it knows of another.
class Ticket {
 public:
  explicit Ticket(uint64_t word) : word_(word) {}
  Ticket(uint32_t loop, uint32_t left) : word_(uint64_t{loop} << 32 | left) {}
  uint64_t word() const { return word_; }
  uint32_t loop() const { return static_cast<uint32_t>(word_ >> 32); }
  uint32_t left() const { return static_cast<uint32_t>(word_); }

 private:
  uint64_t word_;
};

class Team {
 public:
  // Blocks [first, first + blocks) of a loop, by this thread and threads - 1 others.
  void Run(int64_t threads, RunBlock run, const void* loop, int64_t first, uint32_t blocks) {
    Resize(static_cast<size_t>(threads - 1));
    run_.store(run, std::memory_order_relaxed);
    loop_.store(loop, std::memory_order_relaxed);
    first_.store(first, std::memory_order_relaxed);
    blocks_.store(blocks, std::memory_order_relaxed);
    mode_.store(FloatingPointMode(), std::memory_order_relaxed);
    unfinished_.store(blocks, std::memory_order_relaxed);
    // Sequentially consistent, like what threads do before they sleep: either they see the loop, or
    // they are seen here.
    tickets_.store(Ticket(++loops_, blocks).word());
    if (const uint32_t sleeping = sleeping_.load(); sleeping > 0) {
      // With the lock taken once, whoever counts as sleeping does sleep.
      { const std::lock_guard lock(mutex_); }
      if (sleeping < blocks) {
        wake_.notify_all();
      } else {
        for (uint32_t block = 1; block < blocks; ++block) wake_.notify_one();
      }
    }

    in_loop = true;
    TakeBlocks();
    in_loop = false;
    const auto finished = [&] { return unfinished_.load() == 0; };
    if (!Spin(finished)) {
      std::unique_lock lock(mutex_);
      caller_sleeps_.store(true);
      finished_.wait(lock, finished);
      caller_sleeps_.store(false);
    }
    if (failure_) {
      failed_block_ = std::numeric_limits<int64_t>::max();
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

  std::mutex& busy() { return busy_; }

 private:
  void Resize(size_t workers) {
    if (workers == workers_.size()) return;
    {
      const std::lock_guard lock(mutex_);
      ending_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    ending_.store(false);
    while (workers_.size() < workers) {
      const auto number = static_cast<int64_t>(workers_.size()) + 1;
      workers_.emplace_back([this, number] { Work(number); });
    }
  }

  void Work(int64_t number) {
    thread_number = number;
    in_loop = true;
    omp_set_num_threads(1);  // of this thread: nothing here begins a team within a team
    while (true) {
      TakeBlocks();
      const auto wanted = [&] { return Ticket(tickets_.load()).left() > 0 || ending_.load(); };
      if (!Spin(wanted)) {
        std::unique_lock lock(mutex_);
        ++sleeping_;
        wake_.wait(lock, wanted);
        --sleeping_;
      }
      if (ending_.load()) return;
    }
  }

  void TakeBlocks() {
    Ticket ticket(tickets_.load());
    uint64_t word = ticket.word();
    while (Ticket(word).left() > 0) {
      // Of this loop if the block can be taken, else of any: a loop is replaced only once all of
      // its blocks are taken.
      const RunBlock run = run_.load(std::memory_order_relaxed);
      const void* loop = loop_.load(std::memory_order_relaxed);
      const unsigned mode = mode_.load(std::memory_order_relaxed);
      const int64_t block = first_.load(std::memory_order_relaxed) +
                            (blocks_.load(std::memory_order_relaxed) - Ticket(word).left());
      if (!tickets_.compare_exchange_weak(word, word - 1)) continue;
      SetFloatingPointMode(mode);
      try {
        run(loop, block);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (block < failed_block_) {
          failed_block_ = block;
          failure_ = std::current_exception();
        }
      }
      if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
        { const std::lock_guard lock(mutex_); }
        finished_.notify_one();
      }
      word = tickets_.load();
    }
  }

  std::mutex busy_;  // held by the caller of a loop
  std::vector<std::thread> workers_;

  // The loop, which does not change before all of its blocks are done.
  std::atomic<RunBlock> run_ = nullptr;
  std::atomic<const void*> loop_ = nullptr;
  std::atomic<int64_t> first_ = 0;
  std::atomic<uint32_t> blocks_ = 0;
  std::atomic<unsigned> mode_ = 0;
  uint32_t loops_ = 0;
  alignas(64) std::atomic<uint64_t> tickets_ = 0;     // a Ticket
  alignas(64) std::atomic<uint32_t> unfinished_ = 0;  // blocks, taken or not

  std::mutex mutex_;  // of all below, and of going to sleep
  std::condition_variable wake_, finished_;
  std::atomic<uint32_t> sleeping_ = 0;
  std::atomic<bool> caller_sleeps_ = false;
  std::atomic<bool> ending_ = false;
  std::exception_ptr failure_;
  int64_t failed_block_ = std::numeric_limits<int64_t>::max();
};

// Never destroyed: its threads are there until the process ends.
Team& TheTeam() {
  static Team& team = *new Team;
  return team;
}

}  // namespace

int64_t ThreadNumber() { return thread_number; }

void internal::RunBlocks(int64_t blocks, RunBlock run, const void* loop) {
  const int64_t threads = MaxThreads();
  std::unique_lock<std::mutex> team;
  if (blocks > 1 && threads > 1 && !in_loop) {
    team = std::unique_lock(TheTeam().busy(), std::try_to_lock);
  }
  if (!team) {
    for (int64_t block = 0; block < blocks; ++block) run(loop, block);
    return;
  }
  constexpr int64_t kMaxBlocks = std::numeric_limits<uint32_t>::max();
  for (int64_t first = 0; first < blocks; first += kMaxBlocks) {
    TheTeam().Run(threads, run, loop, first,
                  static_cast<uint32_t>(std::min(kMaxBlocks, blocks - first)));
  }
}

}  // namespace terrace
