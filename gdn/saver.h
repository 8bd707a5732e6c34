// saver.h: the saves of a run, by one process or by several ranks, behind the training.
//
// One process: checkpoint_writer.h. Several ranks: rank 0 makes the temporary folder; a thread of every rank copies
// its own shard (weights and moments, snapshot.h) and writes it into its place in the files, while the training goes
// on; the next update waits for the copy, not for the files. When all have written, rank 0 takes their hashes, and its
// thread hashes the blocks in which shards meet, writes the manifest and renames. Threads use no messages: the training
// passes on what they did, between two steps, when the step's own reduction has told that nobody is busy. All functions
// here are called by all ranks, with the same result.
//
// defines: Saver, saver_start, saver_submit, saver_copying, saver_is_busy, saver_poll, saver_wait, saver_failures,
// saver_stop
#ifndef GDN_SAVER_H
#define GDN_SAVER_H

#include "checkpoint.h"
#include "comm.h"
#include "fault.h"

typedef enum { SAVER_IDLE, SAVER_WRITING, SAVER_FINISHING } SaverStage;

typedef struct {
  Comm *comm;
  CheckpointWriter *alone;  // one process: everything is its work
  const CheckpointSettings *settings;
  const Config *config;
  const ParamTable *table;
  int64_t first, count;  // own shard
  SaverStage stage;
  CheckpointPlan plan;
  CheckpointHashes hashes;
  Snapshot snapshot;
  int copies;           // the save goes by the snapshot
  CheckpointInfo info;  // own copies of its texts
  char tmp[CHECKPOINT_PATH_MAX];
  CheckpointRead read;  // what is saved
  void *ctx;
  pthread_t thread;
  int joinable;
  int busy;     // the thread's work is not done; by __atomic
  int code;     // of that work
  Error error;  // to it
  int failures;
  Error unreported;  // code 0: nothing
} Saver;

// All pointers must outlive the saver.
static MAYBE_UNUSED void saver_start(Saver *s, Comm *comm, const CheckpointSettings *settings, const Config *c,
                                     const ParamTable *t) {
  memset(s, 0, sizeof *s);
  s->comm = comm, s->settings = settings, s->config = c, s->table = t;
  comm_shard(t->total, comm->size, comm->rank, &s->first, &s->count);
  if (comm->size == 1)
    s->alone = checkpoint_writer_start(settings, c, t);
  else
    snapshot_open(&s->snapshot, s->first, s->count);
}

// 1: this rank's part of a save goes on in the background.
static MAYBE_UNUSED int saver_is_busy(const Saver *s) { return __atomic_load_n(&s->busy, __ATOMIC_ACQUIRE); }

static MAYBE_UNUSED void *saver_main(void *arg) {
  Saver *s = (Saver *)arg;
  s->error.code = 0;
  if (s->stage == SAVER_WRITING) {
    if (s->copies) snapshot_copy(&s->snapshot, s->read, s->ctx);
    s->code = checkpoint_write_range(&s->plan, s->tmp, s->first, s->count, s->copies ? snapshot_read : s->read,
                                     s->copies ? &s->snapshot : s->ctx, &s->hashes, &s->error);
  } else {
    s->code = checkpoint_hash_rest(&s->plan, s->tmp, &s->hashes, &s->error);
    if (!s->code) s->code = checkpoint_finish(&s->plan, s->tmp, &s->info, &s->hashes, &s->error);
  }
  __atomic_store_n(&s->busy, 0, __ATOMIC_RELEASE);
  return NULL;
}

// Does the stage's work in a thread, or at once (background 0, or where no thread can be had).
static MAYBE_UNUSED void saver_run(Saver *s, int background) {
  s->busy = 1;
  if (background) s->joinable = !worker_thread_start(&s->thread, saver_main, s);
  if (!s->joinable) saver_main(s);
}

// Ends the save with this result.
static MAYBE_UNUSED void saver_end(Saver *s, int code, const Error *err) {
  if (code && s->comm->rank == 0 && s->tmp[0]) checkpoint_abort(s->tmp);
  checkpoint_hashes_free(&s->hashes);
  checkpoint_plan_free(&s->plan);
  s->stage = SAVER_IDLE;
  s->failures = code ? s->failures + 1 : 0;
  if (code) s->unreported = *err, s->unreported.code = code;
}

// Gives every rank the hashes of all.
static MAYBE_UNUSED void saver_exchange_hashes(Saver *s) {
  int n = s->hashes.n;
  size_t bytes = (size_t)n * 9;
  char *mine = (char *)alloc_array((int64_t)bytes, 1, "hashes of a checkpoint");
  char *all = (char *)alloc_array((int64_t)bytes * s->comm->size, 1, "hashes of a checkpoint");
  memcpy(mine, s->hashes.hash, (size_t)n * 8);
  memcpy(mine + (size_t)n * 8, s->hashes.done, (size_t)n);
  comm_exchange(s->comm, "hashes of the checkpoint", mine, bytes, all);
  for (int r = 0; r < s->comm->size; r++) {
    const char *theirs = all + (size_t)r * bytes;
    for (int i = 0; i < n; i++)
      if (theirs[(size_t)n * 8 + (size_t)i])
        memcpy(&s->hashes.hash[i], theirs + (size_t)i * 8, 8), s->hashes.done[i] = 1;
  }
  free(mine);
  free(all);
}

// The next stage of the save in flight; waits for this one's work.
static MAYBE_UNUSED void saver_advance(Saver *s) {
  if (s->joinable) pthread_join(s->thread, NULL);
  s->joinable = 0;
  Error err = s->error;
  int code = comm_agree(s->comm, "the result of a save", s->code, &err);
  s->code = 0;
  if (code || s->stage == SAVER_FINISHING) {
    saver_end(s, code, &err);
    return;
  }
  saver_exchange_hashes(s);
  s->stage = SAVER_FINISHING;
  if (s->comm->rank == 0) saver_run(s, 1);
}

static MAYBE_UNUSED int saver_report(Saver *s, Error *err) {
  int code = s->unreported.code;
  if (code) *err = s->unreported;
  s->unreported.code = 0;
  return code;
}

// Does not wait. any_busy: whether saver_is_busy says 1 on any rank, which all know. A failure that was not reported
// yet, once; else 0.
static MAYBE_UNUSED int saver_poll(Saver *s, int any_busy, Error *err) {
  if (s->alone) return checkpoint_writer_poll(s->alone, NULL, err);
  if (s->stage != SAVER_IDLE && !any_busy) saver_advance(s);
  return saver_report(s, err);
}

// Waits for the save in flight. Result as saver_poll.
static MAYBE_UNUSED int saver_wait(Saver *s, Error *err) {
  if (s->alone) return checkpoint_writer_wait(s->alone, err);
  while (s->stage != SAVER_IDLE) saver_advance(s);
  return saver_report(s, err);
}

// Waits until the save in flight has its own copy of the state, at most for so many seconds; nothing may change weights
// or moments before it has. Elements of the own shard that are not copied yet, 0: all are.
static MAYBE_UNUSED int64_t saver_copying(Saver *s, double seconds) {
  return s->alone ? checkpoint_writer_copying(s->alone, seconds) : snapshot_wait(&s->snapshot, seconds);
}

static MAYBE_UNUSED int saver_failures(const Saver *s) {
  return s->alone ? checkpoint_writer_failures(s->alone) : s->failures;
}

// The faults "full" and "full-folder": this rank's part of a save, or the folder that rank 0 makes, meets a full disk.
static MAYBE_UNUSED int saver_no_room(const char *op, const char *path) {
  return !strcmp(op, "write") && strstr(path, "/.tmp-step-") ? ENOSPC : 0;
}

// Starts a save of what `read` gives until saver_copying says 0; returns the failure of an earlier one
// (checkpoint_writer_submit).
static MAYBE_UNUSED int saver_submit(Saver *s, const CheckpointInfo *info, CheckpointRead read, void *ctx, Error *err) {
  if (s->alone) return checkpoint_writer_submit(s->alone, info, read, ctx, err);
  int earlier = saver_wait(s, err);
  Error why = {0, ""};
  checkpoint_info_free(&s->info);
  s->info = *info;
  s->info.trainer = info->trainer ? checkpoint_text_copy(info->trainer) : NULL;
  s->info.options = info->options ? checkpoint_text_copy(info->options) : NULL;
  checkpoint_temp_name(s->tmp, s->settings->out, info->step, (int64_t)getpid());
  comm_broadcast(s->comm, "the name of a checkpoint", s->tmp, sizeof s->tmp, 0);
  int code = checkpoint_plan(&s->plan, s->settings, s->config, s->table, &why);
  if (!code) s->hashes = checkpoint_hashes_make(&s->plan);
  io_fault = fault_is_due("full-folder", info->step) ? saver_no_room : NULL;
  if (!code && s->comm->rank == 0) code = checkpoint_create(&s->plan, s->tmp, &why);
  if ((code = comm_agree(s->comm, "the folder of a checkpoint", code, &why))) {
    saver_end(s, code, &why);  // the next saver_poll or saver_wait reports it: it is not an earlier save's
    return earlier;
  }
  io_fault = fault_is_due("full", info->step) ? saver_no_room : NULL;
  s->stage = SAVER_WRITING;
  s->read = read, s->ctx = ctx;
  s->copies = !snapshot_begin(&s->snapshot, &why);
  if (!s->copies) warn("saving step %lld holds up the training: %s", (long long)info->step, why.text);
  saver_run(s, s->copies);
  return earlier;
}

// The last save must have been waited for.
static MAYBE_UNUSED void saver_stop(Saver *s) {
  if (s->alone) checkpoint_writer_stop(s->alone);
  if (s->joinable) pthread_join(s->thread, NULL);
  if (s->stage != SAVER_IDLE) checkpoint_hashes_free(&s->hashes), checkpoint_plan_free(&s->plan);
  snapshot_close(&s->snapshot);
  checkpoint_info_free(&s->info);
  memset(s, 0, sizeof *s);
}

#endif  // GDN_SAVER_H
