// matmul.cu: lab of gdn/cuda/matmul.cuh. Link with -lcublasLt. An argument names the table file of the benchmark.
#include "../../gdn/cuda/matmul.cuh"
#include "lab.cuh"

// Naive: one thread for each output element, which walks along a row of a and a row of b:
//     d[r][c] = sum over i of a[r][i] b[c][i]  (+ residual[r][c])
// Element i of row r lies at a[r * a.row + i * a.step], so that the one kernel is the forward product and both
// gradients (transposed operands have row 1). What makes it slow: two reads for each multiplication, the same numbers
// again by every thread of a row or column; in the forward product neighbouring threads read b a whole row apart, 32
// lines of memory at a time; and fp32 cores, of 67 TFLOP/s, where the tensor cores have 990. cuBLASLt
// (gdn/cuda/matmul.cuh) gives a block a tile of 128 or more rows and columns, whose operands come into shared memory
// once, the next ones while these are multiplied by tensor cores.
struct Operand {
  const bf16 *data;
  int64_t row, step;
};

template <typename T>
static __global__ void naive_matmul_kernel(T *d, int64_t ldd, Operand a, Operand b, const bf16 *residual, int64_t ldr,
                                           int64_t rows, int64_t columns, int64_t length) {
  int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, r = index / columns, c = index % columns;
  if (r >= rows) return;
  float sum = 0;
  for (int64_t i = 0; i < length; i++)
    sum += (float)a.data[r * a.row + i * a.step] * (float)b.data[c * b.row + i * b.step];
  if (residual) sum += (float)residual[r * ldr + c];
  d[r * ldd + c] = (T)sum;
}

template <typename T>
static void naive_matmul(T *d, int64_t ldd, Operand a, Operand b, const bf16 *residual, int64_t ldr, int64_t rows,
                         int64_t columns, int64_t length) {
  naive_matmul_kernel<<<grid_size(ceil_div(rows * columns, 256), "naive matmul"), 256>>>(d, ldd, a, b, residual, ldr,
                                                                                         rows, columns, length);
  KERNEL_CHECK("naive matmul");
}

// Products are checked against double at free strides. bf16 results: twice the rounding of the reference. fp32 results:
// 2e-6, fp32 sums of up to 300 products.
static void test(Matmul *mm, int64_t N, int64_t in, int64_t out) {
  char tag[96];
  snprintf(tag, sizeof tag, "matmul N=%lld in=%lld out=%lld ", (long long)N, (long long)in, (long long)out);
  std::string name = tag;
  int64_t sx = in + 8, sy = out + 24, sw = in + 16, sr = out + 8;
  Values x = random_bf16(N * in, 1), w = random_bf16(out * in, 0.1), dy = random_bf16(N * out, 1),
         r = random_bf16(N * out, 1);
  Values y((size_t)(N * out), 0.0), dx((size_t)(N * in), 0.0), dw((size_t)(out * in), 0.0);
  for (int64_t n = 0; n < N; n++)
    for (int64_t o = 0; o < out; o++)
      for (int64_t i = 0; i < in; i++) {
        y[n * out + o] += x[n * in + i] * w[o * in + i];
        dx[n * in + i] += dy[n * out + o] * w[o * in + i];
        dw[o * in + i] += dy[n * out + o] * x[n * in + i];
      }
  Values sum = y, twice = dw, old = random_bf16(N * in, 1), dx_added = dx;
  for (size_t i = 0; i < sum.size(); i++) sum[i] += r[i];
  for (size_t i = 0; i < dw.size(); i++) twice[i] += dw[i];
  for (size_t i = 0; i < old.size(); i++) dx_added[i] += old[i];
  Buffer<bf16> bx(strided(x, N, in, sx, 0, NAN)), bw(strided(w, out, in, sw, 0, NAN)),
      bdy(strided(dy, N, out, sy, 8, NAN));
  Buffer<bf16> br(strided(r, N, out, sr, 0, NAN)), by(N * sy), bdx(N * sx);
  Buffer<float> bdw(out * sw);
  matmul_forward(mm, by.data + 8, sy, bx.data, sx, bw.data, sw, NULL, 0, N, in, out, 0);
  check_bf16(name + "forward", by.get(N, out, sy, 8), y);
  check_true(name + "forward stays in its columns", by.untouched(N, out, sy, 8), "written outside");
  matmul_forward(mm, by.data + 8, sy, bx.data, sx, bw.data, sw, br.data, sr, N, in, out, 0);
  check_bf16(name + "forward + residual", by.get(N, out, sy, 8), sum);
  matmul_dgrad(mm, bdx.data, sx, bdy.data + 8, sy, bw.data, sw, N, in, out, 0, 0);
  check_bf16(name + "dgrad", bdx.get(N, in, sx), dx);
  check_true(name + "dgrad stays in its columns", bdx.untouched(N, in, sx), "written outside");
  bdx.set(strided(old, N, in, sx, 0, NAN));
  matmul_dgrad(mm, bdx.data, sx, bdy.data + 8, sy, bw.data, sw, N, in, out, 1, 0);
  // cuBLASLt rounds the product to bf16 before it adds in place: twice the error of rounding twice
  double error = 0, norm = 0;
  for (size_t i = 0; i < dx.size(); i++) {
    double e = round_bf16(round_bf16(dx[i]) + old[i]) - dx_added[i];
    error += e * e, norm += dx_added[i] * dx_added[i];
  }
  check_error(name + "dgrad added", bdx.get(N, in, sx), dx_added, 2 * std::sqrt(error / norm), 0x1p-7, 0x1p-7);
  matmul_wgrad(mm, bdw.data, sw, bdy.data + 8, sy, bx.data, sx, N, in, out, 0, 0);
  check_fp32(name + "wgrad", bdw.get(out, in, sw), dw, 2e-6);
  check_true(name + "wgrad stays in its columns", bdw.untouched(out, in, sw), "written outside");
  matmul_wgrad(mm, bdw.data, sw, bdy.data + 8, sy, bx.data, sx, N, in, out, 1, 0);
  check_fp32(name + "wgrad added", bdw.get(out, in, sw), twice, 2e-6);
  by.poison(), bdx.poison(), bdw.poison();
  naive_matmul(by.data + 8, sy, {bx.data, sx, 1}, {bw.data, sw, 1}, br.data, sr, N, out, in);
  check_bf16(name + "naive forward + residual", by.get(N, out, sy, 8), sum);
  naive_matmul(bdx.data, sx, {bdy.data + 8, sy, 1}, {bw.data, 1, sw}, (bf16 *)NULL, 0, N, in, out);
  check_bf16(name + "naive dgrad", bdx.get(N, in, sx), dx);
  naive_matmul(bdw.data, sw, {bdy.data + 8, 1, sy}, {bx.data, 1, sx}, (bf16 *)NULL, 0, out, in, N);
  check_fp32(name + "naive wgrad", bdw.get(out, in, sw), dw, 2e-6);
  check_true(name + "naive stays in its columns",
             by.untouched(N, out, sy, 8) && bdx.untouched(N, in, sx) && bdw.untouched(out, in, sw), "written outside");
}

static void test_file(const char *path) {
  const int64_t N = 128, D = 256;
  Buffer<bf16> x(random_bf16(N * D, 1)), w(random_bf16(D * D, 1)), y(N * D);
  remove(path);
  Matmul *mm = matmul_open(path, 0);
  matmul_forward(mm, y.data, D, x.data, D, w.data, D, NULL, 0, N, D, D, 0);
  matmul_wgrad(mm, (float *)device_alloc(D * D, 4, "dw"), D, y.data, D, x.data, D, N, D, D, 0, 0);
  check_true("matmul file: measured", mm->tuned == 2 && mm->entries == 2, "should have measured two problems");
  std::vector<bf16> first = y.raw();
  char *text = matmul_text(mm, 0);
  matmul_close(mm);
  mm = matmul_open(path, 0);
  matmul_forward(mm, y.data, D, x.data, D, w.data, D, NULL, 0, N, D, D, 0);
  check_true("matmul file: read again", mm->tuned == 0 && mm->entries == 2 && y.same_bits(first), "measured again");
  matmul_close(mm);
  mm = matmul_open(NULL, 0);
  check_true("matmul text: taken over", matmul_parse(mm, text, 1) == 0 && mm->entries == 2, "not parsed");
  matmul_close(mm);
  std::string good = text, bad[5] = {good, good, good, good, "nonsense"};
  bad[0][good.size() / 2] ^= 1, bad[1].resize(good.size() / 2), bad[2] += "more\n", bad[3][good.size() - 2] ^= 1;
  printf("five warnings about %s follow\n", path);
  for (const std::string &b : bad) {
    FILE *f = fopen(path, "w");
    fwrite(b.data(), 1, b.size(), f);
    fclose(f);
    mm = matmul_open(path, 0);
    bool ignored = mm->entries == 0;
    matmul_forward(mm, y.data, D, x.data, D, w.data, D, NULL, 0, N, D, D, 0);
    matmul_close(mm);
    mm = matmul_open(path, 0);
    check_true("matmul file: damaged", ignored && mm->entries == 1, "should be ignored and rewritten");
    matmul_close(mm);
  }
  free(text);
  remove(path);
}

// The user's cache: what one run measured the next one, in another folder, takes over, and writes into its own file.
static void test_cache(const char *dir, const char *path) {
  const int64_t N = 128, D = 256;
  Buffer<bf16> x(random_bf16(N * D, 1)), w(random_bf16(D * D, 1)), y(N * D);
  setenv("XDG_CACHE_HOME", dir, 1);
  std::string first, second;
  for (int run = 0; run < 3; run++) {  // the third has only the second's own file
    if (run == 2) setenv("XDG_CACHE_HOME", "/nonexistent", 1);
    if (run < 2) remove(path);
    Matmul *mm = matmul_open(path, 1);
    if (run == 0) remove(mm->cache), mm->entries = 0;
    std::string cache = mm->cache;
    matmul_forward(mm, y.data, D, x.data, D, w.data, D, NULL, 0, N, D, D, 0);
    check_true("matmul cache: measured once", mm->tuned == (run == 0), "measured in the wrong run");
    matmul_keep(mm);
    char *text = matmul_text(mm, 1);
    (run ? second : first) = text;
    free(text);
    matmul_close(mm);
    if (run == 1) remove(cache.c_str());
  }
  check_true("matmul cache: the same algorithm", first == second, "another one was used");
  remove(path);
}

int main(int argc, char **argv) {
  lab_begin("matmul");
  Matmul *mm = matmul_open(NULL, 0);
  const int rows[] = {1, 2, 3, 15, 16, 17, 63, 65, 127, 129, 289};
  for (int N : rows) test(mm, N, 64, 40);
  test(mm, 64, 256, 128);
  {  // the same bits, run after run, with the weight gradient's long sums
    int64_t N = 8192, in = 256, out = 264;
    bf16 *x = bench_bf16(N * in), *dy = bench_bf16(N * out);
    Buffer<float> dw(out * in);
    matmul_wgrad(mm, dw.data, in, dy, out, x, in, N, in, out, 0, 0);
    std::vector<float> first = dw.raw();
    bool same = true;
    for (int i = 0; i < 20; i++) {
      dw.poison();
      matmul_wgrad(mm, dw.data, in, dy, out, x, in, N, in, out, 0, 0);
      same = same && dw.same_bits(first);
    }
    check_true("matmul wgrad same bits in 20 runs", same, "runs differ");
    device_free(x), device_free(dy);
  }
  matmul_guess(mm, 1);  // without measuring, for shapes that come once
  int entries = mm->entries;
  for (int N : {5, 66, 131}) test(mm, N, 72, 48);
  matmul_guess(mm, 0);
  check_true("matmul guessed", mm->entries == entries, "guessed products were kept");
  matmul_close(mm);
  test_file("matmul-lab.txt");
  test_cache("/tmp", "matmul-lab.txt");
  if (!lab_timing(argc, argv)) return lab_end();
  int64_t N = 32768;
  printf("bench, %lld tokens: forward, dgrad, wgrad (added)\n", (long long)N);
  double total = 0, flops = 0;
  mm = matmul_open(NULL, 0);
  const struct {
    const char *name;
    int64_t in, out, stride;  // stride of the rows on the output side
    bool residual;
  } layers[] = {{"q|k|v|g 2048 -> 9216 (rows of 9344)", 2048, 9216, 9344, false},
                {"q|k|v|g|a|b 2048 -> 9344", 2048, 9344, 9344, false},
                {"o 3072 -> 2048", 3072, 2048, 2048, true},
                {"gate|up 2048 -> 11264", 2048, 11264, 11264, false},
                {"down 5632 -> 2048", 5632, 2048, 2048, true}};
  bf16 *x = bench_bf16(N * 5632), *y = bench_bf16(N * 11264), *w = bench_bf16((int64_t)11264 * 5632, 0.03f);
  bf16 *r = bench_bf16(N * 2048), *dx = bench_bf16(N * 5632);
  float *dw = bench_fp32((int64_t)11264 * 5632);
  for (auto &l : layers) {
    double f = 2.0 * (double)N * (double)l.in * (double)l.out;
    char name[96];
    auto forward = [&] {
      matmul_forward(mm, y, l.stride, x, l.in, w, l.in, l.residual ? r : NULL, l.stride, N, l.in, l.out, 0);
    };
    auto dgrad = [&] { matmul_dgrad(mm, dx, l.in, y, l.stride, w, l.in, N, l.in, l.out, 0, 0); };
    auto wgrad = [&] { matmul_wgrad(mm, dw, l.in, y, l.stride, x, l.in, N, l.in, l.out, 1, 0); };
    forward(), dgrad(), wgrad();  // measures
    lab_fill_kernel<<<(unsigned)ceil_div(N * l.stride, 256), 256>>>(y, N * l.stride, 1, 0, 0);
    snprintf(name, sizeof name, "%s wgrad", l.name);
    double t = bench(name, 0, f, wgrad, 5);
    snprintf(name, sizeof name, "%s dgrad", l.name);
    t += bench(name, 0, f, dgrad, 5);
    snprintf(name, sizeof name, "%s forward", l.name);
    t += bench(name, 0, f, forward, 5);
    if (l.out != 9216) total += t, flops += 3 * f;
  }
  printf("  a GDN layer: %.3f ms, %.1f TFLOP/s, %.1f%% of the floor; %d problems measured\n", total * 1e3,
         flops / total / 1e12, 100 * flops / total / LAB_TENSOR_RATE, mm->tuned);
  const int64_t few = 1024, in = 3072, out = 2048;  // the layer o, a thirty-second of the tokens
  const double f = 2.0 * (double)few * (double)in * (double)out;
  bench(
      "naive o wgrad, 1024 tokens only", 0, f,
      [&] {
        naive_matmul(dw, in, {y, 1, out}, {x, 1, in}, (bf16 *)NULL, 0, out, in, few);
      },
      3);
  bench(
      "naive o dgrad, 1024 tokens only", 0, f,
      [&] {
        naive_matmul(dx, in, {y, out, 1}, {w, 1, in}, (bf16 *)NULL, 0, few, in, out);
      },
      3);
  bench(
      "naive o forward, 1024 tokens only", 0, f,
      [&] {
        naive_matmul(y, out, {x, in, 1}, {w, in, 1}, r, out, few, out, in);
      },
      3);
  matmul_close(mm);
  return lab_end();
}
