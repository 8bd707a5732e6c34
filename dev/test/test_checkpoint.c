// test_checkpoint.c: checkpoints, logs and the run lock under damage, full disks, failing writes and crashes.
//
//   gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -Wall -Wextra -I. dev/test/test_checkpoint.c -o test_checkpoint
//       -ljansson -lxxhash -lpthread -lm && ./test_checkpoint
//
// Everything happens in a fresh folder under $TMPDIR (else /dev/shm or /tmp). A tmpfs of 4 MB is mounted for the
// full-disk test where that is permitted, otherwise those checks are skipped. Hash blocks are 8 KiB here, so that
// small models have many of them.

#define CHECKPOINT_BLOCK (8 << 10)
#define SNAPSHOT_PIECE 3000
#include <sys/mount.h>
#include <sys/wait.h>
#include "gdn/checkpoint.h"
#include "gdn/log.h"
#include "gdn/runlock.h"

static int passed, failed, skipped;
static char root[512];

#define CHECK(cond, ...)                          \
  do {                                            \
    if (cond) {                                   \
      passed++;                                   \
    } else {                                      \
      failed++;                                   \
      printf("FAIL %s:%d: ", __func__, __LINE__); \
      printf(__VA_ARGS__);                        \
      printf("\n");                               \
    }                                             \
  } while (0)

// ----------------------------------------------------------------------------
// a model in memory

typedef struct {
  Config c;
  ParamTable t;
  float *a[4];
} Model;

static uint64_t rng_state = 88172645463325252ull;
static uint64_t rng(void) {  // xorshift64
  rng_state ^= rng_state << 13, rng_state ^= rng_state >> 7, rng_state ^= rng_state << 17;
  return rng_state;
}

static Config tiny(const char *pattern) {
  Config c = config_default();
  c.vocab = 61, c.width = 32, c.ff = 40, c.heads = 2, c.v_heads = 2, c.head_k = 12, c.head_v = 20;
  c.attn_heads = 2, c.attn_kv_heads = 1, c.attn_head_dim = 16, c.window = 7;
  c.mamba_state = 8, c.mamba_head = 16;
  c.n_pattern = 0;
  char copy[256];
  snprintf(copy, sizeof copy, "%s", pattern);
  for (char *w = strtok(copy, " "); w; w = strtok(NULL, " ")) c.pattern[c.n_pattern++] = mixer_from_name(w);
  c.layers = c.n_pattern > 3 ? c.n_pattern : 3;
  return c;
}

static Model model_make(Config c, int fill) {
  Model m;
  memset(&m, 0, sizeof m);
  m.c = c, m.t = param_table_build(&c);
  for (int a = 0; a < 4; a++) {
    if (a == ARENA_GRAD) continue;
    m.a[a] = (float *)alloc_zeroed(m.t.total, 4, "test");
    for (int n = 0; n < m.t.n; n++)
      for (int64_t i = 0; m.t.specs[n].name[0] && i < m.t.specs[n].count; i++)
        m.a[a][m.t.specs[n].offset + i] = fill ? (float)(int64_t)rng() * 1e-19f : NAN;
  }
  return m;
}

static void model_free(Model *m) {
  for (int a = 0; a < 4; a++) free(m->a[a]);
  param_table_free(&m->t);
}

static void model_read(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  const Model *m = (const Model *)ctx;
  if (first < 0 || count <= 0 || first + count > m->t.total) abort();
  memcpy(dst, m->a[arena] + first, (size_t)count * 4);
}

static void model_write(void *ctx, int arena, int64_t first, int64_t count, const float *src) {
  Model *m = (Model *)ctx;
  if (first < 0 || count <= 0 || first + count > m->t.total) abort();
  memcpy(m->a[arena] + first, src, (size_t)count * 4);
}

static int model_equal(const Model *x, const Model *y) {
  for (int a = 0; a < 4; a++)
    if (x->a[a] && memcmp(x->a[a], y->a[a], (size_t)x->t.total * 4)) return 0;
  return 1;
}

// ----------------------------------------------------------------------------
// helpers

static char notes[65536];
static void take_note(void *ctx, const char *line) {
  (void)ctx;
  size_t n = strlen(notes);
  snprintf(notes + n, sizeof notes - n, "%s\n", line);
}

static const char *fresh(const char *name) {  // a new empty folder
  static char path[4][600];
  static int turn;
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/%s", root, name);
  folder_remove(p, 3);
  if (mkdir(p, 0777)) fail(EXIT_INTERNAL, "%s: %s", p, strerror(errno));
  return p;
}

static CheckpointSettings settings_for(const char *out) {
  CheckpointSettings s = {out, NULL, 0, 0, 128, 2, -1};
  return s;
}

static CheckpointInfo info_for(int64_t step) {
  CheckpointInfo i;
  memset(&i, 0, sizeof i);
  i.step = step, i.tokens = step * 1000003, i.samples = step * 17, i.skipped = 2, i.seed = 0xfedcba9876543210ull;
  strcpy(i.data, "xxh3:0123"), strcpy(i.build, "test build");
  i.trainer = "{\"spike\":[1.5,0.10000000000000001,-3],\"n\":9007199254740993}";
  i.options = "--model tiny\n--lr 3e-4 # \"quoted\" \xc3\xa9\n";
  return i;
}

static int save(const char *out, Model *m, int64_t step, Error *err) {
  CheckpointSettings s = settings_for(out);
  CheckpointInfo i = info_for(step);
  return checkpoint_save(&s, &m->c, &m->t, &i, model_read, m, err);
}

static int count_entries(const char *dir, const char *prefix) {
  int n = 0;
  DIR *d = opendir(dir);
  struct dirent *e;
  while (d && (e = readdir(d)))
    n += !strncmp(e->d_name, prefix, strlen(prefix)) && strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
  if (d) closedir(d);
  return n;
}

static void put(const char *path, const void *data, size_t size) {
  Error err;
  if (file_write(path, data, size, EXIT_INTERNAL, &err)) fail_error(&err);
}

static char *get(const char *path, size_t *size) {
  Error err;
  char *p = file_read(path, 1 << 30, size, EXIT_INTERNAL, &err);
  if (!p) fail_error(&err);
  return p;
}

static const char *join(const char *a, const char *b) {
  static char path[8][PATH_SIZE];
  static int turn;
  char *p = path[turn++ % 8], whole[2 * PATH_SIZE];  // a or b may be an earlier result
  snprintf(whole, sizeof whole, "%.*s/%.*s", PATH_SIZE - 1, a, PATH_SIZE - 1, b);
  whole[PATH_SIZE - 1] = 0;
  memcpy(p, whole, PATH_SIZE);
  return p;
}

// ----------------------------------------------------------------------------
// round trips

static void test_round_trip(void) {
  static const char *const patterns[] = {"gdn",      "gdn2",     "kda",
                                         "deltanet", "mamba2",   "swa",
                                         "attn",     "gdn swa",  "mamba2 gdn swa",
                                         "gdn2 swa", "kda attn", "gdn attn swa gdn swa"};
  for (size_t k = 0; k < sizeof patterns / sizeof *patterns; k++)
    for (int tied = 0; tied < 2; tied++) {
      Config c = tiny(patterns[k]);
      c.tied = tied;
      const char *out = fresh("round");
      Model m = model_make(c, 1), n = model_make(c, 0);
      Error err = {0, ""};
      char path[PATH_SIZE];
      CHECK(!save(out, &m, 12, &err), "%s: %s", patterns[k], err.text);
      CHECK(!checkpoint_find(out, path, NULL, NULL, &err) && !strcmp(path, join(out, "step-00000012")), "%s", path);
      Config there;
      CheckpointInfo info, want = info_for(12);
      CHECK(!checkpoint_read_info(path, &there, &info, &err), "%s", err.text);
      CHECK(!memcmp(&there, &c, sizeof c), "%s: config differs", patterns[k]);
      CHECK(info.step == want.step && info.tokens == want.tokens && info.samples == want.samples &&
                info.skipped == want.skipped && info.seed == want.seed && !strcmp(info.data, want.data) &&
                !strcmp(info.build, want.build) && !strcmp(info.options, want.options),
            "manifest differs");
      CHECK(!strcmp(info.trainer, want.trainer), "trainer state %s", info.trainer);
      checkpoint_info_free(&info);
      CHECK(!checkpoint_load(path, &c, &n.t, 0, 0, LOAD_PARAMS | LOAD_MOMENTS | LOAD_VERIFY, model_write, &n, &err),
            "%s", err.text);
      CHECK(model_equal(&m, &n), "%s: tensors differ", patterns[k]);
      Safetensors f;
      CHECK(!safetensors_open(&f, join(path, "model.safetensors"), &err), "%s", err.text);
      int64_t params = 0;
      for (int64_t i = 0; i < f.n; i++) params += f.tensors[i].count;
      CHECK(params == m.t.params, "%lld values stored of %lld", (long long)params, (long long)m.t.params);
      CHECK((safetensors_find(&f, "lm_head.weight") == NULL) == tied && f.data_start % 8 == 0, "head, alignment");
      const SafetensorsTensor *e = safetensors_find(&f, "model.embeddings.weight");
      CHECK(e && e->shape[0] == 61 && e->shape[1] == 32, "padded rows are stored");
      safetensors_free(&f);
      model_free(&m), model_free(&n);
    }
}

// Three ranks, in any order, write the same bytes as one process; a partial load delivers exactly its range.
static void test_ranks(void) {
  const char *one = fresh("one"), *many = fresh("many");
  Model m = model_make(tiny("gdn swa"), 1);
  Error err = {0, ""};
  CHECK(!save(one, &m, 5, &err), "%s", err.text);
  CheckpointSettings s = settings_for(many);
  CheckpointPlan plan;
  char tmp[PATH_SIZE];
  CHECK(!checkpoint_plan(&plan, &s, &m.c, &m.t, &err), "%s", err.text);
  checkpoint_temp_name(tmp, many, 5, getpid());
  CHECK(!checkpoint_create(&plan, tmp, &err), "%s", err.text);
  CheckpointHashes all = checkpoint_hashes_make(&plan);
  int64_t third = m.t.total / 3 / 8 * 8;
  int streamed = 0;
  for (int rank = 2; rank >= 0; rank--) {
    CheckpointHashes h = checkpoint_hashes_make(&plan);
    Snapshot snap;
    int64_t count = rank == 2 ? m.t.total - 2 * third : third;
    snapshot_open(&snap, rank * third, count);
    CHECK(!snapshot_begin(&snap, &err), "%s", err.text);
    CHECK(snapshot_wait(&snap, 0) == 3 * count, "a copy that was not taken is complete");
    snapshot_copy(&snap, model_read, &m);
    CHECK(snapshot_wait(&snap, 0) == 0, "a copy is not complete");
    CHECK(!checkpoint_write_range(&plan, tmp, rank * third, count, snapshot_read, &snap, &h, &err), "%s", err.text);
    for (int i = 0; i < h.n; i++)
      if (h.done[i]) all.hash[i] = h.hash[i], all.done[i] = 1, streamed++;
    snapshot_close(&snap);
    checkpoint_hashes_free(&h);
  }
  CHECK(streamed > 3 && streamed < all.n, "%d of %d blocks hashed by ranks", streamed, all.n);
  CheckpointInfo info = info_for(5);
  CHECK(checkpoint_finish(&plan, tmp, &info, &all, &err) == EXIT_INTERNAL, "finished with blocks not hashed");
  CHECK(!checkpoint_hash_rest(&plan, tmp, &all, &err), "%s", err.text);
  CHECK(!checkpoint_finish(&plan, tmp, &info, &all, &err), "%s", err.text);
  checkpoint_hashes_free(&all);
  checkpoint_plan_free(&plan);
  static const char *const files[] = {"config.json", "manifest.json", "model.safetensors", "trainer_state.safetensors"};
  for (int i = 0; i < 4; i++) {
    size_t a = 0, b = 0;
    char *x = get(join(join(one, "step-00000005"), files[i]), &a),
         *y = get(join(join(many, "step-00000005"), files[i]), &b);
    CHECK(a == b && !memcmp(x, y, a), "%s differs", files[i]);
    free(x), free(y);
  }
  Model part = model_make(m.c, 0);
  for (int64_t i = 0; i < m.t.total; i++) part.a[ARENA_M][i] = -7;
  CHECK(!checkpoint_load(join(many, "step-00000005"), &m.c, &m.t, third, third, LOAD_MOMENTS, model_write, &part, &err),
        "%s", err.text);
  int wrong = 0;
  for (int64_t i = 0; i < m.t.total; i++)
    wrong += part.a[ARENA_M][i] != (i >= third && i < 2 * third ? m.a[ARENA_M][i] : -7);
  CHECK(!wrong, "%d values of a partial load are wrong", wrong);
  model_free(&m), model_free(&part);
}

static void test_keep(void) {
  const char *out = fresh("keep");
  Model m = model_make(tiny("gdn"), 1);
  Error err = {0, ""};
  CheckpointSettings s = settings_for(out);
  s.keep = 2, s.keep_every = 30;
  for (int64_t step = 10; step <= 80; step += 10) {
    CheckpointInfo i = info_for(step);
    CHECK(!checkpoint_save(&s, &m.c, &m.t, &i, model_read, &m, &err), "%s", err.text);
  }
  CheckpointList list;
  CHECK(!checkpoint_list(out, &list, NULL, NULL, &err) && list.n == 4, "%d kept", list.n);
  static const int64_t want[] = {80, 70, 60, 30};
  for (int i = 0; i < 4 && i < list.n; i++)
    CHECK(list.items[i].step == want[i], "step %lld", (long long)list.items[i].step);
  checkpoint_list_free(&list);
  // the same step again replaces the old one; an earlier one never costs a later one
  m.a[0][0] += 1;
  CheckpointInfo i = info_for(70);
  CHECK(!checkpoint_save(&s, &m.c, &m.t, &i, model_read, &m, &err), "%s", err.text);
  Model n = model_make(m.c, 0);
  CHECK(!checkpoint_load(join(out, "step-00000070"), &m.c, &n.t, 0, 0, 7, model_write, &n, &err), "%s", err.text);
  CHECK(model_equal(&m, &n), "the old checkpoint is still there");
  CHECK(!checkpoint_verify(join(out, "step-00000080"), &err), "%s", err.text);
  CHECK(count_entries(out, ".tmp") == 0, "temporary folders left");
  // a tokenizer travels along
  put(join(root, "my.model"), "tokenizer\0bytes", 15);
  const char *tokenizer = join(root, "my.model");
  s.tokenizer = tokenizer;
  i = info_for(90);
  CHECK(!checkpoint_save(&s, &m.c, &m.t, &i, model_read, &m, &err), "%s", err.text);
  CHECK(
      path_exists(join(join(out, "step-00000090"), "my.model")) && !checkpoint_verify(join(out, "step-00000090"), &err),
      "%s", err.text);
  s.tokenizer = "/nowhere/t.model";
  CHECK(checkpoint_save(&s, &m.c, &m.t, &i, model_read, &m, &err) == EXIT_CHECKPOINT &&
            strstr(err.text, "/nowhere/t.model"),
        "%s", err.text);
  model_free(&m), model_free(&n);
}

// The Python file goes into the folder of a model that fla has no class for, and into no other; it is covered by the
// manifest, whose hash blocks are shorter than it is, and says what its source and config.json say.
static void test_modeling(void) {
  size_t size = 0;
  char *source = get("gdn/modeling_train_gdn.py", &size);
  CHECK(size == sizeof hf_modeling_text - 1 && !memcmp(source, hf_modeling_text, size),
        "gdn/hf_modeling.h is not of gdn/modeling_train_gdn.py: run make modeling");
  free(source);
  int fields = 0;
  for (const char *p = hf_modeling_text; (p = strstr(p, "c[\"")); fields++) {  // settings that it reads
    char name[64];
    p += 3;
    snprintf(name, sizeof name, "%.*s", (int)strcspn(p, "\""), p);
    int known = !strcmp(name, "pattern");
    for (int i = 0; i < CONFIG_FIELDS; i++) known |= !strcmp(name, config_fields[i].name);
    CHECK(known, "the Python file reads \"%s\", which config.json does not have", name);
  }
  CHECK(fields > 20, "%d settings are read", fields);
  static const char *const patterns[] = {"gdn", "kda swa", "gdn2", "gdn2 swa", "mamba2 gdn swa"};
  put(join(root, "modeling_train_gdn.py"), "# a tokenizer by this name", 26);
  char tokenizer[PATH_SIZE];
  snprintf(tokenizer, sizeof tokenizer, "%s", join(root, "modeling_train_gdn.py"));
  for (int k = 0; k < 5; k++) {
    const char *out = fresh("modeling");
    Model m = model_make(tiny(patterns[k]), 1);
    Error err = {0, ""};
    CheckpointSettings s = settings_for(out);
    CheckpointInfo info = info_for(3);
    s.tokenizer = tokenizer;
    CHECK(!checkpoint_save(&s, &m.c, &m.t, &info, model_read, &m, &err), "%s", err.text);
    char dir[PATH_SIZE], path[PATH_SIZE];
    snprintf(dir, sizeof dir, "%s", join(out, "step-00000003"));
    snprintf(path, sizeof path, "%s", join(dir, "modeling_train_gdn.py"));
    json_t *j = json_read_file(join(dir, "config.json"), 1 << 20, EXIT_CHECKPOINT, &err);
    const json_t *map = json_object_get(j, "auto_map");
    CHECK(path_exists(path) == (k > 1) && (map != NULL) == (k > 1), "%s: the Python file or auto_map", patterns[k]);
    CHECK(json_is_true(json_object_get(j, "use_cache")) == (k < 2), "%s: use_cache", patterns[k]);
    CHECK(path_exists(join(dir, "tokenizer.model")), "the tokenizer is not there");
    if (k > 1) {
      char *text = get(path, &size);
      CHECK(size == sizeof hf_modeling_text - 1 && !memcmp(text, hf_modeling_text, size), "another text");
      static const char *const classes[][2] = {{"AutoConfig", "Config"}, {"AutoModelForCausalLM", "ForCausalLM"}};
      for (int i = 0; i < 2; i++) {
        char name[128], line[128];
        snprintf(name, sizeof name, "modeling_train_gdn.TrainGdn%s", classes[i][1]);
        snprintf(line, sizeof line, "\nclass TrainGdn%s(", classes[i][1]);
        const char *named = json_string_value(json_object_get(map, classes[i][0]));
        CHECK(named && !strcmp(named, name) && strstr(hf_modeling_text, line), "auto_map: %s", named ? named : "?");
      }
      CHECK(!checkpoint_verify(dir, &err), "%s", err.text);
      CHECK(size > CHECKPOINT_BLOCK, "one block");
      for (size_t at = 0; at < size; at += size - 1) {
        text[at] ^= 1;
        put(path, text, size);
        CHECK(checkpoint_verify(dir, &err) == EXIT_CHECKPOINT && strstr(err.text, "modeling_train_gdn.py"),
              "byte %zu changed: %s", at, err.text);
        text[at] ^= 1;
      }
      unlink(path);
      CHECK(checkpoint_verify(dir, &err) == EXIT_CHECKPOINT && strstr(err.text, "modeling_train_gdn.py"), "deleted: %s",
            err.text);
      free(text);
    }
    json_decref(j);
    model_free(&m);
  }
}

// ----------------------------------------------------------------------------
// damage

static void test_damage(void) {
  static const char *const files[] = {"config.json", "manifest.json", "model.safetensors", "trainer_state.safetensors"};
  const char *out = fresh("damage");
  Config two = tiny("gdn swa");
  two.layers = 2;
  Model m = model_make(two, 1), scratch = model_make(two, 0);
  Error err = {0, ""};
  char good[PATH_SIZE], newest[PATH_SIZE], found[PATH_SIZE];
  CHECK(!save(out, &m, 1, &err) && !save(out, &m, 2, &err), "%s", err.text);
  snprintf(good, sizeof good, "%s/step-00000001", out);
  snprintf(newest, sizeof newest, "%s/step-00000002", out);
  char *bytes[4];
  size_t size[4], total = 0;
  for (int i = 0; i < 4; i++) bytes[i] = get(join(newest, files[i]), &size[i]), total += size[i];
  int cuts = 0;
  for (int i = 0; i < 4; i++) {
    const char *path = join(newest, files[i]);
    for (size_t n = 0; n < size[i]; n = n + 4096 < size[i] || n == size[i] - 1 ? n + 4096 : size[i] - 1, cuts++) {
      put(path, bytes[i], n);
      err.text[0] = 0;
      CHECK(checkpoint_verify(newest, &err) == EXIT_CHECKPOINT && strstr(err.text, files[i]), "%s cut to %zu: %s",
            files[i], n, err.text);
    }
    notes[0] = 0;
    CHECK(!checkpoint_find(out, found, take_note, NULL, &err) && !strcmp(found, good), "fell back to %s", found);
    CHECK(strstr(notes, newest) && strstr(notes, files[i]), "note: %s", notes);
    unlink(path);
    CHECK(
        checkpoint_verify(newest, &err) == EXIT_CHECKPOINT && strstr(err.text, files[i]) && strstr(err.text, "missing"),
        "%s deleted: %s", files[i], err.text);
    put(path, bytes[i], size[i]);
    CHECK(!checkpoint_verify(newest, &err), "%s", err.text);
  }
  CHECK(cuts > 50, "%d truncations", cuts);
  for (int k = 0; k < 500; k++) {
    int i = k % 5 == 0 ? 0 : k % 5 == 1 ? 1 : k % 5 == 2 ? 2 : 3;
    size_t at = (k % 10 == 2 ? rng() % 64 : rng() % size[i]);
    char flipped = (char)(bytes[i][at] ^ (1 << (rng() % 8)));
    int fd = open(join(newest, files[i]), O_WRONLY);
    if (fd < 0 || pwrite(fd, &flipped, 1, (off_t)at) != 1) fail(EXIT_INTERNAL, "%s", files[i]);
    err.text[0] = 0;
    CHECK(checkpoint_verify(newest, &err) == EXIT_CHECKPOINT && strstr(err.text, files[i]), "%s, bit at %zu: %s",
          files[i], at, err.text);
    // the readers behind the hashes must survive it too
    Config c;
    CheckpointInfo info;
    checkpoint_load(newest, &m.c, &m.t, 0, 0, LOAD_PARAMS | LOAD_MOMENTS, model_write, &scratch, &err);
    if (!checkpoint_read_info(newest, &c, &info, &err)) checkpoint_info_free(&info);
    if (pwrite(fd, bytes[i] + at, 1, (off_t)at) != 1) fail(EXIT_INTERNAL, "%s", files[i]);
    close(fd);
  }
  CHECK(!checkpoint_verify(newest, &err), "%s", err.text);
  // two files swapped
  put(join(newest, files[2]), bytes[3], size[3]);
  put(join(newest, files[3]), bytes[2], size[2]);
  CHECK(checkpoint_verify(newest, &err) == EXIT_CHECKPOINT && strstr(err.text, ".safetensors"), "%s", err.text);
  put(join(newest, files[2]), bytes[2], size[2]);
  put(join(newest, files[3]), bytes[3], size[3]);
  // a file of another checkpoint of the same model: same size, other content
  Model other = model_make(m.c, 1);
  const char *out2 = fresh("damage2");
  CHECK(!save(out2, &other, 2, &err), "%s", err.text);
  size_t n = 0;
  char *foreign = get(join(join(out2, "step-00000002"), files[2]), &n);
  put(join(newest, files[2]), foreign, n);
  CHECK(n == size[2] && checkpoint_verify(newest, &err) == EXIT_CHECKPOINT && strstr(err.text, files[2]), "%s",
        err.text);
  free(foreign);
  // both bad: refused, not silently from the start
  unlink(join(good, "model.safetensors"));
  notes[0] = 0;
  CHECK(checkpoint_find(out, found, take_note, NULL, &err) == EXIT_CHECKPOINT && !found[0], "found %s", found);
  CHECK(strstr(notes, good) && strstr(notes, newest), "note: %s", notes);
  // none at all: fine, and empty
  CHECK(!checkpoint_find(fresh("none"), found, NULL, NULL, &err) && !found[0], "found %s", found);
  CHECK(!checkpoint_find("/nowhere/at/all", found, NULL, NULL, &err) && !found[0], "found %s", found);
  // half-written folders are invisible, also those whose name parses
  const char *half = fresh("half");
  CHECK(!save(half, &m, 3, &err), "%s", err.text);
  mkdir(join(half, "step-00000009"), 0777);
  mkdir(join(half, ".tmp-step-00000008-999999999"), 0777);
  put(join(join(half, "step-00000009"), "model.safetensors"), bytes[2], size[2]);
  put(join(join(half, ".tmp-step-00000008-999999999"), "manifest.json"), bytes[1], size[1]);
  snprintf(found, sizeof found, ".tmp-step-00000007-%ld", (long)getppid());
  mkdir(join(half, found), 0777);
  notes[0] = 0;
  CHECK(!checkpoint_find(half, found, take_note, NULL, &err) && strstr(found, "step-00000003"), "found %s", found);
  CHECK(strstr(notes, "step-00000009") && !strstr(notes, "step-00000008"), "note: %s", notes);
  checkpoint_clean(half, take_note, NULL);
  CHECK(count_entries(half, ".tmp") == 1, "folders of a dead process kept, or of a living one removed");
  // a renamed checkpoint is found by its manifest
  rename(join(half, "step-00000003"), join(half, "best"));
  CHECK(!checkpoint_find(half, found, take_note, NULL, &err) && strstr(found, "best"), "found %s", found);
  for (int i = 0; i < 4; i++) free(bytes[i]);
  model_free(&m), model_free(&other), model_free(&scratch);
}

static void test_other_model(void) {
  const char *out = fresh("other");
  Config c = tiny("gdn swa");
  Model m = model_make(c, 1);
  Error err = {0, ""};
  CHECK(!save(out, &m, 1, &err), "%s", err.text);
  const char *dir = join(out, "step-00000001");
  static const struct {
    const char *name;
    size_t offset;
    int value;
  } changes[] = {
      {"width", offsetof(Config, width), 64},      {"vocab", offsetof(Config, vocab), 62},
      {"head_v", offsetof(Config, head_v), 24},    {"window", offsetof(Config, window), 8},
      {"tied", offsetof(Config, tied), 1},         {"output_gate", offsetof(Config, output_gate), OUTPUT_GATE_SIGMOID},
      {"beta_max", offsetof(Config, beta_max), 2}, {"layers", offsetof(Config, layers), 4}};
  for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
    Config d = c;
    memcpy((char *)&d + changes[i].offset, &changes[i].value, sizeof(int));
    Model n = model_make(d, 0);
    CHECK(checkpoint_load(dir, &d, &n.t, 0, 0, LOAD_PARAMS, model_write, &n, &err) == EXIT_CHECKPOINT &&
              strstr(err.text, changes[i].name),
          "%s: %s", changes[i].name, err.text);
    model_free(&n);
  }
  Config d = c;
  strcpy(d.model, "named"), d.mamba_state = 99, d.output_gate = OUTPUT_GATE_SILU;  // the same model in other words
  CHECK(!checkpoint_load(dir, &d, &m.t, 0, 0, LOAD_PARAMS, model_write, &m, &err), "%s", err.text);
  d = c, d.pattern[1] = MIX_ATTN;
  char line[256];
  CHECK(config_diff(&c, &d, line, sizeof line) && strstr(line, "layer 1"), "%s", line);
  model_free(&m);
}

// ----------------------------------------------------------------------------
// failing disks and crashes

static int fault_countdown = -1, fault_errno, fault_exit, fault_calls;
static char fault_op[32];
static int inject(const char *op, const char *path) {
  (void)path;
  fault_calls++;
  if (fault_countdown < 0 || fault_countdown-- > 0) return 0;
  snprintf(fault_op, sizeof fault_op, "%s", op);
  if (fault_exit) _exit(9);
  return fault_errno;
}

// Everything visible in `out` must be whole.
static int all_whole(const char *out, int *n) {
  CheckpointList list;
  Error err = {0, ""};
  int bad = 0, whole = 1;
  if (checkpoint_scan(out, &list, &bad, take_note, NULL, &err)) return 0;
  for (int i = 0; i < list.n; i++)
    if (checkpoint_verify(list.items[i].path, &err)) whole = 0, printf("%s\n", err.text);
  *n = list.n;
  checkpoint_list_free(&list);
  return whole && bad == 0 && count_entries(out, "step-") == *n;
}

static void test_faults(void) {
  Config small = tiny("gdn");
  small.layers = 1, small.width = 16, small.ff = 0, small.conv_size = 0, small.tied = 1;
  Model m = model_make(small, 1);
  Error err = {0, ""};
  const char *out = fresh("faults");
  io_fault = inject, fault_countdown = -1, fault_calls = 0;
  CHECK(!save(out, &m, 1, &err), "%s", err.text);
  int ops = fault_calls, failures = 0;
  CHECK(ops > 50, "%d operations", ops);
  for (int again = 0; again < 2; again++)  // again: the step is there already and is replaced
    for (int n = again ? ops - 15 : 0; n < ops + 3; n++) {
      out = fresh("faults");
      fault_countdown = -1;
      CHECK(!save(out, &m, 1, &err) && (!again || !save(out, &m, 2, &err)), "%s", err.text);
      fault_countdown = n, fault_errno = n % 2 ? ENOSPC : EIO, fault_op[0] = 0, err.text[0] = 0;
      int rc = save(out, &m, 2, &err), visible = 0;
      int fired = fault_countdown < 0 && fault_op[0];
      fault_countdown = -1;
      CHECK(!fired || (rc == EXIT_CHECKPOINT && strstr(err.text, strerror(fault_errno))), "%s %d: %d %s", fault_op, n,
            rc, err.text);
      CHECK(fired || !rc, "operation %d: %s", n, err.text);
      failures += rc != 0;
      CHECK(all_whole(out, &visible) && visible >= 1 + again, "%s %d: %d visible", fault_op, n, visible);
      CHECK(count_entries(out, ".tmp") == 0, "%s %d: a temporary folder is left", fault_op, n);
    }
  CHECK(failures >= ops + 13, "%d of %d operations failed", failures, ops + 15);
  // and the process may end at any of them
  for (int n = 0; n < ops; n++) {
    int status = 0, visible = 0;
    out = fresh("faults");
    CHECK(!save(out, &m, 1, &err), "%s", err.text);
    pid_t pid = fork();
    if (pid == 0) {
      fault_countdown = n, fault_exit = 1;
      save(out, &m, 2, &err);
      _exit(0);
    }
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 9, "operation %d: status %d", n, status);
    CHECK(all_whole(out, &visible) && visible >= 1, "ended at operation %d: %d visible", n, visible);
    checkpoint_clean(out, take_note, NULL);
    CHECK(count_entries(out, ".tmp") == 0, "operation %d: not cleaned", n);
    CHECK(!save(out, &m, 2, &err), "%s", err.text);
  }
  io_fault = NULL;
  model_free(&m);
}

static void test_kills(void) {  // kill -9 at random moments while one checkpoint after the other is written
  Model m = model_make(tiny("gdn swa"), 1);
  const char *out = fresh("kills");
  Error err = {0, ""};
  CHECK(!save(out, &m, 1, &err), "%s", err.text);
  for (int k = 0; k < 30; k++) {
    int status = 0, visible = 0;
    pid_t pid = fork();
    if (pid == 0) {
      CheckpointSettings s = settings_for(out);
      s.keep = 2;
      for (int64_t step = 2; step < 100000; step++) {
        CheckpointInfo i = info_for(step % 7 + 2);
        checkpoint_save(&s, &m.c, &m.t, &i, model_read, &m, &err);
      }
      _exit(0);
    }
    usleep((useconds_t)(rng() % 15000));
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    CHECK(all_whole(out, &visible) && visible >= 1, "killed: %d visible", visible);
    checkpoint_clean(out, take_note, NULL);
    CHECK(count_entries(out, ".tmp") == 0, "not cleaned");
  }
  model_free(&m);
}

static void test_places(void) {
  Model m = model_make(tiny("gdn"), 1);
  Error err = {0, ""};
  put(join(root, "plain"), "x", 1);
  CHECK(save(join(root, "plain"), &m, 1, &err) == EXIT_CHECKPOINT && strstr(err.text, "plain"), "%s", err.text);
  CHECK(save(join(root, "missing"), &m, 1, &err) == EXIT_CHECKPOINT && strstr(err.text, "missing"), "%s", err.text);
  const char *out = fresh("tmpfs");
  if (mount("tmpfs", out, "tmpfs", 0, "size=4m")) {
    printf("skipped: full and read-only disk: mounting a tmpfs: %s\n", strerror(errno));
    skipped += 2;
    model_free(&m);
    return;
  }
  int steps = 0;
  int64_t step = 1;
  while (steps < 1000 && !save(out, &m, step, &err)) steps++, step++;
  CHECK(steps > 0 && steps < 1000 && strstr(err.text, "needs") && strstr(err.text, "free"), "%d saves, then %s", steps,
        err.text);
  int visible = 0;
  CHECK(all_whole(out, &visible) && visible == steps && !count_entries(out, ".tmp"), "%d visible of %d", visible,
        steps);
  // the space runs out in the middle of a write: fill the disk from within the read callback's first call
  folder_remove(join(out, "step-00000001"), 0);
  CheckpointSettings s = settings_for(out);
  CheckpointPlan plan;
  CheckpointInfo info = info_for(step);
  char tmp[PATH_SIZE];
  CHECK(!checkpoint_plan(&plan, &s, &m.c, &m.t, &err), "%s", err.text);
  CheckpointHashes h = checkpoint_hashes_make(&plan);
  checkpoint_temp_name(tmp, out, info.step, getpid());
  CHECK(!checkpoint_create(&plan, tmp, &err), "%s", err.text);
  int fd = open(join(out, "filler"), O_CREAT | O_WRONLY, 0666);
  static char zeros[4096];
  while (write(fd, zeros, sizeof zeros) > 0) continue;
  close(fd);
  CHECK(checkpoint_write_range(&plan, tmp, 0, m.t.total, model_read, &m, &h, &err) == EXIT_CHECKPOINT &&
            strstr(err.text, strerror(ENOSPC)),
        "%s", err.text);
  checkpoint_abort(tmp);
  checkpoint_hashes_free(&h);
  checkpoint_plan_free(&plan);
  CHECK(all_whole(out, &visible) && visible == steps - 1 && !count_entries(out, ".tmp"), "%d visible", visible);
  // a log on a full disk waits, and is whole once there is room
  Log l;
  CHECK(!log_open(&l, out, -1, &err), "%s", err.text);
  fd = open(join(out, "filler"), O_APPEND | O_WRONLY);
  while (write(fd, zeros, sizeof zeros) > 0) continue;
  close(fd);
  for (int k = 0; k < 300; k++) log_event(&l, 1, "note", "a line that fills what is left of the last block of the log");
  log_event(&l, 1, "note", "a");
  CHECK(l.pending_size > 0, "a full disk took a line");
  unlink(join(out, "filler"));
  log_event(&l, 2, "note", "b");
  log_close(&l);
  size_t n = 0;
  char *text = get(join(out, "log.jsonl"), &n);
  int lines = 0;
  for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
  CHECK(lines == 303 && strstr(text, "\"a\"") && strstr(text, "\"b\""), "log: %d lines", lines);
  free(text);
  if (mount("tmpfs", out, "tmpfs", MS_REMOUNT | MS_RDONLY, "size=4m")) {
    printf("skipped: read-only disk: %s\n", strerror(errno));
    skipped++;
  } else {
    CHECK(save(out, &m, step, &err) == EXIT_CHECKPOINT && strstr(err.text, strerror(EROFS)), "%s", err.text);
    RunLock lock;
    CHECK(runlock_acquire(&lock, out, &err) == EXIT_CHECKPOINT && strstr(err.text, strerror(EROFS)), "%s", err.text);
  }
  if (umount(out)) printf("%s: cannot be unmounted: %s\n", out, strerror(errno));
  model_free(&m);
}

// Slow enough that a caller who does not wait for the copy changes values that are still to be read.
static void model_read_slowly(void *ctx, int arena, int64_t first, int64_t count, float *dst) {
  usleep(20000);
  model_read(ctx, arena, first, count, dst);
}

static void test_writer(void) {
  const char *out = fresh("writer");
  Model m = model_make(tiny("gdn swa"), 1), want = model_make(m.c, 0);
  Error err = {0, ""};
  CheckpointSettings s = settings_for(out);
  CheckpointWriter *w = checkpoint_writer_start(&s, &m.c, &m.t);
  for (int64_t step = 1; step <= 5; step++) {
    CheckpointInfo i = info_for(step);
    char trainer[64];
    snprintf(trainer, sizeof trainer, "{\"at\":%lld}", (long long)step);
    i.trainer = trainer;
    for (int a = 0; a < 4; a++)
      if (m.a[a]) memcpy(want.a[a], m.a[a], (size_t)m.t.total * 4);
    CHECK(!checkpoint_writer_submit(w, &i, model_read_slowly, &m, &err), "%s", err.text);
    memset(trainer, 'x', sizeof trainer);  // the copy is the writer's
    CHECK(checkpoint_writer_copying(w, 0.001) > 0, "submit has waited for the copy");
    while (checkpoint_writer_copying(w, 1)) continue;
    for (int k = 0; k < m.t.n; k++)
      if (m.t.specs[k].name[0]) m.a[0][m.t.specs[k].offset] += 1;  // training goes on
  }
  CHECK(!checkpoint_writer_wait(w, &err), "%s", err.text);
  Model n = model_make(m.c, 0);
  CHECK(!checkpoint_load(join(out, "step-00000005"), &m.c, &n.t, 0, 0, 7, model_write, &n, &err), "%s", err.text);
  CHECK(model_equal(&n, &want), "the background save holds other values");
  CheckpointInfo got;
  CHECK(!checkpoint_read_info(join(out, "step-00000005"), NULL, &got, &err) && !strcmp(got.trainer, "{\"at\":5}"), "%s",
        got.trainer);
  checkpoint_info_free(&got);
  io_fault = inject, fault_countdown = 10, fault_errno = ENOSPC;
  CheckpointInfo i = info_for(6);
  CHECK(!checkpoint_writer_submit(w, &i, model_read, &m, &err), "%s", err.text);
  i = info_for(7);
  CHECK(checkpoint_writer_submit(w, &i, model_read, &m, &err) == EXIT_CHECKPOINT && strstr(err.text, strerror(ENOSPC)),
        "the failure of step 6 did not surface");
  CHECK(!checkpoint_writer_wait(w, &err) && checkpoint_writer_failures(w) == 0, "reported twice: %s", err.text);
  CHECK(!path_exists(join(out, "step-00000006")) && !checkpoint_verify(join(out, "step-00000007"), &err), "%s",
        err.text);
  for (int k = 0; k < 3; k++) {
    fault_countdown = 5;
    i = info_for(8 + k);
    checkpoint_writer_submit(w, &i, model_read, &m, &err);
    CHECK(checkpoint_writer_wait(w, &err) == EXIT_CHECKPOINT && checkpoint_writer_failures(w) == k + 1, "failures");
  }
  io_fault = NULL, fault_countdown = -1;
  i = info_for(20);
  i.trainer = "[1]";  // not an object
  checkpoint_writer_submit(w, &i, model_read, &m, &err);
  CHECK(checkpoint_writer_wait(w, &err) == EXIT_INTERNAL && strstr(err.text, "trainer"), "%s", err.text);
  checkpoint_writer_stop(w);
  model_free(&m), model_free(&n), model_free(&want);
}

// ----------------------------------------------------------------------------
// safetensors

static int parse_header(const char *json, size_t data, Error *err) {
  Safetensors f;
  memset(&f, 0, sizeof f);
  f.fd = -1;
  strcpy(f.path, "test");
  size_t n = strlen(json);
  uint8_t *bytes = (uint8_t *)alloc_zeroed((int64_t)n + 8, 1, "test");
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(n >> (8 * i));
  memcpy(bytes + 8, json, n);
  int rc = safetensors_parse_header(bytes, n + 8, n + 8 + data, &f, err);
  safetensors_free(&f);
  free(bytes);
  return rc;
}

static void test_safetensors(void) {
  Error err = {0, ""};
#define T(name, type, shape, a, b) \
  "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" #a "," #b "]}"
  static const struct {
    const char *json;
    size_t data;
    const char *says;  // NULL: good
  } cases[] = {
      {"{}", 0, NULL},
      {"{" T("a", "F32", "[2,3]", 0, 24) "}", 24, NULL},
      {"{" T("b", "BF16", "[2]", 24, 28) "," T("a", "F32", "[2,3]", 0, 24) ",\"__metadata__\":{\"format\":\"pt\"}}", 28,
       NULL},
      {"{" T("a", "F32", "[]", 0, 4) "," T("e", "I64", "[0]", 4, 4) "}", 4, NULL},
      {"{}", 1, "describes"},
      {"{" T("a", "F32", "[2,3]", 0, 24) "}", 23, "inside"},
      {"{" T("a", "F32", "[2,3]", 0, 24) "}", 25, "describes"},
      {"{" T("a", "F32", "[2,3]", 0, 20) "}", 20, "20 bytes"},
      {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[2]", 4, 12) "}", 12, "overlap"},
      {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[2]", 12, 20) "}", 20, "overlap or a hole"},
      {"{" T("a", "F32", "[2]", 0, 8) "," T("a", "F32", "[2]", 8, 16) "}", 16, "valid JSON"},
      {"{" T("a", "F99", "[2]", 0, 8) "}", 8, "dtype"},
      {"{" T("a", "F32", "[-2]", 0, 8) "}", 8, "shape"},
      {"{" T("a", "F32", "[4294967296,4294967296]", 0, 8) "}", 8, "shape"},
      {"{" T("a", "F32", "[2.0]", 0, 8) "}", 8, "shape"},
      {"{" T("a", "F32", "[2]", 8, 0) "}", 8, "data_offsets"},
      {"{" T("a", "F32", "[2]", -8, 0) "}", 8, "data_offsets"},
      {"{" T("a", "F32", "[2]", 0, 9223372036854775807) "}", 8, "data_offsets"},
      {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,2]", 0, 8) "}", 8, "dimensions"},
      {"{\"a\":3}", 8, "dtype"},
      {"[1]", 0, "object"},
      {"{\"a\":", 0, "JSON"},
      {"", 0, "JSON"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "data_offsets"},
  };
#undef T
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    err.text[0] = 0;
    int rc = parse_header(cases[i].json, cases[i].data, &err);
    CHECK(cases[i].says ? rc == EXIT_CHECKPOINT && strstr(err.text, cases[i].says) : !rc, "%s: %d %s", cases[i].json,
          rc, err.text);
  }
  Safetensors f;
  strcpy(f.path, "test"), f.fd = -1;
  uint8_t head[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  CHECK(safetensors_parse_header(head, 16, 16, &f, &err) == EXIT_CHECKPOINT, "a header of 2^64 bytes");
  head[7] = head[6] = head[5] = head[4] = head[3] = 0, head[2] = 1;
  CHECK(safetensors_parse_header(head, 16, 1 << 30, &f, &err) == EXIT_CHECKPOINT,
        "a header longer than the bytes given");
  CHECK(safetensors_parse_header(head, 7, 7, &f, &err) == EXIT_CHECKPOINT, "7 bytes");
  CHECK(safetensors_parse_header(head, 0, 0, &f, &err) == EXIT_CHECKPOINT, "0 bytes");
  static const struct {
    uint16_t bits;
    float f16, bf16;
  } halves[] = {{0x3c00, 1.0f, 0x1p-7f},
                {0xc000, -2.0f, -2.0f},
                {0x0001, 0x1p-24f, 0x1p-133f},
                {0x7bff, 65504.0f, 0x1.fep120f},
                {0x8000, -0.0f, -0.0f},
                {0x3f80, 1.875f, 1.0f},
                {0x03ff, 0x1.ff8p-15f, 0x1.fep-120f}};
  for (size_t i = 0; i < sizeof halves / sizeof *halves; i++) {
    CHECK(float_from_f16(halves[i].bits) == halves[i].f16, "%04x is %a", halves[i].bits,
          float_from_f16(halves[i].bits));
    CHECK(float_from_bf16(halves[i].bits) == halves[i].bf16, "%04x is %a", halves[i].bits,
          float_from_bf16(halves[i].bits));
  }
  CHECK(isinf(float_from_f16(0x7c00)) && isnan(float_from_f16(0x7c01)), "f16 infinity, NaN");
}

// ----------------------------------------------------------------------------
// config.json

static int read_fla(const char *text, Config *c, Error *err) {
  return hf_config_parse(text, strlen(text), "config.json", c, err);
}

static void test_hf_config(void) {
  static const struct {
    const char *pattern, *type;
    int change;
  } cases[] = {{"gdn", "gated_deltanet", 0},
               {"gdn swa", "gated_deltanet", 0},
               {"gdn attn", "gated_deltanet", 0},
               {"swa gdn gdn attn", "gated_deltanet", 0},
               {"gdn attn swa", "gated_deltanet", 0},
               {"kda", "kda", 0},
               {"kda swa", "kda", 0},
               {"deltanet", "delta_net", 0},
               {"deltanet attn", "delta_net", 0},
               {"attn", "transformer", 0},
               {"swa", "transformer", 0},
               {"swa attn", "train_gdn", 0},
               {"mamba2", "train_gdn", 0},
               {"mamba2 gdn swa", "train_gdn", 0},
               {"gdn2", "train_gdn", 0},
               {"gdn2 swa", "train_gdn", 0},
               {"gdn kda", "train_gdn", 0},
               {"gdn", "gated_deltanet", 1},
               {"gdn", "gated_deltanet", 2},
               {"gdn", "train_gdn", 3},
               {"gdn", "train_gdn", 4},
               {"gdn", "train_gdn", 5},
               {"gdn swa", "train_gdn", 6},
               {"kda", "kda", 7},
               {"kda", "train_gdn", 1},
               {"gdn", "gated_deltanet", 8},
               {"gdn", "gated_deltanet", 9},
               {"deltanet", "delta_net", 10},
               {"gdn", "train_gdn", 11},
               {"deltanet", "train_gdn", 9},
               {"gdn", "train_gdn", 12},
               {"gdn", "gated_deltanet", 13}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Config c = tiny(cases[i].pattern), back;
    Error err = {0, ""};
    switch (cases[i].change) {
      case 1:
        c.output_gate = OUTPUT_GATE_NONE;
        break;
      case 2:
        c.output_gate = OUTPUT_GATE_SIGMOID;
        break;
      case 3:
        c.output_norm = 0;
        break;
      case 4:
        c.qk_norm = NORM_L1;
        break;
      case 5:
        c.ff = 0;
        break;
      case 6:
        c.attn_head_dim = 8;
        break;
      case 7:
        c.kda_lower_bound = -5, c.beta_max = 2;
        break;
      case 8:
        c.tied = 1, c.conv_size = 0, c.beta_max = 2, c.head_k = 49, c.head_v = 100, c.bos = -1;
        break;
      case 9:
        c.v_heads = 4, c.norm_eps = 1e-6, c.head_k = 96, c.head_v = 200;
        break;
      case 10:
        c.output_gate = OUTPUT_GATE_SILU, c.head_k = 12, c.head_v = 28;
        break;
      case 11:
        c.decay = 0;
        break;
      case 12:
        c.l2_eps = 1e-5;
        break;
      case 13:
        c.rope_theta = 0.1 + 5e5, c.boundary_reset = 1, strcpy(c.model, "gdn \"x\"");
        break;
      default:
        break;
    }
    json_t *j = hf_config_make(&c, 4096, 2, -1);
    CHECK(!strcmp(json_string_value(json_object_get(j, "model_type")), cases[i].type), "%s, %d: model_type %s",
          cases[i].pattern, cases[i].change, json_string_value(json_object_get(j, "model_type")));
    char *text = json_dumps(j, JSON_INDENT(2));
    CHECK(!read_fla(text, &back, &err) && !memcmp(&back, &c, sizeof c), "%s: %s", cases[i].pattern, err.text);
    free(text);
    json_object_del(j, "train_gdn");  // what is left must say the same in fla's keys
    text = json_dumps(j, JSON_INDENT(2));
    char line[256] = "";
    int rc = read_fla(text, &back, &err);
    if (strcmp(cases[i].type, "train_gdn"))
      CHECK(!rc && (c.boundary_reset || !config_diff(&c, &back, line, sizeof line)) && back.bos == c.bos,
            "%s, %d: %s %s", cases[i].pattern, cases[i].change, err.text, line);
    else
      CHECK(rc == EXIT_CHECKPOINT && strstr(err.text, "model_type"), "%s: %s", cases[i].pattern, err.text);
    free(text);
    json_decref(j);
  }
}

static void test_fla_config(void) {
  Config c;
  Error err = {0, ""};
  CHECK(!read_fla("{\"model_type\":\"gated_deltanet\"}", &c, &err), "%s", err.text);
  CHECK(c.width == 2048 && c.layers == 21 && c.heads == 6 && c.head_k == 256 && c.head_v == 512 && c.ff == 5632 &&
            c.norm_eps == 1e-6 && c.vocab == 32000 && !c.tied && c.n_pattern == 1,
        "fla's defaults of gated_deltanet");
  CHECK(!read_fla("{\"model_type\":\"kda\",\"architectures\":[\"KDAForCausalLM\"],\"transformers_version\":\"4.50\"}",
                  &c, &err) &&
            c.heads == 16 && c.head_k == 128 && c.head_v == 128 && c.layers == 24 && c.pattern[0] == MIX_KDA,
        "%s", err.text);
  CHECK(!read_fla("{\"model_type\":\"delta_net\"}", &c, &err) && c.head_k == 128 && c.output_gate == OUTPUT_GATE_AUTO,
        "%s", err.text);
  CHECK(!read_fla("{\"model_type\":\"transformer\",\"window_size\":512,\"num_kv_heads\":8}", &c, &err) &&
            c.attn_heads == 32 && c.attn_kv_heads == 8 && c.attn_head_dim == 64 && c.window == 512 &&
            c.pattern[0] == MIX_SWA,
        "%s", err.text);
  CHECK(!read_fla(
            "{\"model_type\":\"gated_deltanet\",\"num_hidden_layers\":4,\"attn\":{\"layers\":[1,3],\"num_heads\":16,"
            "\"window_size\":2048}}",
            &c, &err) &&
            c.n_pattern == 2 && c.pattern[0] == MIX_GDN && c.pattern[1] == MIX_SWA && c.attn_head_dim == 128 &&
            c.attn_kv_heads == 16 && c.rope_theta == 10000,
        "%s", err.text);
  CHECK(
      !read_fla("{\"model_type\":\"gated_deltanet\",\"num_hidden_layers\":4,\"attn\":[{\"layers\":[0],\"num_heads\":16,"
                "\"window_size\":64},{\"layers\":[3],\"num_heads\":16}]}",
                &c, &err) &&
          c.n_pattern == 4 && c.pattern[0] == MIX_SWA && c.pattern[1] == MIX_GDN && c.pattern[3] == MIX_ATTN &&
          c.window == 64,
      "%s", err.text);
  static const struct {
    const char *text, *says;
  } refused[] = {
      {"{\"model_type\":\"mamba2\"}", "mamba2"},
      {"{\"hidden_size\":64}", "model_type"},
      {"{\"model_type\":\"transformer\",\"qkv_bias\":true}", "qkv_bias"},
      {"{\"model_type\":\"transformer\",\"qk_norm\":true}", "qk_norm"},
      {"{\"model_type\":\"transformer\",\"num_heads\":7}", "7 attention heads"},
      {"{\"model_type\":\"gated_deltanet\",\"conv_bias\":true}", "conv_bias"},
      {"{\"model_type\":\"gated_deltanet\",\"attnres_block_size\":2}", "attnres_block_size"},
      {"{\"model_type\":\"gated_deltanet\",\"hidden_act\":\"powlu\"}", "hidden_act"},
      {"{\"model_type\":\"gated_deltanet\",\"output_gate_activation\":\"relu\"}", "output_gate_activation"},
      {"{\"model_type\":\"gated_deltanet\",\"expand_v\":1.3}", "whole numbers"},
      {"{\"model_type\":\"gated_deltanet\",\"hidden_size\":\"64\"}", "hidden_size"},
      {"{\"model_type\":\"gated_deltanet\",\"hidden_size\":-1}", "hidden_size"},
      {"{\"model_type\":\"gated_deltanet\",\"num_hidden_layers\":100000000000}", "num_hidden_layers"},
      {"{\"model_type\":\"gated_deltanet\",\"num_heads\":0}", "heads"},
      {"{\"model_type\":\"gated_deltanet\",\"hidden_ratio\":16777216,\"hidden_size\":16777216}", "config.json"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":{\"layers\":[1]}}", "num_heads"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":{\"layers\":[21],\"num_heads\":16}}", "layers"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":{\"layers\":[1,1],\"num_heads\":16}}", "layers"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":{\"layers\":[1],\"num_heads\":16,\"qkv_bias\":true}}", "qkv_bias"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":{\"layers\":[1],\"num_heads\":16,\"qk_norm\":true}}", "qk_norm"},
      {"{\"model_type\":\"gated_deltanet\",\"attn\":[{\"layers\":[1],\"num_heads\":16,\"window_size\":3},"
       "{\"layers\":[2],\"num_heads\":16,\"window_size\":4}]}",
       "window_size"},
      {"{\"model_type\":\"delta_net\",\"qk_norm\":\"sum\"}", "qk_norm"},
      {"{\"model_type\":\"delta_net\",\"use_beta\":false}", "use_beta"},
      {"{\"model_type\":\"delta_net\",\"qk_activation\":\"elu\"}", "qk_activation"},
      {"{\"model_type\":\"kda\",\"lower_bound\":-50}", "lower bound"},
      {"{\"model_type\":\"gated_deltanet\",\"train_gdn\":{}}", "model"},
      {"{\"model_type\":\"gated_deltanet\",\"train_gdn\":3}", "model"},
      {"[]", "object"},
      {"{\"a\":1,\"a\":2}", "JSON"},
      {"", "JSON"}};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    err.text[0] = 0;
    CHECK(read_fla(refused[i].text, &c, &err) == EXIT_CHECKPOINT && strstr(err.text, refused[i].says), "%s: %s",
          refused[i].text, err.text);
  }
  // our own fields are read strictly
  Config ours = tiny("gdn");
  json_t *j = hf_config_make(&ours, 128, 2, 0), *fields = json_object_get(j, "train_gdn");
  static const struct {
    const char *key, *value;
  } bad[] = {{"width", "\"64\""},      {"output_gate", "\"tanh\""},
             {"norm_eps", "\"x\""},    {"pattern", "[]"},
             {"pattern", "[\"foo\"]"}, {"pattern", "3"},
             {"newer", "1"},           {"qk_norm", "7"},
             {"model", "1"},           {"vocab", "0"},
             {"layers", "-3"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    json_t *copy = json_deep_copy(j);
    json_object_set_new(json_object_get(copy, "train_gdn"), bad[i].key,
                        json_loads(bad[i].value, JSON_DECODE_ANY, NULL));
    char *text = json_dumps(copy, 0);
    CHECK(read_fla(text, &c, &err) == EXIT_CHECKPOINT, "%s = %s was taken", bad[i].key, bad[i].value);
    free(text);
    json_decref(copy);
  }
  json_object_del(fields, "window");
  char *text = json_dumps(j, 0);
  CHECK(read_fla(text, &c, &err) == EXIT_CHECKPOINT && strstr(err.text, "window"), "%s", err.text);
  free(text);
  json_decref(j);
}

// ----------------------------------------------------------------------------
// --init-from

// Writes some of a model's parameters as a safetensors file of a dtype; skip: a tensor left out; extra: one more.
static void write_model(const char *path, const Model *m, DType type, int first, int last, const char *skip,
                        const char *extra, int64_t extra_count, float extra_value, const char *reshape) {
  json_t *root_json = json_object();
  int64_t at = 0;
  float *values = (float *)alloc_array(m->t.total + extra_count, 4, "test");
  int64_t n_values = 0;
  for (int n = first; n <= last; n++) {
    int is_extra = n == last;
    if (is_extra && !extra) break;
    const ParamSpec *s = &m->t.specs[is_extra ? 0 : n];
    if (!is_extra && (!s->name[0] || (skip && !strcmp(s->name, skip)))) continue;
    int64_t count = is_extra ? extra_count : s->count;
    for (int64_t i = 0; i < count; i++) values[n_values++] = is_extra ? extra_value : m->a[0][s->offset + i];
    json_t *shape = json_array();
    if (is_extra || (reshape && !strcmp(reshape, s->name)))
      json_array_append_new(shape, json_integer(count));
    else
      for (int d = 0; d < s->ndim; d++) json_array_append_new(shape, json_integer(s->shape[d]));
    int64_t bytes = count * (type == DTYPE_F32 ? 4 : 2);
    json_object_set_new(root_json, is_extra ? extra : s->name,
                        json_pack("{s:s,s:o,s:[I,I]}", "dtype", dtype_name(type), "shape", shape, "data_offsets",
                                  (json_int_t)at, (json_int_t)(at + bytes)));
    at += bytes;
  }
  char *text = json_dumps(root_json, JSON_COMPACT);
  size_t n = strlen(text);
  char *bytes = (char *)alloc_zeroed((int64_t)n + 8 + at, 1, "test");
  for (int i = 0; i < 8; i++) bytes[i] = (char)(n >> (8 * i));
  memcpy(bytes + 8, text, n);
  for (int64_t i = 0; i < n_values; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], 4);
    uint16_t half = (uint16_t)(bits >> 16);  // bf16; for f16 the values are small whole numbers, see below
    if (type == DTYPE_F16) {
      int v = (int)values[i], e = 0;
      for (e = 0; (abs(v) >> (e + 1)) > 0; e++) continue;
      half = v ? (uint16_t)((v < 0 ? 0x8000 : 0) | ((e + 15) << 10) | ((abs(v) << (10 - e)) & 1023)) : 0;
    }
    if (type == DTYPE_F32)
      memcpy(bytes + 8 + n + 4 * i, &bits, 4);
    else
      memcpy(bytes + 8 + n + 2 * i, &half, 2);
  }
  put(path, bytes, 8 + n + (size_t)at);
  free(bytes), free(text), free(values);
  json_decref(root_json);
}

static void test_init_from(void) {
  Config c = tiny("gdn swa");
  Model m = model_make(c, 1), n = model_make(c, 0);
  Error err = {0, ""};
  for (int64_t i = 0; i < m.t.total; i++)
    if (m.a[0][i] != 0) m.a[0][i] = (float)((int64_t)(rng() % 255) - 127);  // exact in every dtype
  const char *dir = fresh("init");
  int all = m.t.n;
#define INIT() checkpoint_init_from(dir, &c, &n.t, 0, model_write, &n, take_note, NULL, &err)
#define SAME() (!memcmp(m.a[0], n.a[0], (size_t)m.t.total * 4))
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "model.safetensors"), "%s", err.text);
  for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
    write_model(join(dir, "model.safetensors"), &m, (DType)type, 0, all, NULL, NULL, 0, 0, NULL);
    memset(n.a[0], 0x7f, (size_t)m.t.total * 4);
    CHECK(!INIT() && SAME(), "%s: %s", dtype_name((DType)type), err.text);
  }
  // what is not finite is refused, with its place, but given to who asks for any numbers
  const ParamSpec *A_log = &m.t.specs[param_find(&m.t, "model.layers.0.attn.A_log")];
  float keep = m.a[0][A_log->offset + 1];
  for (int type = DTYPE_F32; type <= DTYPE_BF16; type++)
    for (int kind = 0; kind < 3 && type != DTYPE_F16; kind++) {  // write_model has no such halves
      m.a[0][A_log->offset + 1] = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
      write_model(join(dir, "model.safetensors"), &m, (DType)type, 0, all, NULL, NULL, 0, 0, NULL);
      CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "model.layers.0.attn.A_log: element 1 is "), "%s", err.text);
      CHECK(!checkpoint_init_from(dir, &c, &n.t, LOAD_ANY_NUMBERS, model_write, &n, take_note, NULL, &err) &&
                !isfinite(n.a[0][A_log->offset + 1]) && isfinite(n.a[0][A_log->offset]),
            "%s", err.text);
    }
  m.a[0][A_log->offset + 1] = keep;
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, NULL, "model.layers.0.attn.D", 2, 1, NULL);
  notes[0] = 0;
  CHECK(!INIT() && SAME() && strstr(notes, "attn.D"), "%s %s", err.text, notes);
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, NULL, "model.layers.0.attn.b_proj.bias", 2, 0,
              NULL);
  notes[0] = 0;
  CHECK(!INIT() && SAME() && strstr(notes, "b_proj.bias"), "%s %s", err.text, notes);
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, NULL, "model.layers.0.attn.b_proj.bias", 2, 0.5f,
              NULL);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "b_proj.bias"), "%s", err.text);
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, NULL, "model.layers.0.attn.q_norm.weight", 2, 0,
              NULL);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "q_norm"), "%s", err.text);
  memset(n.a[0], 0x55, (size_t)m.t.total * 4);
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, "model.layers.1.mlp.up_proj.weight", NULL, 0, 0,
              NULL);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "model.layers.1.mlp.up_proj.weight"), "%s", err.text);
  write_model(join(dir, "model.safetensors"), &m, DTYPE_F32, 0, all, NULL, NULL, 0, 0,
              "model.layers.0.attn.q_conv1d.weight");
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "q_conv1d") && strstr(err.text, "[24, 1, 4]"), "%s", err.text);
  CHECK(*(char *)n.a[0] == 0x55, "values were delivered from a model that does not fit");
  unlink(join(dir, "model.safetensors"));
  // shards and their index
  write_model(join(dir, "m-1.safetensors"), &m, DTYPE_F32, 0, all / 2, NULL, NULL, 0, 0, NULL);
  write_model(join(dir, "m-2.safetensors"), &m, DTYPE_BF16, all / 2, all, NULL, NULL, 0, 0, NULL);
  json_t *map = json_object();
  for (int i = 0; i < all; i++)
    if (m.t.specs[i].name[0])
      json_object_set_new(map, m.t.specs[i].name, json_string(i < all / 2 ? "m-1.safetensors" : "m-2.safetensors"));
  json_t *index = json_pack("{s:O}", "weight_map", map);
  char *text = json_dumps(index, 0);
  put(join(dir, "model.safetensors.index.json"), text, strlen(text));
  free(text);
  CHECK(!INIT() && SAME(), "shards: %s", err.text);
  json_object_set_new(map, "x", json_string("../../etc/passwd"));
  text = json_dumps(index, 0);
  put(join(dir, "model.safetensors.index.json"), text, strlen(text));
  free(text);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "file name"), "%s", err.text);
  json_object_set_new(map, "x", json_string("m-3.safetensors"));
  text = json_dumps(index, 0);
  put(join(dir, "model.safetensors.index.json"), text, strlen(text));
  free(text);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "m-3.safetensors"), "%s", err.text);
  put(join(dir, "model.safetensors.index.json"), "{}", 2);
  CHECK(INIT() == EXIT_CHECKPOINT && strstr(err.text, "weight_map"), "%s", err.text);
  json_decref(index), json_decref(map);
  // one of our own checkpoints
  const char *out = fresh("init2");
  CHECK(!save(out, &m, 4, &err), "%s", err.text);
  dir = join(out, "step-00000004");
  memset(n.a[0], 0x7f, (size_t)m.t.total * 4);
  CHECK(!INIT() && SAME(), "%s", err.text);
  model_free(&m), model_free(&n);
}

// ----------------------------------------------------------------------------
// the log and the lock

static void test_log(void) {
  const char *out = fresh("log");
  Error err = {0, ""};
  Log l;
  CHECK(!log_open(&l, out, -1, &err), "%s", err.text);
  for (int64_t step = 1; step <= 20; step++) {
    LogStep s = {step,     20, step * 64, step == 7 ? NAN : 1.0 / (double)step, 1, 1e-3, 5, 100, -1, 3, step == 7, step,
                 0xabcdef, 0,  -1};
    log_step(&l, &s);
    if (step % 5 == 0) log_eval(&l, step, NULL, 2.5, 100, 7);
  }
  log_event(&l, 20, "stop", "signal \"TERM\"\n");
  log_close(&l);
  CHECK(log_open(&l, out, -1, &err) == EXIT_CHECKPOINT && strstr(err.text, "log.jsonl"), "%s", err.text);
  int fd = open(join(out, "log.jsonl"), O_WRONLY | O_APPEND);
  CHECK(write(fd, "{\"kind\":\"step\",\"st", 18) == 18, "append");
  close(fd);
  CHECK(!log_open(&l, out, 12, &err) && l.last_eval == 10, "%s, eval at %lld", err.text, (long long)l.last_eval);
  for (int64_t step = 13; step <= 16; step++) {
    LogStep s = {step, 20, step * 64, 1, 1, 1e-3, 5, 100, 0.123, 3, 0, step, 0, 0, -1};
    log_step(&l, &s);
  }
  log_sync(&l);
  log_close(&l);
  CHECK(!log_open(&l, out, 15, &err), "%s", err.text);  // resumed twice
  log_close(&l);
  size_t n = 0;
  char *text = get(join(out, "log.jsonl"), &n);
  int64_t next = 1;
  int runs = 0, evals = 0, lines = 0;
  for (char *p = text, *end; (end = strchr(p, '\n')); p = end + 1, lines++) {
    json_t *j = json_loadb(p, (size_t)(end - p), 0, NULL);
    const char *kind = json_string_value(json_object_get(j, "kind"));
    CHECK(kind && json_string_value(json_object_get(j, "run")), "line %.*s", (int)(end - p), p);
    if (kind && !strcmp(kind, "step")) {
      CHECK(json_integer_value(json_object_get(j, "step")) == next, "step %lld is not there once", (long long)next);
      CHECK(json_is_null(json_object_get(j, "loss")) == (next == 7), "loss of step %lld", (long long)next);
      next++;
    }
    runs += kind && !strcmp(kind, "run"), evals += kind && !strcmp(kind, "eval");
    json_decref(j);
  }
  CHECK(next == 16 && runs == 3 && evals == 2 && text[n - 1] == '\n', "%lld steps, %d runs, %d evals",
        (long long)next - 1, runs, evals);
  free(text);
  // every way to fail in the cut leaves the old log or the new one
  for (int k = 0; k < 6; k++) {
    size_t before = 0, after = 0;
    char *a = get(join(out, "log.jsonl"), &before);
    io_fault = inject, fault_countdown = k, fault_errno = ENOSPC;
    int rc = log_open(&l, out, 3, &err);
    io_fault = NULL, fault_countdown = -1;
    if (!rc) log_close(&l);
    char *b = get(join(out, "log.jsonl"), &after);
    CHECK(rc ? (rc == EXIT_CHECKPOINT && ((after == before && !memcmp(a, b, after)) || after < before)) : after > 0,
          "operation %d: %zu bytes were %zu", k, after, before);
    CHECK(after && b[after - 1] == '\n', "operation %d: a half line", k);
    free(a), free(b);
  }
  char line[256];
  LogStep s = {120, 3000, 0, 2.345, 0.98, 3e-4, 123.4, 12345.4, 0.1234, 3725, 0, 0, 0, 0, -1};
  log_console_step(line, sizeof line, &s);
  CHECK(!strcmp(line,
                "step 120/3000 | loss 2.345 | norm 0.98 | lr 3.0e-04 | 123 ms | 12,345 tok/s | mfu 12.3% | eta 1h02m"),
        "%s", line);
  s.mfu = s.eta_s = -1, s.skipped = 1, s.ms = 1.234, s.tokens_per_s = 1234567;
  log_console_step(line, sizeof line, &s);
  CHECK(!strcmp(line, "step 120/3000 | loss 2.345 | norm 0.98 | lr 3.0e-04 | 1.23 ms | 1,234,567 tok/s | skipped"),
        "%s", line);
  static const struct {
    double s;
    const char *text;
  } times[] = {{0, "0s"}, {59.4, "59s"}, {187, "3m07s"}, {86399, "23h59m"}, {190000, "2d04h"}, {-1, "?"}, {NAN, "?"}};
  for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
    format_duration(line, sizeof line, times[i].s);
    CHECK(!strcmp(line, times[i].text), "%g s: %s", times[i].s, line);
  }
  format_count(line, sizeof line, 999);
  CHECK(!strcmp(line, "999"), "%s", line);
  format_count(line, sizeof line, -1234567890123);
  CHECK(!strcmp(line, "-1,234,567,890,123"), "%s", line);
}

static void test_lock(void) {
  const char *out = fresh("lock");
  Error err = {0, ""};
  RunLock a, b;
  char pid[32], host[128] = "";
  gethostname(host, sizeof host - 1);
  CHECK(!runlock_acquire(&a, out, &err) && !a.note[0], "%s", err.text);
  snprintf(pid, sizeof pid, "process %d,", (int)getpid());
  CHECK(runlock_acquire(&b, out, &err) == EXIT_CHECKPOINT && strstr(err.text, pid) && strstr(err.text, host), "%s",
        err.text);
  int status = 0;
  pid_t child = fork();
  if (child == 0) _exit(runlock_acquire(&b, out, &err));
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_CHECKPOINT, "another process got the lock");
  runlock_release(&a);
  CHECK(!runlock_acquire(&b, out, &err) && !b.note[0], "%s %s", err.text, b.note);
  runlock_release(&b);
  child = fork();
  if (child == 0) {
    runlock_acquire(&a, out, &err);
    raise(SIGKILL);
  }
  waitpid(child, &status, 0);
  snprintf(pid, sizeof pid, "process %d,", (int)child);
  CHECK(!runlock_acquire(&a, out, &err) && strstr(a.note, pid), "a stale lock: %s %s", err.text, a.note);
  runlock_release(&a);
  CHECK(runlock_acquire(&a, join(root, "nowhere"), &err) == EXIT_CHECKPOINT && strstr(err.text, "nowhere"), "%s",
        err.text);
}

int main(void) {
  const char *tmp = getenv("TMPDIR");
  if (!tmp || !*tmp) tmp = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";  // thousands of syncs: memory is faster
  snprintf(root, sizeof root, "%.300s/test_checkpoint_XXXXXX", tmp);
  if (!mkdtemp(root)) fail(EXIT_INTERNAL, "%s: %s", root, strerror(errno));
  stderr = fopen("/dev/null", "w");  // the warnings of what fails below; sanitizers write to the descriptor
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {{"round trip", test_round_trip},
               {"ranks", test_ranks},
               {"keep", test_keep},
               {"Python file", test_modeling},
               {"damage", test_damage},
               {"other model", test_other_model},
               {"faults", test_faults},
               {"kills", test_kills},
               {"places", test_places},
               {"writer", test_writer},
               {"safetensors", test_safetensors},
               {"config.json", test_hf_config},
               {"fla's config.json", test_fla_config},
               {"init from", test_init_from},
               {"log", test_log},
               {"lock", test_lock}};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    int before = failed;
    tests[i].run();
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%-20s %s %.2f s\n", tests[i].name, failed > before ? "FAILED" : "ok",
           (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
    fflush(stdout);
  }
  folder_remove(root, 4);
  printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed != 0;
}
