// option_table.h: every option in one table, and the struct that holds their values.
//
// An option is one row of option_table and one field of Options; the parser, --help, the configuration file, the
// printed settings and the check on resume walk the table (options.h). A value goes in by option_set and out by
// option_value, both as text.
//
// defines: Command, Options, OptionSource, OptionType, OptionGroup, Option, option_table, option_count, option_find,
//          option_source, option_is_given, option_nearest, option_set, option_value
#ifndef GDN_OPTION_TABLE_H
#define GDN_OPTION_TABLE_H

#include <limits.h>
#include <stddef.h>
#include "parse.h"
#include "presets.h"
#include "schedule.h"

typedef enum { COMMAND_TRAIN, COMMAND_EVAL, COMMAND_SAMPLE, COMMAND_INSPECT, COMMAND_SELFTEST, COMMAND_COUNT } Command;
static const char *const command_names[COMMAND_COUNT] = {"train", "eval", "sample", "inspect", "selftest"};

typedef enum { SOURCE_DEFAULT, SOURCE_PRESET, SOURCE_FILE, SOURCE_COMMAND_LINE } OptionSource;

enum { MAX_OPTIONS = 112, MAX_FOLDERS = 64, OPTION_PATH_SIZE = 1024, TEXT_SIZE = 4096 };

typedef struct {
  Command command;
  const char
      *folders[MAX_FOLDERS];  // inspect DIR..., eval DIR, sample DIR (the last two: also in init_from); into argv
  int n_folders;
  // the model: the preset with the given options over it
  char model[64];  // preset name or "custom"
  Config config;
  // data
  char train[TEXT_SIZE];             // comma-separated globs, or "recall", "recall-stale"
  char val[TEXT_SIZE];               // the same; "" none
  char tokenizer[OPTION_PATH_SIZE];  // path, "bytes", or "" none
  int recall_pairs, recall_stale_pairs, recall_keys, recall_values;  // stale pairs 0: as many as pairs
  // the run
  char out[OPTION_PATH_SIZE];  // "": a fresh numbered folder under out/
  int64_t steps, tokens;       // tokens = steps * total_batch
  int batch, seq_len;          // rows of a micro-batch, tokens of a row
  int64_t total_batch;         // tokens of a step, a multiple of batch * seq_len
  int64_t seed;
  int init;  // InitRule (init.h)
  // the optimiser
  double lr, min_lr;
  int64_t warmup, warmup_tokens;  // steps; tokens = steps * total_batch
  int schedule;                   // Schedule (schedule.h)
  double decay_fraction, weight_decay;
  int decay_all;
  double beta1, beta2, adam_eps, clip;  // clip 0: off
  // evaluation and log
  int64_t eval_every, eval_batches, sample_every, log_every;  // 0: never; eval_batches 0: all
  int buckets;                          // eval: mean loss in this many equal ranges of position, 0: not wanted
  char write_logits[OPTION_PATH_SIZE];  // eval: file for the logits, "" none
  char tensorboard[OPTION_PATH_SIZE];   // "on", "off" or a folder
  // checkpoints
  int64_t save_every, keep, keep_every;  // 0: only at the end; all; none
  char resume[OPTION_PATH_SIZE];         // "auto", "none" or a checkpoint's folder
  char init_from[OPTION_PATH_SIZE];      // "" none
  double stop_after;                     // seconds, 0: never
  int max_skips;
  double hang_timeout;  // seconds, 0: by what was measured
  // sampling
  char prompt[TEXT_SIZE];
  int num_tokens, top_k, samples;  // top_k 0: off
  double temperature, top_p;
  // the machine
  int threads, device;  // threads 0: as many as the machine has; device -1: by local rank
  int recompute, nodes, ranks;
  double tokens_per_sec;  // of one rank, assumed by the forecast; 0: estimate
  int dry_run, verify, help;
  char config_file[OPTION_PATH_SIZE];
  unsigned char source[MAX_OPTIONS];  // OptionSource of each row of option_table
} Options;

typedef enum {
  OPT_INT,        // int
  OPT_INT64,      // int64_t
  OPT_TOKENS,     // int64_t, suffix K M B T allowed
  OPT_REAL,       // double
  OPT_SWITCH,     // int: off 0, on 1
  OPT_CHOICE,     // int or enum: index into choices
  OPT_TEXT,       // char[OPTION_PATH_SIZE]
  OPT_LONG_TEXT,  // char[TEXT_SIZE]
  OPT_DURATION,   // double, seconds
  OPT_PATTERN,    // Config.pattern
  OPT_MODEL       // char[64], a preset
} OptionType;

typedef enum {
  GROUP_MODEL,
  GROUP_VARIANT,
  GROUP_DATA,
  GROUP_RUN,
  GROUP_OPTIMISER,
  GROUP_EVAL,
  GROUP_CHECKPOINT,
  GROUP_SAMPLING,
  GROUP_MACHINE,
  GROUP_OTHER,
  GROUP_COUNT
} OptionGroup;

static const char *const group_titles[GROUP_COUNT] = {
    "Model: sizes", "Model: variants",      "Data", "Run", "Optimiser", "Evaluation and log", "Checkpoints",
    "Sampling",     "Machine and forecast", "Other"};

typedef struct {
  const char *name;
  OptionGroup group;
  OptionType type;
  size_t offset;         // of the field in Options
  const char *standard;  // default as a person would type it; NULL: the preset's
  double min, max;       // of numbers; durations in seconds
  const char *choices;   // OPT_CHOICE: "a|b|c"
  const char *value;     // placeholder in --help: the unit or the kind of value
  const char *implied;   // value of --name without one; NULL: a value is needed
  const char *help;
} Option;

#define AT(field) offsetof(Options, field)
#define MANY 1e15
static const Option option_table[] = {
    {"model", GROUP_MODEL, OPT_MODEL, AT(model), "tiny-gdn", 0, 0, NULL, "PRESET", NULL,
     "the model to start from, 'custom' or one of the presets listed below; the options of this group change it"},
    {"pattern", GROUP_MODEL, OPT_PATTERN, AT(config), NULL, 0, 0, NULL, "MIXERS", NULL,
     "mixers, repeated over the layers: gdn gdn2 kda deltanet mamba2 swa attn, as 'gdn swa' or gdn,swa"},
    {"width", GROUP_MODEL, OPT_INT, AT(config.width), NULL, 1, 1 << 20, NULL, "CHANNELS", NULL,
     "size of the residual stream"},
    {"layers", GROUP_MODEL, OPT_INT, AT(config.layers), NULL, 1, 4096, NULL, "COUNT", NULL,
     "layers; each is a mixer and an MLP"},
    {"ff", GROUP_MODEL, OPT_INT, AT(config.ff), NULL, 0, 1 << 20, NULL, "CHANNELS", NULL,
     "hidden size of the SwiGLU MLP, 0 for none"},
    {"vocab", GROUP_MODEL, OPT_INT, AT(config.vocab), NULL, 1, MAX_VOCAB, NULL, "TOKENS", NULL,
     "size of the vocabulary"},
    {"tied", GROUP_MODEL, OPT_SWITCH, AT(config.tied), NULL, 0, 1, NULL, "on|off", "on",
     "use the embedding as the output head"},
    {"heads", GROUP_MODEL, OPT_INT, AT(config.heads), NULL, 1, 4096, NULL, "COUNT", NULL,
     "query and key heads of the delta-rule mixers"},
    {"v-heads", GROUP_MODEL, OPT_INT, AT(config.v_heads), NULL, 1, 65536, NULL, "COUNT", NULL,
     "value heads of the delta-rule mixers, a multiple of the key heads; as many as those if only they are given"},
    {"head-k", GROUP_MODEL, OPT_INT, AT(config.head_k), NULL, 1, 8192, NULL, "CHANNELS", NULL, "key size of a head"},
    {"head-v", GROUP_MODEL, OPT_INT, AT(config.head_v), NULL, 1, 8192, NULL, "CHANNELS", NULL, "value size of a head"},
    {"attn-heads", GROUP_MODEL, OPT_INT, AT(config.attn_heads), NULL, 1, 4096, NULL, "COUNT", NULL,
     "query heads of swa and attn"},
    {"attn-kv-heads", GROUP_MODEL, OPT_INT, AT(config.attn_kv_heads), NULL, 1, 4096, NULL, "COUNT", NULL,
     "key and value heads of swa and attn, a divisor of the query heads; as many as those if only they are given"},
    {"attn-head-dim", GROUP_MODEL, OPT_INT, AT(config.attn_head_dim), NULL, 2, 8192, NULL, "CHANNELS", NULL,
     "size of an attention head, even"},
    {"window", GROUP_MODEL, OPT_INT, AT(config.window), NULL, 1, INT_MAX, NULL, "TOKENS", NULL,
     "swa: keys that a query sees, its own included"},
    {"rope-theta", GROUP_MODEL, OPT_REAL, AT(config.rope_theta), NULL, 1, 1e12, NULL, "NUMBER", NULL,
     "base of the rotary angles of swa and attn"},
    {"mamba-state", GROUP_MODEL, OPT_INT, AT(config.mamba_state), NULL, 1, 8192, NULL, "CHANNELS", NULL,
     "Mamba2: state size (d_state)"},
    {"mamba-head", GROUP_MODEL, OPT_INT, AT(config.mamba_head), NULL, 1, 8192, NULL, "CHANNELS", NULL,
     "Mamba2: size of a head"},
    {"mamba-expand", GROUP_MODEL, OPT_INT, AT(config.mamba_expand), NULL, 1, 16, NULL, "FACTOR", NULL,
     "Mamba2: inner size over width"},
    {"mamba-groups", GROUP_MODEL, OPT_INT, AT(config.mamba_groups), NULL, 1, 4096, NULL, "COUNT", NULL,
     "Mamba2: groups that share B and C"},

    {"conv-size", GROUP_VARIANT, OPT_INT, AT(config.conv_size), NULL, 0, 16, NULL, "TOKENS", NULL,
     "taps of the short convolutions, 0 for none"},
    {"norm-eps", GROUP_VARIANT, OPT_REAL, AT(config.norm_eps), NULL, 1e-30, 1, NULL, "NUMBER", NULL,
     "added to the mean square in every RMSNorm"},
    {"beta-max", GROUP_VARIANT, OPT_INT, AT(config.beta_max), NULL, 1, 2, NULL, "1|2", NULL,
     "upper end of beta; 2 allows negative eigenvalues"},
    {"output-gate", GROUP_VARIANT, OPT_CHOICE, AT(config.output_gate), NULL, 0, 0, "auto|silu|sigmoid|none", "GATE",
     NULL, "gate of the delta-rule mixers' output; auto: what each mixer's paper has"},
    {"output-norm", GROUP_VARIANT, OPT_SWITCH, AT(config.output_norm), NULL, 0, 1, NULL, "on|off", "on",
     "RMSNorm before the delta-rule mixers' output projection"},
    {"qk-norm", GROUP_VARIANT, OPT_CHOICE, AT(config.qk_norm), NULL, 0, 0, "l2|l1", "NORM", NULL,
     "norm of q and k in the delta-rule mixers"},
    {"decay", GROUP_VARIANT, OPT_SWITCH, AT(config.decay), NULL, 0, 1, NULL, "on|off", "on",
     "decay of the state in gdn, gdn2 and kda"},
    {"erase", GROUP_VARIANT, OPT_CHOICE, AT(config.erase), NULL, 0, 0, "channel|scalar", "WIDTH", NULL,
     "gdn2: erase gate for each channel, or one for each head"},
    {"write", GROUP_VARIANT, OPT_CHOICE, AT(config.write), NULL, 0, 0, "channel|scalar", "WIDTH", NULL,
     "gdn2: write gate for each channel, or one for each head"},
    {"kda-lower-bound", GROUP_VARIANT, OPT_REAL, AT(config.kda_lower_bound), NULL, -5, 0, NULL, "NUMBER", NULL,
     "kda: lower bound of the log decay of a token, 0 for none"},
    {"boundary", GROUP_VARIANT, OPT_CHOICE, AT(config.boundary_reset), NULL, 0, 0, "ignore|reset", "RULE", NULL,
     "at the BOS of a document: go on, or restart state, convolution and attention"},
    {"bos", GROUP_VARIANT, OPT_INT, AT(config.bos), NULL, -1, MAX_VOCAB, NULL, "TOKEN", NULL, "id of BOS, -1 for none"},

    {"train", GROUP_DATA, OPT_LONG_TEXT, AT(train), "recall", 0, 0, NULL, "GLOBS", NULL,
     "token shards, as globs with commas between them; recall and recall-stale are built-in synthetic streams"},
    {"val", GROUP_DATA, OPT_LONG_TEXT, AT(val), "", 0, 0, NULL, "GLOBS", NULL,
     "validation shards, in the same form; empty: none, or the synthetic stream that is trained on"},
    {"tokenizer", GROUP_DATA, OPT_TEXT, AT(tokenizer), "", 0, 0, NULL, "PATH", NULL,
     "the shards' tokenizer, for prompts, samples and bits per byte; 'bytes' for bytes; empty: token ids are shown"},
    {"recall-pairs", GROUP_DATA, OPT_INT, AT(recall_pairs), "8", 1, 1 << 20, NULL, "COUNT", NULL,
     "synthetic streams: key and value pairs of a sequence"},
    {"recall-stale-pairs", GROUP_DATA, OPT_INT, AT(recall_stale_pairs), "0", 0, 1 << 20, NULL, "COUNT", NULL,
     "recall-stale: pairs before these that must be forgotten, 0 for as many as there are pairs"},
    {"recall-keys", GROUP_DATA, OPT_INT, AT(recall_keys), "64", 1, 1 << 20, NULL, "COUNT", NULL,
     "synthetic streams: different keys"},
    {"recall-values", GROUP_DATA, OPT_INT, AT(recall_values), "64", 1, 1 << 20, NULL, "COUNT", NULL,
     "synthetic streams: different values"},

    {"out", GROUP_RUN, OPT_TEXT, AT(out), "", 0, 0, NULL, "DIR", NULL,
     "folder of the run; empty: a fresh numbered one under out/"},
    {"steps", GROUP_RUN, OPT_INT64, AT(steps), NULL, 1, MANY, NULL, "STEPS", NULL, "updates of the whole run"},
    {"tokens", GROUP_RUN, OPT_TOKENS, AT(tokens), NULL, 1, MANY, NULL, "TOKENS", NULL,
     "length of the whole run in tokens, instead of its steps; rounded down to whole steps"},
    {"batch", GROUP_RUN, OPT_INT, AT(batch), NULL, 1, 1 << 20, NULL, "ROWS", NULL,
     "rows of a micro-batch on one rank; memory grows with it"},
    {"seq-len", GROUP_RUN, OPT_INT, AT(seq_len), NULL, 1, 1 << 24, NULL, "TOKENS", NULL, "tokens of a row"},
    {"total-batch", GROUP_RUN, OPT_TOKENS, AT(total_batch), NULL, 1, MANY, NULL, "TOKENS", NULL,
     "tokens of a step over all ranks, a multiple of batch x seq-len x ranks; without a preset's: one micro-batch"},
    {"seed", GROUP_RUN, OPT_INT64, AT(seed), "1234", 0, 9007199254740991.0, NULL, "NUMBER", NULL,
     "of initial weights, order of the data and sampling"},
    {"init", GROUP_RUN, OPT_CHOICE, AT(init), "paper", 0, 0, "paper|fla", "RULE", NULL,
     "first values of the weights: as the papers' code, or as fla's models"},

    {"lr", GROUP_OPTIMISER, OPT_REAL, AT(lr), NULL, 0, 100, NULL, "NUMBER", NULL, "learning rate at its peak"},
    {"min-lr", GROUP_OPTIMISER, OPT_REAL, AT(min_lr), NULL, 0, 100, NULL, "NUMBER", NULL,
     "learning rate at the end; a tenth of the peak if not given"},
    {"warmup", GROUP_OPTIMISER, OPT_INT64, AT(warmup), NULL, 0, MANY, NULL, "STEPS", NULL,
     "steps of linear warm-up; 1% of the run if neither preset nor option says"},
    {"warmup-tokens", GROUP_OPTIMISER, OPT_TOKENS, AT(warmup_tokens), NULL, 0, MANY, NULL, "TOKENS", NULL,
     "length of the warm-up in tokens, instead of its steps; rounded down to whole steps"},
    {"schedule", GROUP_OPTIMISER, OPT_CHOICE, AT(schedule), "cosine", 0, 0, schedule_names, "SHAPE", NULL,
     "after the warm-up: cosine, stable with a linear decay at the end, or constant"},
    {"decay-fraction", GROUP_OPTIMISER, OPT_REAL, AT(decay_fraction), "0.2", 0, 1, NULL, "FRACTION", NULL,
     "wsd: part of the run that decays"},
    {"weight-decay", GROUP_OPTIMISER, OPT_REAL, AT(weight_decay), "0.1", 0, 100, NULL, "NUMBER", NULL,
     "of AdamW, per step and unit of learning rate"},
    {"decay-all", GROUP_OPTIMISER, OPT_SWITCH, AT(decay_all), "off", 0, 1, NULL, "on|off", "on",
     "weight decay on every parameter, as the papers' code; off: on matrices, embedding and convolutions"},
    {"beta1", GROUP_OPTIMISER, OPT_REAL, AT(beta1), "0.9", 0, 0.999999999, NULL, "NUMBER", NULL,
     "decay rate of AdamW's first moment"},
    {"beta2", GROUP_OPTIMISER, OPT_REAL, AT(beta2), "0.95", 0, 0.999999999, NULL, "NUMBER", NULL,
     "decay rate of AdamW's second moment"},
    {"adam-eps", GROUP_OPTIMISER, OPT_REAL, AT(adam_eps), "1e-8", 1e-30, 1, NULL, "NUMBER", NULL,
     "added to the root of AdamW's second moment"},
    {"clip", GROUP_OPTIMISER, OPT_REAL, AT(clip), "1", 0, 1e9, NULL, "NORM", NULL,
     "largest norm of the gradient of a step, 0 for no limit"},

    {"eval-every", GROUP_EVAL, OPT_INT64, AT(eval_every), "100", 0, MANY, NULL, "STEPS", NULL,
     "steps between two validations, 0 for never; there is one at the end"},
    {"eval-batches", GROUP_EVAL, OPT_INT64, AT(eval_batches), "20", 0, MANY, NULL, "COUNT", NULL,
     "micro-batches of a validation over all ranks, 0 for all of the data"},
    {"sample-every", GROUP_EVAL, OPT_INT64, AT(sample_every), "0", 0, MANY, NULL, "STEPS", NULL,
     "steps between two generated samples, 0 for never"},
    {"log-every", GROUP_EVAL, OPT_INT64, AT(log_every), "1", 1, MANY, NULL, "STEPS", NULL,
     "steps between two lines on the console; the log file has every step"},
    {"buckets", GROUP_EVAL, OPT_INT, AT(buckets), "0", 0, 1 << 20, NULL, "COUNT", NULL,
     "eval: mean loss in this many equal ranges of position, 0 for none"},
    {"write-logits", GROUP_EVAL, OPT_TEXT, AT(write_logits), "", 0, 0, NULL, "FILE", NULL,
     "eval: write the logits of the first micro-batch to a safetensors file; empty: no"},
    {"tensorboard", GROUP_EVAL, OPT_TEXT, AT(tensorboard), "off", 0, 0, NULL, "on|off|DIR", "on",
     "write TensorBoard event files too: into the run's folder, not, or into this folder"},

    {"save-every", GROUP_CHECKPOINT, OPT_INT64, AT(save_every), "1000", 0, MANY, NULL, "STEPS", NULL,
     "steps between two checkpoints, 0 for only one at the end"},
    {"keep", GROUP_CHECKPOINT, OPT_INT64, AT(keep), "2", 0, MANY, NULL, "COUNT", NULL,
     "newest checkpoints that are kept, 0 for all"},
    {"keep-every", GROUP_CHECKPOINT, OPT_INT64, AT(keep_every), "0", 0, MANY, NULL, "STEPS", NULL,
     "checkpoints whose step is a multiple of this are kept too, 0 for none"},
    {"resume", GROUP_CHECKPOINT, OPT_TEXT, AT(resume), "none", 0, 0, NULL, "auto|none|DIR", "auto",
     "go on from the newest whole checkpoint of the run's folder, from none, or from this one"},
    {"init-from", GROUP_CHECKPOINT, OPT_TEXT, AT(init_from), "", 0, 0, NULL, "DIR", NULL,
     "start with the model and weights of this checkpoint or Hugging Face folder; empty: fresh weights"},
    {"stop-after", GROUP_CHECKPOINT, OPT_DURATION, AT(stop_after), "0", 0, 31536000.0 * 100, NULL, "TIME", NULL,
     "save and stop after this time, such as 3h50m or 90s, 0 for never; exit code 75, run again with resume"},
    {"max-skips", GROUP_CHECKPOINT, OPT_INT, AT(max_skips), "5", 1, 1 << 20, NULL, "STEPS", NULL,
     "steps in a row with a loss or gradient that is not finite, after which the run ends with exit code 78"},
    {"hang-timeout", GROUP_CHECKPOINT, OPT_DURATION, AT(hang_timeout), "0", 0, 31536000.0, NULL, "TIME", NULL,
     "no progress for this long ends the run with exit code 76; 0: 10 times what is usual, at least 60s"},

    {"prompt", GROUP_SAMPLING, OPT_LONG_TEXT, AT(prompt), "", 0, 0, NULL, "TEXT", NULL,
     "text to go on from; without a tokenizer, token ids; empty: BOS"},
    {"num-tokens", GROUP_SAMPLING, OPT_INT, AT(num_tokens), "64", 1, 1 << 24, NULL, "TOKENS", NULL,
     "tokens to generate for a sample"},
    {"temperature", GROUP_SAMPLING, OPT_REAL, AT(temperature), "1", 0, 1000, NULL, "NUMBER", NULL,
     "divides the logits; 0 takes the likeliest token"},
    {"top-k", GROUP_SAMPLING, OPT_INT, AT(top_k), "0", 0, MAX_VOCAB, NULL, "TOKENS", NULL,
     "draw from this many likeliest tokens, 0 for all"},
    {"top-p", GROUP_SAMPLING, OPT_REAL, AT(top_p), "1", 1e-9, 1, NULL, "PROBABILITY", NULL,
     "draw from the fewest likeliest tokens that have this probability together"},
    {"samples", GROUP_SAMPLING, OPT_INT, AT(samples), "1", 1, 1 << 20, NULL, "COUNT", NULL, "samples to generate"},

    {"threads", GROUP_MACHINE, OPT_INT, AT(threads), "0", 0, 4096, NULL, "COUNT", NULL,
     "CPU threads, 0 for as many as the machine has"},
    {"device", GROUP_MACHINE, OPT_INT, AT(device), "-1", -1, 1023, NULL, "NUMBER", NULL,
     "GPU, -1 to choose by the rank on the node"},
    {"recompute", GROUP_MACHINE, OPT_CHOICE, AT(recompute), "none", 0, 0, "none|norms|all", "LEVEL", NULL,
     "what the backward pass on a GPU computes again instead of keeping it: outputs of norms, or all of a layer (least "
     "memory, up to a third more arithmetic); same bits"},
    {"nodes", GROUP_MACHINE, OPT_INT, AT(nodes), "1", 1, 65536, NULL, "COUNT", NULL,
     "machines that the forecast assumes"},
    {"ranks", GROUP_MACHINE, OPT_INT, AT(ranks), "1", 1, 1 << 20, NULL, "COUNT", NULL,
     "ranks (GPUs) of all machines together that the forecast assumes"},
    {"tokens-per-sec", GROUP_MACHINE, OPT_REAL, AT(tokens_per_sec), "0", 0, 1e12, NULL, "TOKENS/S", NULL,
     "speed of one rank among all of them that the forecast assumes, 0 to estimate it"},
    {"dry-run", GROUP_MACHINE, OPT_SWITCH, AT(dry_run), "off", 0, 1, NULL, "on|off", "on",
     "print settings, parameters, memory, steps, time and disk, and end; needs no GPU"},

    {"config", GROUP_OTHER, OPT_TEXT, AT(config_file), "", 0, 0, NULL, "FILE", NULL,
     "read options from a file of lines 'name = value'; the command line wins; empty: none"},
    {"verify", GROUP_OTHER, OPT_SWITCH, AT(verify), "off", 0, 1, NULL, "on|off", "on",
     "inspect: check the sizes and hashes of every checkpoint of a run, not only of the newest that holds"},
    {"help", GROUP_OTHER, OPT_SWITCH, AT(help), "off", 0, 1, NULL, "on|off", "on", "print this and end"},
};
#undef AT
#undef MANY

enum { option_count = sizeof option_table / sizeof option_table[0] };

// ----------------------------------------------------------------------------
// looking things up

// Row of an option, -1 when there is none.
static inline int option_find(const char *name) {
  for (int i = 0; i < option_count; i++)
    if (!strcmp(option_table[i].name, name)) return i;
  return -1;
}

static inline OptionSource option_source(const Options *o, const char *name) {
  int i = option_find(name);
  if (i < 0) fail(EXIT_INTERNAL, "no option '%s' in the table", name);
  return (OptionSource)o->source[i];
}

// 1: a person gave it, on the command line or in the file.
static inline int option_is_given(const Options *o, const char *name) { return option_source(o, name) >= SOURCE_FILE; }

static inline const char *option_nearest(const char *name) {
  int best = 0;
  for (int i = 1; i < option_count; i++)
    if (edit_distance(name, option_table[i].name) < edit_distance(name, option_table[best].name)) best = i;
  return option_table[best].name;
}

// ----------------------------------------------------------------------------
// values in and out as text

// "1 to 4096", or "1 or more" where nobody meets the end.
static inline void option_range(const Option *p, char *text, size_t size) {
  char low[40], high[40];
  real_print(low, sizeof low, p->min), real_print(high, sizeof high, p->max);
  if (p->max >= INT_MAX)
    snprintf(text, size, "%s or more", low);
  else
    snprintf(text, size, "%s to %s", low, high);
}

static inline size_t option_text_size(const Option *p) {
  return p->type == OPT_LONG_TEXT ? TEXT_SIZE : OPTION_PATH_SIZE;
}

// Sets one option from text. `where` begins the message ("--lr", "run.conf line 3: lr"). 0, or EXIT_USAGE.
static inline int option_set(Options *o, const Option *p, const char *text, const char *where, Error *err) {
  char *field = (char *)o + p->offset, range[96];
  int64_t whole = 0;
  double real = 0;
  int number = 0;
  option_range(p, range, sizeof range);
  switch (p->type) {
    case OPT_INT:
    case OPT_INT64:
      if (!parse_int64(text, &whole))
        return error_set(err, EXIT_USAGE, "%s '%s': not a whole number; needed %s", where, text, range);
      real = (double)whole, number = 1;
      break;
    case OPT_TOKENS:
      if (!parse_tokens(text, &whole))
        return error_set(err, EXIT_USAGE,
                         "%s '%s': not a number of tokens; needed a whole number, or one such as 0.5M or 100B", where,
                         text);
      real = (double)whole, number = 1;
      break;
    case OPT_REAL:
      if (!parse_real(text, &real))
        return error_set(err, EXIT_USAGE, "%s '%s': not a number; needed %s", where, text, range);
      number = 1;
      break;
    case OPT_DURATION:
      if (!parse_duration(text, &real))
        return error_set(err, EXIT_USAGE, "%s '%s': not a time; needed one such as 3h50m, 90s or 2d, or 0", where,
                         text);
      number = 1;
      break;
    case OPT_SWITCH:
    case OPT_CHOICE: {
      const char *choices = p->type == OPT_SWITCH ? "off|on" : p->choices;
      int index = choice_find(choices, text);
      if (!strcmp(p->name, "recompute") && !strcmp(text, "0")) index = 0;  // settings written when it was a number
      if (index < 0) return error_set(err, EXIT_USAGE, "%s '%s': needed one of %s", where, text, choices);
      memcpy(field, &index, sizeof index);  // an enum of Config has the size of an int
      return 0;
    }
    case OPT_TEXT:
    case OPT_LONG_TEXT:
      if (strlen(text) >= option_text_size(p))
        return error_set(err, EXIT_USAGE, "%s: a text of %zu bytes; needed at most %zu", where, strlen(text),
                         option_text_size(p) - 1);
      memset(field, 0, option_text_size(p));  // nothing of an earlier value stays behind
      memcpy(field, text, strlen(text));
      return 0;
    case OPT_PATTERN: {
      Error inner;
      if (pattern_parse(text, &o->config, &inner))
        return error_set(err, EXIT_USAGE, "%s '%s': %s", where, text, inner.text);
      return 0;
    }
    case OPT_MODEL:
      if (strcmp(text, "custom") && !preset_find(text))
        return error_set(err, EXIT_USAGE, "%s '%s': no such preset; did you mean %s? See --help", where, text,
                         preset_nearest(text));
      memset(o->model, 0, sizeof o->model);
      snprintf(o->model, sizeof o->model, "%s", text);
      return 0;
  }
  if (number && !(real >= p->min && real <= p->max))
    return error_set(err, EXIT_USAGE, "%s %s: out of range; needed %s%s", where, text, range,
                     p->type == OPT_DURATION ? " seconds" : "");
  if (p->type == OPT_INT) {
    int v = (int)whole;
    memcpy(field, &v, sizeof v);
  } else if (p->type == OPT_REAL || p->type == OPT_DURATION) {
    real += 0.0;  // -0 becomes 0
    memcpy(field, &real, sizeof real);
  } else {
    memcpy(field, &whole, sizeof whole);
  }
  return 0;
}

// The value of an option as text that option_set reads back to the same value.
static inline void option_value(const Options *o, const Option *p, char *text, size_t size) {
  const char *field = (const char *)o + p->offset;
  int i;
  int64_t whole;
  double real;
  switch (p->type) {
    case OPT_INT:
      memcpy(&i, field, sizeof i), snprintf(text, size, "%d", i);
      break;
    case OPT_INT64:
    case OPT_TOKENS:
      memcpy(&whole, field, sizeof whole), snprintf(text, size, "%lld", (long long)whole);
      break;
    case OPT_REAL:
      memcpy(&real, field, sizeof real), real_print(text, size, real);
      break;
    case OPT_DURATION:
      memcpy(&real, field, sizeof real);
      snprintf(text, size, "%.6f", real);
      i = (int)strlen(text);
      while (text[i - 1] == '0') text[--i] = 0;
      if (text[i - 1] == '.') text[--i] = 0;
      if (real > 0) snprintf(text + i, size - (size_t)i, "s");
      break;
    case OPT_SWITCH:
      memcpy(&i, field, sizeof i), snprintf(text, size, "%s", i ? "on" : "off");
      break;
    case OPT_CHOICE:
      memcpy(&i, field, sizeof i), choice_name(text, size, p->choices, i);
      break;
    case OPT_PATTERN:
      pattern_print(text, size, &o->config);
      break;
    default:
      snprintf(text, size, "%s", field);
  }
}

#endif  // GDN_OPTION_TABLE_H
