// Parallel loops that a busy machine does not stall. A loop's chunks are taken one at a time by whoever comes: the caller,
// and helper threads where they are awake. Nobody waits for a thread that has not begun, as a barrier of OpenMP's does, so
// a helper that other work keeps from its core costs nothing but its help.

#pragma once

#include <cstdint>

// Calls chunk(context, i) once for each i in [0, chunks), by as many threads as `set_threads` said, and returns when all
// are done. Of two callers at once, the second runs alone.
void run_chunks(int64_t chunks, void (*chunk)(void *, int64_t), void *context);

// Calls f(begin, end) for pieces of [0, n) whose bounds are multiples of `grain`. In one piece when the loop is not worth
// `parallel`.
template <typename F>
void parallel_for(int64_t n, int64_t grain, bool parallel, F f) {
  // Enough pieces that a late helper leaves little waiting, few enough that taking one costs nothing beside it.
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
