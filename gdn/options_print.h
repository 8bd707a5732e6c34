// options_print.h: settings as text, all from option_table: --help, the table at the start of a run, and the lines that
// --config reads back.
//
// defines: options_help, options_print, options_write
#ifndef GDN_OPTIONS_PRINT_H
#define GDN_OPTIONS_PRINT_H

#include "option_table.h"

// Prints text in lines of at most 110 columns, each after `indent` blanks.
static inline void print_wrapped(FILE *f, int indent, const char *text) {
  int column = 0;
  for (const char *s = text; *s;) {
    int n = (int)strcspn(s, " ");
    if (column && column + 1 + n > 110) fputc('\n', f), column = 0;
    column += column ? fprintf(f, " %.*s", n, s) : fprintf(f, "%*s%.*s", indent, "", n, s);
    s += n + (s[n] == ' ');
  }
  fputc('\n', f);
}

static inline void options_help(FILE *f) {
  fprintf(
      f,
      "Usage: train_gdn [train] [--name value]...     train a model (without options: a tiny one, in a minute)\n"
      "       train_gdn eval DIR [--val GLOBS]...     loss of a checkpoint or Hugging Face folder\n"
      "       train_gdn sample DIR [--prompt TEXT]... text from one\n"
      "       train_gdn inspect DIR...                what a checkpoint holds, and whether it is whole\n"
      "       train_gdn selftest                      the same steps twice: are they the same bits?\n\n"
      "Numbers of tokens may end in K, M, B or T (powers of 1000). A switch alone (--tied) is on. Of an option given\n"
      "twice, the last counts. 'preset' as a default: what the model given by --model says; for the run and the\n"
      "optimiser that is %d rows of %d tokens, %lld steps, lr %g for tiny ones, and %d rows of %d tokens, %lld tokens\n"
      "a step, lr %g for the others, over 10B tokens (100m), 15B (400m) or 100B (1b, 1.3b).\n",
      recipes[RECIPE_TINY].batch, recipes[RECIPE_TINY].seq_len, (long long)recipes[RECIPE_TINY].steps,
      recipes[RECIPE_TINY].lr, recipes[RECIPE_100B].batch, recipes[RECIPE_100B].seq_len,
      (long long)recipes[RECIPE_100B].total_batch, recipes[RECIPE_100B].lr);
  for (int g = 0; g < GROUP_COUNT; g++) {
    fprintf(f, "\n%s\n", group_titles[g]);
    for (int i = 0; i < option_count; i++) {
      const Option *p = &option_table[i];
      if ((int)p->group != g) continue;
      char text[768], range[96];
      int n = snprintf(text, sizeof text, "%s [", p->help);
      if (p->type == OPT_CHOICE) n += snprintf(text + n, sizeof text - (size_t)n, "%s; ", p->choices);
      if (p->type == OPT_INT || p->type == OPT_INT64 || p->type == OPT_TOKENS || p->type == OPT_REAL) {
        option_range(p, range, sizeof range);
        n += snprintf(text + n, sizeof text - (size_t)n, "%s; ", range);
      }
      snprintf(text + n, sizeof text - (size_t)n, "default: %s]",
               !p->standard     ? "preset"
               : p->standard[0] ? p->standard
                                : "empty");
      fprintf(f, "  --%s %s\n", p->name, p->value);
      print_wrapped(f, 6, text);
    }
  }
  fprintf(f, "\nPresets\n");
  preset_list(f);
  fprintf(
      f,
      "\nThe MFU on the console is tokens/s x FLOPs per token / peak FLOP/s of the GPU in bf16 without sparsity; "
      "FLOPs\n"
      "per token, forward and backward, are 6 for each element of a matrix that multiplies the token (the head\n"
      "included, the embedding not) and the mixers' own products, as --dry-run prints them; recomputing adds none.\n"
      "\nExit codes: 0 done, 2 usage, 3 model or machine, 4 data, 5 checkpoint, 6 memory, 70 fault of the program,\n"
      "75 stopped and resumable, 76 hang, 78 diverged.\n");
}

// 1: the option says something about this run (the printed table leaves the others out).
static inline int option_matters(const Options *o, const Option *p) {
  const Config *c = &o->config;
  int delta = 0, attention = 0, wants_samples = o->command == COMMAND_SAMPLE || o->sample_every;
  for (int m = 0; m < MIX_COUNT; m++) {
    delta |= mixer_is_delta((Mixer)m) && config_has_mixer(c, (Mixer)m);
    attention |= mixer_is_attention((Mixer)m) && config_has_mixer(c, (Mixer)m);
  }
  if (p->group == GROUP_OTHER) return 0;
  if (o->source[p - option_table] >= SOURCE_FILE) return 1;
  if (!strncmp(p->name, "attn-", 5) || !strcmp(p->name, "rope-theta")) return attention;
  if (!strcmp(p->name, "window")) return config_has_mixer(c, MIX_SWA);
  if (!strncmp(p->name, "mamba-", 6)) return config_has_mixer(c, MIX_MAMBA2);
  if (!strncmp(p->name, "head", 4) || !strcmp(p->name, "v-heads")) return delta;
  if (!strncmp(p->name, "recall-", 7)) return !strncmp(o->train, "recall", 6);
  if (!strcmp(p->name, "decay-fraction")) return o->schedule == SCHEDULE_WSD;
  if (p->group == GROUP_SAMPLING) return wants_samples;
  if (p->group == GROUP_VARIANT || !strcmp(p->name, "buckets") || !strcmp(p->name, "write-logits")) return 0;
  if (!strcmp(p->name, "nodes") || !strcmp(p->name, "ranks") || !strcmp(p->name, "tokens-per-sec")) return o->dry_run;
  return 1;
}

// The settings in force, as a table; * marks those that were given.
static inline void options_print(FILE *f, const Options *o) {
  enum { VALUE = 36 };
  static const char line[] = "+----------------------+--------------------------------------";
  char value[TEXT_SIZE], cell[2][96];
  int n = 0;
  fprintf(f, "%s%s+\n", line, line);
  for (int i = 0; i <= option_count; i++) {
    if (i < option_count) {
      const Option *p = &option_table[i];
      if (!option_matters(o, p)) continue;
      option_value(o, p, value, sizeof value);
      for (char *s = value; *s; s++)
        if ((unsigned char)*s < 32 || *s == 127) *s = ' ';
      if (strlen(value) > VALUE) memcpy(value + VALUE - 3, "...", 4);
      char label[32];
      snprintf(label, sizeof label, "%s%s", p->name, o->source[i] >= SOURCE_FILE ? " *" : "");
      snprintf(cell[n++], sizeof cell[0], "| %-20s | %-36.36s ", label, value[0] ? value : "-");
    } else if (n) {
      snprintf(cell[n++], sizeof cell[0], "| %-20s | %-36.36s ", "", "");
    }
    if (n == 2) fprintf(f, "%s%s|\n", cell[0], cell[1]), n = 0;
  }
  fprintf(f, "%s%s+\n", line, line);
}

// The settings in force as text that --config reads back to the same values.
static inline void options_write(FILE *f, const Options *o) {
  char value[TEXT_SIZE];
  int group = -1;
  for (int i = 0; i < option_count; i++) {
    const Option *p = &option_table[i];
    // tokens and warmup-tokens have become steps
    if (p->group == GROUP_OTHER || !strcmp(p->name, "tokens") || !strcmp(p->name, "warmup-tokens")) continue;
    if ((int)p->group != group) fprintf(f, "%s# %s\n", group < 0 ? "" : "\n", group_titles[p->group]);
    group = (int)p->group;
    option_value(o, p, value, sizeof value);
    int quote = p->type == OPT_TEXT || p->type == OPT_LONG_TEXT;
    fprintf(f, "%s = ", p->name);
    if (quote) fputc('"', f);
    for (const char *s = value; *s; s++) {
      const char *at = quote ? strchr("\"\\\n\r\t", *s) : NULL;
      if (at)
        fprintf(f, "\\%c", "\"\\nrt"[at - "\"\\\n\r\t"]);
      else
        fputc(*s, f);
    }
    fprintf(f, "%s\n", quote ? "\"" : "");
  }
}

#endif  // GDN_OPTIONS_PRINT_H
