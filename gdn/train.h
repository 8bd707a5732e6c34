// train.h: the training loop. The state of a run is the number of steps done, the weights and AdamW's moments, and the
// counters of skipped steps; all else (order of the data, learning rate, random numbers) is a function of these, so
// that a run that was stopped goes on with the same bits.
//
// A step: load the rows of the global batch, forward and backward over micro-batches; the loss is the mean over all
// counted targets however the rows are split; the norm of the whole gradient, clipping by that norm (Pascanu et al.
// 2013), one AdamW update. When loss or norm is not finite the update is left out: weights, moments and AdamW's own
// count of steps stay as they are, and the data go on.
//
// Of several ranks (comm.h) each takes its part of the step's rows; the gradients are added up so that every rank holds
// the sum over its own shard of the arena, moments exist and AdamW runs for the own shard alone (ZeRO-1, arXiv
// 1910.02054, section 5.1), then everyone gets the new weights. The number of targets is known only when all have
// counted, so the backward pass divides by all places of the batch, and what remains is one factor in AdamW. Everything
// else that a step must agree on goes through one exchange of StepTotals: loss, targets, norm, requests to stop,
// errors.
//
// GDN_FAULT (fault.h): "nan@3" puts a NaN into the gradient of step 3, "stop@7" asks for a stop in step 7, "kill@9"
// ends the process by SIGKILL after step 9 has been logged, "kill-PHASE@9" and "hang-PHASE@9" end or hold it when it
// enters a phase of step 9 (watchdog.h), "dump@5" writes the weights after step 5 as doubles to OUT/weights-RANK.f64,
// "full@6:1" lets rank 1 of several meet a full disk when step 6 is saved, "full-folder@6" rank 0 when it makes the
// folder, "slow-copy@6" makes the copy for the save of step 6 take a second.
//
// defines: Trainer, StepTotals, train_step, train_save, train_evaluate, train_loop
#ifndef GDN_TRAIN_H
#define GDN_TRAIN_H

#include "comm.h"
#include "evaluate.h"
#include "fault.h"
#include "log.h"
#include "model.h"
#include "options.h"
#include "run_folder.h"
#include "runlock.h"
#include "sample.h"
#include "saver.h"
#include "schedule.h"
#include "tensorboard.h"
#include "watchdog.h"

enum { TRAIN_SAVE_FAILURES = 3 };  // failed saves in a row that end the run

typedef struct {
  const Options *o;
  Comm *comm;
  Model model;
  DataSource train, val;
  int has_val;
  Tokenizer tokenizer;
  int has_tokenizer;
  const char *tokenizer_kind;  // "bytes", "file", "none"
  StepLoader loader;
  ScheduleConfig schedule;
  int64_t rows, own_rows;     // of a step over all ranks; of this one: those from rank * own_rows on
  int32_t *tokens, *targets;  // [own_rows, T]
  // the state that a checkpoint holds beside weights and moments
  int64_t step;     // steps done, skipped ones included
  int64_t skipped;  // of them without an update
  int skips_in_row;
  // the run
  RunPlan plan;
  RunLock lock;
  Log log;
  EventFile events;
  StopWatch stop;
  CheckpointSettings checkpoints;
  Saver saver;
  int any_saving;  // a save went on in the background on some rank when the last step ended
  char build[160];
  int64_t saved_step, sampled_step;    // the last step that was saved, sampled; -1: none
  double ms_mean;                      // running mean of the time of a step, for eta
  double flops_per_token, peak_flops;  // of the MFU; peak 0: not known
  double started;
} Trainer;

// What a step sums up over its rows, and over ranks, from which all that is decided follows.
typedef struct {
  double loss_sum, grad_sumsq;  // of the own shard of the whole gradient
  int64_t counted;              // targets
  uint64_t hash;                // sum over rows of a hash of tokens and place: the same however the rows are split
  int code;                     // 0, EXIT_STOPPED or an error: the step is not done
  int saving;                   // the own part of a save goes on
} StepTotals;

static inline int64_t train_updates(const Trainer *t) { return t->step - t->skipped; }

// ----------------------------------------------------------------------------
// one step

// Forward and backward over the own rows of the step. 0, or EXIT_STOPPED between two micro-batches.
static inline int train_gradient(Trainer *t, double scale, StepTotals *own) {
  Model *m = &t->model;
  int64_t T = t->train.T, batch = t->o->batch;
  m->api->zero_grad(m->engine);
  for (int64_t r = 0; r < t->own_rows; r += batch) {
    watchdog_phase(PHASE_GRADIENT);
    if (stop_requested(&t->stop)) return EXIT_STOPPED;
    if (m->api->loss_scale) m->api->loss_scale(m->engine, scale);
    own->loss_sum += m->api->forward(m->engine, t->tokens + r * T, t->targets + r * T, (int)batch, (int)T, 0);
    int last = r + batch >= t->own_rows;
    if (last && fault_is_due("nan", t->step + 1)) {
      float nan_value = NAN;
      m->api->write(m->engine, ARENA_GRAD, m->table.final_norm, 1, &nan_value);
    }
    // an engine that sums over ranks itself does so while the last backward runs
    if (last && t->comm->size > 1 && m->api->reduce_begin) m->api->reduce_begin(m->engine);
    m->api->backward(m->engine, scale);
    if (m->api->loss_scale) m->api->loss_scale(m->engine, 0);  // an evaluation's forward has no backward
  }
  for (int64_t i = 0; i < t->own_rows * T; i++) own->counted += t->targets[i] >= 0;
  for (int64_t r = 0; r < t->own_rows; r++)
    own->hash += XXH3_64bits_withSeed(t->tokens + r * T, (size_t)T * sizeof(int32_t),
                                      (XXH64_hash_t)(t->comm->rank * t->own_rows + r));
  return 0;
}

// Adds up the gradient and what the ranks found. Each rank comes here in every step, also with an error.
static inline void train_reduce(Trainer *t, StepTotals *own, StepTotals *sum) {
  Model *m = &t->model;
  Comm *c = t->comm;
  int64_t first, count;
  comm_shard(m->table.total, c->size, c->rank, &first, &count);
  if (c->size > 1 && m->api->reduce_end) {
    comm_barrier(c, "word that the gradients are on their way");  // names a rank that stands still; NCCL would not
    m->api->reduce_end(m->engine);
    m->api->synchronize(m->engine);
  } else {
    m->api->synchronize(m->engine);
    comm_reduce_scatter(c, "gradients", m->api->arena(m->engine, ARENA_GRAD), m->api->real_bytes, m->table.total);
  }
  if (!own->code) own->grad_sumsq = m->api->grad_sumsq(m->engine, first, count);
  own->saving = saver_is_busy(&t->saver);
  StepTotals *all = (StepTotals *)alloc_array(c->size, sizeof *all, "sums of a step");
  comm_exchange(c, "loss and norm", own, sizeof *own, all);
  *sum = all[0];
  for (int r = 1; r < c->size; r++) {
    sum->loss_sum += all[r].loss_sum, sum->grad_sumsq += all[r].grad_sumsq;
    sum->counted += all[r].counted, sum->hash += all[r].hash;
    if (!sum->code) sum->code = all[r].code;
    sum->saving |= all[r].saving;
  }
  free(all);
}

// All ranks: the code that they agree on, and for a stop the reason of the rank that was asked.
static inline int train_agree(Trainer *t, const char *what, int code, Error *err) {
  if (code == EXIT_STOPPED) error_set(err, code, "%s", t->stop.reason);
  code = comm_agree(t->comm, what, code, err);
  if (code == EXIT_STOPPED && !t->stop.reason[0]) snprintf(t->stop.reason, sizeof t->stop.reason, "%.150s", err->text);
  return code;
}

// Waits until a save in the background has copied weights and moments, which an update changes.
static inline void train_wait_copy(Trainer *t) {
  for (int64_t left, before = -1; (left = saver_copying(&t->saver, 1)) > 0; before = left)
    if (left != before) watchdog_progress();
}

static inline void train_gather_weights(Trainer *t) {
  Model *m = &t->model;
  if (t->comm->size > 1 && m->api->gather) {
    m->api->gather(m->engine);
    comm_barrier(t->comm, "word that the weights are on their way");
    return;
  }
  comm_all_gather(t->comm, "weights", m->api->arena(m->engine, ARENA_PARAM), m->api->real_bytes, m->table.total);
}

// One step: t->step counts it, *s says how it went. 0, EXIT_STOPPED (a stop came first: nothing has changed), or
// EXIT_DATA.
static inline int train_step(Trainer *t, LogStep *s, Error *err) {
  const Options *o = t->o;
  Model *m = &t->model;
  double begin = monotonic_seconds();
  int64_t tokens = t->rows * t->train.T;  // places of the batch
  StepTotals own, sum;
  memset(&own, 0, sizeof own);
  watchdog_step(t->step + 1);
  watchdog_phase(PHASE_DATA);
  if (fault_is_due("stop", t->step + 1)) raise(SIGUSR1);
  own.code = loader_take(&t->loader, t->step, t->tokens, t->targets, &t->stop, err);
  if (!own.code) own.code = train_gradient(t, 1 / (double)tokens, &own);
  watchdog_phase(PHASE_REDUCE);
  train_reduce(t, &own, &sum);
  t->any_saving = sum.saving;
  if (sum.code) return train_agree(t, "why the step ends", own.code, err);

  double rest = (double)tokens / (double)sum.counted;  // of 1 / counted
  memset(s, 0, sizeof *s);
  s->loss = sum.loss_sum / (double)sum.counted;
  s->grad_norm = sqrt(sum.grad_sumsq) * rest;
  s->lr = schedule_lr(&t->schedule, t->step);
  s->skipped = !isfinite(s->loss) || !isfinite(s->grad_norm);
  if (!s->skipped) {
    AdamW a;
    memset(&a, 0, sizeof a);
    a.lr = s->lr, a.beta1 = o->beta1, a.beta2 = o->beta2, a.eps = o->adam_eps, a.weight_decay = o->weight_decay;
    a.grad_scale = rest * (o->clip > 0 && s->grad_norm > o->clip ? o->clip / s->grad_norm : 1);
    a.step = train_updates(t) + 1;
    a.decay_all = o->decay_all;
    watchdog_phase(PHASE_UPDATE);
    train_wait_copy(t);
    m->api->update(m->engine, &a);
    m->api->synchronize(m->engine);
    watchdog_phase(PHASE_GATHER);
    train_gather_weights(t);
  }
  t->step++;
  t->skipped += s->skipped;
  t->skips_in_row = s->skipped ? t->skips_in_row + 1 : 0;

  s->step = t->step, s->steps = o->steps;
  s->samples = t->step * t->rows, s->tokens = t->step * tokens;
  s->batch_hash = sum.hash;
  s->ms = 1e3 * (monotonic_seconds() - begin);
  s->tokens_per_s = s->ms > 0 ? 1e3 * (double)tokens / s->ms : 0;
  s->exchange_ms = -1;
  if (t->comm->size > 1 && m->api->traffic) {
    EngineTraffic x;
    m->api->traffic(m->engine, &x);
    s->exchange_ms = x.reduce_ms + x.gather_ms, s->exchange_gb = 1e-9 * x.bytes;
  }
  s->mfu = t->peak_flops > 0 ? s->tokens_per_s * t->flops_per_token / t->peak_flops : -1;
  t->ms_mean = t->ms_mean > 0 ? 0.9 * t->ms_mean + 0.1 * s->ms : s->ms;
  s->eta_s = 1e-3 * t->ms_mean * (double)(o->steps - t->step);
  return 0;
}

// ----------------------------------------------------------------------------
// what happens between steps

// Says that a save failed. 0, or EXIT_CHECKPOINT when so many in a row are enough to give up.
static inline int train_save_failed(Trainer *t, int most, Error *err) {
  Error save = *err;
  warn("%s", save.text);
  log_event(&t->log, t->step, "save-failed", save.text);
  int failures = saver_failures(&t->saver);  // since the last save that worked
  if (failures < most) return 0;
  return error_set(err, EXIT_CHECKPOINT, "%d save%s in a row failed, the last one: %s", failures,
                   failures > 1 ? "s" : "", save.text);
}

// Looks after the save in the background, or waits for it. 0, or EXIT_CHECKPOINT to give up.
static inline int train_check_saves(Trainer *t, int wait, Error *err) {
  if (wait) watchdog_phase(PHASE_SAVE);
  int code = wait ? saver_wait(&t->saver, err) : saver_poll(&t->saver, t->any_saving, err);
  if (!code) return 0;
  t->saved_step = -1;
  return train_save_failed(t, wait ? 1 : TRAIN_SAVE_FAILURES, err);
}

// The fault "slow-copy".
static MAYBE_UNUSED void train_read_slowly(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  usleep(333333);
  model_read_behind(ctx, arena, first, count, dst);
}

// Starts a save of the present state, in the background: the next update waits for its copy (train_wait_copy).
static inline int train_save(Trainer *t, Error *err) {
  watchdog_phase(PHASE_SAVE);
  char trainer[512], *options = NULL;
  size_t size;
  snprintf(trainer, sizeof trainer,
           "{\"skips_in_row\": %d, \"batch\": %d, \"seq_len\": %d, \"total_batch\": %lld, \"tokenizer\": \"%s\"}",
           t->skips_in_row, t->o->batch, t->o->seq_len, (long long)t->o->total_batch, t->tokenizer_kind);
  FILE *f = open_memstream(&options, &size);
  if (f) options_write(f, t->o), fclose(f);
  CheckpointInfo info;
  memset(&info, 0, sizeof info);
  info.step = t->step, info.samples = t->step * t->rows, info.tokens = info.samples * t->train.T;
  info.skipped = t->skipped, info.seed = (uint64_t)t->o->seed;
  snprintf(info.data, sizeof info.data, "%s", t->train.fingerprint);
  snprintf(info.build, sizeof info.build, "%s", t->build);
  info.trainer = trainer, info.options = options;
  log_sync(&t->log);  // no power cut leaves a gap in the log below the checkpoint
  t->model.api->synchronize(t->model.engine);
  CheckpointRead read = fault_is_due("slow-copy", t->step) ? train_read_slowly : model_read_behind;
  int code = saver_submit(&t->saver, &info, read, &t->model, err);
  free(options);
  if (code && (code = train_save_failed(t, TRAIN_SAVE_FAILURES, err))) return code;  // the save before this one
  t->saved_step = t->step;
  printf("save step %lld to %s\n", (long long)t->step, t->plan.out);
  return 0;
}

// Rows of a validation: whole micro-batches, as many as were asked for and the data hold.
static inline int64_t train_val_rows(const DataSource *val, const Options *o) {
  int64_t rows = o->eval_batches * o->batch;
  if (!rows) rows = val->recall ? 20 * (int64_t)o->batch : val->samples;
  return rows < val->samples ? rows : val->samples;
}

static inline int train_evaluate(Trainer *t, Error *err) {
  Evaluation v;
  double begin = monotonic_seconds();
  watchdog_phase(PHASE_EVAL);
  evaluation_start(&v, t->val.T, 0);
  v.part = t->comm->rank, v.parts = t->comm->size;
  int code = evaluate(&v, t->model.api, t->model.engine, &t->val, train_val_rows(&t->val, t->o), t->o->batch,
                      t->has_tokenizer ? &t->tokenizer : NULL, &t->stop, err);
  code = train_agree(t, "how the evaluation went", code, err);
  if (!code) {
    double sums[3] = {v.loss_sum, (double)v.counted, (double)v.bytes};
    comm_sum(t->comm, "losses of the evaluation", sums, 3);
    v.loss_sum = sums[0], v.counted = (int64_t)sums[1], v.bytes = (int64_t)sums[2];
    double loss = evaluation_loss(&v), ms = 1e3 * (monotonic_seconds() - begin);
    log_eval(&t->log, t->step, NULL, loss, v.counted, ms);
    event_file_value(&t->events, t->step, "val/loss", loss);
    printf("eval step %lld | loss %.6f | perplexity %.4g", (long long)t->step, loss, exp(loss));
    if (v.bytes) printf(" | bits/byte %.4f", evaluation_bits_per_byte(&v));
    printf(" | %lld tokens | %.0f ms\n", (long long)v.counted, ms);
  }
  evaluation_free(&v);
  return code;
}

static inline int train_sample_here(Trainer *t, Error *err) {
  SampleJob job;
  int code = sample_prompt(&job, t->o, &t->model.config, t->has_tokenizer ? &t->tokenizer : NULL, err);
  int32_t *ids = (int32_t *)alloc_array(t->o->num_tokens, sizeof(int32_t), "a sample");
  int64_t n = 0;
  if (!code) {
    printf("sample step %lld | ", (long long)t->step);
    code = sample_generate(&t->model, &job, t->step, ids, &n, stdout, &t->stop, err);
    printf("\n");
    if (code == EXIT_DIVERGED) warn("%s", err->text), code = 0;  // training says itself whether it can go on
  }
  free(ids);
  sample_free(&job);
  return code;
}

// Rank 0 samples, the others wait for it.
static inline int train_sample(Trainer *t, Error *err) {
  watchdog_phase(PHASE_SAMPLE);
  return train_agree(t, "how the sampling went", t->comm->rank ? 0 : train_sample_here(t, err), err);
}

// What is due at the present step: save first, so that nothing later can cost it.
static inline int train_between(Trainer *t, int last, Error *err) {
  const Options *o = t->o;
  int code = 0, due = last || (t->step > 0 && o->save_every && t->step % o->save_every == 0);
  if (due && t->saved_step != t->step) code = train_save(t, err);
  due = t->step > 0 && o->sample_every && t->step % o->sample_every == 0;
  if (!code && due && t->sampled_step != t->step) {
    code = train_sample(t, err);
    if (!code) t->sampled_step = t->step;
  }
  due = t->has_val && t->step > 0 && o->eval_every && (last || t->step % o->eval_every == 0);
  if (!code && due && t->log.last_eval < t->step) {
    code = train_evaluate(t, err);
    if (!code) t->log.last_eval = t->step;
  }
  return code;
}

static inline void train_report(Trainer *t, const LogStep *s) {
  char line[512];
  log_step(&t->log, s);
  event_file_step(&t->events, s);
  if (s->skipped) {
    snprintf(line, sizeof line,
             "update skipped: loss %g, gradient norm %g at positions %lld to %lld of the sample order", s->loss,
             s->grad_norm, (long long)(s->samples - t->rows), (long long)(s->samples - 1));
    warn("step %lld: %s", (long long)s->step, line);
    log_event(&t->log, s->step, "skip", line);
  }
  if (s->skipped || s->step % t->o->log_every == 0 || s->step == s->steps) {
    log_console_step(line, sizeof line, s);
    printf("%s\n", line);
    fflush(stdout);
  }
}

// The fault "dump": for tests that hold weights against each other more closely than a checkpoint's fp32 can.
static inline void train_dump(Trainer *t) {
  char path[CHECKPOINT_PATH_MAX + 32];
  const EngineSettings *s = &t->model.settings;
  int part = t->model.api->on_device && s->shard_count > 0;  // a GPU of several has only its own shard
  int64_t n = part ? s->shard_count : t->model.table.total;
  double *x = (double *)alloc_array(n, sizeof(double), "dump");
  t->model.api->read64(t->model.engine, ARENA_PARAM, part ? s->shard_first : 0, n, x);
  snprintf(path, sizeof path, "%s/weights-%d.f64", t->plan.out, t->comm->rank);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(x, sizeof(double), (size_t)n, f) != (size_t)n || fclose(f)) fail(EXIT_INTERNAL, "%s", path);
  free(x);
}

// Trains until the last step. 0, or an exit code with one line in err (none for EXIT_STOPPED: saved and said).
static inline int train_loop(Trainer *t, Error *err) {
  int code = 0;
  LogStep s;
  for (;;) {
    int last = t->step >= t->o->steps;
    if ((code = train_between(t, last, err)) || last) break;
    if ((code = train_step(t, &s, err))) break;
    train_report(t, &s);
    if (t->skips_in_row >= t->o->max_skips) {
      code = error_set(err, EXIT_DIVERGED,
                       "diverged: %d steps in a row with a loss or gradient that is not finite, up to step %lld; the "
                       "last checkpoint is from before: resume with a smaller --lr, or look at the data at the "
                       "positions in log.jsonl",
                       t->skips_in_row, (long long)t->step);
      break;
    }
    if (fault_is_due("dump", t->step)) train_dump(t);
    if (fault_is_due("kill", t->step)) raise(SIGKILL);
    if ((code = train_check_saves(t, 0, err))) break;
  }
  if ((code == EXIT_STOPPED || code == EXIT_DATA) && t->saved_step != t->step) {  // what was done is not lost
    Error save_err;
    int failed = train_save(t, &save_err);
    if (failed && code == EXIT_STOPPED) code = failed, *err = save_err;
  }
  Error wait_err;
  int failed = train_check_saves(t, 1, &wait_err);
  if (failed && (!code || code == EXIT_STOPPED)) code = failed, *err = wait_err;
  return code;
}

#endif  // GDN_TRAIN_H
