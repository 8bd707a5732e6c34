// fuzz_safetensors.c: a safetensors file: its header, then the tensors. The first byte: 1 writes the length of the
// header up to the last '}' into its first 8 bytes.
#include "fuzz.h"
#include "gdn/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static uint8_t file[1 << 16];
  static float values[1 << 15];
  if (size < 1 || size > sizeof file) return 0;
  int fix = data[0] & 1;
  memcpy(file, data + 1, --size);
  if (fix && size >= 8) {
    size_t end = size;
    while (end > 8 && file[end - 1] != '}') end--;
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)(end - 8) >> (8 * i));
  }
  Safetensors f;
  Error err = {0, ""};
  int code = safetensors_open(&f, fuzz_file(0, file, size), &err);
  fuzz_check_error(code, &err);
  if (code) return 0;
  int64_t end = f.data_start;
  for (int64_t i = 0; i < f.n; i++) {
    const SafetensorsTensor *t = &f.tensors[i];
    if (t->begin != end || t->end > (int64_t)size || !safetensors_find(&f, t->name)) abort();
    end = t->end;
    if (t->count <= (int64_t)(sizeof values / sizeof *values)) {
      code = safetensors_read(&f, t, 0, t->count, values, &err);
      fuzz_check_error(code, &err);
    }
  }
  safetensors_free(&f);
  return 0;
}
