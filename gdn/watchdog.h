// watchdog.h: ends a run that makes no progress. A thread looks at the phase that the training is in; when it has
// lasted longer than its deadline, the thread writes rank, step, phase and the ranks that are waited for to stderr and
// to OUT/hang-rank-N.txt, and ends the process with code 76 (EXIT_HANG): the launcher then ends the others. It never
// waits for anything itself.
//
// The deadline of a phase is the larger of 60 s and 10 times the median of its last durations; it is half an hour for a
// phase that has not been measured WATCHDOG_KNOWN times, and at least that for saves, most of which only start a thread
// while the last one waits for the disk. --hang-timeout replaces all of these. A phase that reports progress
// (watchdog_progress) begins anew. Only time in which the process could run counts: a job that is suspended and woken
// up again has not hung.
//
// defines: Phase, Watchdog, watchdog_start, watchdog_stop, watchdog_phase, watchdog_progress, watchdog_step
#ifndef GDN_WATCHDOG_H
#define GDN_WATCHDOG_H

#include <fcntl.h>
#include "comm.h"
#include "fault.h"
#include "signals.h"
#include "worker_thread.h"

typedef enum {
  PHASE_SETUP,
  PHASE_DATA,      // rows of the step
  PHASE_GRADIENT,  // forward and backward of a micro-batch
  PHASE_REDUCE,    // gradients, norm and flags over ranks
  PHASE_UPDATE,    // AdamW
  PHASE_GATHER,    // weights over ranks
  PHASE_SAVE,
  PHASE_EVAL,
  PHASE_SAMPLE,
  PHASE_COUNT
} Phase;
static const char *const phase_names[PHASE_COUNT] = {"setup",  "data", "gradient", "reduce", "update",
                                                     "gather", "save", "eval",     "sample"};

enum { WATCHDOG_KEPT = 15, WATCHDOG_KNOWN = 3 };

typedef struct {
  int running;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  int quit;
  const Comm *comm;
  double timeout;   // of --hang-timeout, 0: by what was measured
  char file[4200];  // hang-rank-N.txt
  // under lock
  Phase phase;
  int64_t step;
  double begin, lasted, deadline;  // of the phase; lasted: seconds in which the process could run
  double past[PHASE_COUNT][WATCHDOG_KEPT];
  int measured[PHASE_COUNT];
} Watchdog;

// One a process, so that a loop deep inside an evaluation can report progress.
static Watchdog watchdog MAYBE_UNUSED;

static MAYBE_UNUSED double watchdog_deadline(const Watchdog *w, Phase p) {
  double sorted[WATCHDOG_KEPT];
  int n = w->measured[p] < WATCHDOG_KEPT ? w->measured[p] : WATCHDOG_KEPT;
  if (w->timeout > 0) return w->timeout;
  if (n < WATCHDOG_KNOWN) return 1800;
  for (int i = 0; i < n; i++) {
    int at = i;
    for (; at > 0 && sorted[at - 1] > w->past[p][i]; at--) sorted[at] = sorted[at - 1];
    sorted[at] = w->past[p][i];
  }
  double least = p == PHASE_SAVE ? 1800 : 60;
  return 10 * sorted[n / 2] > least ? 10 * sorted[n / 2] : least;
}

static MAYBE_UNUSED void watchdog_report(const Watchdog *w) {
  char text[1024], waiting[256], peers[320] = "";
  const char *what = __atomic_load_n(&w->comm->collective, __ATOMIC_RELAXED);
  comm_waiting(w->comm, waiting, sizeof waiting);
  if (what) snprintf(peers, sizeof peers, ", exchanging %s, waiting for %s", what, waiting[0] ? waiting : "nobody");
  int n =
      snprintf(text, sizeof text,
               "%s: error: rank %d of %d: no progress for %.0f s in phase %s of step %lld%s; if it was only slow, "
               "give a larger --hang-timeout\n",
               program_name, w->comm->rank, w->comm->size, w->lasted, phase_names[w->phase], (long long)w->step, peers);
  if (n > (int)sizeof text - 1) n = (int)sizeof text - 1;
  ssize_t done = write(STDERR_FILENO, text, (size_t)n);  // not stdio: the stuck thread may hold its lock
  int fd = open(w->file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd >= 0) done = write(fd, text, (size_t)n);
  (void)done;
}

static MAYBE_UNUSED void *watchdog_main(void *arg) {
  Watchdog *w = (Watchdog *)arg;
  const double tick = w->timeout > 0 && w->timeout < 10 ? w->timeout / 20 : 0.5;
  pthread_mutex_lock(&w->lock);
  for (double last = monotonic_seconds(); !w->quit;) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + (int64_t)(tick * 1e9);
    until.tv_sec += (time_t)(ns / 1000000000), until.tv_nsec = (long)(ns % 1000000000);
    pthread_cond_timedwait(&w->wake, &w->lock, &until);
    double now = monotonic_seconds(), since = last > w->begin ? last : w->begin;
    double passed = now - since;
    if (passed > 0) w->lasted += passed < 4 * tick ? passed : 4 * tick;  // more: this thread was stopped as well
    last = now;
    if (w->lasted <= w->deadline) continue;
    watchdog_report(w);
    _exit(EXIT_HANG);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

// Starts the thread. out: the run's folder; timeout: --hang-timeout in seconds, 0: as the header says. Without memory
// for a thread it warns, and there is no watchdog.
static MAYBE_UNUSED void watchdog_start(const Comm *comm, const char *out, double timeout) {
  Watchdog *w = &watchdog;
  memset(w, 0, sizeof *w);
  w->comm = comm, w->timeout = timeout;
  snprintf(w->file, sizeof w->file, "%.4000s/hang-rank-%d.txt", out, comm->rank);
  unlink(w->file);  // of an earlier run
  w->begin = monotonic_seconds(), w->deadline = watchdog_deadline(w, PHASE_SETUP);
  pthread_mutex_init(&w->lock, NULL);
  monotonic_cond_init(&w->wake);
  int rc = worker_thread_start(&w->thread, watchdog_main, w);
  w->running = !rc;
  if (rc) warn("no thread for the watchdog: %s; a hang will not be noticed", strerror(rc));
}

static MAYBE_UNUSED void watchdog_stop(void) {
  Watchdog *w = &watchdog;
  if (!w->running) return;
  pthread_mutex_lock(&w->lock);
  w->quit = 1;
  pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->thread, NULL);
  pthread_cond_destroy(&w->wake);
  pthread_mutex_destroy(&w->lock);
  w->running = 0;
}

// The training enters a phase; the one before is measured.
static MAYBE_UNUSED void watchdog_phase(Phase p) {
  Watchdog *w = &watchdog;
  if (!w->running) return;
  pthread_mutex_lock(&w->lock);
  double now = monotonic_seconds();
  w->past[w->phase][w->measured[w->phase]++ % WATCHDOG_KEPT] = now - w->begin;
  w->phase = p, w->begin = now, w->lasted = 0;
  w->deadline = watchdog_deadline(w, p);
  int64_t step = w->step;
  pthread_mutex_unlock(&w->lock);
  char kind[32];
  snprintf(kind, sizeof kind, "kill-%s", phase_names[p]);
  if (fault_is_due(kind, step)) raise(SIGKILL);
  snprintf(kind, sizeof kind, "hang-%s", phase_names[p]);
  while (fault_is_due(kind, step)) sleep(1);
}

// The present phase goes on, with its clock at 0.
static MAYBE_UNUSED void watchdog_progress(void) {
  if (watchdog.running) watchdog_phase(watchdog.phase);
}

// The step that reports name; 1 is the first.
static MAYBE_UNUSED void watchdog_step(int64_t step) {
  if (!watchdog.running) return;
  pthread_mutex_lock(&watchdog.lock);
  watchdog.step = step;
  pthread_mutex_unlock(&watchdog.lock);
}

#endif  // GDN_WATCHDOG_H
