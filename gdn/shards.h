// shards.h: a set of token shards (shard.h describes the files) as one stream of samples.
//
// Samples. The set is the concatenation of its shards. Sample i of length T is the T+1 tokens from i*T to i*T+T of that
// concatenation, across the ends of shards: inputs are the first T, targets the last T, and each token but the first is
// a target exactly once, except fewer than T at the very end. Number of samples: (tokens-1)/T.
//
// defines: ShardSet, shards_open, shards_close, shards_samples, shards_check_rows,
//          shards_check_tokenizer, shards_check_same, shards_shared_file, shards_read, shards_read_sample,
//          shards_read_documents, shards_fingerprint
#ifndef GDN_SHARDS_H
#define GDN_SHARDS_H

#include "shard.h"  // first: it asks libc for pread

#include <glob.h>
#include <pthread.h>

#include "check.h"

enum { SHARD_OPEN_MAX = 64 };  // file descriptors held at a time: a set may have more shards than `ulimit -n` allows

typedef struct {
  const char *option;  // "--train" or "--val", for messages; the caller keeps it
  int count;
  Shard *shards;  // [count], sorted by path
  int64_t tokens, documents;
  int64_t text_bytes;     // 0: unknown
  int64_t model_vocab;    // ids must be below it; 0: not known
  int64_t vocab;          // of the tokenizer, 0 for llm.c's shards
  int bos, eos;           // -1: none or not known
  int boundary;           // 1: a BOS before each document
  int token_bytes;        // 2 or 4
  int llmc;               // no tokenizer known
  uint8_t tokenizer[32];  // SHA-256 of its file; all zero: bytes
  uint64_t fingerprint;
  pthread_mutex_t lock;  // guards all below, and the seen marks and descriptors of the shards
  uint8_t *buffer;       // [largest block]
  int64_t buffer_bytes;
  int open_shard[SHARD_OPEN_MAX], open_next;  // ring of shards with an open file, -1: free
} ShardSet;

// ----------------------------------------------------------------------------
// Opening a set

static inline void shards_add_path(ShardSet *set, const char *path) {
  if ((set->count & (set->count - 1)) == 0) {  // full at 0 and at powers of two
    int64_t room = set->count ? 2 * (int64_t)set->count : 1;
    Shard *grown = (Shard *)alloc_zeroed(room, sizeof(Shard), "list of shards");
    if (set->count) memcpy(grown, set->shards, (size_t)set->count * sizeof(Shard));
    free(set->shards);
    set->shards = grown;
  }
  Shard *s = &set->shards[set->count++];
  s->path = (char *)alloc_array((int64_t)strlen(path) + 1, 1, "path of a shard");
  strcpy(s->path, path);
  s->fd = -1;
}

// One pattern: a file of exactly that name (which may hold any character), else a glob.
static inline int shards_add_pattern(ShardSet *set, const char *pattern, Error *err) {
  struct stat st;
  if (!lstat(pattern, &st)) {
    shards_add_path(set, pattern);
    return 0;
  }
  glob_t found;
  memset(&found, 0, sizeof found);
  int rc = glob(pattern, GLOB_NOSORT, NULL, &found), code = 0;
  if (rc == GLOB_NOSPACE)
    code = error_set(err, EXIT_MEMORY, "%s '%s': not enough memory for the list", set->option, pattern);
  if (rc && !code)
    code = error_set(
        err, EXIT_DATA,
        "%s '%s': no file matches; give shards made by data/prepare.py, like %s 'out/data/x_%s_*.bin', or recall",
        set->option, pattern, set->option, strcmp(set->option, "--val") ? "train" : "val");
  for (size_t i = 0; !code && i < found.gl_pathc; i++) shards_add_path(set, found.gl_pathv[i]);
  globfree(&found);
  return code;
}

static inline int shard_compare_paths(const void *a, const void *b) {
  return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path);
}

static inline void shards_close(ShardSet *set) {
  if (!set->option) return;
  for (int i = 0; i < set->count; i++) {
    Shard *s = &set->shards[i];
    if (s->fd >= 0) close(s->fd);
    free(s->path);
    free(s->block_hash);
    free(s->block_seen);
  }
  free(set->shards);
  free(set->buffer);
  pthread_mutex_destroy(&set->lock);
  memset(set, 0, sizeof *set);
}

static inline int shards_open_all(ShardSet *set, const char *const *patterns, int pattern_count, Error *err) {
  int code = 0;
  for (int i = 0; i < pattern_count && !code; i++) {
    struct stat st;
    if (!lstat(patterns[i], &st)) {  // a name with a comma in it
      shards_add_path(set, patterns[i]);
      continue;
    }
    char *list = (char *)alloc_array((int64_t)strlen(patterns[i]) + 1, 1, "list of patterns"), *rest = list, *one;
    strcpy(list, patterns[i]);
    while (!code && (one = strsep(&rest, ",")))
      if (*one) code = shards_add_pattern(set, one, err);
    free(list);
  }
  if (code) return code;
  if (!set->count) return error_set(err, EXIT_DATA, "%s: no shard is named", set->option);
  qsort(set->shards, (size_t)set->count, sizeof(Shard), shard_compare_paths);

  XXH3_state_t *fingerprint = XXH3_createState();
  if (!fingerprint) return error_set(err, EXIT_MEMORY, "%s: not enough memory for a checksum", set->option);
  XXH3_64bits_reset(fingerprint);
  for (int i = 0; i < set->count && !code; i++) {
    Shard *s = &set->shards[i];
    code = shard_check(s, set->model_vocab, fingerprint, err);
    if (!code && i) code = shard_check_alike(&set->shards[0], s, err);
    if (s->fd >= 0) close(s->fd);  // opened again when it is read: there may be more shards than descriptors
    s->fd = -1;
    s->first = set->tokens;
    set->tokens += s->tokens;
    set->documents += s->documents;
    if (!s->header.text_bytes) set->text_bytes = -1;
    if (set->text_bytes >= 0) set->text_bytes += (int64_t)s->header.text_bytes;
    if (!s->llmc && s->header.block_bytes > set->buffer_bytes) set->buffer_bytes = s->header.block_bytes;
  }
  set->fingerprint = XXH3_64bits_digest(fingerprint);
  XXH3_freeState(fingerprint);
  for (int i = 0; i < set->count && !code; i++)
    for (int j = 0; j < i && !code; j++)
      if (set->shards[i].inode == set->shards[j].inode && set->shards[i].device == set->shards[j].device)
        code = error_set(err, EXIT_DATA, "%s: %s and %s are the same file: its tokens would count twice", set->option,
                         set->shards[j].path, set->shards[i].path);
  return code;
}

// Opens a set of shards. patterns: file names or globs, each may be a list separated by commas; all matches together
// are sorted by path. vocab: the model's vocabulary, 0 when there is no model. option ("--train") begins the messages.
// Every header is checked; no token is read yet. Returns 0, or EXIT_DATA with the sentence in err and nothing to close.
static inline int shards_open(ShardSet *set, const char *const *patterns, int pattern_count, int64_t vocab,
                              const char *option, Error *err) {
  memset(set, 0, sizeof *set);
  pthread_mutex_init(&set->lock, NULL);
  set->option = option;
  set->model_vocab = vocab;
  set->buffer_bytes = SHARD_BLOCK_MIN;
  for (int i = 0; i < SHARD_OPEN_MAX; i++) set->open_shard[i] = -1;
  int code = shards_open_all(set, patterns, pattern_count, err);
  if (code) {
    shards_close(set);
    return code;
  }
  const ShardHeader *h = &set->shards[0].header;
  if (set->text_bytes < 0) set->text_bytes = 0;
  set->llmc = set->shards[0].llmc;
  set->vocab = h->vocab;
  set->bos = h->bos, set->eos = h->eos;
  set->boundary = (int)h->boundary;
  set->token_bytes = (int)h->token_bytes;
  memcpy(set->tokenizer, h->tokenizer, 32);
  set->buffer = (uint8_t *)alloc_array(set->buffer_bytes, 1, "read buffer for shards");
  return 0;
}

// ----------------------------------------------------------------------------
// Questions to a set

// Number of samples of T+1 tokens.
static inline int64_t shards_samples(const ShardSet *set, int T) {
  return T > 0 && set->tokens > 1 ? (set->tokens - 1) / T : 0;
}

// Is there at least one batch? rows: samples of length T that one step (or one validation) needs.
static inline int shards_check_rows(const ShardSet *set, int T, int64_t rows, Error *err) {
  int64_t samples = shards_samples(set, T);
  if (samples >= rows) return 0;
  return error_set(err, EXIT_DATA,
                   "%s: %lld tokens in %d shards make %lld samples of %d + 1 tokens, one batch needs %lld rows "
                   "(%lld tokens): give more data, or a smaller %s or --seq-len",
                   set->option, (long long)set->tokens, set->count, (long long)samples, T, (long long)rows,
                   (long long)rows * T + 1, strcmp(set->option, "--val") ? "--total-batch" : "--batch");
}

// Were the shards made with the tokenizer whose file has this SHA-256 (all zero: bytes)? path: for the message.
static inline int shards_check_tokenizer(const ShardSet *set, const uint8_t sha256[32], const char *path, Error *err) {
  char a[16], b[16];
  if (set->llmc || !memcmp(set->tokenizer, sha256, 32)) return 0;  // llm.c's shards do not know
  return error_set(err, EXIT_DATA,
                   "%s: shard %s was made with tokenizer %s, but %s is %s: use the one it was made with", set->option,
                   set->shards[0].path, tokenizer_label(set->tokenizer, a), path, tokenizer_label(sha256, b));
}

// Do two sets (training and validation) come from one tokenizer?
static inline int shards_check_same(const ShardSet *a, const ShardSet *b, Error *err) {
  return shard_check_alike(&a->shards[0], &b->shards[0], err);
}

// The first file that is in both sets (validation on training data), or NULL.
static inline const char *shards_shared_file(const ShardSet *a, const ShardSet *b) {
  for (int i = 0; i < b->count; i++)
    for (int j = 0; j < a->count; j++)
      if (a->shards[j].inode == b->shards[i].inode && a->shards[j].device == b->shards[i].device)
        return b->shards[i].path;
  return NULL;
}

// Identifies the data in a checkpoint's manifest: base names, sizes, headers and with them the tables of checksums
// (for llm.c's shards the first and last 64 KiB of tokens). The folder does not matter.
static inline uint64_t shards_fingerprint(const ShardSet *set) { return set->fingerprint; }

// ----------------------------------------------------------------------------
// Reading

// Makes sure that the shard's file is open; a file that is opened again must have its old size and header.
static inline int shard_reopen(ShardSet *set, int index, Error *err) {
  Shard *s = &set->shards[index];
  if (s->fd >= 0) return 0;
  struct stat st;
  uint8_t head[SHARD_LLMC_HEADER_BYTES];
  int code = shard_open_file(s, &st, err);
  if (!code && (int64_t)st.st_size != s->file_bytes)
    code = error_set(err, EXIT_DATA, "shard %s: has %lld bytes, but had %lld at the start: it has been replaced or cut",
                     s->path, (long long)st.st_size, (long long)s->file_bytes);
  if (!code) code = shard_pread(s, head, s->head_bytes, 0, err);
  if (!code && XXH3_64bits(head, (size_t)s->head_bytes) != s->head_hash)
    code = error_set(err, EXIT_DATA, "shard %s: its header is not the one read at the start: it has been replaced",
                     s->path);
  if (code) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    return code;
  }
  int old = set->open_shard[set->open_next];
  if (old >= 0) {
    close(set->shards[old].fd);
    set->shards[old].fd = -1;
  }
  set->open_shard[set->open_next] = index;
  set->open_next = (set->open_next + 1) % SHARD_OPEN_MAX;
  return 0;
}

// Verifies the document table once, piece by piece through the set's buffer.
static inline int shard_verify_documents(ShardSet *set, Shard *s, Error *err) {
  if (s->llmc || s->documents_seen) return 0;
  XXH3_state_t *state = XXH3_createState();
  if (!state) return error_set(err, EXIT_MEMORY, "shard %s: not enough memory for a checksum", s->path);
  XXH3_64bits_reset(state);
  int64_t bytes = 8 * s->documents, offset = shard_documents_offset(s);
  int code = 0;
  for (int64_t done = 0; done < bytes && !code;) {
    int64_t piece = bytes - done < set->buffer_bytes ? bytes - done : set->buffer_bytes;
    code = shard_pread(s, set->buffer, piece, offset + done, err);
    if (!code) XXH3_64bits_update(state, set->buffer, (size_t)piece);
    done += piece;
  }
  if (!code && XXH3_64bits_digest(state) != s->header.document_table_hash)
    code = error_set(err, EXIT_DATA, "shard %s: damaged document table: it does not match its checksum in the header",
                     s->path);
  XXH3_freeState(state);
  s->documents_seen = !code;
  return code;
}

// Tokens as they lie -> int32, each checked. first: number in the shard of the first one, for the message.
static inline int shard_unpack(const ShardSet *set, const Shard *s, const uint8_t *bytes, int64_t first, int64_t count,
                               int32_t *out, Error *err) {
  uint32_t limit = s->llmc ? INT32_MAX : s->header.vocab;  // shard_check has held the shard's against the model's
  if (set->model_vocab && set->model_vocab < (int64_t)limit) limit = (uint32_t)set->model_vocab;
  for (int64_t i = 0; i < count; i++) {
    uint32_t id;
    if (s->header.token_bytes == 2) {
      uint16_t narrow;
      memcpy(&narrow, bytes + 2 * i, 2);
      id = narrow;
    } else {
      memcpy(&id, bytes + 4 * i, 4);
    }
    if (id >= limit)
      return error_set(err, EXIT_DATA,
                       "shard %s: token %lld has the id %u, ids must be below the vocabulary of %u: another tokenizer "
                       "made it, or it is damaged; check --vocab",
                       s->path, (long long)(first + i), id, limit);
    out[i] = (int32_t)id;
  }
  return 0;
}

// Tokens first..first+count-1 of one shard, block by block. A block not seen before is read whole and verified.
static inline int shard_read(ShardSet *set, int index, int64_t first, int64_t count, int32_t *out, Error *err) {
  int code = shard_reopen(set, index, err);
  if (code) return code;
  Shard *s = &set->shards[index];
  if ((code = shard_verify_documents(set, s, err))) return code;
  int64_t W = s->header.token_bytes, block_tokens = (s->llmc ? set->buffer_bytes : (int64_t)s->header.block_bytes) / W;
  while (count > 0) {
    int64_t block = first / block_tokens, begin = block * block_tokens;
    int64_t end = begin + block_tokens < s->tokens ? begin + block_tokens : s->tokens;
    int64_t n = end - first < count ? end - first : count;
    const uint8_t *bytes = set->buffer;
    if (!s->llmc && !(s->block_seen[block / 8] >> (block % 8) & 1)) {
      if ((code = shard_pread(s, set->buffer, (end - begin) * W, s->head_bytes + begin * W, err))) return code;
      uint64_t hash = XXH3_64bits(set->buffer, (size_t)((end - begin) * W));
      if (hash != s->block_hash[block])
        return error_set(
            err, EXIT_DATA,
            "shard %s: damaged: tokens %lld to %lld (block %lld) have the checksum %016llx, needed %016llx", s->path,
            (long long)begin, (long long)(end - 1), (long long)block, (unsigned long long)hash,
            (unsigned long long)s->block_hash[block]);
      s->block_seen[block / 8] |= (uint8_t)(1 << (block % 8));
      bytes += (first - begin) * W;
    } else if ((code = shard_pread(s, set->buffer, n * W, s->head_bytes + first * W, err))) {
      return code;
    }
    if ((code = shard_unpack(set, s, bytes, first, n, out, err))) return code;
    first += n, out += n, count -= n;
  }
  return 0;
}

// Tokens first..first+count-1 of the concatenation into tokens[count]. Any thread may call it. Returns 0, EXIT_DATA
// (damage, an id outside the vocabulary, a file gone or changed; the sentence names the file), or EXIT_INTERNAL for a
// range outside the set.
static inline int shards_read(ShardSet *set, int64_t first, int64_t count, int32_t *tokens, Error *err) {
  if (first < 0 || count < 0 || first > set->tokens - count)
    return error_set(err, EXIT_INTERNAL, "%s: tokens %lld to %lld asked for, the set has %lld", set->option,
                     (long long)first, (long long)(first + count - 1), (long long)set->tokens);
  int lo = 0, hi = set->count - 1;  // the last shard that begins at or before `first`
  while (lo < hi) {
    int mid = (lo + hi + 1) / 2;
    if (set->shards[mid].first <= first)
      lo = mid;
    else
      hi = mid - 1;
  }
  int code = 0;
  pthread_mutex_lock(&set->lock);
  for (; count > 0 && !code; lo++) {
    const Shard *s = &set->shards[lo];
    int64_t n = s->first + s->tokens - first < count ? s->first + s->tokens - first : count;
    code = shard_read(set, lo, first - s->first, n, tokens, err);
    first += n, tokens += n, count -= n;
  }
  pthread_mutex_unlock(&set->lock);
  return code;
}

// Sample `index` of length T into tokens[T+1]: inputs tokens[0..T-1], targets tokens[1..T]. Errors as shards_read.
static inline int shards_read_sample(ShardSet *set, int64_t index, int T, int32_t *tokens, Error *err) {
  if (index < 0 || index >= shards_samples(set, T))
    return error_set(err, EXIT_INTERNAL, "%s: sample %lld asked for, the set has %lld of length %d", set->option,
                     (long long)index, (long long)shards_samples(set, T), T);
  return shards_read(set, index * T, (int64_t)T + 1, tokens, err);
}

// Where the documents of one shard begin, in tokens from the shard's start, into starts[documents of the shard].
static inline int shards_read_documents(ShardSet *set, int index, int64_t *starts, Error *err) {
  pthread_mutex_lock(&set->lock);
  Shard *s = &set->shards[index];
  int code = shard_reopen(set, index, err);
  if (!code) code = shard_verify_documents(set, s, err);
  if (!code && s->documents) code = shard_pread(s, starts, 8 * s->documents, shard_documents_offset(s), err);
  for (int64_t i = 0; i < s->documents && !code; i++)
    if (starts[i] < 0 || starts[i] >= s->tokens || (i && starts[i] <= starts[i - 1]))
      code = error_set(err, EXIT_DATA, "shard %s: document %lld begins at token %lld of %lld, out of order", s->path,
                       (long long)i, (long long)starts[i], (long long)s->tokens);
  pthread_mutex_unlock(&set->lock);
  return code;
}

#endif  // GDN_SHARDS_H
