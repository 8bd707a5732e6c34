// model.h: an engine with the model that it runs, made from a Config or from a folder, and where folders are looked
// for.
//
// defines: Model, FolderKind, model_create, model_free, model_init_weights, model_load, model_read,
//          model_read_behind, model_write, model_hash, folder_find, folder_config, model_print
#ifndef GDN_MODEL_H
#define GDN_MODEL_H

#include <sys/stat.h>
#include <xxhash.h>
#include "checkpoint.h"
#include "engine.h"
#include "hf_config.h"
#include "init.h"
#include "log.h"
#include "presets.h"

typedef struct {
  const EngineApi *api;
  Config config;
  ParamTable table;
  EngineSettings settings;
  Engine *engine;
} Model;

// Checks, then allocates. The weights are not set. 0, or an exit code and one line.
static inline int model_create(Model *m, const EngineApi *api, const Config *c, const EngineSettings *s, Error *err) {
  memset(m, 0, sizeof *m);
  m->api = api, m->config = *c, m->settings = *s;
  int code = config_check(c, err);
  if (!code) code = api->check(c, s, err);
  if (code) return code;
  m->table = param_table_build(&m->config);
  m->engine = api->create(&m->config, &m->table, s, err);
  if (m->engine) return 0;
  param_table_free(&m->table);
  return err->code ? err->code : error_set(err, EXIT_MEMORY, "not enough memory for the model: use a smaller --batch");
}

static inline void model_free(Model *m) {
  if (!m->engine) return;
  m->api->destroy(m->engine);
  param_table_free(&m->table);
  memset(m, 0, sizeof *m);
}

// Transfers in the form that checkpoint.h takes; ctx is a Model.
static MAYBE_UNUSED void model_read(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  Model *m = (Model *)ctx;
  m->api->read(m->engine, (Arena)arena, first, count, dst);
}

// For the thread of a save, behind the training (EngineApi.read_behind).
static MAYBE_UNUSED void model_read_behind(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  Model *m = (Model *)ctx;
  (m->api->read_behind ? m->api->read_behind : m->api->read)(m->engine, (Arena)arena, first, count, dst);
}

static MAYBE_UNUSED void model_write(void *ctx, int arena, int64_t first, int64_t count, const float *src) {
  Model *m = (Model *)ctx;
  m->api->write(m->engine, (Arena)arena, first, count, src);
}

#define MODEL_PIECE ((int64_t)1 << 20)  // elements that are moved at a time

// Zeros one arena of moments, the own shard.
static inline void model_clear(Model *m, Arena a) {
  float *zero = (float *)alloc_zeroed(MODEL_PIECE, sizeof(float), "a piece of weights");
  int64_t first = m->settings.shard_count ? m->settings.shard_first : 0;
  int64_t end = m->settings.shard_count ? first + m->settings.shard_count : m->table.total;
  for (int64_t at = first; at < end; at += MODEL_PIECE) {
    int64_t n = end - at < MODEL_PIECE ? end - at : MODEL_PIECE;
    m->api->write(m->engine, a, at, n, zero);
  }
  free(zero);
}

// The first weights by rule and seed (init.h); moments zero. A GPU of several is given its own shard only.
static inline void model_init_weights(Model *m, InitRule rule, uint64_t seed) {
  int64_t shard = m->settings.shard_first, shard_end = shard + m->settings.shard_count;
  int all = !m->api->on_device || !m->settings.shard_count;
  float *piece = (float *)alloc_array(MODEL_PIECE, sizeof(float), "a piece of weights");
  for (int i = 0; i < m->table.n; i++) {
    const ParamSpec *s = &m->table.specs[i];
    for (int64_t at = 0; at < s->count; at += MODEL_PIECE) {
      int64_t n = s->count - at < MODEL_PIECE ? s->count - at : MODEL_PIECE;
      if (!all && (s->offset + at >= shard_end || s->offset + at + n <= shard)) continue;
      if (s->init == INIT_PAD)
        memset(piece, 0, (size_t)n * sizeof(float));
      else
        init_tensor(piece, s, rule, m->config.layers, seed, at, n);
      m->api->write(m->engine, ARENA_PARAM, s->offset + at, n, piece);
    }
  }
  free(piece);
  if (!m->settings.train) return;
  model_clear(m, ARENA_M);
  model_clear(m, ARENA_V);
}

// XXH3-64 of an arena's values as float.
static inline uint64_t model_hash(Model *m, Arena a) {
  float *piece = (float *)alloc_array(MODEL_PIECE, sizeof(float), "a piece of weights");
  XXH3_state_t *state = XXH3_createState();
  if (!state) fail(EXIT_MEMORY, "not enough memory for a checksum");
  XXH3_64bits_reset(state);
  for (int64_t at = 0; at < m->table.total; at += MODEL_PIECE) {
    int64_t n = m->table.total - at < MODEL_PIECE ? m->table.total - at : MODEL_PIECE;
    m->api->read(m->engine, a, at, n, piece);
    XXH3_64bits_update(state, piece, (size_t)n * sizeof(float));
  }
  uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  free(piece);
  return hash;
}

// ----------------------------------------------------------------------------
// folders

typedef enum { FOLDER_CHECKPOINT, FOLDER_HF, FOLDER_RUN } FolderKind;

static inline int folder_has(const char *dir, const char *name) {
  char path[CHECKPOINT_PATH_MAX];
  struct stat st;
  return !path_join(path, dir, name, NULL) && !stat(path, &st);
}

// What `dir` is, by the files in it. 0, or EXIT_CHECKPOINT.
static inline int folder_kind(const char *dir, FolderKind *kind, Error *err) {
  struct stat st;
  if (stat(dir, &st)) return error_set(err, EXIT_CHECKPOINT, "%s: %s", dir, strerror(errno));
  if (!S_ISDIR(st.st_mode))
    return error_set(err, EXIT_CHECKPOINT, "%s: is a file; needed the folder of a checkpoint, a model or a run", dir);
  *kind = folder_has(dir, "manifest.json") ? FOLDER_CHECKPOINT
          : folder_has(dir, "config.json") ? FOLDER_HF
                                           : FOLDER_RUN;
  return 0;
}

// The folder with the weights that a person means by `dir`: itself (a checkpoint, a Hugging Face model), or a run's
// newest checkpoint that holds. path[CHECKPOINT_PATH_MAX]; *kind is never FOLDER_RUN. 0, or EXIT_CHECKPOINT.
static inline int folder_find(const char *dir, char *path, FolderKind *kind, Error *err) {
  int code = folder_kind(dir, kind, err);
  if (code) return code;
  if (*kind != FOLDER_RUN) {
    size_t n = strlen(dir);
    if (n >= CHECKPOINT_PATH_MAX) return error_set(err, EXIT_CHECKPOINT, "%.100s...: name too long", dir);
    memcpy(path, dir, n + 1);
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
    return 0;
  }
  if ((code = checkpoint_find(dir, path, NULL, NULL, err))) return code;
  if (!path[0])
    return error_set(err, EXIT_CHECKPOINT, "%s: holds neither a checkpoint (step-*) nor a model (config.json)", dir);
  *kind = FOLDER_CHECKPOINT;
  return 0;
}

// The model's Config, and for a checkpoint its CheckpointInfo (zeroed for a Hugging Face folder).
static inline int folder_config(const char *path, FolderKind kind, Config *c, CheckpointInfo *info, Error *err) {
  memset(info, 0, sizeof *info);
  return kind == FOLDER_CHECKPOINT ? checkpoint_read_info(path, c, info, err) : hf_config_read(path, c, err);
}

// Loads the weights of a folder of folder_find into a model of its Config; the hashes of a checkpoint are checked.
static inline int model_load(Model *m, const char *path, FolderKind kind, Error *err) {
  if (kind == FOLDER_CHECKPOINT)
    return checkpoint_load(path, &m->config, &m->table, 0, 0, LOAD_PARAMS | LOAD_VERIFY, model_write, m, err);
  return checkpoint_init_from(path, &m->config, &m->table, 0, model_write, m, NULL, NULL, err);
}

// One line about a model: name, mixers, sizes.
static inline void model_print(const Config *c, int64_t params) {
  char pattern[512], count[32];
  pattern_print(pattern, sizeof pattern, c);
  format_count(count, sizeof count, params);
  printf("model %s: %s x %d layers, width %d, ff %d, vocabulary %d%s, %s parameters\n", c->model, pattern, c->layers,
         c->width, c->ff, c->vocab, c->tied ? " tied" : "", count);
}

#endif  // GDN_MODEL_H
