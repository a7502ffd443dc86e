// The pool's interface to the operating system: sleep until a word changes, query the current core and another thread's CPU
// time, and move a thread. The last three work on Linux only; elsewhere threads are never moved.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#if defined(__linux__)
#include <pthread.h>
#endif

namespace tokenmill {

inline constexpr std::chrono::microseconds kForever{0};

// Sleeps while `word` has `value`, at most `at_most` if the system supports it; may also wake up spuriously.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::microseconds at_most);
void wake_all(std::atomic<uint32_t>& word);

#if defined(__linux__)
using ThreadHandle = pthread_t;
#else
using ThreadHandle = int;
#endif
ThreadHandle this_thread();

// The id of this thread's CPU-time clock, for other threads to read; -1: not available.
int this_threads_clock();
int64_t nanoseconds_on(int clock);  // -1: unknown

int current_core();            // -1: unknown
int core_beside(int core);     // another core that this thread may use; -1: there is none
// Moves a running thread to a core within its affinity mask immediately; the mask stays unchanged.
bool move_thread(ThreadHandle thread, int core);

}  // namespace tokenmill
