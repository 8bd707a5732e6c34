// presets.h: the named models, one row each, and the recipe that each is trained with when no option says otherwise.
//
// Sizes: Gated DeltaNet (2412.06464, arXiv v3) and Gated DeltaNet-2 as released, and sets of equal size over the same
// widths (2304 x 18 layers, untied; 1536 x 12, tied; 768 x 12, tied), matched through the MLP. `nv-*` are the first
// release's shapes, `fla-*` those of flame's 1B configurations. dev/test/test_config.c holds the exact counts.
//
// defines: Recipe, Preset, presets, preset_count, preset_find, preset_nearest, preset_config, preset_recipe,
//          preset_list, pattern_parse, pattern_print, edit_distance
#ifndef GDN_PRESETS_H
#define GDN_PRESETS_H

#include <stdio.h>
#include <string.h>
#include "config.h"

// What a preset is trained with: the defaults of --batch, --seq-len, --total-batch, --steps or --tokens, --lr,
// --warmup.
typedef struct {
  int batch, seq_len;
  int64_t total_batch;    // tokens, 0: batch * seq_len
  int64_t steps, tokens;  // one of them is 0
  double lr;
  int64_t warmup;  // steps, -1: 1% of the run (the papers: 1B of 100B tokens)
} Recipe;

typedef enum { RECIPE_TINY, RECIPE_10B, RECIPE_15B, RECIPE_100B } RecipeKind;

static const Recipe recipes[] = {
    {32, 64, 0, 600, 0, 5e-3, 60},
    {8, 4096, 524288, 0, 10000000000, 4e-4, -1},
    {8, 4096, 524288, 0, 15000000000, 4e-4, -1},
    {8, 4096, 524288, 0, 100000000000, 4e-4, -1},
};

typedef struct {
  const char *name, *pattern;
  int width, layers, ff, vocab, tied;
  int heads, head_k, head_v;      // delta-rule mixers
  int attn_heads, attn_head_dim;  // swa, attn
  int window, mamba_state, mamba_head;
  RecipeKind recipe;
} Preset;

static const Preset presets[] = {
    // name, pattern, width, layers, ff, vocab, tied,  heads (key, value),  attention,  window, Mamba2, recipe
    {"tiny-gdn", "gdn", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-gdn-64", "gdn", 128, 2, 0, 129, 0, 2, 64, 64, 2, 64, 64, 64, 64, RECIPE_TINY},  // heads that a GPU takes
    {"tiny-gdn2", "gdn2", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-kda", "kda", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-deltanet", "deltanet", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-mamba2", "mamba2", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 16, 32, RECIPE_TINY},
    {"tiny-swa", "swa", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-attn", "attn", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-h1", "gdn swa", 64, 2, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},
    {"tiny-h2", "mamba2 gdn swa", 64, 3, 0, 129, 0, 2, 32, 32, 2, 32, 64, 32, 32, RECIPE_TINY},

    {"gdn-100m", "gdn", 768, 12, 1408, 32000, 1, 4, 128, 256, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"h1-100m", "gdn swa", 768, 12, 1600, 32000, 1, 4, 128, 256, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"h2-100m", "mamba2 gdn swa", 768, 12, 1472, 32000, 1, 4, 128, 256, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"gdn2-100m", "gdn2", 768, 12, 1088, 32000, 1, 6, 128, 128, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"kda-100m", "kda", 768, 12, 1600, 32000, 1, 6, 128, 128, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"deltanet-100m", "deltanet", 768, 12, 1792, 32000, 1, 6, 128, 128, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"mamba2-100m", "mamba2", 768, 12, 1152, 32000, 1, 6, 128, 128, 6, 128, 2048, 128, 64, RECIPE_10B},
    {"transformer-100m", "attn", 768, 12, 1792, 32000, 1, 6, 128, 128, 6, 128, 2048, 128, 64, RECIPE_10B},

    {"gdn-400m", "gdn", 1536, 12, 3264, 32000, 1, 9, 128, 256, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"gdn128-400m", "gdn", 1536, 12, 3776, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"h1-400m", "gdn swa", 1536, 12, 3776, 32000, 1, 9, 128, 256, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"h2-400m", "mamba2 gdn swa", 1536, 12, 3584, 32000, 1, 9, 128, 256, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"gdn2-400m", "gdn2", 1536, 12, 3072, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"gdn2-h-400m", "gdn2 swa", 1536, 12, 3712, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"kda-400m", "kda", 1536, 12, 4096, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"kda-h-400m", "kda swa", 1536, 12, 4224, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"deltanet-400m", "deltanet", 1536, 12, 4288, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"mamba2-400m", "mamba2", 1536, 12, 3200, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"transformer-400m", "attn", 1536, 12, 4288, 32000, 1, 12, 128, 128, 12, 128, 2048, 128, 64, RECIPE_15B},

    {"gdn-1.3b", "gdn", 2304, 18, 6336, 32000, 0, 12, 128, 256, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"gdn128-1.3b", "gdn", 2304, 18, 7040, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"h1-1.3b", "gdn swa", 2304, 18, 6848, 32000, 0, 12, 128, 256, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"h2-1.3b", "mamba2 gdn swa", 2304, 18, 6528, 32000, 0, 12, 128, 256, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"gdn2-1.3b", "gdn2", 2304, 18, 6208, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"gdn2-h-1.3b", "gdn2 swa", 2304, 18, 6784, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"kda-1.3b", "kda", 2304, 18, 7552, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"kda-h-1.3b", "kda swa", 2304, 18, 7488, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"deltanet-1.3b", "deltanet", 2304, 18, 7360, 32000, 0, 18, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"mamba2-1.3b", "mamba2", 2304, 18, 5760, 32000, 0, 16, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},
    {"mamba2-h-1.3b", "mamba2 swa", 2304, 18, 6592, 32000, 0, 16, 128, 128, 18, 128, 2048, 64, 64, RECIPE_100B},
    {"transformer-1.3b", "attn", 2304, 18, 7424, 32000, 0, 18, 128, 128, 18, 128, 2048, 128, 64, RECIPE_100B},

    {"fla-gdn-1b", "gdn", 2048, 21, 5632, 32000, 0, 6, 256, 512, 16, 128, 2048, 128, 64, RECIPE_100B},
    {"fla-h1-1b", "gdn swa", 2048, 22, 5632, 32000, 0, 6, 256, 512, 16, 128, 2048, 128, 64, RECIPE_100B},
    {"fla-gdn2-1b", "gdn2", 2048, 21, 5632, 32000, 0, 16, 128, 128, 16, 128, 2048, 128, 64, RECIPE_100B},

    {"nv-gdn-0.4b", "gdn", 1536, 11, 6144, 32000, 1, 9, 128, 256, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"nv-h1-0.4b", "gdn swa", 1536, 12, 6144, 32000, 1, 9, 128, 256, 12, 128, 2048, 128, 64, RECIPE_15B},
    {"nv-gdn-1.3b", "gdn", 2400, 16, 5888, 32000, 1, 9, 200, 400, 16, 128, 2048, 128, 64, RECIPE_100B},
    {"nv-h1-1.3b", "gdn swa", 2304, 18, 6144, 32000, 1, 9, 192, 384, 18, 128, 2048, 128, 64, RECIPE_100B},
};

enum { preset_count = sizeof presets / sizeof presets[0] };

// Edits (insert, delete, replace, swap neighbours) that turn a into b; letters alike in either case, - and _ too.
static inline int edit_distance(const char *a, const char *b) {
  enum { MAX = 48 };
  int rows[3][MAX + 1], n = (int)strlen(a), m = (int)strlen(b);
  if (n > MAX || m > MAX) return n > m ? n : m;
#define FOLD(c) ((c) == '_' ? '-' : (c) >= 'A' && (c) <= 'Z' ? (c) - 'A' + 'a' : (c))
  int *before = rows[0], *last = rows[1], *row = rows[2];
  for (int j = 0; j <= m; j++) before[j] = last[j] = j;
  for (int i = 1; i <= n; i++) {
    row[0] = i;
    for (int j = 1; j <= m; j++) {
      int same = FOLD(a[i - 1]) == FOLD(b[j - 1]);
      int best = last[j - 1] + !same;
      if (last[j] + 1 < best) best = last[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      if (i > 1 && j > 1 && FOLD(a[i - 1]) == FOLD(b[j - 2]) && FOLD(a[i - 2]) == FOLD(b[j - 1]) &&
          before[j - 2] + 1 < best)
        best = before[j - 2] + 1;
      row[j] = best;
    }
    int *free_row = before;
    before = last, last = row, row = free_row;
  }
#undef FOLD
  return last[m];
}

// NULL when there is no such preset.
static inline const Preset *preset_find(const char *name) {
  for (int i = 0; i < preset_count; i++)
    if (!strcmp(presets[i].name, name)) return &presets[i];
  return NULL;
}

static inline const char *preset_nearest(const char *name) {
  int best = 0;
  for (int i = 1; i < preset_count; i++)
    if (edit_distance(name, presets[i].name) < edit_distance(name, presets[best].name)) best = i;
  return presets[best].name;
}

// Reads "gdn swa" or "gdn,swa" into the config. 0, or EXIT_USAGE and one line.
static inline int pattern_parse(const char *text, Config *c, Error *err) {
  Mixer found[MAX_PATTERN];
  int n = 0;
  for (const char *s = text;;) {
    s += strspn(s, " ,\t");
    size_t len = strcspn(s, " ,\t");
    if (!len) break;
    char word[64];
    snprintf(word, sizeof word, "%.*s", len < 63 ? (int)len : 63, s);
    Mixer m = mixer_from_name(word);
    if (m == MIX_COUNT) {
      int best = 0;
      for (int i = 1; i < MIX_COUNT; i++)
        if (edit_distance(word, mixer_names[i]) < edit_distance(word, mixer_names[best])) best = i;
      return error_set(err, EXIT_USAGE, "no mixer '%s'; did you mean %s? Needed: gdn gdn2 kda deltanet mamba2 swa attn",
                       word, mixer_names[best]);
    }
    if (n == MAX_PATTERN) return error_set(err, EXIT_USAGE, "more than %d mixers", MAX_PATTERN);
    found[n++] = m;
    s += len;
  }
  if (!n) return error_set(err, EXIT_USAGE, "no mixer named; needed a list such as 'gdn swa'");
  memset(c->pattern, 0, sizeof c->pattern);
  memcpy(c->pattern, found, (size_t)n * sizeof found[0]);
  c->n_pattern = n;
  return 0;
}

// Writes "gdn swa" into text[size].
static inline void pattern_print(char *text, size_t size, const Config *c) {
  size_t at = 0;
  text[0] = 0;
  for (int i = 0; i < c->n_pattern && at + 10 < size; i++)
    at += (size_t)snprintf(text + at, size - at, "%s%s", i ? " " : "", mixer_name(c->pattern[i]));
}

static inline Config preset_config(const Preset *p) {
  Config c = config_default();
  snprintf(c.model, sizeof c.model, "%s", p->name);
  if (pattern_parse(p->pattern, &c, NULL)) fail(EXIT_INTERNAL, "preset %s: bad pattern", p->name);
  c.width = p->width, c.layers = p->layers, c.ff = p->ff, c.vocab = p->vocab, c.tied = p->tied;
  c.heads = c.v_heads = p->heads, c.head_k = p->head_k, c.head_v = p->head_v;
  c.attn_heads = c.attn_kv_heads = p->attn_heads, c.attn_head_dim = p->attn_head_dim, c.window = p->window;
  c.mamba_state = p->mamba_state, c.mamba_head = p->mamba_head;
  if (p->recipe == RECIPE_TINY) c.bos = -1;  // recall has none: its id 0 is a filler
  return c;
}

static inline const Recipe *preset_recipe(const Preset *p) { return &recipes[p->recipe]; }

// The names, as many a line as fit.
static inline void preset_list(FILE *f) {
  int column = 0;
  for (int i = 0; i < preset_count; i++) {
    int n = (int)strlen(presets[i].name);
    if (column + n + 1 > 110) fputc('\n', f), column = 0;
    column += fprintf(f, "%s%s", column ? " " : "    ", presets[i].name);
  }
  fputc('\n', f);
}

#endif  // GDN_PRESETS_H
