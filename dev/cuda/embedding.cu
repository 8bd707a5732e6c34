// embedding.cu: lab of gdn/cuda/embedding.cuh
#include "../../gdn/cuda/embedding.cuh"
#include "lab.cuh"

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
    bench("embedding_backward", (2.0 * (double)N + 8.0 * (double)used) * D, 0,
          [&] { embedding_backward(dt, partial, x, ids, scratch, N, D, V, 0); });
  }
  return lab_end();
}
