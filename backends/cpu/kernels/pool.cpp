#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
// A helper thread polls for work this long before it sleeps: the kernels of a step follow each other within some 10 us,
// and waking a helper takes the caller about 5 us.
constexpr std::chrono::microseconds AWAKE{50};

inline void pause() { __builtin_ia32_pause(); }

class Pool {
 public:
  void resize(int threads) {
    std::lock_guard<std::mutex> one(callers_);
    try {
      for (; helpers_ < threads - 1; ++helpers_) std::thread([this, i = helpers_] { help(i); }).detach();
    } catch (const std::system_error &) {
      // The system cannot create more threads: the existing ones, or the caller alone, do the work.
    }
    wanted_.store(std::min(threads - 1, helpers_));
  }

  void run(int64_t chunks, void (*chunk)(void *, int64_t), void *context) {
    std::unique_lock<std::mutex> alone(callers_, std::try_to_lock);
    if (!alone || wanted_.load(std::memory_order_relaxed) == 0) {
      for (int64_t i = 0; i < chunks; ++i) chunk(context, i);
      return;
    }
    chunk_ = chunk;
    context_ = context;
    unfinished_.store(chunks, std::memory_order_relaxed);
    left_.store(static_cast<uint32_t>(chunks));
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    while (take()) {
    }
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 1000)
        pause();
      else
        std::this_thread::yield();  // the thread with the last chunk may need this core
    }
  }

 private:
  // Takes a chunk and runs it, if one is left. `chunk_` and `context_` do not change until all chunks are finished, so
  // reading them after taking a chunk is safe.
  bool take() {
    uint32_t left = left_.load();
    do {
      if (left == 0) return false;
    } while (!left_.compare_exchange_weak(left, left - 1));
    chunk_(context_, left - 1);
    unfinished_.fetch_sub(1, std::memory_order_release);
    return true;
  }

  void help(int number) {
    for (;;) {
      auto until = Clock::now() + AWAKE;
      do {
        for (int i = 0; i < 64; ++i) {
          if (number < wanted_.load(std::memory_order_relaxed) && take()) until = Clock::now() + AWAKE;
          pause();
        }
      } while (Clock::now() < until);
      std::unique_lock<std::mutex> lock(sleep_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [&] { return number < wanted_.load() && left_.load() > 0; });
      asleep_.fetch_sub(1);
    }
  }

  std::mutex callers_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint32_t> left_{0};
  std::atomic<int64_t> unfinished_{0};
  std::atomic<int> asleep_{0}, wanted_{0};
  int helpers_ = 0;
  void (*chunk_)(void *, int64_t) = nullptr;
  void *context_ = nullptr;
};

// Never destroyed: helper threads may sleep in it when the process ends.
Pool &pool() {
  static Pool *one = new Pool;
  return *one;
}

}  // namespace

void run_chunks(int64_t chunks, void (*chunk)(void *, int64_t), void *context) { pool().run(chunks, chunk, context); }

extern "C" void set_threads(int64_t threads) { pool().resize(static_cast<int>(threads)); }
