// comm.h: several processes (ranks) of one run, on one machine or many. With -DGDN_MPI the ranks talk by MPI; without
// it there is one rank and the collectives have nothing to do. A program that no launcher started never starts MPI.
//
// Every collective is made of messages between pairs, and every sum is added in the order of the ranks by the one who
// owns it, so that a number of ranks always gives the same bits, and so that a rank that waits knows for whom: comm
// keeps the collective's name and the peers whose messages are open, for the watchdog's report.
//
// Shards: the arena is dealt out in blocks of COMM_ALIGN elements (its size is a multiple of them, ParamTable.total),
// in one contiguous range a rank; the first ranks get one block more when the blocks do not come out even. So every
// number of ranks up to the number of blocks works, and no element is padding that only exists for the sharding.
//
// defines: Comm, COMM_ALIGN, comm_start, comm_stop, comm_abort, comm_shard, comm_exchange, comm_sum, comm_agree,
//          comm_broadcast, comm_barrier, comm_reduce_scatter, comm_all_gather, comm_all_reduce, comm_waiting
#ifndef GDN_COMM_H
#define GDN_COMM_H

#include <sched.h>
#include <time.h>
#include <unistd.h>
#include "check.h"

#ifdef GDN_MPI
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

enum { COMM_ALIGN = 8, COMM_SCRATCH = 64 << 20, COMM_PIECE = 1 << 18 };

typedef struct Comm {
  int rank, size;              // of all
  int local_rank, local_size;  // of those on this machine
  int started;                 // 1: MPI was started and must be stopped
  const char *collective;      // what is going on, NULL nothing; read by the watchdog's thread
  int *open;                   // [size] messages to and from each rank that are not done
  char *scratch;               // pieces of other ranks' gradients
  size_t scratch_size;
} Comm;

// ----------------------------------------------------------------------------
// start and end

// Ranks that the launcher says it started, and the number of this one; 0: no launcher. mpirun's variables come first:
// within a Slurm allocation Open MPI starts its helpers by srun. Slurm's are those of a step: a batch script has
// SLURM_NTASKS without being a rank.
static MAYBE_UNUSED int comm_launched(int *rank, const char **by) {
  static const char *const names[][3] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"},
                                         {"PMI_SIZE", "PMI_RANK", "the launcher (PMI_SIZE)"},
                                         {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const char *size = getenv(names[i][0]), *number = getenv(names[i][1]);
    if (!size || atoi(size) < 1) continue;
    *rank = number ? atoi(number) : 0, *by = names[i][2];
    return atoi(size);
  }
  *rank = 0, *by = "";
  return 0;
}

// Finds out which rank this is; call it before anything else is started. EXIT_CONFIG when the launcher started several
// processes of which each would believe to be alone.
static MAYBE_UNUSED int comm_start(Comm *c, Error *err) {
  const char *by;
  int number, asked = comm_launched(&number, &by), found = 1;
  memset(c, 0, sizeof *c);
  c->size = c->local_size = 1;
  if (asked <= 1) return 0;
#ifdef GDN_MPI
  int level;
  MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
  MPI_Comm_size(MPI_COMM_WORLD, &found);
  c->started = 1;
#endif
  if (found != asked) {
    // the launcher ends the others when one fails: one message is enough
    if (number) sleep(1);
    return error_set(err, EXIT_CONFIG, "%s started %d processes, %s: %s", by, asked,
#ifdef GDN_MPI
                     found == 1 ? "each of them finds 1 alone" : "MPI knows another number",
                     "use the launcher of the MPI that this program was built with (srun: --mpi=pmix)"
#else
                     "each of them is 1 alone: this program was built without MPI",
                     "install an MPI (mpicc) and run make again"
#endif
    );
  }
#ifdef GDN_MPI
  MPI_Comm node;
  c->size = found;
  MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &c->local_rank);
  MPI_Comm_size(node, &c->local_size);
  MPI_Comm_free(&node);
  c->open = (int *)alloc_zeroed(c->size, sizeof(int), "list of ranks");
#endif
  return 0;
}

// All ranks call it, then each exits with its own code.
static MAYBE_UNUSED void comm_stop(Comm *c) {
#ifdef GDN_MPI
  if (c->started) MPI_Finalize();
#endif
  free(c->open);
  free(c->scratch);
  memset(c, 0, sizeof *c);
  c->size = c->local_size = 1;
}

// Ends all ranks at once; for a rank that cannot reach the others' next collective.
static MAYBE_UNUSED void comm_abort(Comm *c, int code) {
  fflush(NULL);
#ifdef GDN_MPI
  if (c->started) MPI_Abort(MPI_COMM_WORLD, code);
#endif
  (void)c;
  _exit(code);
}

// The ranks that this one waits for: "rank 2", "ranks 1, 3"; empty when there are none. For other threads.
static MAYBE_UNUSED void comm_waiting(const Comm *c, char *text, size_t size) {
  size_t at = 0;
  int n = 0;
  text[0] = 0;
  for (int r = 0; c->open && r < c->size; r++)
    if (__atomic_load_n(&c->open[r], __ATOMIC_RELAXED)) n++;
  for (int r = 0, shown = 0; n && r < c->size && at + 40 < size; r++)
    if (__atomic_load_n(&c->open[r], __ATOMIC_RELAXED)) {
      if (shown == 16) {
        snprintf(text + at, size - at, " and %d more", n - shown);
        break;
      }
      at += (size_t)snprintf(text + at, size - at, "%s%d", shown++ ? ", " : n > 1 ? "ranks " : "rank ", r);
    }
}

// ----------------------------------------------------------------------------
// messages

#ifdef GDN_MPI
typedef struct {  // messages under way
  MPI_Request *requests;
  int *peers;
  int n, max;
} CommMessages;

static MAYBE_UNUSED CommMessages comm_messages(const Comm *c) {
  int max = 2 * c->size;
  CommMessages m = {(MPI_Request *)alloc_array(max, sizeof(MPI_Request), "messages"),
                    (int *)alloc_array(max, sizeof(int), "messages"), 0, max};
  return m;
}

static MAYBE_UNUSED void comm_post(Comm *c, CommMessages *m, int receive, void *data, size_t bytes, int peer) {
  if (!bytes) return;
  if (m->n == m->max || bytes > INT32_MAX) fail(EXIT_INTERNAL, "comm: %d messages, one of %zu bytes", m->n, bytes);
  m->peers[m->n] = peer;
  __atomic_add_fetch(&c->open[peer], 1, __ATOMIC_RELAXED);
  if (receive)
    MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &m->requests[m->n++]);
  else
    MPI_Isend(data, (int)bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &m->requests[m->n++]);
}

// Waits for all of them. MPI's own waiting takes a core; this gives it away after a moment, since ranks may share
// cores.
static MAYBE_UNUSED void comm_wait(Comm *c, CommMessages *m) {
  int *done = (int *)alloc_array(m->max, sizeof(int), "messages");
  for (int left = m->n, idle = 0; left > 0;) {
    int n = 0;
    MPI_Testsome(m->n, m->requests, &n, done, MPI_STATUSES_IGNORE);
    if (n == MPI_UNDEFINED) break;
    for (int i = 0; i < n; i++) __atomic_sub_fetch(&c->open[m->peers[done[i]]], 1, __ATOMIC_RELAXED);
    left -= n;
    idle = n ? 0 : idle + 1;
    if (idle > 4000) {
      struct timespec pause = {0, 50000};
      nanosleep(&pause, NULL);
    } else if (idle > 100) {
      sched_yield();
    }
  }
  free(done);
  m->n = 0;
}

static MAYBE_UNUSED void comm_messages_free(CommMessages *m) {
  free(m->requests);
  free(m->peers);
}
#endif

static MAYBE_UNUSED void comm_begin(Comm *c, const char *what) {
  __atomic_store_n(&c->collective, what, __ATOMIC_RELAXED);
}
static MAYBE_UNUSED void comm_end(Comm *c) { __atomic_store_n(&c->collective, (const char *)NULL, __ATOMIC_RELAXED); }

// ----------------------------------------------------------------------------
// small things

// all [size][bytes]: what every rank passed in `mine`. For some hundred bytes: everyone sends to everyone.
static MAYBE_UNUSED void comm_exchange(Comm *c, const char *what, const void *mine, size_t bytes, void *all) {
  memcpy((char *)all + (size_t)c->rank * bytes, mine, bytes);
  if (c->size == 1) return;
  comm_begin(c, what);
#ifdef GDN_MPI
  CommMessages m = comm_messages(c);
  for (int r = 0; r < c->size; r++)
    if (r != c->rank) comm_post(c, &m, 1, (char *)all + (size_t)r * bytes, bytes, r);
  for (int i = 1; i < c->size; i++) {
    int r = (c->rank + i) % c->size;
    comm_post(c, &m, 0, (char *)all + (size_t)c->rank * bytes, bytes, r);
  }
  comm_wait(c, &m);
  comm_messages_free(&m);
#endif
  comm_end(c);
}

// x [n]: sums over the ranks, the same bits on each.
static MAYBE_UNUSED void comm_sum(Comm *c, const char *what, double *x, int n) {
  double *all = (double *)alloc_array((int64_t)n * c->size, sizeof(double), "sums over ranks");
  comm_exchange(c, what, x, (size_t)n * sizeof(double), all);
  for (int i = 0; i < n; i++) {
    x[i] = all[i];
    for (int r = 1; r < c->size; r++) x[i] += all[(int64_t)r * n + i];
  }
  free(all);
}

static MAYBE_UNUSED void comm_barrier(Comm *c, const char *what) {
  char mine = 0;
  char *all = (char *)alloc_array(c->size, 1, "list of ranks");
  comm_exchange(c, what, &mine, 1, all);
  free(all);
}

// Everyone gets the root's data (up to 2 GiB).
static MAYBE_UNUSED void comm_broadcast(Comm *c, const char *what, void *data, size_t bytes, int root) {
  if (c->size == 1) return;
  comm_begin(c, what);
#ifdef GDN_MPI
  CommMessages m = comm_messages(c);
  if (c->rank != root) comm_post(c, &m, 1, data, bytes, root);
  for (int r = 0; r < c->size && c->rank == root; r++)
    if (r != root) comm_post(c, &m, 0, data, bytes, r);
  comm_wait(c, &m);
  comm_messages_free(&m);
#endif
  (void)data, (void)bytes, (void)root;
  comm_end(c);
}

// Each rank brings an exit code, 0 when all is well, and its line in err. All return the same: 0, or the code of the
// first rank with an error, with its line; a request to stop (EXIT_STOPPED) counts only when nobody has an error.
static MAYBE_UNUSED int comm_agree(Comm *c, const char *what, int code, Error *err) {
  if (c->size == 1) return code;
  int *codes = (int *)alloc_array(c->size, sizeof(int), "list of ranks");
  int who = -1;
  comm_exchange(c, what, &code, sizeof code, codes);
  for (int r = 0; r < c->size; r++)
    if (codes[r] && (who < 0 || (codes[who] == EXIT_STOPPED && codes[r] != EXIT_STOPPED))) who = r;
  int agreed = who < 0 ? 0 : codes[who];
  free(codes);
  if (!agreed) return 0;
  Error first = *err;
  comm_broadcast(c, what, &first, sizeof first, who);
  if (!who) return error_set(err, agreed, "%s", first.text);
  if (agreed == EXIT_STOPPED) return error_set(err, agreed, "%.900s to rank %d", first.text, who);
  return error_set(err, agreed, "%.900s (rank %d)", first.text, who);
}

// ----------------------------------------------------------------------------
// the arena

// The elements first .. first+count-1 of an arena of `total` that a rank owns.
static MAYBE_UNUSED void comm_shard(int64_t total, int size, int rank, int64_t *first, int64_t *count) {
  int64_t blocks = (total + COMM_ALIGN - 1) / COMM_ALIGN, each = blocks / size, more = blocks % size;
  int64_t begin = rank * each + (rank < more ? rank : more), end = begin + each + (rank < more);
  *first = begin * COMM_ALIGN;
  *count = (end * COMM_ALIGN < total ? end * COMM_ALIGN : total) - *first;
}

// dst [n] = sum over ranks, in their order; rank r's numbers are at part[r].
static MAYBE_UNUSED void comm_add(void *dst, const char *const *part, int size, int64_t n, int real_bytes) {
  enum { BLOCK = 512 };
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t m = n - at < BLOCK ? n - at : (int64_t)BLOCK;
    if (real_bytes == 8) {
      double sum[BLOCK];
      memcpy(sum, part[0] + 8 * at, 8 * (size_t)m);
      for (int r = 1; r < size; r++)
        for (int64_t i = 0; i < m; i++) sum[i] += ((const double *)(const void *)part[r])[at + i];
      memcpy((double *)dst + at, sum, 8 * (size_t)m);
    } else {
      float sum[BLOCK];
      memcpy(sum, part[0] + 4 * at, 4 * (size_t)m);
      for (int r = 1; r < size; r++)
        for (int64_t i = 0; i < m; i++) sum[i] += ((const float *)(const void *)part[r])[at + i];
      memcpy((float *)dst + at, sum, 4 * (size_t)m);
    }
  }
}

// Elements of a shard that start at `at`, at most one piece.
static MAYBE_UNUSED int64_t comm_piece(int64_t count, int64_t at, int64_t piece) {
  return at >= count ? 0 : count - at < piece ? count - at : piece;
}

// arena [total] of float (real_bytes 4) or double (8) in host memory: the own shard becomes the sum over all ranks, the
// rest stays the own contribution. Sums in the arena's type.
static MAYBE_UNUSED void comm_reduce_scatter(Comm *c, const char *what, void *arena, int real_bytes, int64_t total) {
  if (c->size == 1) return;
  comm_begin(c, what);
#ifdef GDN_MPI
  int64_t first, count, most, piece = COMM_SCRATCH / real_bytes / c->size, bytes = real_bytes;
  piece = piece > COMM_PIECE ? (int64_t)COMM_PIECE : piece / COMM_ALIGN * COMM_ALIGN;
  if (piece < COMM_ALIGN) piece = COMM_ALIGN;
  comm_shard(total, c->size, 0, &first, &most);  // no shard is larger than the first
  comm_shard(total, c->size, c->rank, &first, &count);
  size_t need = (size_t)(piece * c->size * bytes);
  if (c->scratch_size < need) {
    free(c->scratch);
    c->scratch = (char *)alloc_array((int64_t)need, 1, "gradients of other ranks"), c->scratch_size = need;
  }
  CommMessages m = comm_messages(c);
  const char **part = (const char **)alloc_array(c->size, sizeof(char *), "list of ranks");
  for (int64_t at = 0; at < most; at += piece) {
    int64_t n = comm_piece(count, at, piece);
    for (int r = 0; r < c->size; r++) {
      part[r] = r == c->rank ? (char *)arena + (first + at) * bytes : c->scratch + r * piece * bytes;
      if (r != c->rank) comm_post(c, &m, 1, c->scratch + r * piece * bytes, (size_t)(n * bytes), r);
    }
    for (int i = 1; i < c->size; i++) {
      int r = (c->rank + i) % c->size;
      int64_t theirs, size;
      comm_shard(total, c->size, r, &theirs, &size);
      comm_post(c, &m, 0, (char *)arena + (theirs + at) * bytes, (size_t)(comm_piece(size, at, piece) * bytes), r);
    }
    comm_wait(c, &m);
    if (n) comm_add((char *)arena + (first + at) * bytes, part, c->size, n, real_bytes);
  }
  free(part);
  comm_messages_free(&m);
#endif
  (void)arena, (void)real_bytes, (void)total;
  comm_end(c);
}

// arena [total]: every shard becomes its owner's.
static MAYBE_UNUSED void comm_all_gather(Comm *c, const char *what, void *arena, int real_bytes, int64_t total) {
  if (c->size == 1) return;
  comm_begin(c, what);
#ifdef GDN_MPI
  int64_t first, count, most, piece = COMM_PIECE, bytes = real_bytes;
  comm_shard(total, c->size, 0, &first, &most);
  comm_shard(total, c->size, c->rank, &first, &count);
  CommMessages m = comm_messages(c);
  for (int64_t at = 0; at < most; at += piece) {
    for (int r = 0; r < c->size; r++) {
      int64_t theirs, size;
      comm_shard(total, c->size, r, &theirs, &size);
      if (r != c->rank)
        comm_post(c, &m, 1, (char *)arena + (theirs + at) * bytes, (size_t)(comm_piece(size, at, piece) * bytes), r);
    }
    for (int i = 1; i < c->size; i++)
      comm_post(c, &m, 0, (char *)arena + (first + at) * bytes, (size_t)(comm_piece(count, at, piece) * bytes),
                (c->rank + i) % c->size);
    comm_wait(c, &m);
  }
  comm_messages_free(&m);
#endif
  (void)arena, (void)real_bytes, (void)total;
  comm_end(c);
}

// arena [total]: the sum over all ranks, on each of them.
static MAYBE_UNUSED void comm_all_reduce(Comm *c, const char *what, void *arena, int real_bytes, int64_t total) {
  comm_reduce_scatter(c, what, arena, real_bytes, total);
  comm_all_gather(c, what, arena, real_bytes, total);
}

#endif  // GDN_COMM_H
