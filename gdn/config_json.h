// config_json.h: every field of Config by name: to JSON and back exactly, and in which fields two of them differ.
//
// defines: ConfigField, config_fields, config_to_json, config_from_json, config_diff
#ifndef GDN_CONFIG_JSON_H
#define GDN_CONFIG_JSON_H

#include <limits.h>
#include <stddef.h>
#include "config.h"
#include "json.h"

typedef enum { FIELD_INT, FIELD_REAL, FIELD_CHOICE } FieldKind;
typedef enum {
  FOR_ALL,
  FOR_DELTA,
  FOR_CONV,
  FOR_GDN2,
  FOR_KDA,
  FOR_ATTENTION,
  FOR_SWA,
  FOR_MAMBA2,
  FOR_RESET
} FieldUse;

typedef struct {
  const char *name;
  FieldKind kind;
  size_t offset;
  FieldUse use;         // which models it matters to
  const char *choices;  // names of an enum's values, in order, separated by spaces
} ConfigField;

// `model` and `pattern` are the only ones that are not in this table.
static const ConfigField config_fields[] = {
    {"vocab", FIELD_INT, offsetof(Config, vocab), FOR_ALL, NULL},
    {"width", FIELD_INT, offsetof(Config, width), FOR_ALL, NULL},
    {"layers", FIELD_INT, offsetof(Config, layers), FOR_ALL, NULL},
    {"ff", FIELD_INT, offsetof(Config, ff), FOR_ALL, NULL},
    {"tied", FIELD_INT, offsetof(Config, tied), FOR_ALL, NULL},
    {"heads", FIELD_INT, offsetof(Config, heads), FOR_DELTA, NULL},
    {"v_heads", FIELD_INT, offsetof(Config, v_heads), FOR_DELTA, NULL},
    {"head_k", FIELD_INT, offsetof(Config, head_k), FOR_DELTA, NULL},
    {"head_v", FIELD_INT, offsetof(Config, head_v), FOR_DELTA, NULL},
    {"attn_heads", FIELD_INT, offsetof(Config, attn_heads), FOR_ATTENTION, NULL},
    {"attn_kv_heads", FIELD_INT, offsetof(Config, attn_kv_heads), FOR_ATTENTION, NULL},
    {"attn_head_dim", FIELD_INT, offsetof(Config, attn_head_dim), FOR_ATTENTION, NULL},
    {"window", FIELD_INT, offsetof(Config, window), FOR_SWA, NULL},
    {"rope_theta", FIELD_REAL, offsetof(Config, rope_theta), FOR_ATTENTION, NULL},
    {"mamba_state", FIELD_INT, offsetof(Config, mamba_state), FOR_MAMBA2, NULL},
    {"mamba_head", FIELD_INT, offsetof(Config, mamba_head), FOR_MAMBA2, NULL},
    {"mamba_expand", FIELD_INT, offsetof(Config, mamba_expand), FOR_MAMBA2, NULL},
    {"mamba_groups", FIELD_INT, offsetof(Config, mamba_groups), FOR_MAMBA2, NULL},
    {"conv_size", FIELD_INT, offsetof(Config, conv_size), FOR_CONV, NULL},
    {"norm_eps", FIELD_REAL, offsetof(Config, norm_eps), FOR_ALL, NULL},
    {"l2_eps", FIELD_REAL, offsetof(Config, l2_eps), FOR_DELTA, NULL},
    {"beta_max", FIELD_INT, offsetof(Config, beta_max), FOR_DELTA, NULL},
    {"output_gate", FIELD_CHOICE, offsetof(Config, output_gate), FOR_DELTA, "auto silu sigmoid none"},
    {"output_norm", FIELD_INT, offsetof(Config, output_norm), FOR_DELTA, NULL},
    {"qk_norm", FIELD_CHOICE, offsetof(Config, qk_norm), FOR_DELTA, "l2 l1"},
    {"decay", FIELD_INT, offsetof(Config, decay), FOR_DELTA, NULL},
    {"erase", FIELD_CHOICE, offsetof(Config, erase), FOR_GDN2, "channel head"},
    {"write", FIELD_CHOICE, offsetof(Config, write), FOR_GDN2, "channel head"},
    {"kda_lower_bound", FIELD_REAL, offsetof(Config, kda_lower_bound), FOR_KDA, NULL},
    {"boundary_reset", FIELD_INT, offsetof(Config, boundary_reset), FOR_ALL, NULL},
    {"bos", FIELD_INT, offsetof(Config, bos), FOR_RESET, NULL},
};
enum { CONFIG_FIELDS = sizeof config_fields / sizeof *config_fields };

static inline int config_field_int(const Config *c, const ConfigField *f) {  // enums too: they have the size of an int
  int v;
  memcpy(&v, (const char *)c + f->offset, sizeof v);
  return v;
}

static inline double config_field_real(const Config *c, const ConfigField *f) {
  double v;
  memcpy(&v, (const char *)c + f->offset, sizeof v);
  return v;
}

// The n-th name of a list separated by spaces, copied; "?" past the end. Returns dst.
static inline const char *word_at(const char *list, int n, char *dst, size_t size) {
  for (; n > 0 && list; n--) list = strchr(list, ' ') ? strchr(list, ' ') + 1 : NULL;
  snprintf(dst, size, "%.*s", list && n == 0 ? (int)strcspn(list, " ") : 1, list && n == 0 ? list : "?");
  return dst;
}

static inline int word_index(const char *list, const char *name) {  // -1: not in the list
  char word[32];
  for (int n = 0;; n++) {
    if (!strcmp(word_at(list, n, word, sizeof word), "?")) return -1;
    if (!strcmp(word, name)) return n;
  }
}

// A new object with all fields.
static inline json_t *config_to_json(const Config *c) {
  json_t *j = json_object(), *pattern = json_array();
  char word[32];
  json_object_set_new(j, "model", json_string(c->model));
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    json_object_set_new(j, f->name,
                        f->kind == FIELD_REAL ? json_real(config_field_real(c, f))
                        : f->kind == FIELD_INT
                            ? json_integer(config_field_int(c, f))
                            : json_string(word_at(f->choices, config_field_int(c, f), word, sizeof word)));
  }
  for (int i = 0; i < c->n_pattern; i++) json_array_append_new(pattern, json_string(mixer_name(c->pattern[i])));
  json_object_set_new(j, "pattern", pattern);
  return j;
}

static inline int config_from_json(const json_t *j, Config *c, const char *path, Error *err) {
  *c = config_default();
  const char *model = json_get_text(j, "model", path, err);
  if (!model) return EXIT_CHECKPOINT;
  snprintf(c->model, sizeof c->model, "%s", model);
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    int64_t n = 0;
    double x = 0;
    if (f->kind == FIELD_REAL) {
      if (json_get_real(j, f->name, &x, path, err)) return EXIT_CHECKPOINT;
      memcpy((char *)c + f->offset, &x, sizeof x);
      continue;
    }
    if (f->kind == FIELD_INT) {
      if (json_get_int(j, f->name, -1, 1 << 24, &n, path, err)) return EXIT_CHECKPOINT;
    } else {
      const char *name = json_get_text(j, f->name, path, err);
      if (!name) return EXIT_CHECKPOINT;
      n = word_index(f->choices, name);
      if (n < 0)
        return error_set(err, EXIT_CHECKPOINT, "%s: \"%s\" is %.40s: needed one of %s", path, f->name, name,
                         f->choices);
    }
    int v = (int)n;
    memcpy((char *)c + f->offset, &v, sizeof v);
  }
  if (c->mamba_expand > 1024)  // its product with the width must fit an int
    return error_set(err, EXIT_CHECKPOINT, "%s: \"mamba_expand\" is %d: needed at most 16", path, c->mamba_expand);
  const json_t *pattern = json_object_get(j, "pattern");
  size_t n = json_array_size(pattern);
  if (n < 1 || n > MAX_PATTERN)
    return error_set(err, EXIT_CHECKPOINT, "%s: \"pattern\": needed 1 to %d mixers", path, MAX_PATTERN);
  c->n_pattern = (int)n;
  for (size_t i = 0; i < n; i++) {
    const char *name = json_string_value(json_array_get(pattern, i));
    c->pattern[i] = mixer_from_name(name ? name : "");
    if (c->pattern[i] == MIX_COUNT)
      return error_set(err, EXIT_CHECKPOINT, "%s: \"pattern\" holds %.40s, which is no mixer", path, name ? name : "?");
  }
  json_t *object = (json_t *)j;
  for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at)) {
    const char *key = json_object_iter_key(at);
    int known = !strcmp(key, "model") || !strcmp(key, "pattern");
    for (int i = 0; i < CONFIG_FIELDS && !known; i++) known = !strcmp(key, config_fields[i].name);
    if (!known) return error_set(err, EXIT_CHECKPOINT, "%s: unknown field \"%.80s\": of a newer version?", path, key);
  }
  return 0;
}

static inline int config_field_used(const Config *c, FieldUse use) {
  int delta = 0;
  for (int m = 0; m < MIX_COUNT; m++) delta |= mixer_is_delta((Mixer)m) && config_has_mixer(c, (Mixer)m);
  switch (use) {
    case FOR_DELTA:
      return delta;
    case FOR_CONV:
      return delta || config_has_mixer(c, MIX_MAMBA2);
    case FOR_GDN2:
      return config_has_mixer(c, MIX_GDN2);
    case FOR_KDA:
      return config_has_mixer(c, MIX_KDA);
    case FOR_ATTENTION:
      return config_has_mixer(c, MIX_SWA) || config_has_mixer(c, MIX_ATTN);
    case FOR_SWA:
      return config_has_mixer(c, MIX_SWA);
    case FOR_MAMBA2:
      return config_has_mixer(c, MIX_MAMBA2);
    case FOR_RESET:
      return c->boundary_reset;
    default:
      return 1;
  }
}

// 1 when a and b are different models; `line` names the first field that differs, in the words "there" (a) and "here"
// (b). Fields that no layer of either uses do not count, nor does the preset's name.
static inline int config_diff(const Config *a, const Config *b, char *line, size_t size) {
  char x[32], y[32];
  for (int i = 0; i < CONFIG_FIELDS; i++) {
    const ConfigField *f = &config_fields[i];
    if (!config_field_used(a, f->use) && !config_field_used(b, f->use)) continue;
    if (f->kind == FIELD_REAL) {
      if (config_field_real(a, f) == config_field_real(b, f)) continue;
      snprintf(line, size, "%s %.17g there, %.17g here", f->name, config_field_real(a, f), config_field_real(b, f));
      return 1;
    }
    int p = config_field_int(a, f), q = config_field_int(b, f);
    if (f->offset == offsetof(Config, output_gate)) {  // compare what the layers really have
      int differs = 0;
      for (int m = 0; m <= MIX_DELTANET; m++)
        if (config_has_mixer(a, (Mixer)m))
          differs |= config_output_gate(a, (Mixer)m) != config_output_gate(b, (Mixer)m);
      if (!differs) continue;
    }
    if (p == q) continue;
    if (f->kind == FIELD_INT)
      snprintf(line, size, "%s %d there, %d here", f->name, p, q);
    else
      snprintf(line, size, "%s %s there, %s here", f->name, word_at(f->choices, p, x, sizeof x),
               word_at(f->choices, q, y, sizeof y));
    return 1;
  }
  for (int i = 0; i < a->layers; i++)
    if (config_layer_mixer(a, i) != config_layer_mixer(b, i)) {
      snprintf(line, size, "layer %d is %s there, %s here", i, mixer_name(config_layer_mixer(a, i)),
               mixer_name(config_layer_mixer(b, i)));
      return 1;
    }
  return 0;
}

#endif  // GDN_CONFIG_JSON_H
