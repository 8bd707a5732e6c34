// matmul.cuh: the matrix products of the linear layers, by cuBLASLt, with algorithms measured once and kept on disk.
//
//   forward   y [N, out]  = x [N, in] w [out, in]^T  (+ residual [N, out])
//   dgrad     dx [N, in] (+)= dy [N, out] w [out, in]
//   wgrad     dw [out, in] (+)= dy [N, out]^T x [N, in]        dw fp32, the rest bf16; sums in fp32
//
// All row-major with free row strides (ld, in elements, multiples of 8), so that packed buffers need no copies.
// For each problem (shape, strides, types, beta) the candidates that cuBLASLt proposes are timed once on random data.
// Only algorithms whose sums have a fixed order are eligible: no split-K that adds into the result in place, so the
// same inputs give the same bits. The choices are kept in two text files, one line a problem, keyed by GPU, cuBLASLt
// version and problem: in the run's folder those that the run uses, so that it goes on with the same bits wherever it is
// resumed; in the user's cache all that were ever measured, so that a new run starts with them and the same command
// gives the same bits again. The run's file is read first. A damaged file is ignored with a warning and written anew.
// matmul_text and matmul_parse carry the choices of rank 0 to the other ranks.
//
// defines: Matmul, matmul_open, matmul_close, matmul_forward, matmul_dgrad, matmul_wgrad, matmul_guess,
//          matmul_release_scratch, matmul_keep, matmul_text, matmul_parse
#ifndef GDN_CUDA_MATMUL_CUH
#define GDN_CUDA_MATMUL_CUH

#include <cublasLt.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.cuh"

enum { MATMUL_MAX_PROBLEMS = 4096, MATMUL_CANDIDATES = 32, MATMUL_FINALISTS = 4 };

static const size_t MATMUL_WORKSPACE = (size_t)64 << 20;

#define CUBLASLT_CHECK(call) cublaslt_check((call), #call, __FILE__, __LINE__)

static MAYBE_UNUSED void cublaslt_check(cublasStatus_t status, const char *call, const char *file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  int code = status == CUBLAS_STATUS_ALLOC_FAILED                                               ? EXIT_MEMORY
             : status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ARCH_MISMATCH ? EXIT_CONFIG
                                                                                                : EXIT_INTERNAL;
  fail(code, "cuBLASLt: %s at %s:%d in %s", cublasLtGetStatusString(status), file, line, call);
}

// A problem in cuBLASLt's column-major terms: D [m, n] = op(A) op(B) + beta C. All fields count in the key.
typedef struct {
  int64_t m, n, k, lda, ldb, ldc, ldd;
  int32_t transpose_a, transpose_b, float_output, beta, separate_c;
} MatmulProblem;

typedef struct {
  MatmulProblem problem;
  cublasLtMatmulAlgo_t algorithm;
  float microseconds;  // measured when it was chosen
  int own;             // 1: of this run, 0: only of the user's cache
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, c, d;
} MatmulEntry;

typedef struct {
  cublasLtHandle_t handle;
  void *workspace;
  char gpu[256], path[1024], cache[1024];  // of the run and of the user; empty: nothing is kept there
  size_t version;
  int entries, tuned;  // tuned: how many were measured in this process
  int dirty;           // the files lack something
  int used[MATMUL_MAX_PROBLEMS], n_used;  // entries of this process's products, looked through first
  int guess;           // take what cuBLASLt thinks best, without measuring or keeping it
  MatmulEntry entry[MATMUL_MAX_PROBLEMS];
  void *scratch[4];  // A, B, C, D while measuring
  size_t scratch_bytes[4];
} Matmul;

// ---------------------------------------------------------------------------------------------------------------------
// The table as text

static inline uint64_t matmul_hash(const char *s, size_t n) {  // FNV-1a
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)s[i]) * 0x100000001b3u;
  return h;
}

static const char *const MATMUL_TITLE = "train_gdn matmul algorithms 1\n";

// The table as text (caller frees): title, one line an entry ending in a checksum, and a last line with the count.
// own: only the entries of this run.
static MAYBE_UNUSED char *matmul_text(const Matmul *mm, int own) {
  size_t room = 256 + (size_t)mm->entries * 896, at = 0;
  int written = 0;
  char *text = (char *)alloc_array((int64_t)room, 1, "matmul algorithm table");
  at += (size_t)snprintf(text, room, "%s", MATMUL_TITLE);
  for (int i = 0; i < mm->entries; i++) {
    const MatmulEntry *e = &mm->entry[i];
    const MatmulProblem *p = &e->problem;
    if (own && !e->own) continue;
    written++;
    size_t begin = at;
    at += (size_t)snprintf(text + at, room - at, "%s %zu %lld %lld %lld %lld %lld %lld %lld %d %d %d %d %d %.2f",
                           mm->gpu, mm->version, (long long)p->m, (long long)p->n, (long long)p->k, (long long)p->lda,
                           (long long)p->ldb, (long long)p->ldc, (long long)p->ldd, p->transpose_a, p->transpose_b,
                           p->float_output, p->beta, p->separate_c, e->microseconds);
    for (int j = 0; j < 8; j++)
      at += (size_t)snprintf(text + at, room - at, " %016llx", (unsigned long long)e->algorithm.data[j]);
    at +=
        (size_t)snprintf(text + at, room - at, " %016llx\n", (unsigned long long)matmul_hash(text + begin, at - begin));
  }
  snprintf(text + at, room - at, "end %d\n", written);
  return text;
}

// Adds a table's entries for this GPU and cuBLASLt version; others, and those known already, are passed over. Returns 0,
// or the number of the first line that is damaged (then nothing is added).
static MAYBE_UNUSED int matmul_parse(Matmul *mm, const char *text, int own) {
  int line = 1, before = mm->entries, added = before, lines = 0;
  size_t title = strlen(MATMUL_TITLE);
  if (strncmp(text, MATMUL_TITLE, title) != 0) return line;
  const char *at = text + title;
  for (;; lines++) {
    line++;
    const char *newline = strchr(at, '\n');
    if (!newline) return line;
    int count = -1, used = 0;
    if (sscanf(at, "end %d%n", &count, &used) == 1 && at + used == newline) {
      if (count != lines || newline[1] != 0) return line;
      break;
    }
    char gpu[256];
    MatmulEntry e;
    memset(&e, 0, sizeof e);
    MatmulProblem *p = &e.problem;
    unsigned long long word[8], sum;
    size_t version;
    long long m, n, k, lda, ldb, ldc, ldd;
    if (newline - at < 20 || newline - at > 890) return line;
    char copy[896];
    memcpy(copy, at, (size_t)(newline - at));
    copy[newline - at] = 0;
    used = 0;
    int fields = sscanf(copy,
                        "%255s %zu %lld %lld %lld %lld %lld %lld %lld %d %d %d %d %d %f %llx %llx %llx %llx %llx %llx "
                        "%llx %llx %llx%n",
                        gpu, &version, &m, &n, &k, &lda, &ldb, &ldc, &ldd, &p->transpose_a, &p->transpose_b,
                        &p->float_output, &p->beta, &p->separate_c, &e.microseconds, word, word + 1, word + 2, word + 3,
                        word + 4, word + 5, word + 6, word + 7, &sum, &used);
    if (fields != 24 || copy[used] != 0 || matmul_hash(at, (size_t)(newline - at) - 17) != sum) return line;
    e.own = own;
    p->m = m, p->n = n, p->k = k, p->lda = lda, p->ldb = ldb, p->ldc = ldc, p->ldd = ldd;
    for (int j = 0; j < 8; j++) e.algorithm.data[j] = word[j];
    at = newline + 1;
    if (strcmp(gpu, mm->gpu) != 0 || version != mm->version) continue;
    int known = 0;
    for (int i = 0; i < added && !known; i++) known = memcmp(&mm->entry[i].problem, p, sizeof *p) == 0;
    if (!known && added < MATMUL_MAX_PROBLEMS / 2) mm->entry[added++] = e;  // the other half is this run's to measure
  }
  mm->entries = added;
  return 0;
}

static inline int matmul_find(const Matmul *mm, const MatmulProblem *p) {
  for (int i = 0; i < mm->entries; i++)
    if (memcmp(&mm->entry[i].problem, p, sizeof *p) == 0) return i;
  return -1;
}

// Adds the entries of the file at `path`, which need not exist.
static inline void matmul_load(Matmul *mm, const char *path, int own) {
  FILE *f = path[0] ? fopen(path, "rb") : NULL;
  if (!f) return;
  const size_t limit = (size_t)MATMUL_MAX_PROBLEMS * 896;
  char *text = (char *)alloc_array((int64_t)limit + 1, 1, "matmul algorithm table");
  size_t n = fread(text, 1, limit, f);
  text[n] = 0;
  fclose(f);
  int line = strlen(text) == n ? matmul_parse(mm, text, own) : 1;
  if (line)
    warn("%s: line %d is damaged; the file is ignored, the algorithms are measured again and the file rewritten", path,
         line);
  free(text);
}

// 0, or errno: `text` in a file of its own that takes the place of `path` whole.
static inline int matmul_write(const char *path, const char *text) {
  char temporary[1100];
  snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid());
  FILE *f = fopen(temporary, "w");
  int bad = !f;
  if (f) bad = fputs(text, f) < 0;
  if (f && fclose(f) != 0) bad = 1;
  if (!bad) bad = rename(temporary, path) != 0;
  int code = bad ? errno : 0;
  if (bad) remove(temporary);
  return code;
}

// The cache's text: what is in the file, which another run may have written meanwhile, and behind it what only this run
// has measured (caller frees).
static inline char *matmul_cache_text(const Matmul *mm) {
  Matmul *file = (Matmul *)alloc_zeroed(1, sizeof(Matmul), "matmul table");
  memcpy(file->gpu, mm->gpu, sizeof file->gpu), file->version = mm->version;
  matmul_load(file, mm->cache, 0);
  for (int i = 0; i < mm->entries && file->entries < MATMUL_MAX_PROBLEMS / 2; i++)
    if (matmul_find(file, &mm->entry[i].problem) < 0) file->entry[file->entries++] = mm->entry[i];
  char *text = matmul_text(file, 0);
  free(file);
  return text;
}

// Writes to the files what they lack.
static MAYBE_UNUSED void matmul_keep(Matmul *mm) {
  if (!mm->dirty) return;
  mm->dirty = 0;
  for (int own = 1; own >= 0; own--) {
    char *path = own ? mm->path : mm->cache, lock_path[1100];
    if (!path[0]) continue;
    int lock = -1;  // runs that end their first step together write one after the other
    snprintf(lock_path, sizeof lock_path, "%s.lock", path);
    if (!own && (lock = open(lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0666)) >= 0) flock(lock, LOCK_EX);
    char *text = own ? matmul_text(mm, 1) : matmul_cache_text(mm);
    int code = matmul_write(path, text);
    free(text);
    if (lock >= 0) close(lock);
    if (!code) continue;
    warn("%s: cannot keep the matrix product algorithms (%s); they are measured again next time", path, strerror(code));
    path[0] = 0;
  }
}

// The user's file for this GPU and library, in $XDG_CACHE_HOME/train_gdn or ~/.cache/train_gdn, whose folders are made;
// empty when there is no such place.
static inline void matmul_cache_path(Matmul *mm) {
  const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  char dir[700];
  mm->cache[0] = 0;
  if (base && base[0] == '/')
    snprintf(dir, sizeof dir, "%.600s", base);
  else if (home && home[0] == '/')
    snprintf(dir, sizeof dir, "%.600s/.cache", home);
  else
    return;
  mkdir(dir, 0777);
  snprintf(dir + strlen(dir), sizeof dir - strlen(dir), "/train_gdn");
  if (mkdir(dir, 0777) && errno != EEXIST) return;
  snprintf(mm->cache, sizeof mm->cache, "%.690s/cublaslt-%.200s-%zu.txt", dir, mm->gpu, mm->version);
}

// Opens cuBLASLt on the current GPU and reads the run's table at `path` (NULL: none) and, with use_cache, the user's.
static MAYBE_UNUSED Matmul *matmul_open(const char *path, int use_cache) {
  Matmul *mm = (Matmul *)alloc_zeroed(1, sizeof(Matmul), "matmul table");
  cudaDeviceProp properties;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  CUBLASLT_CHECK(cublasLtCreate(&mm->handle));
  mm->workspace = device_alloc((int64_t)MATMUL_WORKSPACE, 1, "matrix product workspace");
  mm->version = cublasLtGetVersion();
  snprintf(mm->gpu, sizeof mm->gpu, "%s", properties.name);
  for (char *c = mm->gpu; *c; c++)
    if (*c <= ' ' || *c == '/') *c = '_';
  if (path) snprintf(mm->path, sizeof mm->path, "%s", path);
  if (use_cache) matmul_cache_path(mm);
  matmul_load(mm, mm->path, 1);
  matmul_load(mm, mm->cache, 0);
  return mm;
}

static MAYBE_UNUSED void matmul_release_scratch(Matmul *mm) {  // the buffers that measuring used
  for (int i = 0; i < 4; i++) {
    if (mm->scratch[i]) device_free(mm->scratch[i]);
    mm->scratch[i] = NULL, mm->scratch_bytes[i] = 0;
  }
}

static inline void matmul_undescribe(MatmulEntry *e) {
  cublasLtMatmulDescDestroy(e->operation);
  cublasLtMatrixLayoutDestroy(e->a);
  cublasLtMatrixLayoutDestroy(e->b);
  cublasLtMatrixLayoutDestroy(e->c);
  cublasLtMatrixLayoutDestroy(e->d);
  e->operation = NULL;
}

static MAYBE_UNUSED void matmul_close(Matmul *mm) {
  matmul_keep(mm);
  matmul_release_scratch(mm);
  for (int i = 0; i < mm->entries; i++) {
    if (mm->entry[i].operation) matmul_undescribe(&mm->entry[i]);
  }
  device_free(mm->workspace);
  cublasLtDestroy(mm->handle);
  free(mm);
}

// ---------------------------------------------------------------------------------------------------------------------
// Choosing an algorithm

static __global__ void matmul_fill_kernel(uint32_t *out, int64_t words, uint32_t seed, int floats) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  uint32_t h = (uint32_t)i * 2654435761u ^ seed;
  h = (h ^ h >> 15) * 2246822519u;
  h = (h ^ h >> 13) * 3266489917u;
  h ^= h >> 16;
  // uniform in (-1, 1): zeros would run faster than real data
  float a = (float)(h & 0xffff) / 32768.0f - 1.0f, b = (float)(h >> 16) / 32768.0f - 1.0f;
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  out[i] = floats ? __float_as_uint(a) : *reinterpret_cast<uint32_t *>(&pair);
}

static inline void *matmul_scratch(Matmul *mm, int which, size_t bytes, int floats, cudaStream_t stream) {
  bytes = (bytes + 255) / 256 * 256;
  if (mm->scratch_bytes[which] < bytes) {
    if (mm->scratch[which]) device_free(mm->scratch[which]);
    mm->scratch[which] = device_alloc((int64_t)bytes, 1, "measuring matrix products");
    mm->scratch_bytes[which] = bytes;
  }
  matmul_fill_kernel<<<grid_size(ceil_div((int64_t)bytes / 4, 256), "matmul"), 256, 0, stream>>>(
      (uint32_t *)mm->scratch[which], (int64_t)bytes / 4, 0x9e3779b9u * (unsigned)(which + 1), floats);
  KERNEL_CHECK("matmul");
  return mm->scratch[which];
}

static inline void matmul_describe(MatmulEntry *e) {
  if (e->operation) return;
  const MatmulProblem *p = &e->problem;
  cublasOperation_t ta = p->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, tb = p->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  cudaDataType_t out = p->float_output ? CUDA_R_32F : CUDA_R_16BF;
  CUBLASLT_CHECK(cublasLtMatmulDescCreate(&e->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(e->operation, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta));
  CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(e->operation, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb));
  CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&e->a, CUDA_R_16BF, (uint64_t)(p->transpose_a ? p->k : p->m),
                                            (uint64_t)(p->transpose_a ? p->m : p->k), p->lda));
  CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&e->b, CUDA_R_16BF, (uint64_t)(p->transpose_b ? p->n : p->k),
                                            (uint64_t)(p->transpose_b ? p->k : p->n), p->ldb));
  CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&e->c, out, (uint64_t)p->m, (uint64_t)p->n, p->ldc));
  CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&e->d, out, (uint64_t)p->m, (uint64_t)p->n, p->ldd));
}

static inline cublasStatus_t matmul_run(Matmul *mm, const MatmulEntry *e, const cublasLtMatmulAlgo_t *algorithm,
                                        void *d, const void *a, const void *b, const void *c, cudaStream_t stream) {
  float alpha = 1, beta = (float)e->problem.beta;
  return cublasLtMatmul(mm->handle, e->operation, &alpha, a, e->a, b, e->b, &beta, c, e->c, d, e->d, algorithm,
                        mm->workspace, MATMUL_WORKSPACE, stream);
}

// Microseconds of the fastest of `repeats` runs, or a negative number when the algorithm does not run.
static inline float matmul_time(Matmul *mm, const MatmulEntry *e, const cublasLtMatmulAlgo_t *algorithm,
                                void *const s[4], int repeats, cudaEvent_t begin, cudaEvent_t end,
                                cudaStream_t stream) {
  float best = -1;
  for (int i = 0; i < repeats; i++) {
    float ms = 0;
    CUDA_CHECK(cudaEventRecord(begin, stream));
    if (matmul_run(mm, e, algorithm, s[3], s[0], s[1], e->problem.separate_c ? s[2] : s[3], stream) !=
        CUBLAS_STATUS_SUCCESS) {
      cudaGetLastError();
      return -1;
    }
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (best < 0 || ms * 1e3f < best) best = ms * 1e3f;
  }
  return best;
}

static inline int matmul_fixed_order(const cublasLtMatmulAlgo_t *algorithm) {
  uint32_t scheme = 0;
  int32_t split = 1;
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                                           &written) != CUBLAS_STATUS_SUCCESS ||
      cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split, sizeof split,
                                           &written) != CUBLAS_STATUS_SUCCESS)
    return 0;
  return !(scheme & CUBLASLT_REDUCTION_SCHEME_INPLACE);
}

static inline size_t matmul_bytes(int64_t rows, int64_t columns, int64_t ld, size_t size) {
  return (size_t)((columns - 1) * ld + rows) * size;
}

// What cuBLASLt proposes for a problem, best guess first: how many, at least one.
static inline int matmul_candidates(Matmul *mm, const MatmulEntry *e, cublasLtMatmulHeuristicResult_t *found) {
  const MatmulProblem *p = &e->problem;
  cublasLtMatmulPreference_t preference;
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, align = 16;
  size_t workspace = MATMUL_WORKSPACE;
  int count = 0;
  CUBLASLT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
#define SET(what, value) CUBLASLT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, what, &value, sizeof value))
  SET(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  SET(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
  SET(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align);  // packed buffers promise no more
  SET(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align);
  SET(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align);
  SET(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align);
#undef SET
  cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(mm->handle, e->operation, e->a, e->b, e->c, e->d, preference,
                                                         MATMUL_CANDIDATES, found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    fail(EXIT_CONFIG,
         "cuBLASLt has no algorithm for a matrix product of %lld x %lld x %lld (%s); change --width or --ff",
         (long long)p->m, (long long)p->n, (long long)p->k, cublasLtGetStatusString(status));
  return count;
}

static inline void matmul_tune(Matmul *mm, MatmulEntry *e, cudaStream_t stream) {
  const MatmulProblem *p = &e->problem;
  cublasLtMatmulHeuristicResult_t found[MATMUL_CANDIDATES];
  size_t size = p->float_output ? 4 : 2;
  int count = matmul_candidates(mm, e, found), finalists = 0;
  void *s[4];
  s[0] = matmul_scratch(mm, 0, matmul_bytes(p->transpose_a ? p->k : p->m, p->transpose_a ? p->m : p->k, p->lda, 2), 0,
                        stream);
  s[1] = matmul_scratch(mm, 1, matmul_bytes(p->transpose_b ? p->n : p->k, p->transpose_b ? p->k : p->n, p->ldb, 2), 0,
                        stream);
  s[2] = p->separate_c ? matmul_scratch(mm, 2, matmul_bytes(p->m, p->n, p->ldc, size), p->float_output, stream) : NULL;
  s[3] = matmul_scratch(mm, 3, matmul_bytes(p->m, p->n, p->ldd, size), p->float_output, stream);
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  // every candidate twice (the first run warms up), then the best few longer
  float time[MATMUL_CANDIDATES], best = -1;
  for (int i = 0; i < count; i++)
    time[i] = found[i].state == CUBLAS_STATUS_SUCCESS && matmul_fixed_order(&found[i].algo)
                  ? matmul_time(mm, e, &found[i].algo, s, 3, begin, end, stream)
                  : -1;
  for (; finalists < MATMUL_FINALISTS; finalists++) {
    int lead = -1;
    for (int i = 0; i < count; i++)
      if (time[i] >= 0 && (lead < 0 || time[i] < time[lead])) lead = i;
    if (lead < 0) break;
    float t = matmul_time(mm, e, &found[lead].algo, s, 8, begin, end, stream);
    time[lead] = -1;
    if (t >= 0 && (best < 0 || t < best)) best = t, e->algorithm = found[lead].algo;
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  if (best < 0)
    fail(EXIT_CONFIG, "cuBLASLt runs no algorithm of fixed order for a matrix product of %lld x %lld x %lld",
         (long long)p->m, (long long)p->n, (long long)p->k);
  e->microseconds = best;
  mm->tuned++;
}

// 1: the algorithm that a file names can run here.
static inline int matmul_accepts(Matmul *mm, MatmulEntry *e) {
  cublasLtMatmulHeuristicResult_t result;
  memset(&result, 0, sizeof result);
  return cublasLtMatmulAlgoCheck(mm->handle, e->operation, e->a, e->b, e->c, e->d, &e->algorithm, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= MATMUL_WORKSPACE && matmul_fixed_order(&e->algorithm);
}

// The problem's entry, measured now if it has to be; NULL when the table is full.
static inline MatmulEntry *matmul_entry(Matmul *mm, const MatmulProblem *p, cudaStream_t stream) {
  for (int i = 0; i < mm->n_used; i++)
    if (memcmp(&mm->entry[mm->used[i]].problem, p, sizeof *p) == 0) return &mm->entry[mm->used[i]];
  int at = matmul_find(mm, p), measure = at < 0;
  if (measure) {
    if (mm->entries == MATMUL_MAX_PROBLEMS) return NULL;
    at = mm->entries++;
    memset(&mm->entry[at], 0, sizeof mm->entry[at]);
    mm->entry[at].problem = *p;
  }
  MatmulEntry *e = &mm->entry[at];
  matmul_describe(e);
  if (!measure && !matmul_accepts(mm, e)) {
    warn("%s: the algorithm kept for %lld x %lld x %lld does not run here; measuring again", e->own ? mm->path : mm->cache,
         (long long)p->m, (long long)p->n, (long long)p->k);
    measure = 1;
  }
  if (measure || !e->own) mm->dirty = 1;
  e->own = 1;
  if (measure) matmul_tune(mm, e, stream);
  mm->used[mm->n_used++] = at;
  return e;
}

// The product by the first proposed algorithm of fixed order.
static inline void matmul_run_guess(Matmul *mm, const MatmulProblem *p, void *d, const void *a, const void *b,
                                    const void *c, cudaStream_t stream) {
  MatmulEntry e;
  cublasLtMatmulHeuristicResult_t found[MATMUL_CANDIDATES];
  memset(&e, 0, sizeof e);
  e.problem = *p;
  matmul_describe(&e);
  int count = matmul_candidates(mm, &e, found), at = 0;
  while (at < count && !(found[at].state == CUBLAS_STATUS_SUCCESS && matmul_fixed_order(&found[at].algo))) at++;
  if (at == count)
    fail(EXIT_CONFIG, "cuBLASLt runs no algorithm of fixed order for a matrix product of %lld x %lld x %lld",
         (long long)p->m, (long long)p->n, (long long)p->k);
  CUBLASLT_CHECK(matmul_run(mm, &e, &found[at].algo, d, a, b, c, stream));
  matmul_undescribe(&e);
}

static inline void matmul_call(Matmul *mm, const MatmulProblem *p, void *d, const void *a, const void *b, const void *c,
                               cudaStream_t stream) {
  if (p->m == 0 || p->n == 0) return;
  if ((p->lda | p->ldb | p->ldc | p->ldd) % 8 != 0 || p->k == 0)
    fail(EXIT_CONFIG, "matmul: %lld x %lld x %lld with row strides %lld, %lld, %lld, %lld; needed: multiples of 8",
         (long long)p->m, (long long)p->n, (long long)p->k, (long long)p->lda, (long long)p->ldb, (long long)p->ldc,
         (long long)p->ldd);
  MatmulEntry *e = mm->guess ? NULL : matmul_entry(mm, p, stream);
  if (e)
    CUBLASLT_CHECK(matmul_run(mm, e, &e->algorithm, d, a, b, c, stream));
  else
    matmul_run_guess(mm, p, d, a, b, c, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// The three products

// From now on algorithms are taken as cuBLASLt proposes them (1), for shapes that will not come again, or measured (0).
static MAYBE_UNUSED void matmul_guess(Matmul *mm, int on) { mm->guess = on != 0; }

// y [N, out] = x [N, in] w [out, in]^T, + residual [N, out] unless NULL. residual may be y.
static MAYBE_UNUSED void matmul_forward(Matmul *mm, bf16 *y, int64_t ldy, const bf16 *x, int64_t ldx, const bf16 *w,
                                        int64_t ldw, const bf16 *residual, int64_t ldr, int64_t N, int64_t in,
                                        int64_t out, cudaStream_t stream) {
  MatmulProblem p;
  memset(&p, 0, sizeof p);
  p.m = out, p.n = N, p.k = in, p.lda = ldw, p.ldb = ldx, p.ldd = ldy;
  p.transpose_a = 1, p.beta = residual != NULL, p.separate_c = residual && residual != y;
  p.ldc = p.separate_c ? ldr : ldy;
  matmul_call(mm, &p, y, w, x, residual ? residual : y, stream);
}

// dx [N, in] = (+=) dy [N, out] w [out, in]. When it adds, cuBLASLt may round the product to bf16 before the sum.
static MAYBE_UNUSED void matmul_dgrad(Matmul *mm, bf16 *dx, int64_t lddx, const bf16 *dy, int64_t lddy, const bf16 *w,
                                      int64_t ldw, int64_t N, int64_t in, int64_t out, int accumulate,
                                      cudaStream_t stream) {
  MatmulProblem p;
  memset(&p, 0, sizeof p);
  p.m = in, p.n = N, p.k = out, p.lda = ldw, p.ldb = lddy, p.ldc = p.ldd = lddx, p.beta = accumulate != 0;
  matmul_call(mm, &p, dx, w, dy, dx, stream);
}

// dw [out, in] fp32 = (+=) dy [N, out]^T x [N, in].
static MAYBE_UNUSED void matmul_wgrad(Matmul *mm, float *dw, int64_t lddw, const bf16 *dy, int64_t lddy, const bf16 *x,
                                      int64_t ldx, int64_t N, int64_t in, int64_t out, int accumulate,
                                      cudaStream_t stream) {
  MatmulProblem p;
  memset(&p, 0, sizeof p);
  p.m = in, p.n = out, p.k = N, p.lda = ldx, p.ldb = lddy, p.ldc = p.ldd = lddw;
  p.transpose_b = 1, p.float_output = 1, p.beta = accumulate != 0;
  matmul_call(mm, &p, dw, x, dy, dw, stream);
}

#endif  // GDN_CUDA_MATMUL_CUH
