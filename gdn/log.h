// log.h: the two records of a run: OUT/log.jsonl for machines, one line a step on the console for people.
//
// log.jsonl holds one JSON object a line: {"kind":"step","run":"...","step":12,...}. Kinds: run (a start or a resume),
// step, eval, and events by any name. A line is written whole; after a resume the file is cut back to the step of the
// checkpoint, so that every step appears once. `run` is the id of the run segment that wrote the line.
//
// defines: Log, LogStep, log_open, log_step, log_eval, log_event, log_sync, log_close, log_console_step,
// format_duration,
//          format_count
#ifndef GDN_LOG_H
#define GDN_LOG_H

#include <inttypes.h>
#include <time.h>
#include "json.h"

typedef struct {
  int fd;  // -1: closed, lines go nowhere
  char path[4096];
  char run[48];       // id of this run segment
  int64_t last_eval;  // after log_open: step of the last "eval" line kept, -1: none. An evaluation due at the step of
                      // the checkpoint is repeated on resume only when this is smaller
  char *pending;      // lines that the disk did not take yet (full): tried again with the next line
  size_t pending_size;
  int warned;
} Log;

typedef struct {
  int64_t step, steps;  // 1 .. steps
  int64_t tokens;       // trained on so far
  double loss, grad_norm, lr, ms, tokens_per_s;
  double mfu;           // fraction of peak, negative: not known (null in the log, left out on the console)
  double eta_s;         // seconds to the end, negative: not known
  int skipped;          // 1: the update was skipped
  int64_t samples;      // samples consumed
  uint64_t batch_hash;  // hash of the batch's token ids, 0: not computed
  // several GPUs: what this one sent to others in the step, and the time in which it waited for them; ms negative: none
  double exchange_gb, exchange_ms;
} LogStep;

// ----------------------------------------------------------------------------
// log.jsonl

// Hands the pending lines to the file. What it does not take stays for the next call.
static MAYBE_UNUSED void log_flush(Log *l) {
  size_t done = 0;
  while (l->fd >= 0 && done < l->pending_size) {
    ssize_t n = io_refused("write", l->path) ? -1 : write(l->fd, l->pending + done, l->pending_size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (!l->warned) warn("%s: cannot be written: %s; its lines wait in memory", l->path, strerror(errno));
      l->warned = 1;
      break;
    }
    done += (size_t)n;
  }
  if (done && done < l->pending_size) memmove(l->pending, l->pending + done, l->pending_size - done);
  l->pending_size -= done;
  if (!l->pending_size) l->warned = 0;
}

// Takes over the reference to the line.
static MAYBE_UNUSED void log_write(Log *l, json_t *line) {
  char *text = line ? json_print(line, JSON_COMPACT) : NULL;
  json_decref(line);
  if (l->fd < 0) {
    free(text);
    return;
  }
  size_t n = text ? strlen(text) : 0;
  char *grown = text ? (char *)realloc(l->pending, l->pending_size + n + 1) : NULL;
  if (!grown) {
    warn("%s: a line is lost: %s", l->path, text ? "no memory" : "not UTF-8");
    free(text);
    return;
  }
  l->pending = grown;
  memcpy(grown + l->pending_size, text, n);
  grown[l->pending_size + n] = '\n';
  l->pending_size += n + 1;
  free(text);
  log_flush(l);
}

static MAYBE_UNUSED json_t *log_number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static MAYBE_UNUSED json_t *log_begin(const Log *l, const char *kind, int64_t step) {
  return json_pack("{s:s, s:s, s:I}", "kind", kind, "run", l->run, "step", (json_int_t)step);
}

// The part of the log up to the checkpoint: the bytes to keep, of lines in order. Sets l->last_eval.
static MAYBE_UNUSED char *log_cut(Log *l, char *text, size_t size, int64_t step, size_t *kept) {
  size_t out = 0;
  for (size_t at = 0; at < size;) {
    char *end = (char *)memchr(text + at, '\n', size - at);
    if (!end) break;  // half written
    size_t n = (size_t)(end - text) + 1 - at;
    json_t *j = json_loadb(text + at, n, 0, NULL);
    const json_t *s = json_object_get(j, "step");
    const char *kind = json_string_value(json_object_get(j, "kind"));
    if (json_is_integer(s) && json_integer_value(s) <= step) {
      if (kind && !strcmp(kind, "eval")) l->last_eval = json_integer_value(s);
      memmove(text + out, text + at, n);
      out += n;
    }
    json_decref(j);
    at += n;
  }
  *kept = out;
  return text;
}

// Opens OUT/log.jsonl. resume_step < 0: a new run, the file must not exist or be empty. Otherwise it is cut back: lines
// of later steps, lines that are no JSON and a last one without its newline are dropped (temporary file, then rename);
// a file that does not exist is begun. Then writes a "run" line. 0, or EXIT_CHECKPOINT.
static MAYBE_UNUSED int log_open(Log *l, const char *out, int64_t resume_step, Error *err) {
  memset(l, 0, sizeof *l);
  l->fd = -1, l->last_eval = -1;
  if (path_join(l->path, out, "log.jsonl", err)) return EXIT_CHECKPOINT;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  struct tm tm;
  if (gmtime_r(&now.tv_sec, &tm)) strftime(l->run, 24, "%Y%m%dT%H%M%SZ", &tm);
  snprintf(l->run + strlen(l->run), 16, "-%lld", (long long)getpid());
  if (path_exists(l->path)) {
    size_t size = 0, kept = 0;
    char *text = file_read(l->path, INT64_MAX - 1, &size, EXIT_CHECKPOINT, err);
    if (!text) return EXIT_CHECKPOINT;
    if (resume_step < 0 && size) {
      free(text);
      return error_set(err, EXIT_CHECKPOINT, "%s belongs to an earlier run: use --resume or another --out", l->path);
    }
    log_cut(l, text, size, resume_step, &kept);
    int rc = kept != size ? file_replace(l->path, text, kept, EXIT_CHECKPOINT, err) : 0;
    free(text);
    if (rc) return rc;
  }
  l->fd = open(l->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (l->fd < 0) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be opened: %s", l->path, strerror(errno));
  json_t *line = log_begin(l, "run", resume_step < 0 ? 0 : resume_step);
  json_object_set_new(line, "resumed", json_boolean(resume_step >= 0));
  log_write(l, line);
  return 0;
}

// One line each. A full disk does not stop the run: the lines are kept in memory and tried again, with one warning.
// Numbers that are not finite become null.
static MAYBE_UNUSED void log_step(Log *l, const LogStep *s) {
  json_t *j = log_begin(l, "step", s->step);
  json_object_set_new(j, "tokens", json_integer(s->tokens));
  json_object_set_new(j, "samples", json_integer(s->samples));
  json_object_set_new(j, "loss", log_number(s->loss));
  json_object_set_new(j, "grad_norm", log_number(s->grad_norm));
  json_object_set_new(j, "lr", log_number(s->lr));
  json_object_set_new(j, "ms", log_number(s->ms));
  json_object_set_new(j, "tokens_per_s", log_number(s->tokens_per_s));
  json_object_set_new(j, "mfu", s->mfu < 0 ? json_null() : log_number(s->mfu));
  if (s->exchange_ms >= 0) {
    json_object_set_new(j, "exchange_gb", log_number(s->exchange_gb));
    json_object_set_new(j, "exchange_ms", log_number(s->exchange_ms));
  }
  json_object_set_new(j, "skipped", json_boolean(s->skipped));
  if (s->batch_hash) {
    char hex[20];
    snprintf(hex, sizeof hex, "%016" PRIx64, s->batch_hash);
    json_object_set_new(j, "batch_hash", json_string(hex));
  }
  log_write(l, j);
}

// Validation loss (nats a token) at a step; name: which validation set, NULL: "val".
static MAYBE_UNUSED void log_eval(Log *l, int64_t step, const char *name, double loss, int64_t tokens, double ms) {
  json_t *j = log_begin(l, "eval", step);
  json_object_set_new(j, "name", json_text(name ? name : "val"));
  json_object_set_new(j, "loss", log_number(loss));
  json_object_set_new(j, "perplexity", log_number(exp(loss)));
  json_object_set_new(j, "tokens", json_integer(tokens));
  json_object_set_new(j, "ms", log_number(ms));
  log_write(l, j);
  l->last_eval = step;
}

// Any other event: kind is its name, text a message or NULL.
static MAYBE_UNUSED void log_event(Log *l, int64_t step, const char *kind, const char *text) {
  json_t *j = log_begin(l, kind, step);
  if (text) json_object_set_new(j, "text", json_text(text));
  log_write(l, j);
}

// Makes the lines so far durable; call it before a checkpoint is saved, so that no power cut leaves a gap below it.
static MAYBE_UNUSED void log_sync(Log *l) {
  if (l->fd < 0) return;
  log_flush(l);
  if (io_sync(l->fd, l->path)) warn("%s: cannot be synced: %s", l->path, strerror(errno));
}

static MAYBE_UNUSED void log_close(Log *l) {
  if (l->fd < 0) return;
  log_flush(l);
  if (l->pending_size) warn("%s: %zu bytes could not be written", l->path, l->pending_size);
  if (close(l->fd)) warn("%s: %s", l->path, strerror(errno));
  free(l->pending);
  l->fd = -1, l->pending = NULL, l->pending_size = 0;
}

// ----------------------------------------------------------------------------
// the console

// 42s, 3m07s, 1h02m, 2d05h
static MAYBE_UNUSED void format_duration(char *dst, size_t size, double seconds) {
  if (!(seconds >= 0 && seconds < 1e12)) {
    snprintf(dst, size, "?");
    return;
  }
  long long s = (long long)(seconds + 0.5);
  if (s < 60)
    snprintf(dst, size, "%llds", s);
  else if (s < 3600)
    snprintf(dst, size, "%lldm%02llds", s / 60, s % 60);
  else if (s < 86400)
    snprintf(dst, size, "%lldh%02lldm", s / 3600, s / 60 % 60);
  else
    snprintf(dst, size, "%lldd%02lldh", s / 86400, s / 3600 % 24);
}

// 12,345
static MAYBE_UNUSED void format_count(char *dst, size_t size, int64_t n) {
  char digits[32];
  size_t at = 0;
  snprintf(digits, sizeof digits, "%lld", (long long)n);
  size_t length = strlen(digits);
  for (size_t i = 0; i < length && at + 2 < size; i++) {
    dst[at++] = digits[i];
    if (digits[i] != '-' && (length - i - 1) % 3 == 0 && i + 1 < length && at + 2 < size) dst[at++] = ',';
  }
  if (size) dst[at] = 0;
}

// The line without its newline; parts that are not known are left out:
//   step 120/3000 | loss 2.345 | norm 0.98 | lr 3.0e-04 | 123 ms | 12,345 tok/s | mfu 12.3% | eta 1h02m
static MAYBE_UNUSED void log_console_step(char *line, size_t size, const LogStep *s) {
  char rate[32], eta[32], mfu[32] = "", end[48] = "";
  double per_s = s->tokens_per_s;
  format_count(rate, sizeof rate, per_s >= 0 && per_s < 1e18 ? (int64_t)(per_s + 0.5) : 0);
  if (s->mfu >= 0) snprintf(mfu, sizeof mfu, " | mfu %.1f%%", 100 * s->mfu);
  if (s->eta_s >= 0) {
    format_duration(eta, sizeof eta, s->eta_s);
    snprintf(end, sizeof end, " | eta %s", eta);
  }
  snprintf(line, size, "step %lld/%lld | loss %.3f | norm %.2f | lr %.1e | %.*f ms | %s tok/s%s%s%s",
           (long long)s->step, (long long)s->steps, s->loss, s->grad_norm, s->lr, s->ms < 10 ? 2 : 0, s->ms, rate, mfu,
           end, s->skipped ? " | skipped" : "");
}

#endif  // GDN_LOG_H
