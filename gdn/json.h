// json.h: files read and written whole, with every step checked, and JSON in them.
//
// All writing to disk that must survive a crash goes through the io_ functions here: each looks at its result, takes
// part in fault injection (io_fault) and leaves errno for the caller's sentence. JSON is parsed by jansson; the
// json_get functions check type and range and name file, key and what was needed.
//
// defines: PATH_SIZE, io_fault, io_create, io_pwrite, io_sync, io_close, io_rename, io_mkdir, io_sync_dir, path_join,
//          path_exists, file_read, file_write, file_replace, folder_remove, format_bytes, json_parse, json_read_file,
//          json_text, json_print, json_get_int, json_get_real, json_get_text, json_get_bool
#ifndef GDN_JSON_H
#define GDN_JSON_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#include "check.h"

enum { PATH_SIZE = 4096 };

// ----------------------------------------------------------------------------
// checked writing

// Fault injection for tests: called before every operation that changes the disk ("create", "write", "sync", "close",
// "rename", "mkdir", "truncate", "syncdir"); a result other than 0 is the errno the operation fails with.
static int (*io_fault)(const char *op, const char *path) MAYBE_UNUSED = NULL;

static inline int io_refused(const char *op, const char *path) {
  int e = io_fault ? io_fault(op, path) : 0;
  if (e) errno = e;
  return e != 0;
}

// All return 0, or -1 with errno set. io_create returns a file descriptor.
static inline int io_create(const char *path) {
  if (io_refused("create", path)) return -1;
  return open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
}

static inline int io_pwrite(int fd, const char *path, const void *data, size_t size, int64_t offset) {
  const char *p = (const char *)data;
  if (io_refused("write", path)) return -1;
  while (size) {
    ssize_t n = pwrite(fd, p, size < (1u << 30) ? size : (1u << 30), (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;
    if (n <= 0) return -1;
    p += n, size -= (size_t)n, offset += n;
  }
  return 0;
}

static inline int io_truncate(int fd, const char *path, int64_t size) {
  return io_refused("truncate", path) ? -1 : ftruncate(fd, (off_t)size);
}

static inline int io_sync(int fd, const char *path) {
  if (io_refused("sync", path)) return -1;
  int rc;
  do rc = fdatasync(fd);
  while (rc < 0 && errno == EINTR);
  return rc;
}

static inline int io_close(int fd, const char *path) {  // the descriptor is gone in either case
  int rc = close(fd);
  return io_refused("close", path) ? -1 : rc;
}

static inline int io_rename(const char *from, const char *to) {
  return io_refused("rename", to) ? -1 : rename(from, to);
}

static inline int io_mkdir(const char *path) { return io_refused("mkdir", path) ? -1 : mkdir(path, 0777); }

static inline int io_sync_dir(const char *path) {  // makes the names in a folder durable
  if (io_refused("syncdir", path)) return -1;
  int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  int rc = fsync(fd), e = errno;
  close(fd);
  if (rc && (e == EINVAL || e == ENOTSUP)) return 0;  // file systems that have no such call
  errno = e;
  return rc;
}

// ----------------------------------------------------------------------------
// paths and whole files

// dst[PATH_SIZE] = folder/name. EXIT_CHECKPOINT when it does not fit.
static inline int path_join(char *dst, const char *folder, const char *name, Error *err) {
  size_t a = strlen(folder), b = strlen(name);
  if (a + b + 2 > PATH_SIZE) return error_set(err, EXIT_CHECKPOINT, "path %.200s... is too long", folder);
  memmove(dst, folder, a);
  dst[a] = '/';
  memcpy(dst + a + 1, name, b + 1);
  return 0;
}

static inline int path_exists(const char *path) { return access(path, F_OK) == 0; }

static inline void format_bytes(char *dst, size_t size, double bytes) {
  if (bytes >= 1e9)
    snprintf(dst, size, "%.2f GB", bytes / 1e9);
  else if (bytes >= 1e6)
    snprintf(dst, size, "%.1f MB", bytes / 1e6);
  else
    snprintf(dst, size, "%.1f kB", bytes / 1e3);
}

// Opens a plain file for reading and reports its size; -1 with err set (code) when it cannot be.
static inline int file_open(const char *path, int64_t *size, int code, Error *err) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat st;
  if (fd < 0) {
    error_set(err, code, "%s: %s", path, errno == ENOENT ? "file is missing" : strerror(errno));
    return -1;
  }
  if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
    error_set(err, code, "%s: not a plain file", path);
    close(fd);
    return -1;
  }
  *size = st.st_size;
  return fd;
}

// Reads exactly `size` bytes at an offset. 0, or -1: error or end of file (errno 0).
static inline int file_pread(int fd, void *dst, size_t size, int64_t offset) {
  char *p = (char *)dst;
  while (size) {
    ssize_t n = pread(fd, p, size < (1u << 30) ? size : (1u << 30), (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = 0;
    if (n <= 0) return -1;
    p += n, size -= (size_t)n, offset += n;
  }
  return 0;
}

// A whole file of at most `max` bytes, with a 0 behind it; free() it. NULL with err set.
static inline char *file_read(const char *path, int64_t max, size_t *size, int code, Error *err) {
  int64_t bytes = 0;
  int fd = file_open(path, &bytes, code, err);
  if (fd < 0) return NULL;
  char *text = NULL;
  if (bytes > max) {
    error_set(err, code, "%s: %lld bytes, needed at most %lld", path, (long long)bytes, (long long)max);
  } else if (!(text = (char *)malloc((size_t)bytes + 1))) {
    error_set(err, EXIT_MEMORY, "%s: no memory for %lld bytes", path, (long long)bytes);
  } else if (file_pread(fd, text, (size_t)bytes, 0)) {
    error_set(err, code, "%s: cannot be read: %s", path, errno ? strerror(errno) : "it became shorter");
    free(text);
    text = NULL;
  } else {
    text[bytes] = 0;
    *size = (size_t)bytes;
  }
  close(fd);
  return text;
}

// Creates or overwrites a file and syncs it. On a failure the file may be half there: for files in temporary folders.
static inline int file_write(const char *path, const void *data, size_t size, int code, Error *err) {
  int fd = io_create(path);
  if (fd < 0) return error_set(err, code, "%s: cannot be created: %s", path, strerror(errno));
  int bad = io_pwrite(fd, path, data, size, 0) || io_sync(fd, path), e = errno;
  if (io_close(fd, path) && !bad) bad = 1, e = errno;
  return bad ? error_set(err, code, "%s: cannot be written: %s", path, strerror(e)) : 0;
}

// Replaces a file as a whole: the old content or the new one is there at any moment.
static inline int file_replace(const char *path, const void *data, size_t size, int code, Error *err) {
  char tmp[PATH_SIZE + 8], folder[PATH_SIZE];
  snprintf(tmp, sizeof tmp, "%s.tmp", path);
  int rc = file_write(tmp, data, size, code, err);
  if (!rc && io_rename(tmp, path)) rc = error_set(err, code, "%s: cannot be replaced: %s", path, strerror(errno));
  if (rc) {
    unlink(tmp);
    return rc;
  }
  snprintf(folder, sizeof folder, "%s", path);
  char *slash = strrchr(folder, '/');
  if (slash) *slash = 0;
  if (io_sync_dir(slash ? folder : ".")) return error_set(err, code, "%s: cannot be synced: %s", path, strerror(errno));
  return 0;
}

// Removes a folder and the files in it (depth: folders inside folders followed). 0, or -1 with errno.
static inline int folder_remove(const char *path, int depth) {
  DIR *dir = opendir(path);
  if (!dir) return -1;
  struct dirent *e;
  char sub[PATH_SIZE];
  while ((e = readdir(dir))) {
    struct stat st;
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || path_join(sub, path, e->d_name, NULL)) continue;
    if (depth > 0 && !lstat(sub, &st) && S_ISDIR(st.st_mode))
      folder_remove(sub, depth - 1);
    else
      unlink(sub);
  }
  closedir(dir);
  return rmdir(path);
}

// ----------------------------------------------------------------------------
// JSON

// Text to a JSON object (json_decref it). NULL with err set: not JSON, a key twice, or not an object.
static inline json_t *json_parse(const char *text, size_t size, const char *path, int code, Error *err) {
  json_error_t e;
  json_t *j = json_loadb(text, size, JSON_REJECT_DUPLICATES, &e);
  if (!j) {
    error_set(err, code, "%s: not valid JSON (line %d: %s)", path, e.line, e.text);
  } else if (!json_is_object(j)) {
    error_set(err, code, "%s: needed a JSON object", path);
    json_decref(j);
    j = NULL;
  }
  return j;
}

static inline json_t *json_read_file(const char *path, int64_t max, int code, Error *err) {
  size_t size = 0;
  char *text = file_read(path, max, &size, code, err);
  json_t *j = text ? json_parse(text, size, path, code, err) : NULL;
  free(text);
  return j;
}

// A text as JSON; bytes that are not UTF-8 (a path of another encoding) become question marks.
static inline json_t *json_text(const char *s) {
  json_t *j = json_string(s);
  if (j) return j;
  char *copy = (char *)alloc_array((int64_t)strlen(s) + 1, 1, "text");
  strcpy(copy, s);
  for (char *p = copy; *p; p++)
    if ((unsigned char)*p >= 128) *p = '?';
  j = json_string(copy);
  free(copy);
  return j;
}

// j as text (free() it), NULL when memory is short. jansson's writer can lose a piece of the text without saying so
// when an allocation fails (2.14): what it wrote is read back and compared.
static MAYBE_UNUSED char *json_print(const json_t *j, size_t flags) {
  char *text = j ? json_dumps(j, flags) : NULL;
  json_t *again = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
  if (text && (!again || !json_equal(j, again))) {
    free(text);
    text = NULL;
  }
  json_decref(again);
  return text;
}

// Values of an object by key. 0, or EXIT_CHECKPOINT with file, key, found and needed. `path` is for the message.
static inline int json_get_int(const json_t *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                               const char *path, Error *err) {
  const json_t *v = json_object_get(obj, key);
  if (!v) return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\" is missing", path, key);
  if (!json_is_integer(v)) return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\": needed a whole number", path, key);
  int64_t n = json_integer_value(v);
  if (n < min || n > max)
    return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\" is %lld: needed %lld to %lld", path, key, (long long)n,
                     (long long)min, (long long)max);
  *out = n;
  return 0;
}

static inline int json_get_real(const json_t *obj, const char *key, double *out, const char *path, Error *err) {
  const json_t *v = json_object_get(obj, key);
  if (!v || !json_is_number(v) || !isfinite(json_number_value(v)))
    return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\": %s", path, key, v ? "needed a number" : "is missing");
  *out = json_number_value(v);
  return 0;
}

static inline int json_get_bool(const json_t *obj, const char *key, int *out, const char *path, Error *err) {
  const json_t *v = json_object_get(obj, key);
  if (!v || !json_is_boolean(v))
    return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\": %s", path, key, v ? "needed true or false" : "is missing");
  *out = json_is_true(v);
  return 0;
}

// The text belongs to the object. NULL with err set.
static inline const char *json_get_text(const json_t *obj, const char *key, const char *path, Error *err) {
  const json_t *v = json_object_get(obj, key);
  if (v && json_is_string(v) && strlen(json_string_value(v)) == json_string_length(v)) return json_string_value(v);
  error_set(err, EXIT_CHECKPOINT, "%s: \"%s\": %s", path, key, v ? "needed a text" : "is missing");
  return NULL;
}

#endif  // GDN_JSON_H
