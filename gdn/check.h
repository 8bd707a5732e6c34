// check.h: how the program says that something is wrong, and with which exit code.
//
// An error is one sentence for the person who made it: what, where, found, needed, which option to change.
// Two ways: fail() ends the program (nothing can go on); functions that a caller may recover from (readers of
// shards, checkpoints, tokenizers) return an exit code (0 is success) and leave the sentence in an Error.
//
// defines: ExitCode, Error, error_set, fail, fail_error, warn, alloc_array, alloc_zeroed, program_name,
//          program_rank
#ifndef GDN_CHECK_H
#define GDN_CHECK_H

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt_index, first_arg) __attribute__((format(printf, fmt_index, first_arg), unused))
#define MAYBE_UNUSED __attribute__((unused))
#else
#define PRINTF_LIKE(fmt_index, first_arg)
#define MAYBE_UNUSED
#endif

typedef enum {
  EXIT_USAGE = 2,       // an option or its value
  EXIT_CONFIG = 3,      // a model or a machine that cannot be used
  EXIT_DATA = 4,        // shards, tokenizer, text
  EXIT_CHECKPOINT = 5,  // a checkpoint, or the folder it should go to
  EXIT_MEMORY = 6,      // not enough memory
  EXIT_INTERNAL = 70,   // a fault of the program itself
  EXIT_STOPPED = 75,    // stopped on request, checkpoint saved: run again with --resume
  EXIT_HANG = 76,       // the watchdog saw no progress
  EXIT_DIVERGED = 78    // too many non-finite steps in a row
} ExitCode;

// The name that begins every message; main may set it.
static const char *program_name MAYBE_UNUSED = "train_gdn";

// Which process of several this is (comm.h). Warnings are rank 0's alone: all ranks would say the same.
static int program_rank MAYBE_UNUSED = 0;

typedef struct {
  int code;         // an ExitCode, 0 while nothing is wrong
  char text[1024];  // one line, no newline
} Error;

static inline void error_flatten(char *s) {  // a message is one line whatever a file name holds
  for (; *s; s++)
    if (*s == '\n' || *s == '\r') *s = ' ';
}

// Records an error and returns its code, so that a reader can write `return error_set(err, EXIT_DATA, ...)`.
PRINTF_LIKE(3, 4) static int error_set(Error *err, int code, const char *fmt, ...) {
  if (err) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, args);
    va_end(args);
    error_flatten(err->text);
    err->code = code;
  }
  return code;
}

// Ends the program with one line on stderr.
#if defined(__GNUC__)
__attribute__((noreturn))
#endif
PRINTF_LIKE(2, 3) static void fail(int code, const char *fmt, ...) {
  char text[2048];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  error_flatten(text);
  fflush(stdout);
  if (program_rank)
    fprintf(stderr, "%s: error: %s (rank %d)\n", program_name, text, program_rank);
  else
    fprintf(stderr, "%s: error: %s\n", program_name, text);
  fflush(stderr);
  exit(code);
}

#if defined(__GNUC__)
__attribute__((noreturn, unused))
#endif
static void
fail_error(const Error *err) {
  fail(err->code ? err->code : EXIT_INTERNAL, "%s", err->text);
}

PRINTF_LIKE(1, 2) static void warn(const char *fmt, ...) {
  char text[2048];
  va_list args;
  if (program_rank) return;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  error_flatten(text);
  fflush(stdout);
  fprintf(stderr, "%s: warning: %s\n", program_name, text);
}

// Memory or exit 6. `what` names the use in the message. Never returns NULL, not even for 0 elements.
static MAYBE_UNUSED void *alloc_array(int64_t count, size_t size, const char *what) {
  if (count < 0 || (size && (uint64_t)count > SIZE_MAX / size))
    fail(EXIT_MEMORY, "%s: %lld elements of %zu bytes do not fit into memory", what, (long long)count, size);
  size_t bytes = (size_t)count * size;
  void *p = malloc(bytes ? bytes : 1);
  if (!p)
    fail(EXIT_MEMORY, "%s: cannot allocate %.1f MiB; use a smaller --batch or model", what, (double)bytes / 1048576.0);
  return p;
}

static MAYBE_UNUSED void *alloc_zeroed(int64_t count, size_t size, const char *what) {
  void *p = alloc_array(count, size, what);
  memset(p, 0, (size_t)count * size);
  return p;
}

#endif  // GDN_CHECK_H
