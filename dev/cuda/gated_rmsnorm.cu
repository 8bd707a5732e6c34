// gated_rmsnorm.cu: lab of gdn/cuda/gated_rmsnorm.cuh
#include "../../gdn/cuda/gated_rmsnorm.cuh"
#include "lab.cuh"

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
}

int main(int argc, char **argv) {
  lab_begin("gated_rmsnorm");
  const int rows[] = {1, 2, 3, 15, 16, 17, 63, 65, 127, 129, 289};
  for (int N : rows) test_heads(N, 3, N % 2 ? 64 : 128, ACT_SILU, false), test_heads(N, 2, 256, ACT_SIGMOID, true);
  for (int V = 64; V <= 512; V += 64) test_heads(131, 3, V, V % 128 ? ACT_SILU : ACT_SIGMOID, V % 192 == 0);
  test_heads(33, 5, 128, ACT_NONE, false), test_heads(33, 1, 512, ACT_NONE, false),
      test_heads(33, 9, 64, ACT_SILU, true);
  test_heads(300, 6, 512, ACT_SILU, false);
  test_heads(300, 6, 512, ACT_SILU, false, false), test_heads(257, 3, 64, ACT_SIGMOID, true, false);
  test_heads(17, 2, 192, ACT_NONE, false, false), test_heads(600, 1, 128, ACT_SILU, true, false);
  const int widths[] = {8, 512, 1536, 2056, 3072, 4096, 4608, 8192};
  for (int D : widths) test_gate_first(19, D);
  test_gate_first(1200, 1024);
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
  return lab_end();
}
