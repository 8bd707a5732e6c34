// lab.cuh: what every kernel lab shares: guarded buffers, random inputs, comparison with a double reference, timing.
//
// A lab checks the kernels of one operation against loops in double on the CPU, whose inputs are rounded to bf16 as the
// kernels' are, then times them at the sizes of training. Output buffers are poisoned (every byte 0xff, a NaN in bf16
// and fp32) and stand between guard bytes. A bf16 result may differ from the reference by at most twice what rounding
// the reference itself to bf16 costs; an fp32 result by the limit its test states.
//
// defines: Buffer, random_values, random_bf16, check_bf16, check_fp32, check_true, bench, bench_bf16, bench_fp32,
// lab_begin,
//          lab_timing, lab_end
#ifndef GDN_DEV_CUDA_LAB_CUH
#define GDN_DEV_CUDA_LAB_CUH

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../../gdn/cuda/common.cuh"

static const double LAB_BANDWIDTH = 4.27e12;   // bytes/s of a copy on one H200, measured
static const double LAB_TENSOR_RATE = 675e12;  // bf16 FLOP/s of the model's matrix products on one H200, measured

typedef std::vector<double> Values;

static int lab_passed, lab_failed, lab_quiet;
static uint64_t lab_state = 0x9e3779b97f4a7c15ull;

static inline double random_unit() {  // (0, 1)
  lab_state ^= lab_state << 13, lab_state ^= lab_state >> 7, lab_state ^= lab_state << 17;
  return ((double)(lab_state >> 11) + 0.5) * 0x1p-53;
}

static inline double round_bf16(double x) { return (double)__bfloat162float(__float2bfloat16_rn((float)x)); }

// Roughly normal values (sum of four uniforms) of deviation `scale` around `mean`, as fp32.
static MAYBE_UNUSED Values random_values(int64_t n, double scale, double mean = 0) {
  Values v((size_t)n);
  for (double &x : v) {
    double u = random_unit() + random_unit() + random_unit() + random_unit() - 2;
    x = (double)(float)(mean + scale * 1.7320508 * u);
  }
  return v;
}

static MAYBE_UNUSED Values random_bf16(int64_t n, double scale, double mean = 0) {
  Values v = random_values(n, scale, mean);
  for (double &x : v) x = round_bf16(x);
  return v;
}

// GPU memory between guards; everything starts as 0xff.
template <typename T>
struct Buffer {
  static const size_t GUARD = 1024;
  uint8_t *base;
  T *data;
  int64_t n;
  explicit Buffer(int64_t count) : n(count) {
    base = (uint8_t *)device_alloc(count * (int64_t)sizeof(T) + 2 * (int64_t)GUARD, 1, "lab buffer");
    data = (T *)(base + GUARD);
    poison();
  }
  Buffer(const Values &v) : Buffer((int64_t)v.size()) { set(v); }
  Buffer(const Buffer &) = delete;
  ~Buffer() { cudaFree(base); }
  void poison() { CUDA_CHECK(cudaMemset(base, 0xff, (size_t)n * sizeof(T) + 2 * GUARD)); }
  void set(const Values &v) {
    std::vector<T> host(v.size());
    for (size_t i = 0; i < v.size(); i++) host[i] = (T)(float)v[i];
    CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> raw() const {
    std::vector<T> host((size_t)n);
    CUDA_CHECK(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  Values get() const {
    std::vector<T> host = raw();
    Values v(host.size());
    for (size_t i = 0; i < host.size(); i++) v[i] = (double)(float)host[i];
    return v;
  }
  // `columns` of every row of `stride`, from column `first`.
  Values get(int64_t rows, int64_t columns, int64_t stride, int64_t first = 0) const {
    Values all = get(), v;
    v.reserve((size_t)(rows * columns));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++) v.push_back(all[(size_t)(r * stride + first + c)]);
    return v;
  }
  bool same_bits(const std::vector<T> &other) const {
    std::vector<T> now = raw();
    return now.size() == other.size() && memcmp(now.data(), other.data(), now.size() * sizeof(T)) == 0;
  }
  // Guards whole, and every element of a row outside [first, first + columns) untouched.
  bool untouched(int64_t rows = 0, int64_t columns = 0, int64_t stride = 0, int64_t first = 0) const {
    std::vector<uint8_t> host((size_t)n * sizeof(T) + 2 * GUARD);
    CUDA_CHECK(cudaMemcpy(host.data(), base, host.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < GUARD; i++)
      if (host[i] != 0xff || host[host.size() - 1 - i] != 0xff) return false;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < stride; c++)
        if (c < first || c >= first + columns)
          for (size_t b = 0; b < sizeof(T); b++)
            if (host[GUARD + (size_t)(r * stride + c) * sizeof(T) + b] != 0xff) return false;
    return true;
  }
};

static MAYBE_UNUSED Values strided(const Values &v, int64_t rows, int64_t columns, int64_t stride, int64_t first,
                                   double fill) {
  Values out((size_t)(rows * stride), fill);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[(size_t)(r * stride + first + c)] = v[(size_t)(r * columns + c)];
  return out;
}

static bool report(bool ok, const std::string &name, const char *detail) {
  if (lab_quiet) return ok;
  if (ok)
    lab_passed++;
  else
    lab_failed++, printf("FAILED %s: %s\n", name.c_str(), detail);
  return ok;
}

static MAYBE_UNUSED bool check_true(const std::string &name, bool ok, const char *detail) {
  return report(ok, name, detail);
}

// Relative error by norm below `limit`, and no single element off by more than `element` of itself plus `floor` of the
// root mean square. NaN fails both.
static MAYBE_UNUSED bool check_error(const std::string &name, const Values &got, const Values &want, double limit,
                                     double element, double floor) {
  char detail[256];
  double error = 0, norm = 0;
  if (got.size() != want.size()) return report(false, name, "sizes differ");
  for (size_t i = 0; i < want.size(); i++) {
    double e = got[i] - want[i];
    error += e * e, norm += want[i] * want[i];
  }
  double rms = want.empty() ? 0 : std::sqrt(norm / (double)want.size()),
         relative = norm > 0 ? std::sqrt(error / norm) : error;
  if (!(relative <= limit)) {
    snprintf(detail, sizeof detail, "relative error %.3e, limit %.3e", relative, limit);
    return report(false, name, detail);
  }
  for (size_t i = 0; i < want.size(); i++)
    if (!(std::fabs(got[i] - want[i]) <= element * std::fabs(want[i]) + floor * rms)) {
      snprintf(detail, sizeof detail, "element %zu is %.7g, should be %.7g (rms %.3g)", i, got[i], want[i], rms);
      return report(false, name, detail);
    }
  return report(true, name, "");
}

// A bf16 result of fp32 arithmetic: at most twice the error of rounding the reference.
static MAYBE_UNUSED bool check_bf16(const std::string &name, const Values &got, const Values &want) {
  double error = 0, norm = 0;
  for (double x : want) error += (round_bf16(x) - x) * (round_bf16(x) - x), norm += x * x;
  return check_error(name, got, want, 2 * (norm > 0 ? std::sqrt(error / norm) : 0) + 2e-6, 0x1p-8, 2e-4);
}

static MAYBE_UNUSED bool check_fp32(const std::string &name, const Values &got, const Values &want, double limit) {
  return check_error(name, got, want, limit, 10 * limit, 10 * limit);
}

// The comparison itself must see mistakes.
static MAYBE_UNUSED void lab_begin(const char *title) {
  cudaDeviceProp p;
  CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
  printf("%s on %s\n", title, p.name);
  Values want = random_values(1000, 1), got = want;
  for (double &x : got) x = round_bf16(x);
  lab_quiet = 1;
  bool right = check_bf16("", got, want);
  Values wrong = got;
  wrong[500] += 0.05;
  bool one = check_bf16("", wrong, want);
  wrong = got, wrong[3] = NAN;
  bool nan = check_bf16("", wrong, want);
  for (size_t i = 0; i < got.size(); i++) wrong[i] = got[i] * 1.01;
  bool scaled = check_bf16("", wrong, want);
  lab_quiet = 0;
  check_true("the comparison sees planted mistakes", right && !one && !nan && !scaled, "it does not");
}

// Is the lab asked to time its kernels? LAB [check | small | bench]; without a word: both. small, for
// compute-sanitizer, is check with fewer rows where the lab has many.
static MAYBE_UNUSED bool lab_timing(int argc, char **argv) {
  std::string mode = argc > 1 ? argv[1] : "bench";
  if (argc > 2 || (mode != "check" && mode != "small" && mode != "bench"))
    fail(EXIT_USAGE, "unknown arguments; use: lab [check | small | bench]");
  return mode == "bench";
}

static MAYBE_UNUSED int lab_end() {
  CUDA_CHECK(cudaDeviceSynchronize());
  printf("%d passed, %d failed, 0 skipped\n", lab_passed, lab_failed);
  return lab_failed ? 1 : 0;
}

// Median time of `run`, with the L2 cache emptied before each. Prints time, rate and percent of the floor.
static MAYBE_UNUSED double bench(const char *name, double bytes, double flops, const std::function<void()> &run,
                                 int repeats = 11) {
  static uint8_t *flush = NULL;
  const size_t flush_bytes = (size_t)192 << 20;
  if (!flush) flush = (uint8_t *)device_alloc((int64_t)flush_bytes, 1, "flush");
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; i++) {
    float ms;
    CUDA_CHECK(cudaMemsetAsync(flush, i, flush_bytes, 0));
    CUDA_CHECK(cudaEventRecord(begin, 0));
    run();
    CUDA_CHECK(cudaEventRecord(end, 0));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  double seconds = (double)times[times.size() / 2] * 1e-3;
  double floor = std::max(bytes / LAB_BANDWIDTH, flops / LAB_TENSOR_RATE);
  printf("  %-46s %9.1f us  %7.1f MB  ", name, seconds * 1e6, bytes / 1e6);
  if (flops > 0)
    printf("%6.1f TFLOP/s  %5.1f%% of the floor\n", flops / seconds / 1e12, 100 * floor / seconds);
  else
    printf("%6.3f TB/s  %5.1f%% of the floor\n", bytes / seconds / 1e12, 100 * floor / seconds);
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  return seconds;
}

// Fills GPU memory with random bf16 (uniform in (-scale, scale)) or fp32 for timing.
static __global__ void lab_fill_kernel(void *out, int64_t n, float scale, float mean, int floats) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 32);
  h = (h ^ h >> 15) * 2246822519u;
  h = (h ^ h >> 13) * 3266489917u;
  h ^= h >> 16;
  float f = mean + scale * ((float)h / 2147483648.0f - 1.0f);
  if (floats)
    ((float *)out)[i] = f;
  else
    ((bf16 *)out)[i] = __float2bfloat16_rn(f);
}

static MAYBE_UNUSED bf16 *bench_bf16(int64_t n, float scale = 1, float mean = 0) {
  bf16 *p = (bf16 *)device_alloc(n, sizeof(bf16), "bench");
  lab_fill_kernel<<<(unsigned)ceil_div(n, 256), 256>>>(p, n, scale, mean, 0);
  return p;
}

static MAYBE_UNUSED float *bench_fp32(int64_t n, float scale = 1, float mean = 0) {
  float *p = (float *)device_alloc(n, sizeof(float), "bench");
  lab_fill_kernel<<<(unsigned)ceil_div(n, 256), 256>>>(p, n, scale, mean, 1);
  return p;
}

#endif  // GDN_DEV_CUDA_LAB_CUH
