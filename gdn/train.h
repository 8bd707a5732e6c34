// train.h: the training loop. The state of a run is the number of steps done, the weights and AdamW's moments, and the
// counters of skipped steps; all else (order of the data, learning rate, random numbers) is a function of these, so
// that a run that was stopped goes on with the same bits.
//
// A step: load the rows of the global batch, count the targets, forward and backward over micro-batches with the scale
// 1 / count, so that the loss is the mean over all counted targets however the rows are split; the norm of the whole
// gradient, clipping by that norm (Pascanu et al. 2013), one AdamW update. When loss or norm is not finite the update
// is left out: weights, moments and AdamW's own count of steps stay as they are, and the data go on.
//
// GDN_FAULT in the environment makes a fault happen, for tests: "nan@3,stop@7,kill@9" puts a NaN into the gradient of
// step 3 (the first is 1), asks for a stop in step 7, and ends the process by SIGKILL after step 9 has been logged.
//
// defines: Trainer, StepTotals, train_step, train_save, train_evaluate, train_loop, fault_is_due
#ifndef GDN_TRAIN_H
#define GDN_TRAIN_H

#include "evaluate.h"
#include "log.h"
#include "model.h"
#include "options.h"
#include "run_folder.h"
#include "runlock.h"
#include "sample.h"
#include "schedule.h"

enum { TRAIN_SAVE_FAILURES = 3 };  // failed saves in a row that end the run

typedef struct {
  const Options *o;
  Model model;
  DataSource train, val;
  int has_val;
  Tokenizer tokenizer;
  int has_tokenizer;
  const char *tokenizer_kind;  // "bytes", "file", "none"
  StepLoader loader;
  ScheduleConfig schedule;
  int64_t rows;               // of a step
  int32_t *tokens, *targets;  // [rows, T]
  // the state that a checkpoint holds beside weights and moments
  int64_t step;     // steps done, skipped ones included
  int64_t skipped;  // of them without an update
  int skips_in_row;
  // the run
  RunPlan plan;
  RunLock lock;
  Log log;
  StopWatch stop;
  CheckpointSettings checkpoints;
  CheckpointWriter *writer;
  char build[160];
  int64_t saved_step, sampled_step;    // the last step that was saved, sampled; -1: none
  double ms_mean;                      // running mean of the time of a step, for eta
  double flops_per_token, peak_flops;  // of the MFU; peak 0: not known
  double started;
} Trainer;

// What a step sums up over its rows: loss and squared gradient, from which all that is decided follows.
typedef struct {
  double loss_sum, grad_sumsq;
  int64_t counted;  // targets
} StepTotals;

static inline int64_t train_updates(const Trainer *t) { return t->step - t->skipped; }

// 1 when GDN_FAULT names this kind at this step.
static inline int fault_is_due(const char *kind, int64_t step) {
  const char *s = getenv("GDN_FAULT");
  char want[64];
  snprintf(want, sizeof want, "%s@%lld", kind, (long long)step);
  size_t n = strlen(want);
  while (s && *s) {
    if (!strncmp(s, want, n) && (!s[n] || s[n] == ',')) return 1;
    s = strchr(s, ',');
    if (s) s++;
  }
  return 0;
}

// ----------------------------------------------------------------------------
// one step

static inline int64_t train_count_targets(const Trainer *t) {  // of the global batch
  int64_t n = 0;
  for (int64_t i = 0; i < t->rows * t->train.T; i++) n += t->targets[i] >= 0;
  return n;
}

// Forward and backward over the rows of the step. 0, or EXIT_STOPPED between two micro-batches.
static inline int train_gradient(Trainer *t, double scale, StepTotals *totals) {
  Model *m = &t->model;
  int64_t T = t->train.T, batch = t->o->batch;
  m->api->zero_grad(m->engine);
  for (int64_t r = 0; r < t->rows; r += batch) {
    if (stop_requested(&t->stop)) return EXIT_STOPPED;
    totals->loss_sum += m->api->forward(m->engine, t->tokens + r * T, t->targets + r * T, (int)batch, (int)T, 0);
    m->api->backward(m->engine, scale);
  }
  if (fault_is_due("nan", t->step + 1)) {
    float nan_value = NAN;
    m->api->write(m->engine, ARENA_GRAD, m->table.final_norm, 1, &nan_value);
  }
  totals->grad_sumsq = m->api->grad_sumsq(m->engine, 0, m->table.total);
  return 0;
}

// One step: t->step counts it, *s says how it went. 0, EXIT_STOPPED (a stop came first: nothing has changed), or
// EXIT_DATA.
static inline int train_step(Trainer *t, LogStep *s, Error *err) {
  const Options *o = t->o;
  Model *m = &t->model;
  double begin = monotonic_seconds();
  if (fault_is_due("stop", t->step + 1)) raise(SIGUSR1);
  int code = loader_take(&t->loader, t->step, t->tokens, t->targets, &t->stop, err);
  if (code) return code;
  StepTotals totals = {0, 0, train_count_targets(t)};
  if ((code = train_gradient(t, totals.counted ? 1 / (double)totals.counted : 0, &totals))) return code;

  memset(s, 0, sizeof *s);
  s->loss = totals.loss_sum / (double)totals.counted;
  s->grad_norm = sqrt(totals.grad_sumsq);
  s->lr = schedule_lr(&t->schedule, t->step);
  s->skipped = !isfinite(s->loss) || !isfinite(s->grad_norm);
  if (!s->skipped) {
    AdamW a;
    memset(&a, 0, sizeof a);
    a.lr = s->lr, a.beta1 = o->beta1, a.beta2 = o->beta2, a.eps = o->adam_eps, a.weight_decay = o->weight_decay;
    a.grad_scale = o->clip > 0 && s->grad_norm > o->clip ? o->clip / s->grad_norm : 1;
    a.step = train_updates(t) + 1;
    a.decay_all = o->decay_all;
    m->api->update(m->engine, &a);
  }
  m->api->synchronize(m->engine);
  t->step++;
  t->skipped += s->skipped;
  t->skips_in_row = s->skipped ? t->skips_in_row + 1 : 0;

  int64_t tokens = t->rows * t->train.T;
  s->step = t->step, s->steps = o->steps;
  s->samples = t->step * t->rows, s->tokens = t->step * tokens;
  s->batch_hash = XXH3_64bits(t->tokens, (size_t)tokens * sizeof(int32_t));
  s->ms = 1e3 * (monotonic_seconds() - begin);
  s->tokens_per_s = s->ms > 0 ? 1e3 * (double)tokens / s->ms : 0;
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
  int failures = checkpoint_writer_failures(t->writer);  // since the last save that worked
  if (failures < most) return 0;
  return error_set(err, EXIT_CHECKPOINT, "%d save%s in a row failed, the last one: %s", failures,
                   failures > 1 ? "s" : "", save.text);
}

// Looks after the save in the background, or waits for it. 0, or EXIT_CHECKPOINT to give up.
static inline int train_check_saves(Trainer *t, int wait, Error *err) {
  int code = wait ? checkpoint_writer_wait(t->writer, err) : checkpoint_writer_poll(t->writer, NULL, err);
  if (!code) return 0;
  t->saved_step = -1;
  return train_save_failed(t, wait ? 1 : TRAIN_SAVE_FAILURES, err);
}

// Starts a save of the present state, in the background.
static inline int train_save(Trainer *t, Error *err) {
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
  int code = checkpoint_writer_submit(t->writer, &info, model_read, &t->model, err);
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
  evaluation_start(&v, t->val.T, 0);
  int code = evaluate(&v, t->model.api, t->model.engine, &t->val, train_val_rows(&t->val, t->o), t->o->batch,
                      t->has_tokenizer ? &t->tokenizer : NULL, &t->stop, err);
  if (!code) {
    double loss = evaluation_loss(&v), ms = 1e3 * (monotonic_seconds() - begin);
    log_eval(&t->log, t->step, NULL, loss, v.counted, ms);
    printf("eval step %lld | loss %.6f | perplexity %.4g", (long long)t->step, loss, exp(loss));
    if (v.bytes) printf(" | bits/byte %.4f", evaluation_bits_per_byte(&v));
    printf(" | %lld tokens | %.0f ms\n", (long long)v.counted, ms);
  }
  evaluation_free(&v);
  return code;
}

static inline int train_sample(Trainer *t, Error *err) {
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
