// swiglu.cu: lab of gdn/cuda/swiglu.cuh
#include "../../gdn/cuda/swiglu.cuh"
#include "lab.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Where one starts: the formula, a thread an element.
//
// No value is needed twice and neighbouring threads read neighbouring values, so that this is not far from a good
// kernel. What it leaves: 2 bytes an access where 16 are possible, so that eight times the instructions move the same
// bytes; few bytes on their way at a time; a 64-bit division a thread for its row and column; expf and a division where
// two approximate instructions do. The fast kernels take a block a row and two groups of eight values a thread, and
// load both before they use the first.

static __global__ void naive_forward_kernel(bf16 *h, const bf16 *gate_up, int64_t N, int F, int64_t stride) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / F, c = i % F;
  if (n >= N) return;
  float z = (float)gate_up[n * stride + c], u = (float)gate_up[n * stride + F + c];
  h[i] = __float2bfloat16_rn(z / (1 + expf(-z)) * u);
}

// As the fast one: gate_up becomes its own gradient, h is found again.
static __global__ void naive_backward_kernel(bf16 *gate_up, bf16 *h, const bf16 *dh, int64_t N, int F, int64_t stride) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / F, c = i % F;
  if (n >= N) return;
  bf16 *gate = gate_up + n * stride + c, *up = gate + F;
  float z = (float)*gate, u = (float)*up, d = (float)dh[i], s = 1 / (1 + expf(-z));
  h[i] = __float2bfloat16_rn(z * s * u);
  *gate = __float2bfloat16_rn(d * u * s * (1 + z * (1 - s)));
  *up = __float2bfloat16_rn(d * z * s);
}

static void naive_forward(bf16 *h, const bf16 *gate_up, int64_t N, int F, int64_t stride) {
  naive_forward_kernel<<<(unsigned)ceil_div(N * F, 256), 256>>>(h, gate_up, N, F, stride);
  KERNEL_CHECK("naive_forward");
}

static void naive_backward(bf16 *gate_up, bf16 *h, const bf16 *dh, int64_t N, int F, int64_t stride) {
  naive_backward_kernel<<<(unsigned)ceil_div(N * F, 256), 256>>>(gate_up, h, dh, N, F, stride);
  KERNEL_CHECK("naive_backward");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks against loops in double, then timings.

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
  upload();
  bh.poison(), bh2.poison(), bdh.set(dh);
  naive_forward(bh.data, packed.data, N, F, stride);
  check_bf16(name + "naive h", bh.get(), h);
  naive_backward(packed.data, bh2.data, bdh.data, N, F, stride);
  check_bf16(name + "naive dgate, dup", packed.get(N, 2 * F, stride), dg);
  check_bf16(name + "naive h recomputed", bh2.get(), h);
  check_true(name + "naive guards", packed.untouched(N, 2 * F, stride) && bh.untouched() && bh2.untouched(),
             "written outside");
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
  bench(
      "naive forward", 3 * row, 0, [&] { naive_forward(h, g, N, F, 2 * F); }, 5);
  bench(
      "naive backward", 6 * row, 0, [&] { naive_backward(g, h, dh, N, F, 2 * F); }, 5);
  return lab_end();
}
