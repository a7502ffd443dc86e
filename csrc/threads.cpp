// See threads.h.
#include "threads.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace tokenmill {

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::microseconds at_most) {
  const timespec limit{static_cast<time_t>(at_most.count() / 1000000), at_most.count() % 1000000 * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, at_most == kForever ? nullptr : &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

ThreadHandle this_thread() { return pthread_self(); }

int this_threads_clock() {
  clockid_t clock;
  return pthread_getcpuclockid(pthread_self(), &clock) == 0 ? clock : -1;
}

int64_t nanoseconds_on(int clock) {
  timespec now;
  if (clock == -1 || clock_gettime(clock, &now) != 0) return -1;
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

int current_core() { return sched_getcpu(); }

int core_beside(int core) {
  cpu_set_t allowed;
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return -1;
  for (int step = 1; step < CPU_SETSIZE; ++step)
    if (CPU_ISSET((core + step) % CPU_SETSIZE, &allowed)) return (core + step) % CPU_SETSIZE;
  return -1;
}

bool move_thread(ThreadHandle thread, int core) {
  cpu_set_t allowed, there;
  if (core < 0 || core >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof allowed, &allowed) != 0) return false;
  if (!CPU_ISSET(core, &allowed)) return false;
  CPU_ZERO(&there);
  CPU_SET(core, &there);
  if (pthread_setaffinity_np(thread, sizeof there, &there) != 0) return false;
  pthread_setaffinity_np(thread, sizeof allowed, &allowed);
  return true;
}

}  // namespace tokenmill

#else

namespace tokenmill {

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::microseconds) { word.wait(value); }
void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
ThreadHandle this_thread() { return 0; }
int this_threads_clock() { return -1; }
int64_t nanoseconds_on(int) { return -1; }
int current_core() { return -1; }
int core_beside(int) { return -1; }
bool move_thread(ThreadHandle, int) { return false; }

}  // namespace tokenmill

#endif
