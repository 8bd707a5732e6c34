// adamw.cu: lab of gdn/cuda/adamw.cuh
#include "../../gdn/cuda/adamw.cuh"
#include "lab.cuh"

// Naive: the formulas as they stand, one thread for each parameter. What makes the update slow: every thread computes
// the same two powers and divides by them, and moves 4 bytes with each instruction, 16 at most being under way.
// gdn/cuda/adamw.cuh computes the corrections once on the host, and a thread takes eight elements in reads of 16 bytes,
// all of them (128 bytes) issued before the first is used.
static __global__ void naive_adamw_kernel(float *master, bf16 *weights, float *m, float *v, const float *grads,
                                          const uint32_t *decay_bits, AdamWSettings adamw, int64_t n) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float grad = grads[i] * adamw.grad_scale, decay = decay_bits[i / 256] >> (i / 8 % 32) & 1 ? adamw.weight_decay : 0.0f;
  m[i] = adamw.beta1 * m[i] + (1 - adamw.beta1) * grad;
  v[i] = adamw.beta2 * v[i] + (1 - adamw.beta2) * grad * grad;
  float m_hat = m[i] / (1 - powf(adamw.beta1, (float)adamw.step));
  float v_hat = v[i] / (1 - powf(adamw.beta2, (float)adamw.step));
  master[i] -= adamw.lr * (m_hat / (sqrtf(v_hat) + adamw.eps) + decay * master[i]);
  weights[i] = (bf16)master[i];
}

static void naive_adamw_update(float *master, bf16 *weights, float *m, float *v, const float *grads,
                               const uint32_t *decay_bits, AdamWSettings adamw, int64_t n, cudaStream_t stream) {
  naive_adamw_kernel<<<grid_size(ceil_div(n, 256), "naive adamw"), 256, 0, stream>>>(master, weights, m, v, grads,
                                                                                     decay_bits, adamw, n);
  KERNEL_CHECK("naive adamw");
}

// The norm has one output, so it is one thread, in double, while the GPU has room for 270336. The fast one
// (sum_squares_kernel) starts 270336 threads, each adding every 270336th group of four, adds up a block's sums in
// shared memory as a tree, and leaves one number a block for a second launch: the order of the sum is fixed all the
// same.
static __global__ void naive_sum_squares_kernel(double *total, const float *grads, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)grads[i] * (double)grads[i];
  *total = sum;
}

static void naive_sum_squares(double *total, const float *grads, int64_t n, cudaStream_t stream) {
  naive_sum_squares_kernel<<<1, 1, 0, stream>>>(total, grads, n);
  KERNEL_CHECK("naive sum of squares");
}

static void test(int64_t n, float max_norm, int steps, float decay, double gradient) {
  char tag[96];
  snprintf(tag, sizeof tag, "adamw n=%lld clip=%g decay=%g gradient=%g ", (long long)n, max_norm, decay, gradient);
  std::string name = tag;
  Values w = random_values(n, 1, 1), m((size_t)n, 0.0), v((size_t)n, 0.0), w0 = w;
  std::vector<uint32_t> bits((size_t)adamw_decay_words(n), 0);
  std::vector<bool> decays((size_t)n, false);
  for (int64_t i = 0; i < n; i += 3 * 264) {  // tensors of 264 elements; every third decays
    int64_t end = std::min(i + 264, n);
    adamw_decay_mark(bits.data(), i, end);
    for (int64_t j = i; j < end; j++) decays[j] = true;
  }
  Buffer<float> bw(w), bm(m), bv(v), bg(n), scratch(gradient_sum_squares_scratch());
  Buffer<bf16> copy(n), naive_copy(n);
  Buffer<float> naive_w(w), naive_m(m), naive_v(v);
  Buffer<uint32_t> bb((int64_t)bits.size());
  Buffer<double> sum(1);
  CUDA_CHECK(cudaMemcpy(bb.data, bits.data(), bits.size() * 4, cudaMemcpyHostToDevice));
  AdamWSettings adamw = {1e-2f, 0.9f, 0.95f, 1e-8f, decay, 1, 0};
  bool norms = true;
  for (adamw.step = 1; adamw.step <= steps; adamw.step++) {
    Values g = random_values(n, gradient);
    double squares = 0;
    for (double x : g) squares += x * x;
    bg.set(g);
    gradient_sum_squares(sum.data, scratch.data, bg.data, n, 0, 0);
    double norm = std::sqrt(squares), scale = max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1, found;
    CUDA_CHECK(cudaMemcpy(&found, sum.data, 8, cudaMemcpyDeviceToHost));
    norms = norms && std::fabs(found - squares) <= 1e-12 * squares;
    adamw.grad_scale = (float)scale;
    if (n <= 2056) {  // one thread
      double total;
      naive_sum_squares(sum.data, bg.data, n, 0);
      CUDA_CHECK(cudaMemcpy(&total, sum.data, 8, cudaMemcpyDeviceToHost));
      norms = norms && std::fabs(total - squares) <= 1e-12 * squares;
    }
    adamw_update(bw.data, copy.data, bm.data, bv.data, bg.data, bb.data, adamw, n, 0);
    naive_adamw_update(naive_w.data, naive_copy.data, naive_m.data, naive_v.data, bg.data, bb.data, adamw, n, 0);
    double c1 = 1 / (1 - std::pow(adamw.beta1, adamw.step)), c2 = 1 / (1 - std::pow(adamw.beta2, adamw.step));
    for (int64_t i = 0; i < n; i++) {
      double grad = g[i] * scale;
      m[i] = adamw.beta1 * m[i] + (1 - (double)adamw.beta1) * grad;
      v[i] = adamw.beta2 * v[i] + (1 - (double)adamw.beta2) * grad * grad;
      w[i] -= adamw.lr * (m[i] * c1 / (std::sqrt(v[i] * c2) + adamw.eps) + (decays[i] ? decay * w[i] : 0));
    }
  }
  check_true(name + "norm", norms, "wrong norm");
  check_fp32(name + "w", bw.get(), w, 1e-6), check_fp32(name + "m", bm.get(), m, 1e-6),
      check_fp32(name + "v", bv.get(), v, 1e-6);
  check_bf16(name + "bf16 copy", copy.get(), w);
  check_fp32(name + "naive w", naive_w.get(), w, 1e-6), check_fp32(name + "naive m", naive_m.get(), m, 1e-6),
      check_fp32(name + "naive v", naive_v.get(), v, 1e-6);
  check_bf16(name + "naive bf16 copy", naive_copy.get(), w);
  check_true(name + "naive guards",
             naive_w.untouched() && naive_m.untouched() && naive_v.untouched() && naive_copy.untouched(),
             "written outside");
  Values now = bw.get(), bf(now.size());
  for (size_t i = 0; i < now.size(); i++) bf[i] = round_bf16(now[i]);
  check_error(name + "copy is the rounded master", copy.get(), bf, 0, 0, 0);
  if (gradient == 0) {  // only what decays moves, and it shrinks by (1 - lr decay)^steps
    bool still = true;
    for (int64_t i = 0; i < n; i++) still = still && (decays[i] || now[i] == w0[i]);
    check_true(name + "no decay elsewhere", still, "a parameter without decay moved");
  }
  for (double large : {1e30, (double)INFINITY, (double)NAN}) {  // 1e30 is finite, its fp32 square not
    Values g = random_values(n, 1);
    g[(size_t)(n - 1)] = large;
    bg.set(g);
    double total;
    gradient_sum_squares(sum.data, scratch.data, bg.data, n, 0, 0);
    CUDA_CHECK(cudaMemcpy(&total, sum.data, 8, cudaMemcpyDeviceToHost));
    check_true(name + "a large norm, or none",
               std::isfinite(large) ? std::fabs(total - 1e60) < 1e-6 * 1e60 : !std::isfinite(total), "wrong sum");
  }
  check_true(
      name + "guards",
      bw.untouched() && bm.untouched() && bv.untouched() && copy.untouched() && sum.untouched() && scratch.untouched(),
      "written outside");
}

int main(int argc, char **argv) {
  lab_begin("adamw");
  const int sizes[] = {8, 16, 24, 128, 264, 2040, 2048, 2056, 100008};
  for (int n : sizes) test(n, 1, 3, 0.1f, 0.5), test(n, 0, 2, 0.1f, 0.5);
  test(3 * 264 * 3, 1, 10, 0.1f, 0);
  test(1 << 20, 0.01f, 2, 0.1f, 1);
  {  // small steps must not vanish: fp32 masters move although bf16(1 - 1e-4) is 1
    Values ones(64, 1.0);
    Buffer<float> w(ones), m(Values(64, 0.0)), v(Values(64, 0.0)), g(ones);
    Buffer<uint32_t> bits(1);
    AdamWSettings adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0, 1, 1};
    for (; adamw.step <= 200; adamw.step++) adamw_update(w.data, NULL, m.data, v.data, g.data, bits.data, adamw, 64, 0);
    check_fp32("adamw 200 small steps", w.get(), Values(64, 1 - 200e-4), 1e-5);
  }
  if (!lab_timing(argc, argv)) return lab_end();
  int64_t n = 268435456;
  printf("bench, %lld parameters\n", (long long)n);
  float *w = bench_fp32(n), *m = bench_fp32(n), *v = bench_fp32(n, 0.5f, 0.5f), *g = bench_fp32(n),
        *scratch = bench_fp32(4096);
  bf16 *copy = bench_bf16(n);
  uint32_t *bits = (uint32_t *)device_alloc(adamw_decay_words(n), 4, "bits");
  CUDA_CHECK(cudaMemset(bits, 0xf0, (size_t)adamw_decay_words(n) * 4));
  double *sum = (double *)device_alloc(1, 8, "sum");
  AdamWSettings adamw = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 10};
  bench("gradient_sum_squares", 4.0 * (double)n, 0, [&] { gradient_sum_squares(sum, scratch, g, n, 0, 0); });
  bench("adamw_update", 30.0 * (double)n, 0, [&] { adamw_update(w, copy, m, v, g, bits, adamw, n, 0); });
  bench("naive adamw_update", 30.0 * (double)n, 0, [&] { naive_adamw_update(w, copy, m, v, g, bits, adamw, n, 0); });
  bench(
      "naive gradient_sum_squares, of 262144 only", 4.0 * 262144, 0, [&] { naive_sum_squares(sum, g, 262144, 0); }, 3);
  bench("weights_to_bf16", 6.0 * (double)n, 0, [&] { weights_to_bf16(copy, w, n, 0); });
  return lab_end();
}
