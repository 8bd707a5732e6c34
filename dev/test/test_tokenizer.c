// test_tokenizer.c: the tokenizer and SHA-256 against models that are written here, a slow reference of the merging
// rule, known answers, and damaged files. Needs no other file.
//
//   test_tokenizer                        the checks
//   test_tokenizer --encode MODEL         stdin: documents, each a 64-bit little-endian length and that many bytes;
//                                         stdout: for each a 64-bit count and that many 32-bit ids. Time on stderr.
//   test_tokenizer --info MODEL           number of ids, BOS, EOS and unknown id, SHA-256
//   test_tokenizer --decode MODEL         the way back; each text must also come out of the stream piece by piece
#include <math.h>
#include <time.h>
#include "../../gdn/tokenizer.h"

static int passed, failed;

static void check(int ok, const char *what) {
  if (ok) {
    passed++;
    return;
  }
  failed++;
  printf("FAILED: %s\n", what);
}

static double seconds(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- a model file, written field by field --------------------------------------------------------------------------

static void put_varint(TokenText *b, uint64_t v) {
  for (; v >= 128; v >>= 7) token_text_append(b, (char[]){(char)(v | 128)}, 1);
  token_text_append(b, (char[]){(char)v}, 1);
}

static void put_number(TokenText *b, int field, uint64_t v) {
  put_varint(b, (uint64_t)field << 3);
  put_varint(b, v);
}

static void put_bytes(TokenText *b, int field, const char *s, size_t n) {
  put_varint(b, (uint64_t)field << 3 | 2);
  put_varint(b, n);
  token_text_append(b, s, n);
}

static void put_piece(TokenText *b, const char *text, size_t n, float score, int type) {
  TokenText p = {NULL, 0, 0};
  uint32_t bits;
  memcpy(&bits, &score, 4);
  put_bytes(&p, 1, text, n);
  put_varint(&p, 2 << 3 | 5);
  for (int i = 0; i < 4; i++) token_text_append(&p, (char[]){(char)(bits >> (8 * i))}, 1);
  if (type != PIECE_NORMAL) put_number(&p, 3, (uint64_t)type);
  put_bytes(b, 1, p.data, p.bytes);
  free(p.data);
}

static void put_text_piece(TokenText *b, const char *text, float score, int type) {
  put_piece(b, text, strlen(text), score, type);
}

typedef struct {
  int model_type, byte_fallback, suffix, dummy_prefix, remove_spaces, escape, charsmap;
} Settings;

static const Settings llama = {2, 1, 0, 1, 0, 1, 0};

// The pieces that every model begins with: 0 unknown, 1 <s>, 2 </s>, and with byte_fallback 3..258 the bytes.
static TokenText begin_model(const Settings *set) {
  TokenText b = {NULL, 0, 0};
  put_text_piece(&b, "<unk>", 0, PIECE_UNKNOWN);
  put_text_piece(&b, "<s>", 0, PIECE_CONTROL);
  put_text_piece(&b, "</s>", 0, PIECE_CONTROL);
  for (int i = 0; i < 256 && set->byte_fallback; i++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", i);
    put_text_piece(&b, name, 0, PIECE_BYTE);
  }
  return b;
}

static void end_model(TokenText *b, const Settings *set) {
  TokenText s = {NULL, 0, 0};
  put_number(&s, 3, (uint64_t)set->model_type);
  put_number(&s, 24, (uint64_t)set->suffix);
  put_number(&s, 35, (uint64_t)set->byte_fallback);
  put_bytes(b, 2, s.data, s.bytes);
  s.bytes = 0;
  put_bytes(&s, 1, set->charsmap ? "nmt_nfkc" : "identity", 8);
  put_bytes(&s, 2, "map", set->charsmap ? 3 : 0);
  put_number(&s, 3, (uint64_t)set->dummy_prefix);
  put_number(&s, 4, (uint64_t)set->remove_spaces);
  put_number(&s, 5, (uint64_t)set->escape);
  put_bytes(b, 3, s.data, s.bytes);
  free(s.data);
}

// Parses and frees the model; ends the test when it should have been good.
static Tokenizer load_model(TokenText *b) {
  Tokenizer t;
  Error err = {0, ""};
  if (tokenizer_parse(&t, (const uint8_t *)b->data, b->bytes, "model", &err)) fail_error(&err);
  free(b->data);
  return t;
}

static const char *const words[] = {"a",  "b",   "c",  "d", "▁",  "▁a",   "ab", "bc",
                                    "cd", "abc", "▁▁", "é", "日", "日本", "本", "�"};
enum { WORDS = sizeof words / sizeof words[0] };

static Tokenizer small_model(const Settings *set) {
  TokenText b = begin_model(set);
  for (int i = 0; i < WORDS; i++) put_text_piece(&b, words[i], -(float)i, PIECE_NORMAL);
  put_text_piece(&b, "[X]", 0, PIECE_USER);
  put_text_piece(&b, "[X]d", 0, PIECE_USER);
  put_text_piece(&b, "b b", 0, PIECE_USER);  // a space inside: matched before escaping, not after
  end_model(&b, set);
  return load_model(&b);
}

// Pieces of a text joined by '|' ("<0xNN>" for a byte), so that an expectation can be read.
static char *encode_names(const Tokenizer *t, const char *text, size_t n) {
  TokenText out = {NULL, 0, 0};
  int32_t *ids;
  int64_t count = tokenizer_encode(t, text, n, 0, &ids);
  token_text_append(&out, "", 0);
  for (int64_t i = 0; i < count; i++) {
    size_t len = 0;
    const char *p = tokenizer_piece(t, ids[i], &len);
    if (i) token_text_append(&out, "|", 1);
    token_text_append(&out, p, len);
  }
  free(ids);
  return out.data;
}

static void check_names(const Tokenizer *t, const char *text, size_t n, const char *want, const char *what) {
  char *got = encode_names(t, text, n), message[512];
  snprintf(message, sizeof message, "%s: '%s' gives %s, needed %s", what, text, got, want);
  check(!strcmp(got, want), message);
  free(got);
}

#define CHECK_NAMES(t, text, want, what) check_names(t, text, sizeof(text) - 1, want, what)

static void check_decode(const Tokenizer *t, const int32_t *ids, int64_t n, const char *want, const char *what) {
  size_t bytes, part;
  char *got = tokenizer_decode(t, ids, n, &bytes), message[512];
  snprintf(message, sizeof message, "decode, %s: '%s', needed '%s'", what, got, want);
  check(bytes == strlen(want) && !memcmp(got, want, bytes), message);
  TokenText all = {NULL, 0, 0};
  TokenStream s;
  token_stream_begin(&s, t);
  int whole = 1;
  for (int64_t i = 0; i <= n; i++) {
    const char *p = i < n ? token_stream_push(&s, ids[i], &part) : token_stream_end(&s, &part);
    token_text_append(&all, p, part);
    for (size_t k = 0; k < part && !t->raw_bytes;) {
      int len = utf8_bytes((const uint8_t *)p + k, part - k);
      whole &= len > 0;
      k += len ? (size_t)len : 1;
    }
  }
  token_stream_free(&s);
  snprintf(message, sizeof message, "stream, %s: '%s', needed '%s', only whole characters", what, all.data, want);
  check(whole && all.bytes == bytes && !memcmp(all.data, got, bytes), message);
  free(all.data);
  free(got);
}

// ---- known answers -------------------------------------------------------------------------------------------------

static void test_sha256(void) {
  static const struct {
    const char *text, *digest;
    int repeat;
  } known[] = {{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1},
               {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1},
               {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1},
               {"aaaaaaaaaa", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 100000}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    Sha256 h;
    uint8_t digest[32];
    char hex[65];
    sha256_init(&h);
    for (int k = 0; k < known[i].repeat; k++) sha256_update(&h, known[i].text, strlen(known[i].text));
    sha256_final(&h, digest);
    sha256_hex(digest, hex);
    check(!strcmp(hex, known[i].digest), "SHA-256 of a known text");
  }
  uint8_t data[200], whole[32], parts[32];
  int same = 1;
  for (int i = 0; i < 200; i++) data[i] = (uint8_t)(i * 7);
  for (size_t n = 0; n <= 200; n++) {
    sha256_bytes(data, n, whole);
    for (size_t cut = 0; cut <= n; cut += 13) {
      Sha256 h;
      sha256_init(&h);
      sha256_update(&h, data, cut);
      sha256_update(&h, data + cut, n - cut);
      sha256_final(&h, parts);
      same &= !memcmp(whole, parts, 32);
    }
  }
  check(same, "SHA-256 in parts");
}

static void test_bytes(void) {
  Tokenizer t;
  Error err = {0, ""};
  uint8_t all[256], zeros[32] = {0};
  int32_t *ids;
  size_t bytes;
  check(tokenizer_load(&t, NULL, &err) == 0 && t.vocab == 257 && t.bos == 256 && t.eos == -1, "bytes: ids");
  tokenizer_free(&t);
  check(tokenizer_load(&t, "bytes", &err) == 0 && !memcmp(t.sha256, zeros, 32), "bytes: SHA-256 is zero");
  for (int i = 0; i < 256; i++) all[i] = (uint8_t)(255 - i);
  int64_t n = tokenizer_encode(&t, (const char *)all, 256, 1, &ids);
  int right = n == 257 && ids[0] == 256;
  for (int i = 0; i < 256; i++) right &= ids[i + 1] == 255 - i;
  check(right, "bytes: encode");
  char *back = tokenizer_decode(&t, ids, n, &bytes);
  check(bytes == 256 && !memcmp(back, all, 256), "bytes: decode");
  free(back);
  free(ids);
  check_decode(&t, (int32_t[]){256, 0xE6, 0x97, 0xA5, 'a', 0xE6, 'b'}, 7,
               "日a\xE6"
               "b",
               "bytes, UTF-8 and a stray byte");
  check(!strcmp(tokenizer_piece(&t, 65, NULL), "<0x41>") && !tokenizer_piece(&t, 257, NULL), "bytes: pieces");
  tokenizer_free(&t);
}

static void test_small_model(void) {
  Tokenizer t = small_model(&llama);
  int a = 259;  // id of the first word
  check(t.vocab == a + WORDS + 3 && t.bos == 1 && t.eos == 2 && t.unk == 0, "small model: ids");
  CHECK_NAMES(&t, "", "", "empty");
  CHECK_NAMES(&t, "a", "▁a", "one letter");
  CHECK_NAMES(&t, "abcd", "▁a|bc|d", "best score first");
  CHECK_NAMES(&t, "dabc", "▁|d|abc", "merges of merges");
  CHECK_NAMES(&t, "  a", "▁▁|▁a", "spaces, leftmost first");
  CHECK_NAMES(&t, "a b ", "▁a|▁|b|▁", "trailing space stays");
  CHECK_NAMES(&t, "é日本x", "▁|é|日本|<0x78>", "unicode and a byte");
  CHECK_NAMES(&t, "a\0\n", "▁a|<0x00>|<0x0A>", "NUL and newline");
  CHECK_NAMES(&t, "ñ", "▁|<0xC3>|<0xB1>", "bytes of an unknown character");
  CHECK_NAMES(&t,
              "\xC3\xA9\xC3"
              "a\xED\xA0\x80\xC0\x80\xF4\x90\x80\x80",
              "▁|é|�|a|�|�|�|�|�|�|�|�|�", "invalid UTF-8: one U+FFFD a byte");
  CHECK_NAMES(&t, "\xE6\x97", "▁|�|�", "cut character");
  CHECK_NAMES(&t, "c[X]dd[X]c", "▁|c|[X]d|d|[X]|c", "user-defined: longest, never merged");
  CHECK_NAMES(&t, "ab bc", "▁a|b|▁|bc", "user-defined with a space");
  CHECK_NAMES(&t, "<s>a</s>", "▁|<0x3C>|<0x73>|<0x3E>|a|<0x3C>|<0x2F>|<0x73>|<0x3E>", "control pieces are not read");
  int32_t *ids;
  int64_t n = tokenizer_encode(&t, "a", 1, 1, &ids);
  check(n == 2 && ids[0] == 1 && ids[1] == a + 5, "BOS first");
  free(ids);
  n = tokenizer_encode(&t, "", 0, 1, &ids);
  check(n == 1 && ids[0] == 1, "BOS of an empty text");
  free(ids);
  check_decode(&t, (int32_t[]){1, a + 5, a + 4, a + 1, 2}, 5, "a b", "dummy prefix goes, control pieces are silent");
  check_decode(&t, (int32_t[]){a + 4, a + 4, a}, 3, " a", "only the first space goes");
  check_decode(&t, (int32_t[]){a + 10, a}, 2, " a", "one space of two goes");
  check_decode(&t, (int32_t[]){a, a + 5}, 2, "a a", "space later stays");
  check_decode(&t, (int32_t[]){0, a + 5, t.vocab, -1}, 4, " ⁇  a ⁇  ⁇ ", "unknown and out of range");
  check_decode(&t, (int32_t[]){3 + 0xE6, 3 + 0x97, 3 + 0xA5}, 3, "日", "bytes join");
  check_decode(&t, (int32_t[]){3 + 0xE6, 3 + 0x97, a, 3 + 0xA5, 3 + 'x'}, 5, "��a�x", "bytes that do not");
  check_decode(&t, (int32_t[]){3 + 0xE6, 1, 3 + 0x97, 3 + 0xA5}, 4, "���", "a control piece parts bytes");
  check_decode(&t, (int32_t[]){3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0xE6, 3 + 0x97, 3 + 0xA5, 3 + 0xF0}, 7, "���日�",
               "bytes, mixed");
  check_decode(&t, (int32_t[]){3 + ' ', a + 5}, 2, "  a", "after a byte the prefix stays");
  check_decode(&t, NULL, 0, "", "nothing");
  tokenizer_free(&t);

  Settings set = llama;
  set.byte_fallback = 0;
  t = small_model(&set);
  CHECK_NAMES(&t, "xyaz", "▁|<unk>|a|<unk>", "a run of unknown is one id");
  tokenizer_free(&t);
  set = llama;
  set.remove_spaces = 1;
  t = small_model(&set);
  CHECK_NAMES(&t, "  a   b  ", "▁a|▁|b", "extra spaces go");
  CHECK_NAMES(&t, "   ", "", "only spaces");
  check_decode(&t, (int32_t[]){a + 4, a + 4, a + 10, a}, 4, " a", "leading spaces go, one a piece");
  tokenizer_free(&t);
  set.suffix = 1;
  t = small_model(&set);
  CHECK_NAMES(&t, " a b", "a|▁|b|▁", "dummy suffix");
  tokenizer_free(&t);
  set = llama;
  set.dummy_prefix = 0;
  t = small_model(&set);
  CHECK_NAMES(&t, "a a", "a|▁a", "no dummy prefix");
  check_decode(&t, (int32_t[]){a + 5}, 1, " a", "no dummy prefix, the space stays");
  tokenizer_free(&t);
  set.escape = 0;
  t = small_model(&set);
  CHECK_NAMES(&t, "a a", "a|<0x20>|a", "spaces not escaped");
  tokenizer_free(&t);
}

// ---- against the rule, carried out literally on the whole text -----------------------------------------------------

static uint64_t random_state = 1;
static uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((random_state >> 33) % n);
}

static int64_t encode_slowly(const Tokenizer *t, const char *s, size_t n, int32_t *ids) {
  size_t *begin = (size_t *)alloc_array((int64_t)n + 1, sizeof *begin, "test"), count = 0;
  for (size_t i = 0; i < n; i += symbol_bytes(s + i, n - i)) begin[count++] = i;
  begin[count] = n;
  for (;;) {
    size_t best = 0;
    uint32_t best_rank = BPE_NONE;
    for (size_t i = 0; i + 1 < count; i++) {
      uint32_t rank = tokenizer_rank(t, s + begin[i], begin[i + 2] - begin[i]);
      if (rank < best_rank) best_rank = rank, best = i;
    }
    if (best_rank == BPE_NONE) break;
    memmove(begin + best + 1, begin + best + 2, (count - best - 1) * sizeof *begin);
    count--;
  }
  int64_t out = 0;
  for (size_t i = 0; i < count; i++) {
    int32_t id = tokenizer_find(t, s + begin[i], begin[i + 1] - begin[i]);
    if (id >= 0)
      ids[out++] = id;
    else
      for (size_t k = begin[i]; k < begin[i + 1]; k++) ids[out++] = t->byte_ids[(uint8_t)s[k]];
  }
  free(begin);
  return out;
}

static void test_random_models(void) {
  static const char *const symbols[] = {"a", "b", "c", "▁", "é", "日", "😀"};
  Settings set = llama;
  set.dummy_prefix = 0;
  int bad = 0, texts = 0, cut = 0;
  for (int model = 0; model < 60; model++) {
    TokenText b = begin_model(&set);
    char *seen[80];
    int pieces = 0, alphabet = 2 + (int)random_below(6), scores = 1 + (int)random_below(60);
    for (int i = 0; i < 80; i++) {  // random pieces, most made of others; few scores give many ties
      TokenText p = {NULL, 0, 0};
      int parts = 1 + (int)random_below(3), twice = 0;
      for (int k = 0; k < parts; k++) {
        const char *from = pieces && random_below(2) ? seen[random_below((uint32_t)pieces)]
                                                     : symbols[random_below((uint32_t)alphabet)];
        token_text_append(&p, from, strlen(from));
      }
      for (int k = 0; k < pieces; k++) twice |= !strcmp(seen[k], p.data);
      if (twice || p.bytes > 200) {
        free(p.data);
        continue;
      }
      put_piece(&b, p.data, p.bytes, -(float)random_below((uint32_t)scores), PIECE_NORMAL);
      seen[pieces++] = p.data;
    }
    end_model(&b, &set);
    Tokenizer t = load_model(&b);
    for (int k = 0; k < 30; k++, texts++) {
      TokenText text = {NULL, 0, 0};
      for (int len = 1 + (int)random_below(k < 20 ? 40 : 400); len > 0; len--) {
        const char *from =
            random_below(3) ? symbols[random_below((uint32_t)alphabet)] : seen[random_below((uint32_t)pieces)];
        token_text_append(&text, from, strlen(from));
      }
      int32_t *ids, *slow = (int32_t *)alloc_array((int64_t)text.bytes, sizeof *slow, "test");
      int64_t n = tokenizer_encode(&t, text.data, text.bytes, 0, &ids);
      int64_t want = encode_slowly(&t, text.data, text.bytes, slow);
      bad += n != want || memcmp(ids, slow, (size_t)n * sizeof *ids);
      cut += text.bytes > 200;
      free(ids);
      free(slow);
      free(text.data);
    }
    for (int i = 0; i < pieces; i++) free(seen[i]);
    tokenizer_free(&t);
  }
  char message[128];
  snprintf(message, sizeof message, "random models: %d of %d texts differ from the slow reference", bad, texts);
  check(!bad && cut > 100, message);
}

// One letter a million times: one stretch, every score ties. 2^k letters in a row are pieces, so 16 letters a token.
static void test_long_stretch(void) {
  TokenText b = begin_model(&llama);
  char run[17] = "aaaaaaaaaaaaaaaa";
  for (int len = 1; len <= 16; len *= 2) put_piece(&b, run, (size_t)len, -(float)len, PIECE_NORMAL);
  end_model(&b, &llama);
  Tokenizer t = load_model(&b);
  size_t n = 1000000;
  char *text = (char *)alloc_array((int64_t)n, 1, "test");
  memset(text, 'a', n);
  int32_t *ids;
  double start = seconds();
  int64_t count = tokenizer_encode(&t, text, n, 0, &ids);
  double took = seconds() - start;
  int right = count == 3 + 1000000 / 16;  // the three bytes of the prefix
  for (int64_t i = 3; i < count; i++) right &= ids[i] == 259 + 4;
  check(right, "a million letters: ids");
  check(took < 20, "a million letters: time");  // a quadratic method needs hours
  free(ids);
  free(text);
  tokenizer_free(&t);
}

// ---- damaged and unsuitable files ----------------------------------------------------------------------------------

static void check_refused(TokenText *b, const char *part, const char *what) {
  Tokenizer t;
  Error err = {0, ""};
  int code = tokenizer_parse(&t, (const uint8_t *)b->data, b->bytes, "file.model", &err);
  char message[1400];
  snprintf(message, sizeof message, "%s: code %d, '%s', needed %d and '%s'", what, code, err.text, EXIT_DATA, part);
  check(code == EXIT_DATA && err.code == code && strstr(err.text, part) && strstr(err.text, "file.model") &&
            !strchr(err.text, '\n') && !t.text && !t.pieces,
        message);
  if (!code) tokenizer_free(&t);
  free(b->data);
}

static void refuse(Settings set, const char *piece, size_t n, float score, int type, const char *part,
                   const char *what) {
  TokenText b = begin_model(&set);
  put_text_piece(&b, "a", 0, PIECE_NORMAL);
  if (piece) put_piece(&b, piece, n, score, type);
  end_model(&b, &set);
  check_refused(&b, part, what);
}

static void test_unsuitable(void) {
  Settings set = llama;
  set.model_type = 1;
  refuse(set, NULL, 0, 0, 0, "--model_type=bpe", "unigram");
  set.model_type = 4;
  refuse(set, NULL, 0, 0, 0, "character", "characters");
  set = llama;
  set.charsmap = 1;
  refuse(set, NULL, 0, 0, 0, "nmt_nfkc", "character map");
  refuse(llama, "a", 1, 0, PIECE_NORMAL, "both 'a'", "a piece twice");
  refuse(llama, "", 0, 0, PIECE_NORMAL, "empty", "empty piece");
  refuse(llama, "x", 1, NAN, PIECE_NORMAL, "NaN", "score NaN");
  refuse(llama, "x", 1, 0, 9, "type", "piece of no known type");
  refuse(llama, "x", 1, 0, PIECE_UNUSED, "unused", "unused piece");
  refuse(llama, "x", 1, 0, PIECE_UNKNOWN, "unknown type", "two unknown pieces");
  refuse(llama, "x", 1, 0, PIECE_CONTROL, "single character", "control piece of one character");
  refuse(llama, "<s>", 3, 0, PIECE_NORMAL, "both a control piece", "control piece that text can give");
  refuse(llama, "<0x1>", 5, 0, PIECE_BYTE, "<0x00> to <0xFF>", "byte piece of another form");
  refuse(llama, "x\0", 2, 0, PIECE_USER, "NUL", "user-defined piece with NUL");
  set = llama;
  set.byte_fallback = 0;
  refuse(set, "<0x01>", 6, 0, PIECE_BYTE, "byte_fallback on", "byte piece without byte_fallback");
  TokenText b = begin_model(&set);
  end_model(&b, &llama);
  check_refused(&b, "<0x00> is missing", "no byte pieces");
  b = (TokenText){NULL, 0, 0};
  put_text_piece(&b, "a", 0, PIECE_NORMAL);
  end_model(&b, &set);
  check_refused(&b, "no piece of the unknown type", "no unknown piece");
  b = (TokenText){NULL, 0, 0};
  token_text_append(&b, "", 0);
  check_refused(&b, "empty file", "empty file");
  b = (TokenText){NULL, 0, 0};
  token_text_append(&b, "{\"model\": 1}\n", 13);
  check_refused(&b, "not a SentencePiece model", "another format");
  b = (TokenText){NULL, 0, 0};
  token_text_append(&b, "\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", 11);
  check_refused(&b, "damaged", "a length of 2^64 - 1");
  b = (TokenText){NULL, 0, 0};
  for (int i = 0; i < 30; i++) token_text_append(&b, "\xFF", 1);
  check_refused(&b, "damaged", "a number without end");

  static const char *const paths[][2] = {{"/nowhere/at/all", "cannot be opened"},
                                         {"/", "cannot be read"},
                                         {"/dev/null", "empty file"},
                                         {"/dev/zero", "larger than"}};
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
    Tokenizer t;
    Error err = {0, ""};
    int code = tokenizer_load(&t, paths[i][0], &err);
    check(code == EXIT_DATA && strstr(err.text, paths[i][1]) && strstr(err.text, paths[i][0]), err.text);
  }
}

// A damaged model is refused with one line, or is a model that works. Counts those refused.
static int use_damaged(const char *data, size_t n, const char *what) {
  Tokenizer t;
  Error err = {0, ""};
  char *copy = (char *)alloc_array((int64_t)n, 1, "test");  // of the exact size, for the address sanitizer
  memcpy(copy, data, n);
  int code = tokenizer_parse(&t, (const uint8_t *)copy, n, "damaged", &err);
  free(copy);
  if (code) {
    if (code != EXIT_DATA || !err.text[0] || strchr(err.text, '\n') || t.text) check(0, what);
    return 1;
  }
  static const char text[] =
      "ab  cabcd [X]d日本é\xFF\x00<s>aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
  int32_t *ids;
  size_t bytes;
  int64_t count = tokenizer_encode(&t, text, sizeof text - 1, 0, &ids);
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= t.vocab) check(0, what);
  free(tokenizer_decode(&t, ids, count, &bytes));
  free(ids);
  tokenizer_free(&t);
  return 0;
}

static void test_damaged(void) {
  Settings set = llama;
  set.byte_fallback = 0;  // a small file: every place and every bit can be tried
  TokenText b = begin_model(&set);
  for (int i = 0; i < WORDS; i++) put_text_piece(&b, words[i], -(float)i, PIECE_NORMAL);
  put_text_piece(&b, "[X]", 0, PIECE_USER);
  end_model(&b, &set);
  int refused = 0;
  check(!use_damaged(b.data, b.bytes, "whole"), "the whole model is taken");
  for (size_t n = 0; n < b.bytes; n++) refused += use_damaged(b.data, n, "truncated");
  check(refused == (int)b.bytes, "every truncation is refused");
  refused = 0;
  for (size_t i = 0; i < 8 * b.bytes; i++) {
    b.data[i / 8] ^= (char)(1 << (i % 8));
    refused += use_damaged(b.data, b.bytes, "one bit");
    b.data[i / 8] ^= (char)(1 << (i % 8));
  }
  check(refused > (int)b.bytes, "many flipped bits are refused");
  char *copy = (char *)alloc_array((int64_t)b.bytes, 1, "test");
  refused = 0;
  for (int k = 0; k < 5000; k++) {
    memcpy(copy, b.data, b.bytes);
    for (int j = 1 + (int)random_below(4); j > 0; j--) copy[random_below((uint32_t)b.bytes)] = (char)random_below(256);
    refused += use_damaged(copy, b.bytes, "random bytes");
  }
  check(refused > 1000 && refused < 5000, "random damage: some refused, some harmless");
  free(copy);
  free(b.data);
}

// ---- for the comparison with the SentencePiece library -------------------------------------------------------------

static int convert(int decode, const char *path) {
  Tokenizer t;
  Error err = {0, ""};
  double start = seconds(), took = 0, total = 0;
  if (tokenizer_load(&t, path, &err)) fail_error(&err);
  fprintf(stderr, "loaded in %.1f ms\n", 1e3 * (seconds() - start));
  int64_t n;
  while (fread(&n, 8, 1, stdin) == 1) {
    size_t size = decode ? 4 : 1, bytes;
    char *in = (char *)alloc_array(n, size, "test"), *out;
    if (n && fread(in, size, (size_t)n, stdin) != (size_t)n) fail(EXIT_DATA, "stdin: cut short");
    int64_t count;
    start = seconds();
    if (decode) {
      out = tokenizer_decode(&t, (const int32_t *)in, n, &bytes);
      count = (int64_t)bytes;
      took += seconds() - start;
      size_t at = 0, part;
      TokenStream s;
      token_stream_begin(&s, &t);
      for (int64_t i = 0; i <= n; i++, at += part) {
        const char *p = i < n ? token_stream_push(&s, ((const int32_t *)in)[i], &part) : token_stream_end(&s, &part);
        if (part > bytes - at || memcmp(p, out + at, part)) fail(1, "the stream differs from the text");
      }
      if (at != bytes) fail(1, "the stream is shorter than the text");
      token_stream_free(&s);
    } else {
      int32_t *ids;
      count = tokenizer_encode(&t, in, (size_t)n, 0, &ids);
      took += seconds() - start;
      out = (char *)ids;
    }
    total += (double)(decode ? count : n);
    if (fwrite(&count, 8, 1, stdout) != 1 || fwrite(out, decode ? 1 : 4, (size_t)count, stdout) != (size_t)count)
      fail(1, "stdout: cannot be written");
    free(in);
    free(out);
  }
  fprintf(stderr, "%.2f MB in %.3f s, %.1f MB/s\n", total * 1e-6, took, total * 1e-6 / took);
  tokenizer_free(&t);
  return 0;
}

static int print_info(const char *path) {
  Tokenizer t;
  Error err = {0, ""};
  char hex[65];
  if (tokenizer_load(&t, path, &err)) fail_error(&err);
  sha256_hex(t.sha256, hex);
  printf("%d %d %d %d %s\n", t.vocab, t.bos, t.eos, t.unk, hex);
  tokenizer_free(&t);
  return 0;
}

int main(int argc, char **argv) {
  program_name = "test_tokenizer";
  if (argc == 3 && !strcmp(argv[1], "--encode")) return convert(0, argv[2]);
  if (argc == 3 && !strcmp(argv[1], "--decode")) return convert(1, argv[2]);
  if (argc == 3 && !strcmp(argv[1], "--info")) return print_info(argv[2]);
  if (argc != 1) fail(EXIT_USAGE, "usage: test_tokenizer [--encode MODEL | --decode MODEL | --info MODEL]");
  test_sha256();
  test_bytes();
  test_small_model();
  test_random_models();
  test_long_stretch();
  test_unsuitable();
  test_damaged();
  printf("%d passed, %d failed, 0 skipped\n", passed, failed);
  return failed != 0;
}
