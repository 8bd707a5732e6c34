// init_from.h: loads the weights of a Hugging Face folder.
//
// defines: checkpoint_init_from
#ifndef GDN_INIT_FROM_H
#define GDN_INIT_FROM_H

#include "checkpoint_read.h"

enum { INIT_FROM_MAX_FILES = 512 };

// Opens the files of a Hugging Face folder: model.safetensors, or those that its index names.
static MAYBE_UNUSED int init_from_open(const char *dir, Safetensors **files, int *n, Error *err) {
  char path[PATH_SIZE];
  *files = (Safetensors *)alloc_zeroed(1, sizeof(Safetensors), "--init-from");
  *n = 0;
  if (path_join(path, dir, "model.safetensors", err)) return EXIT_CHECKPOINT;
  int single = path_exists(path);
  if (!single && path_join(path, dir, "model.safetensors.index.json", err)) return EXIT_CHECKPOINT;
  if (single || !path_exists(path)) {
    if (!single) return error_set(err, EXIT_CHECKPOINT, "%s: holds no model.safetensors and no index of shards", dir);
    int rc = safetensors_open(*files, path, err);
    *n = !rc;
    return rc;
  }
  json_t *j = json_read_file(path, 64 << 20, EXIT_CHECKPOINT, err), *v;
  if (!j) return EXIT_CHECKPOINT;
  const char *key;
  int rc = 0;
  if (!json_object_size(json_object_get(j, "weight_map")))
    rc = error_set(err, EXIT_CHECKPOINT, "%s: needed a \"weight_map\"", path);
  json_object_foreach(json_object_get(j, "weight_map"), key, v) {
    const char *name = json_string_value(v);
    char shard[PATH_SIZE];
    int known = 0;
    if (rc) break;
    if (!name || !name[0] || strchr(name, '/') || path_join(shard, dir, name, NULL)) {
      rc = error_set(err, EXIT_CHECKPOINT, "%s: tensor %.100s: needed a file name", path, key);
      break;
    }
    for (int i = 0; i < *n; i++) known |= !strcmp((*files)[i].path, shard);
    if (known) continue;
    Safetensors *more =
        *n < INIT_FROM_MAX_FILES ? (Safetensors *)realloc(*files, (size_t)(*n + 1) * sizeof **files) : NULL;
    if (!more) {
      rc = error_set(err, EXIT_CHECKPOINT, "%s: more than %d files", path, INIT_FROM_MAX_FILES);
      break;
    }
    *files = more;
    rc = safetensors_open(&more[*n], shard, err);
    *n += !rc;
  }
  json_decref(j);
  return rc;
}

// A tensor that the model has no place for: 0 when it may be left out, else EXIT_CHECKPOINT.
static MAYBE_UNUSED int init_from_extra(const Safetensors *f, const SafetensorsTensor *t, const Config *c,
                                        CheckpointNote note, void *note_ctx, Error *err) {
  static const char layers[] = "model.layers.";
  const char *rest = !strncmp(t->name, layers, sizeof layers - 1) ? strchr(t->name + sizeof layers - 1, '.') : NULL;
  if (rest && !strcmp(rest, ".attn.D")) {  // a parameter of old gated_deltanet layers that nothing ever read
    checkpoint_tell(note, note_ctx, "%s: %s is left out: no layer uses it", f->path, t->name);
    return 0;
  }
  if (c->tied && !strcmp(t->name, "lm_head.weight")) {
    checkpoint_tell(note, note_ctx, "%s: %s is left out: the head is the embedding", f->path, t->name);
    return 0;
  }
  if (rest && !strcmp(rest, ".attn.b_proj.bias")) {
    float x[64];
    for (int64_t at = 0, n; at < t->count; at += n) {
      n = t->count - at < 64 ? t->count - at : 64;
      if (safetensors_read(f, t, at, n, x, err)) return EXIT_CHECKPOINT;
      for (int64_t i = 0; i < n; i++)
        if (x[i] != 0)
          return error_set(err, EXIT_CHECKPOINT, "%s: %s is not zero: a bias of beta is not supported", f->path,
                           t->name);
    }
    checkpoint_tell(note, note_ctx, "%s: %s is left out: all zeros", f->path, t->name);
    return 0;
  }
  return error_set(err, EXIT_CHECKPOINT,
                   "%s: tensor %.200s has no place in this model: use the options of the model "
                   "it is from",
                   f->path, t->name);
}

// --init-from: the parameters of a Hugging Face folder, ours or fla's (hf_config_read gives its Config): one
// model.safetensors or shards with model.safetensors.index.json; F32, BF16 or F16. Every tensor of the model must be
// there in its shape, and no other, except that attn.D of old gated_deltanet files, a b_proj.bias of zeros and a head
// equal in name to a tied embedding are left out with a note. `what`: 0, or LOAD_ANY_NUMBERS.
static MAYBE_UNUSED int checkpoint_init_from(const char *dir, const Config *c, const ParamTable *t, int what,
                                             CheckpointWrite write, void *ctx, CheckpointNote note, void *note_ctx,
                                             Error *err) {
  Safetensors *files = NULL;
  int n_files = 0, rc = init_from_open(dir, &files, &n_files, err);
  float *piece = (float *)alloc_array(checkpoint_piece, 4, "--init-from");
  for (int i = 0; i < n_files && !rc; i++)
    for (int64_t k = 0; k < files[i].n && !rc; k++) {
      const SafetensorsTensor *tensor = &files[i].tensors[k];
      int twice = 0;
      for (int m = 0; m < i; m++) twice |= safetensors_find(&files[m], tensor->name) != NULL;
      if (twice)
        rc = error_set(err, EXIT_CHECKPOINT, "%s: tensor %.200s is in another file too", files[i].path, tensor->name);
      else if (param_find(t, tensor->name) < 0)
        rc = init_from_extra(&files[i], tensor, c, note, note_ctx, err);
    }
  for (int check = 1; check >= 0; check--)
    for (int n = 0; n < t->n && !rc; n++) {
      const ParamSpec *s = &t->specs[n];
      const SafetensorsTensor *tensor = NULL;
      int i = 0;
      while (s->name[0] && i < n_files - 1 && !safetensors_find(&files[i], s->name)) i++;
      if (s->name[0] && !(tensor = checkpoint_tensor(&files[i], s->name, s, err)))
        rc = EXIT_CHECKPOINT;
      else if (!check)
        rc = checkpoint_deliver(&files[i], tensor, s, ARENA_PARAM, 0, t->total, what, piece, write, ctx, err);
    }
  for (int i = 0; i < n_files; i++) safetensors_free(&files[i]);
  free(files);
  free(piece);
  return rc;
}

#endif  // GDN_INIT_FROM_H
