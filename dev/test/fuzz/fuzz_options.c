// fuzz_options.c: a command line, one argument a line; what follows a line of --- is a configuration file. What is
// accepted is written as a configuration file, and that must be accepted too.
#include "fuzz.h"
#include "gdn/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char text[4096], *argv[64], *file = NULL, *next;
  int argc = 0;
  if (size >= sizeof text) return 0;
  memcpy(text, data, size);
  text[size] = 0;
  argv[argc++] = (char *)"train_gdn";
  for (char *s = text; s && *s && argc < 60; s = next) {
    next = strchr(s, '\n');
    if (next) *next++ = 0;
    if (!strcmp(s, "---")) {
      file = next;
      break;
    }
    if (!strncmp(s, "--config", 8)) continue;  // names of files are not for the fuzzer to choose
    argv[argc++] = s;
  }
  if (file) {
    argv[argc++] = (char *)"--config";
    argv[argc++] = (char *)fuzz_file(0, file, size - (size_t)(file - text));
  }
  Options o;
  Config c;
  Error err = {0, ""};
  int code = options_parse_argv(&o, argc, argv, &err);
  fuzz_check_error(code, &err);
  if (code || o.help) return 0;
  code = options_to_config(&o, &c, &err);
  fuzz_check_error(code, &err);
  if (!code) (void)options_schedule(&o);
  char *written = NULL;
  size_t bytes = 0;
  FILE *f = open_memstream(&written, &bytes);
  if (!f) abort();
  options_write(f, &o);
  fclose(f);
  Options again;
  char *args[] = {(char *)"train_gdn", (char *)"--config", (char *)fuzz_file(1, written, bytes)};
  if (o.command == options_default().command && options_parse_argv(&again, 3, args, &err)) {
    fprintf(stderr, "%s\n%s\n", err.text, written);
    abort();
  }
  free(written);
  return 0;
}
