// bpe.h: the pieces of a byte pair encoding, and merging text into them exactly as SentencePiece does.
//
// SentencePiece merges the best-scored pair of neighbours of the whole text, the leftmost first on equal scores, until
// no pair of neighbours is a piece. Two neighbouring symbols that no piece holds side by side can never end up in one
// piece, so the text is cut there first. Each stretch is merged by itself: the same pieces, in memory that depends on
// the longest stretch (in English about a word) and not on the document. A stretch that is itself a piece which
// merging is known to arrive at is looked up in one step; short ones scan for the best pair; long ones use a priority
// queue, O(n log n).
//
// defines: Tokenizer, TokenPiece, TokenText, BpeEncoder, bpe_emit, bpe_emit_symbol, bpe_encode_stretch, bpe_index,
//          bpe_free, tokenizer_slot, tokenizer_find, tokenizer_match_user, tokenizer_joins, symbol_bytes, symbol_key
#ifndef GDN_BPE_H
#define GDN_BPE_H

#include "check.h"
#include "sentencepiece.h"

#define BPE_NONE UINT32_MAX  // rank of a pair that is no piece
#define BPE_SHORT 64         // stretches of up to so many bytes are merged without a queue

typedef struct {
  uint32_t start;  // in Tokenizer.text
  uint16_t bytes;
  uint8_t type;
  uint8_t direct;  // merging the piece's own text arrives at the piece
  uint32_t rank;   // order of the scores, 0 the best; equal scores share a rank
  int32_t emit;    // the id that text gets: a control, byte or unknown piece of the same name goes first
} TokenPiece;

typedef struct {
  uint32_t tag;
  int32_t id;  // -1: free
} TokenSlot;

typedef struct {
  int32_t vocab;          // number of ids
  int32_t bos, eos, unk;  // -1: none
  uint8_t sha256[32];     // of the model file; zeros for the byte tokenizer
  int raw_bytes;          // the byte tokenizer: ids are bytes, nothing is normalised
  int byte_fallback, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces, whitespace_as_suffix;
  char *text;          // every piece, each followed by a NUL
  TokenPiece *pieces;  // [vocab]
  TokenSlot *slots;    // [slot_mask + 1] open addressing, from a piece's text to its id
  uint32_t slot_mask;
  size_t longest;           // bytes of the longest piece that text can give
  int32_t byte_ids[256];    // with byte_fallback
  int32_t *user;            // user-defined pieces in the order of their bytes
  int32_t user_first[257];  // those that begin with byte b are user[user_first[b]] .. user[user_first[b + 1]] - 1
  uint8_t joins_small[129 * 129];  // may a piece hold these two side by side: ASCII and the space symbol, exact
  uint8_t *joins;                  // the others, hashed bits: a collision only makes a stretch longer
  uint32_t join_mask;
  char *unk_surface;  // what an unknown id is decoded to
} Tokenizer;

// A growing run of bytes, always with room for a NUL.
typedef struct {
  char *data;
  size_t bytes, capacity;
} TokenText;

static MAYBE_UNUSED void *tokenizer_grow(void *old, size_t count, size_t size) {
  void *p = count > SIZE_MAX / size ? NULL : realloc(old, count * size);
  if (!p) fail(EXIT_MEMORY, "tokenizer: cannot allocate %zu elements of %zu bytes; split the document", count, size);
  return p;
}

static inline void token_text_append(TokenText *b, const char *s, size_t n) {
  if (n >= b->capacity - b->bytes) {  // bytes <= capacity - 1 once there is a buffer
    size_t capacity = b->capacity * 2 > b->bytes + n + 64 ? b->capacity * 2 : b->bytes + n + 64;
    b->data = (char *)tokenizer_grow(b->data, capacity, 1);
    b->capacity = capacity;
  }
  memcpy(b->data + b->bytes, s, n);
  b->bytes += n;
  b->data[b->bytes] = 0;
}

// ----------------------------------------------------------------------------------------------------------------
// Symbols: what merging starts from

#define SPACE_SYMBOL "\xE2\x96\x81"  // U+2581 stands for a space inside pieces

// Bytes of the symbol at p that merging starts from; only the first byte decides.
static inline size_t symbol_bytes(const char *p, size_t n) {
  uint8_t c = (uint8_t)p[0];
  size_t len = c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
  return len < n ? len : n;
}

static inline uint32_t symbol_key(const char *p, size_t n) {
  uint32_t key = 0;
  for (size_t i = 0; i < n; i++) key |= (uint32_t)(uint8_t)p[i] << (8 * i);
  return key;
}

// ----------------------------------------------------------------------------------------------------------------
// Lookups

static inline uint64_t token_hash(const char *s, size_t n) {
  const uint64_t mul = 0x9E3779B97F4A7C15u;
  uint64_t h = n * mul, w;
  for (; n >= 8; s += 8, n -= 8) {
    memcpy(&w, s, 8);
    h = (h ^ w) * mul;
    h ^= h >> 29;
  }
  if (n >= 4) {
    uint32_t a, b;
    memcpy(&a, s, 4);
    memcpy(&b, s + n - 4, 4);
    h = (h ^ ((uint64_t)b << 32 | a)) * mul;
  } else if (n) {
    h = (h ^ ((uint64_t)(uint8_t)s[0] | (uint64_t)(uint8_t)s[n / 2] << 8 | (uint64_t)(uint8_t)s[n - 1] << 16)) * mul;
  }
  h ^= h >> 32;
  h *= mul;
  return h ^ h >> 29;
}

static inline int piece_is_reserved(int type) {
  return type == PIECE_UNKNOWN || type == PIECE_CONTROL || type == PIECE_BYTE;
}

// The slot of the piece with this text, or the free slot where it belongs. Reserved pieces have names of their own.
static inline TokenSlot *tokenizer_slot(const Tokenizer *t, const char *s, size_t n, int reserved, uint64_t hash) {
  uint32_t tag = (uint32_t)(hash >> 32);
  for (uint32_t i = (uint32_t)hash & t->slot_mask;; i = (i + 1) & t->slot_mask) {
    TokenSlot *slot = &t->slots[i];
    if (slot->id < 0) return slot;
    if (slot->tag != tag) continue;
    const TokenPiece *p = &t->pieces[slot->id];
    if (p->bytes == n && piece_is_reserved(p->type) == reserved && !memcmp(t->text + p->start, s, n)) return slot;
  }
}

// Id of the normal or user-defined piece with this text, -1 when there is none.
static inline int32_t tokenizer_find(const Tokenizer *t, const char *s, size_t n) {
  if (n > t->longest) return -1;
  return tokenizer_slot(t, s, n, 0, token_hash(s, n))->id;
}

static inline uint32_t tokenizer_rank(const Tokenizer *t, const char *s, size_t n) {
  int32_t id = tokenizer_find(t, s, n);
  return id < 0 ? BPE_NONE : t->pieces[id].rank;
}

// Bytes of the longest user-defined piece that the text begins with, 0 when none. *id tells which.
static inline size_t tokenizer_match_user(const Tokenizer *t, const char *s, size_t n, int32_t *id) {
  int32_t lo = t->user_first[(uint8_t)s[0]], hi = t->user_first[(uint8_t)s[0] + 1];
  size_t longest = 0;
  for (size_t d = 0; lo < hi;) {  // user[lo..hi) share d bytes with the text
    const TokenPiece *p = &t->pieces[t->user[lo]];
    if (p->bytes == d) {
      longest = d;
      *id = t->user[lo++];
      continue;
    }
    if (d == n) break;
    int32_t bounds[2];  // first piece whose byte d is at least, or more than, the text's
    for (int more = 0; more < 2; more++) {
      int32_t a = lo, b = hi;
      while (a < b) {
        int32_t mid = a + (b - a) / 2;
        if ((uint8_t)t->text[t->pieces[t->user[mid]].start + d] < (uint8_t)s[d] + more)
          a = mid + 1;
        else
          b = mid;
      }
      bounds[more] = a;
    }
    lo = bounds[0], hi = bounds[1], d++;
  }
  return longest;
}

// Small class of a symbol: ASCII, the space symbol, or -1.
static inline int join_class(uint32_t key) { return key < 128 ? (int)key : key == 0x8196E2 ? 128 : -1; }

static inline uint32_t join_hash(const Tokenizer *t, uint32_t left, uint32_t right) {
  uint64_t h = ((uint64_t)right << 32 | left) * 0x9E3779B97F4A7C15u;
  h ^= h >> 32;
  return (uint32_t)(h * 0x9E3779B97F4A7C15u >> 32) & t->join_mask;
}

// May some piece hold the symbols `left` and `right` side by side?
static inline int tokenizer_joins(const Tokenizer *t, uint32_t left, uint32_t right) {
  int a = join_class(left), b = join_class(right);
  if (a >= 0 && b >= 0) return t->joins_small[a * 129 + b];
  uint32_t h = join_hash(t, left, right);
  return t->joins[h >> 3] >> (h & 7) & 1;
}

// ----------------------------------------------------------------------------------------------------------------
// Encoding

typedef struct {
  uint32_t rank, bytes;  // of the merged piece; the entry is stale once the two symbols have other sizes
  uint64_t left;
} BpePair;

typedef struct {
  const Tokenizer *t;
  int32_t *ids;
  int64_t count, capacity;
  int after_unknown;
  size_t queue_capacity;  // of the three below
  uint16_t *head, *tail;  // size of the symbol that begins, or ends, at this byte; head 0: none begins here
  BpePair *queue;
} BpeEncoder;

static inline void bpe_emit(BpeEncoder *e, int32_t id) {
  if (e->count == e->capacity) {
    e->capacity = e->capacity * 2 + 64;
    e->ids = (int32_t *)tokenizer_grow(e->ids, (size_t)e->capacity, sizeof *e->ids);
  }
  e->ids[e->count++] = id;
}

// Gives the ids of one finished symbol: its piece, or its bytes, or one unknown id for a run of unknown symbols.
static inline void bpe_emit_symbol(BpeEncoder *e, const char *s, size_t n, int32_t id) {
  const Tokenizer *t = e->t;
  if (id >= 0) id = t->pieces[id].emit;
  if (id >= 0 && id != t->unk) {
    bpe_emit(e, id);
    e->after_unknown = 0;
    return;
  }
  if (t->byte_fallback) {
    for (size_t i = 0; i < n; i++) bpe_emit(e, t->byte_ids[(uint8_t)s[i]]);
  } else if (!e->after_unknown) {
    bpe_emit(e, t->unk);
  }
  e->after_unknown = 1;
}

// Up to BPE_SHORT bytes: scan for the best pair.
static inline void bpe_merge_short(BpeEncoder *e, const char *s, size_t n) {
  const Tokenizer *t = e->t;
  uint8_t begin[BPE_SHORT + 1];  // symbol i is s[begin[i]..begin[i + 1])
  uint32_t rank[BPE_SHORT];      // of the pair i, i + 1
  int count = 0;
  for (size_t i = 0; i < n; i += symbol_bytes(s + i, n - i)) begin[count++] = (uint8_t)i;
  begin[count] = (uint8_t)n;
  for (int i = 0; i + 1 < count; i++) rank[i] = tokenizer_rank(t, s + begin[i], (size_t)(begin[i + 2] - begin[i]));
  while (count > 1) {
    int best = 0;
    for (int i = 1; i + 1 < count; i++)
      if (rank[i] < rank[best]) best = i;
    if (rank[best] == BPE_NONE) break;
    memmove(begin + best + 1, begin + best + 2, (size_t)(count - best - 1));
    memmove(rank + best, rank + best + 1, (size_t)(count - best - 2) * sizeof rank[0]);
    count--;
    for (int i = best > 0 ? best - 1 : 0; i <= best && i + 1 < count; i++)
      rank[i] = tokenizer_rank(t, s + begin[i], (size_t)(begin[i + 2] - begin[i]));
  }
  for (int i = 0; i < count; i++) {
    size_t len = (size_t)(begin[i + 1] - begin[i]);
    bpe_emit_symbol(e, s + begin[i], len, tokenizer_find(t, s + begin[i], len));
  }
}

static inline int bpe_pair_before(BpePair a, BpePair b) {
  return a.rank < b.rank || (a.rank == b.rank && a.left < b.left);
}

static inline void bpe_sift_down(BpePair *q, size_t count, size_t i) {
  BpePair x = q[i];
  for (size_t c; (c = 2 * i + 1) < count; i = c) {
    if (c + 1 < count && bpe_pair_before(q[c + 1], q[c])) c++;
    if (!bpe_pair_before(q[c], x)) break;
    q[i] = q[c];
  }
  q[i] = x;
}

static inline int bpe_pair_is_live(const BpeEncoder *e, size_t n, BpePair p) {
  size_t left = (size_t)p.left, a = e->head[left];
  return a && left + a < n && a + e->head[left + a] == p.bytes;
}

// Any length: a priority queue of pairs. Neighbours are found from the sizes at the two ends of each symbol.
static inline void bpe_merge_long(BpeEncoder *e, const char *s, size_t n) {
  const Tokenizer *t = e->t;
  if (n > e->queue_capacity) {
    e->head = (uint16_t *)tokenizer_grow(e->head, n, sizeof *e->head);
    e->tail = (uint16_t *)tokenizer_grow(e->tail, n, sizeof *e->tail);
    e->queue = (BpePair *)tokenizer_grow(e->queue, n, sizeof *e->queue);
    e->queue_capacity = n;
  }
  uint16_t *head = e->head, *tail = e->tail;
  BpePair *q = e->queue;
  memset(head, 0, n * sizeof *head);
  size_t count = 0, last = 0;
  for (size_t i = 0; i < n; i += head[i]) {
    head[i] = (uint16_t)symbol_bytes(s + i, n - i);
    tail[i + head[i] - 1] = head[i];
    if (i) {
      BpePair p = {0, (uint32_t)(head[last] + head[i]), last};
      p.rank = tokenizer_rank(t, s + last, p.bytes);
      if (p.rank != BPE_NONE) q[count++] = p;
    }
    last = i;
  }
  for (size_t i = count / 2; i-- > 0;) bpe_sift_down(q, count, i);
  while (count) {
    BpePair top = q[0];
    q[0] = q[--count];
    if (count) bpe_sift_down(q, count, 0);
    if (!bpe_pair_is_live(e, n, top)) continue;
    size_t left = (size_t)top.left, end = left + top.bytes;
    head[left + head[left]] = 0;
    head[left] = tail[end - 1] = (uint16_t)top.bytes;
    size_t starts[2] = {left, left};
    if (left) starts[0] = left - tail[left - 1];
    for (int k = left ? 0 : 1; k < 2; k++) {
      size_t l = starts[k], r = l + head[l];
      if (r >= n) continue;
      BpePair p = {0, (uint32_t)head[l] + head[r], l};
      p.rank = tokenizer_rank(t, s + l, p.bytes);
      if (p.rank == BPE_NONE) continue;
      if (count == n) {  // After m merges at least m entries are stale: dropping them happens O(log n) times in all.
        size_t kept = 0;
        for (size_t i = 0; i < count; i++)
          if (bpe_pair_is_live(e, n, q[i])) q[kept++] = q[i];
        count = kept;
        for (size_t i = count / 2; i-- > 0;) bpe_sift_down(q, count, i);
      }
      size_t i = count++;
      for (; i && bpe_pair_before(p, q[(i - 1) / 2]); i = (i - 1) / 2) q[i] = q[(i - 1) / 2];
      q[i] = p;
    }
  }
  for (size_t i = 0; i < n; i += head[i]) bpe_emit_symbol(e, s + i, head[i], tokenizer_find(t, s + i, head[i]));
}

static inline void bpe_free(BpeEncoder *e) {  // but for the ids
  free(e->head);
  free(e->tail);
  free(e->queue);
}

// Gives the ids of n > 0 bytes between two cuts, n counted in whole symbols.
static inline void bpe_encode_stretch(BpeEncoder *e, const char *s, size_t n) {
  int32_t id = tokenizer_find(e->t, s, n);
  if (id >= 0 && e->t->pieces[id].direct)
    bpe_emit_symbol(e, s, n, id);
  else if (n <= BPE_SHORT)
    bpe_merge_short(e, s, n);
  else
    bpe_merge_long(e, s, n);
}

// ----------------------------------------------------------------------------------------------------------------
// Tables

typedef struct {
  float score;
  int32_t id;
} ScoredPiece;

static inline int scored_piece_order(const void *x, const void *y) {
  float a = ((const ScoredPiece *)x)->score, b = ((const ScoredPiece *)y)->score;
  return a > b ? -1 : a < b;
}

typedef struct {  // qsort gives its order no context, so the piece comes along
  const char *text;
  size_t bytes;
  int32_t id;
} UserPiece;

static inline int user_piece_order(const void *x, const void *y) {
  const UserPiece *a = (const UserPiece *)x, *b = (const UserPiece *)y;
  int c = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
  return c ? c : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

// Builds what encoding needs beside the pieces: order of user pieces, joins, direct.
static inline void bpe_index(Tokenizer *t) {
  UserPiece *user = (UserPiece *)alloc_array(t->vocab, sizeof *user, "tokenizer");
  int32_t count = 0;
  uint32_t bits = 1u << 12;
  while (bits < (1u << 27) && bits < 16u * (uint32_t)t->vocab) bits *= 2;
  t->join_mask = bits - 1;
  t->joins = (uint8_t *)alloc_zeroed(bits / 8, 1, "tokenizer");
  for (int32_t id = 0; id < t->vocab; id++) {
    const TokenPiece *p = &t->pieces[id];
    const char *s = t->text + p->start;
    if (piece_is_reserved(p->type)) continue;
    if (p->bytes > t->longest) t->longest = p->bytes;
    if (p->type == PIECE_USER) {
      user[count].text = s;
      user[count].bytes = p->bytes;
      user[count++].id = id;
    }
    uint32_t left = 0;
    for (size_t i = 0, len; i < p->bytes; i += len) {
      len = symbol_bytes(s + i, p->bytes - i);
      uint32_t right = symbol_key(s + i, len);
      int a = join_class(left), b = join_class(right);
      uint32_t h = join_hash(t, left, right);
      if (i && a >= 0 && b >= 0) t->joins_small[a * 129 + b] = 1;
      if (i) t->joins[h >> 3] |= (uint8_t)(1 << (h & 7));
      left = right;
    }
  }
  qsort(user, (size_t)count, sizeof *user, user_piece_order);
  t->user = (int32_t *)alloc_array(count, sizeof *t->user, "tokenizer");
  for (int32_t i = 0; i < count; i++) {
    t->user[i] = user[i].id;
    t->user_first[(uint8_t)user[i].text[0] + 1] = i + 1;
  }
  for (int b = 1; b <= 256; b++)
    if (t->user_first[b] < t->user_first[b - 1]) t->user_first[b] = t->user_first[b - 1];
  free(user);

  BpeEncoder e;
  memset(&e, 0, sizeof e);
  e.t = t;
  for (int32_t id = 0; id < t->vocab; id++) {
    TokenPiece *p = &t->pieces[id];
    if (piece_is_reserved(p->type) || p->emit != id) continue;
    e.count = 0;
    (p->bytes <= BPE_SHORT ? bpe_merge_short : bpe_merge_long)(&e, t->text + p->start, p->bytes);
    p->direct = e.count == 1 && e.ids[0] == id;
  }
  free(e.ids);
  bpe_free(&e);
}

#endif  // GDN_BPE_H
