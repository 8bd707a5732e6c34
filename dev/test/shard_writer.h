// shard_writer.h: writes small shards for tests, straight from the format's description in gdn/shard.h.
// (data/prepare.py writes the real ones.)
//
// defines: ShardSpec, shard_spec, shard_write, shard_write_llmc, file_write, file_read
#ifndef SHARD_WRITER_H
#define SHARD_WRITER_H

#include "../../gdn/shards.h"

#include <stdio.h>

typedef struct {
  int token_bytes, vocab, bos, eos, boundary, block_bytes;
  uint8_t tokenizer_byte;  // fills the 32 bytes of the hash
  int64_t text_bytes;
} ShardSpec;

static inline ShardSpec shard_spec(int token_bytes, int vocab, int bos) {
  ShardSpec spec = {token_bytes, vocab, bos, -1, bos >= 0, SHARD_BLOCK_MIN, 7, 0};
  return spec;
}

static MAYBE_UNUSED void file_write(const char *path, const void *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) fail(EXIT_DATA, "%s: cannot write: %s", path, strerror(errno));
}

// The whole file into memory that the caller frees.
static MAYBE_UNUSED uint8_t *file_read(const char *path, size_t *n) {
  FILE *f = fopen(path, "rb");
  struct stat st;
  if (!f || fstat(fileno(f), &st)) fail(EXIT_DATA, "%s: cannot read: %s", path, strerror(errno));
  *n = (size_t)st.st_size;
  uint8_t *bytes = (uint8_t *)alloc_array(st.st_size, 1, "file");
  if (fread(bytes, 1, *n, f) != *n) fail(EXIT_DATA, "%s: cannot read", path);
  fclose(f);
  return bytes;
}

// A shard whose documents begin at each BOS (if it has one).
static MAYBE_UNUSED void shard_write(const char *path, ShardSpec spec, const int32_t *tokens, int64_t count) {
  int64_t W = spec.token_bytes, token_space = (count * W + 7) / 8 * 8, documents = 0;
  int64_t blocks = (count * W + spec.block_bytes - 1) / spec.block_bytes;
  for (int64_t i = 0; i < count; i++) documents += spec.boundary && tokens[i] == spec.bos;
  int64_t bytes = SHARD_HEADER_BYTES + token_space + 8 * blocks + 8 * documents;
  uint8_t *file = (uint8_t *)alloc_zeroed(bytes, 1, "test shard"), *body = file + SHARD_HEADER_BYTES;
  for (int64_t i = 0; i < count; i++) memcpy(body + i * W, &tokens[i], (size_t)W);
  for (int64_t b = 0; b < blocks; b++) {
    int64_t left = count * W - b * spec.block_bytes;
    uint64_t hash =
        XXH3_64bits(body + b * spec.block_bytes, (size_t)(left < spec.block_bytes ? left : spec.block_bytes));
    memcpy(body + token_space + 8 * b, &hash, 8);
  }
  int64_t d = 0;
  for (int64_t i = 0; i < count; i++)
    if (spec.boundary && tokens[i] == spec.bos) memcpy(body + token_space + 8 * blocks + 8 * d++, &i, 8);
  ShardHeader h;
  memset(&h, 0, sizeof h);
  memcpy(h.magic, "GDNSHARD", 8);
  h.version = SHARD_VERSION;
  h.header_bytes = SHARD_HEADER_BYTES;
  h.tokens = (uint64_t)count;
  h.token_bytes = (uint32_t)spec.token_bytes, h.vocab = (uint32_t)spec.vocab;
  h.bos = spec.bos, h.eos = spec.eos;
  h.boundary = (uint32_t)spec.boundary, h.block_bytes = (uint32_t)spec.block_bytes;
  h.documents = (uint64_t)documents, h.text_bytes = (uint64_t)spec.text_bytes;
  memset(h.tokenizer, spec.tokenizer_byte, 32);
  h.block_table_hash = XXH3_64bits(body + count * W, (size_t)(token_space - count * W + 8 * blocks));
  h.document_table_hash = XXH3_64bits(body + token_space + 8 * blocks, (size_t)(8 * documents));
  h.header_hash = XXH3_64bits(&h, offsetof(ShardHeader, header_hash));
  memcpy(file, &h, sizeof h);
  file_write(path, file, (size_t)bytes);
  free(file);
}

static MAYBE_UNUSED void shard_write_llmc(const char *path, const int32_t *tokens, int64_t count) {
  int64_t bytes = SHARD_LLMC_HEADER_BYTES + 2 * count;
  uint8_t *file = (uint8_t *)alloc_zeroed(bytes, 1, "test shard");
  int32_t head[3] = {SHARD_LLMC_MAGIC, SHARD_LLMC_VERSION, (int32_t)count};
  memcpy(file, head, sizeof head);
  for (int64_t i = 0; i < count; i++) memcpy(file + SHARD_LLMC_HEADER_BYTES + 2 * i, &tokens[i], 2);
  file_write(path, file, (size_t)bytes);
  free(file);
}

#endif  // SHARD_WRITER_H
