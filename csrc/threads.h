// What the pool asks of the operating system: to sleep until a word changes, which core it is on, whether another thread
// gets anywhere, and to move a thread. Only Linux answers the last three; elsewhere threads stay where they are put.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#if defined(__linux__)
#include <pthread.h>
#endif

namespace tokenmill {

inline constexpr std::chrono::microseconds kForever{0};

// Sleeps while `word` has `value`, `at_most` so long where the system can (it may also wake without a cause).
void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::microseconds at_most);
void wake_all(std::atomic<uint32_t>& word);

#if defined(__linux__)
using ThreadHandle = pthread_t;
#else
using ThreadHandle = int;
#endif
ThreadHandle this_thread();

// The clock of the processor time that this thread has had, for others to read; -1: there is none.
int this_threads_clock();
int64_t nanoseconds_on(int clock);  // -1: unknown

int current_core();            // -1: unknown
int core_beside(int core);     // another one that this thread may use; -1: there is none
// Moves a living thread to a core that it may use, at once; the cores that it may use stay as they were.
bool move_thread(ThreadHandle thread, int core);

}  // namespace tokenmill
