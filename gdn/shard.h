// shard.h: one token shard on disk: the format, and the checks when it is opened. shards.h makes a stream of many.
//
// The shard format, version 1. All numbers little-endian, no padding but what is said. One file is one shard, named
// NAME_000123.bin; several are one stream in the order of their sorted paths.
//
//   offset  bytes  field
//        0      8  magic "GDNSHARD"
//        8      4  version, 1
//       12      4  header bytes, 256
//       16      8  N, number of tokens, >= 1
//       24      4  W, bytes of a token: 2 or 4, unsigned
//       28      4  vocabulary size; every id is below it; at most 65536 where W is 2
//       32      4  id of BOS, -1: none
//       36      4  id of EOS, -1: none
//       40      4  boundary convention: 0 none, 1 a BOS before each document
//       44      4  B, bytes of a block of tokens: a power of two, 4 KiB to 16 MiB
//       48      8  D, number of documents (0 when the convention is 0)
//       56      8  bytes of the UTF-8 text that the tokens stand for, 0 unknown (for bits per byte)
//       64     32  SHA-256 of the tokenizer's file; all zero: the byte tokenizer (ids 0..255, BOS 256)
//       96      8  XXH3-64 of the padding and the block table
//      104      8  XXH3-64 of the document table
//      112    136  zero
//      248      8  XXH3-64 of the 248 bytes above
//      256    N*W  tokens
//                  padding: zero bytes up to a multiple of 8
//                  block table: XXH3-64 of each block of B bytes of tokens (the last one may be shorter), 8 bytes each
//                  document table: D offsets in tokens, int64, rising, at which documents begin
//
// The file ends there, to the byte. Documents do not cross shards. Every bit is under some checksum: the header and the
// block table are verified when a set is opened, the document table when a shard is first read, a block of tokens when
// it is first read.
//
// llm.c's shards are read too: 256 int32 (magic 20240520, version 1, number of tokens), then uint16 tokens. They carry
// no checksum, tokenizer or vocabulary: what can be checked is the size, and each id against the model's vocabulary. A
// damaged id that stays below it goes unnoticed.
//
// defines: ShardHeader, Shard, shard_open_file, shard_pread, shard_check, shard_check_alike, tokenizer_label
#ifndef GDN_SHARD_H
#define GDN_SHARD_H

// pread and friends: -std=c11 hides them unless this comes before the first libc header (or -D_GNU_SOURCE).
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "check.h"

static_assert(sizeof(off_t) == 8, "64-bit file offsets are needed: compile with -D_FILE_OFFSET_BITS=64");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "shards are read as they lie: a little-endian machine is needed");

enum {
  SHARD_VERSION = 1,
  SHARD_HEADER_BYTES = 256,
  SHARD_BLOCK_MIN = 1 << 12,
  SHARD_BLOCK_MAX = 1 << 24,
  SHARD_LLMC_MAGIC = 20240520,
  SHARD_LLMC_VERSION = 1,
  SHARD_LLMC_HEADER_BYTES = 1024
};

typedef struct {
  char magic[8];
  uint32_t version, header_bytes;
  uint64_t tokens;
  uint32_t token_bytes, vocab;
  int32_t bos, eos;
  uint32_t boundary, block_bytes;
  uint64_t documents, text_bytes;
  uint8_t tokenizer[32];
  uint64_t block_table_hash, document_table_hash;
  uint8_t reserved[136];
  uint64_t header_hash;
} ShardHeader;
static_assert(sizeof(ShardHeader) == SHARD_HEADER_BYTES, "the header is 256 bytes");

typedef struct {
  char *path;
  int llmc;            // llm.c's format: no checksums
  int fd;              // -1 while closed
  int64_t file_bytes;  // size of the file when the set was opened
  int64_t head_bytes;  // where the tokens begin
  uint64_t head_hash;  // XXH3-64 of those first bytes: a file that is opened again must still be the same
  int64_t first;       // offset of its first token in the concatenation
  int64_t tokens, documents;
  int64_t blocks;
  uint64_t *block_hash;    // [blocks]
  uint8_t *block_seen;     // [blocks / 8 + 1] bitmap of the verified ones
  int documents_seen;      // the document table is verified
  uint64_t device, inode;  // to find one file under two names
  ShardHeader header;      // of a shard of llm.c: filled as far as it is known
} Shard;

// ----------------------------------------------------------------------------
// Small steps

// Reads exactly `bytes` at `offset`, or says why not.
static inline int shard_pread(const Shard *s, void *out, int64_t bytes, int64_t offset, Error *err) {
  char *p = (char *)out;
  while (bytes > 0) {
    ssize_t n = pread(s->fd, p, (size_t)bytes, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      return error_set(err, EXIT_DATA, "shard %s: cannot read %lld bytes at %lld: %s", s->path, (long long)bytes,
                       (long long)offset, strerror(errno));
    if (n == 0)
      return error_set(err, EXIT_DATA,
                       "shard %s: ends %lld bytes too early at byte %lld: it was %lld bytes long at the start and has "
                       "been cut since",
                       s->path, (long long)bytes, (long long)offset, (long long)s->file_bytes);
    p += n, offset += n, bytes -= n;
  }
  return 0;
}

// Opens the file into s->fd: a regular file that can be read. O_NONBLOCK: a pipe must not hang the start.
static inline int shard_open_file(Shard *s, struct stat *st, Error *err) {
  s->fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (s->fd < 0) return error_set(err, EXIT_DATA, "shard %s: cannot open: %s", s->path, strerror(errno));
  if (fstat(s->fd, st)) return error_set(err, EXIT_DATA, "shard %s: cannot stat: %s", s->path, strerror(errno));
  if (S_ISDIR(st->st_mode))
    return error_set(err, EXIT_DATA, "shard %s: is a directory; name the shards in it, like '%s/*.bin'", s->path,
                     s->path);
  if (!S_ISREG(st->st_mode)) return error_set(err, EXIT_DATA, "shard %s: is not a regular file", s->path);
  return 0;
}

static inline int64_t shard_table_offset(const Shard *s) {  // of the padding before the block table
  return s->head_bytes + s->tokens * (int64_t)s->header.token_bytes;
}

static inline int64_t shard_padding(const Shard *s) { return (8 - s->tokens * (int64_t)s->header.token_bytes % 8) % 8; }

static inline int64_t shard_documents_offset(const Shard *s) {
  return shard_table_offset(s) + shard_padding(s) + 8 * s->blocks;
}

static inline int tokenizer_is_bytes(const uint8_t sha256[32]) {
  for (int i = 0; i < 32; i++)
    if (sha256[i]) return 0;
  return 1;
}

// "bytes" or the first 12 hex digits of the hash, into out[16].
static inline const char *tokenizer_label(const uint8_t sha256[32], char out[16]) {
  if (tokenizer_is_bytes(sha256)) return strcpy(out, "bytes");
  for (int i = 0; i < 6; i++) snprintf(out + 2 * i, 3, "%02x", sha256[i]);
  return out;
}

// ----------------------------------------------------------------------------
// Checks at the start

// Header of llm.c's shard, in `head` (1024 bytes read).
static inline int shard_check_llmc(Shard *s, const uint8_t *head, Error *err) {
  int32_t word[3];
  memcpy(word, head, sizeof word);
  if (word[1] != SHARD_LLMC_VERSION)
    return error_set(err, EXIT_DATA, "shard %s: version %d of llm.c's format, only version %d is read", s->path,
                     word[1], SHARD_LLMC_VERSION);
  if (word[2] <= 0)
    return error_set(err, EXIT_DATA, "shard %s: the header counts %d tokens, needed 1 or more", s->path, word[2]);
  int64_t needed = SHARD_LLMC_HEADER_BYTES + 2 * (int64_t)word[2];
  if (needed != s->file_bytes)
    return error_set(err, EXIT_DATA,
                     "shard %s: the header counts %d tokens, which makes %lld bytes, but the file has %lld: %s",
                     s->path, word[2], (long long)needed, (long long)s->file_bytes,
                     needed > s->file_bytes ? "it is truncated" : "it has bytes too many");
  s->llmc = 1;
  s->head_bytes = SHARD_LLMC_HEADER_BYTES;
  s->tokens = word[2];
  memset(&s->header, 0, sizeof s->header);
  s->header.token_bytes = 2;
  s->header.bos = s->header.eos = -1;
  return 0;
}

// Header of our own format, in s->header.
static inline int shard_check_header(Shard *s, Error *err) {
  const ShardHeader *h = &s->header;
  if (h->version != SHARD_VERSION || h->header_bytes != SHARD_HEADER_BYTES)
    return error_set(err, EXIT_DATA,
                     "shard %s: version %u with a header of %u bytes, only version %d with %d bytes is read: prepare "
                     "the data again",
                     s->path, h->version, h->header_bytes, SHARD_VERSION, SHARD_HEADER_BYTES);
  uint64_t hash = XXH3_64bits(h, offsetof(ShardHeader, header_hash));
  if (hash != h->header_hash)
    return error_set(err, EXIT_DATA, "shard %s: damaged header: its checksum is %016llx, the header says %016llx",
                     s->path, (unsigned long long)hash, (unsigned long long)h->header_hash);
  if (h->token_bytes != 2 && h->token_bytes != 4)
    return error_set(err, EXIT_DATA, "shard %s: tokens of %u bytes, needed 2 or 4", s->path, h->token_bytes);
  if (h->vocab < 1 || h->vocab > INT32_MAX || (h->token_bytes == 2 && h->vocab > 65536))
    return error_set(err, EXIT_DATA, "shard %s: a vocabulary of %u does not fit into tokens of %u bytes", s->path,
                     h->vocab, h->token_bytes);
  if (h->bos < -1 || h->bos >= (int64_t)h->vocab || h->eos < -1 || h->eos >= (int64_t)h->vocab)
    return error_set(err, EXIT_DATA, "shard %s: BOS %d or EOS %d is outside the vocabulary of %u", s->path, h->bos,
                     h->eos, h->vocab);
  if (h->boundary > 1 || (h->boundary == 1 && h->bos < 0))
    return error_set(err, EXIT_DATA, "shard %s: boundary convention %u with BOS %d is not known", s->path, h->boundary,
                     h->bos);
  if (h->block_bytes < SHARD_BLOCK_MIN || h->block_bytes > SHARD_BLOCK_MAX || (h->block_bytes & (h->block_bytes - 1)))
    return error_set(err, EXIT_DATA, "shard %s: blocks of %u bytes, needed a power of two from %d to %d", s->path,
                     h->block_bytes, SHARD_BLOCK_MIN, SHARD_BLOCK_MAX);
  if (h->tokens == 0) return error_set(err, EXIT_DATA, "shard %s: holds 0 tokens, needed 1 or more", s->path);
  // Bound both counts by 2^56 so that no sum below overflows; then the size must match to the byte.
  int64_t bound = (int64_t)1 << 56, needed = -1;
  if (h->tokens < (uint64_t)bound && h->documents < (uint64_t)bound) {
    s->head_bytes = SHARD_HEADER_BYTES;
    s->tokens = (int64_t)h->tokens;
    s->documents = (int64_t)h->documents;
    s->blocks = (s->tokens * h->token_bytes + h->block_bytes - 1) / h->block_bytes;
    needed = shard_documents_offset(s) + 8 * s->documents;
  }
  if (needed != s->file_bytes)
    return error_set(err, EXIT_DATA,
                     "shard %s: the header counts %llu tokens and %llu documents, which makes %lld bytes, but the file "
                     "has %lld: %s",
                     s->path, (unsigned long long)h->tokens, (unsigned long long)h->documents, (long long)needed,
                     (long long)s->file_bytes,
                     needed > s->file_bytes || needed < 0 ? "it is truncated" : "it has bytes too many");
  return 0;
}

// Reads and verifies the block table.
static inline int shard_load_blocks(Shard *s, Error *err) {
  int64_t padding = shard_padding(s), bytes = padding + 8 * s->blocks;
  uint8_t *table = (uint8_t *)alloc_array(bytes, 1, "block table of a shard");
  int code = shard_pread(s, table, bytes, shard_table_offset(s), err);
  if (!code && XXH3_64bits(table, (size_t)bytes) != s->header.block_table_hash)
    code = error_set(err, EXIT_DATA, "shard %s: damaged block table: it does not match its checksum in the header",
                     s->path);
  if (!code) {
    s->block_hash = (uint64_t *)alloc_array(s->blocks, 8, "block table of a shard");
    memcpy(s->block_hash, table + padding, (size_t)(8 * s->blocks));
    s->block_seen = (uint8_t *)alloc_zeroed(s->blocks / 8 + 1, 1, "block table of a shard");
  }
  free(table);
  return code;
}

// Opens one shard of the set, whose path is set, and checks all that can be known without reading its tokens.
// Adds what identifies it to the set's fingerprint.
static inline int shard_check(Shard *s, int64_t model_vocab, XXH3_state_t *fingerprint, Error *err) {
  struct stat st;
  uint8_t head[SHARD_LLMC_HEADER_BYTES];
  int code = shard_open_file(s, &st, err);
  if (code) return code;
  s->file_bytes = (int64_t)st.st_size;
  s->device = (uint64_t)st.st_dev, s->inode = (uint64_t)st.st_ino;
  if (s->file_bytes == 0) return error_set(err, EXIT_DATA, "shard %s: the file is empty", s->path);
  int64_t got = s->file_bytes < (int64_t)sizeof head ? s->file_bytes : (int64_t)sizeof head;
  if ((code = shard_pread(s, head, got, 0, err))) return code;
  int32_t first_word = 0;
  if (got >= 4) memcpy(&first_word, head, 4);
  int own = got >= 8 && !memcmp(head, "GDNSHARD", 8), llmc = first_word == SHARD_LLMC_MAGIC;
  if (!own && !llmc && got >= 8)
    return error_set(err, EXIT_DATA,
                     "shard %s: not a token shard: it begins with %02x %02x %02x %02x (int32 %d), needed \"GDNSHARD\" "
                     "or llm.c's magic %d; data/prepare.py makes shards of text",
                     s->path, head[0], head[1], head[2], head[3], first_word, SHARD_LLMC_MAGIC);
  int64_t header_bytes = llmc ? SHARD_LLMC_HEADER_BYTES : SHARD_HEADER_BYTES;
  if (got < header_bytes)
    return error_set(err, EXIT_DATA, "shard %s: truncated: %lld bytes are less than a header of %lld", s->path,
                     (long long)got, (long long)header_bytes);
  s->head_hash = XXH3_64bits(head, (size_t)header_bytes);
  if (llmc) {
    if ((code = shard_check_llmc(s, head, err))) return code;
  } else {
    memcpy(&s->header, head, sizeof s->header);
    if ((code = shard_check_header(s, err))) return code;
    if ((code = shard_load_blocks(s, err))) return code;
    if (model_vocab && s->header.vocab > (uint64_t)model_vocab)
      return error_set(err, EXIT_DATA,
                       "shard %s: made with a vocabulary of %u, the model has %lld: use other shards or change --vocab",
                       s->path, s->header.vocab, (long long)model_vocab);
  }
  const char *slash = strrchr(s->path, '/'), *name = slash ? slash + 1 : s->path;
  XXH3_64bits_update(fingerprint, name, strlen(name) + 1);
  XXH3_64bits_update(fingerprint, &s->file_bytes, sizeof s->file_bytes);
  XXH3_64bits_update(fingerprint, &s->head_hash, sizeof s->head_hash);  // it covers the hashes of both tables
  if (llmc)  // nothing in the header speaks for the tokens: take the first and the last 64 KiB of them
    for (int end = 0; end < 2; end++) {
      int64_t bytes = 2 * s->tokens < 65536 ? 2 * s->tokens : 65536;
      uint8_t *piece = (uint8_t *)alloc_array(bytes, 1, "fingerprint of a shard");
      code = shard_pread(s, piece, bytes, end ? s->file_bytes - bytes : s->head_bytes, err);
      if (!code) XXH3_64bits_update(fingerprint, piece, (size_t)bytes);
      free(piece);
      if (code) return code;
    }
  return 0;
}

// All shards of a set come from one tokenizer.
static inline int shard_check_alike(const Shard *a, const Shard *b, Error *err) {
  const ShardHeader *x = &a->header, *y = &b->header;
  char la[16], lb[16];
  if (a->llmc != b->llmc)
    return error_set(err, EXIT_DATA, "shard %s: in llm.c's format, but %s is not: one set needs one tokenizer",
                     a->llmc ? a->path : b->path, a->llmc ? b->path : a->path);
  if (x->token_bytes != y->token_bytes)
    return error_set(err, EXIT_DATA, "shard %s: tokens of %u bytes, but %s has %u: one set needs one tokenizer",
                     b->path, y->token_bytes, a->path, x->token_bytes);
  if (memcmp(x->tokenizer, y->tokenizer, 32) || x->vocab != y->vocab)
    return error_set(
        err, EXIT_DATA,
        "shard %s: tokenizer %s with a vocabulary of %u, but %s has %s with %u: one set needs one tokenizer", b->path,
        tokenizer_label(y->tokenizer, lb), y->vocab, a->path, tokenizer_label(x->tokenizer, la), x->vocab);
  if (x->bos != y->bos || x->eos != y->eos || x->boundary != y->boundary)
    return error_set(err, EXIT_DATA,
                     "shard %s: BOS %d, EOS %d, boundary %u, but %s has %d, %d, %u: one set needs one convention",
                     b->path, y->bos, y->eos, y->boundary, a->path, x->bos, x->eos, x->boundary);
  return 0;
}

#endif  // GDN_SHARD_H
