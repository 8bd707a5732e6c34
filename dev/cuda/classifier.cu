// classifier.cu: lab of gdn/cuda/classifier.cuh
#include "../../gdn/cuda/classifier.cuh"
#include "lab.cuh"

// Naive: the formula as it stands, one thread for each row. What makes it slow: neighbouring threads read addresses a
// whole row apart, so that a warp's read of 64 useful bytes touches 32 lines of memory; the row comes from memory three
// times; every logit costs two exponentials one after the other; and 8192 rows are 256 warps, for a GPU that keeps 8448
// at work. gdn/cuda/classifier.cuh gives a row to 512 threads, which read 16 bytes each side by side, keeps it in
// shared memory between the passes (one read and one write in all) and combines the threads' maxima and sums by
// shuffles. It is more exact, too: to one long sum the small terms soon add nothing, to 512 short ones they do.
static __global__ void naive_classifier_kernel(bf16 *logits, float *losses, const int32_t *targets, float scale,
                                               int64_t rows, int vocab, int padded) {
  int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  bf16 *mine = logits + row * padded;
  int target = targets[row];
  if (target == -1) {  // not counted
    losses[row] = 0;
    for (int v = 0; v < padded; v++) mine[v] = (bf16)0.0f;
    return;
  }
  float top = -INFINITY, sum = 0;
  for (int v = 0; v < vocab; v++) top = fmaxf(top, (float)mine[v]);
  for (int v = 0; v < vocab; v++) sum += expf((float)mine[v] - top);
  losses[row] = target >= 0 && target < vocab ? logf(sum) + (top - (float)mine[target]) : NAN;
  for (int v = 0; v < padded; v++) {
    float gradient = v < vocab ? scale * (expf((float)mine[v] - top) / sum - (v == target ? 1.0f : 0.0f)) : 0.0f;
    mine[v] = (bf16)gradient;
  }
}

static void naive_classifier_backward(bf16 *logits, float *losses, const int32_t *targets, float scale, int64_t rows,
                                      int vocab, int padded, cudaStream_t stream) {
  naive_classifier_kernel<<<grid_size(ceil_div(rows, 64), "naive classifier"), 64, 0, stream>>>(
      logits, losses, targets, scale, rows, vocab, padded);
  KERNEL_CHECK("naive classifier");
}

static void test(int64_t N, int V, int P, double spread) {
  char tag[96];
  snprintf(tag, sizeof tag, "classifier N=%lld V=%d padded=%d spread=%g ", (long long)N, V, P, spread);
  std::string name = tag;
  Values logits = random_bf16(N * P, spread), grads(logits.size(), 0.0), losses((size_t)N, 0.0);
  std::vector<int32_t> targets((size_t)N);
  const double scale = (double)(1.0f / 37.0f);
  for (int64_t n = 0; n < N; n++) {
    targets[n] = n % 5 == 3 ? -1 : n % 5 == 1 ? V - 1 : (int32_t)(random_unit() * V);
    for (int v = V; v < P; v++) logits[n * P + v] = 1e4;  // padding must not count, whatever stands there
    if (targets[n] < 0) continue;
    double top = -1e300, sum = 0;
    for (int v = 0; v < V; v++) top = std::max(top, logits[n * P + v]);
    for (int v = 0; v < V; v++) sum += std::exp(logits[n * P + v] - top);
    losses[n] = top + std::log(sum) - logits[n * P + targets[n]];
    for (int v = 0; v < V; v++)
      grads[n * P + v] = scale * (std::exp(logits[n * P + v] - top) / sum - (v == targets[n]));
  }
  Buffer<bf16> bl(logits);
  Buffer<float> loss(N);
  Buffer<int32_t> bt(N);
  CUDA_CHECK(cudaMemcpy(bt.data, targets.data(), (size_t)N * 4, cudaMemcpyHostToDevice));
  std::vector<bf16> before = bl.raw();
  classifier_loss(loss.data, bl.data, bt.data, N, V, P, 0);
  check_fp32(name + "loss alone", loss.get(), losses, 2e-6);
  check_true(name + "logits kept", bl.same_bits(before), "evaluation changed the logits");
  loss.poison();
  classifier_backward(bl.data, loss.data, bt.data, (float)scale, N, V, P, 0);
  check_fp32(name + "loss", loss.get(), losses, 2e-6);
  Values got = bl.get();
  bool padding = true;
  for (int64_t n = 0; n < N; n++)
    for (int v = 0; v < P; v++)
      if ((v >= V || targets[n] < 0) && !(got[n * P + v] == 0)) padding = false;
  check_true(name + "padding and ignored rows", padding, "gradient is not 0 there");
  check_bf16(name + "gradient", got, grads);
  Buffer<double> total(1);
  loss_sum(total.data, loss.data, N, 0, 0);
  double sum = 0, gpu;
  for (double x : loss.get()) sum += x;
  CUDA_CHECK(cudaMemcpy(&gpu, total.data, 8, cudaMemcpyDeviceToHost));
  check_true(name + "sum", std::fabs(gpu - sum) <= 1e-12 * std::fabs(sum), "wrong sum of losses");
  check_true(name + "guards", bl.untouched() && loss.untouched() && total.untouched(), "written outside");
  bl.set(logits), loss.poison();
  naive_classifier_backward(bl.data, loss.data, bt.data, (float)scale, N, V, P, 0);
  // 2e-6, or 5e-5 for large vocabularies: one running fp32 sum of 115200 terms puts 1e-5 of error into the loss
  check_fp32(name + "naive loss", loss.get(), losses, V <= 4099 ? 2e-6 : 5e-5);
  check_bf16(name + "naive gradient", bl.get(), grads);
  check_true(name + "naive guards", bl.untouched() && loss.untouched(), "written outside");
}

int main(int argc, char **argv) {
  lab_begin("classifier");
  const int rows[] = {1, 2, 3, 15, 16, 17, 63, 65, 127, 129, 289};
  for (int N : rows) test(N, 500, 504, 2);
  test(9, 1, 8, 1), test(9, 13, 64, 1), test(9, 4099, 4224, 8), test(9, 32000, 32000, 2), test(9, 32000, 32000, 20);
  test(7, 50257, 50304, 3), test(3, 115200, 115200, 3);
  {  // a target outside the vocabulary must show: NaN
    Buffer<bf16> logits(random_bf16(16, 1));
    Buffer<float> loss(2);
    Buffer<int32_t> targets(2);
    const int32_t t[2] = {3, 8};
    CUDA_CHECK(cudaMemcpy(targets.data, t, 8, cudaMemcpyHostToDevice));
    classifier_backward(logits.data, loss.data, targets.data, 1, 2, 8, 8, 0);
    Values got = loss.get();
    check_true("classifier target out of range", std::isfinite(got[0]) && std::isnan(got[1]), "the loss hides it");
  }
  if (!lab_timing(argc, argv)) return lab_end();
  printf("bench, chunks of 8192 tokens\n");
  int64_t N = 8192;
  const int sizes[][2] = {{32000, 32000}, {50257, 50304}};
  float *loss = bench_fp32(32768);
  double *total = (double *)device_alloc(1, 8, "sum");
  for (auto &s : sizes) {
    bf16 *logits = bench_bf16(N * s[1], 4);
    int32_t *targets = (int32_t *)device_alloc(N, 4, "targets");
    CUDA_CHECK(cudaMemset(targets, 0, (size_t)N * 4));
    char name[64];
    snprintf(name, sizeof name, "classifier_backward vocabulary %d", s[0]);
    double bytes = 2.0 * (double)N * s[1];
    bench(name, 2 * bytes, 0, [&] { classifier_backward(logits, loss, targets, 1e-4f, N, s[0], s[1], 0); });
    snprintf(name, sizeof name, "classifier_loss vocabulary %d", s[0]);
    bench(name, bytes, 0, [&] { classifier_loss(loss, logits, targets, N, s[0], s[1], 0); });
    snprintf(name, sizeof name, "naive classifier_backward vocabulary %d", s[0]);
    bench(
        name, 2 * bytes, 0, [&] { naive_classifier_backward(logits, loss, targets, 1e-4f, N, s[0], s[1], 0); }, 3);
    device_free(logits), device_free(targets);
  }
  bench("loss_sum of 32768", 131072, 0, [&] { loss_sum(total, loss, 32768, 0, 0); });
  return lab_end();
}
