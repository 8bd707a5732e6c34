// fuzz_shard.c: a shard. The first byte: 1 puts the header's checksum right, 2 those of the tables, 4 those of blocks.
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static uint8_t file[1 << 16];
  if (size < 1 || size > sizeof file) return 0;
  int fix = data[0];
  size--;
  memcpy(file, data + 1, size);
  ShardHeader h;
  if (fix & 7 && size >= sizeof h) {
    memcpy(&h, file, sizeof h);
    uint64_t n = h.tokens, W = h.token_bytes, B = h.block_bytes;
    if (n < (1 << 16) && W <= 4 && B >= 16) {
      uint64_t body = n * W, padding = (8 - body % 8) % 8, blocks = (body + B - 1) / B;
      uint64_t table = sizeof h + body, documents = table + padding + 8 * blocks;
      if (documents <= size) {
        for (uint64_t b = 0; fix & 4 && b < blocks; b++) {
          uint64_t left = body - b * B, hash = XXH3_64bits(file + sizeof h + b * B, left < B ? left : B);
          memcpy(file + table + padding + 8 * b, &hash, 8);
        }
        if (fix & 2) h.block_table_hash = XXH3_64bits(file + table, padding + 8 * blocks);
        if (fix & 2) h.document_table_hash = XXH3_64bits(file + documents, size - documents);
      }
    }
    if (fix & 1) h.header_hash = XXH3_64bits(&h, offsetof(ShardHeader, header_hash));
    memcpy(file, &h, sizeof h);
  }
  const char *name = fuzz_file(0, file, size);
  ShardSet set;
  Error err = {0, ""};
  memset(&set, 0, sizeof set);
  int code = shards_open(&set, &name, 1, fix & 8 ? 300 : 0, "--train", &err);
  fuzz_check_error(code, &err);
  if (code) return 0;
  int32_t row[100];
  for (int64_t at = 0, n; at < set.tokens && !code; at += n) {
    n = set.tokens - at < 100 ? set.tokens - at : 100;
    code = shards_read(&set, at, n, row, &err);
    for (int64_t i = 0; i < n && !code; i++)
      if (row[i] < 0 || (set.vocab && row[i] >= set.vocab)) abort();
  }
  fuzz_check_error(code, &err);
  int64_t *starts = (int64_t *)alloc_array(set.shards[0].documents, 8, "documents");
  code = shards_read_documents(&set, 0, starts, &err);
  fuzz_check_error(code, &err);
  for (int64_t i = 0; i < set.shards[0].documents && !code; i++)
    if (starts[i] < 0 || starts[i] >= set.tokens) abort();
  free(starts);
  shards_close(&set);
  return 0;
}
