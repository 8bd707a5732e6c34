// checkpoint_writer.h: saves behind the training, by one process: a thread copies the arenas to host memory
// (snapshot.h), then writes. One save is in flight: submit waits for the one before it. saver.h does the same for
// several ranks.
//
// defines: CheckpointWriter, checkpoint_writer_start, checkpoint_writer_submit, checkpoint_writer_copying,
//          checkpoint_writer_poll, checkpoint_writer_wait, checkpoint_writer_failures, checkpoint_writer_stop
#ifndef GDN_CHECKPOINT_WRITER_H
#define GDN_CHECKPOINT_WRITER_H

#include "checkpoint_write.h"
#include "snapshot.h"

typedef struct {
  const CheckpointSettings *settings;
  const Config *config;
  const ParamTable *table;
  Snapshot snapshot;
  int copies;           // the save goes by the snapshot
  CheckpointRead read;  // what is saved
  void *ctx;
  CheckpointInfo info;  // own copies of its texts
  pthread_t thread;
  pthread_mutex_t lock;
  int joinable;  // a thread was started and not joined
  int busy;      // under lock
  int failures;  // in a row
  Error error;   // not reported yet when code != 0
} CheckpointWriter;

// c, t and the strings of s must outlive the writer.
static MAYBE_UNUSED CheckpointWriter *checkpoint_writer_start(const CheckpointSettings *s, const Config *c,
                                                              const ParamTable *t) {
  CheckpointWriter *w = (CheckpointWriter *)alloc_zeroed(1, sizeof *w, "checkpoint writer");
  w->settings = s, w->config = c, w->table = t;
  pthread_mutex_init(&w->lock, NULL);
  snapshot_open(&w->snapshot, 0, t->total);
  return w;
}

static MAYBE_UNUSED void checkpoint_writer_record(CheckpointWriter *w, int rc, const Error *error) {
  pthread_mutex_lock(&w->lock);
  w->busy = 0;
  w->failures = rc ? w->failures + 1 : 0;
  if (rc) w->error = *error;
  pthread_mutex_unlock(&w->lock);
}

static MAYBE_UNUSED void *checkpoint_writer_main(void *arg) {
  CheckpointWriter *w = (CheckpointWriter *)arg;
  Error error = {0, ""};
  if (w->copies) snapshot_copy(&w->snapshot, w->read, w->ctx);
  int rc = checkpoint_save(w->settings, w->config, w->table, &w->info, w->copies ? snapshot_read : w->read,
                           w->copies ? &w->snapshot : w->ctx, &error);
  checkpoint_writer_record(w, rc, &error);
  return NULL;
}

// Does not wait. A failure that was not reported yet, once; else 0. *busy (or NULL): a save is in flight.
static MAYBE_UNUSED int checkpoint_writer_poll(CheckpointWriter *w, int *busy, Error *err) {
  pthread_mutex_lock(&w->lock);
  if (busy) *busy = w->busy;
  int rc = w->error.code;
  if (rc && err) *err = w->error;
  w->error.code = 0;
  pthread_mutex_unlock(&w->lock);
  return rc;
}

// Waits for the save in flight. Result as poll.
static MAYBE_UNUSED int checkpoint_writer_wait(CheckpointWriter *w, Error *err) {
  if (w->joinable) pthread_join(w->thread, NULL);
  w->joinable = 0;
  return checkpoint_writer_poll(w, NULL, err);
}

// Waits for the copy, at most for so many seconds. Elements that are not copied yet, 0: all are.
static MAYBE_UNUSED int64_t checkpoint_writer_copying(CheckpointWriter *w, double seconds) {
  return snapshot_wait(&w->snapshot, seconds);
}

// Saves that failed since the last one that worked: a caller gives up after a few.
static MAYBE_UNUSED int checkpoint_writer_failures(CheckpointWriter *w) {
  pthread_mutex_lock(&w->lock);
  int n = w->failures;
  pthread_mutex_unlock(&w->lock);
  return n;
}

// Starts a save. The thread calls `read` until checkpoint_writer_copying says 0: until then nothing may change what it
// gives. Returns (and puts into err) the failure of an earlier save that was not reported yet, else 0; the new save
// goes on in either case. When memory for the copy is short it warns and writes before it returns.
static MAYBE_UNUSED int checkpoint_writer_submit(CheckpointWriter *w, const CheckpointInfo *info, CheckpointRead read,
                                                 void *ctx, Error *err) {
  int earlier = checkpoint_writer_wait(w, err);
  Error why = {0, ""};
  checkpoint_info_free(&w->info);
  w->info = *info;
  w->info.trainer = info->trainer ? checkpoint_text_copy(info->trainer) : NULL;
  w->info.options = info->options ? checkpoint_text_copy(info->options) : NULL;
  w->read = read, w->ctx = ctx, w->busy = 1;
  w->copies = !snapshot_begin(&w->snapshot, &why);
  if (w->copies) {
    int e = worker_thread_start(&w->thread, checkpoint_writer_main, w);
    w->joinable = !e;
    if (!e) return earlier;
    error_set(&why, EXIT_MEMORY, "no thread to write it: %s", strerror(e));
  }
  warn("saving step %lld holds up the training: %s", (long long)info->step, why.text);
  checkpoint_writer_main(w);  // its failure is reported by the next poll or wait
  return earlier;
}

// Waits, then frees everything. Call checkpoint_writer_wait first to see an error.
static MAYBE_UNUSED void checkpoint_writer_stop(CheckpointWriter *w) {
  if (!w) return;
  checkpoint_writer_wait(w, NULL);
  snapshot_close(&w->snapshot);
  checkpoint_info_free(&w->info);
  pthread_mutex_destroy(&w->lock);
  free(w);
}

#endif  // GDN_CHECKPOINT_WRITER_H
