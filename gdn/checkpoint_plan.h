// checkpoint_plan.h: what a checkpoint (checkpoint.h) consists of, and where in its files tensors lie.
//
// defines: CheckpointSettings, CheckpointSmallFile, CheckpointPlan, CheckpointHashes, checkpoint_piece,
//          checkpoint_name, checkpoint_temp_name, checkpoint_plan, checkpoint_plan_free, checkpoint_hashes_make,
//          checkpoint_hashes_free
#ifndef GDN_CHECKPOINT_PLAN_H
#define GDN_CHECKPOINT_PLAN_H

#include "engine.h"
#include "hf_config.h"
#include "hf_modeling.h"
#include "manifest.h"
#include "safetensors.h"

typedef struct {
  const char *out;        // the run folder
  const char *tokenizer;  // file copied into every checkpoint, NULL: none
  int keep;               // newest checkpoints kept, 0: all
  int64_t keep_every;     // checkpoints whose step is a multiple are never removed, 0: no such rule
  int seq_len;            // max_position_embeddings of config.json
  int eos, pad;           // token ids of config.json, -1: null (bos is in Config)
} CheckpointSettings;

enum { CHECKPOINT_TENSOR_FILES = 2, CHECKPOINT_SMALL_FILES = 3 };
static const int64_t checkpoint_piece = CHECKPOINT_BLOCK / 16;  // elements moved at a time

typedef struct {  // a file that is small enough to be kept in memory
  char name[256];
  char *data;
  size_t size;
} CheckpointSmallFile;

// Where everything goes, the same on every rank.
typedef struct {
  const CheckpointSettings *settings;
  const Config *config;
  const ParamTable *table;
  CheckpointSmallFile small[CHECKPOINT_SMALL_FILES];  // config.json, its Python, tokenizer
  int n_small;
  struct {
    const char *name;
    Safetensors layout;
    char *header;
    size_t header_size;
    int n_sections;  // arenas stored one behind the other
    Arena section[2];
    int first_block;  // in CheckpointHashes
    int blocks;
  } file[CHECKPOINT_TENSOR_FILES];
  int blocks;     // of both files
  int64_t bytes;  // of everything
} CheckpointPlan;

// One hash a block of 64 MiB, of the two tensor files one after the other. `done` says which are known: ranks combine
// theirs by taking, for each block, the hash of the rank that has it.
typedef struct {
  int n;
  uint64_t *hash;
  uint8_t *done;
} CheckpointHashes;

// OUT/step-00012000 into path[CHECKPOINT_PATH_MAX].
static MAYBE_UNUSED void checkpoint_name(char *path, const char *out, int64_t step) {
  snprintf(path, CHECKPOINT_PATH_MAX, "%.3900s/step-%08lld", out, (long long)step);
}

// OUT/.tmp-step-00012000-PID into path[CHECKPOINT_PATH_MAX]; pid: of the rank that creates it.
static MAYBE_UNUSED void checkpoint_temp_name(char *path, const char *out, int64_t step, int64_t pid) {
  snprintf(path, CHECKPOINT_PATH_MAX, "%.3900s/.tmp-step-%08lld-%lld", out, (long long)step, (long long)pid);
}

static MAYBE_UNUSED void checkpoint_plan_free(CheckpointPlan *p) {
  for (int i = 0; i < p->n_small; i++) free(p->small[i].data);
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++) {
    safetensors_free(&p->file[i].layout);
    free(p->file[i].header);
  }
  p->n_small = 0;
}

// Lays the checkpoint out. No output; reads the tokenizer file. Free with checkpoint_plan_free.
static MAYBE_UNUSED int checkpoint_plan(CheckpointPlan *p, const CheckpointSettings *s, const Config *c,
                                        const ParamTable *t, Error *err) {
  static const char *const prefix[4] = {"", "", "exp_avg.", "exp_avg_sq."};
  memset(p, 0, sizeof *p);
  p->settings = s, p->config = c, p->table = t;
  p->file[0].name = "model.safetensors", p->file[1].name = "trainer_state.safetensors";
  p->file[0].n_sections = 1, p->file[0].section[0] = ARENA_PARAM;
  p->file[1].n_sections = 2, p->file[1].section[0] = ARENA_M, p->file[1].section[1] = ARENA_V;
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++) p->file[i].layout.fd = -1;
  json_t *j = hf_config_make(c, s->seq_len, s->eos, s->pad);
  CheckpointSmallFile *config = &p->small[p->n_small++];
  strcpy(config->name, "config.json");
  config->data = json_print(j, JSON_INDENT(2));
  json_decref(j);
  if (!config->data) fail(EXIT_MEMORY, "config.json: out of memory");
  config->size = strlen(config->data);
  p->bytes = (int64_t)config->size;
  if (hf_needs_modeling(c)) {
    CheckpointSmallFile *f = &p->small[p->n_small++];
    strcpy(f->name, HF_MODELING_FILE);
    f->data = checkpoint_text_copy(hf_modeling_text);
    f->size = sizeof hf_modeling_text - 1;
    p->bytes += (int64_t)f->size;
  }
  if (s->tokenizer) {
    CheckpointSmallFile *f = &p->small[p->n_small];
    const char *slash = strrchr(s->tokenizer, '/');
    snprintf(f->name, sizeof f->name, "%s", slash ? slash + 1 : s->tokenizer);
    if (!strcmp(f->name, "config.json") || !strcmp(f->name, "manifest.json") || !strcmp(f->name, HF_MODELING_FILE) ||
        strstr(f->name, ".safetensors"))
      snprintf(f->name, sizeof f->name, "tokenizer.model");
    f->data = file_read(s->tokenizer, checkpoint_block, &f->size, EXIT_CHECKPOINT, err);
    if (!f->data) {
      checkpoint_plan_free(p);
      return EXIT_CHECKPOINT;
    }
    p->n_small++;
    p->bytes += (int64_t)f->size;
  }
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++) {
    for (int k = 0; k < p->file[i].n_sections; k++)
      for (int n = 0; n < t->n; n++) {
        char name[160];
        snprintf(name, sizeof name, "%s%s", prefix[p->file[i].section[k]], t->specs[n].name);
        if (t->specs[n].name[0]) safetensors_add(&p->file[i].layout, name, t->specs[n].ndim, t->specs[n].shape);
      }
    p->file[i].header = safetensors_build_header(&p->file[i].layout, &p->file[i].header_size);
    p->file[i].first_block = p->blocks;
    p->file[i].blocks = (int)((p->file[i].layout.file_size + checkpoint_block - 1) / checkpoint_block);
    p->blocks += p->file[i].blocks;
    p->bytes += p->file[i].layout.file_size;
  }
  return 0;
}

static MAYBE_UNUSED CheckpointHashes checkpoint_hashes_make(const CheckpointPlan *p) {
  CheckpointHashes h = {p->blocks, (uint64_t *)alloc_zeroed(p->blocks, 8, "hashes of a checkpoint"),
                        (uint8_t *)alloc_zeroed(p->blocks, 1, "hashes of a checkpoint")};
  return h;
}

static MAYBE_UNUSED void checkpoint_hashes_free(CheckpointHashes *h) {
  free(h->hash);
  free(h->done);
  h->hash = NULL, h->done = NULL;
}

#endif  // GDN_CHECKPOINT_PLAN_H
