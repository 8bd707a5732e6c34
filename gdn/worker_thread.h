// worker_thread.h: threads beside the training's: they take no signals, which are the training thread's to see, and
// wait by a clock that nobody sets.
//
// defines: worker_thread_start, monotonic_cond_init
#ifndef GDN_WORKER_THREAD_H
#define GDN_WORKER_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include "check.h"

// pthread_create with all signals blocked. 0, or an error number.
static MAYBE_UNUSED int worker_thread_start(pthread_t *thread, void *(*run)(void *), void *arg) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int rc = pthread_create(thread, NULL, run, arg);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return rc;
}

// A condition whose timed waits go by CLOCK_MONOTONIC.
static MAYBE_UNUSED void monotonic_cond_init(pthread_cond_t *cond) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(cond, &attr);
  pthread_condattr_destroy(&attr);
}

#endif  // GDN_WORKER_THREAD_H
