// inspect.h: `train_gdn inspect PATH...`: what lies there. A checkpoint or Hugging Face folder: step, model, and
// statistics of every tensor, after its hashes have been checked. A run's folder: its checkpoints, and which is the
// newest that holds. A shard: its header.
//
// defines: inspect_command
#ifndef GDN_INSPECT_H
#define GDN_INSPECT_H

#include "data_source.h"
#include "model.h"
#include "options.h"

typedef struct {
  double sum, squares, min, max;
  int64_t count, not_finite;
} TensorStats;

typedef struct {
  const ParamTable *table;
  TensorStats *stats;  // [table->n]
  int at;              // the tensor where the last piece ended: pieces come in rising order
} InspectSink;

// Takes a piece of the arena (CheckpointWrite).
static MAYBE_UNUSED void inspect_take(void *ctx, int arena, int64_t first, int64_t count, const float *src) {
  InspectSink *k = (InspectSink *)ctx;
  if (arena != ARENA_PARAM) return;
  for (int64_t i = 0; i < count;) {
    const ParamSpec *s = &k->table->specs[k->at];
    if (first + i < s->offset || first + i >= s->offset + s->count) {
      for (k->at = 0, s = k->table->specs; first + i >= s->offset + s->count; s++) k->at++;
    }
    int64_t n = s->offset + s->count - (first + i);
    if (n > count - i) n = count - i;
    TensorStats *t = &k->stats[k->at];
    for (int64_t j = i; j < i + n; j++) {
      double x = src[j];
      if (!isfinite(x)) {
        t->not_finite++;
        continue;
      }
      if (!t->count || x < t->min) t->min = x;
      if (!t->count || x > t->max) t->max = x;
      t->sum += x, t->squares += x * x, t->count++;
    }
    i += n;
  }
}

static inline void inspect_print_tensors(const ParamTable *table, const TensorStats *stats) {
  printf("  %-46s %-18s %12s %12s %12s %12s\n", "tensor", "shape", "min", "mean", "max", "std");
  for (int i = 0; i < table->n; i++) {
    const ParamSpec *s = &table->specs[i];
    const TensorStats *t = &stats[i];
    if (s->init == INIT_PAD) continue;
    char shape[72];
    int n = snprintf(shape, sizeof shape, "%lld", (long long)s->shape[0]);
    for (int d = 1; d < s->ndim; d++)
      n += snprintf(shape + n, sizeof shape - (size_t)n, " x %lld", (long long)s->shape[d]);
    double count = t->count ? (double)t->count : 1, mean = t->sum / count, var = t->squares / count - mean * mean;
    printf("  %-46s %-18s %12.5g %12.5g %12.5g %12.5g", s->name, shape, t->min, mean, t->max, sqrt(var > 0 ? var : 0));
    if (t->not_finite) printf("  %lld NOT FINITE", (long long)t->not_finite);
    printf("\n");
  }
}

static inline int inspect_model(const char *path, FolderKind kind, Error *err) {
  Config c;
  CheckpointInfo info;
  int code = folder_config(path, kind, &c, &info, err);
  if (code) return code;
  if (kind == FOLDER_CHECKPOINT) {
    printf("%s: checkpoint, step %lld, %lld tokens, %lld samples, %lld skipped steps\n", path, (long long)info.step,
           (long long)info.tokens, (long long)info.samples, (long long)info.skipped);
    printf("  seed %llu, data %s, trainer %s\n  built by %s\n", (unsigned long long)info.seed, info.data, info.trainer,
           info.build);
    checkpoint_info_free(&info);
    code = checkpoint_verify(path, err);
    if (code) return code;
    printf("  all files have the sizes and hashes of the manifest\n  ");
  } else {
    printf("%s: Hugging Face model without a training state\n  ", path);
  }
  if ((code = config_check(&c, err))) return code;
  ParamTable table = param_table_build(&c);
  model_print(&c, table.params);
  InspectSink sink = {&table, (TensorStats *)alloc_zeroed(table.n, sizeof(TensorStats), "statistics"), 0};
  if (kind == FOLDER_CHECKPOINT)
    code = checkpoint_load(path, &c, &table, 0, 0, LOAD_PARAMS | LOAD_ANY_NUMBERS, inspect_take, &sink, err);
  else
    code = checkpoint_init_from(path, &c, &table, LOAD_ANY_NUMBERS, inspect_take, &sink, NULL, NULL, err);
  if (!code) inspect_print_tensors(&table, sink.stats);
  free(sink.stats);
  param_table_free(&table);
  return code;
}

// verify: every checkpoint is read and held against its manifest; a damaged one is the result.
static inline int inspect_run(const char *path, int verify, Error *err) {
  CheckpointList list;
  char newest[CHECKPOINT_PATH_MAX];
  Error damaged = {0, ""}, e;
  int code = checkpoint_list(path, &list, NULL, NULL, err);
  if (code) return code;
  printf("%s: run with %d checkpoints\n", path, list.n);
  for (int i = 0; i < list.n; i++) {
    printf("  %s  step %lld, %lld tokens%s", list.items[i].path, (long long)list.items[i].step,
           (long long)list.items[i].tokens, verify ? ": " : "\n");
    fflush(stdout);
    if (!verify) continue;
    int broken = checkpoint_verify(list.items[i].path, &e);
    printf("%s\n", broken ? e.text : "whole");
    if (broken && !damaged.code) damaged = e, damaged.code = broken;
  }
  checkpoint_list_free(&list);
  code = checkpoint_find(path, newest, NULL, NULL, err);
  if (!code && !newest[0])
    code = error_set(err, EXIT_CHECKPOINT, "%s: holds no checkpoint, model or shard; name a run's folder", path);
  if (!code) printf("  newest that holds: %s\n", newest);
  if (!code && damaged.code) *err = damaged, code = damaged.code;
  return code;
}

static inline int inspect_shard(const char *path, Error *err) {
  ShardSet set;
  int code = shards_open(&set, &path, 1, 0, "inspect", err);
  if (code) return code;
  char label[16];
  printf("%s: shard%s, %lld tokens of %d bytes, %lld documents\n", path, set.llmc ? " in llm.c's format" : "",
         (long long)set.tokens, set.token_bytes, (long long)set.documents);
  if (!set.llmc)
    printf("  vocabulary %lld, tokenizer %s, BOS %d, EOS %d, %s, %lld bytes of text\n", (long long)set.vocab,
           tokenizer_label(set.tokenizer, label), set.bos, set.eos,
           set.boundary ? "BOS before each document" : "no document boundaries", (long long)set.text_bytes);
  printf("  fingerprint shards:%016llx\n", (unsigned long long)shards_fingerprint(&set));
  int32_t *piece = (int32_t *)alloc_array(1 << 16, sizeof(int32_t), "tokens");
  for (int64_t at = 0; at < set.tokens && !code; at += 1 << 16)
    code = shards_read(&set, at, set.tokens - at < 1 << 16 ? set.tokens - at : 1 << 16, piece, err);
  if (!code) printf("  %s\n", set.llmc ? "readable to its end (the format has no checksums)" : "all checksums hold");
  free(piece);
  shards_close(&set);
  return code;
}

// All of o->folders; the first failure is the result, after the others have been looked at. 0, or an exit code.
static inline int inspect_command(const Options *o, Error *err) {
  int result = 0;
  for (int i = 0; i < o->n_folders; i++) {
    const char *path = o->folders[i];
    struct stat st;
    FolderKind kind = FOLDER_RUN;
    Error e;
    int code;
    if (stat(path, &st))
      code = error_set(&e, EXIT_CHECKPOINT, "%s: %s", path, strerror(errno));
    else if (!S_ISDIR(st.st_mode))
      code = inspect_shard(path, &e);
    else if (!(code = folder_kind(path, &kind, &e)))
      code = kind == FOLDER_RUN ? inspect_run(path, o->verify, &e) : inspect_model(path, kind, &e);
    if (code && result) warn("%s", e.text);
    if (code && !result) result = code, *err = e;
  }
  return result;
}

#endif  // GDN_INSPECT_H
