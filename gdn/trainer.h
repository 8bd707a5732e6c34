// trainer.h: the program around an engine. Both train_gdn.c and train_gdn.cu end with a main that calls trainer_main
// with their engine; options, data, checkpoints, logs and the loop are the same for both.
//
// defines: trainer_main, train_command, selftest_command
#ifndef GDN_TRAINER_H
#define GDN_TRAINER_H

#include "shard.h"  // first: it asks libc for pread
#include "eval_command.h"
#include "forecast.h"
#include "inspect.h"
#include "comm.h"
#include "train_setup.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// Peak of an H100 or H200 in bf16 without sparsity; the MFU is only reported for engines that run on a GPU.
#define PEAK_FLOPS_GPU 989e12

// ----------------------------------------------------------------------------
// train

// What a GPU's memory will hold, in GiB: a line of names, a line of numbers.
static inline void trainer_print_memory(const Model *m) {
  int64_t bytes[MEMORY_KINDS], sum = 0;
  m->api->memory_plan(&m->config, &m->table, &m->settings, bytes);
  printf("GPU memory, GiB");
  for (int k = 0; k < MEMORY_KINDS; k++)
    if (bytes[k]) printf("  %7s", memory_names[k]);
  printf("      sum\n  recompute %-5s", recompute_names[m->settings.recompute]);
  for (int k = 0; k < MEMORY_KINDS; k++) {
    int width = (int)strlen(memory_names[k]);
    sum += bytes[k];
    if (bytes[k]) printf("  %*.2f", width > 7 ? width : 7, (double)bytes[k] / 1073741824.0);
  }
  printf("  %7.2f\n", (double)sum / 1073741824.0);
}

static inline void trainer_print(const Trainer *t) {
  char tokens[32], samples[32];
  printf("engine %s, %.1f MiB | ", t->model.api->name, (double)t->model.api->memory_bytes(t->model.engine) / 1048576.0);
  model_print(&t->model.config, t->model.table.params);
  if (t->model.api->memory_plan) trainer_print_memory(&t->model);
  if (t->comm->size > 1)
    printf("ranks %d, %d of them on this machine | %lld rows a step, %lld on each | moments of %.4g%% of the weights\n",
           t->comm->size, t->comm->local_size, (long long)t->rows, (long long)t->own_rows,
           100.0 * (double)t->model.settings.shard_count / (double)t->model.table.total);
  format_count(tokens, sizeof tokens, t->train.recall ? t->rows * t->train.T * t->o->steps : t->train.set.tokens);
  format_count(samples, sizeof samples, t->train.recall ? t->rows * t->o->steps : t->train.samples);
  printf("data %s | %s tokens, %s samples", t->train.fingerprint, tokens, samples);
  if (!t->train.recall) printf(", %.3g epochs", (double)(t->rows * t->o->steps) / (double)t->train.samples);
  printf(" | run %s", t->plan.out);
  if (t->plan.from[0]) printf(" | goes on from %s, step %lld", t->plan.from, (long long)t->step);
  printf("\n");
  if (t->plan.resumes && !t->plan.from[0]) printf("no checkpoint in %s yet: starting at step 0\n", t->plan.out);
  fflush(stdout);
}

// The last lines of a run that built-in recall data trained.
static inline int trainer_report_recall(Trainer *t, Error *err) {
  int64_t right, counted;
  watchdog_phase(PHASE_EVAL);
  int code = evaluate_recall(&right, &counted, t->comm->rank, t->comm->size, t->model.api, t->model.engine, &t->val,
                             t->model.config.vocab, train_val_rows(&t->val, t->o), t->o->batch, &t->stop, err);
  if ((code = train_agree(t, "how the evaluation went", code, err))) return code;
  double sums[2] = {(double)right, (double)counted};
  comm_sum(t->comm, "answers of the evaluation", sums, 2);
  double accuracy = sums[1] > 0 ? sums[0] / sums[1] : 0;
  printf("RECALL model=%s pct=%.1f pairs=%d length=%d steps=%lld seconds=%.1f\n", t->model.config.model, 100 * accuracy,
         t->val.config.pairs, t->val.T, (long long)t->step, monotonic_seconds() - t->started);
  return 0;
}

static inline int train_run(Trainer *t, const EngineApi *api, Error *err) {
  CheckpointInfo info;
  EngineSettings settings;
  memset(&info, 0, sizeof info);
  int code = t->comm->rank ? 0 : run_plan(&t->plan, t->o, err);  // reads the checkpoints there are, once
  if ((code = train_agree(t, "where the run goes on from", code, err))) return code;
  comm_broadcast(t->comm, "where the run goes on from", &t->plan, sizeof t->plan, 0);
  code = trainer_choose_config(t, &info, err);
  if (!code) code = trainer_open_data(t, err);
  if (!code) code = trainer_settings(t, api, &settings, err);
  code = train_agree(t, "whether all is there", code, err);
  if (!code) code = trainer_open_run(t, err);
  if (!code) code = trainer_check_shared(t, err);
  if (!code) {
    code = train_agree(t, "whether memory is enough", trainer_create_model(t, api, &settings, err), err);
    if (!code) code = train_agree(t, "how the loading went", trainer_fill_model(t, &info, err), err);
  }
  if (!code) code = trainer_start_records(t, err);
  checkpoint_info_free(&info);
  if (code) return code;
  t->flops_per_token = flops_per_token(&t->model.config, &t->model.table, t->o->seq_len);
  t->peak_flops = api->on_device ? PEAK_FLOPS_GPU * t->comm->size : 0;
  trainer_print(t);
  code = train_loop(t, err);
  if (!code && t->has_val && t->val.recall) code = trainer_report_recall(t, err);
  if (code == EXIT_STOPPED) {
    log_event(&t->log, t->step, "stop", t->stop.reason);
    if (t->comm->rank == 0) stop_watch_clear(&t->stop);
    printf("stopped by %s at step %lld of %lld, saved in %s: the same command with --resume goes on\n", t->stop.reason,
           (long long)t->step, (long long)t->o->steps, t->plan.out);
  }
  return code;
}

static inline int train_command(const EngineApi *api, const Options *o, Comm *comm, Error *err) {
  Trainer t;
  memset(&t, 0, sizeof t);
  t.o = o, t.comm = comm, t.started = monotonic_seconds();
  t.rows = o->total_batch / o->seq_len, t.own_rows = t.rows / comm->size;
  int code = train_run(&t, api, err);
  trainer_close(&t);
  return code;
}

// ----------------------------------------------------------------------------
// selftest

enum { SELFTEST_STEPS = 20 };

// Trains a few steps from the start; hashes of weights, moments and losses into hash[4].
static inline int selftest_run(const EngineApi *api, const Options *o, Comm *comm, uint64_t hash[4], Error *err) {
  Trainer t;
  CheckpointInfo info;
  EngineSettings settings;
  double losses[SELFTEST_STEPS][2];
  memset(&t, 0, sizeof t);
  t.o = o, t.comm = comm, t.rows = t.own_rows = o->total_batch / o->seq_len, t.schedule = options_schedule(o);
  int code = trainer_choose_config(&t, &info, err);
  if (!code) code = trainer_open_data(&t, err);
  if (!code) code = trainer_settings(&t, api, &settings, err);
  if (!code) code = trainer_create_model(&t, api, &settings, err);
  if (!code) code = trainer_fill_model(&t, &info, err);
  if (!code) code = loader_start(&t.loader, &t.train, t.rows, 0, t.rows, err);
  t.tokens = (int32_t *)alloc_array(t.rows * o->seq_len, sizeof(int32_t), "rows of a step");
  t.targets = (int32_t *)alloc_array(t.rows * o->seq_len, sizeof(int32_t), "rows of a step");
  stop_watch_start(&t.stop, NULL, 0);
  for (int i = 0; i < SELFTEST_STEPS && !code; i++) {
    LogStep s;
    code = train_step(&t, &s, err);
    if (!code) losses[i][0] = s.loss, losses[i][1] = s.grad_norm;
  }
  if (!code) {
    for (int a = 0; a < 3; a++) hash[a] = model_hash(&t.model, a == 0 ? ARENA_PARAM : a == 1 ? ARENA_M : ARENA_V);
    hash[3] = XXH3_64bits(losses, sizeof losses);
    printf("selftest: %d steps, last loss %.9g | weights %016llx | moments %016llx %016llx | losses %016llx\n",
           SELFTEST_STEPS, losses[SELFTEST_STEPS - 1][0], (unsigned long long)hash[0], (unsigned long long)hash[1],
           (unsigned long long)hash[2], (unsigned long long)hash[3]);
  }
  trainer_close(&t);
  return code;
}

static inline int selftest_command(const EngineApi *api, const Options *o, Comm *comm, Error *err) {
  uint64_t hash[2][4];
  for (int i = 0; i < 2; i++) {
    int code = selftest_run(api, o, comm, hash[i], err);
    if (code) return code;
  }
  if (memcmp(hash[0], hash[1], sizeof hash[0]))
    return error_set(err, EXIT_INTERNAL,
                     "selftest: the same %d steps gave different bits: this build or machine is not deterministic",
                     SELFTEST_STEPS);
  printf("selftest: both runs have equal bits\n");
  return 0;
}

// ----------------------------------------------------------------------------
// main

static inline int dry_run_command(const EngineApi *api, Options *o, Error *err) {
  Trainer t;
  CheckpointInfo info;
  memset(&t, 0, sizeof t);
  t.o = o;
  int code = trainer_choose_config(&t, &info, err);
  if (code) return code;
  o->config = t.model.config;
  ParamTable table = param_table_build(&o->config);
  Forecast f = forecast_make(o, &table);
  forecast_print(stdout, o, &table, &f);
  param_table_free(&table);
  EngineSettings s;
  memset(&s, 0, sizeof s);
  s.max_rows = o->batch, s.max_len = o->seq_len, s.train = 1;  // recompute: a GPU's, which both programs forecast
  return api->check(&o->config, &s, err);
}

// What several ranks ask of the options, those that a forecast assumes too. Without a --batch the micro-batch is made
// small enough for every rank to have one. 0, or EXIT_USAGE.
static inline int ranks_check_options(Options *o, const Comm *comm, Error *err) {
  int64_t rows = o->total_batch / o->seq_len, n = o->dry_run ? o->ranks : comm->size;
  if (comm->size > 1 && (o->command != COMMAND_TRAIN || o->dry_run))
    return error_set(err, EXIT_USAGE, "%s is the work of one process, found %d ranks: start it without mpirun or srun",
                     o->dry_run ? "--dry-run" : command_names[o->command], comm->size);
  if (n == 1) return 0;
  if (!option_is_given(o, "batch") && rows % n == 0)
    while ((rows / n) % o->batch) o->batch--;
  if (o->dry_run || rows % (o->batch * n) == 0) return 0;  // a forecast says of itself that a split cannot be run
  int64_t unit = o->batch * n * o->seq_len, below = o->total_batch / unit * unit;
  return error_set(
      err, EXIT_USAGE,
      "--total-batch %lld is not a multiple of batch x seq-len x ranks = %d x %d x %d = %lld tokens: needed "
      "such as %lld or %lld; change --total-batch, --batch or the number of ranks",
      (long long)o->total_batch, o->batch, o->seq_len, comm->size, (long long)unit, (long long)(below ? below : unit),
      (long long)(below + (below ? unit : 2 * unit)));
}

// CPU threads of this rank: as many as were asked for; by default the machine's are divided among the ranks on it, when
// the launcher has not given each its own.
static inline void ranks_set_threads(const Options *o, const Comm *comm) {
#ifdef _OPENMP
  int have = omp_get_num_procs();
  if (o->threads)
    omp_set_num_threads(o->threads);
  else if (comm->local_size > 1 && !getenv("OMP_NUM_THREADS") && have >= sysconf(_SC_NPROCESSORS_ONLN))
    omp_set_num_threads(have > comm->local_size ? have / comm->local_size : 1);
#else
  (void)o, (void)comm;
#endif
}

// Ends all ranks with the code that they agreed on; rank 0 says why.
static inline int ranks_end(Comm *comm, int code, const Error *err) {
  int first = comm->rank == 0;
  fflush(stdout);
  if (code && code != EXIT_STOPPED && first) fprintf(stderr, "%s: error: %s\n", program_name, err->text);
  fflush(stderr);
  comm_stop(comm);
  return code;
}

static MAYBE_UNUSED int trainer_main(int argc, char **argv, const EngineApi *api) {
  static Options o;
  static Comm comm;
  Error err;
  memset(&err, 0, sizeof err);
  if (comm_start(&comm, &err)) fail_error(&err);
  program_rank = comm.rank;
  setvbuf(stdout, NULL, _IOLBF, 0);  // a pipe or a file shows each line as it is printed, as a terminal does
  if (comm.rank && !freopen("/dev/null", "w", stdout)) fail(EXIT_CONFIG, "/dev/null: %s", strerror(errno));
  Config c;
  int code = options_parse_argv(&o, argc, argv, &err);
  if (!code && o.help) {
    options_help(stdout);
    return ranks_end(&comm, fflush(stdout) ? EXIT_INTERNAL : 0, &err);
  }
  if (!code) code = options_to_config(&o, &c, &err);
  if (!code) code = ranks_check_options(&o, &comm, &err);
  if ((code = comm_agree(&comm, "the options", code, &err))) return ranks_end(&comm, code, &err);
  signal(SIGPIPE, SIG_IGN);  // a closed console does not end a run
  signal(SIGXFSZ, SIG_IGN);  // nor a limit on the size of files: the write fails, and that is said
  ranks_set_threads(&o, &comm);
  if (o.command == COMMAND_TRAIN || o.dry_run) options_print(stdout, &o);
  if (o.dry_run)
    code = dry_run_command(api, &o, &err);
  else
    switch (o.command) {
      case COMMAND_EVAL:
        code = eval_command(api, &o, &err);
        break;
      case COMMAND_SAMPLE:
        code = sample_command(api, &o, &err);
        break;
      case COMMAND_INSPECT:
        code = inspect_command(&o, &err);
        break;
      case COMMAND_SELFTEST:
        code = selftest_command(api, &o, &comm, &err);
        break;
      default:
        code = train_command(api, &o, &comm, &err);
    }
  return ranks_end(&comm, code, &err);
}

#endif  // GDN_TRAINER_H
