// options.h: from a command line to settings, and back to text.
//
//   --name value, --name=value; switches are on or off, and --name alone is on. Of an option given twice on the command
//   line, the last counts.
//   --config FILE: lines `name = value`, # begins a comment, "..." quotes a value (with \" \\ \n \r \t inside); a name
//   given twice there is an error. The command line wins over the file, the file over the preset (--model).
//   Numbers of tokens may end in K, M, B or T: thousands, millions, billions, trillions (powers of 1000).
// Values that follow from others (steps from tokens, min-lr from lr, ...) are final after parsing.
//
// defines: options_default, options_parse_argv, options_parse, options_to_config, options_schedule, and all of
//          option_table.h and options_print.h
#ifndef GDN_OPTIONS_H
#define GDN_OPTIONS_H

#include "option_table.h"
#include "options_print.h"

// ----------------------------------------------------------------------------
// the configuration file

enum { MAX_CONFIG_BYTES = 1 << 20 };

// Reads a quoted value: text points behind the first quote. The end of the value, NULL when it is malformed.
static inline char *config_unquote(char *text) {
  char *to = text;
  for (char *s = text; *s; s++) {
    if (*s == '"') {
      s += 1 + strspn(s + 1, " \t");
      if (*s && *s != '#') return NULL;
      *to = 0;
      return to;
    }
    if (*s == '\\') {
      s++;
      const char *at = *s ? strchr("\"\\nrt", *s) : NULL;
      if (!at) return NULL;
      *to++ = "\"\\\n\r\t"[at - "\"\\nrt"];
    } else {
      *to++ = *s;
    }
  }
  return NULL;
}

// Splits one line in place into name and value; *name is NULL for an empty line. 0: not of the form.
static inline int config_split(char *line, char **name, char **value) {
  *name = *value = NULL;
  line += strspn(line, " \t");
  if (!*line || *line == '#') return 1;
  size_t n = strcspn(line, " \t=#");
  char *s = line + n, *equals = s + strspn(s, " \t");
  if (!n || *equals != '=') return 0;
  *s = 0;
  s = equals + 1 + strspn(equals + 1, " \t");
  if (*s == '"') {
    if (!config_unquote(s + 1)) return 0;
    s++;
  } else {
    for (char *c = s; *c; c++)
      if (*c == '#' && (c == s || c[-1] == ' ' || c[-1] == '\t')) {
        *c = 0;
        break;
      }
    for (char *end = s + strlen(s); end > s && (end[-1] == ' ' || end[-1] == '\t');) *--end = 0;
  }
  *name = line, *value = s;
  return 1;
}

// A pass over the file's text: takes only `model` (preset = 1) or everything else. `text` is used up.
static inline int config_apply(Options *o, char *text, const char *file, int preset, Error *err) {
  int seen[MAX_OPTIONS] = {0};
  int number = 1;
  for (char *line = text, *next; line; line = next, number++) {
    next = strchr(line, '\n');
    if (next) *next++ = 0;
    size_t n = strlen(line);
    if (n && line[n - 1] == '\r') line[n - 1] = 0;
    char *name, *value;
    if (!config_split(line, &name, &value))
      return error_set(err, EXIT_USAGE, "%s line %d: needed a line 'name = value', '# comment' or nothing", file,
                       number);
    if (!name) continue;
    int i = option_find(name);
    if (i < 0)
      return error_set(err, EXIT_USAGE, "%s line %d: no option '%.200s'; did you mean %s?", file, number, name,
                       option_nearest(name));
    const Option *p = &option_table[i];
    if (p->group == GROUP_OTHER)
      return error_set(err, EXIT_USAGE, "%s line %d: '%s' can only be given on the command line", file, number, name);
    if (seen[i])
      return error_set(err, EXIT_USAGE, "%s line %d: '%s' was given in line %d already", file, number, name, seen[i]);
    seen[i] = number;
    if ((p->type == OPT_MODEL) != preset) continue;
    char where[OPTION_PATH_SIZE + 96];
    snprintf(where, sizeof where, "%s line %d: %s", file, number, name);
    int code = option_set(o, p, value, where, err);
    if (code) return code;
    o->source[i] = SOURCE_FILE;
  }
  return 0;
}

// The text of the file, NULL with err set. The caller frees it.
static inline char *config_load(const char *file, Error *err) {
  FILE *f = fopen(file, "rb");
  if (!f) {
    error_set(err, EXIT_USAGE, "--config %s: cannot open: %s", file, strerror(errno));
    return NULL;
  }
  char *text = (char *)alloc_array(MAX_CONFIG_BYTES + 1, 1, "configuration file");
  size_t n = fread(text, 1, MAX_CONFIG_BYTES, f);
  int bad = ferror(f), more = !bad && fgetc(f) != EOF;
  fclose(f);
  text[n] = 0;
  if (bad || more || strlen(text) != n) {
    error_set(err, EXIT_USAGE, "--config %s: %s", file,
              bad    ? "cannot be read"
              : more ? "more than 1 MiB; needed a text file of options"
                     : "holds a zero byte; needed a text file of options");
    free(text);
    return NULL;
  }
  return text;
}

// ----------------------------------------------------------------------------
// parsing

// The option of an argument that begins with --, and its value (which may be the next argument). 0, or EXIT_USAGE.
static inline int argument_read(int argc, char **argv, int *i, const Option **option, const char **value, Error *err) {
  char name[64];
  const char *arg = argv[*i] + 2;
  size_t n = strcspn(arg, "=");
  snprintf(name, sizeof name, "%.*s", n < 63 ? (int)n : 63, arg);
  int row = n < 63 ? option_find(name) : -1;
  if (row < 0)
    return error_set(err, EXIT_USAGE, "no option --%s; did you mean --%s? See --help", name, option_nearest(name));
  const Option *p = *option = &option_table[row];
  if (arg[n]) {
    *value = arg + n + 1;
    return 0;
  }
  const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
  if (p->type == OPT_SWITCH ? !next || choice_find("off|on", next) < 0
                            : p->implied && (!next || !strncmp(next, "--", 2))) {
    *value = p->implied;
    return 0;
  }
  if (!next) return error_set(err, EXIT_USAGE, "--%s needs a value: %s", p->name, p->value);
  if (!strncmp(next, "--", 2))
    return error_set(err, EXIT_USAGE,
                     "--%s needs a value (%s), found the option %.200s; write --%s=VALUE if that is it", p->name,
                     p->value, next, p->name);
  *value = next;
  ++*i;
  return 0;
}

// A pass over the command line: only --model (preset = 1), or everything else.
static inline int arguments_apply(Options *o, int argc, char **argv, int preset, Error *err) {
  int code;
  for (int i = 1; i < argc; i++) {
    if (strncmp(argv[i], "--", 2) || !argv[i][2]) {
      if (argv[i][0] == '-' && argv[i][1])
        return error_set(err, EXIT_USAGE, "'%.200s': options begin with two dashes; did you mean --%s? See --help",
                         argv[i], option_nearest(argv[i] + strspn(argv[i], "-")));
      if (i == 1) {
        int best = 0, found = -1;
        for (int c = 0; c < COMMAND_COUNT; c++) {
          if (!strcmp(argv[1], command_names[c])) found = c;
          if (edit_distance(argv[1], command_names[c]) < edit_distance(argv[1], command_names[best])) best = c;
        }
        if (found < 0) {
          int near = edit_distance(argv[1], command_names[best]) <= 2;
          return error_set(err, EXIT_USAGE,
                           "no command '%.200s'%s%s%s The commands: train, eval, sample, inspect, selftest; see --help",
                           argv[1], near ? "; did you mean " : "", near ? command_names[best] : "", near ? "?" : ".");
        }
        o->command = (Command)found;
        continue;
      }
      int most = o->command == COMMAND_INSPECT                                ? MAX_FOLDERS
                 : o->command == COMMAND_EVAL || o->command == COMMAND_SAMPLE ? 1
                                                                              : 0;
      if (preset) continue;
      if (o->n_folders >= most)
        return error_set(err, EXIT_USAGE, "unexpected '%.200s': %s takes %s", argv[i], command_names[o->command],
                         most > 1 ? "at most 64 folders"
                         : most   ? "one folder"
                                  : "only options (--name value); a name with * goes in quotes: '*.bin'");
      o->folders[o->n_folders++] = argv[i];
      continue;
    }
    const Option *p = NULL;
    const char *value = NULL;
    char where[80];
    if ((code = argument_read(argc, argv, &i, &p, &value, err))) return code;
    if ((p->type == OPT_MODEL) != preset) continue;
    snprintf(where, sizeof where, "--%s", p->name);
    if ((code = option_set(o, p, value, where, err))) return code;
    o->source[p - option_table] = SOURCE_COMMAND_LINE;
  }
  return 0;
}

static inline Options options_default(void) {
  Options o;
  memset(&o, 0, sizeof o);
  o.config = config_default();
  for (int i = 0; i < option_count; i++)
    if (option_table[i].standard && option_set(&o, &option_table[i], option_table[i].standard, "default", NULL))
      fail(EXIT_INTERNAL, "option table: the default of --%s is not accepted", option_table[i].name);
  return o;
}

// Of two options that say the same, the one that was given closer to the command line stays. 1: both given alike.
static inline int option_pair(Options *o, const char *a, const char *b) {
  unsigned char *x = &o->source[option_find(a)], *y = &o->source[option_find(b)];
  if (*x >= SOURCE_FILE && *x == *y) return 1;
  if (*x < *y) *x = SOURCE_DEFAULT;
  if (*y < *x) *y = SOURCE_DEFAULT;
  return 0;
}

// What follows from other values. 0, or EXIT_USAGE.
static inline int options_resolve(Options *o, Error *err) {
  const Config *c = &o->config;
  if (!option_is_given(o, "v-heads") && option_is_given(o, "heads")) o->config.v_heads = c->heads;
  if (!option_is_given(o, "attn-kv-heads") && option_is_given(o, "attn-heads")) o->config.attn_kv_heads = c->attn_heads;
  if (!option_is_given(o, "val") && !strncmp(o->train, "recall", 6)) memcpy(o->val, o->train, sizeof o->val);
  if (o->n_folders && o->command != COMMAND_INSPECT) {
    if (o->init_from[0])
      return error_set(err, EXIT_USAGE, "%s: both the folder '%.200s' and --init-from: give one",
                       command_names[o->command], o->folders[0]);
    if (strlen(o->folders[0]) >= OPTION_PATH_SIZE)
      return error_set(err, EXIT_USAGE, "folder name longer than %d bytes", OPTION_PATH_SIZE - 1);
    snprintf(o->init_from, sizeof o->init_from, "%s", o->folders[0]);
  }
  if (o->command == COMMAND_INSPECT && !o->n_folders && !o->help)
    return error_set(err, EXIT_USAGE, "inspect needs one folder or more: train_gdn inspect DIR...");

  if (option_is_given(o, "total-batch") && !option_is_given(o, "batch") && o->total_batch % o->seq_len == 0)
    while (o->total_batch / o->seq_len % o->batch) o->batch--;  // the preset's micro-batch, made to fit
  int64_t micro = (int64_t)o->batch * o->seq_len;
  if (!option_is_given(o, "total-batch") && (o->total_batch == 0 || o->total_batch % micro)) {
    // the preset's size, rounded to whole micro-batches
    o->total_batch = o->total_batch > micro ? o->total_batch / micro * micro : micro;
  }
  if (o->total_batch % micro) {
    int64_t below = o->total_batch / micro * micro;
    return error_set(err, EXIT_USAGE,
                     "--total-batch %lld is not a multiple of batch x seq-len = %d x %d = %lld tokens: needed such as "
                     "%lld or %lld; change --total-batch, --batch or --seq-len",
                     (long long)o->total_batch, o->batch, o->seq_len, (long long)micro,
                     (long long)(below ? below : micro), (long long)(below + (below ? micro : 2 * micro)));
  }

  if (option_pair(o, "steps", "tokens"))
    return error_set(err, EXIT_USAGE, "both steps and tokens are given: give --steps or --tokens");
  if (option_is_given(o, "tokens") || (!option_is_given(o, "steps") && !o->steps)) {
    o->steps = o->tokens / o->total_batch;
    if (o->steps < 1)
      return error_set(err, EXIT_USAGE,
                       "--tokens %lld is less than one step of %lld tokens: change --tokens or --total-batch",
                       (long long)o->tokens, (long long)o->total_batch);
  }
  if (o->steps > INT64_MAX / o->total_batch)
    return error_set(err, EXIT_USAGE, "%lld steps of %lld tokens are more tokens than can be counted: change --steps",
                     (long long)o->steps, (long long)o->total_batch);
  o->tokens = o->steps * o->total_batch;

  if (option_pair(o, "warmup", "warmup-tokens"))
    return error_set(err, EXIT_USAGE, "both warmup and warmup-tokens are given: give --warmup or --warmup-tokens");
  if (option_is_given(o, "warmup-tokens"))
    o->warmup = o->warmup_tokens / o->total_batch;
  else if (!option_is_given(o, "warmup")) {
    if (o->warmup < 0) o->warmup = (o->steps + 50) / 100;
    if (o->warmup > o->steps / 4) o->warmup = o->steps / 4;  // a preset's warm-up in a run made short
  }
  if (o->warmup > o->steps)
    return error_set(err, EXIT_USAGE, "a warm-up of %lld steps in a run of %lld: change --warmup or --steps",
                     (long long)o->warmup, (long long)o->steps);
  o->warmup_tokens = o->warmup * o->total_batch;

  if (!option_is_given(o, "min-lr")) {
    char text[40];  // as a person would type it: 0.0003, not 0.00030000000000000003
    snprintf(text, sizeof text, "%.12g", o->lr / 10);
    o->min_lr = strtod(text, NULL);
  }
  if (o->min_lr > o->lr)
    return error_set(err, EXIT_USAGE, "--min-lr %g is above --lr %g: change one of them", o->min_lr, o->lr);
  if (o->ranks % o->nodes)
    return error_set(err, EXIT_USAGE, "--ranks %d on --nodes %d: needed the same number of ranks on every node",
                     o->ranks, o->nodes);
  return 0;
}

// 1: the model is just what the preset says.
static inline int options_as_preset(const Options *o) {
  const Preset *preset = preset_find(o->model);
  if (!preset) return 0;
  Options p = *o;
  p.config = preset_config(preset);
  for (int i = 0; i < option_count; i++) {
    char mine[TEXT_SIZE], theirs[TEXT_SIZE];
    if (option_table[i].group != GROUP_MODEL && option_table[i].group != GROUP_VARIANT) continue;
    option_value(o, &option_table[i], mine, sizeof mine);
    option_value(&p, &option_table[i], theirs, sizeof theirs);
    if (strcmp(mine, theirs)) return 0;
  }
  return 1;
}

// Fills *o from the command line and the configuration file that it names. 0, or EXIT_USAGE and one line in err; *o is
// then not to be used. When o->help is set, nothing else has been looked at. argv must outlive *o.
static inline int options_parse_argv(Options *o, int argc, char **argv, Error *err) {
  int code;
  *o = options_default();
  for (int i = 1; i < argc; i++)
    if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h") || (i == 1 && !strcmp(argv[i], "help"))) {
      o->help = 1;
      return 0;
    }
  // the preset first: the file and the command line change it
  if ((code = arguments_apply(o, argc, argv, 1, err))) return code;
  Options found = *o;
  if ((code = arguments_apply(&found, argc, argv, 0, err))) return code;
  char *text = NULL;
  if (found.config_file[0]) {
    if (!(text = config_load(found.config_file, err))) return err ? err->code : EXIT_USAGE;
    size_t bytes = strlen(text) + 1;
    char *copy = (char *)memcpy(alloc_array((int64_t)bytes, 1, "configuration file"), text, bytes);
    Options named = *o;
    code = config_apply(&named, copy, found.config_file, 1, err);
    free(copy);
    if (!code && option_source(o, "model") != SOURCE_COMMAND_LINE) *o = named;
  }
  if (!code) {
    const Preset *preset = preset_find(o->model);
    const Recipe *r = preset ? preset_recipe(preset) : &recipes[RECIPE_TINY];
    if (preset) o->config = preset_config(preset);
    o->batch = r->batch, o->seq_len = r->seq_len, o->total_batch = r->total_batch;
    o->steps = r->steps, o->tokens = r->tokens, o->lr = r->lr, o->warmup = r->warmup;
    for (int i = 0; i < option_count; i++)
      if (!option_table[i].standard) o->source[i] = SOURCE_PRESET;
    if (text) code = config_apply(o, text, found.config_file, 0, err);
  }
  free(text);
  if (code) return code;
  if ((code = arguments_apply(o, argc, argv, 0, err))) return code;
  if ((code = options_resolve(o, err))) return code;
  if (!options_as_preset(o)) snprintf(o->config.model, sizeof o->config.model, "custom");
  return 0;
}

// The model that was asked for: preset, then given options. 0, or EXIT_CONFIG and one line when it cannot be built.
static inline int options_to_config(const Options *o, Config *c, Error *err) {
  *c = o->config;
  return config_check(c, err);
}

static inline ScheduleConfig options_schedule(const Options *o) {
  ScheduleConfig s = {(Schedule)o->schedule, o->lr, o->min_lr, o->steps, o->warmup, o->decay_fraction};
  return s;
}

// options_parse_argv for main: ends the program on an error, and after --help (exit code 0).
static inline void options_parse(Options *o, int argc, char **argv) {
  Error err;
  Config c;
  if (options_parse_argv(o, argc, argv, &err)) fail_error(&err);
  if (o->help) {
    options_help(stdout);
    exit(fflush(stdout) ? EXIT_INTERNAL : 0);
  }
  if (options_to_config(o, &c, &err)) fail_error(&err);
}

#endif  // GDN_OPTIONS_H
