// manifest.h: manifest.json of a checkpoint, which says what the checkpoint is and proves that it is whole.
//
// It holds step and counters, the data's fingerprint, the trainer's own state, the options as text, and size and XXH3
// hashes (one for every 64 MiB) of each file. Checkpoints are found by reading manifests, never by the name of a
// folder.
//
// defines: CHECKPOINT_FORMAT, CHECKPOINT_BLOCK, CheckpointNote, CheckpointInfo, CheckpointEntry, CheckpointList,
//          checkpoint_tell, checkpoint_silent, checkpoint_hash_block, manifest_add_file, manifest_build,
//          manifest_parse, manifest_read, checkpoint_verify, checkpoint_scan, checkpoint_list, checkpoint_list_free,
//          checkpoint_find, checkpoint_read_info, checkpoint_info_free
#ifndef GDN_MANIFEST_H
#define GDN_MANIFEST_H

#include <xxhash.h>
#include "hf_config.h"
#include "json.h"

enum { CHECKPOINT_PATH_MAX = PATH_SIZE, CHECKPOINT_FORMAT = 1 };
#ifndef CHECKPOINT_BLOCK
#define CHECKPOINT_BLOCK (64 << 20)  // bytes that one hash covers: part of the format; tests make it small
#endif
static const int64_t checkpoint_block = CHECKPOINT_BLOCK;

// Receives one line about something passed over, ignored or removed. NULL wherever it is taken: warn().
typedef void (*CheckpointNote)(void *ctx, const char *line);

// Everything that a checkpoint says beside the tensors. For saving the strings are the caller's; after
// checkpoint_read_info they belong to the struct (checkpoint_info_free).
typedef struct {
  int64_t step;     // updates made
  int64_t tokens;   // tokens trained on
  int64_t samples;  // samples consumed: the position in the sample order, all that the loader needs
  int64_t skipped;  // updates skipped because of non-finite values
  uint64_t seed;
  char data[160];       // fingerprint of the training data
  char build[160];      // version, compiler, engine
  const char *trainer;  // a JSON object of the trainer's own (spike window, ...), given back as it was; NULL: {}
  const char *options;  // the effective options as text; NULL: none
} CheckpointInfo;

typedef struct {
  char path[CHECKPOINT_PATH_MAX];
  int64_t step, tokens;
} CheckpointEntry;

typedef struct {
  CheckpointEntry *items;  // newest (highest step) first
  int n;
} CheckpointList;

PRINTF_LIKE(3, 4) static void checkpoint_tell(CheckpointNote note, void *ctx, const char *fmt, ...) {
  char line[2048];
  va_list args;
  va_start(args, fmt);
  vsnprintf(line, sizeof line, fmt, args);
  va_end(args);
  error_flatten(line);
  if (note)
    note(ctx, line);
  else
    warn("%s", line);
}

static MAYBE_UNUSED void checkpoint_silent(void *ctx, const char *line) { (void)ctx, (void)line; }

static MAYBE_UNUSED char *checkpoint_text_copy(const char *s) {
  char *copy = (char *)alloc_array((int64_t)strlen(s) + 1, 1, "checkpoint");
  return strcpy(copy, s);
}

// Hash of one block of an open file; errno 0: the file is too short.
static MAYBE_UNUSED int checkpoint_hash_block(int fd, int64_t block, int64_t file_size, uint64_t *hash) {
  const int64_t piece = 1 << 20;
  int64_t at = block * checkpoint_block, end = at + checkpoint_block < file_size ? at + checkpoint_block : file_size;
  char *buffer = (char *)malloc((size_t)piece);
  XXH3_state_t *state = XXH3_createState();
  int rc = buffer && state && XXH3_64bits_reset(state) == XXH_OK ? 0 : -1;
  if (rc) errno = ENOMEM;
  for (int64_t n; !rc && at < end; at += n) {
    n = end - at < piece ? end - at : piece;
    if (!(rc = file_pread(fd, buffer, (size_t)n, at))) XXH3_64bits_update(state, buffer, (size_t)n);
  }
  if (!rc) *hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  free(buffer);
  return rc;
}

// ----------------------------------------------------------------------------
// the manifest. Its last line holds the hash of all the bytes before that line, so damage to it shows too.

static const char manifest_tail[] = ",\n  \"manifest_xxh3\": \"%016llx\"\n}\n";
enum { MANIFEST_TAIL = 2 + 2 + 15 + 2 + 18 + 3 };

static MAYBE_UNUSED void manifest_add_file(json_t *files, const char *name, int64_t size, const uint64_t *hash, int n) {
  json_t *hashes = json_array();
  char hex[20];
  for (int i = 0; i < n; i++) {
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash[i]);
    json_array_append_new(hashes, json_string(hex));
  }
  json_array_append_new(files, json_pack("{s:s, s:I, s:o}", "name", name, "size", (json_int_t)size, "xxh3", hashes));
}

// The text of a manifest (free() it), or NULL with err set: info->trainer is not a JSON object. Takes over `files`.
static MAYBE_UNUSED char *manifest_build(const CheckpointInfo *info, json_t *files, Error *err) {
  char seed[32];
  snprintf(seed, sizeof seed, "%llu", (unsigned long long)info->seed);
  json_t *trainer = json_parse(info->trainer ? info->trainer : "{}", info->trainer ? strlen(info->trainer) : 2,
                               "state of the trainer", EXIT_INTERNAL, err);
  if (!trainer) {
    json_decref(files);
    return NULL;
  }
  json_t *j =
      json_pack("{s:i, s:I, s:I, s:I, s:I, s:s, s:o, s:o, s:o, s:o, s:I, s:o}", "format", CHECKPOINT_FORMAT, "step",
                (json_int_t)info->step, "tokens", (json_int_t)info->tokens, "samples", (json_int_t)info->samples,
                "skipped", (json_int_t)info->skipped, "seed", seed, "data", json_text(info->data), "build",
                json_text(info->build), "options", json_text(info->options ? info->options : ""), "trainer", trainer,
                "block", (json_int_t)checkpoint_block, "files", files);
  char *body = j ? json_print(j, JSON_INDENT(2)) : NULL, *text = NULL;
  json_decref(j);
  if (!body) {
    error_set(err, EXIT_CHECKPOINT, "manifest.json: no memory");
    return NULL;
  }
  size_t n = strlen(body) - 2;  // without "\n}"
  text = (char *)malloc(n + MANIFEST_TAIL + 8);
  if (text) {
    memcpy(text, body, n);
    snprintf(text + n, MANIFEST_TAIL + 8, manifest_tail, (unsigned long long)XXH3_64bits(text, n));
  } else {
    error_set(err, EXIT_MEMORY, "manifest.json: no memory");
  }
  free(body);
  return text;
}

// Reads and checks a manifest; json_decref the result. NULL with err set.
static MAYBE_UNUSED json_t *manifest_parse(const char *text, size_t size, const char *path, Error *err) {
  char tail[MANIFEST_TAIL + 8];
  size_t n = size > MANIFEST_TAIL ? size - MANIFEST_TAIL : 0;
  snprintf(tail, sizeof tail, manifest_tail, (unsigned long long)XXH3_64bits(text, n));
  if (!n || memcmp(text + n, tail, MANIFEST_TAIL)) {
    error_set(err, EXIT_CHECKPOINT, "%s: damaged: its own hash does not fit its %zu bytes", path, size);
    return NULL;
  }
  json_t *j = json_parse(text, size, path, EXIT_CHECKPOINT, err);
  int64_t v = 0;
  int rc = !j || json_get_int(j, "format", CHECKPOINT_FORMAT, CHECKPOINT_FORMAT, &v, path, err) ||
           json_get_int(j, "block", checkpoint_block, checkpoint_block, &v, path, err) ||
           json_get_int(j, "step", 0, INT64_MAX, &v, path, err) ||
           json_get_int(j, "tokens", 0, INT64_MAX, &v, path, err) ||
           json_get_int(j, "samples", 0, INT64_MAX, &v, path, err) ||
           json_get_int(j, "skipped", 0, INT64_MAX, &v, path, err) || !json_get_text(j, "seed", path, err) ||
           !json_get_text(j, "data", path, err) || !json_get_text(j, "build", path, err) ||
           !json_get_text(j, "options", path, err);
  if (!rc && (!json_is_object(json_object_get(j, "trainer")) || !json_is_array(json_object_get(j, "files"))))
    rc = error_set(err, EXIT_CHECKPOINT, "%s: needed \"trainer\" and \"files\"", path);
  if (!rc) return j;
  json_decref(j);
  return NULL;
}

static MAYBE_UNUSED json_t *manifest_read(const char *dir, Error *err) {
  char path[PATH_SIZE];
  size_t size = 0;
  if (path_join(path, dir, "manifest.json", err)) return NULL;
  char *text = file_read(path, 64 << 20, &size, EXIT_CHECKPOINT, err);
  json_t *j = text ? manifest_parse(text, size, path, err) : NULL;
  free(text);
  return j;
}

// ----------------------------------------------------------------------------
// verifying and finding

// One entry of the manifest's "files". level 0: name and size, 1: hashes too.
static MAYBE_UNUSED int checkpoint_verify_file(const char *dir, const json_t *f, int level, Error *err) {
  char path[PATH_SIZE];
  int64_t size = 0, found = 0;
  const char *name = json_get_text(f, "name", dir, err);
  const json_t *hashes = json_object_get(f, "xxh3");
  if (!name || json_get_int(f, "size", 0, INT64_MAX - checkpoint_block, &size, dir, err)) return EXIT_CHECKPOINT;
  if (!name[0] || name[0] == '.' || strchr(name, '/'))
    return error_set(err, EXIT_CHECKPOINT, "%s/manifest.json: \"%.80s\" is no file name", dir, name);
  int64_t blocks = size ? (size + checkpoint_block - 1) / checkpoint_block : 1;
  if ((int64_t)json_array_size(hashes) != blocks)
    return error_set(err, EXIT_CHECKPOINT, "%s/manifest.json: %s has %zu hashes, needed %lld", dir, name,
                     json_array_size(hashes), (long long)blocks);
  if (path_join(path, dir, name, err)) return EXIT_CHECKPOINT;
  int fd = file_open(path, &found, EXIT_CHECKPOINT, err), rc = 0;
  if (fd < 0) return EXIT_CHECKPOINT;
  if (found != size)
    rc = error_set(err, EXIT_CHECKPOINT, "%s: %lld bytes, needed %lld: %s", path, (long long)found, (long long)size,
                   found < size ? "cut off" : "not the file that was saved");
  for (int64_t b = 0; level && b < blocks && !rc; b++) {
    const char *want = json_string_value(json_array_get(hashes, (size_t)b));
    char hex[20];
    uint64_t hash = 0;
    if (checkpoint_hash_block(fd, b, size, &hash))
      rc = error_set(err, EXIT_CHECKPOINT, "%s: cannot be read: %s", path, errno ? strerror(errno) : "cut off");
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
    if (!rc && (!want || strcmp(want, hex)))
      rc = error_set(err, EXIT_CHECKPOINT, "%s: damaged: bytes from %lld on have hash %s, needed %.40s", path,
                     (long long)(b * checkpoint_block), hex, want ? want : "?");
  }
  close(fd);
  return rc;
}

// 0 when every file of the checkpoint has the size and the hashes of its manifest and no file is missing, else
// EXIT_CHECKPOINT with file, expected, found.
static MAYBE_UNUSED int checkpoint_verify(const char *dir, Error *err) {
  static const char *const needed[] = {"config.json", "model.safetensors", "trainer_state.safetensors"};
  json_t *j = manifest_read(dir, err);
  if (!j) return EXIT_CHECKPOINT;
  const json_t *files = json_object_get(j, "files");
  int rc = 0;
  for (size_t k = 0; k < sizeof needed / sizeof *needed && !rc; k++) {
    int there = 0;
    for (size_t i = 0; i < json_array_size(files); i++) {
      const char *name = json_string_value(json_object_get(json_array_get(files, i), "name"));
      there |= name && !strcmp(name, needed[k]);
    }
    if (!there) rc = error_set(err, EXIT_CHECKPOINT, "%s/manifest.json: does not list %s", dir, needed[k]);
  }
  for (int level = 0; level < 2 && !rc; level++)  // all sizes first: cheap, and names a cut file as such
    for (size_t i = 0; i < json_array_size(files) && !rc; i++)
      rc = checkpoint_verify_file(dir, json_array_get(files, i), level, err);
  json_decref(j);
  return rc;
}

static MAYBE_UNUSED void checkpoint_list_free(CheckpointList *list) {
  free(list->items);
  list->items = NULL, list->n = 0;
}

static MAYBE_UNUSED int checkpoint_compare(const void *a, const void *b) {
  const CheckpointEntry *x = (const CheckpointEntry *)a, *y = (const CheckpointEntry *)b;
  if (x->step != y->step) return x->step > y->step ? -1 : 1;
  return strcmp(y->path, x->path);
}

// As checkpoint_list; *bad counts the step-* folders passed over.
static MAYBE_UNUSED int checkpoint_scan(const char *out, CheckpointList *list, int *bad, CheckpointNote note,
                                        void *note_ctx, Error *err) {
  memset(list, 0, sizeof *list);
  *bad = 0;
  DIR *dir = opendir(out);
  if (!dir && errno == ENOENT) return 0;
  if (!dir) return error_set(err, EXIT_CHECKPOINT, "%s: cannot be read: %s", out, strerror(errno));
  struct dirent *e;
  while ((e = readdir(dir))) {
    char path[PATH_SIZE], file[PATH_SIZE];
    Error why = {0, ""};
    int named = !strncmp(e->d_name, "step-", 5);
    if (e->d_name[0] == '.' || path_join(path, out, e->d_name, &why)) continue;
    if (path_join(file, path, "manifest.json", &why) || (!named && !path_exists(file))) continue;
    json_t *j = manifest_read(path, &why);
    if (!j) {
      checkpoint_tell(note, note_ctx, "passed over %s: %.1000s", path, why.text);
      (*bad)++;
      continue;
    }
    list->items = (CheckpointEntry *)realloc(list->items, (size_t)(list->n + 1) * sizeof(CheckpointEntry));
    if (!list->items) fail(EXIT_MEMORY, "%s: no memory for the list of checkpoints", out);
    CheckpointEntry *entry = &list->items[list->n++];
    memcpy(entry->path, path, sizeof path);
    entry->step = json_integer_value(json_object_get(j, "step"));
    entry->tokens = json_integer_value(json_object_get(j, "tokens"));
    json_decref(j);
  }
  closedir(dir);
  if (list->n) qsort(list->items, (size_t)list->n, sizeof *list->items, checkpoint_compare);
  return 0;
}

// All folders of `out` that hold a readable manifest of this format; folders named step-* that do not are told to
// `note`. 0, or EXIT_CHECKPOINT when `out` cannot be read. A folder that does not exist holds no checkpoints.
static MAYBE_UNUSED int checkpoint_list(const char *out, CheckpointList *list, CheckpointNote note, void *note_ctx,
                                        Error *err) {
  int bad = 0;
  return checkpoint_scan(out, list, &bad, note, note_ctx, err);
}

// --resume auto: the newest checkpoint whose files hold (checkpoint_verify). path[CHECKPOINT_PATH_MAX] becomes "" when
// there is none at all; note hears which ones were passed over and why. EXIT_CHECKPOINT when there are some but none
// holds.
static MAYBE_UNUSED int checkpoint_find(const char *out, char *path, CheckpointNote note, void *note_ctx, Error *err) {
  CheckpointList list;
  int bad = 0, found = 0;
  path[0] = 0;
  if (checkpoint_scan(out, &list, &bad, note, note_ctx, err)) return EXIT_CHECKPOINT;
  for (int i = 0; i < list.n && !found; i++) {
    Error why = {0, ""};
    if (checkpoint_verify(list.items[i].path, &why)) {
      checkpoint_tell(note, note_ctx, "passed over %s: %.1000s", list.items[i].path, why.text);
      bad++;
    } else {
      memcpy(path, list.items[i].path, PATH_SIZE);
      found = 1;
    }
  }
  checkpoint_list_free(&list);
  if (!found && bad)
    return error_set(err, EXIT_CHECKPOINT,
                     "%s: none of its %d checkpoints is whole: choose another --out or remove them", out, bad);
  return 0;
}

static MAYBE_UNUSED void checkpoint_info_free(CheckpointInfo *info) {
  free((void *)info->trainer);
  free((void *)info->options);
  info->trainer = info->options = NULL;
}

// Reads config.json (into *c) and manifest.json (into *info) of a checkpoint; either may be NULL.
static MAYBE_UNUSED int checkpoint_read_info(const char *dir, Config *c, CheckpointInfo *info, Error *err) {
  if (info) {
    memset(info, 0, sizeof *info);
    json_t *j = manifest_read(dir, err);
    if (!j) return EXIT_CHECKPOINT;
    info->step = json_integer_value(json_object_get(j, "step"));
    info->tokens = json_integer_value(json_object_get(j, "tokens"));
    info->samples = json_integer_value(json_object_get(j, "samples"));
    info->skipped = json_integer_value(json_object_get(j, "skipped"));
    info->seed = strtoull(json_string_value(json_object_get(j, "seed")), NULL, 10);
    snprintf(info->data, sizeof info->data, "%s", json_string_value(json_object_get(j, "data")));
    snprintf(info->build, sizeof info->build, "%s", json_string_value(json_object_get(j, "build")));
    info->options = checkpoint_text_copy(json_string_value(json_object_get(j, "options")));
    info->trainer = json_print(json_object_get(j, "trainer"), JSON_COMPACT);
    json_decref(j);
    if (!info->trainer) fail(EXIT_MEMORY, "%s: no memory for its manifest", dir);
  }
  if (c && hf_config_read(dir, c, err)) {
    if (info) checkpoint_info_free(info);
    return EXIT_CHECKPOINT;
  }
  return 0;
}

#endif  // GDN_MANIFEST_H
