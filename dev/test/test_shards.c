// test_shards.c: the data services: shards (gdn/shard.h, gdn/shards.h), reading ahead (gdn/prefetch.h), the order of
// samples (gdn/order.h) and the built-in recall task (gdn/recall.h).
//
//   test_shards              all tests, in a temporary folder
//   test_shards --dump GLOB  prints a set and all its tokens, verified (test_prepare.py reads that)

#include "shard_writer.h"

#include <sys/resource.h>

#include "../../gdn/order.h"
#include "../../gdn/prefetch.h"
#include "../../gdn/recall.h"

static int passed, failed;
static char folder[64];

static void check(int ok, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void check(int ok, const char *fmt, ...) {
  if (ok) {
    passed++;
    return;
  }
  failed++;
  va_list args;
  va_start(args, fmt);
  printf("FAILED: ");
  vprintf(fmt, args);
  printf("\n");
  va_end(args);
}

static const char *in_folder(const char *name) {  // a few paths at a time
  static char ring[8][256];
  static int next;
  char *path = ring[next++ % 8];
  snprintf(path, 256, "%s/%s", folder, name);
  return path;
}

static void clear_folder(void) {
  glob_t found;
  if (!glob(in_folder("*"), GLOB_PERIOD, NULL, &found))
    for (size_t i = 0; i < found.gl_pathc; i++)
      if (unlink(found.gl_pathv[i])) rmdir(found.gl_pathv[i]);
  globfree(&found);
}

static int32_t *tokens_make(int64_t count, int vocab, uint64_t seed) {
  int32_t *tokens = (int32_t *)alloc_array(count, sizeof(int32_t), "tokens");
  for (int64_t i = 0; i < count; i++) tokens[i] = (int32_t)(random_bits(seed, 0, (uint64_t)i) % (uint64_t)vocab);
  return tokens;
}

static int open_one(ShardSet *set, const char *pattern, int64_t vocab, Error *err) {
  memset(err, 0, sizeof *err);
  return shards_open(set, &pattern, 1, vocab, "--train", err);
}

// Opens and reads everything; the code of the first error.
static int read_all(const char *pattern, int64_t vocab, Error *err) {
  ShardSet set;
  if (open_one(&set, pattern, vocab, err)) return err->code;
  int32_t *tokens = (int32_t *)alloc_array(set.tokens, sizeof(int32_t), "tokens");
  shards_read(&set, 0, set.tokens, tokens, err);
  for (int i = 0; i < set.count && !err->code; i++) {
    int64_t *starts = (int64_t *)alloc_array(set.shards[i].documents, sizeof(int64_t), "starts");
    shards_read_documents(&set, i, starts, err);
    free(starts);
  }
  free(tokens);
  shards_close(&set);
  return err->code;
}

// The error must be EXIT_DATA and hold each of the parts (up to a NULL).
static void expect_text(const char *what, const Error *err, const char *const *parts) {
  check(err->code == EXIT_DATA, "%s: code %d, needed %d (%s)", what, err->code, EXIT_DATA, err->code ? err->text : "-");
  for (; *parts && err->code; parts++)
    check(strstr(err->text, *parts) != NULL, "%s: no \"%s\" in: %s", what, *parts, err->text);
}
#define EXPECT(what, err, ...)                       \
  do {                                               \
    const char *const parts[] = {__VA_ARGS__, NULL}; \
    expect_text(what, err, parts);                   \
  } while (0)

// Applies a change to the header of the shard at `from`, makes its checksum right again, writes it to `to`.
static void rewrite_header(const char *from, const char *to, void (*change)(ShardHeader *)) {
  size_t n;
  uint8_t *file = file_read(from, &n);
  ShardHeader h;
  memcpy(&h, file, sizeof h);
  change(&h);
  h.header_hash = XXH3_64bits(&h, offsetof(ShardHeader, header_hash));
  memcpy(file, &h, sizeof h);
  file_write(to, file, n);
  free(file);
}

// ----------------------------------------------------------------------------

static void test_reading(void) {
  // 3 shards of both widths, several blocks each; samples cross blocks and shards.
  for (int W = 2; W <= 4; W += 2) {
    int vocab = W == 2 ? 65536 : 70000;
    int64_t sizes[3] = {5000, 1, 3777}, total = 8778;
    int32_t *tokens = tokens_make(total, vocab, 1 + (uint64_t)W), row[130];
    tokens[17] = vocab - 1;  // the last id that is allowed
    const char *names[3] = {"r_000000.bin", "r_000001.bin", "r_000002.bin"};
    for (int64_t i = 0, at = 0; i < 3; at += sizes[i++])
      shard_write(in_folder(names[i]), shard_spec(W, vocab, 3), tokens + at, sizes[i]);
    ShardSet set;
    Error err;
    check(!open_one(&set, in_folder("r_*.bin"), vocab, &err), "open: %s", err.text);
    check(set.count == 3 && set.tokens == total && set.token_bytes == W && set.vocab == vocab && set.bos == 3 &&
              set.boundary == 1 && !set.llmc,
          "set of width %d: wrong fields", W);
    int lengths[4] = {1, 7, 64, 129};
    for (int l = 0; l < 4; l++) {
      int T = lengths[l], bad = 0;
      uint8_t *used = (uint8_t *)alloc_zeroed(total, 1, "marks");
      int64_t samples = shards_samples(&set, T);
      check(samples == (total - 1) / T, "samples of length %d: %lld", T, (long long)samples);
      for (int64_t p = 0; p < samples; p++) {
        int64_t i = sample_at(5, p, samples);
        bad += shards_read_sample(&set, i, T, row, &err) != 0;
        bad += memcmp(row, tokens + i * T, (size_t)(T + 1) * sizeof *row) != 0;
        for (int64_t t = 1; t <= T; t++) used[i * T + t]++;
      }
      int64_t targets = 0;
      for (int64_t t = 0; t < total; t++) targets += used[t], bad += used[t] > 1;
      check(!bad && targets == samples * T && total - 1 - targets < T, "coverage at width %d, length %d: %d bad", W, T,
            bad);
      free(used);
    }
    check(shards_read_sample(&set, shards_samples(&set, 64), 64, row, &err) == EXIT_INTERNAL, "sample past the end");
    check(shards_read_sample(&set, -1, 64, row, &err) == EXIT_INTERNAL, "sample -1");
    shards_close(&set);
    shards_close(&set);  // twice does no harm
    free(tokens);
    clear_folder();
  }
  // Exactly rows*T tokens, one more, one less: 4 ranks x 2 rows x 8.
  for (int64_t count = 63; count <= 66; count++) {
    int32_t *tokens = tokens_make(count, 100, 2), row[9];
    shard_write(in_folder("e.bin"), shard_spec(2, 100, 0), tokens, count);
    ShardSet set;
    Error err;
    check(!open_one(&set, in_folder("e.bin"), 100, &err), "open: %s", err.text);
    int code = shards_check_rows(&set, 8, 8, &err);
    check(code == (count >= 65 ? 0 : EXIT_DATA), "%lld tokens for 8 rows of 8 + 1: code %d", (long long)count, code);
    if (code) EXPECT("too few tokens for one batch", &err, "--train", "7 samples of 8 + 1", "8 rows", "65 tokens");
    for (int64_t i = 0; i < shards_samples(&set, 8); i++)
      check(!shards_read_sample(&set, i, 8, row, &err), "last samples: %s", err.text);
    set.option = "--val";
    if (shards_check_rows(&set, 8, 9, &err)) EXPECT("validation set smaller than a batch", &err, "--val", "9 rows");
    shards_close(&set);
    free(tokens);
  }
  int32_t one = 1;
  shard_write(in_folder("one.bin"), shard_spec(2, 100, 0), &one, 1);
  ShardSet set;
  Error err;
  check(!open_one(&set, in_folder("one.bin"), 100, &err) && shards_samples(&set, 4) == 0, "a shard of one token");
  check(shards_check_rows(&set, 4, 1, &err) == EXIT_DATA, "one token is no sample");
  shards_close(&set);
  clear_folder();
}

static void to_version_2(ShardHeader *h) { h->version = 2; }
static void to_no_tokens(ShardHeader *h) { h->tokens = 0; }
static void to_more_tokens(ShardHeader *h) { h->tokens += 1000; }
static void to_fewer_tokens(ShardHeader *h) { h->tokens -= 1000; }
static void to_huge_tokens(ShardHeader *h) { h->tokens = UINT64_MAX; }
static void to_huge_documents(ShardHeader *h) { h->documents = UINT64_MAX / 8; }
static void to_width_3(ShardHeader *h) { h->token_bytes = 3; }
static void to_vocab_70000(ShardHeader *h) { h->vocab = 70000; }
static void to_vocab_0(ShardHeader *h) { h->vocab = 0; }
static void to_bos_outside(ShardHeader *h) { h->bos = 100; }
static void to_boundary_2(ShardHeader *h) { h->boundary = 2; }
static void to_block_0(ShardHeader *h) { h->block_bytes = 0; }
static void to_block_5000(ShardHeader *h) { h->block_bytes = 5000; }
static void to_more_documents(ShardHeader *h) { h->documents += 1; }

static void test_bad_shards(void) {
  Error err;
  size_t n;
  int64_t count = 5001;
  int32_t *tokens = tokens_make(count, 100, 3);
  char good[256], bad[256];
  strcpy(good, in_folder("good")), strcpy(bad, in_folder("bad_000001.bin"));
  shard_write(good, shard_spec(2, 100, 0), tokens, count);
  check(!read_all(good, 100, &err), "the good shard: %s", err.text);
  uint8_t *file = file_read(good, &n);

  EXPECT("glob that matches nothing", (read_all(in_folder("none_*.bin"), 100, &err), &err), "--train", "none_*.bin",
         "no file matches");
  EXPECT("missing file", (read_all(in_folder("none.bin"), 100, &err), &err), "--train", "none.bin");
  EXPECT("no pattern", (read_all(",,", 100, &err), &err), "--train", "no shard is named");
  mkdir(bad, 0777);
  EXPECT("directory", (read_all(bad, 100, &err), &err), bad, "is a directory");
  rmdir(bad);
  check(!symlink("/nonexistent/x", bad), "symlink");
  EXPECT("unreadable", (read_all(bad, 100, &err), &err), bad, "cannot open", "No such file");
  unlink(bad);
  mkfifo(bad, 0666);
  EXPECT("pipe", (read_all(bad, 100, &err), &err), bad, "not a regular file");
  unlink(bad);
  file_write(bad, file, 0);
  EXPECT("empty file", (read_all(bad, 100, &err), &err), bad, "is empty");
  file_write(bad, file, 100);
  EXPECT("100 bytes", (read_all(bad, 100, &err), &err), bad, "100 bytes", "256");
  file_write(bad, file, 256);
  EXPECT("header only", (read_all(bad, 100, &err), &err), bad, "5001 tokens", "has 256", "truncated");
  file_write(bad, "this is a text file and no shard at all", 39);
  EXPECT("wrong magic", (read_all(bad, 100, &err), &err), bad, "not a token shard", "GDNSHARD", "20240520");
  const struct {
    const char *what;
    void (*change)(ShardHeader *);
    const char *text;
  } changes[] = {{"wrong version", to_version_2, "version 2"},
                 {"0 tokens", to_no_tokens, "0 tokens"},
                 {"count larger than the file", to_more_tokens, "counts 6001 tokens"},
                 {"count smaller than the file", to_fewer_tokens, "bytes too many"},
                 {"count near 2^64", to_huge_tokens, "18446744073709551615 tokens"},
                 {"documents near 2^61", to_huge_documents, "truncated"},
                 {"3-byte tokens", to_width_3, "tokens of 3 bytes"},
                 {"vocabulary of 70000 in 2 bytes", to_vocab_70000, "vocabulary of 70000"},
                 {"vocabulary 0", to_vocab_0, "vocabulary of 0"},
                 {"BOS outside", to_bos_outside, "BOS 100"},
                 {"boundary", to_boundary_2, "boundary convention 2"},
                 {"block 0", to_block_0, "blocks of 0"},
                 {"block 5000", to_block_5000, "blocks of 5000"},
                 {"documents", to_more_documents, "documents"}};
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    rewrite_header(good, bad, changes[i].change);
    EXPECT(changes[i].what, (read_all(bad, 0, &err), &err), bad, changes[i].text);
  }
  // Ids: the shard's own vocabulary, then the model's.
  shard_write(bad, shard_spec(2, 100, 0), tokens, count);
  check(!read_all(bad, 100, &err), "id 99 of 100: %s", err.text);
  EXPECT("model's vocabulary too small", (read_all(bad, 99, &err), &err), bad, "vocabulary of 100", "99", "--vocab");
  check(!read_all(bad, 128, &err), "a padded vocabulary: %s", err.text);
  int32_t saved = tokens[4321];
  tokens[4321] = 100;
  shard_write(bad, shard_spec(2, 100, 0), tokens, count);
  EXPECT("id = vocabulary", (read_all(bad, 100, &err), &err), bad, "token 4321", "id 100",
         "below the vocabulary of 100");
  tokens[4321] = 65535;
  shard_write(bad, shard_spec(2, 100, 0), tokens, count);
  EXPECT("id 65535", (read_all(bad, 0, &err), &err), bad, "id 65535");
  shard_write(bad, shard_spec(4, 100, 0), tokens, count);
  tokens[4321] = -1;  // as uint32 this is 4294967295
  shard_write(bad, shard_spec(4, 100, 0), tokens, count);
  EXPECT("id 2^32 - 1", (read_all(bad, 100, &err), &err), bad, "id 4294967295");
  tokens[4321] = saved;

  // Sets that do not belong together.
  char a[256], b[256];
  strcpy(a, in_folder("mix_a.bin")), strcpy(b, in_folder("mix_b.bin"));
  shard_write(a, shard_spec(2, 100, 0), tokens, 100);
  ShardSpec other = shard_spec(2, 100, 0);
  other.tokenizer_byte = 8;
  shard_write(b, other, tokens, 100);
  EXPECT("two tokenizers", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "mix_b.bin", "mix_a.bin", "tokenizer");
  shard_write(b, shard_spec(2, 101, 0), tokens, 100);
  EXPECT("two vocabularies", (read_all(in_folder("mix_*.bin"), 200, &err), &err), "mix_b.bin", "101", "100");
  shard_write(b, shard_spec(4, 100, 0), tokens, 100);
  EXPECT("two widths", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "mix_b.bin", "4 bytes", "mix_a.bin");
  shard_write(b, shard_spec(2, 100, 1), tokens, 100);
  EXPECT("two BOS", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "mix_b.bin", "BOS 1");
  shard_write_llmc(b, tokens, 100);
  EXPECT("two formats", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "mix_b.bin", "llm.c", "mix_a.bin");
  unlink(b);
  check(!symlink(a, b), "symlink");
  EXPECT("one file twice", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "same file", "mix_a.bin", "mix_b.bin");
  unlink(b);
  char twice[600];
  snprintf(twice, sizeof twice, "%s,%s", a, in_folder("mix_*.bin"));
  EXPECT("overlapping patterns", (read_all(twice, 100, &err), &err), "same file", "mix_a.bin");
  file_write(b, file, 0);
  EXPECT("empty file beside a good one", (read_all(in_folder("mix_*.bin"), 100, &err), &err), "mix_b.bin", "empty");
  free(file);
  free(tokens);
  clear_folder();
}

// Every changed bit and every other length is noticed, and nothing crashes.
static void test_damage(void) {
  Error err;
  size_t n;
  int32_t *tokens = tokens_make(5001, 100, 4);
  char path[256];
  strcpy(path, in_folder("d.bin"));
  shard_write(path, shard_spec(2, 100, 0), tokens, 5001);
  uint8_t *file = file_read(path, &n);
  int missed = 0, unnamed = 0;
  for (uint64_t i = 0; i < 1500; i++) {
    uint64_t bits = i < 500 ? 256 * 8 : 8 * n;  // the header often
    uint64_t bit = i >= 1000 ? 8 * (n - 500) + random_bits(6, 0, i) % 4000 : random_bits(6, 0, i) % bits;
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
    file_write(path, file, n);
    int code = read_all(path, 100, &err);
    missed += code != EXIT_DATA;
    unnamed += code && !strstr(err.text, path);
    if (!code) printf("bit %llu of %zu bytes: not noticed\n", (unsigned long long)bit, n);
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
  check(!missed && !unnamed, "bit flips: %d of 1500 not noticed, %d without the file's name", missed, unnamed);
  uint8_t *longer = (uint8_t *)alloc_zeroed((int64_t)n + 16, 1, "file");
  memcpy(longer, file, n);
  missed = 0;
  for (uint64_t i = 0; i < 316; i++) {
    size_t length = i < 16 ? n + 1 + i : random_bits(7, 0, i) % n;
    file_write(path, longer, length);
    missed += read_all(path, 100, &err) != EXIT_DATA || !strstr(err.text, path);
  }
  check(!missed, "other lengths: %d of 316 not noticed", missed);
  // Two blocks swapped.
  memcpy(longer + 256, file + 256 + 4096, 4096);
  memcpy(longer + 256 + 4096, file + 256, 4096);
  file_write(path, longer, n);
  EXPECT("swapped blocks", (read_all(path, 100, &err), &err), path, "damaged", "block 0");
  free(longer);
  // A wrong document table with a right checksum.
  int64_t documents;
  ShardHeader h;
  memcpy(&h, file, sizeof h);
  documents = (int64_t)h.documents;
  memset(file + n - 8 * documents, 0, (size_t)(8 * documents));
  h.document_table_hash = XXH3_64bits(file + n - 8 * documents, (size_t)(8 * documents));
  h.header_hash = XXH3_64bits(&h, offsetof(ShardHeader, header_hash));
  memcpy(file, &h, sizeof h);
  file_write(path, file, n);
  EXPECT("documents out of order", (read_all(path, 100, &err), &err), path, "document 1", "out of order");
  free(file);
  free(tokens);
  clear_folder();
}

static void test_llmc(void) {
  Error err;
  ShardSet set;
  size_t n;
  int32_t *tokens = tokens_make(5001, 50257, 5), *back = (int32_t *)alloc_array(5001, 4, "tokens");
  char path[256];
  strcpy(path, in_folder("l.bin"));
  shard_write_llmc(path, tokens, 5001);
  check(!open_one(&set, path, 50257, &err), "llm.c's shard: %s", err.text);
  check(!shards_read(&set, 0, 5001, back, &err) && !memcmp(tokens, back, 5001 * 4), "llm.c's shard: other tokens");
  check(set.llmc && set.bos == -1 && set.vocab == 0 && set.text_bytes == 0, "llm.c's shard: fields");
  shards_close(&set);
  EXPECT("llm.c: id >= vocabulary", (read_all(path, 50000, &err), &err), path, "below the vocabulary of 50000");
  uint8_t *file = file_read(path, &n);
  file_write(path, file, n - 1);
  EXPECT("llm.c: truncated", (read_all(path, 50257, &err), &err), path, "5001 tokens", "truncated");
  file_write(path, file, 1000);
  EXPECT("llm.c: half a header", (read_all(path, 50257, &err), &err), path, "1024");
  int32_t words[4] = {2, 0, -5, 5000};
  const char *texts[4] = {"version 2", "counts 0 tokens", "counts -5 tokens", "bytes too many"};
  for (int i = 0; i < 4; i++) {
    uint8_t copy[1024];
    memcpy(copy, file, 1024);
    memcpy(copy + (i ? 8 : 4), &words[i], 4);
    uint8_t *changed = (uint8_t *)alloc_array((int64_t)n, 1, "file");
    memcpy(changed, file, n);
    memcpy(changed, copy, 1024);
    file_write(path, changed, n);
    EXPECT("llm.c: header", (read_all(path, 50257, &err), &err), path, texts[i]);
    free(changed);
  }
  // No checksums: a flipped bit is noticed in the first 12 bytes and where the id leaves the vocabulary, else it is
  // not; it never crashes and never yields an id outside the vocabulary.
  int wrong = 0;
  for (uint64_t i = 0; i < 500; i++) {
    uint64_t bit = i < 96 ? i : random_bits(8, 0, i) % (8 * n);
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
    file_write(path, file, n);
    int code = read_all(path, 50257, &err), outside = 0;
    if (bit >= 8192) {
      uint16_t id;
      memcpy(&id, file + bit / 16 * 2, 2);
      outside = id >= 50257;
    }
    wrong += (code != 0) != (bit < 96 || outside);
    file[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
  check(!wrong, "llm.c: %d of 500 bit flips taken wrongly", wrong);
  free(file);
  free(tokens);
  free(back);
  clear_folder();
}

// Files that change after the set was opened, and more shards than descriptors.
static void test_later(void) {
  Error err;
  ShardSet set;
  int32_t *tokens = tokens_make(9000, 100, 9), row[65];
  char a[256], b[256];
  strcpy(a, in_folder("t_0.bin")), strcpy(b, in_folder("t_1.bin"));
  for (int kind = 0; kind < 5; kind++) {
    shard_write(a, shard_spec(2, 100, 0), tokens, 4500);
    shard_write(b, shard_spec(2, 100, 0), tokens + 4500, 4500);
    check(!open_one(&set, in_folder("t_*.bin"), 100, &err), "open: %s", err.text);
    check(!shards_read_sample(&set, 0, 64, row, &err), "read: %s", err.text);
    if (kind == 0) unlink(b);
    if (kind == 1 && truncate(b, 3000)) check(0, "truncate");
    if (kind == 2) shard_write(b, shard_spec(2, 100, 0), tokens, 4500);
    if (kind == 3 && truncate(a, 400)) check(0, "truncate");  // the one that is open
    if (kind == 4) {                                          // other tokens under the old header and tables
      size_t n;
      uint8_t *file = file_read(b, &n);
      memset(file + 256, 0, 64);
      file_write(b, file, n);
      free(file);
    }
    int code = 0;
    for (int64_t i = 0; i < shards_samples(&set, 64) && !code; i++) code = shards_read_sample(&set, i, 64, row, &err);
    const char *texts[5] = {"cannot open", "replaced or cut", "replaced", "too early", "damaged"};
    EXPECT("changed after the start", &err, kind == 3 ? a : b, texts[kind]);
    shards_close(&set);
  }
  clear_folder();
  struct rlimit old, low;
  getrlimit(RLIMIT_NOFILE, &old);
  low = old;
  low.rlim_cur = 90;
  setrlimit(RLIMIT_NOFILE, &low);
  for (int i = 0; i < 200; i++) {
    char name[32];
    snprintf(name, sizeof name, "m_%06d.bin", i);
    shard_write(in_folder(name), shard_spec(2, 100, 0), tokens + 45 * i, 45);
  }
  int bad = 0;
  check(!open_one(&set, in_folder("m_*.bin"), 100, &err), "200 shards, 90 descriptors: %s", err.text);
  for (int64_t p = 0; p < 2 * shards_samples(&set, 64); p++) {
    int64_t i = sample_at(1, p, shards_samples(&set, 64));
    bad += shards_read_sample(&set, i, 64, row, &err) || memcmp(row, tokens + i * 64, sizeof row);
  }
  check(!bad, "200 shards, 90 descriptors: %d samples wrong", bad);
  uint64_t fingerprint = shards_fingerprint(&set);
  shards_close(&set);
  setrlimit(RLIMIT_NOFILE, &old);
  check(!open_one(&set, in_folder("m_*.bin"), 100, &err) && shards_fingerprint(&set) == fingerprint, "fingerprint");
  shards_close(&set);
  tokens[45] ^= 1;
  shard_write(in_folder("m_000001.bin"), shard_spec(2, 100, 0), tokens + 45, 45);
  check(!open_one(&set, in_folder("m_*.bin"), 100, &err) && shards_fingerprint(&set) != fingerprint,
        "one token changed: same fingerprint");
  uint8_t sha[32];
  memset(sha, 7, 32);
  check(!shards_check_tokenizer(&set, sha, "x.model", &err), "right tokenizer: %s", err.text);
  sha[31] = 8;
  shards_check_tokenizer(&set, sha, "x.model", &err);
  EXPECT("wrong tokenizer", &err, "--train", "m_000000.bin", "x.model", "070707070707");
  const char *list[2] = {in_folder("m_000003.bin"), in_folder("m_000001.bin,")};
  ShardSet val;
  check(!shards_open(&val, list, 2, 100, "--val", &err) && val.count == 2 && strstr(val.shards[0].path, "m_000001"),
        "two patterns: %s", err.text);
  check(!shards_check_same(&set, &val, &err), "same tokenizer: %s", err.text);
  const char *shared = shards_shared_file(&set, &val);
  check(shared && strstr(shared, "m_000001"), "a file in both sets");
  shards_close(&val);
  shards_close(&set);
  free(tokens);
  clear_folder();
}

static void test_prefetch(void) {
  Error err;
  ShardSet set;
  Prefetch p;
  int32_t *tokens = tokens_make(20000, 100, 10), rows[4 * 33];
  char path[256];
  strcpy(path, in_folder("p.bin"));
  shard_write(path, shard_spec(2, 100, 0), tokens, 20000);
  check(!open_one(&set, path, 100, &err), "open: %s", err.text);
  check(!prefetch_start(&p, &set, 32, 4, &err), "start: %s", err.text);
  int64_t samples = shards_samples(&set, 32), indices[2][4];
  int bad = 0;
  for (int step = 0; step <= 150; step++) {
    for (int r = 0; r < 4; r++) indices[step & 1][r] = sample_at(3, 4 * step + r, samples);
    if (step) {
      if (step % 3 == 0)
        while (!prefetch_wait(&p, 0.5)) continue;
      bad += prefetch_take(&p, rows, &err) != 0;
      for (int r = 0; r < 4; r++)
        bad += memcmp(rows + 33 * r, tokens + 32 * indices[(step - 1) & 1][r], 33 * sizeof *rows) != 0;
    }
    prefetch_request(&p, indices[step & 1], 4);
  }
  check(!bad, "prefetch: %d rows wrong", bad);
  prefetch_take(&p, NULL, &err);
  int64_t outside[2] = {0, samples};
  prefetch_request(&p, outside, 2);
  check(prefetch_take(&p, rows, &err) == EXIT_INTERNAL, "prefetch: a sample outside the set");
  if (truncate(path, 1000)) check(0, "truncate");
  prefetch_request(&p, indices[0], 4);
  prefetch_take(&p, rows, &err);
  EXPECT("prefetch of a cut shard", &err, path, "cut");
  prefetch_request(&p, indices[0], 4);
  prefetch_stop(&p);  // with a request in flight
  prefetch_stop(&p);
  shards_close(&set);
  free(tokens);
  clear_folder();
}

static void test_order(void) {
  const int64_t sizes[] = {1, 2, 3, 7, 64, 100, 1000, 4097};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    int64_t n = sizes[k], before[4097], same[4] = {0};
    for (int64_t epoch = 0; epoch < 4; epoch++) {
      uint8_t seen[4097] = {0};
      int bad = 0;
      for (int64_t i = 0; i < n; i++) {
        int64_t s = sample_at(42, epoch * n + i, n);
        bad += s < 0 || s >= n || seen[s];
        if (s >= 0 && s < n) seen[s] = 1;
        if (epoch) same[epoch] += s == before[i];
        before[i] = s;
      }
      check(!bad, "order: epoch %lld of %lld samples is no permutation", (long long)epoch, (long long)n);
      if (n >= 64) check(same[epoch] < 12, "order: epochs %lld and before alike", (long long)epoch);
    }
    int differ = 0;
    for (int64_t i = 0; i < n; i++) differ += sample_at(42, i, n) != sample_at(43, i, n);
    if (n >= 64) check(differ > n / 2, "order: seeds alike for %lld samples", (long long)n);
  }
  // Does it shuffle? Mean distance of neighbours of a random permutation is n/3; rank correlation with the position 0.
  int64_t n = 4097;
  double distance = 0, correlation = 0;
  for (int64_t i = 0; i < n; i++) {
    double x = (double)sample_at(7, i, n), y = (double)sample_at(7, (i + 1) % n, n);
    distance += fabs(x - y);
    correlation += (x - (n - 1) / 2.0) * ((double)i - (n - 1) / 2.0);
  }
  distance /= (double)(n * n), correlation /= (double)n * ((double)n * (double)n - 1) / 12;
  check(fabs(distance - 1.0 / 3) < 0.02, "order: mean distance of neighbours %.3f n, needed 0.333", distance);
  check(fabs(correlation) < 0.07, "order: correlation with the position %.3f", correlation);  // 4.5 deviations
  // Every order of 4 samples occurs, none far too often (chi squared, 23 degrees of freedom; 60 is beyond 1e-4).
  int counts[256] = {0}, kinds = 0;
  double chi = 0;
  for (uint64_t seed = 0; seed < 4800; seed++) {
    int code = 0;
    for (int64_t i = 0; i < 4; i++) code = 4 * code + (int)sample_at(seed, i, 4);
    counts[code]++;
  }
  for (int i = 0; i < 256; i++)
    if (counts[i]) kinds++, chi += (counts[i] - 200.0) * (counts[i] - 200.0) / 200;
  check(kinds == 24 && chi < 60, "order: %d of 24 orders of 4 samples, chi squared %.1f", kinds, chi);
  int64_t huge = ((int64_t)1 << 40) + 12345, at = sample_at(1, 3 * huge + 5, huge);
  check(at >= 0 && at < huge && at != 5 && sample_epoch(3 * huge + 5, huge) == 3, "order: 2^40 samples");
}

static void test_recall(void) {
  int32_t tokens[512], targets[512], again[512], other[512];
  for (int kind = 0; kind < 8; kind++) {
    RecallConfig c = recall_defaults(kind & 1 ? 64 : 256);
    c.random_fillers = kind >> 1 & 1;
    if (kind >> 2) c.stale_pairs = kind & 1 ? 15 : 100, c.pairs = kind & 1 ? 8 : 11;  // T = 64: no place to spare
    if (kind == 1) c.pairs = 16;
    Error err;
    memset(&err, 0, sizeof err);
    check(!recall_check(&c, &err), "recall %d: %s", kind, err.text);
    int bad = 0, rewritten = 0, gaps_short = 0, gaps = 0;
    for (int64_t index = 0; index < 500; index++) {
      recall_sample(&c, 11, index, tokens, targets);
      recall_sample(&c, 11, index, again, other);
      bad += memcmp(tokens, again, (size_t)c.T * 4) || memcmp(targets, other, (size_t)c.T * 4);
      int first = c.stale_pairs ? 2 * c.stale_pairs + 2 : 0, value[65] = {0}, stale[65] = {0}, asked = 0;
      for (int i = 0; i < first - 2; i += 2) stale[tokens[i]] = tokens[i + 1];
      if (first) bad += tokens[first - 1] || tokens[first - 2];
      for (int i = first; i < first + 2 * c.pairs; i += 2) {
        bad += tokens[i] < 1 || tokens[i] > 64 || tokens[i + 1] <= 64 || tokens[i + 1] > 128;
        bad += value[tokens[i]] != 0;  // distinct keys
        value[tokens[i]] = tokens[i + 1];
        if (first) bad += !stale[tokens[i]], rewritten += stale[tokens[i]] != tokens[i + 1];
      }
      for (int i = 0; i < c.T; i++) {
        bad += tokens[i] < 0 || tokens[i] >= recall_vocab(&c);
        if (targets[i] < 0) {
          bad += targets[i] != -1;
          if (i >= first + 2 * c.pairs && tokens[i] && !c.random_fillers) bad++;          // filler is 0
          if (i >= first + 2 * c.pairs && tokens[i] <= 64) bad += value[tokens[i]] != 0;  // never a key of the sample
          continue;
        }
        int gap = i - first - 2 * c.pairs;
        bad += gap < 0 || gap % 2 || value[tokens[i]] != targets[i];
        value[tokens[i]] = 0;  // once only
        asked++, gaps++, gaps_short += gap < 64;
      }
      bad += asked != c.pairs;
    }
    check(!bad, "recall %d: %d wrong", kind, bad);
    if (kind >> 2) check(rewritten > 480 * c.pairs, "recall %d: only %d keys rewritten", kind, rewritten);
    if (kind == 0)  // 32 of 120 places hold about 2/3 of the weight, drawn without replacement
      check(gaps_short > 0.55 * gaps && gaps_short < 0.75 * gaps, "recall: %d of %d queries within 64", gaps_short,
            gaps);
  }
  // Fresh: no two of 2000 samples are alike, other seeds and validation are others.
  RecallConfig c = recall_defaults(64);
  uint64_t hashes[3000];
  for (int64_t i = 0; i < 3000; i++) {
    recall_sample(&c, i < 2000 ? 11 : 12, i < 1000 ? i : RECALL_VALIDATION * (i < 2000) + i % 1000, tokens, targets);
    hashes[i] = XXH3_64bits(tokens, 64 * 4);
  }
  int equal = 0;
  for (int i = 0; i < 3000; i++)
    for (int j = 0; j < i; j++) equal += hashes[i] == hashes[j];
  check(!equal, "recall: %d samples alike", equal);
  // Each value and each key is equally likely (chi squared, 63 degrees of freedom: 130 is beyond 1e-6).
  double chi[2] = {0, 0};
  int counts[129] = {0};
  for (int64_t i = 0; i < 4000; i++) {
    recall_sample(&c, 13, i, tokens, targets);
    for (int t = 0; t < 16; t++) counts[tokens[t]]++;
  }
  for (int id = 1; id <= 128; id++) chi[id > 64] += (counts[id] - 500.0) * (counts[id] - 500.0) / 500;
  check(chi[0] < 130 && chi[1] < 130, "recall: chi squared of keys %.1f, values %.1f", chi[0], chi[1]);
  // Refused with the numbers.
  Error err;
  c = recall_defaults(31);
  check(recall_check(&c, &err) == EXIT_USAGE && strstr(err.text, "32 tokens") && strstr(err.text, "31"), "T < 4D: %s",
        err.text);
  c = recall_defaults(1000), c.pairs = 65;
  check(recall_check(&c, &err) == EXIT_USAGE && strstr(err.text, "65") && strstr(err.text, "64"), "D > keys");
  c = recall_defaults(64), c.stale_pairs = 16;
  check(recall_check(&c, &err) == EXIT_USAGE && strstr(err.text, "66 tokens"), "stale pairs: too long");
  c = recall_defaults(64), c.stale_pairs = 7;
  check(recall_check(&c, &err) == EXIT_USAGE && strstr(err.text, "7 stale"), "fewer stale pairs than pairs");
  c = recall_defaults(64), c.pairs = 0;
  check(recall_check(&c, &err) == EXIT_USAGE, "0 pairs");
  c = recall_defaults(64), c.power = NAN;
  check(recall_check(&c, &err) == EXIT_USAGE, "power NaN");
}

// ----------------------------------------------------------------------------

static int dump(const char *pattern) {
  ShardSet set;
  Error err;
  if (open_one(&set, pattern, 0, &err)) fail_error(&err);
  printf("shards %d tokens %lld width %d vocab %lld bos %d eos %d boundary %d documents %lld text_bytes %lld llmc %d\n",
         set.count, (long long)set.tokens, set.token_bytes, (long long)set.vocab, set.bos, set.eos, set.boundary,
         (long long)set.documents, (long long)set.text_bytes, set.llmc);
  printf("tokenizer ");
  for (int i = 0; i < 32; i++) printf("%02x", set.tokenizer[i]);
  printf("\ndocuments");
  for (int i = 0; i < set.count; i++) {
    const Shard *s = &set.shards[i];
    int64_t *starts = (int64_t *)alloc_array(s->documents, sizeof(int64_t), "document table");
    if (shards_read_documents(&set, i, starts, &err)) fail_error(&err);
    for (int64_t d = 0; d < s->documents; d++) printf(" %lld", (long long)(s->first + starts[d]));
    free(starts);
  }
  printf("\ntokens");
  for (int64_t first = 0; first < set.tokens; first += 4096) {
    int32_t piece[4096];
    int64_t n = set.tokens - first < 4096 ? set.tokens - first : 4096;
    if (shards_read(&set, first, n, piece, &err)) fail_error(&err);
    for (int64_t i = 0; i < n; i++) printf(" %d", piece[i]);
  }
  printf("\n");
  shards_close(&set);
  return 0;
}

int main(int argc, char **argv) {
  program_name = "test_shards";
  if (argc == 3 && !strcmp(argv[1], "--dump")) return dump(argv[2]);
  if (argc != 1) fail(EXIT_USAGE, "usage: test_shards [--dump GLOB]");
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof folder, "%s/test_shards.XXXXXX", tmp && strlen(tmp) < 32 ? tmp : "/tmp");
  if (!mkdtemp(folder)) fail(EXIT_CONFIG, "cannot make a temporary folder: %s", strerror(errno));
  test_reading();
  test_bad_shards();
  test_damage();
  test_llmc();
  test_later();
  test_prefetch();
  test_order();
  test_recall();
  rmdir(folder);
  printf("%d passed, %d failed, 0 skipped\n", passed, failed);
  return failed != 0;
}
