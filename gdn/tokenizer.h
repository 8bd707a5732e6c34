// tokenizer.h: text to token ids and back. Two tokenizers: the plain bytes (ids 0..255, 256 = BOS), and the BPE models
// of SentencePiece (`.model` files such as Llama-2's), whose ids and text are exactly those of the SentencePiece
// library.
//
// defines: tokenizer_load, tokenizer_parse, tokenizer_bytes, tokenizer_free, tokenizer_encode, tokenizer_decode,
//          tokenizer_piece, TokenStream, token_stream_begin, token_stream_push, token_stream_end, token_stream_free
#ifndef GDN_TOKENIZER_H
#define GDN_TOKENIZER_H

#include "bpe.h"
#include "check.h"
#include "sentencepiece.h"
#include "sha256.h"

// ----------------------------------------------------------------------------------------------------------------
// UTF-8 as SentencePiece reads it

#define UNKNOWN_SURFACE " \xE2\x81\x87 "   // U+2047 stands for an unknown id in decoded text
#define REPLACEMENT_SYMBOL "\xEF\xBF\xBD"  // U+FFFD stands for a byte that is not UTF-8

// Bytes of the valid character at p, 0 when there is none (overlong forms, surrogates and cut characters are not).
static inline int utf8_bytes(const uint8_t *p, size_t n) {
  if (p[0] < 0x80) return 1;
  int len = (p[0] & 0xE0) == 0xC0 ? 2 : (p[0] & 0xF0) == 0xE0 ? 3 : (p[0] & 0xF8) == 0xF0 ? 4 : 0;
  if (!len || n < (size_t)len) return 0;
  uint32_t c = p[0] & (0x7Fu >> len);
  for (int i = 1; i < len; i++) {
    if ((p[i] & 0xC0) != 0x80) return 0;
    c = c << 6 | (p[i] & 0x3F);
  }
  if (c < (len == 2 ? 0x80u : len == 3 ? 0x800u : 0x10000u)) return 0;
  return (c >= 0xD800 && c < 0xE000) || c > 0x10FFFF ? 0 : len;
}

// Could these 1 to 3 bytes be the beginning of a character whose other bytes are still to come?
static inline int utf8_is_beginning(const uint8_t *p, int n) {
  int len = (p[0] & 0xE0) == 0xC0 ? 2 : (p[0] & 0xF0) == 0xE0 ? 3 : (p[0] & 0xF8) == 0xF0 ? 4 : 0;
  for (int i = 1; i < n; i++)
    if ((p[i] & 0xC0) != 0x80) return 0;
  return n < len;
}

// ----------------------------------------------------------------------------------------------------------------
// Encoding

// The text as the pieces are written in: spaces become the space symbol, what is not UTF-8 becomes U+FFFD.
static inline void tokenizer_normalize(const Tokenizer *t, const char *s, size_t n, TokenText *out) {
  const char *space = t->escape_whitespaces ? SPACE_SYMBOL : " ";
  size_t space_bytes = strlen(space), i = 0;
  int32_t id;
  if (t->remove_extra_whitespaces)
    while (i < n && s[i] == ' ' && tokenizer_match_user(t, s + i, n - i, &id) <= 1) i++;
  if (i == n) return;
  if (t->add_dummy_prefix && !t->whitespace_as_suffix) token_text_append(out, space, space_bytes);
  int after_space = t->remove_extra_whitespaces;
  while (i < n) {
    const char *p = s + i;
    size_t len = tokenizer_match_user(t, p, n - i, &id), taken = len;
    if (!len) {
      len = taken = (size_t)utf8_bytes((const uint8_t *)p, n - i);
      if (!len) p = REPLACEMENT_SYMBOL, len = 3, taken = 1;
    }
    i += taken;
    while (after_space && len && *p == ' ') p++, len--;
    if (len) {
      after_space = t->remove_extra_whitespaces && p[len - 1] == ' ';
      for (size_t k = 0; k < len;) {
        size_t run = k;
        while (run < len && p[run] != ' ') run++;
        if (run > k) token_text_append(out, p + k, run - k);
        if (run < len) token_text_append(out, space, space_bytes), run++;
        k = run;
      }
    }
  }
  if (t->remove_extra_whitespaces)
    while (out->bytes >= space_bytes && !memcmp(out->data + out->bytes - space_bytes, space, space_bytes))
      out->bytes -= space_bytes;
  if (t->add_dummy_prefix && t->whitespace_as_suffix) token_text_append(out, space, space_bytes);
}

// Text to ids: returns their number and a new array in *ids (free it). The same ids as SentencePiece's Encode; with
// add_bos the BOS id goes first (a tokenizer without one ends the program, exit 4). Memory: about 1.2 bytes a byte of
// text, 4 an id, 20 a byte of the longest stretch; what cannot be allocated ends the program, exit 6. Thread-safe.
static MAYBE_UNUSED int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t bytes, int add_bos,
                                             int32_t **ids) {
  BpeEncoder e;
  memset(&e, 0, sizeof e);
  e.t = t;
  e.capacity = (int64_t)(t->raw_bytes ? bytes : bytes / 3) + 16;
  e.ids = (int32_t *)tokenizer_grow(NULL, (size_t)e.capacity, sizeof *e.ids);
  if (add_bos) {
    if (t->bos < 0) fail(EXIT_DATA, "the tokenizer has no BOS piece, and documents need one; use another --tokenizer");
    bpe_emit(&e, t->bos);
  }
  if (t->raw_bytes) {
    for (size_t i = 0; i < bytes; i++) bpe_emit(&e, (uint8_t)text[i]);
  } else if (bytes) {
    TokenText norm = {NULL, 0, 0};
    tokenizer_normalize(t, text, bytes, &norm);
    const char *s = norm.data;
    size_t begin = 0, i = 0, n = norm.bytes;
    uint32_t before = 0;
    while (i < n) {
      int32_t id = -1;
      size_t len = tokenizer_match_user(t, s + i, n - i, &id);
      if (len) {  // a user-defined piece is never merged with its neighbours
        if (i > begin) bpe_encode_stretch(&e, s + begin, i - begin);
        bpe_emit_symbol(&e, s + i, len, id);
        begin = i += len;
        continue;
      }
      len = symbol_bytes(s + i, n - i);
      uint32_t key = symbol_key(s + i, len);
      if (i > begin && !tokenizer_joins(t, before, key)) {
        bpe_encode_stretch(&e, s + begin, i - begin);
        begin = i;
      }
      before = key;
      i += len;
    }
    if (n > begin) bpe_encode_stretch(&e, s + begin, n - begin);
    free(norm.data);
  }
  bpe_free(&e);
  *ids = e.ids;
  return e.count;
}

// ----------------------------------------------------------------------------------------------------------------
// Decoding, piece by piece: what is being sampled can be printed at once. Bytes of a character that is not complete
// are held back; all parts together are the text that tokenizer_decode gives.

typedef struct {
  const Tokenizer *t;
  TokenText out;
  uint8_t held[4];
  int held_count;
  int begun;  // the space that the dummy prefix added can no longer come
  int has_text;
} TokenStream;

static MAYBE_UNUSED void token_stream_begin(TokenStream *s, const Tokenizer *t) {
  memset(s, 0, sizeof *s);
  s->t = t;
}

static MAYBE_UNUSED void token_stream_free(TokenStream *s) {
  free(s->out.data);
  memset(s, 0, sizeof *s);
}

static inline void token_stream_text(TokenStream *s, const char *p, size_t n) {
  token_text_append(&s->out, p, n);
  if (n) s->has_text = 1;
}

// Lets out what is complete of the held bytes, or at the end of a run of bytes all of them.
static inline void token_stream_release(TokenStream *s, int all) {
  while (s->held_count) {
    int len = utf8_bytes(s->held, (size_t)s->held_count);
    if (!len && !all && utf8_is_beginning(s->held, s->held_count)) return;
    if (len || s->t->raw_bytes)
      token_stream_text(s, (const char *)s->held, (size_t)(len ? len : 1));
    else
      token_stream_text(s, REPLACEMENT_SYMBOL, 3);
    if (!len) len = 1;
    s->held_count -= len;
    memmove(s->held, s->held + len, (size_t)s->held_count);
  }
}

static inline void token_stream_add(TokenStream *s, int32_t id) {
  const Tokenizer *t = s->t;
  if (id >= 0 && id < t->vocab) id = t->pieces[id].emit;
  int type = id >= 0 && id < t->vocab ? (int)t->pieces[id].type : (int)PIECE_UNKNOWN;
  if (type == PIECE_BYTE) {
    const char *p = t->text + t->pieces[id].start;  // <0xNN>
    s->held[s->held_count++] = (uint8_t)strtoul(p + 3, NULL, 16);
    token_stream_release(s, 0);
    return;
  }
  token_stream_release(s, 1);
  if (s->has_text) s->begun = 1;
  if (type == PIECE_CONTROL) return;
  if (type == PIECE_UNKNOWN) {
    token_stream_text(s, t->unk_surface, strlen(t->unk_surface));
    return;
  }
  const char *p = t->text + t->pieces[id].start;
  size_t n = t->pieces[id].bytes;
  if (!s->begun && (t->add_dummy_prefix || t->remove_extra_whitespaces) && n >= 3 && !memcmp(p, SPACE_SYMBOL, 3)) {
    p += 3, n -= 3;
    if (!t->remove_extra_whitespaces) s->begun = 1;  // else all leading spaces go
  }
  while (n) {
    if (n >= 3 && !memcmp(p, SPACE_SYMBOL, 3)) {
      token_stream_text(s, " ", 1);
      p += 3, n -= 3;
    } else {
      token_stream_text(s, p, 1);
      p++, n--;
    }
  }
}

// The text that `id` completes, valid until the next call, with a NUL after its *bytes bytes (0 when there is none).
static MAYBE_UNUSED const char *token_stream_push(TokenStream *s, int32_t id, size_t *bytes) {
  s->out.bytes = 0;
  token_text_append(&s->out, "", 0);
  token_stream_add(s, id);
  *bytes = s->out.bytes;
  return s->out.data;
}

// What was held back at the end of the text; the stream can then begin a new text.
static MAYBE_UNUSED const char *token_stream_end(TokenStream *s, size_t *bytes) {
  s->out.bytes = 0;
  token_text_append(&s->out, "", 0);
  token_stream_release(s, 1);
  s->begun = s->has_text = 0;
  *bytes = s->out.bytes;
  return s->out.data;
}

// Ids to text (free it): *bytes bytes and a NUL, as SentencePiece's DecodeIds. Ids outside the vocabulary, which a
// model with a padded vocabulary can sample, are decoded as unknown. The byte tokenizer gives the very bytes.
static MAYBE_UNUSED char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int64_t n, size_t *bytes) {
  TokenStream s;
  token_stream_begin(&s, t);
  token_text_append(&s.out, "", 0);
  for (int64_t i = 0; i < n; i++) token_stream_add(&s, ids[i]);
  token_stream_release(&s, 1);
  *bytes = s.out.bytes;
  return s.out.data;
}

// A piece as the model writes it, with a NUL; NULL for an id outside the vocabulary. bytes may be NULL.
static MAYBE_UNUSED const char *tokenizer_piece(const Tokenizer *t, int32_t id, size_t *bytes) {
  if (id < 0 || id >= t->vocab) return NULL;
  if (bytes) *bytes = t->pieces[id].bytes;
  return t->text + t->pieces[id].start;
}

// ----------------------------------------------------------------------------------------------------------------
// Loading

static MAYBE_UNUSED void tokenizer_free(Tokenizer *t) {
  free(t->text);
  free(t->pieces);
  free(t->slots);
  free(t->user);
  free(t->joins);
  free(t->unk_surface);
  memset(t, 0, sizeof *t);
}

// Copies one piece into the tokenizer. The two kinds of names, reserved and not, must each be unique.
static inline int tokenizer_add(Tokenizer *t, int32_t id, const char *s, size_t n, int type, uint32_t *used,
                                const char *name, Error *err) {
  TokenPiece *p = &t->pieces[id];
  p->start = *used;
  p->bytes = (uint16_t)n;
  p->type = (uint8_t)type;
  p->emit = id;
  memcpy(t->text + *used, s, n);
  t->text[*used + n] = 0;
  *used += (uint32_t)n + 1;
  uint64_t hash = token_hash(s, n);
  TokenSlot *slot = tokenizer_slot(t, s, n, piece_is_reserved(type), hash);
  if (slot->id >= 0)
    return error_set(err, EXIT_DATA,
                     "%s: pieces %d and %d are both '%.64s', needed different ones; use another --tokenizer", name,
                     slot->id, id, t->text + p->start);
  slot->tag = (uint32_t)(hash >> 32);
  slot->id = id;
  return 0;
}

// Room for `vocab` pieces of text_bytes bytes in all, NULs included.
static inline void tokenizer_reserve(Tokenizer *t, int32_t vocab, size_t text_bytes) {
  uint32_t slots = 8;
  while (slots < 2 * (uint32_t)vocab) slots *= 2;
  t->vocab = vocab;
  t->bos = t->eos = t->unk = -1;
  t->text = (char *)alloc_array((int64_t)text_bytes, 1, "tokenizer");
  t->pieces = (TokenPiece *)alloc_zeroed(vocab, sizeof *t->pieces, "tokenizer");
  t->slots = (TokenSlot *)alloc_array(slots, sizeof *t->slots, "tokenizer");
  for (uint32_t i = 0; i < slots; i++) t->slots[i].id = -1;
  t->slot_mask = slots - 1;
}

// Id of the control piece with this name, -1 when there is none.
static inline int32_t tokenizer_find_control(const Tokenizer *t, ProtoBytes name, const char *usual) {
  size_t n = name.p ? (size_t)(name.end - name.p) : 0;
  const char *s = n ? (const char *)name.p : usual;
  if (!n) n = strlen(usual);
  int32_t id = tokenizer_slot(t, s, n, 1, token_hash(s, n))->id;
  return id >= 0 && t->pieces[id].type == PIECE_CONTROL ? id : -1;
}

static inline int tokenizer_fill(Tokenizer *t, const SentencePieceModel *m, const char *name, Error *err) {
  uint32_t used = 0;
  ScoredPiece *scored = (ScoredPiece *)alloc_array(m->count, sizeof *scored, "tokenizer");
  for (int32_t id = 0; id < m->count; id++) {
    scored[id].score = m->pieces[id].score;
    scored[id].id = id;
  }
  qsort(scored, (size_t)m->count, sizeof *scored, scored_piece_order);
  for (int32_t i = 0, rank = 0; i < m->count; i++) {
    if (i && scored[i].score != scored[i - 1].score) rank = i;
    t->pieces[scored[i].id].rank = (uint32_t)rank;
  }
  free(scored);
  for (int b = 0; b < 256; b++) t->byte_ids[b] = -1;
  for (int32_t id = 0; id < m->count; id++) {
    const SentencePiece *p = &m->pieces[id];
    const char *s = (const char *)p->text;
    if (tokenizer_add(t, id, s, p->bytes, p->type, &used, name, err)) return err ? err->code : EXIT_DATA;
    if (p->type == PIECE_UNKNOWN && t->unk >= 0)
      return error_set(err, EXIT_DATA,
                       "%s: pieces %d and %d are both of the unknown type, needed one; use another --tokenizer", name,
                       t->unk, id);
    if (p->type == PIECE_UNKNOWN) t->unk = id;
    if (p->type == PIECE_CONTROL && symbol_bytes(s, p->bytes) == p->bytes)
      return error_set(
          err, EXIT_DATA,
          "%s: the control piece %d is the single character '%.4s', which text can hold; use another --tokenizer", name,
          id, t->text + t->pieces[id].start);
    if (p->type == PIECE_BYTE) {
      int b = sentencepiece_byte(p->text, p->bytes);
      if (b < 0 || !m->byte_fallback)
        return error_set(err, EXIT_DATA,
                         "%s: piece %d, '%.64s', is of the byte type, needed %s; use another --tokenizer", name, id,
                         t->text + t->pieces[id].start, b < 0 ? "<0x00> to <0xFF>" : "byte_fallback on");
      t->byte_ids[b] = id;
    }
  }
  if (t->unk < 0)
    return error_set(err, EXIT_DATA, "%s: no piece of the unknown type, needed one; use another --tokenizer", name);
  for (int b = 0; b < 256 && m->byte_fallback; b++)
    if (t->byte_ids[b] < 0)
      return error_set(err, EXIT_DATA,
                       "%s: byte_fallback is on, but the piece <0x%02X> is missing; use another --tokenizer", name, b);
  for (int32_t id = 0; id < t->vocab; id++) {  // text that spells a reserved name gets the reserved id
    TokenPiece *p = &t->pieces[id];
    const char *s = t->text + p->start;
    int32_t reserved = piece_is_reserved(p->type) ? -1 : tokenizer_slot(t, s, p->bytes, 1, token_hash(s, p->bytes))->id;
    if (reserved < 0) continue;
    p->emit = reserved;
    if (t->pieces[reserved].type == PIECE_CONTROL)
      return error_set(err, EXIT_DATA,
                       "%s: '%.64s' is both a control piece (%d) and a piece of text (%d); use another --tokenizer",
                       name, s, reserved, id);
  }
  return 0;
}

// Reads a SentencePiece model from memory; name is for messages. Returns 0, or EXIT_DATA with the reason in *err:
// damaged, too large, not BPE, or with a character map. Nothing is kept of data. After an error *t is empty.
static MAYBE_UNUSED int tokenizer_parse(Tokenizer *t, const uint8_t *data, size_t bytes, const char *name, Error *err) {
  SentencePieceModel m;
  memset(t, 0, sizeof *t);
  int code = sentencepiece_parse(&m, data, bytes, name, err);
  if (code) return code;
  tokenizer_reserve(t, m.count, m.text_bytes + (size_t)m.count);
  t->byte_fallback = m.byte_fallback;
  t->add_dummy_prefix = m.add_dummy_prefix;
  t->remove_extra_whitespaces = m.remove_extra_whitespaces;
  t->escape_whitespaces = m.escape_whitespaces;
  t->whitespace_as_suffix = m.whitespace_as_suffix;
  code = tokenizer_fill(t, &m, name, err);
  if (!code) {
    const char *surface = m.unk_surface.p ? (const char *)m.unk_surface.p : UNKNOWN_SURFACE;
    size_t n = m.unk_surface.p ? (size_t)(m.unk_surface.end - m.unk_surface.p) : strlen(UNKNOWN_SURFACE);
    t->unk_surface = (char *)alloc_zeroed((int64_t)n + 1, 1, "tokenizer");
    memcpy(t->unk_surface, surface, n);
    t->bos = tokenizer_find_control(t, m.bos, "<s>");
    t->eos = tokenizer_find_control(t, m.eos, "</s>");
    bpe_index(t);
    sha256_bytes(data, bytes, t->sha256);
  }
  sentencepiece_free(&m);
  if (code) tokenizer_free(t);
  return code;
}

// The byte tokenizer: ids 0..255 are the bytes, 256 is BOS, there is no EOS.
static MAYBE_UNUSED void tokenizer_bytes(Tokenizer *t) {
  uint32_t used = 0;
  memset(t, 0, sizeof *t);
  tokenizer_reserve(t, 257, 256 * 7 + 4);
  for (int b = 0; b < 256; b++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", b & 255);
    tokenizer_add(t, b, name, 6, PIECE_BYTE, &used, "bytes", NULL);
    t->byte_ids[b] = b;
  }
  tokenizer_add(t, 256, "<s>", 3, PIECE_CONTROL, &used, "bytes", NULL);
  t->raw_bytes = 1;
  t->bos = 256;
  t->unk_surface = (char *)alloc_array(sizeof UNKNOWN_SURFACE, 1, "tokenizer");
  memcpy(t->unk_surface, UNKNOWN_SURFACE, sizeof UNKNOWN_SURFACE);
}

// Loads the model file at path; NULL or "bytes" is the byte tokenizer. Returns 0, or EXIT_DATA with the reason in *err.
static MAYBE_UNUSED int tokenizer_load(Tokenizer *t, const char *path, Error *err) {
  memset(t, 0, sizeof *t);
  if (!path || !strcmp(path, "bytes")) {
    tokenizer_bytes(t);
    return 0;
  }
  FILE *file = fopen(path, "rb");
  if (!file)
    return error_set(err, EXIT_DATA, "%s: cannot be opened: %s; needed a SentencePiece model or 'bytes' (--tokenizer)",
                     path, strerror(errno));
  uint8_t *data = NULL;
  size_t bytes = 0, capacity = 1 << 16;
  for (size_t got = 1; got && bytes <= SENTENCEPIECE_MAX_FILE; bytes += got) {  // a pipe has no size to ask for
    capacity *= 2;
    data = (uint8_t *)tokenizer_grow(data, capacity, 1);
    got = fread(data + bytes, 1, capacity - bytes, file);
  }
  int code = 0;
  if (ferror(file))
    code = error_set(err, EXIT_DATA, "%s: cannot be read: %s; needed a SentencePiece model (--tokenizer)", path,
                     strerror(errno));
  fclose(file);
  if (!code) code = tokenizer_parse(t, data, bytes, path, err);
  free(data);
  return code;
}

#endif  // GDN_TOKENIZER_H
