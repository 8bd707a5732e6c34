// checkpoint.h: saving and loading checkpoints.
//
// A checkpoint is a folder OUT/step-00012000/:
//   config.json                the model, in the keys of Hugging Face and fla where these can say it (hf_config.h)
//   modeling_train_gdn.py      only where fla has no class for the model: from_pretrained's, which config.json names
//   model.safetensors          all parameters, fp32, Hugging Face names; padding and a tied head are not stored
//   trainer_state.safetensors  exp_avg.NAME and exp_avg_sq.NAME, fp32
//   tokenizer.*                a copy of the tokenizer file, when the run knows one
//   manifest.json              step, counters, data fingerprint, options, size and block hashes of every file above
// It is written under a temporary name, synced and renamed, so that it is complete or invisible; it is found by its
// manifest. Nothing in it depends on the number of ranks: tensors are stored whole, under global names.
//
// Values are fetched and delivered through callbacks in pieces of some MiB, by ranges of the arena (ParamTable), so no
// second copy of the model is needed. Several ranks can write one checkpoint: plan (all), create (rank 0), write_range
// (each its own range), hash_rest and finish (rank 0); checkpoint_save is these five in a row for a single process.
//
// Finding, verifying and reading what a checkpoint says are in manifest.h, included here.
//
// defines: CheckpointSettings, CheckpointPlan, CheckpointHashes, CheckpointWriter, CheckpointWrite, checkpoint_save,
//          checkpoint_plan, checkpoint_plan_free, checkpoint_create, checkpoint_write_range, checkpoint_hash_rest,
//          checkpoint_finish, checkpoint_abort, checkpoint_writer_start, checkpoint_writer_submit,
//          checkpoint_writer_copying, checkpoint_writer_poll, checkpoint_writer_wait, checkpoint_writer_failures,
//          checkpoint_writer_stop, checkpoint_load, checkpoint_init_from, checkpoint_clean, checkpoint_name
#ifndef GDN_CHECKPOINT_H
#define GDN_CHECKPOINT_H

#include <sys/statvfs.h>
#include <sys/syscall.h>
#include "engine.h"
#include "hf_modeling.h"
#include "manifest.h"
#include "safetensors.h"
#include "snapshot.h"

// ----------------------------------------------------------------------------
// what callers see

// Copies `count` elements from src into an arena from element `first` on; EngineApi.write but for the type of its first
// argument. CheckpointRead is the other direction (snapshot.h).
typedef void (*CheckpointWrite)(void *ctx, int arena, int64_t first, int64_t count, const float *src);
typedef struct {
  const char *out;        // the run folder
  const char *tokenizer;  // file copied into every checkpoint, NULL: none
  int keep;               // newest checkpoints kept, 0: all
  int64_t keep_every;     // checkpoints whose step is a multiple are never removed, 0: no such rule
  int seq_len;            // max_position_embeddings of config.json
  int eos, pad;           // token ids of config.json, -1: null (bos is in Config)
} CheckpointSettings;

// --- saving

// Saves a checkpoint in the calling thread, then removes old ones by keep and keep_every. 0, or EXIT_CHECKPOINT with
// one line: not enough room (how much is needed), a write that failed, a folder that cannot be written. On an error the
// temporary folder is gone and every earlier checkpoint is as it was: the caller warns and goes on.
static int checkpoint_save(const CheckpointSettings *s, const Config *c, const ParamTable *t,
                           const CheckpointInfo *info, CheckpointRead read, void *ctx, Error *err);

// Saving behind the training: a thread copies the arenas to host memory (snapshot.h), then writes. One save is in
// flight: submit waits for the one before it.
typedef struct CheckpointWriter CheckpointWriter;
// c, t and the strings of s must outlive the writer.
static CheckpointWriter *checkpoint_writer_start(const CheckpointSettings *s, const Config *c, const ParamTable *t);
// Starts a save. The thread calls `read` until checkpoint_writer_copying says 0: until then nothing may change what it
// gives. Returns (and puts into err) the failure of an earlier save that was not reported yet, else 0; the new save
// goes on in either case. When memory for the copy is short it warns and writes before it returns.
static int checkpoint_writer_submit(CheckpointWriter *w, const CheckpointInfo *info, CheckpointRead read, void *ctx,
                                    Error *err);
// Waits for the copy, at most for so many seconds. Elements that are not copied yet, 0: all are.
static int64_t checkpoint_writer_copying(CheckpointWriter *w, double seconds);
// Does not wait. A failure that was not reported yet, once; else 0. *busy (or NULL): a save is in flight.
static int checkpoint_writer_poll(CheckpointWriter *w, int *busy, Error *err);
// Waits for the save in flight. Result as poll.
static int checkpoint_writer_wait(CheckpointWriter *w, Error *err);
// Saves that failed since the last one that worked: a caller gives up after a few.
static int checkpoint_writer_failures(CheckpointWriter *w);
// Waits, then frees everything. Call checkpoint_writer_wait first to see an error.
static void checkpoint_writer_stop(CheckpointWriter *w);

// --- loading

enum { LOAD_PARAMS = 1, LOAD_MOMENTS = 2, LOAD_VERIFY = 4 };
// Delivers the elements first .. first+count-1 of the arenas (count 0: all) to `write`; padding is delivered as zeros.
// `what`: LOAD_PARAMS, LOAD_MOMENTS, and LOAD_VERIFY to check the hashes before (not needed after checkpoint_find).
// EXIT_CHECKPOINT: damaged, or of another model (the first field that differs is named).
static int checkpoint_load(const char *dir, const Config *c, const ParamTable *t, int64_t first, int64_t count,
                           int what, CheckpointWrite write, void *ctx, Error *err);

// --init-from: the parameters of a Hugging Face folder, ours or fla's (hf_config_read gives its Config): one
// model.safetensors or shards with model.safetensors.index.json; F32, BF16 or F16. Every tensor of the model must be
// there in its shape, and no other, except that attn.D of old gated_deltanet files, a b_proj.bias of zeros and a head
// equal in name to a tied embedding are left out with a note.
static int checkpoint_init_from(const char *dir, const Config *c, const ParamTable *t, CheckpointWrite write, void *ctx,
                                CheckpointNote note, void *note_ctx, Error *err);

// --- housekeeping

// Removes temporary folders that dead processes left in `out`. Call it once at the start, under the run lock.
static void checkpoint_clean(const char *out, CheckpointNote note, void *note_ctx);
// OUT/step-00012000 into path[CHECKPOINT_PATH_MAX].
static void checkpoint_name(char *path, const char *out, int64_t step);

// ----------------------------------------------------------------------------
// saving in phases, for several ranks

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

// Lays the checkpoint out. No output; reads the tokenizer file. Free with checkpoint_plan_free.
static int checkpoint_plan(CheckpointPlan *p, const CheckpointSettings *s, const Config *c, const ParamTable *t,
                           Error *err);
static void checkpoint_plan_free(CheckpointPlan *p);
// One rank: checks free space and makes the temporary folder `tmp` (checkpoint_temp_name) with the small files, headers
// and empty tensor files of full size.
static int checkpoint_create(const CheckpointPlan *p, const char *tmp, Error *err);
// Any rank: writes elements first .. first+count-1 of all three arenas into the files of `tmp` and syncs them. Blocks
// written from their first byte to their last are hashed on the way.
static int checkpoint_write_range(const CheckpointPlan *p, const char *tmp, int64_t first, int64_t count,
                                  CheckpointRead read, void *ctx, CheckpointHashes *h, Error *err);
// One rank, after all have written: reads back the blocks that no rank wrote whole, and hashes them.
static int checkpoint_hash_rest(const CheckpointPlan *p, const char *tmp, CheckpointHashes *h, Error *err);
// One rank: manifest, rename, removal of old checkpoints. Every block must be hashed.
static int checkpoint_finish(const CheckpointPlan *p, const char *tmp, const CheckpointInfo *info,
                             const CheckpointHashes *h, Error *err);
// Removes the temporary folder after an error.
static void checkpoint_abort(const char *tmp);
static CheckpointHashes checkpoint_hashes_make(const CheckpointPlan *p);
static void checkpoint_hashes_free(CheckpointHashes *h);
// OUT/.tmp-step-00012000-PID into path[CHECKPOINT_PATH_MAX]; pid: of the rank that creates it.
static void checkpoint_temp_name(char *path, const char *out, int64_t step, int64_t pid);

// ----------------------------------------------------------------------------
// names and notes

static MAYBE_UNUSED void checkpoint_name(char *path, const char *out, int64_t step) {
  snprintf(path, CHECKPOINT_PATH_MAX, "%.3900s/step-%08lld", out, (long long)step);
}

static MAYBE_UNUSED void checkpoint_temp_name(char *path, const char *out, int64_t step, int64_t pid) {
  snprintf(path, CHECKPOINT_PATH_MAX, "%.3900s/.tmp-step-%08lld-%lld", out, (long long)step, (long long)pid);
}

// ----------------------------------------------------------------------------
// the layout

static MAYBE_UNUSED void checkpoint_plan_free(CheckpointPlan *p) {
  for (int i = 0; i < p->n_small; i++) free(p->small[i].data);
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++) {
    safetensors_free(&p->file[i].layout);
    free(p->file[i].header);
  }
  p->n_small = 0;
}

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

// ----------------------------------------------------------------------------
// writing

static MAYBE_UNUSED void checkpoint_abort(const char *tmp) { folder_remove(tmp, 0); }

// Enough room in the run folder, or a sentence that says how much is missing.
static MAYBE_UNUSED int checkpoint_check_space(const CheckpointPlan *p, Error *err) {
  struct statvfs fs;
  const char *out = p->settings->out;
  if (statvfs(out, &fs)) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be used: %s", out, strerror(errno));
  double need = (double)p->bytes + 1e6, room = (double)fs.f_bavail * (double)fs.f_frsize;
  if (need <= room) return 0;
  char a[32], b[32];
  format_bytes(a, sizeof a, need);
  format_bytes(b, sizeof b, room);
  return error_set(err, EXIT_CHECKPOINT,
                   "%s: a checkpoint needs %s, %s are free: make room, lower --keep or change --out", out, a, b);
}

static MAYBE_UNUSED int checkpoint_create(const CheckpointPlan *p, const char *tmp, Error *err) {
  char path[PATH_SIZE];
  if (checkpoint_check_space(p, err)) return EXIT_CHECKPOINT;
  folder_remove(tmp, 0);  // of an earlier process with the same number
  if (io_mkdir(tmp)) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be created: %s", tmp, strerror(errno));
  for (int i = 0; i < p->n_small; i++)
    if (path_join(path, tmp, p->small[i].name, err) ||
        file_write(path, p->small[i].data, p->small[i].size, EXIT_CHECKPOINT, err))
      return EXIT_CHECKPOINT;
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++) {
    if (path_join(path, tmp, p->file[i].name, err)) return EXIT_CHECKPOINT;
    int fd = io_create(path);
    if (fd < 0) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be created: %s", path, strerror(errno));
    int bad = io_truncate(fd, path, p->file[i].layout.file_size) ||
              io_pwrite(fd, path, p->file[i].header, p->file[i].header_size, 0) || io_sync(fd, path);
    int e = errno;
    if (io_close(fd, path) && !bad) bad = 1, e = errno;
    if (bad) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be written: %s", path, strerror(e));
  }
  return 0;
}

// Hashes the blocks of a file from the bytes that go by in ascending order.
typedef struct {
  XXH3_state_t *state;
  int64_t at, size;  // next byte, bytes of the file
  int whole;         // the current block was seen from its first byte on
  uint64_t *hash;    // of the file's first block
  uint8_t *done;
} BlockHasher;

static MAYBE_UNUSED void block_hasher_feed(BlockHasher *h, const void *data, size_t size, int64_t offset) {
  const char *p = (const char *)data;
  if (offset != h->at) h->whole = 0, h->at = offset;
  while (size) {
    int64_t inside = h->at % checkpoint_block, left = checkpoint_block - inside;
    if (inside == 0) h->whole = XXH3_64bits_reset(h->state) == XXH_OK;
    size_t n = (int64_t)size < left ? size : (size_t)left;
    if (h->whole) XXH3_64bits_update(h->state, p, n);
    h->at += (int64_t)n, p += n, size -= n;
    if (h->whole && (h->at % checkpoint_block == 0 || h->at == h->size)) {
      int64_t block = (h->at - 1) / checkpoint_block;
      h->hash[block] = XXH3_64bits_digest(h->state), h->done[block] = 1;
    }
  }
}

static MAYBE_UNUSED int checkpoint_write_range(const CheckpointPlan *p, const char *tmp, int64_t first, int64_t count,
                                               CheckpointRead read, void *ctx, CheckpointHashes *h, Error *err) {
  char path[PATH_SIZE];
  const ParamTable *t = p->table;
  float *piece = (float *)malloc((size_t)checkpoint_piece * 4);
  XXH3_state_t *state = XXH3_createState();
  int rc = piece && state ? 0 : error_set(err, EXIT_MEMORY, "no memory to write a checkpoint");
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES && !rc; i++) {
    if ((rc = path_join(path, tmp, p->file[i].name, err))) break;
    int fd = open(path, O_WRONLY | O_CLOEXEC), bad = 0;
    if (fd < 0) {
      rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot be opened: %s", path, strerror(errno));
      break;
    }
    BlockHasher hasher = {
        state, -1, p->file[i].layout.file_size, 0, h->hash + p->file[i].first_block, h->done + p->file[i].first_block};
    if (first == 0) block_hasher_feed(&hasher, p->file[i].header, p->file[i].header_size, 0);
    const SafetensorsTensor *place = p->file[i].layout.tensors;
    for (int k = 0; k < p->file[i].n_sections; k++)
      for (int n = 0; n < t->n; n++) {
        const ParamSpec *s = &t->specs[n];
        if (!s->name[0]) continue;
        int64_t from = s->offset > first ? s->offset : first, offset = place->begin + 4 * (from - s->offset);
        int64_t to = s->offset + s->count < first + count ? s->offset + s->count : first + count;
        place++;
        for (int64_t size; from < to && !bad; from += size, offset += 4 * size) {
          size = to - from < checkpoint_piece ? to - from : checkpoint_piece;
          read(ctx, p->file[i].section[k], from, size, piece);
          block_hasher_feed(&hasher, piece, (size_t)size * 4, offset);
          bad = io_pwrite(fd, path, piece, (size_t)size * 4, offset);
        }
      }
    int e = errno;
    if (!bad && io_sync(fd, path)) bad = 1, e = errno;
    if (io_close(fd, path) && !bad) bad = 1, e = errno;
    if (bad) rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot be written: %s", path, strerror(e));
  }
  XXH3_freeState(state);
  free(piece);
  return rc;
}

static MAYBE_UNUSED int checkpoint_hash_rest(const CheckpointPlan *p, const char *tmp, CheckpointHashes *h,
                                             Error *err) {
  char path[PATH_SIZE];
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++)
    for (int b = 0; b < p->file[i].blocks; b++) {
      int n = p->file[i].first_block + b;
      int64_t size = 0;
      if (h->done[n]) continue;
      if (path_join(path, tmp, p->file[i].name, err)) return EXIT_CHECKPOINT;
      int fd = file_open(path, &size, EXIT_CHECKPOINT, err);
      if (fd < 0) return EXIT_CHECKPOINT;
      int bad = checkpoint_hash_block(fd, b, p->file[i].layout.file_size, &h->hash[n]), e = errno;
      close(fd);
      if (bad) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be read back: %s", path, e ? strerror(e) : "cut off");
      h->done[n] = 1;
    }
  return 0;
}

// ----------------------------------------------------------------------------
// the last step of a save

// Removes a checkpoint so that a half-removed one is never visible.
static MAYBE_UNUSED int checkpoint_remove(const char *out, const char *dir, int64_t step) {
  char old[PATH_SIZE];
  snprintf(old, sizeof old, "%.3900s/.tmp-old-%08lld-%lld", out, (long long)step, (long long)getpid());
  folder_remove(old, 0);
  if (io_rename(dir, old)) return -1;
  return folder_remove(old, 1);
}

// Old checkpoints go: of those before `step`, the newest keep - 1 stay, and the multiples of keep_every.
static MAYBE_UNUSED void checkpoint_prune(const CheckpointSettings *s, int64_t step) {
  CheckpointList list;
  if (s->keep <= 0 || checkpoint_list(s->out, &list, checkpoint_silent, NULL, NULL)) return;
  int kept = 1;
  for (int i = 0; i < list.n; i++) {
    const CheckpointEntry *e = &list.items[i];
    if (e->step >= step || (s->keep_every > 0 && e->step % s->keep_every == 0) || kept++ < s->keep) continue;
    if (checkpoint_remove(s->out, e->path, e->step)) warn("%s: cannot be removed: %s", e->path, strerror(errno));
  }
  checkpoint_list_free(&list);
}

// Puts `tmp` in the place of `dir`, which may be there already (then both are swapped, and the old one goes).
static MAYBE_UNUSED int checkpoint_publish(const char *out, const char *tmp, const char *dir) {
  if (!path_exists(dir)) return io_rename(tmp, dir);
  if (io_refused("rename", dir)) return -1;
#if defined(SYS_renameat2)
  if (!syscall(SYS_renameat2, AT_FDCWD, tmp, AT_FDCWD, dir, 2 /* RENAME_EXCHANGE */)) {
    if (io_sync_dir(out)) return -1;
    folder_remove(tmp, 1);
    return 0;
  }
#endif
  char old[PATH_SIZE];  // file systems without an exchange: the old one is invisible for a moment
  snprintf(old, sizeof old, "%.3900s/.tmp-old-swap-%lld", out, (long long)getpid());
  folder_remove(old, 1);
  if (rename(dir, old)) return -1;
  if (rename(tmp, dir)) {
    int e = errno;
    if (rename(old, dir)) warn("%s: cannot be moved back to %s: %s", old, dir, strerror(errno));
    errno = e;
    return -1;
  }
  folder_remove(old, 1);
  return 0;
}

static MAYBE_UNUSED void manifest_add_small(json_t *files, const CheckpointSmallFile *f) {
  int64_t size = (int64_t)f->size, n = size ? (size + checkpoint_block - 1) / checkpoint_block : 1;
  uint64_t *hash = (uint64_t *)alloc_array(n, 8, "hashes of a checkpoint");
  for (int64_t i = 0, at = 0; i < n; i++, at += checkpoint_block)
    hash[i] = XXH3_64bits(f->data + at, (size_t)(size - at < checkpoint_block ? size - at : checkpoint_block));
  manifest_add_file(files, f->name, size, hash, (int)n);
  free(hash);
}

static MAYBE_UNUSED int checkpoint_finish(const CheckpointPlan *p, const char *tmp, const CheckpointInfo *info,
                                          const CheckpointHashes *h, Error *err) {
  char path[PATH_SIZE], dir[PATH_SIZE];
  for (int i = 0; i < h->n; i++)
    if (!h->done[i]) return error_set(err, EXIT_INTERNAL, "%s: block %d was not hashed", tmp, i);
  json_t *files = json_array();
  for (int i = 0; i < p->n_small; i++) manifest_add_small(files, &p->small[i]);
  for (int i = 0; i < CHECKPOINT_TENSOR_FILES; i++)
    manifest_add_file(files, p->file[i].name, p->file[i].layout.file_size, h->hash + p->file[i].first_block,
                      p->file[i].blocks);
  Error why = {EXIT_MEMORY, ""};
  char *text = manifest_build(info, files, &why);
  if (!text) return error_set(err, why.code, "%s", why.text);
  int rc = path_join(path, tmp, "manifest.json", err) || file_write(path, text, strlen(text), EXIT_CHECKPOINT, err);
  free(text);
  if (rc) return EXIT_CHECKPOINT;
  if (io_sync_dir(tmp)) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be synced: %s", tmp, strerror(errno));
  checkpoint_name(dir, p->settings->out, info->step);
  if (checkpoint_publish(p->settings->out, tmp, dir))
    return error_set(err, EXIT_CHECKPOINT, "%s: cannot be renamed to %s: %s", tmp, dir, strerror(errno));
  if (io_sync_dir(p->settings->out))
    return error_set(err, EXIT_CHECKPOINT, "%s: cannot be synced: %s", p->settings->out, strerror(errno));
  checkpoint_prune(p->settings, info->step);
  return 0;
}

static MAYBE_UNUSED int checkpoint_save(const CheckpointSettings *s, const Config *c, const ParamTable *t,
                                        const CheckpointInfo *info, CheckpointRead read, void *ctx, Error *err) {
  CheckpointPlan plan;
  char tmp[PATH_SIZE];
  if (checkpoint_plan(&plan, s, c, t, err)) return EXIT_CHECKPOINT;
  CheckpointHashes hashes = checkpoint_hashes_make(&plan);
  checkpoint_temp_name(tmp, s->out, info->step, (int64_t)getpid());
  int rc = checkpoint_create(&plan, tmp, err);
  if (!rc) rc = checkpoint_write_range(&plan, tmp, 0, t->total, read, ctx, &hashes, err);
  if (!rc) rc = checkpoint_hash_rest(&plan, tmp, &hashes, err);
  if (!rc) rc = checkpoint_finish(&plan, tmp, info, &hashes, err);
  if (rc) checkpoint_abort(tmp);
  checkpoint_hashes_free(&hashes);
  checkpoint_plan_free(&plan);
  return rc;
}

// ----------------------------------------------------------------------------
// saving behind the training

struct CheckpointWriter {
  const CheckpointSettings *settings;
  const Config *config;
  const ParamTable *table;
  Snapshot snapshot;
  int copies;           // the save goes by the snapshot
  CheckpointRead read;  // what is saved
  void *ctx;
  CheckpointInfo info;  // own copies of its texts
  pthread_t thread;
  pthread_mutex_t lock;
  int joinable;  // a thread was started and not joined
  int busy;      // under lock
  int failures;  // in a row
  Error error;   // not reported yet when code != 0
};

static MAYBE_UNUSED CheckpointWriter *checkpoint_writer_start(const CheckpointSettings *s, const Config *c,
                                                              const ParamTable *t) {
  CheckpointWriter *w = (CheckpointWriter *)alloc_zeroed(1, sizeof *w, "checkpoint writer");
  w->settings = s, w->config = c, w->table = t;
  pthread_mutex_init(&w->lock, NULL);
  snapshot_open(&w->snapshot, 0, t->total);
  return w;
}

static MAYBE_UNUSED void checkpoint_writer_record(CheckpointWriter *w, int rc, const Error *error) {
  pthread_mutex_lock(&w->lock);
  w->busy = 0;
  w->failures = rc ? w->failures + 1 : 0;
  if (rc) w->error = *error;
  pthread_mutex_unlock(&w->lock);
}

static MAYBE_UNUSED void *checkpoint_writer_main(void *arg) {
  CheckpointWriter *w = (CheckpointWriter *)arg;
  Error error = {0, ""};
  if (w->copies) snapshot_copy(&w->snapshot, w->read, w->ctx);
  int rc = checkpoint_save(w->settings, w->config, w->table, &w->info, w->copies ? snapshot_read : w->read,
                           w->copies ? &w->snapshot : w->ctx, &error);
  checkpoint_writer_record(w, rc, &error);
  return NULL;
}

static MAYBE_UNUSED int checkpoint_writer_poll(CheckpointWriter *w, int *busy, Error *err) {
  pthread_mutex_lock(&w->lock);
  if (busy) *busy = w->busy;
  int rc = w->error.code;
  if (rc && err) *err = w->error;
  w->error.code = 0;
  pthread_mutex_unlock(&w->lock);
  return rc;
}

static MAYBE_UNUSED int checkpoint_writer_wait(CheckpointWriter *w, Error *err) {
  if (w->joinable) pthread_join(w->thread, NULL);
  w->joinable = 0;
  return checkpoint_writer_poll(w, NULL, err);
}

static MAYBE_UNUSED int64_t checkpoint_writer_copying(CheckpointWriter *w, double seconds) {
  return snapshot_wait(&w->snapshot, seconds);
}

static MAYBE_UNUSED int checkpoint_writer_failures(CheckpointWriter *w) {
  pthread_mutex_lock(&w->lock);
  int n = w->failures;
  pthread_mutex_unlock(&w->lock);
  return n;
}

static MAYBE_UNUSED int checkpoint_writer_submit(CheckpointWriter *w, const CheckpointInfo *info, CheckpointRead read,
                                                 void *ctx, Error *err) {
  int earlier = checkpoint_writer_wait(w, err);
  Error why = {0, ""};
  checkpoint_info_free(&w->info);
  w->info = *info;
  w->info.trainer = info->trainer ? checkpoint_text_copy(info->trainer) : NULL;
  w->info.options = info->options ? checkpoint_text_copy(info->options) : NULL;
  w->read = read, w->ctx = ctx, w->busy = 1;
  w->copies = !snapshot_begin(&w->snapshot, &why);
  if (w->copies) {
    // the writer takes no signals: those are the training thread's to see
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int e = pthread_create(&w->thread, NULL, checkpoint_writer_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    w->joinable = !e;
    if (!e) return earlier;
    error_set(&why, EXIT_MEMORY, "no thread to write it: %s", strerror(e));
  }
  warn("saving step %lld holds up the training: %s", (long long)info->step, why.text);
  checkpoint_writer_main(w);
  return earlier ? earlier : checkpoint_writer_poll(w, NULL, err);
}

static MAYBE_UNUSED void checkpoint_writer_stop(CheckpointWriter *w) {
  if (!w) return;
  checkpoint_writer_wait(w, NULL);
  snapshot_close(&w->snapshot);
  checkpoint_info_free(&w->info);
  pthread_mutex_destroy(&w->lock);
  free(w);
}

// ----------------------------------------------------------------------------
// loading

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

// Delivers the part of one tensor (NULL: zeros) that lies in first .. first+count-1.
static MAYBE_UNUSED int checkpoint_deliver(const Safetensors *f, const SafetensorsTensor *t, const ParamSpec *s,
                                           Arena arena, int64_t first, int64_t count, float *piece,
                                           CheckpointWrite write, void *ctx, Error *err) {
  int64_t from = s->offset > first ? s->offset : first;
  int64_t to = s->offset + s->count < first + count ? s->offset + s->count : first + count;
  for (int64_t size; from < to; from += size) {
    size = to - from < checkpoint_piece ? to - from : checkpoint_piece;
    if (!t)
      memset(piece, 0, (size_t)size * 4);
    else if (safetensors_read(f, t, from - s->offset, size, piece, err))
      return EXIT_CHECKPOINT;
    write(ctx, arena, from, size, piece);
  }
  return 0;
}

// One arena from a file whose tensors are named prefix + NAME.
static MAYBE_UNUSED int checkpoint_load_arena(const Safetensors *f, const char *prefix, const ParamTable *t,
                                              Arena arena, int64_t first, int64_t count, float *piece,
                                              CheckpointWrite write, void *ctx, Error *err) {
  char name[160];
  for (int check = 1; check >= 0; check--)  // nothing is delivered from a file that does not fit
    for (int n = 0; n < t->n; n++) {
      const ParamSpec *s = &t->specs[n];
      const SafetensorsTensor *tensor = NULL;
      snprintf(name, sizeof name, "%s%s", prefix, s->name);
      if (s->name[0] && !(tensor = checkpoint_tensor(f, name, s, err))) return EXIT_CHECKPOINT;
      if (!check && checkpoint_deliver(f, tensor, s, arena, first, count, piece, write, ctx, err))
        return EXIT_CHECKPOINT;
    }
  return 0;
}

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
    if (!rc && !i) rc = checkpoint_load_arena(&f, "", t, ARENA_PARAM, first, count, piece, write, ctx, err);
    if (!rc && i) rc = checkpoint_load_arena(&f, "exp_avg.", t, ARENA_M, first, count, piece, write, ctx, err);
    if (!rc && i) rc = checkpoint_load_arena(&f, "exp_avg_sq.", t, ARENA_V, first, count, piece, write, ctx, err);
    safetensors_free(&f);
  }
  free(piece);
  return rc;
}

// ----------------------------------------------------------------------------
// --init-from

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

static MAYBE_UNUSED int checkpoint_init_from(const char *dir, const Config *c, const ParamTable *t,
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
        rc = checkpoint_deliver(&files[i], tensor, s, ARENA_PARAM, 0, t->total, piece, write, ctx, err);
    }
  for (int i = 0; i < n_files; i++) safetensors_free(&files[i]);
  free(files);
  free(piece);
  return rc;
}

// ----------------------------------------------------------------------------
// housekeeping

// 1 while a process runs; one that has ended and that nobody has asked after (a zombie) does not.
static MAYBE_UNUSED int process_runs(long pid) {
  char path[64], line[512];
  if (kill((pid_t)pid, 0) && errno != EPERM) return 0;
  snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  FILE *f = fopen(path, "r");
  const char *state = f && fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
  if (f) fclose(f);
  return !state || state[1] != ' ' || state[2] != 'Z';
}

static MAYBE_UNUSED void checkpoint_clean(const char *out, CheckpointNote note, void *note_ctx) {
  DIR *dir = opendir(out);
  struct dirent *e;
  while (dir && (e = readdir(dir))) {
    char path[PATH_SIZE];
    const char *dash = strrchr(e->d_name, '-');
    if (strncmp(e->d_name, ".tmp-", 5) || !dash || path_join(path, out, e->d_name, NULL)) continue;
    // A process with our own number left it before we began: containers start at the same number again and again.
    long pid = strtol(dash + 1, NULL, 10);
    if (pid > 0 && pid != (long)getpid() && process_runs(pid)) continue;
    if (folder_remove(path, 1))
      checkpoint_tell(note, note_ctx, "%s: left by an earlier run, cannot be removed: %s", path, strerror(errno));
    else
      checkpoint_tell(note, note_ctx, "%s: left half written by an earlier run, removed", path);
  }
  if (dir) closedir(dir);
}

#endif  // GDN_CHECKPOINT_H
