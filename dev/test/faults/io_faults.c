// io_faults.c: an interposed library (LD_PRELOAD) that makes calls of a program fail, slows them down and records them.
//
//   gcc -O1 -fPIC -shared io_faults.c -o io_faults.so -ldl
//
// Only calls on files below IO_FAULTS_ROOT count. By the environment:
//   IO_FAULTS        OP:N:WHAT[:COUNT],...  from the N-th call of OP on (the first is 1), COUNT calls (1; +: all) fail.
//                    WHAT: EIO, ENOSPC, EROFS, EACCES, EMFILE, ENOMEM, or SHORT: a write that takes half of the bytes
//   IO_FAULTS_MATCH  text that the path must hold for a call to be counted by IO_FAULTS
//   IO_FAULTS_DELAY  OP:MICROSECONDS,...    sleeps before each call
//   IO_FAULTS_TRACE  a file that gets one line a call, in order: OP RESULT PATH [PATH]. RESULT is 0 or an errno
// OP: open write pwrite pread read fsync fdatasync ftruncate rename unlink rmdir mkdir mmap close flock, and malloc,
// which counts allocations of 1 KiB and more anywhere in the program. A close that fails closes nevertheless.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 4096, MAX_RULES = 16, PATH_BYTES = 1024, SHORT = -1 };

typedef struct {
  char op[16];
  long first, count;  // of a delay: first is microseconds
  int what;           // errno, or SHORT
} Rule;

static Rule rules[MAX_RULES], delays[MAX_RULES];
static int n_rules, n_delays, ready, trace_fd = -1;
static long counters[MAX_RULES];
static const char *root, *match;
static char fd_path[MAX_FD][PATH_BYTES];

static int what_number(const char *name) {
  static const struct {
    const char *name;
    int number;
  } table[] = {{"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EROFS", EROFS}, {"EACCES", EACCES},
               {"EMFILE", EMFILE}, {"ENOMEM", ENOMEM}, {"SHORT", SHORT}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(name, table[i].name)) return table[i].number;
  fprintf(stderr, "io_faults: unknown fault %s\n", name);
  _exit(99);
}

// OP:N[:WHAT[:COUNT]],...
static int rules_parse(const char *text, Rule *list, int with_what) {
  int n = 0;
  for (const char *s = text; s && *s && n < MAX_RULES; n++) {
    char what[16] = "", count[16] = "1";
    int got = sscanf(s, "%15[^:]:%ld:%15[^:,]:%15[^,]", list[n].op, &list[n].first, what, count);
    if (got < 2 + with_what) {
      fprintf(stderr, "io_faults: cannot read %s\n", s);
      _exit(99);
    }
    list[n].what = with_what ? what_number(what) : 0;
    list[n].count = count[0] == '+' ? (1L << 60) : atol(count);
    s = strchr(s, ',');
    if (s) s++;
  }
  return n;
}

__attribute__((constructor)) static void io_faults_start(void) {
  root = getenv("IO_FAULTS_ROOT");
  match = getenv("IO_FAULTS_MATCH");
  n_rules = rules_parse(getenv("IO_FAULTS"), rules, 1);
  n_delays = rules_parse(getenv("IO_FAULTS_DELAY"), delays, 0);
  const char *trace = getenv("IO_FAULTS_TRACE");
  if (trace) trace_fd = (int)syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  ready = 1;
}

static int below_root(const char *path) {
  size_t n = root ? strlen(root) : 0;
  return n && path && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static const char *path_of(int fd) { return fd >= 0 && fd < MAX_FD && fd_path[fd][0] ? fd_path[fd] : NULL; }

static void nap(const char *op) {
  for (int i = 0; i < n_delays; i++)
    if (!strcmp(op, delays[i].op)) {
      struct timespec t = {delays[i].first / 1000000, delays[i].first % 1000000 * 1000};
      while (nanosleep(&t, &t) && errno == EINTR) continue;
    }
}

// What the call shall do: 0 go on, SHORT, or an errno.
static int verdict(const char *op, const char *path) {
  int result = 0;
  if (match && !strstr(path, match)) return 0;
  for (int i = 0; i < n_rules; i++) {
    if (strcmp(op, rules[i].op)) continue;
    long n = __atomic_add_fetch(&counters[i], 1, __ATOMIC_SEQ_CST);
    if (n >= rules[i].first && n - rules[i].first < rules[i].count) result = rules[i].what;
  }
  return result;
}

static void trace(const char *op, int result, const char *path, const char *to) {
  char line[2 * PATH_BYTES + 64];
  if (trace_fd < 0) return;
  int keep = errno;
  int n = snprintf(line, sizeof line, "%s %d %s%s%s\n", op, result, path, to ? " " : "", to ? to : "");
  syscall(SYS_write, trace_fd, line, n);
  errno = keep;
}

static void *next(const char *name) {
  void *f = dlsym(RTLD_NEXT, name);
  if (!f) _exit(98);
  return f;
}

// A call OP on PATH: delay, verdict, trace. FAILS is returned with errno on a fault.
#define BEGIN(op, path, to, fails)                   \
  int counted = ready && below_root(path), what = 0; \
  if (counted) {                                     \
    nap(op);                                         \
    what = verdict(op, path);                        \
    trace(op, what, path, to);                       \
    if (what > 0) {                                  \
      errno = what;                                  \
      return fails;                                  \
    }                                                \
  }

// ----------------------------------------------------------------------------
// files

static int opened(int fd, const char *path) {
  if (fd >= 0 && fd < MAX_FD) snprintf(fd_path[fd], PATH_BYTES, "%s", below_root(path) ? path : "");
  return fd;
}

#define OPEN_BODY(name)                                          \
  mode_t mode = 0;                                               \
  if (flags & (O_CREAT | O_TMPFILE)) {                           \
    va_list a;                                                   \
    va_start(a, flags);                                          \
    mode = va_arg(a, mode_t);                                    \
    va_end(a);                                                   \
  }                                                              \
  static int (*real)(const char *, int, ...);                    \
  if (!real) real = (int (*)(const char *, int, ...))next(name); \
  BEGIN("open", path, NULL, -1)                                  \
  return opened(real(path, flags, mode), path);

int open(const char *path, int flags, ...) { OPEN_BODY("open") }
int open64(const char *path, int flags, ...) { OPEN_BODY("open64") }

int close(int fd) {
  static int (*real)(int);
  if (!real) real = (int (*)(int))next("close");
  const char *path = path_of(fd);
  char copy[PATH_BYTES];
  if (!path) return real(fd);
  snprintf(copy, sizeof copy, "%s", path);
  fd_path[fd][0] = 0;
  int rc = real(fd);
  BEGIN("close", copy, NULL, -1)
  return rc;
}

ssize_t write(int fd, const void *data, size_t size) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t))next("write");
  BEGIN("write", path_of(fd), NULL, -1)
  return real(fd, data, what == SHORT && size > 1 ? size / 2 : size);
}

#define PWRITE_BODY(name)                                                     \
  static ssize_t (*real)(int, const void *, size_t, off_t);                   \
  if (!real) real = (ssize_t(*)(int, const void *, size_t, off_t))next(name); \
  BEGIN("pwrite", path_of(fd), NULL, -1)                                      \
  return real(fd, data, what == SHORT && size > 1 ? size / 2 : size, offset);

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset){PWRITE_BODY("pwrite")} ssize_t
    pwrite64(int fd, const void *data, size_t size, off_t offset){PWRITE_BODY("pwrite64")}
#define PREAD_BODY(name)                                                \
  static ssize_t (*real)(int, void *, size_t, off_t);                   \
  if (!real) real = (ssize_t(*)(int, void *, size_t, off_t))next(name); \
  BEGIN("pread", path_of(fd), NULL, -1)                                 \
  return real(fd, data, what == SHORT && size > 1 ? size / 2 : size, offset);

ssize_t pread(int fd, void *data, size_t size, off_t offset){PREAD_BODY("pread")} ssize_t
    pread64(int fd, void *data, size_t size, off_t offset){PREAD_BODY("pread64")}

ssize_t read(int fd, void *data, size_t size) {
  static ssize_t (*real)(int, void *, size_t);
  if (!real) real = (ssize_t(*)(int, void *, size_t))next("read");
  BEGIN("read", path_of(fd), NULL, -1)
  return real(fd, data, size);
}

int fsync(int fd) {
  static int (*real)(int);
  if (!real) real = (int (*)(int))next("fsync");
  BEGIN("fsync", path_of(fd), NULL, -1)
  return real(fd);
}

int fdatasync(int fd) {
  static int (*real)(int);
  if (!real) real = (int (*)(int))next("fdatasync");
  BEGIN("fdatasync", path_of(fd), NULL, -1)
  return real(fd);
}

int ftruncate(int fd, off_t size) {
  static int (*real)(int, off_t);
  if (!real) real = (int (*)(int, off_t))next("ftruncate");
  BEGIN("ftruncate", path_of(fd), NULL, -1)
  return real(fd, size);
}

int flock(int fd, int operation) {
  static int (*real)(int, int);
  if (!real) real = (int (*)(int, int))next("flock");
  BEGIN("flock", path_of(fd), NULL, -1)
  return real(fd, operation);
}

// ----------------------------------------------------------------------------
// names

int rename(const char *from, const char *to) {
  static int (*real)(const char *, const char *);
  if (!real) real = (int (*)(const char *, const char *))next("rename");
  BEGIN("rename", from, to, -1)
  return real(from, to);
}

int mkdir(const char *path, mode_t mode) {
  static int (*real)(const char *, mode_t);
  if (!real) real = (int (*)(const char *, mode_t))next("mkdir");
  BEGIN("mkdir", path, NULL, -1)
  return real(path, mode);
}

int rmdir(const char *path) {
  static int (*real)(const char *);
  if (!real) real = (int (*)(const char *))next("rmdir");
  BEGIN("rmdir", path, NULL, -1)
  return real(path);
}

int unlink(const char *path) {
  static int (*real)(const char *);
  if (!real) real = (int (*)(const char *))next("unlink");
  BEGIN("unlink", path, NULL, -1)
  return real(path);
}

long syscall(long number, ...) {  // renameat2 has no other door in older C libraries
  static long (*real)(long, ...);
  if (!real) real = (long (*)(long, ...))next("syscall");
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_renameat2) {
    const char *from = (const char *)a[1], *to = (const char *)a[3];
    BEGIN("rename", from, to, -1)
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// ----------------------------------------------------------------------------
// memory

#define MMAP_BODY(name)                                                          \
  static void *(*real)(void *, size_t, int, int, int, off_t);                    \
  if (!real) real = (void *(*)(void *, size_t, int, int, int, off_t))next(name); \
  BEGIN("mmap", path_of(fd), NULL, MAP_FAILED)                                   \
  return real(at, size, protection, flags, fd, offset);

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) { MMAP_BODY("mmap") }
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset) { MMAP_BODY("mmap64") }

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static int memory_fails(size_t size) {
  if (!ready || size < 1024 || !n_rules) return 0;
  if (!verdict("malloc", match ? match : "")) return 0;
  errno = ENOMEM;
  return 1;
}

void *malloc(size_t size) { return memory_fails(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return memory_fails(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return memory_fails(size) ? NULL : __libc_realloc(p, size); }
