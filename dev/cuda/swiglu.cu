// swiglu.cu: lab of gdn/cuda/swiglu.cuh
#include "../../gdn/cuda/swiglu.cuh"
#include "lab.cuh"

static void test(int64_t N, int F, int64_t stride) {
  char tag[64];
  snprintf(tag, sizeof tag, "swiglu N=%lld F=%d ", (long long)N, F);
  std::string name = tag;
  Values g = random_bf16(N * 2 * F, 3), dh = random_bf16(N * F, 1), h(dh.size()), dg(g.size());
  g[0] = round_bf16(-120), g[F] = 2;  // far in the tail: 0, not NaN
  for (int64_t n = 0; n < N; n++)
    for (int c = 0; c < F; c++) {
      double z = g[n * 2 * F + c], u = g[n * 2 * F + F + c], s = 1 / (1 + std::exp(-z)), d = dh[n * F + c];
      h[n * F + c] = z * s * u;
      dg[n * 2 * F + c] = d * u * s * (1 + z * (1 - s));
      dg[n * 2 * F + F + c] = d * z * s;
    }
  Buffer<bf16> packed(N * stride), bdh(dh), bh(N * F), bh2(N * F);
  auto upload = [&] {
    packed.poison();
    for (int64_t n = 0; n < N; n++) {
      std::vector<bf16> line((size_t)(2 * F));
      for (int c = 0; c < 2 * F; c++) line[c] = (bf16)(float)g[n * 2 * F + c];
      CUDA_CHECK(cudaMemcpy(packed.data + n * stride, line.data(), line.size() * 2, cudaMemcpyHostToDevice));
    }
  };
  upload();
  swiglu_forward(bh.data, packed.data, N, F, stride, 0);
  check_bf16(name + "h", bh.get(), h);
  swiglu_backward(packed.data, bh2.data, bdh.data, N, F, stride, 0);
  check_bf16(name + "dgate, dup", packed.get(N, 2 * F, stride), dg);
  check_true(name + "h recomputed", bh2.same_bits(bh.raw()), "not the forward's bits");
  check_true(name + "guards", packed.untouched(N, 2 * F, stride) && bh.untouched() && bh2.untouched(),
             "written outside");
  upload();
  swiglu_backward(packed.data, bdh.data, bdh.data, N, F, stride, 0);
  check_true(name + "h over dh", bdh.same_bits(bh.raw()), "not the forward's bits");
}

int main(int argc, char **argv) {
  lab_begin("swiglu");
  const int rows[] = {1, 2, 3, 15, 16, 17, 63, 65, 127, 129, 289};
  for (int N : rows) test(N, 264, 2 * 264 + 8);
  const int widths[] = {8, 2112, 3264, 5632, 6336, 8200, 16392};
  for (int F : widths) test(3, F, 2 * F);
  if (!lab_timing(argc, argv)) return lab_end();
  printf("bench, 32768 rows, ff 5632\n");
  int64_t N = 32768;
  int F = 5632;
  bf16 *g = bench_bf16(N * 2 * F), *h = bench_bf16(N * F), *dh = bench_bf16(N * F);
  double row = 2.0 * (double)N * F;
  bench("swiglu_forward", 3 * row, 0, [&] { swiglu_forward(h, g, N, F, 2 * F, 0); });
  bench("swiglu_backward", 6 * row, 0, [&] { swiglu_backward(g, h, dh, N, F, 2 * F, 0); });
  return lab_end();
}
