// fuzz.h: what the fuzz targets share. Each gets bytes of any kind and hands them to a reader, which must return a code
// and one sentence, or accept them; what it accepts is used as the program would use it. Checksums, which no mutation
// could guess, are put right by the target when the first byte of the input asks for it.
//
// defines: fuzz_file, fuzz_check_error
#ifndef FUZZ_H
#define FUZZ_H

#include "gdn/shards.h"
#include "gdn/json.h"
#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// A name by which the bytes can be opened as a file, until the next call with the same slot (0 or 1).
static MAYBE_UNUSED const char *fuzz_file(int slot, const void *data, size_t size) {
  static char name[2][64];
  static int fd[2] = {-1, -1};
  if (fd[slot] < 0) fd[slot] = memfd_create("fuzz", MFD_CLOEXEC);
  if (fd[slot] < 0 || ftruncate(fd[slot], 0) || pwrite(fd[slot], data, size, 0) != (ssize_t)size) abort();
  snprintf(name[slot], sizeof name[slot], "/proc/self/fd/%d", fd[slot]);
  return name[slot];
}

// A reader that refuses says so in one line, with the code that it returns.
static MAYBE_UNUSED void fuzz_check_error(int code, const Error *err) {
  if (!code) return;
  if (err->code != code || !err->text[0] || strchr(err->text, '\n') || strlen(err->text) >= sizeof err->text) abort();
}

#endif  // FUZZ_H
