// checkpoint_read.h: loads weights and moments from a checkpoint (checkpoint.h).
//
// defines: CheckpointWrite, LOAD_PARAMS, LOAD_MOMENTS, LOAD_VERIFY, LOAD_ANY_NUMBERS, checkpoint_load,
//          checkpoint_tensor, checkpoint_deliver
#ifndef GDN_CHECKPOINT_READ_H
#define GDN_CHECKPOINT_READ_H

#include <math.h>

#include "checkpoint_plan.h"

// Copies `count` elements from src into an arena from element `first` on; EngineApi.write but for the type of its first
// argument. CheckpointRead is the other direction (snapshot.h).
typedef void (*CheckpointWrite)(void *ctx, int arena, int64_t first, int64_t count, const float *src);

enum { LOAD_PARAMS = 1, LOAD_MOMENTS = 2, LOAD_VERIFY = 4, LOAD_ANY_NUMBERS = 8 };

// "[2, 3]" of a shape.
static MAYBE_UNUSED const char *checkpoint_shape(char *dst, size_t size, int ndim, const int64_t *shape) {
  size_t at = 0;
  for (int i = 0; i < ndim && at < size; i++)
    at += (size_t)snprintf(dst + at, size - at, "%s%lld", i ? ", " : "[", (long long)shape[i]);
  if (at < size) snprintf(dst + at, size - at, ndim ? "]" : "[]");
  return dst;
}

// The tensor of a spec in a file, with a matching shape; NULL with err set.
static MAYBE_UNUSED const SafetensorsTensor *checkpoint_tensor(const Safetensors *f, const char *name,
                                                               const ParamSpec *s, Error *err) {
  const SafetensorsTensor *t = safetensors_find(f, name);
  char a[256], b[256];
  if (!t) {
    error_set(err, EXIT_CHECKPOINT, "%s: tensor %s is missing", f->path, name);
    return NULL;
  }
  int same = t->ndim == s->ndim && t->dtype != DTYPE_OTHER;
  for (int i = 0; i < s->ndim && same; i++) same = t->shape[i] == s->shape[i];
  if (same) return t;
  error_set(err, EXIT_CHECKPOINT, "%s: tensor %s has shape %s%s, needed %s", f->path, name,
            checkpoint_shape(a, sizeof a, t->ndim, t->shape),
            t->dtype == DTYPE_OTHER ? " and an integer or double type" : "",
            checkpoint_shape(b, sizeof b, s->ndim, s->shape));
  return NULL;
}

// The index of the first number that is not finite; count if there is none.
static MAYBE_UNUSED int64_t checkpoint_not_finite(const float *x, int64_t count) {
  uint32_t bits, bad = 0;
  for (int64_t i = 0; i < count; i++) {  // without a branch: billions of weights are read
    memcpy(&bits, x + i, 4);
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  int64_t i = bad ? 0 : count;
  while (i < count && isfinite(x[i])) i++;
  return i;
}

// Delivers the part of one tensor (NULL: zeros) that lies in first .. first+count-1. Without LOAD_ANY_NUMBERS in `what`
// a number that is not finite is an error: no run writes one, and what a kernel makes of it is not always seen.
static MAYBE_UNUSED int checkpoint_deliver(const Safetensors *f, const SafetensorsTensor *t, const ParamSpec *s,
                                           Arena arena, int64_t first, int64_t count, int what, float *piece,
                                           CheckpointWrite write, void *ctx, Error *err) {
  int64_t from = s->offset > first ? s->offset : first;
  int64_t to = s->offset + s->count < first + count ? s->offset + s->count : first + count;
  for (int64_t size; from < to; from += size) {
    size = to - from < checkpoint_piece ? to - from : checkpoint_piece;
    if (!t)
      memset(piece, 0, (size_t)size * 4);
    else if (safetensors_read(f, t, from - s->offset, size, piece, err))
      return EXIT_CHECKPOINT;
    int64_t bad = what & LOAD_ANY_NUMBERS ? size : checkpoint_not_finite(piece, size);
    if (bad < size)
      return error_set(err, EXIT_CHECKPOINT,
                       "%s: tensor %s: element %lld is %g: needed finite numbers; inspect shows how many are not, take "
                       "an earlier checkpoint",
                       f->path, t->name, (long long)(from - s->offset + bad), (double)piece[bad]);
    write(ctx, arena, from, size, piece);
  }
  return 0;
}

// One arena from a file whose tensors are named prefix + NAME.
static MAYBE_UNUSED int checkpoint_load_arena(const Safetensors *f, const char *prefix, const ParamTable *t,
                                              Arena arena, int64_t first, int64_t count, int what, float *piece,
                                              CheckpointWrite write, void *ctx, Error *err) {
  char name[160];
  for (int check = 1; check >= 0; check--)  // nothing is delivered from a file that does not fit
    for (int n = 0; n < t->n; n++) {
      const ParamSpec *s = &t->specs[n];
      const SafetensorsTensor *tensor = NULL;
      snprintf(name, sizeof name, "%s%s", prefix, s->name);
      if (s->name[0] && !(tensor = checkpoint_tensor(f, name, s, err))) return EXIT_CHECKPOINT;
      if (!check && checkpoint_deliver(f, tensor, s, arena, first, count, what, piece, write, ctx, err))
        return EXIT_CHECKPOINT;
    }
  return 0;
}

// Delivers the elements first .. first+count-1 of the arenas (count 0: all) to `write`; padding is delivered as zeros.
// `what`: LOAD_PARAMS, LOAD_MOMENTS, LOAD_VERIFY to check the hashes before (not needed after checkpoint_find), and
// LOAD_ANY_NUMBERS to take what is not finite too.
// EXIT_CHECKPOINT: damaged, or of another model (the first field that differs is named).
static MAYBE_UNUSED int checkpoint_load(const char *dir, const Config *c, const ParamTable *t, int64_t first,
                                        int64_t count, int what, CheckpointWrite write, void *ctx, Error *err) {
  char path[PATH_SIZE], line[256];
  Config there;
  Safetensors f;
  int rc;
  if (count == 0) count = t->total - first;
  if ((what & LOAD_VERIFY) && (rc = checkpoint_verify(dir, err))) return rc;
  if ((rc = hf_config_read(dir, &there, err))) return rc;
  if (config_diff(&there, c, line, sizeof line))
    return error_set(err, EXIT_CHECKPOINT, "%s holds another model: %s; use the same model options or another --out",
                     dir, line);
  float *piece = (float *)malloc((size_t)checkpoint_piece * 4);
  if (!piece) return error_set(err, EXIT_MEMORY, "%s: no memory to load it", dir);
  int64_t specs = 0;
  for (int n = 0; n < t->n; n++) specs += t->specs[n].name[0] != 0;
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES && !rc; i++) {
    if (!(what & (i ? LOAD_MOMENTS : LOAD_PARAMS))) continue;
    if ((rc = path_join(path, dir, i ? "trainer_state.safetensors" : "model.safetensors", err))) break;
    if ((rc = safetensors_open(&f, path, err))) break;
    if (f.n != (i ? 2 : 1) * specs)
      rc = error_set(err, EXIT_CHECKPOINT, "%s: %lld tensors, needed %lld", path, (long long)f.n,
                     (long long)((i ? 2 : 1) * specs));
    if (!rc && !i) rc = checkpoint_load_arena(&f, "", t, ARENA_PARAM, first, count, what, piece, write, ctx, err);
    if (!rc && i) rc = checkpoint_load_arena(&f, "exp_avg.", t, ARENA_M, first, count, what, piece, write, ctx, err);
    if (!rc && i) rc = checkpoint_load_arena(&f, "exp_avg_sq.", t, ARENA_V, first, count, what, piece, write, ctx, err);
    safetensors_free(&f);
  }
  free(piece);
  return rc;
}

#endif  // GDN_CHECKPOINT_READ_H
