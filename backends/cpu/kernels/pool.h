// Parallel loops that do not stall on a busy machine. The caller and the helper threads that are awake take a loop's
// chunks one at a time. The caller waits only for chunks that have begun, unlike an OpenMP barrier. A helper thread
// that gets no core therefore delays nothing.

#pragma once

#include <cstdint>

// Calls chunk(context, i) once for each i in [0, chunks), in up to as many threads as `set_threads` set, and returns
// when all are done. If two threads call it at once, the second runs its chunks alone.
void run_chunks(int64_t chunks, void (*chunk)(void *, int64_t), void *context);

// Calls f(begin, end) for pieces of [0, n) with bounds at multiples of `grain`. Without `parallel` there is one piece.
template <typename F>
void parallel_for(int64_t n, int64_t grain, bool parallel, F f) {
  // Enough pieces that a late helper causes little waiting, and few enough that taking one costs little.
  constexpr int64_t PIECES = 16;
  const int64_t grains = (n + grain - 1) / grain;
  if (!parallel || grains < 2) {
    f(int64_t{0}, n);
    return;
  }
  struct Loop {
    F &f;
    int64_t n, size;
  } loop{f, n, (grains + PIECES - 1) / PIECES * grain};
  run_chunks(
      (n + loop.size - 1) / loop.size,
      [](void *context, int64_t i) {
        const Loop &loop = *static_cast<Loop *>(context);
        const int64_t begin = i * loop.size;
        loop.f(begin, begin + loop.size < loop.n ? begin + loop.size : loop.n);
      },
      &loop);
}
