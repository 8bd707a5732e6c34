// sentencepiece.h: reads a SentencePiece `.model` file, a protocol buffer (sentencepiece_model.proto; wire format:
// protobuf.dev/programming-guides/encoding). Only what a BPE tokenizer needs is read, every length is checked, and
// what the tokenizer cannot reproduce exactly is refused.
//
// defines: SentencePiece, SentencePieceModel, sentencepiece_parse, sentencepiece_free, sentencepiece_byte, ProtoBytes
#ifndef GDN_SENTENCEPIECE_H
#define GDN_SENTENCEPIECE_H

#include "check.h"

#define SENTENCEPIECE_MAX_FILE ((size_t)64 << 20)  // known models have 0.2 to 20 MB
#define SENTENCEPIECE_MAX_COUNT (1 << 22)
#define SENTENCEPIECE_MAX_BYTES 65535  // of one piece

enum { PIECE_NORMAL = 1, PIECE_UNKNOWN, PIECE_CONTROL, PIECE_USER, PIECE_UNUSED, PIECE_BYTE };  // the file's numbers

typedef struct {
  const uint8_t *p, *end;  // p NULL: not in the file
} ProtoBytes;

typedef struct {
  const uint8_t *text;  // in the file's data
  size_t bytes;
  float score;
  int type;
} SentencePiece;

typedef struct {
  SentencePiece *pieces;  // [count]
  int32_t count;
  size_t text_bytes;  // of all pieces
  int model_type;     // 1 unigram (also when the file does not say), 2 BPE, 3 word, 4 character
  int byte_fallback, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces, whitespace_as_suffix;
  int has_trainer, has_normalizer, has_charsmap;
  ProtoBytes bos, eos, unk_surface, normalizer;  // names of pieces, what unknown is decoded to, the rule's name
} SentencePieceModel;

// ----------------------------------------------------------------------------------------------------------------
// Wire format

typedef struct {
  uint32_t number;
  int wire;        // 0 varint, 1 eight bytes, 2 bytes, 5 four bytes
  uint64_t value;  // of wires 0 and 5
  ProtoBytes sub;  // of wires 1, 2 and 5
} ProtoField;

static inline int proto_varint(ProtoBytes *r, uint64_t *value) {
  *value = 0;
  for (int shift = 0; shift < 64 && r->p < r->end; shift += 7) {
    uint8_t b = *r->p++;
    *value |= (uint64_t)(b & 0x7F) << shift;
    if (b < 0x80) return 1;
  }
  return 0;
}

// Takes the next field: 1, at the end 0, when damaged -1.
static inline int proto_next(ProtoBytes *r, ProtoField *f) {
  uint64_t tag, n;
  if (r->p == r->end) return 0;
  if (!proto_varint(r, &tag) || tag >> 3 == 0 || tag >> 32) return -1;
  f->number = (uint32_t)(tag >> 3);
  f->wire = (int)(tag & 7);
  f->value = 0;
  f->sub.p = f->sub.end = r->p;
  if (f->wire == 0) return proto_varint(r, &f->value) ? 1 : -1;
  if (f->wire == 2) {
    if (!proto_varint(r, &n)) return -1;
  } else if (f->wire == 1 || f->wire == 5) {
    n = f->wire == 1 ? 8 : 4;
  } else {
    return -1;
  }
  if (n > (uint64_t)(r->end - r->p)) return -1;
  f->sub.p = r->p;
  r->p += n;
  f->sub.end = r->p;
  for (int i = 0; f->wire == 5 && i < 4; i++) f->value |= (uint64_t)f->sub.p[i] << (8 * i);
  return 1;
}

// ----------------------------------------------------------------------------------------------------------------
// Messages. Each reader returns 0 when the message is damaged.

// ModelProto.SentencePiece: 1 piece, 2 score, 3 type.
static inline int sentencepiece_read_piece(ProtoBytes r, SentencePiece *piece) {
  ProtoField f;
  int more;
  memset(piece, 0, sizeof *piece);
  piece->type = PIECE_NORMAL;
  while ((more = proto_next(&r, &f)) > 0) {
    if (f.number > 3) continue;
    if (f.wire != (f.number == 1 ? 2 : f.number == 2 ? 5 : 0)) return 0;
    uint32_t bits = (uint32_t)f.value;
    if (f.number == 1) piece->text = f.sub.p, piece->bytes = (size_t)(f.sub.end - f.sub.p);
    if (f.number == 2) memcpy(&piece->score, &bits, 4);
    if (f.number == 3) piece->type = f.value <= PIECE_BYTE ? (int)f.value : 0;
  }
  return more == 0;
}

// TrainerSpec (field 2 of ModelProto), NormalizerSpec (3), and the denormalizer (5), which is a NormalizerSpec too.
static inline int sentencepiece_read_spec(ProtoBytes r, uint32_t message, SentencePieceModel *m) {
  ProtoField f;
  int more;
  while ((more = proto_next(&r, &f)) > 0) {
    int *flag = NULL;
    ProtoBytes *bytes = NULL;
    switch (message * 100 + (f.number < 100 ? f.number : 0)) {
      case 203:
        flag = &m->model_type;
        break;
      case 224:
        flag = &m->whitespace_as_suffix;
        break;
      case 235:
        flag = &m->byte_fallback;
        break;
      case 244:
        bytes = &m->unk_surface;
        break;
      case 246:
        bytes = &m->bos;
        break;
      case 247:
        bytes = &m->eos;
        break;
      case 301:
        bytes = &m->normalizer;
        break;
      case 303:
        flag = &m->add_dummy_prefix;
        break;
      case 304:
        flag = &m->remove_extra_whitespaces;
        break;
      case 305:
        flag = &m->escape_whitespaces;
        break;
      case 302:
      case 502:
        if (f.wire != 2) return 0;
        if (f.sub.p < f.sub.end) m->has_charsmap = 1;
        break;
    }
    if ((flag && f.wire != 0) || (bytes && f.wire != 2)) return 0;
    if (flag) *flag = flag == &m->model_type ? (int)(f.value & 0xFF) : f.value != 0;
    if (bytes) *bytes = f.sub;
  }
  return more == 0;
}

// Goes through the file once. Without m->pieces it counts them and reads the settings, with them it fills them in.
// Returns the place where the file is damaged, NULL when it is whole.
static inline const uint8_t *sentencepiece_walk(SentencePieceModel *m, const uint8_t *data, size_t bytes) {
  ProtoBytes r = {data, data + bytes};
  ProtoField f;
  SentencePiece piece;
  int64_t count = 0;
  for (int more;;) {
    const uint8_t *here = r.p;
    if ((more = proto_next(&r, &f)) <= 0) {
      if (more < 0) return here;
      break;
    }
    if (f.number == 4 || f.number > 5) continue;  // samples for a self-test, extensions
    if (f.wire != 2) return here;
    if (f.number == 1) {
      if (!sentencepiece_read_piece(f.sub, &piece)) return here;
      if (m->pieces) m->pieces[count] = piece;
      count++;
    } else if (!m->pieces) {
      if (!sentencepiece_read_spec(f.sub, f.number, m)) return here;
      if (f.number == 2) m->has_trainer = 1;
      if (f.number == 3) m->has_normalizer = 1;
    }
  }
  m->count = count > SENTENCEPIECE_MAX_COUNT ? SENTENCEPIECE_MAX_COUNT + 1 : (int32_t)count;
  return NULL;
}

static MAYBE_UNUSED void sentencepiece_free(SentencePieceModel *m) {
  free(m->pieces);
  memset(m, 0, sizeof *m);
}

// Byte of a piece named <0x00> to <0xFF>, -1 for any other.
static inline int sentencepiece_byte(const uint8_t *s, size_t n) {
  static const char digits[] = "0123456789ABCDEF";
  if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>' || !s[3] || !s[4]) return -1;
  const char *high = strchr(digits, s[3]), *low = strchr(digits, s[4]);
  return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

// Reads and checks the model in data[0..bytes); the result points into data. name is for messages. Returns 0, or
// EXIT_DATA with the reason in *err and nothing to free.
static MAYBE_UNUSED int sentencepiece_parse(SentencePieceModel *m, const uint8_t *data, size_t bytes, const char *name,
                                            Error *err) {
  static const char *const types[] = {"unknown", "unigram", "BPE", "word", "character"};
  memset(m, 0, sizeof *m);
  m->model_type = 1;
  m->add_dummy_prefix = m->remove_extra_whitespaces = m->escape_whitespaces = 1;
  if (!bytes) return error_set(err, EXIT_DATA, "%s: an empty file, needed a SentencePiece model (--tokenizer)", name);
  if (bytes > SENTENCEPIECE_MAX_FILE)
    return error_set(err, EXIT_DATA, "%s: larger than %zu MiB, which no SentencePiece model is (--tokenizer)", name,
                     SENTENCEPIECE_MAX_FILE >> 20);
  const uint8_t *damage = sentencepiece_walk(m, data, bytes);
  if (damage)
    return error_set(err, EXIT_DATA, "%s: not a SentencePiece model, or damaged at byte %zu of %zu (--tokenizer)", name,
                     (size_t)(damage - data), bytes);
  if (!m->has_trainer || !m->has_normalizer || !m->count)
    return error_set(
        err, EXIT_DATA,
        "%s: has %d pieces, %s trainer_spec, %s normalizer_spec, needed all three: cut short? (--tokenizer)", name,
        m->count, m->has_trainer ? "a" : "no", m->has_normalizer ? "a" : "no");
  if (m->model_type != 2)
    return error_set(
        err, EXIT_DATA,
        "%s: a model of type %d (%s), needed 2 (BPE): give --tokenizer a model trained with --model_type=bpe", name,
        m->model_type, types[m->model_type <= 4 ? m->model_type : 0]);
  if (m->has_charsmap)
    return error_set(err, EXIT_DATA,
                     "%s: changes characters by a table (%.*s), needed none: give --tokenizer a model trained with "
                     "--normalization_rule_name=identity",
                     name, (int)(m->normalizer.end - m->normalizer.p < 32 ? m->normalizer.end - m->normalizer.p : 32),
                     m->normalizer.p ? (const char *)m->normalizer.p : "");
  if (m->count > SENTENCEPIECE_MAX_COUNT)
    return error_set(err, EXIT_DATA, "%s: more than %d pieces (--tokenizer)", name, SENTENCEPIECE_MAX_COUNT);
  m->pieces = (SentencePiece *)alloc_array(m->count, sizeof *m->pieces, "tokenizer");
  sentencepiece_walk(m, data, bytes);
  for (int32_t i = 0; i < m->count; i++) {
    const SentencePiece *p = &m->pieces[i];
    const char *fault = !p->bytes                            ? "empty"
                        : p->bytes > SENTENCEPIECE_MAX_BYTES ? "longer than 65535 bytes"
                        : p->score != p->score               ? "scored NaN"
                        : p->type == 0                       ? "of a type that does not exist"
                        : p->type == PIECE_UNUSED            ? "of the unused type, which is not supported"
                        : p->type == PIECE_USER && memchr(p->text, 0, p->bytes) ? "user-defined and holds a NUL byte"
                                                                                : NULL;
    m->text_bytes += p->bytes;
    if (fault) {
      sentencepiece_free(m);
      return error_set(err, EXIT_DATA, "%s: piece %d is %s (--tokenizer)", name, i, fault);
    }
  }
  return 0;
}

#endif  // GDN_SENTENCEPIECE_H
