// fuzz_manifest.c: manifest.json of a checkpoint. The first byte: 1 puts the manifest's own hash behind the bytes.
#include "fuzz.h"
#include "gdn/manifest.h"

static char dir[64];  // holds the manifest and nothing else

static void remove_dir(void) { folder_remove(dir, 0); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static char text[1 << 16];
  if (size < 1 || size > sizeof text - 128) return 0;
  int fix = data[0] & 1;
  memcpy(text, data + 1, --size);
  if (fix) {
    snprintf(text + size, 128, manifest_tail, (unsigned long long)XXH3_64bits(text, size));
    size += strlen(text + size);
  }
  Error err = {0, ""};
  json_t *j = manifest_parse(text, size, "manifest.json", &err);
  if (!j) {
    fuzz_check_error(err.code ? err.code : -1, &err);
    return 0;
  }
  json_decref(j);
  if (!dir[0]) {
    snprintf(dir, sizeof dir, "/dev/shm/fuzz_manifest_XXXXXX");
    if (!mkdtemp(dir) || atexit(remove_dir)) abort();
  }
  char path[PATH_SIZE];
  CheckpointInfo info;
  snprintf(path, sizeof path, "%s/manifest.json", dir);
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(text, 1, size, f) != size || fclose(f)) abort();
  if (!checkpoint_verify(dir, &err)) abort();  // none of the files it lists are there
  fuzz_check_error(EXIT_CHECKPOINT, &err);
  int code = checkpoint_read_info(dir, NULL, &info, &err);
  fuzz_check_error(code, &err);
  if (!code) checkpoint_info_free(&info);
  return 0;
}
