// embedding.cu: lab of gdn/cuda/embedding.cuh
#include "../../gdn/cuda/embedding.cuh"
#include "lab.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Where one starts: the formula, a thread an element.
//
// Forward that is a copy whose threads move 2 bytes each, after a division for row and column and a load of the id that
// the next load waits for; the fast kernel gives a token to a warp, which moves 16 bytes a lane and four groups at a
// time. Backward there are two naive ways without atomics. A thread an element of the table reads all N ids to find its
// own: V D N reads for N D additions. A thread a column walks the tokens in their order and adds where the id says: no
// read too many, but D threads in all, and each addition a trip to memory and back that the next one may have to wait
// for. The fast way sorts the tokens by id first, after which each row of the table has its tokens in one stretch.

static __global__ void naive_forward_kernel(bf16 *x, const bf16 *table, const int32_t *ids, int64_t N, int D) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N * D) x[i] = table[(int64_t)ids[i / D] * D + i % D];
}

static __global__ void naive_element_kernel(float *dtable, const bf16 *dx, const int32_t *ids, int64_t N, int D,
                                            int V) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, v = i / D, c = i % D;
  if (v >= V) return;
  float sum = 0;
  for (int64_t n = 0; n < N; n++)
    if (ids[n] == v) sum += (float)dx[n * D + c];
  dtable[i] += sum;
}

static __global__ void naive_column_kernel(float *dtable, const bf16 *dx, const int32_t *ids, int64_t N, int D) {
  int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= D) return;
  for (int64_t n = 0; n < N; n++) dtable[(int64_t)ids[n] * D + c] += (float)dx[n * D + c];
}

static void naive_forward(bf16 *x, const bf16 *table, const int32_t *ids, int64_t N, int D) {
  naive_forward_kernel<<<(unsigned)ceil_div(N * D, 256), 256>>>(x, table, ids, N, D);
  KERNEL_CHECK("naive_forward");
}

static void naive_backward_elements(float *dtable, const bf16 *dx, const int32_t *ids, int64_t N, int D, int V) {
  naive_element_kernel<<<(unsigned)ceil_div((int64_t)V * D, 256), 256>>>(dtable, dx, ids, N, D, V);
  KERNEL_CHECK("naive_backward_elements");
}

static void naive_backward_columns(float *dtable, const bf16 *dx, const int32_t *ids, int64_t N, int D) {
  naive_column_kernel<<<(unsigned)ceil_div(D, 32), 32>>>(dtable, dx, ids, N, D);
  KERNEL_CHECK("naive_backward_columns");
}

// ---------------------------------------------------------------------------------------------------------------------
// Checks against loops in double, then timings.

static void test(int64_t N, int D, int V, int kinds) {
  char tag[96];
  snprintf(tag, sizeof tag, "embedding N=%lld D=%d V=%d ids=%d ", (long long)N, D, V, kinds);
  std::string name = tag;
  Values table = random_bf16((int64_t)V * D, 1), dx = random_bf16(N * D, 1), d0 = random_values((int64_t)V * D, 1);
  Values x((size_t)(N * D)), dt = d0;
  std::vector<int32_t> ids((size_t)N);
  for (int64_t n = 0; n < N; n++) {
    ids[n] = (int32_t)((int64_t)(random_unit() * kinds) * (V - 1) / std::max(kinds - 1, 1));
    for (int c = 0; c < D; c++) {
      x[n * D + c] = table[(int64_t)ids[n] * D + c];
      dt[(int64_t)ids[n] * D + c] += dx[n * D + c];
    }
  }
  Buffer<bf16> bt(table), bx(N * D), bdx(dx);
  Buffer<float> bd(d0), partial(embedding_backward_scratch(N, D));
  Buffer<int32_t> bi(N), scratch(embedding_sort_scratch(N, V));
  CUDA_CHECK(cudaMemcpy(bi.data, ids.data(), (size_t)N * 4, cudaMemcpyHostToDevice));
  embedding_forward(bx.data, bt.data, bi.data, N, D, 0);
  check_error(name + "x", bx.get(), x, 0, 0, 0);
  embedding_sort(scratch.data, bi.data, N, V, 0);
  std::vector<int32_t> got = scratch.raw(), want;
  for (int32_t n = 0; n < N; n++) want.push_back(n);
  std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  std::vector<int32_t> starts((size_t)V + 1, 0);
  for (int32_t id : ids) starts[(size_t)id + 1]++;
  for (int v = 0; v < V; v++) starts[v + 1] += starts[v];
  want.insert(want.end(), starts.begin(), starts.end());
  check_true(name + "sort", got == want, "not the stable order");
  embedding_backward(bd.data, partial.data, bdx.data, bi.data, scratch.data, N, D, V, 0);
  check_fp32(name + "dtable", bd.get(), dt, 2e-6);
  std::vector<float> first = bd.raw();
  bd.set(d0), scratch.poison(), partial.poison();
  embedding_sort(scratch.data, bi.data, N, V, 0);
  embedding_backward(bd.data, partial.data, bdx.data, bi.data, scratch.data, N, D, V, 0);
  check_true(name + "same bits twice", bd.same_bits(first), "runs differ");
  check_true(name + "guards", bx.untouched() && bd.untouched() && scratch.untouched() && partial.untouched(),
             "written outside");
  if (N > 700) return;
  bx.poison();
  naive_forward(bx.data, bt.data, bi.data, N, D);
  check_error(name + "naive x", bx.get(), x, 0, 0, 0);
  bd.set(d0);
  naive_backward_elements(bd.data, bdx.data, bi.data, N, D, V);
  check_fp32(name + "naive dtable, a thread an element", bd.get(), dt, 2e-6);
  bd.set(d0);
  naive_backward_columns(bd.data, bdx.data, bi.data, N, D);
  check_fp32(name + "naive dtable, a thread a column", bd.get(), dt, 2e-6);
  check_true(name + "naive guards", bx.untouched() && bd.untouched(), "written outside");
}

int main(int argc, char **argv) {
  lab_begin("embedding");
  const int rows[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 289};
  for (int N : rows) test(N, 72, 300, 12);
  test(2000, 8, 50257, 5000), test(5000, 8, 1, 1), test(4097, 264, 513, 3), test(600, 2056, 64, 64),
      test(640, 16, 9, 3), test(129, 8, 4, 2), test(4096, 8, 40, 33), test(3000, 16, 257, 257);
  if (!lab_timing(argc, argv)) return lab_end();
  printf("bench, 32768 tokens, width 2048, vocabulary 32000\n");
  int64_t N = 32768;
  int D = 2048, V = 32000;
  bf16 *table = bench_bf16((int64_t)V * D), *x = bench_bf16(N * D);
  float *dt = bench_fp32((int64_t)V * D), *partial = bench_fp32(embedding_backward_scratch(N, D));
  int32_t *ids = (int32_t *)device_alloc(N, 4, "ids"),
          *scratch = (int32_t *)device_alloc(embedding_sort_scratch(N, V), 4, "sort");
  for (int skew = 0; skew < 2; skew++) {
    std::vector<int32_t> host((size_t)N), seen((size_t)V, 0);
    int64_t used = 0;
    for (auto &id : host) {  // skewed: density of id proportional to 1 / id, as words are
      id = skew ? (int32_t)std::exp(random_unit() * std::log((double)V)) - 1 : (int32_t)(random_unit() * V);
      used += !seen[id]++;
    }
    CUDA_CHECK(cudaMemcpy(ids, host.data(), (size_t)N * 4, cudaMemcpyHostToDevice));
    printf("  %s ids, %lld rows used\n", skew ? "skewed" : "uniform", (long long)used);
    bench("embedding_forward", 2.0 * (double)(N + used) * D, 0, [&] { embedding_forward(x, table, ids, N, D, 0); });
    bench("embedding_sort", 8.0 * (double)N, 0, [&] { embedding_sort(scratch, ids, N, V, 0); });
    double bytes = (2.0 * (double)N + 8.0 * (double)used) * D;
    bench("embedding_backward", bytes, 0, [&] { embedding_backward(dt, partial, x, ids, scratch, N, D, V, 0); });
    bench(
        "naive forward", 2.0 * (double)(N + used) * D, 0, [&] { naive_forward(x, table, ids, N, D); }, 5);
    bench(
        "naive backward, a thread a column", bytes, 0, [&] { naive_backward_columns(dt, x, ids, N, D); }, 3);
    if (skew)
      bench(
          "naive backward, a thread an element", bytes, 0, [&] { naive_backward_elements(dt, x, ids, N, D, V); }, 1);
  }
  return lab_end();
}
