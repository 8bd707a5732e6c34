// signals.h: requests to stop. A run stops between two pieces of work, saves and exits with code 75 when it gets
// SIGUSR1, SIGTERM, SIGINT or SIGHUP (a closed terminal), when a file OUT/STOP appears, or when the time of
// --stop-after is over. A second SIGINT ends the process at once. The request is polled: nothing is done inside a
// signal handler but to note it.
//
// defines: StopWatch, stop_watch_start, stop_requested, stop_watch_clear, monotonic_seconds
#ifndef GDN_SIGNALS_H
#define GDN_SIGNALS_H

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

static volatile sig_atomic_t stop_signal MAYBE_UNUSED = 0;  // the signal that asked, 0: none

typedef struct {
  char file[4200];   // OUT/STOP; empty: no such file is looked for
  double deadline;   // of monotonic_seconds(); 0: none
  char reason[160];  // what asked first; empty: nothing yet
  int file_seen;
} StopWatch;

// Seconds of a clock that no one sets back.
static inline double monotonic_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static MAYBE_UNUSED void stop_signal_handler(int number) {
  if (number == SIGINT && stop_signal == SIGINT) {  // asked twice: now
    signal(SIGINT, SIG_DFL);
    raise(SIGINT);
    return;
  }
  stop_signal = number;
}

static const struct {
  int number;
  const char *name;
} stop_signals[] MAYBE_UNUSED = {{SIGUSR1, "SIGUSR1"}, {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGHUP, "SIGHUP"}};
enum { STOP_SIGNALS = sizeof stop_signals / sizeof *stop_signals };

// Installs the handlers and starts the clock. out: the run folder, NULL: none. stop_after: seconds, 0: no limit.
static inline void stop_watch_start(StopWatch *w, const char *out, double stop_after) {
  memset(w, 0, sizeof *w);
  if (out) snprintf(w->file, sizeof w->file, "%s/STOP", out);
  if (stop_after > 0) w->deadline = monotonic_seconds() + stop_after;
  struct sigaction a, before;
  memset(&a, 0, sizeof a);
  a.sa_handler = stop_signal_handler;
  a.sa_flags = SA_RESTART | SA_NODEFER;
  sigemptyset(&a.sa_mask);
  for (int i = 0; i < STOP_SIGNALS; i++) {
    sigaction(stop_signals[i].number, NULL, &before);
    if (stop_signals[i].number == SIGHUP && before.sa_handler == SIG_IGN) continue;  // nohup's runs go on
    sigaction(stop_signals[i].number, &a, NULL);
  }
}

// 1 from the first request on; w->reason says which.
static inline int stop_requested(StopWatch *w) {
  if (w->reason[0]) return 1;
  for (int i = 0; i < STOP_SIGNALS; i++)
    if (stop_signal == stop_signals[i].number) snprintf(w->reason, sizeof w->reason, "%s", stop_signals[i].name);
  if (w->reason[0]) return 1;
  if (w->deadline > 0 && monotonic_seconds() >= w->deadline)
    snprintf(w->reason, sizeof w->reason, "--stop-after");
  else if (w->file[0] && access(w->file, F_OK) == 0)
    snprintf(w->reason, sizeof w->reason, "the file STOP"), w->file_seen = 1;
  return w->reason[0] != 0;
}

// Call once the request has been obeyed: removes the file STOP, so that the next start does not stop at once.
static inline void stop_watch_clear(StopWatch *w) {
  if (w->file[0] && w->file_seen) unlink(w->file);
}

#endif  // GDN_SIGNALS_H
