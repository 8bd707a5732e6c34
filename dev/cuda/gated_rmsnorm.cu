// gated_rmsnorm.cu: lab of gdn/cuda/gated_rmsnorm.cuh
#include "../../gdn/cuda/gated_rmsnorm.cuh"
#include "lab.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Where one starts: the formula, a thread a head of a token (a row in the second order), for the gradients of weights a
// thread a column. With a gate and a norm; r is left for the kernel of the weights. Unlike the fast ones these may not
// write over what they read.
//
// What makes these slow: neighbouring threads are a head or a row apart, so that each 2-byte access of a warp touches
// 32 different sectors; o, gate and dy are read in two passes and again for the weights, and act(z) is found each time
// anew; dgamma has V threads, each with N H values to add one after the other. The fast kernels hold a head in the
// registers of 8 to 32 lanes, 16 bytes a lane beside each other, so that every value is read once; a block walks 256
// tokens of the same heads and keeps its share of dgamma and dbias in registers on the way.

// act(z), and act'(z) in *slope.
static __device__ float naive_gate(GateActivation act, float z, float *slope) {
  float s = 1 / (1 + expf(-z));
  *slope = act == ACT_SILU ? s * (1 + z * (1 - s)) : s * (1 - s);
  return act == ACT_SILU ? z * s : s;
}

static __global__ void naive_forward_kernel(bf16 *y, int64_t y_stride, const bf16 *o, int64_t o_stride,
                                            const bf16 *gate, int64_t gate_stride, const float *gamma,
                                            const float *bias, GateActivation act, float eps, int64_t N, int H, int V) {
  int64_t u = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = u / H, first = u % H * V;
  if (n >= N) return;
  o += n * o_stride + first, gate += n * gate_stride + first, y += n * y_stride + first;
  float sum = 0, slope;
  for (int c = 0; c < V; c++) sum += (float)o[c] * (float)o[c];
  float r = rsqrtf(sum / (float)V + eps);
  for (int c = 0; c < V; c++) {
    float a = naive_gate(act, (float)gate[c] + (bias ? bias[first + c] : 0), &slope);
    y[c] = __float2bfloat16_rn((float)o[c] * r * gamma[c] * a);
  }
}

static __global__ void naive_backward_kernel(bf16 *do_, int64_t do_stride, bf16 *dgate, int64_t dgate_stride,
                                             float *rstd, const bf16 *dy, int64_t dy_stride, const bf16 *o,
                                             int64_t o_stride, const bf16 *gate, int64_t gate_stride,
                                             const float *gamma, const float *bias, GateActivation act, float eps,
                                             int64_t N, int H, int V) {
  int64_t u = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = u / H, first = u % H * V;
  if (n >= N) return;
  o += n * o_stride + first, gate += n * gate_stride + first, dy += n * dy_stride + first;
  do_ += n * do_stride + first, dgate += n * dgate_stride + first;
  float sum = 0, mean = 0, slope;
  for (int c = 0; c < V; c++) sum += (float)o[c] * (float)o[c];
  float r = rstd[u] = rsqrtf(sum / (float)V + eps);
  for (int c = 0; c < V; c++) {
    float a = naive_gate(act, (float)gate[c] + (bias ? bias[first + c] : 0), &slope);
    mean += gamma[c] * (float)dy[c] * a * (float)o[c] * r / (float)V;
  }
  for (int c = 0; c < V; c++) {
    float a = naive_gate(act, (float)gate[c] + (bias ? bias[first + c] : 0), &slope);
    do_[c] = __float2bfloat16_rn(r * (gamma[c] * (float)dy[c] * a - (float)o[c] * r * mean));
    dgate[c] = __float2bfloat16_rn((float)dy[c] * (float)o[c] * r * gamma[c] * slope);
  }
}

// dbias NULL when bias is.
static __global__ void naive_weights_kernel(float *dgamma, float *dbias, const float *rstd, const bf16 *dy,
                                            int64_t dy_stride, const bf16 *o, int64_t o_stride, const bf16 *gate,
                                            int64_t gate_stride, const float *gamma, const float *bias,
                                            GateActivation act, int64_t N, int H, int V) {
  int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= V) return;
  float dg = 0, slope;
  for (int h = 0; h < H; h++) {
    float db = 0;
    for (int64_t n = 0; n < N; n++) {
      int64_t k = h * V + c;
      float a = naive_gate(act, (float)gate[n * gate_stride + k] + (bias ? bias[k] : 0), &slope);
      float dyn = (float)dy[n * dy_stride + k] * (float)o[n * o_stride + k] * rstd[n * H + h];
      dg += dyn * a, db += dyn * gamma[c] * slope;
    }
    if (bias) dbias[h * V + c] += db;
  }
  dgamma[c] += dg;
}

static void naive_forward(bf16 *y, int64_t y_stride, const bf16 *o, int64_t o_stride, const bf16 *gate,
                          int64_t gate_stride, const float *gamma, const float *bias, GateActivation act, float eps,
                          int64_t N, int H, int V) {
  naive_forward_kernel<<<(unsigned)ceil_div(N * H, 128), 128>>>(y, y_stride, o, o_stride, gate, gate_stride, gamma,
                                                                bias, act, eps, N, H, V);
  KERNEL_CHECK("naive_forward");
}

// rstd [N, H] is left to the second kernel.
static void naive_backward(bf16 *do_, int64_t do_stride, bf16 *dgate, int64_t dgate_stride, float *dgamma, float *dbias,
                           float *rstd, const bf16 *dy, int64_t dy_stride, const bf16 *o, int64_t o_stride,
                           const bf16 *gate, int64_t gate_stride, const float *gamma, const float *bias,
                           GateActivation act, float eps, int64_t N, int H, int V) {
  naive_backward_kernel<<<(unsigned)ceil_div(N * H, 128), 128>>>(do_, do_stride, dgate, dgate_stride, rstd, dy,
                                                                 dy_stride, o, o_stride, gate, gate_stride, gamma, bias,
                                                                 act, eps, N, H, V);
  naive_weights_kernel<<<(unsigned)ceil_div(V, 32), 32>>>(dgamma, dbias, rstd, dy, dy_stride, o, o_stride, gate,
                                                          gate_stride, gamma, bias, act, N, H, V);
  KERNEL_CHECK("naive_backward");
}

// Gate first, all rows of y, dy, o and do_ of D values. What u = o silu(gate) is, each loop finds anew.
static __device__ float naive_gated(const bf16 *o, const bf16 *gate, int64_t c) {
  return (float)o[c] * (float)gate[c] / (1 + expf(-(float)gate[c]));
}

static __global__ void naive_gate_first_forward_kernel(bf16 *y, const bf16 *o, const bf16 *gate, int64_t gate_stride,
                                                       const float *weight, float eps, int64_t N, int D) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= N) return;
  o += n * D, gate += n * gate_stride, y += n * D;
  float sum = 0;
  for (int c = 0; c < D; c++) sum += naive_gated(o, gate, c) * naive_gated(o, gate, c);
  float r = rsqrtf(sum / (float)D + eps);
  for (int c = 0; c < D; c++) y[c] = __float2bfloat16_rn(naive_gated(o, gate, c) * r * weight[c]);
}

static __global__ void naive_gate_first_backward_kernel(bf16 *do_, bf16 *dgate, int64_t dgate_stride, float *rstd,
                                                        const bf16 *dy, const bf16 *o, const bf16 *gate,
                                                        int64_t gate_stride, const float *weight, float eps, int64_t N,
                                                        int D) {
  int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= N) return;
  o += n * D, gate += n * gate_stride, dy += n * D, do_ += n * D, dgate += n * dgate_stride;
  float sum = 0, mean = 0, slope;
  for (int c = 0; c < D; c++) sum += naive_gated(o, gate, c) * naive_gated(o, gate, c);
  float r = rstd[n] = rsqrtf(sum / (float)D + eps);
  for (int c = 0; c < D; c++) mean += weight[c] * (float)dy[c] * naive_gated(o, gate, c) / (float)D;
  for (int c = 0; c < D; c++) {
    float a = naive_gate(ACT_SILU, (float)gate[c], &slope);
    float du = r * weight[c] * (float)dy[c] - naive_gated(o, gate, c) * r * r * r * mean;
    dgate[c] = __float2bfloat16_rn(du * (float)o[c] * slope);
    do_[c] = __float2bfloat16_rn(du * a);
  }
}

static __global__ void naive_gate_first_dweight_kernel(float *dweight, const float *rstd, const bf16 *dy, const bf16 *o,
                                                       const bf16 *gate, int64_t gate_stride, int64_t N, int D) {
  int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= D) return;
  float sum = 0;
  for (int64_t n = 0; n < N; n++)
    sum += (float)dy[n * D + c] * naive_gated(o + n * D, gate + n * gate_stride, c) * rstd[n];
  dweight[c] += sum;
}

static void naive_gate_first_forward(bf16 *y, const bf16 *o, const bf16 *gate, int64_t gate_stride, const float *weight,
                                     float eps, int64_t N, int D) {
  naive_gate_first_forward_kernel<<<(unsigned)ceil_div(N, 128), 128>>>(y, o, gate, gate_stride, weight, eps, N, D);
  KERNEL_CHECK("naive_gate_first_forward");
}

static void naive_gate_first_backward(bf16 *do_, bf16 *dgate, int64_t dgate_stride, float *dweight, float *rstd,
                                      const bf16 *dy, const bf16 *o, const bf16 *gate, int64_t gate_stride,
                                      const float *weight, float eps, int64_t N, int D) {
  naive_gate_first_backward_kernel<<<(unsigned)ceil_div(N, 128), 128>>>(do_, dgate, dgate_stride, rstd, dy, o, gate,
                                                                        gate_stride, weight, eps, N, D);
  naive_gate_first_dweight_kernel<<<(unsigned)ceil_div(D, 128), 128>>>(dweight, rstd, dy, o, gate, gate_stride, N, D);
  KERNEL_CHECK("naive_gate_first_backward");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks against loops in double, then timings.

static const double EPS = 1e-5;

static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

static void test_heads(int64_t N, int H, int V, GateActivation act, bool with_bias, bool norm = true) {
  char tag[96];
  snprintf(tag, sizeof tag, "gated_rmsnorm N=%lld H=%d V=%d act=%d bias=%d norm=%d ", (long long)N, H, V, act,
           with_bias, norm);
  std::string name = tag;
  int W = H * V;
  int64_t so = W + 8, sg = 2 * W + 16, first = W + 8, sy = W + 16, sd = W + 24;  // all strides differ
  Values o = random_bf16(N * W, 1), z = random_bf16(N * W, 2), dy = random_bf16(N * W, 1),
         gamma = random_values(V, norm ? 0.3 : 0, 1);
  Values bias = random_values(W, 1), dg0 = random_values(V, 1), db0 = random_values(W, 1);
  Values y(o.size()), d_o(o.size()), dz(o.size()), dgamma = dg0, dbias = db0;
  for (int64_t u = 0; u < N * H; u++) {
    int64_t at = u * V;
    double sum = 0, mean = 0;
    std::vector<double> a(V), slope(V);
    for (int c = 0; c < V; c++) {
      double x = z[at + c] + (with_bias ? bias[u % H * V + c] : 0), s = sigmoid(x);
      a[c] = act == ACT_NONE ? 1 : act == ACT_SILU ? x * s : s;
      slope[c] = act == ACT_NONE ? 0 : act == ACT_SILU ? s * (1 + x * (1 - s)) : s * (1 - s);
      sum += o[at + c] * o[at + c];
    }
    double r = norm ? 1 / std::sqrt(sum / V + EPS) : 1;
    for (int c = 0; c < V && norm; c++) mean += gamma[c] * dy[at + c] * a[c] * o[at + c] * r / V;
    for (int c = 0; c < V; c++) {
      double n = o[at + c] * r, dn = dy[at + c] * a[c];
      y[at + c] = n * gamma[c] * a[c];
      d_o[at + c] = r * (gamma[c] * dn - n * mean);
      dz[at + c] = dy[at + c] * n * gamma[c] * slope[c];
      if (norm) dgamma[c] += dn * n;
      dbias[u % H * V + c] += dz[at + c];
    }
  }
  Buffer<bf16> bo(strided(o, N, W, so, 0, NAN)), bz(strided(z, N, W, sg, first, NAN)),
      bdy(strided(dy, N, W, sd, 8, NAN));
  Buffer<bf16> by(N * sy), bdo(N * so), bdz(N * sg);
  Buffer<float> bg(gamma), bb(bias), bdg(dg0), bdb(db0), scratch(gated_rmsnorm_backward_scratch(N, H, V));
  const bf16 *gate = act == ACT_NONE ? NULL : bz.data + first;
  const float *pg = norm ? bg.data : NULL;
  gated_rmsnorm_forward(by.data + 8, sy, bo.data, so, gate, sg, pg, with_bias ? bb.data : NULL, act, (float)EPS, N, H,
                        V, 0);
  check_bf16(name + "y", by.get(N, W, sy, 8), y);
  for (int run = 0; run < 2; run++) {
    std::vector<float> g1 = bdg.raw(), b1 = bdb.raw();
    bdo.poison(), bdz.poison(), scratch.poison(), bdg.set(dg0), bdb.set(db0);
    gated_rmsnorm_backward(bdo.data, so, bdz.data + first, sg, bdg.data, bdb.data, scratch.data, bdy.data + 8, sd,
                           bo.data, so, gate, sg, pg, with_bias ? bb.data : NULL, act, (float)EPS, N, H, V, 0);
    if (run)
      check_true(name + "same bits twice", bdg.same_bits(g1) && bdb.same_bits(b1), "gradients differ between runs");
  }
  check_bf16(name + "do", bdo.get(N, W, so), d_o);
  if (act != ACT_NONE) check_bf16(name + "dgate", bdz.get(N, W, sg, first), dz);
  double limit = 3e-6;  // fp32 sums of thousands of products that carry 1e-6 of the fast sigmoid
  check_fp32(name + "dgamma", bdg.get(), dgamma, limit);
  if (with_bias) check_fp32(name + "dbias", bdb.get(), dbias, limit);
  check_true(name + "guards",
             by.untouched(N, W, sy, 8) && bdo.untouched(N, W, so) &&
                 bdz.untouched(N, act == ACT_NONE ? 0 : W, sg, first) && bdg.untouched() && bdb.untouched() &&
                 scratch.untouched(),
             "written outside");
  if (act == ACT_NONE || !norm || N > 131) return;
  Buffer<float> rstd(N * H);
  by.poison(), bdo.poison(), bdz.poison(), bdg.set(dg0), bdb.set(db0);
  naive_forward(by.data + 8, sy, bo.data, so, gate, sg, pg, with_bias ? bb.data : NULL, act, (float)EPS, N, H, V);
  check_bf16(name + "naive y", by.get(N, W, sy, 8), y);
  naive_backward(bdo.data, so, bdz.data + first, sg, bdg.data, bdb.data, rstd.data, bdy.data + 8, sd, bo.data, so, gate,
                 sg, pg, with_bias ? bb.data : NULL, act, (float)EPS, N, H, V);
  check_bf16(name + "naive do", bdo.get(N, W, so), d_o);
  check_bf16(name + "naive dgate", bdz.get(N, W, sg, first), dz);
  check_fp32(name + "naive dgamma", bdg.get(), dgamma, limit);
  check_fp32(name + "naive dbias", bdb.get(), with_bias ? dbias : db0, limit);
  check_true(name + "naive guards",
             by.untouched(N, W, sy, 8) && bdo.untouched(N, W, so) && bdz.untouched(N, W, sg, first) &&
                 bdg.untouched() && bdb.untouched() && rstd.untouched(),
             "written outside");
}

static void test_gate_first(int64_t N, int D) {
  char tag[64];
  snprintf(tag, sizeof tag, "rmsnorm_gate_first N=%lld D=%d ", (long long)N, D);
  std::string name = tag;
  int64_t so = D, sg = 2 * D + 16, first = 8;
  Values o = random_bf16(N * D, 1), z = random_bf16(N * D, 2), dy = random_bf16(N * D, 1), w = random_values(D, 0.3, 1);
  Values dw0 = random_values(D, 1), y(o.size()), d_o(o.size()), dz(o.size()), dw = dw0;
  for (int64_t n = 0; n < N; n++) {
    double sum = 0, mean = 0;
    std::vector<double> u(D);
    for (int c = 0; c < D; c++) u[c] = o[n * D + c] * z[n * D + c] * sigmoid(z[n * D + c]), sum += u[c] * u[c];
    double r = 1 / std::sqrt(sum / D + EPS);
    for (int c = 0; c < D; c++) mean += w[c] * dy[n * D + c] * u[c] / D;
    for (int c = 0; c < D; c++) {
      int64_t i = n * D + c;
      double s = sigmoid(z[i]), du = r * w[c] * dy[i] - u[c] * r * r * r * mean;
      y[i] = u[c] * r * w[c];
      d_o[i] = du * z[i] * s;
      dz[i] = du * o[i] * s * (1 + z[i] * (1 - s));
      dw[c] += dy[i] * u[c] * r;
    }
  }
  Buffer<bf16> bo(o), bz(strided(z, N, D, sg, first, NAN)), bdy(dy), by(N * so), bdo(N * so), bdz(N * sg);
  Buffer<float> bw(w), bdw(dw0), scratch(rmsnorm_gate_first_backward_scratch(N, D));
  rmsnorm_gate_first_forward(by.data, so, bo.data, so, bz.data + first, sg, bw.data, (float)EPS, N, D, 0);
  check_bf16(name + "y", by.get(), y);
  rmsnorm_gate_first_backward(bdo.data, so, bdz.data + first, sg, bdw.data, scratch.data, bdy.data, so, bo.data, so,
                              bz.data + first, sg, bw.data, (float)EPS, N, D, 0);
  check_bf16(name + "do", bdo.get(), d_o);
  check_bf16(name + "dgate", bdz.get(N, D, sg, first), dz);
  check_fp32(name + "dweight", bdw.get(), dw, 3e-6);
  check_true(
      name + "guards",
      by.untouched() && bdo.untouched() && bdz.untouched(N, D, sg, first) && bdw.untouched() && scratch.untouched(),
      "written outside");
  if (N > 131) return;
  Buffer<float> rstd(N);
  by.poison(), bdo.poison(), bdz.poison(), bdw.set(dw0);
  naive_gate_first_forward(by.data, bo.data, bz.data + first, sg, bw.data, (float)EPS, N, D);
  check_bf16(name + "naive y", by.get(), y);
  naive_gate_first_backward(bdo.data, bdz.data + first, sg, bdw.data, rstd.data, bdy.data, bo.data, bz.data + first, sg,
                            bw.data, (float)EPS, N, D);
  check_bf16(name + "naive do", bdo.get(), d_o);
  check_bf16(name + "naive dgate", bdz.get(N, D, sg, first), dz);
  check_fp32(name + "naive dweight", bdw.get(), dw, 3e-6);
  check_true(name + "naive guards",
             by.untouched() && bdo.untouched() && bdz.untouched(N, D, sg, first) && bdw.untouched() && rstd.untouched(),
             "written outside");
}

int main(int argc, char **argv) {
  lab_begin("gated_rmsnorm");
  // for compute-sanitizer every kernel, head size and width all the same, but few rows: racecheck follows every access
  // to shared memory
  const bool small = argc > 1 && !strcmp(argv[1], "small");
  const int rows[] = {1, 17, 129, 2, 3, 15, 16, 63, 65, 127, 289};
  for (int i = 0; i < (small ? 3 : 11); i++)
    test_heads(rows[i], 3, rows[i] % 2 ? 64 : 128, ACT_SILU, false), test_heads(rows[i], 2, 256, ACT_SIGMOID, true);
  for (int V = 64; V <= 512; V += 64)
    test_heads(small ? 19 : 131, 3, V, V % 128 ? ACT_SILU : ACT_SIGMOID, V % 192 == 0);
  test_heads(33, 5, 128, ACT_NONE, false), test_heads(33, 1, 512, ACT_NONE, false),
      test_heads(33, 9, 64, ACT_SILU, true);
  test_heads(300, small ? 1 : 6, 512, ACT_SILU, false);
  test_heads(300, small ? 1 : 6, 512, ACT_SILU, false, false), test_heads(257, 3, 64, ACT_SIGMOID, true, false);
  test_heads(17, 2, 192, ACT_NONE, false, false), test_heads(600, 1, 128, ACT_SILU, true, false);
  const int widths[] = {8, 512, 1536, 2056, 3072, 4096, 4608, 8192};
  for (int D : widths) test_gate_first(small ? 3 : 19, D);
  test_gate_first(1200, small ? 8 : 1024);  // more rows than blocks
  if (!lab_timing(argc, argv)) return lab_end();
  printf("bench, 32768 tokens, gate in rows of 9216\n");
  int64_t N = 32768, stride = 9216;
  bf16 *packed = bench_bf16(N * stride), *dpacked = bench_bf16(N * stride);
  bf16 *o = bench_bf16(N * 4096), *y = bench_bf16(N * 4096), *d = bench_bf16(N * 4096);
  float *gamma = bench_fp32(4096, 0.3f, 1), *dgamma = bench_fp32(4096), *dbias = bench_fp32(4096);
  float *scratch = bench_fp32(32 << 20);
  const int shapes[][2] = {{12, 256}, {6, 512}, {16, 128}};
  for (auto &s : shapes) {
    int H = s[0], V = s[1], W = H * V;
    char name[64];
    double bytes = 2.0 * (double)N * W;
    snprintf(name, sizeof name, "gated_rmsnorm_forward %d x %d", H, V);
    bench(name, 3 * bytes, 0,
          [&] { gated_rmsnorm_forward(y, W, o, W, packed + 6144, stride, gamma, NULL, ACT_SILU, 1e-5f, N, H, V, 0); });
    snprintf(name, sizeof name, "gated_rmsnorm_backward %d x %d", H, V);
    bench(name, 5 * bytes, 0, [&] {
      gated_rmsnorm_backward(d, W, dpacked + 6144, stride, dgamma, NULL, scratch, y, W, o, W, packed + 6144, stride,
                             gamma, NULL, ACT_SILU, 1e-5f, N, H, V, 0);
    });
    if (V == 256) {
      bench(
          "naive forward", 3 * bytes, 0,
          [&] { naive_forward(y, W, o, W, packed + 6144, stride, gamma, NULL, ACT_SILU, 1e-5f, N, H, V); }, 3);
      bench(
          "naive backward", 5 * bytes, 0,
          [&] {
            naive_backward(d, W, dpacked + 6144, stride, dgamma, NULL, scratch, y, W, o, W, packed + 6144, stride,
                           gamma, NULL, ACT_SILU, 1e-5f, N, H, V);
          },
          1);
    }
    if (V != 128) continue;
    bench("the same with gate bias", 5 * bytes, 0, [&] {
      gated_rmsnorm_backward(d, W, dpacked + 6144, stride, dgamma, dbias, scratch, y, W, o, W, packed + 6144, stride,
                             gamma, gamma, ACT_SILU, 1e-5f, N, H, V, 0);
    });
  }
  double bytes = 2.0 * (double)N * 4096;
  bench("rmsnorm_gate_first_forward 4096", 3 * bytes, 0,
        [&] { rmsnorm_gate_first_forward(y, 4096, o, 4096, packed, stride, gamma, 1e-5f, N, 4096, 0); });
  bench("rmsnorm_gate_first_backward 4096", 5 * bytes, 0, [&] {
    rmsnorm_gate_first_backward(d, 4096, dpacked, stride, dgamma, scratch, y, 4096, o, 4096, packed, stride, gamma,
                                1e-5f, N, 4096, 0);
  });
  bench(
      "naive forward, gate first", 3 * bytes, 0,
      [&] { naive_gate_first_forward(y, o, packed, stride, gamma, 1e-5f, N, 4096); }, 3);
  bench(
      "naive backward, gate first", 5 * bytes, 0,
      [&] {
        naive_gate_first_backward(d, dpacked, stride, dgamma, scratch, y, o, packed, stride, gamma, 1e-5f, N, 4096);
      },
      3);
  return lab_end();
}
