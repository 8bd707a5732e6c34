// runlock.h: one job a run folder.
//
// OUT/run.lock is held with flock(2) for as long as the process lives, and names host, process id and time. The kernel
// drops the lock when the process ends in whatever way, so a lock that nobody holds is taken over.
//
// defines: RunLock, runlock_acquire, runlock_release
#ifndef GDN_RUNLOCK_H
#define GDN_RUNLOCK_H

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

typedef struct {
  int fd;  // -1: not held
  char path[4096];
  char note[256];  // after a take-over: whose lock it was; else empty
} RunLock;

static MAYBE_UNUSED void runlock_close(RunLock *lock) {
  if (lock->fd >= 0) close(lock->fd);
  lock->fd = -1;
}

// Takes the lock of an existing folder, or returns EXIT_CHECKPOINT with one line that names host and process id of the
// job that holds it.
static MAYBE_UNUSED int runlock_acquire(RunLock *lock, const char *out, Error *err) {
  char text[256], host[128] = "", when[40] = "";
  memset(lock, 0, sizeof *lock);
  snprintf(lock->path, sizeof lock->path, "%.4000s/run.lock", out);
  lock->fd = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock->fd < 0) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be opened: %s", lock->path, strerror(errno));
  int held = flock(lock->fd, LOCK_EX | LOCK_NB) != 0, e = errno;
  ssize_t n = pread(lock->fd, text, sizeof text - 1, 0);
  text[n > 0 ? n : 0] = 0;
  text[strcspn(text, "\n")] = 0;
  if (held && e != EWOULDBLOCK) {
    runlock_close(lock);
    return error_set(err, EXIT_CHECKPOINT, "%s: cannot be locked: %s; use an --out on another file system", lock->path,
                     strerror(e));
  }
  if (held) {
    runlock_close(lock);
    return error_set(err, EXIT_CHECKPOINT, "%s is in use by another job: %s; stop that job or use another --out", out,
                     text[0] ? text : "it is just starting");
  }
  if (text[0]) snprintf(lock->note, sizeof lock->note, "taken over from %.200s, which has ended", text);
  gethostname(host, sizeof host - 1);
  time_t now = time(NULL);
  struct tm tm;
  if (gmtime_r(&now, &tm)) strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", &tm);
  snprintf(text, sizeof text, "host %s, process %lld, since %s\n", host, (long long)getpid(), when);
  if (ftruncate(lock->fd, 0) || pwrite(lock->fd, text, strlen(text), 0) != (ssize_t)strlen(text))
    warn("%s: cannot be written: %s; the folder is locked without saying by whom", lock->path, strerror(errno));
  return 0;
}

// Gives the lock back. The file stays, empty: removing it would let two jobs lock two files of one name.
static MAYBE_UNUSED void runlock_release(RunLock *lock) {
  if (lock->fd >= 0 && ftruncate(lock->fd, 0)) warn("%s: cannot be emptied: %s", lock->path, strerror(errno));
  runlock_close(lock);
}

#endif  // GDN_RUNLOCK_H
