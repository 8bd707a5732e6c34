// run_folder.h: where a run lives, and where it goes on from. Without --out a run gets a fresh folder out/run-0001,
// out/run-0002, ...; a named folder that already holds a run is only touched with --resume.
//
// defines: RunPlan, run_newest, run_plan_still_holds, run_plan, run_folder_make
#ifndef GDN_RUN_FOLDER_H
#define GDN_RUN_FOLDER_H

#include "model.h"
#include "options.h"

typedef struct {
  char out[CHECKPOINT_PATH_MAX];     // the run's folder; "": a fresh numbered one, made by run_folder_make
  char from[CHECKPOINT_PATH_MAX];    // the checkpoint to go on from, "" none
  char newest[CHECKPOINT_PATH_MAX];  // checkpoint of the folder when the plan was made, whole or not; "" none
  int resumes;                       // --resume was given: the folder may hold a run
} RunPlan;

static inline int run_newest(const char *out, char newest[CHECKPOINT_PATH_MAX], Error *err) {
  CheckpointList list;
  newest[0] = 0;
  int code = checkpoint_list(out, &list, checkpoint_silent, NULL, err);
  if (code) return code;
  if (list.n) snprintf(newest, CHECKPOINT_PATH_MAX, "%s", list.items[0].path);
  checkpoint_list_free(&list);
  return 0;
}

// The plan is made before the run's lock is held. A job that still ran then may have saved and left meanwhile: going on
// from the older checkpoint would lose its steps.
static inline int run_plan_still_holds(const RunPlan *p, Error *err) {
  char newest[CHECKPOINT_PATH_MAX];
  if (!p->resumes) return 0;
  int code = run_newest(p->out, newest, err);
  if (!code && strcmp(newest, p->newest))
    code = error_set(err, EXIT_CHECKPOINT,
                     "%s was saved by another job while this one started: run the same command again",
                     newest[0] ? newest : p->out);
  return code;
}

// mkdir -p. 0, or EXIT_CHECKPOINT.
static inline int folder_make(const char *path, Error *err) {
  char part[CHECKPOINT_PATH_MAX];
  size_t n = strlen(path);
  if (n >= sizeof part) return error_set(err, EXIT_CHECKPOINT, "--out %.100s...: name too long", path);
  for (size_t i = 1; i <= n; i++) {
    if (path[i] != '/' && path[i]) continue;
    memcpy(part, path, i);
    part[i] = 0;
    struct stat st;
    if (!stat(part, &st) && S_ISDIR(st.st_mode)) continue;
    if (mkdir(part, 0777) && errno != EEXIST)
      return error_set(err, EXIT_CHECKPOINT, "--out %s: cannot make the folder %s: %s", path, part, strerror(errno));
    if (stat(part, &st) || !S_ISDIR(st.st_mode))
      return error_set(err, EXIT_CHECKPOINT, "--out %s: %s is a file, needed a folder", path, part);
  }
  return 0;
}

// 1 when a run has left something in the folder.
static inline int folder_holds_run(const char *dir) {
  if (folder_has(dir, "log.jsonl")) return 1;
  DIR *d = opendir(dir);
  if (!d) return 0;
  int found = 0;
  for (struct dirent *e; !found && (e = readdir(d)) != NULL;) found = !strncmp(e->d_name, "step-", 5);
  closedir(d);
  return found;
}

// Decides from --out, --resume and what is on the disk; changes nothing. 0, EXIT_USAGE or EXIT_CHECKPOINT.
static inline int run_plan(RunPlan *p, const Options *o, Error *err) {
  memset(p, 0, sizeof *p);
  snprintf(p->out, sizeof p->out, "%s", o->out);
  size_t n = strlen(p->out);
  while (n > 1 && p->out[n - 1] == '/') p->out[--n] = 0;
  p->resumes = strcmp(o->resume, "none") != 0;
  if (!p->resumes) {
    if (p->out[0] && folder_holds_run(p->out))
      return error_set(err, EXIT_CHECKPOINT,
                       "--out %s already holds a run: add --resume to go on with it, or name another --out", p->out);
    return 0;
  }
  if (!strcmp(o->resume, "auto")) {
    if (!p->out[0])
      return error_set(err, EXIT_USAGE, "--resume auto needs to know the run: name its folder with --out DIR");
    int code = run_newest(p->out, p->newest, err);
    return code ? code : checkpoint_find(p->out, p->from, NULL, NULL, err);
  }
  FolderKind kind = FOLDER_RUN;
  int code = folder_find(o->resume, p->from, &kind, err);
  if (code) return code;
  if (kind == FOLDER_HF)
    return error_set(err, EXIT_CHECKPOINT,
                     "--resume %s: a model without a training state (no manifest.json): use --init-from", o->resume);
  if ((code = checkpoint_verify(p->from, err))) return code;
  if (!p->out[0]) {  // the run that the checkpoint lies in
    snprintf(p->out, sizeof p->out, "%s", p->from);
    char *slash = strrchr(p->out, '/');
    if (slash)
      slash == p->out ? (void)(slash[1] = 0) : (void)(*slash = 0);
    else
      strcpy(p->out, ".");
  }
  return run_newest(p->out, p->newest, err);
}

// Refuses a resume that would leave newer checkpoints of the folder behind it, which a later --resume auto would take.
static inline int run_check_newest(const RunPlan *p, int64_t step, Error *err) {
  CheckpointList list;
  int code = checkpoint_list(p->out, &list, NULL, NULL, err);
  if (code) return code;
  if (list.n && list.items[0].step > step && strcmp(list.items[0].path, p->from))
    code = error_set(err, EXIT_CHECKPOINT,
                     "--resume %s: %s holds a newer checkpoint, %s: move it away, or name another --out", p->from,
                     p->out, list.items[0].path);
  checkpoint_list_free(&list);
  return code;
}

// Makes the folder, numbered when no name was given. 0, or EXIT_CHECKPOINT.
static inline int run_folder_make(RunPlan *p, Error *err) {
  if (p->out[0]) return folder_make(p->out, err);
  int code = folder_make("out", err);
  if (code) return code;
  long last = 0;
  DIR *d = opendir("out");
  if (!d) return error_set(err, EXIT_CHECKPOINT, "out: cannot read the folder: %s", strerror(errno));
  for (struct dirent *e; (e = readdir(d)) != NULL;) {
    char *end;
    if (strncmp(e->d_name, "run-", 4) || e->d_name[4] < '0' || e->d_name[4] > '9') continue;
    long number = strtol(e->d_name + 4, &end, 10);
    if (!*end && number > last && number < 1000000000) last = number;
  }
  closedir(d);
  do {  // another job may take the same number at the same time
    snprintf(p->out, sizeof p->out, "out/run-%04ld", ++last);
    if (!mkdir(p->out, 0777)) return 0;
  } while (errno == EEXIST);
  return error_set(err, EXIT_CHECKPOINT, "%s: cannot make the folder: %s", p->out, strerror(errno));
}

#endif  // GDN_RUN_FOLDER_H
