// eval_command.h: `train_gdn eval DIR`: the loss of a checkpoint or of a Hugging Face folder on validation data, at any
// row length (--seq-len may exceed that of training), by position in the row (--buckets), and the logits of the first
// micro-batch in a file (--write-logits), so that another implementation can be held against this one.
//
// defines: SavedModel, saved_model_open, saved_model_close, eval_command
#ifndef GDN_EVAL_COMMAND_H
#define GDN_EVAL_COMMAND_H

#include "train_setup.h"

// A model from a folder, and what its checkpoint says of how it was trained.
typedef struct {
  char path[CHECKPOINT_PATH_MAX];
  FolderKind kind;
  Config config;
  int64_t step;                         // -1: not known
  int seq_len, batch;                   // 0: not known
  char data[160];                       // fingerprint of what it was trained on, "" not known
  char tokenizer[CHECKPOINT_PATH_MAX];  // "bytes", the copy in the folder, "" unknown
} SavedModel;

static inline void saved_model_tokenizer(SavedModel *s, const char *kind) {
  if (!strcmp(kind, "bytes"))
    strcpy(s->tokenizer, "bytes");
  else if (folder_has(s->path, "tokenizer.model") && path_join(s->tokenizer, s->path, "tokenizer.model", NULL))
    s->tokenizer[0] = 0;
}

// Finds the folder of --init-from (or DIR) and reads its configuration; no weights yet. 0, or an exit code.
static inline int saved_model_find(SavedModel *s, const Options *o, Error *err) {
  memset(s, 0, sizeof *s);
  s->step = -1;
  const char *dir = o->init_from[0]                                          ? o->init_from
                    : strcmp(o->resume, "none") && strcmp(o->resume, "auto") ? o->resume
                                                                             : o->out;
  if (!dir[0])
    return error_set(err, EXIT_USAGE,
                     "%s needs a model: train_gdn %s DIR, with a checkpoint, run or Hugging Face folder",
                     command_names[o->command], command_names[o->command]);
  CheckpointInfo info;
  int code = folder_find(dir, s->path, &s->kind, err);
  if (!code) code = folder_config(s->path, s->kind, &s->config, &info, err);
  if (code) return code;
  const char *kind = "";
  json_t *j = NULL;
  if (s->kind == FOLDER_CHECKPOINT) {
    int64_t n;
    s->step = info.step;
    snprintf(s->data, sizeof s->data, "%s", info.data);
    j = json_parse(info.trainer, strlen(info.trainer), s->path, EXIT_CHECKPOINT, err);
    if (j && !json_get_int(j, "seq_len", 1, INT_MAX, &n, s->path, NULL)) s->seq_len = (int)n;
    if (j && !json_get_int(j, "batch", 1, INT_MAX, &n, s->path, NULL)) s->batch = (int)n;
    if (j && json_is_string(json_object_get(j, "tokenizer"))) kind = json_string_value(json_object_get(j, "tokenizer"));
    checkpoint_info_free(&info);
  }
  saved_model_tokenizer(s, kind);
  json_decref(j);
  return folder_config_apply(&s->config, o, s->path, err);
}

static inline int saved_model_load(Model *m, const SavedModel *s, const EngineApi *api, const EngineSettings *settings,
                                   Error *err) {
  int code = model_create(m, api, &s->config, settings, err);
  return code ? code : model_load(m, s->path, s->kind, err);
}

// ----------------------------------------------------------------------------
// logits for a comparison

// Writes tokens and targets [rows, T] (I32) and logits [rows, T, vocab] (F32) as a safetensors file. Logits after a
// token do not depend on the targets. 0, or EXIT_CONFIG when the file cannot be written.
static inline int eval_write_logits(const char *path, Model *m, const int32_t *tokens, const int32_t *targets, int rows,
                                    int T, Error *err) {
  int64_t N = (int64_t)rows * T, V = m->config.vocab, at = 0;
  char header[1024];
  int n = snprintf(header, sizeof header,
                   "{\"tokens\":{\"dtype\":\"I32\",\"shape\":[%d,%d],\"data_offsets\":[0,%lld]},"
                   "\"targets\":{\"dtype\":\"I32\",\"shape\":[%d,%d],\"data_offsets\":[%lld,%lld]},"
                   "\"logits\":{\"dtype\":\"F32\",\"shape\":[%d,%d,%lld],\"data_offsets\":[%lld,%lld]}}",
                   rows, T, (long long)(4 * N), rows, T, (long long)(4 * N), (long long)(8 * N), rows, T, (long long)V,
                   (long long)(8 * N), (long long)(8 * N + 4 * N * V));
  while (n % 8) header[n++] = ' ';
  uint64_t length = (uint64_t)n;
  float *logits = (float *)alloc_array(V, sizeof(float), "logits");
  FILE *f = fopen(path, "wb");
  int bad = !f || fwrite(&length, 8, 1, f) != 1 || fwrite(header, (size_t)n, 1, f) != 1 ||
            fwrite(tokens, 4, (size_t)N, f) != (size_t)N || fwrite(targets, 4, (size_t)N, f) != (size_t)N;
  m->api->forward(m->engine, tokens, targets, rows, T, 0);
  for (; at < N && !bad; at++) {
    m->api->logits(m->engine, at, 1, logits);
    bad = fwrite(logits, sizeof(float), (size_t)V, f) != (size_t)V;
  }
  int e = errno;
  if (f && fclose(f) && !bad) bad = 1, e = errno;
  free(logits);
  return bad ? error_set(err, EXIT_CONFIG, "--write-logits %s: cannot be written: %s", path, strerror(e)) : 0;
}

static inline int eval_first_batch(const Options *o, Model *m, DataSource *source, int64_t rows, Error *err) {
  int n = rows < o->batch ? (int)rows : o->batch;
  int64_t N = (int64_t)n * source->T;
  int32_t *tokens = (int32_t *)alloc_array(N, sizeof(int32_t), "a batch"),
          *targets = (int32_t *)alloc_array(N, 4, "a batch");
  int code = data_source_read(source, 0, n, tokens, targets, err);
  if (!code) code = eval_write_logits(o->write_logits, m, tokens, targets, n, source->T, err);
  if (!code) printf("logits of %d rows of %d tokens in %s\n", n, source->T, o->write_logits);
  free(tokens);
  free(targets);
  return code;
}

// ----------------------------------------------------------------------------
// the command

static inline void eval_print(const Evaluation *v, const SavedModel *s, const char *data, int64_t rows) {
  double loss = evaluation_loss(v);
  printf("%s: step %lld, %lld rows of %d tokens of %s\n", s->path, (long long)s->step, (long long)rows, v->T, data);
  printf("loss %.6f nats/token | perplexity %.6g | ", loss, exp(loss));
  if (v->bytes) printf("bits/byte %.5f | ", evaluation_bits_per_byte(v));
  printf("%lld tokens\n", (long long)v->counted);
  for (int b = 0; b < v->buckets; b++) {  // position t lies in bucket t * buckets / T
    int64_t first = ((int64_t)b * v->T + v->buckets - 1) / v->buckets;
    int64_t end = ((int64_t)(b + 1) * v->T + v->buckets - 1) / v->buckets;
    printf("positions %6lld to %6lld | loss ", (long long)first, (long long)(end - 1));
    v->bucket_counted[b] ? printf("%.6f", v->bucket_sum[b] / (double)v->bucket_counted[b]) : printf("-");
    printf(" | %lld tokens\n", (long long)v->bucket_counted[b]);
  }
}

static inline int eval_command(const EngineApi *api, Options *o, Error *err) {
  SavedModel s;
  Model m;
  DataSource source;
  Tokenizer tokenizer;
  StopWatch stop;
  EngineSettings settings;
  int has_tokenizer = 0;
  const char *kind;
  memset(&m, 0, sizeof m);
  memset(&source, 0, sizeof source);
  memset(&settings, 0, sizeof settings);
  int code = saved_model_find(&s, o, err);
  if (code) return code;
  if (s.seq_len && !option_is_given(o, "seq-len")) o->seq_len = s.seq_len;
  if (s.batch && !option_is_given(o, "batch")) o->batch = s.batch;
  if (!o->val[0] || (!option_is_given(o, "val") && strncmp(s.data, "recall:", 7)))
    return error_set(err, EXIT_USAGE, "eval %s needs validation data: --val GLOBS, or --val recall", s.path);
  if ((code = source_open(&source, o, &s.config, o->val, 1, 1, err))) return code;
  if (source.recall && strcmp(s.data, source.fingerprint))
    warn("evaluated on %s, trained on %s", source.fingerprint, s.data[0] ? s.data : "other data");
  int64_t rows = train_val_rows(&source, o);
  settings.max_rows = o->batch, settings.max_len = o->seq_len, settings.device = o->device;
  const char *asked = o->tokenizer[0] ? o->tokenizer : !source.recall ? s.tokenizer : "";
  code = tokenizer_open(&tokenizer, &has_tokenizer, &kind, asked, &source, &s.config, err);
  if (!code) code = saved_model_load(&m, &s, api, &settings, err);
  if (!code) {
    Evaluation v;
    stop_watch_start(&stop, NULL, o->stop_after);
    model_print(&m.config, m.table.params);
    evaluation_start(&v, source.T, o->buckets);
    code = evaluate(&v, api, m.engine, &source, rows, o->batch, has_tokenizer ? &tokenizer : NULL, &stop, err);
    if (!code) eval_print(&v, &s, o->val, rows);
    if (!code && source.recall) {
      int64_t right, all;
      code = evaluate_recall(&right, &all, 0, 1, api, m.engine, &source, m.config.vocab, rows, o->batch, &stop, err);
      if (!code)
        printf("recall %.2f%% of %lld answers\n", all ? 100.0 * (double)right / (double)all : 0, (long long)all);
    }
    if (!code && !isfinite(evaluation_loss(&v)))
      code = error_set(err, EXIT_DIVERGED, "%s: the loss is not finite: the model is broken", s.path);
    evaluation_free(&v);
  }
  if (!code && o->write_logits[0]) code = eval_first_batch(o, &m, &source, rows, err);
  if (has_tokenizer) tokenizer_free(&tokenizer);
  model_free(&m);
  data_source_close(&source);
  return code;
}

// `train_gdn sample DIR`.
static inline int sample_command(const EngineApi *api, Options *o, Error *err) {
  SavedModel s;
  Model m;
  Tokenizer tokenizer;
  SampleJob job;
  StopWatch stop;
  EngineSettings settings;
  int has_tokenizer = 0;
  const char *kind;
  memset(&m, 0, sizeof m);
  memset(&job, 0, sizeof job);
  memset(&settings, 0, sizeof settings);
  int code = saved_model_find(&s, o, err);
  if (code) return code;
  const char *asked = o->tokenizer[0] ? o->tokenizer : s.tokenizer;
  code = tokenizer_open(&tokenizer, &has_tokenizer, &kind, asked, NULL, &s.config, err);
  if (!code) code = sample_prompt(&job, o, &s.config, has_tokenizer ? &tokenizer : NULL, err);
  if (!code) {
    sample_settings(&settings, job.n_prompt, o->num_tokens);
    settings.device = o->device;
    code = saved_model_load(&m, &s, api, &settings, err);
  }
  stop_watch_start(&stop, NULL, o->stop_after);
  int32_t *ids = (int32_t *)alloc_array(o->num_tokens, sizeof(int32_t), "a sample");
  for (int i = 0; i < o->samples && !code; i++) {
    int64_t n;
    if (o->samples > 1) printf("--- sample %d\n", i + 1);
    fputs(o->prompt, stdout);
    if (o->prompt[0] && !has_tokenizer) putchar(' ');
    code = sample_generate(&m, &job, i, ids, &n, stdout, &stop, err);
    putchar('\n');
  }
  free(ids);
  sample_free(&job);
  model_free(&m);
  if (has_tokenizer) tokenizer_free(&tokenizer);
  return code;
}

#endif  // GDN_EVAL_COMMAND_H
