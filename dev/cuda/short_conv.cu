// short_conv.cu: lab of gdn/cuda/short_conv.cuh
#include "../../gdn/cuda/short_conv.cuh"
#include "lab.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Where one starts: the formula, a thread an element, a kernel a step (four taps, doc_start and bias may be NULL).
//
// What makes these slow: c = conv(x) and dc go through memory as fp32, 4 bytes a value written and read again where x
// and y take 2; x is read four times, and dc too; with the norm each of a head's K threads adds up the whole head for
// itself, K times what is needed; a thread a tap of a channel walks all tokens, C x 4 threads with one addition after
// the other. The fast kernels do all of it in one pass: a warp holds whole heads, 16 bytes a lane, walks a strip of
// tokens with the last three in registers, adds a head up with shuffles, and keeps its share of dweight on the way.

static __device__ float naive_sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Does tap j of token n (of rows of T) lie in its row, and in its document?
static __device__ bool naive_seen(const int32_t *doc_start, int64_t n, int64_t T, int j) {
  return n % T - 3 + j >= (doc_start ? doc_start[n] : 0);
}

static __global__ void naive_conv_kernel(float *conv, const bf16 *x, int64_t x_stride, const float *weight,
                                         const float *bias, const int32_t *doc_start, int64_t N, int64_t T, int C) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C, c = i % C;
  if (n >= N) return;
  float sum = bias ? bias[c] : 0;
  for (int j = 0; j < 4; j++)
    if (naive_seen(doc_start, n, T, j)) sum += weight[c * 4 + j] * (float)x[(n - 3 + j) * x_stride + c];
  conv[i] = sum;
}

static __global__ void naive_norm_kernel(bf16 *y, int64_t y_stride, const float *conv, int64_t N, int C,
                                         int norm_channels, int K, bool l1) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C, c = i % C;
  if (n >= N) return;
  float a = conv[i] * naive_sigmoid(conv[i]), sum = 1e-6f;
  for (int k = 0; k < K && c < norm_channels; k++) {
    float z = conv[i - c % K + k], b = z * naive_sigmoid(z);
    sum += l1 ? fabsf(b) : b * b;
  }
  if (c < norm_channels) a *= l1 ? 1 / sum : rsqrtf(sum);
  y[n * y_stride + c] = __float2bfloat16_rn(a);
}

static __global__ void naive_dconv_kernel(float *dconv, const bf16 *dy, int64_t dy_stride, const float *conv, int64_t N,
                                          int C, int norm_channels, int K, bool l1) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C, c = i % C;
  if (n >= N) return;
  float s = naive_sigmoid(conv[i]), a = conv[i] * s, d = (float)dy[n * dy_stride + c], sum = 1e-6f, product = 0;
  for (int k = 0; k < K && c < norm_channels; k++) {
    float z = conv[i - c % K + k], b = z * naive_sigmoid(z);
    sum += l1 ? fabsf(b) : b * b;
    product += b * (float)dy[n * dy_stride + c - c % K + k];
  }
  if (c < norm_channels) {
    float r = l1 ? 1 / sum : rsqrtf(sum), along = l1 ? (float)((a > 0) - (a < 0)) : a * r;
    d = r * (d - along * product * r);
  }
  dconv[i] = d * s * (1 + conv[i] * (1 - s));
}

static __global__ void naive_dx_kernel(bf16 *dx, int64_t dx_stride, const float *dconv, const float *weight,
                                       const int32_t *doc_start, int64_t N, int64_t T, int C) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / C, c = i % C;
  if (n >= N) return;
  float sum = 0;
  for (int j = 0; j < 4; j++) {
    int64_t to = n + 3 - j;  // the token that sees this one through tap j
    if (n % T + 3 - j < T && naive_seen(doc_start, to, T, j)) sum += weight[c * 4 + j] * dconv[to * C + c];
  }
  dx[n * dx_stride + c] = __float2bfloat16_rn(sum);
}

// dbias may be NULL.
static __global__ void naive_dweight_kernel(float *dweight, float *dbias, const float *dconv, const bf16 *x,
                                            int64_t x_stride, const int32_t *doc_start, int64_t N, int64_t T, int C) {
  int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), c = i / 4, j = i % 4;
  if (c >= C) return;
  float sum = 0, db = 0;
  for (int64_t n = 0; n < N; n++) {
    if (naive_seen(doc_start, n, T, j)) sum += dconv[n * C + c] * (float)x[(n - 3 + j) * x_stride + c];
    db += dconv[n * C + c];
  }
  dweight[i] += sum;
  if (dbias && j == 0) dbias[c] += db;
}

// conv [B T, C] is left for the backward pass.
static void naive_forward(bf16 *y, int64_t y_stride, float *conv, const bf16 *x, int64_t x_stride, const float *weight,
                          const float *bias, const int32_t *doc_start, int64_t B, int64_t T, int C, int norm_channels,
                          int K, bool l1) {
  unsigned blocks = (unsigned)ceil_div(B * T * C, 256);
  naive_conv_kernel<<<blocks, 256>>>(conv, x, x_stride, weight, bias, doc_start, B * T, T, C);
  naive_norm_kernel<<<blocks, 256>>>(y, y_stride, conv, B * T, C, norm_channels, K, l1);
  KERNEL_CHECK("naive_forward");
}

static void naive_backward(bf16 *dx, int64_t dx_stride, float *dweight, float *dbias, float *dconv, const bf16 *dy,
                           int64_t dy_stride, const float *conv, const bf16 *x, int64_t x_stride, const float *weight,
                           const int32_t *doc_start, int64_t B, int64_t T, int C, int norm_channels, int K, bool l1) {
  unsigned blocks = (unsigned)ceil_div(B * T * C, 256);
  naive_dconv_kernel<<<blocks, 256>>>(dconv, dy, dy_stride, conv, B * T, C, norm_channels, K, l1);
  naive_dx_kernel<<<blocks, 256>>>(dx, dx_stride, dconv, weight, doc_start, B * T, T, C);
  naive_dweight_kernel<<<(unsigned)ceil_div(C * 4, 256), 256>>>(dweight, dbias, dconv, x, x_stride, doc_start, B * T, T,
                                                                C);
  KERNEL_CHECK("naive_backward");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks against loops in double, then timings.

struct Case {
  int64_t B, T;
  int heads, K, plain;  // normalised channels: heads * K; then `plain` others
  bool conv, bias;
  int docs;  // 0 none, 1 random starts, 2 every token or two
  bool l1 = false;
  int taps = 4;  // fewer: the first of the four are 0 and have no gradient
};

static void test(const Case &k) {
  char tag[128];
  snprintf(tag, sizeof tag, "short_conv B=%lld T=%lld heads=%d K=%d plain=%d conv=%d bias=%d docs=%d l1=%d taps=%d ",
           (long long)k.B, (long long)k.T, k.heads, k.K, k.plain, k.conv, k.bias, k.docs, k.l1, k.taps);
  std::string name = tag;
  int NC = k.heads * k.K, C = NC + k.plain;
  int64_t N = k.B * k.T, sx = C + 24, sy = C + 8, sd = C + 40;
  Values x = random_bf16(N * C, 1), dy = random_bf16(N * C, 1), w = random_values(C * 4, 0.3),
         b = random_values(C, 0.3);
  for (int i = 0; i < C * 4; i++)
    if (i % 4 < 4 - k.taps) w[i] = 0;
  Values dw0 = random_values(C * 4, 1), db0 = random_values(C, 1), y(x.size()), dx(x.size(), 0.0), dw = dw0, db = db0;
  std::vector<int32_t> start((size_t)N, 0);
  for (int64_t n = 0; n < N; n++) {
    int64_t t = n % k.T;
    bool fresh = t == 0 || (k.docs == 1 && (t == 64 || random_unit() < 0.1)) || (k.docs == 2 && random_unit() < 0.6);
    start[n] = fresh ? (int32_t)t : start[n - 1];
  }
  if (N > 5 && NC && k.T % 2 == 0)  // a token whose first head is exactly 0 (with its past), and a tiny one
    for (int c = 0; c < k.K; c++)
      for (int64_t n = 0; n < 6; n++) x[n * C + c] = n == 5 ? round_bf16(1e-8) : 0;
  std::vector<double> cc(C), a(C), dc(C);
  for (int64_t n = 0; n < N; n++) {
    int64_t t = n % k.T;
    auto seen = [&](int j) { return t - 3 + j >= (k.docs ? start[n] : 0); };  // tap j
    for (int c = 0; c < C; c++) {
      cc[c] = k.bias ? b[c] : 0;
      for (int j = 0; j < 4; j++)
        if (seen(j)) cc[c] += (k.conv ? w[c * 4 + j] : j == 3) * x[(n - 3 + j) * C + c];
      a[c] = cc[c] / (1 + std::exp(-cc[c]));
      y[n * C + c] = a[c], dc[c] = dy[n * C + c];
    }
    for (int h = 0; h < k.heads; h++) {
      double sum = 0, product = 0;
      for (int c = h * k.K; c < (h + 1) * k.K; c++) sum += k.l1 ? std::fabs(a[c]) : a[c] * a[c];
      double r = k.l1 ? 1 / (sum + 1e-6) : 1 / std::sqrt(sum + 1e-6);
      for (int c = h * k.K; c < (h + 1) * k.K; c++) y[n * C + c] = a[c] * r, product += a[c] * r * dc[c];
      for (int c = h * k.K; c < (h + 1) * k.K; c++) {
        double along = k.l1 ? (a[c] > 0) - (a[c] < 0) : a[c] * r;
        dc[c] = r * (dc[c] - along * product);
      }
    }
    for (int c = 0; c < C; c++) {
      double s = 1 / (1 + std::exp(-cc[c])), d = dc[c] * s * (1 + cc[c] * (1 - s));
      for (int j = 0; j < 4; j++)
        if (seen(j)) {
          dx[(n - 3 + j) * C + c] += (k.conv ? w[c * 4 + j] : j == 3) * d;
          if (j >= 4 - k.taps) dw[c * 4 + j] += d * x[(n - 3 + j) * C + c];
        }
      db[c] += d;
    }
  }
  Buffer<bf16> bx(strided(x, N, C, sx, 8, NAN)), bdy(strided(dy, N, C, sd, 16, NAN)), by(N * sy), bdx(N * sx);
  Buffer<float> bw(w), bb(b), bdw(dw0), bdb(db0), scratch(short_conv_backward_scratch(k.B, k.T, C));
  Buffer<int32_t> bs(N);
  CUDA_CHECK(cudaMemcpy(bs.data, start.data(), (size_t)N * 4, cudaMemcpyHostToDevice));
  const int32_t *docs = k.docs ? bs.data : NULL;
  Values narrow, dnarrow;  // [C, taps]
  for (int i = 0; i < C * 4; i++)
    if (i % 4 >= 4 - k.taps) narrow.push_back(w[i]), dnarrow.push_back(dw0[i]);
  Buffer<float> bnarrow(narrow), bdnarrow(dnarrow);
  const bool few = k.taps < 4;
  if (few) bw.poison(), short_conv_widen(bw.data, bnarrow.data, k.taps, C, 0);
  const float *pw = k.conv ? bw.data : NULL, *pb = k.bias ? bb.data : NULL;
  short_conv_forward(by.data, sy, bx.data + 8, sx, pw, pb, docs, k.B, k.T, C, NC, k.K, 0, k.l1);
  check_bf16(name + "y", by.get(N, C, sy), y);
  for (int run = 0; run < 2; run++) {
    std::vector<float> w1 = bdw.raw(), b1 = bdb.raw();
    std::vector<bf16> x1 = bdx.raw();
    bdx.poison(), scratch.poison(), bdw.set(few ? Values(C * 4, 0.0) : dw0), bdb.set(db0);
    short_conv_backward(bdx.data + 8, sx, bdw.data, bdb.data, scratch.data, bdy.data + 16, sd, bx.data + 8, sx, pw, pb,
                        docs, k.B, k.T, C, NC, k.K, 0, k.l1);
    if (run)
      check_true(name + "same bits twice", bdw.same_bits(w1) && bdb.same_bits(b1) && bdx.same_bits(x1), "runs differ");
  }
  check_bf16(name + "dx", bdx.get(N, C, sx, 8), dx);
  double limit = 4e-6;  // fp32 sums, terms good to about 1e-6 (fast sigmoid, reciprocal root)
  if (few) {
    Values want;
    for (int i = 0; i < C * 4; i++)
      if (i % 4 >= 4 - k.taps) want.push_back(dw[i]);
    short_conv_narrow(bdnarrow.data, bdw.data, k.taps, C, 0);
    check_fp32(name + "dweight", bdnarrow.get(), want, limit);
    check_true(name + "guards of narrow weights", bdnarrow.untouched() && bnarrow.untouched(), "written outside");
  } else {
    check_fp32(name + "dweight", bdw.get(), k.conv ? dw : dw0, limit);
  }
  check_fp32(name + "dbias", bdb.get(), k.bias ? db : db0, limit);
  check_true(
      name + "guards",
      by.untouched(N, C, sy) && bdx.untouched(N, C, sx, 8) && bdw.untouched() && bdb.untouched() && scratch.untouched(),
      "written outside");
  if (!k.conv || few || N > 600) return;
  Buffer<float> conv(N * C), dconv(N * C);
  by.poison(), bdx.poison(), bdw.set(dw0), bdb.set(db0);
  naive_forward(by.data, sy, conv.data, bx.data + 8, sx, bw.data, pb, docs, k.B, k.T, C, NC, k.K, k.l1);
  check_bf16(name + "naive y", by.get(N, C, sy), y);
  naive_backward(bdx.data + 8, sx, bdw.data, k.bias ? bdb.data : NULL, dconv.data, bdy.data + 16, sd, conv.data,
                 bx.data + 8, sx, bw.data, docs, k.B, k.T, C, NC, k.K, k.l1);
  check_bf16(name + "naive dx", bdx.get(N, C, sx, 8), dx);
  check_fp32(name + "naive dweight", bdw.get(), dw, limit);
  check_fp32(name + "naive dbias", bdb.get(), k.bias ? db : db0, limit);
  check_true(name + "naive guards",
             by.untouched(N, C, sy) && bdx.untouched(N, C, sx, 8) && bdw.untouched() && bdb.untouched() &&
                 conv.untouched() && dconv.untouched(),
             "written outside");
}

int main(int argc, char **argv) {
  lab_begin("short_conv");
  const int lengths[] = {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 129, 289};
  for (int T : lengths)
    for (int docs = 0; docs < 3; docs++) test({2, T, 4, 64, 72, true, false, docs});
  const int keys[] = {64, 128, 192, 256};
  for (int K : keys) {
    test({3, 70, 6, K, 264, true, false, 0}), test({1, 133, 2, K, 520, true, true, 1}),
        test({2, 40, 2, K, 0, true, false, 2});
    for (int docs = 0; docs < 3; docs++) test({2, 70, 3, K, 72, docs < 2, false, docs, true});
    test({2, 37, 2, K, 64, true, false, 0, false, 2}), test({2, 37, 1, K, 64, true, false, 1, true, 3});
    test({2, 37, 2, K, 64, false, false, 0}), test({2, 37, 2, K, 64, false, false, 1});
  }
  test({2, 100, 0, 64, 264, true, true, 1, false, 2}), test({2, 67, 0, 64, 72, true, true, 0, false, 3});
  test({1, 16400, 1, 64, 8, true, false, 1}), test({2, 100, 0, 64, 648, true, true, 0});
  test({2, 3, 0, 64, 8, true, true, 2});
  if (!lab_timing(argc, argv)) return lab_end();
  printf("bench, B=8 T=4096, packed rows of 9216 in, channels contiguous out\n");
  int64_t B = 8, T = 4096, N = B * T, stride = 9216;
  bf16 *x = bench_bf16(N * stride), *dx = bench_bf16(N * stride), *y = bench_bf16(N * 6144), *dy = bench_bf16(N * 6144);
  float *w = bench_fp32(9216 * 4, 0.3f), *b = bench_fp32(9216), *dw = bench_fp32(9216 * 4), *db = bench_fp32(9216);
  float *scratch = bench_fp32(8 * short_conv_backward_scratch(B, T, 6144));
  int32_t *docs = (int32_t *)device_alloc(N, 4, "docs");
  std::vector<int32_t> start((size_t)N);
  for (int64_t n = 0; n < N; n++) start[n] = (int32_t)(n % T / 700 * 700);
  CUDA_CHECK(cudaMemcpy(docs, start.data(), (size_t)N * 4, cudaMemcpyHostToDevice));
  for (int K = 128; K <= 256; K += 64) {
    char name[64];
    double bytes = 2.0 * (double)N * 6144;
    snprintf(name, sizeof name, "short_conv_forward 1536 1536 3072 K=%d", K);
    bench(name, 2 * bytes, 0, [&] { short_conv_forward(y, 6144, x, stride, w, NULL, NULL, B, T, 6144, 3072, K, 0); });
    snprintf(name, sizeof name, "short_conv_backward 1536 1536 3072 K=%d", K);
    bench(name, 3 * bytes, 0, [&] {
      short_conv_backward(dx, stride, dw, NULL, scratch, dy, 6144, x, stride, w, NULL, NULL, B, T, 6144, 3072, K, 0);
    });
  }
  double bytes = 2.0 * (double)N * 6144;
  for (int strip = 16; strip <= 256; strip *= 2) {
    unsigned blocks = (unsigned)short_conv_blocks(B, T, 6144, 3072, 256, strip);
    char name[64];
    snprintf(name, sizeof name, "forward kernel, strips of %d", strip);
    bench(name, 2 * bytes, 0, [&] {
      short_conv_forward_kernel<32, false, false>
          <<<blocks, 128>>>(y, 6144, x, (int)stride, w, NULL, NULL, B, (int)T, 6144, 3072, 256, strip);
    });
    snprintf(name, sizeof name, "backward kernel, strips of %d", strip);
    if (strip >= 64)
      bench(name, 3 * bytes, 0, [&] {
        short_conv_backward_kernel<32, false, false><<<blocks, 128>>>(
            dx, (int)stride, scratch, NULL, dy, 6144, x, (int)stride, w, NULL, NULL, B, (int)T, 6144, 3072, 256, strip);
      });
  }
  bench("short_conv_forward K=256, documents", 2 * bytes, 0,
        [&] { short_conv_forward(y, 6144, x, stride, w, NULL, docs, B, T, 6144, 3072, 256, 0); });
  bench("short_conv_backward K=256, documents", 3 * bytes, 0, [&] {
    short_conv_backward(dx, stride, dw, NULL, scratch, dy, 6144, x, stride, w, NULL, docs, B, T, 6144, 3072, 256, 0);
  });
  float *conv = bench_fp32(N * 6144), *dconv = bench_fp32(N * 6144);
  bench(
      "naive forward K=256", 2 * bytes, 0,
      [&] { naive_forward(y, 6144, conv, x, stride, w, NULL, NULL, B, T, 6144, 3072, 256, false); }, 3);
  bench(
      "naive backward K=256", 3 * bytes, 0,
      [&] {
        naive_backward(dx, stride, dw, NULL, dconv, dy, 6144, conv, x, stride, w, NULL, B, T, 6144, 3072, 256, false);
      },
      3);
  bytes = 2.0 * (double)N * 4352;
  bench("short_conv_forward Mamba-2 4352, bias", 2 * bytes, 0,
        [&] { short_conv_forward(y, 4352, x, stride, w, b, NULL, B, T, 4352, 0, 0, 0); });
  bench("short_conv_backward Mamba-2 4352, bias", 3 * bytes, 0, [&] {
    short_conv_backward(dx, stride, dw, db, scratch, dy, 4352, x, stride, w, b, NULL, B, T, 4352, 0, 0, 0);
  });
  return lab_end();
}
