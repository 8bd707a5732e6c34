// checkpoint_write.h: writes a checkpoint (checkpoint.h): one process in one call, several ranks in phases.
//
// Several ranks: plan (all, checkpoint_plan.h), create (rank 0), write_range (each its own range), hash_rest and finish
// (rank 0). checkpoint_save is these five in a row.
//
// defines: checkpoint_save, checkpoint_create, checkpoint_write_range, checkpoint_hash_rest, checkpoint_finish,
//          checkpoint_abort, checkpoint_clean
#ifndef GDN_CHECKPOINT_WRITE_H
#define GDN_CHECKPOINT_WRITE_H

#include <signal.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include "checkpoint_plan.h"
#include "snapshot.h"

// Removes the temporary folder after an error.
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

// One rank: checks free space and makes the temporary folder `tmp` (checkpoint_temp_name) with the small files, headers
// and empty tensor files of full size.
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

// Any rank: writes elements first .. first+count-1 of all three arenas into the files of `tmp` and syncs them. Blocks
// written from their first byte to their last are hashed on the way.
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

// One rank, after all have written: reads back the blocks that no rank wrote whole, and hashes them.
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

// One rank: manifest, rename, removal of old checkpoints. Every block must be hashed.
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

// Saves a checkpoint in the calling thread, then removes old ones by keep and keep_every. 0, or EXIT_CHECKPOINT with
// one line: not enough room (how much is needed), a write that failed, a folder that cannot be written. On an error the
// temporary folder is gone and every earlier checkpoint is as it was: the caller warns and goes on.
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

// Removes temporary folders that dead processes left in `out`. Call it once at the start, under the run lock.
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

#endif  // GDN_CHECKPOINT_WRITE_H
