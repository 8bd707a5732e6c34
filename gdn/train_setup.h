// train_setup.h: builds a Trainer from the options: which model, data and tokenizer; the run's folder, its lock and
// log; fresh weights, those of --init-from, or the whole state of a checkpoint. All that can be refused is refused
// before anything is written to the disk.
//
// defines: trainer_open_data, trainer_choose_config, trainer_settings, trainer_create_model, trainer_open_run,
// trainer_close,
//          source_open, tokenizer_open, folder_config_apply
#ifndef GDN_TRAIN_SETUP_H
#define GDN_TRAIN_SETUP_H

#include "train.h"

// ----------------------------------------------------------------------------
// data

static inline int source_is_recall(const char *name) {
  return !strcmp(name, "recall") || !strcmp(name, "recall-stale");
}

// Opens what --train or --val names. need: rows that must be there.
static inline int source_open(DataSource *d, const Options *o, const Config *c, const char *name, int validation,
                              int64_t need, Error *err) {
  int code;
  if (source_is_recall(name)) {
    RecallConfig r = recall_defaults(o->seq_len);
    r.pairs = o->recall_pairs, r.keys = o->recall_keys, r.values = o->recall_values;
    if (!strcmp(name, "recall-stale")) r.stale_pairs = o->recall_stale_pairs ? o->recall_stale_pairs : r.pairs;
    if ((code = data_source_open_recall(d, &r, (uint64_t)o->seed, validation, err))) return code;
    if (recall_vocab(&r) > c->vocab)
      return error_set(err, EXIT_USAGE,
                       "--%s %s: %d keys and %d values need a vocabulary of %d, the model has %d: change --vocab, "
                       "--recall-keys or --recall-values",
                       validation ? "val" : "train", name, r.keys, r.values, recall_vocab(&r), c->vocab);
    return 0;
  }
  code = data_source_open_shards(d, &name, 1, c->vocab, validation ? "--val" : "--train", o->seq_len, (uint64_t)o->seed,
                                 validation, err);
  if (!code && c->boundary_reset && d->set.bos >= 0 && d->set.bos != c->bos)  // would never reset, and say nothing
    code = error_set(err, EXIT_DATA, "--boundary reset waits for BOS %d, these shards have %d: --bos %d", c->bos,
                     d->set.bos, d->set.bos);
  return code ? code : shards_check_rows(&d->set, o->seq_len, need, err);
}

// The tokenizer that --tokenizer names, or the bytes when the shards say so.
static inline int tokenizer_open(Tokenizer *t, int *has, const char **kind, const char *name, const DataSource *data,
                                 const Config *c, Error *err) {
  int bytes = !strcmp(name, "bytes");
  *has = 0, *kind = "none";
  if (!name[0] && data && !data->recall && !data->set.llmc) bytes = tokenizer_is_bytes(data->set.tokenizer);
  if (!bytes && !name[0]) return 0;
  if (bytes) {
    tokenizer_bytes(t);
  } else {
    int code = tokenizer_load(t, name, err);
    if (code) return code;
  }
  *has = 1, *kind = bytes ? "bytes" : "file";
  if (t->vocab > c->vocab)
    return error_set(err, EXIT_DATA,
                     "--tokenizer %s has %d ids, the model's vocabulary is %d: change --vocab or --tokenizer",
                     bytes ? "bytes" : name, t->vocab, c->vocab);
  if (data && !data->recall) return shards_check_tokenizer(&data->set, t->sha256, bytes ? "bytes" : name, err);
  return 0;
}

// Reads one row, so that ids outside the vocabulary and damage that meets the eye are refused before anything begins.
static inline int source_probe(DataSource *d, Error *err) {
  int32_t *row = (int32_t *)alloc_array(2 * (int64_t)d->T, sizeof(int32_t), "a row of tokens");
  int code = data_source_read(d, 0, 1, row, row + d->T, err);
  free(row);
  return code;
}

static inline int trainer_open_data(Trainer *t, Error *err) {
  const Options *o = t->o;
  const Config *c = &t->model.config;
  int code = source_open(&t->train, o, c, o->train, 0, t->rows, err);  // the same on every rank
  if (!code && o->val[0]) {
    t->has_val = 1;
    code = source_open(&t->val, o, c, o->val, 1, 1, err);
  }
  if (!code && t->has_val && !t->train.recall && !t->val.recall) {
    code = shards_check_same(&t->train.set, &t->val.set, err);
    const char *both = code ? NULL : shards_shared_file(&t->train.set, &t->val.set);
    if (both) warn("%s is in --train and in --val: the validation loss is of data that are trained on", both);
  }
  if (!code)
    code = tokenizer_open(&t->tokenizer, &t->has_tokenizer, &t->tokenizer_kind, o->tokenizer, &t->train, c, err);
  if (!code) code = source_probe(&t->train, err);
  if (!code && t->has_val) code = source_probe(&t->val, err);
  return code;
}

// ----------------------------------------------------------------------------
// the model

// Puts the options of the model that a person gave over *c; --model replaces all of it.
static inline void config_apply_given(Config *c, const Options *o) {
  if (option_is_given(o, "model")) *c = o->config;
  for (int i = 0; i < option_count; i++) {
    const Option *p = &option_table[i];
    if (p->type == OPT_MODEL || (p->group != GROUP_MODEL && p->group != GROUP_VARIANT) || o->source[i] < SOURCE_FILE)
      continue;
    if (p->type == OPT_PATTERN) {
      memcpy(c->pattern, o->config.pattern, sizeof c->pattern);
      c->n_pattern = o->config.n_pattern;
      continue;
    }
    size_t at = p->offset - offsetof(Options, config);  // all others are int, enum or double
    memcpy((char *)c + at, (const char *)&o->config + at, p->type == OPT_REAL ? sizeof(double) : sizeof(int));
    if (!strcmp(p->name, "heads") && !option_is_given(o, "v-heads")) c->v_heads = o->config.v_heads;
    if (!strcmp(p->name, "attn-heads") && !option_is_given(o, "attn-kv-heads"))
      c->attn_kv_heads = o->config.attn_kv_heads;
  }
}

// The Config of a folder with the given options over it. Only --boundary and --bos, which say how a model is used, may
// differ from the folder's. 0, EXIT_CHECKPOINT or EXIT_CONFIG.
static inline int folder_config_apply(Config *c, const Options *o, const char *path, Error *err) {
  Config there = *c;
  char difference[256];
  config_apply_given(c, o);
  there.boundary_reset = c->boundary_reset, there.bos = c->bos;
  memcpy(c->model, there.model, sizeof c->model);
  if (config_diff(&there, c, difference, sizeof difference))
    return error_set(err, EXIT_CHECKPOINT, "%s: holds another model: %s; change the model's options, or leave them out",
                     path, difference);
  return config_check(c, err);
}

// The Config of the run into t->model.config: the options', or that of the folder which the weights come from. Options
// that shape another model than the folder's are refused. info: of the checkpoint to resume, zeroed without one.
static inline int trainer_choose_config(Trainer *t, CheckpointInfo *info, Error *err) {
  const Options *o = t->o;
  Config asked, there;
  char path[CHECKPOINT_PATH_MAX];
  FolderKind kind = FOLDER_CHECKPOINT;
  memset(info, 0, sizeof *info);
  int code = options_to_config(o, &asked, err);
  if (code) return code;
  t->model.config = asked;
  if (!t->plan.from[0] && !o->init_from[0]) return 0;
  if (t->plan.from[0])
    snprintf(path, sizeof path, "%s", t->plan.from);
  else
    code = folder_find(o->init_from, path, &kind, err);
  CheckpointInfo other;
  if (!code) code = folder_config(path, kind, &there, t->plan.from[0] ? info : &other, err);
  if (code) return code;
  if (!t->plan.from[0]) checkpoint_info_free(&other);
  code = folder_config_apply(&there, o, path, err);
  t->model.config = there;
  return code;
}

// What the engine must be able to do, asked before anything is allocated or written.
static inline int trainer_settings(Trainer *t, const EngineApi *api, EngineSettings *s, Error *err) {
  const Options *o = t->o;
  memset(s, 0, sizeof *s);
  s->max_rows = o->batch, s->max_len = s->batch_len = o->seq_len, s->train = 1;
  s->recompute = o->recompute, s->device = o->device;
  if (o->sample_every) {
    SampleJob job;
    int code = sample_prompt(&job, o, &t->model.config, t->has_tokenizer ? &t->tokenizer : NULL, err);
    sample_settings(s, job.n_prompt, o->num_tokens);
    sample_free(&job);
    if (code) return code;
  }
  if (t->comm->size > 1) {
    ParamTable table = param_table_build(&t->model.config);
    int64_t blocks = table.total / COMM_ALIGN;
    comm_shard(table.total, t->comm->size, t->comm->rank, &s->shard_first, &s->shard_count);
    param_table_free(&table);
    if (blocks < t->comm->size)
      return error_set(err, EXIT_CONFIG,
                       "%d ranks for a model of %lld parameters: there is nothing for the last ones to hold; use at "
                       "most %lld ranks",
                       t->comm->size, (long long)(blocks * COMM_ALIGN), (long long)blocks);
    s->comm = t->comm;
  }
  return api->check(&t->model.config, s, err);
}

static inline int trainer_create_model(Trainer *t, const EngineApi *api, EngineSettings *s, Error *err) {
  Config c = t->model.config;
  s->cache_dir = t->plan.out[0] ? t->plan.out : NULL;
  return model_create(&t->model, api, &c, s, err);
}

// ----------------------------------------------------------------------------
// the state of a checkpoint

// Refuses to go on with data or sizes that would make the checkpoint's position in the sample order mean other samples.
static inline int trainer_check_resume(const Trainer *t, const CheckpointInfo *info, int64_t *skips, Error *err) {
  const char *from = t->plan.from;
  const Options *o = t->o;
  int64_t seq_len = 0, total_batch = 0, batch = 0;
  json_t *j = json_parse(info->trainer, strlen(info->trainer), from, EXIT_CHECKPOINT, err);
  if (!j) return EXIT_CHECKPOINT;
  int code = json_get_int(j, "seq_len", 1, INT_MAX, &seq_len, from, err);
  if (!code) code = json_get_int(j, "total_batch", 1, INT64_MAX, &total_batch, from, err);
  if (!code) code = json_get_int(j, "batch", 1, INT_MAX, &batch, from, err);
  if (!code) code = json_get_int(j, "skips_in_row", 0, INT_MAX, skips, from, err);
  json_decref(j);
  if (code) return code;
  if (seq_len != o->seq_len)
    return error_set(err, EXIT_CHECKPOINT,
                     "--resume %s: trained with --seq-len %lld, the options say %d: change --seq-len", from,
                     (long long)seq_len, o->seq_len);
  if (total_batch != o->total_batch)
    return error_set(err, EXIT_CHECKPOINT,
                     "--resume %s: trained with --total-batch %lld, the options say %lld: change --total-batch", from,
                     (long long)total_batch, (long long)o->total_batch);
  if (info->seed != (uint64_t)o->seed)
    return error_set(err, EXIT_CHECKPOINT, "--resume %s: trained with --seed %llu, the options say %lld: change --seed",
                     from, (unsigned long long)info->seed, (long long)o->seed);
  if (strcmp(info->data, t->train.fingerprint))
    return error_set(
        err, EXIT_CHECKPOINT,
        "--resume %s: trained on the data %s, --train %.100s is %s: name the same data, or start a new run "
        "with --init-from",
        from, info->data, o->train, t->train.fingerprint);
  if (info->samples != info->step * t->rows || info->skipped > info->step)
    return error_set(err, EXIT_CHECKPOINT, "%s: %lld steps, %lld samples, %lld skipped steps do not fit together", from,
                     (long long)info->step, (long long)info->samples, (long long)info->skipped);
  if (batch != o->batch)
    warn("--resume %s: trained with --batch %lld, now %d: the same samples, but sums in another order", from,
         (long long)batch, o->batch);
  return 0;
}

static inline int trainer_load_state(Trainer *t, const CheckpointInfo *info, Error *err) {
  Model *m = &t->model;
  int64_t skips = 0;
  int code = trainer_check_resume(t, info, &skips, err);
  if (!code && strcmp(t->o->resume, "auto")) code = run_check_newest(&t->plan, info->step, err);
  if (!code)  // every rank reads its own shard
    code = checkpoint_load(t->plan.from, &m->config, &m->table, m->settings.shard_first, m->settings.shard_count,
                           LOAD_PARAMS | LOAD_MOMENTS, model_write, m, err);
  if ((code = train_agree(t, "how the loading went", code, err))) return code;
  train_gather_weights(t);
  t->step = info->step, t->skipped = info->skipped, t->skips_in_row = (int)skips;
  char name[CHECKPOINT_PATH_MAX];
  struct stat here, there;  // is it one of this run's own?
  checkpoint_name(name, t->plan.out, t->step);
  if (!stat(name, &here) && !stat(t->plan.from, &there) && here.st_ino == there.st_ino && here.st_dev == there.st_dev)
    t->saved_step = t->step;
  return 0;
}

// The first weights, those of --init-from, or the state of the checkpoint.
static inline int trainer_fill_model(Trainer *t, const CheckpointInfo *info, Error *err) {
  char path[CHECKPOINT_PATH_MAX];
  FolderKind kind = FOLDER_RUN;
  t->saved_step = t->sampled_step = -1;
  model_init_weights(&t->model, (InitRule)t->o->init, (uint64_t)t->o->seed);
  if (t->plan.from[0]) return trainer_load_state(t, info, err);
  int code = t->o->init_from[0] ? folder_find(t->o->init_from, path, &kind, err) : 0;
  if (!code && t->o->init_from[0]) code = model_load(&t->model, path, kind, err);
  if (!t->model.api->on_device || t->comm->size == 1) return code;
  if ((code = train_agree(t, "how the loading went", code, err))) return code;
  train_gather_weights(t);  // a GPU keeps its own shard of what it was given
  return 0;
}

// ----------------------------------------------------------------------------
// the run's folder

// The folder, made if need be, and its lock, which rank 0 holds for all; from here on the requests to stop, of which
// rank 0 sees the file STOP and the clock, every rank its signals; and the watchdog.
static inline int trainer_open_run(Trainer *t, Error *err) {
  const Options *o = t->o;
  int code = 0, first = t->comm->rank == 0;
  if (first) code = run_folder_make(&t->plan, err);
  if (first && !code) code = runlock_acquire(&t->lock, t->plan.out, err);
  if (first && !code) code = run_plan_still_holds(&t->plan, err);
  if ((code = train_agree(t, "the run's folder", code, err))) return code;
  comm_broadcast(t->comm, "the run's folder", t->plan.out, sizeof t->plan.out, 0);
  if (t->lock.note[0]) printf("%s\n", t->lock.note);
  if (first) checkpoint_clean(t->plan.out, NULL, NULL);
  stop_watch_start(&t->stop, first ? t->plan.out : NULL, first ? o->stop_after : 0);
  watchdog_start(t->comm, t->plan.out, o->hang_timeout);
  return 0;
}

// A folder that only some machines can see is refused before it costs a save.
static inline int trainer_check_shared(Trainer *t, Error *err) {
  int code = 0;
  if (!folder_has(t->plan.out, "run.lock"))
    code = error_set(err, EXIT_CHECKPOINT,
                     "--out %s: this rank's machine cannot see what rank 0 wrote there: use a folder that all machines "
                     "share",
                     t->plan.out);
  return train_agree(t, "whether the folder is shared", code, err);
}

static inline int trainer_start_records(Trainer *t, Error *err) {
  const Options *o = t->o;
  int code = 0;
  int64_t known[2] = {-1, t->saved_step};
  if (t->comm->rank == 0)
    code = log_open(&t->log, t->plan.out, t->plan.resumes ? t->step : -1, err);
  else
    t->log.fd = -1;  // rank 0 keeps the log
  if (t->comm->rank == 0 && !code) code = event_file_open(&t->events, o->tensorboard, t->plan.out, t->step, err);
  if ((code = train_agree(t, "the log", code, err))) return code;
  known[0] = t->log.last_eval;
  comm_broadcast(t->comm, "what was done before", known, sizeof known, 0);
  t->log.last_eval = known[0], t->saved_step = known[1];
  CheckpointSettings *s = &t->checkpoints;
  s->out = t->plan.out;
  s->tokenizer = !strcmp(t->tokenizer_kind, "file") ? o->tokenizer : NULL;
  s->keep = o->keep > INT_MAX ? INT_MAX : (int)o->keep, s->keep_every = o->keep_every;
  s->seq_len = o->seq_len;
  s->eos = t->has_tokenizer ? t->tokenizer.eos : t->train.recall ? -1 : t->train.set.eos;
  s->pad = -1;
  snprintf(t->build, sizeof t->build, "train_gdn %s, %.60s", t->model.api->name, __VERSION__);
  saver_start(&t->saver, t->comm, s, &t->model.config, &t->model.table);
  int64_t N = t->own_rows * o->seq_len;
  t->tokens = (int32_t *)alloc_array(N, sizeof(int32_t), "rows of a step");
  t->targets = (int32_t *)alloc_array(N, sizeof(int32_t), "rows of a step");
  t->schedule = options_schedule(o);
  code = loader_start(&t->loader, &t->train, t->rows, t->comm->rank * t->own_rows, t->own_rows, err);
  return train_agree(t, "the reading of data", code, err);
}

static inline void trainer_close(Trainer *t) {
  watchdog_stop();
  saver_stop(&t->saver);
  loader_stop(&t->loader);
  if (t->log.path[0]) log_close(&t->log);
  event_file_close(&t->events);
  if (t->lock.path[0]) runlock_release(&t->lock);
  model_free(&t->model);
  if (t->has_tokenizer) tokenizer_free(&t->tokenizer);
  if (t->has_val) data_source_close(&t->val);
  data_source_close(&t->train);
  free(t->tokens);
  free(t->targets);
}

#endif  // GDN_TRAIN_SETUP_H
