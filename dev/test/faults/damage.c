// damage.c: damaged checkpoints and shards against their readers: none may be accepted, none may crash.
//
//   damage checkpoints RUN COUNT SEED   RUN: a run folder with two or more checkpoints
//   damage shards 'GLOB' COUNT SEED     shards of the project's own format
//
// One damage at a time is done to a file and undone again: a flipped bit, several flipped bits, a cut at any byte or at
// a multiple of 4 KiB, an empty file, bytes added, a stretch of zeros, a stretch moved, a missing file, a folder or a
// dangling link in its place, two files swapped. Ends with `N damaged, N refused, N accepted`; exit status 1 when one
// was accepted, or when what is whole was not.
#include "gdn/shards.h"
#include "gdn/checkpoint.h"

enum { MAX_FILES = 64 };

typedef struct {
  char path[PATH_SIZE];
  char *data;
  size_t size;
} File;

static File files[MAX_FILES];
static int n_files;
static uint64_t rng_state;

static uint64_t rng(void) {  // xorshift64
  rng_state ^= rng_state << 13, rng_state ^= rng_state >> 7, rng_state ^= rng_state << 17;
  return rng_state;
}

static size_t below(size_t n) { return n ? (size_t)(rng() >> 16) % n : 0; }

static void put(const char *path, const void *data, size_t size) {
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(data, 1, size, f) != size || fclose(f)) fail(EXIT_INTERNAL, "%s: %s", path, strerror(errno));
}

static void take(const char *path) {
  Error err;
  if (n_files == MAX_FILES) fail(EXIT_INTERNAL, "more than %d files", MAX_FILES);
  File *f = &files[n_files++];
  snprintf(f->path, sizeof f->path, "%s", path);
  f->data = file_read(path, 1 << 26, &f->size, EXIT_INTERNAL, &err);
  if (!f->data) fail_error(&err);
}

static void restore(const File *f) {
  struct stat st;
  if (!lstat(f->path, &st) && (S_ISDIR(st.st_mode) ? rmdir(f->path) : unlink(f->path)))
    fail(EXIT_INTERNAL, "%s: %s", f->path, strerror(errno));
  put(f->path, f->data, f->size);
}

// ----------------------------------------------------------------------------
// damage

static const char *const kinds[] = {"a flipped bit",  "flipped bits", "a cut",           "a cut at 4 KiB",
                                    "an empty file",  "bytes added",  "zeros",           "moved bytes",
                                    "a missing file", "a folder",     "a dangling link", "swapped files"};
enum { KINDS = sizeof kinds / sizeof *kinds, SWAPPED = KINDS - 1 };

// Does a damage to files[i] (and files[k] when swapped); 0 when it would change nothing.
static int damage(int kind, int i, int k) {
  const File *f = &files[i];
  char *copy = (char *)alloc_array((int64_t)f->size + 64, 1, "damage");
  size_t size = f->size;
  memcpy(copy, f->data, f->size);
  memset(copy + f->size, 0x5a, 64);
  switch (kind) {
    case 0:
      copy[below(size)] ^= (char)(1 << below(8));
      break;
    case 1:
      for (int n = 0; n < 9; n++) copy[below(size)] ^= (char)(1 << below(8));
      break;
    case 2:
      size = below(size);
      break;
    case 3:
      size = below((size + 4095) / 4096) * 4096;
      break;
    case 4:
      size = 0;
      break;
    case 5:
      size += 1 + below(63);
      break;
    case 6: {
      size_t at = below(size), n = 1 + below(4096);
      memset(copy + at, 0, n < size - at ? n : size - at);
      break;
    }
    case 7: {
      size_t n = 1 + below(size / 2), from = below(size - n), to = below(size - n);
      memmove(copy + to, copy + from, n);
      break;
    }
    default:
      break;
  }
  int changed = kind > 7 || size != f->size || memcmp(copy, f->data, size);
  if (kind == SWAPPED) changed = i != k && (f->size != files[k].size || memcmp(f->data, files[k].data, f->size));
  if (changed) {
    if (unlink(f->path)) fail(EXIT_INTERNAL, "%s: %s", f->path, strerror(errno));
    if (kind <= 7) put(f->path, copy, size);
    if (kind == 9 && mkdir(f->path, 0777)) fail(EXIT_INTERNAL, "%s: %s", f->path, strerror(errno));
    if (kind == 10 && symlink("/nowhere/at/all", f->path)) fail(EXIT_INTERNAL, "%s: %s", f->path, strerror(errno));
    if (kind == SWAPPED) put(f->path, files[k].data, files[k].size), put(files[k].path, f->data, f->size);
  }
  free(copy);
  return changed;
}

// ----------------------------------------------------------------------------
// checkpoints

typedef struct {
  int64_t total;
  uint64_t hash;
} Sink;

static void sink_write(void *ctx, int arena, int64_t first, int64_t count, const float *src) {
  Sink *s = (Sink *)ctx;
  if (first < 0 || count <= 0 || first + count > s->total) abort();
  s->hash += XXH3_64bits_withSeed(src, (size_t)count * 4, (XXH64_hash_t)((uint64_t)first * 4 + (uint64_t)arena));
}

static uint64_t checkpoint_hash(const char *dir, int *code, Error *err) {
  Config c;
  CheckpointInfo info;
  Sink s = {0, 0};
  if ((*code = checkpoint_verify(dir, err)) || (*code = checkpoint_read_info(dir, &c, &info, err))) return 0;
  ParamTable t = param_table_build(&c);
  s.total = t.total;
  *code = checkpoint_load(dir, &c, &t, 0, 0, LOAD_PARAMS | LOAD_MOMENTS | LOAD_VERIFY, sink_write, &s, err);
  param_table_free(&t);
  checkpoint_info_free(&info);
  return s.hash;
}

// 1: the damage to the newest checkpoint (files[i]) is seen, named, and the one before is found instead.
static int checkpoint_refuses(const char *run, const char *newest, const char *older, const char *damaged,
                              uint64_t whole, int both) {
  Error err = {0, ""};
  int code;
  char found[PATH_SIZE];
  uint64_t hash = checkpoint_hash(newest, &code, &err);
  if (code != EXIT_CHECKPOINT || !strstr(err.text, newest) || strchr(err.text, '\n')) {
    printf("code %d, %s, the same state: %d; %s: ", code, err.text, hash == whole, damaged);
    return 0;
  }
  code = checkpoint_find(run, found, checkpoint_silent, NULL, &err);
  if (both ? code != EXIT_CHECKPOINT : code || strcmp(found, older)) {
    printf("found '%s', needed '%s'; %s: ", found, both ? "" : older, damaged);
    return 0;
  }
  return 1;
}

static int checkpoints_main(const char *run, int count) {
  CheckpointList list;
  Error err = {0, ""};
  int code, accepted = 0, done = 0, by_kind[KINDS] = {0};
  if (checkpoint_list(run, &list, NULL, NULL, &err)) fail_error(&err);
  if (list.n < 2) fail(EXIT_INTERNAL, "%s: %d checkpoints, needed 2", run, list.n);
  const char *newest = list.items[0].path, *older = list.items[1].path;
  int own = 0;  // files of the newest
  for (int k = 0; k < 2; k++) {
    DIR *d = opendir(k ? older : newest);
    char path[PATH_SIZE];
    for (struct dirent *e; d && (e = readdir(d));)
      if (e->d_name[0] != '.' && !path_join(path, k ? older : newest, e->d_name, &err)) take(path);
    if (d) closedir(d);
    if (!k) own = n_files;
  }
  uint64_t whole = checkpoint_hash(newest, &code, &err);
  if (code) fail_error(&err);
  while (done < count) {
    int kind = (int)below(KINDS), i = (int)below((size_t)own), k = (int)below((size_t)n_files);
    if (!damage(kind, i, k)) continue;
    done++, by_kind[kind]++;
    int both = kind == SWAPPED && k >= own;  // then the older one is damaged too
    if (!checkpoint_refuses(run, newest, older, files[i].path, whole, both)) printf("%s\n", kinds[kind]), accepted++;
    restore(&files[i]);
    if (kind == SWAPPED) restore(&files[k]);
  }
  if (checkpoint_hash(newest, &code, &err) != whole || code) fail(EXIT_INTERNAL, "what is whole is not accepted");
  for (int n = 0; n < KINDS; n++) printf("%s %d, ", kinds[n], by_kind[n]);
  printf("%d damaged, %d refused, %d accepted\n", done, done - accepted, accepted);
  checkpoint_list_free(&list);
  return accepted != 0;
}

// ----------------------------------------------------------------------------
// shards

// Reads everything; the hash of all tokens, and the fingerprint of the set.
static uint64_t shards_hash(const char *glob_pattern, int *code, uint64_t *fingerprint, Error *err) {
  ShardSet set;
  uint64_t hash = 0;
  memset(&set, 0, sizeof set);
  *code = shards_open(&set, &glob_pattern, 1, 0, "--train", err);
  if (*code) return 0;
  *fingerprint = shards_fingerprint(&set);
  int32_t row[257];
  for (int64_t at = 0, n; at < set.tokens && !*code; at += n) {
    n = set.tokens - at < 257 ? set.tokens - at : 257;
    *code = shards_read(&set, at, n, row, err);
    if (!*code) hash = XXH3_64bits_withSeed(row, (size_t)n * 4, hash);
  }
  for (int i = 0; i < set.count && !*code; i++) {
    int64_t *starts = (int64_t *)alloc_array(set.shards[i].documents, 8, "documents");
    *code = shards_read_documents(&set, i, starts, err);
    if (!*code) hash = XXH3_64bits_withSeed(starts, (size_t)set.shards[i].documents * 8, hash);
    free(starts);
  }
  shards_close(&set);
  return hash;
}

static int shards_main(const char *glob_pattern, int count) {
  Error err = {0, ""};
  int code, accepted = 0, done = 0, other = 0, by_kind[KINDS] = {0};
  uint64_t fingerprint = 0, found = 0;
  glob_t g;
  if (glob(glob_pattern, 0, NULL, &g)) fail(EXIT_INTERNAL, "%s: no shards", glob_pattern);
  for (size_t i = 0; i < g.gl_pathc; i++) take(g.gl_pathv[i]);
  globfree(&g);
  uint64_t whole = shards_hash(glob_pattern, &code, &fingerprint, &err);
  if (code) fail_error(&err);
  while (done < count) {
    int kind = (int)below(KINDS), i = (int)below((size_t)n_files), k = (int)below((size_t)n_files);
    if (!damage(kind, i, k)) continue;
    done++, by_kind[kind]++;
    err.text[0] = 0;
    uint64_t hash = shards_hash(glob_pattern, &code, &found, &err);
    // a set that lacks a file, or has two in each other's place, is whole by itself: its fingerprint, which every
    // checkpoint holds, says that it is another one
    if ((kind == SWAPPED || kind == 8) && !code && found != fingerprint) {
      other++;
    } else if (code != EXIT_DATA || !strstr(err.text, files[i].path) || strchr(err.text, '\n')) {
      printf("%s: %s: code %d, %s, the same tokens: %d\n", files[i].path, kinds[kind], code, err.text, hash == whole);
      accepted++;
    }
    restore(&files[i]);
    if (kind == SWAPPED) restore(&files[k]);
  }
  if (shards_hash(glob_pattern, &code, &found, &err) != whole || code || found != fingerprint)
    fail(EXIT_INTERNAL, "what is whole is not accepted");
  for (int n = 0; n < KINDS; n++) printf("%s %d, ", kinds[n], by_kind[n]);
  printf("%d of these seen by the fingerprint, ", other);
  printf("%d damaged, %d refused, %d accepted\n", done, done - accepted, accepted);
  return accepted != 0;
}

int main(int argc, char **argv) {
  if (argc != 5) fail(EXIT_USAGE, "damage checkpoints|shards PATH COUNT SEED");
  rng_state = 88172645463325252ull ^ ((uint64_t)strtoull(argv[4], NULL, 10) * 0x9e3779b97f4a7c15ull);
  if (!rng_state) rng_state = 1;
  int count = atoi(argv[3]), failed = 0;
  if (!strcmp(argv[1], "checkpoints")) failed = checkpoints_main(argv[2], count);
  if (!strcmp(argv[1], "shards")) failed = shards_main(argv[2], count);
  for (int i = 0; i < n_files; i++) free(files[i].data);
  return failed;
}
