// gpu_speed.h: how long a training step takes on GPUs like an H200, before it is run.
//
//   micro-batch  matrix products + kept activations, each of which is written and read some seven times + attention's
//                products + what channel-wise decay costs beside them; the rates are fitted to thirteen models of 0.4
//                to 1.45B parameters at 8 x 4096 tokens (dev/gpu_report.md), which they meet within 4%, Mamba2 within
//                7%; from one H200 to another the same run differs by 2%
//   update       gradient norm and AdamW on the own shard, zeroing all gradients
//   exchange     4 bytes a parameter of gradients and 2 of weights over each link; nothing is counted as hidden, for
//                the kernels that exchange take multiprocessors from those that compute. Within a machine fitted to two
//                H200s; between machines assumed: one adapter of 400 Gbit/s for each GPU
//
// Small micro-batches run slower than this says: below some 8,192 tokens a product no longer fills the GPU.
//
// Where the speed of the run is given instead, what a rank takes for its rows is what the exchange leaves of a step,
// and other numbers of GPUs follow from that.
//
// defines: StepTime, gpu_step_time, gpu_row_from_speed, gpu_scaling_print
#ifndef GDN_GPU_SPEED_H
#define GDN_GPU_SPEED_H

#include "config.h"
#include "engine.h"  // Recompute

static const double GPU_MATMUL_RATE = 689e12;       // FLOP/s of the matrix products
static const double GPU_KEPT_RATE = 624e9;          // bytes/s of activations that are kept for the backward pass
static const double GPU_ATTENTION_RATE = 647e12;    // FLOP/s of attention
static const double GPU_CHANNEL_SECONDS = 0.6e-11;  // a token and key channel of a value head with its own decay
static const double GPU_UPDATE_SECONDS = 9.8e-12;   // a parameter
static const double GPU_LINK_INSIDE = 250e9;        // bytes/s each way of a GPU within a machine
static const double GPU_LINK_BETWEEN = 45e9;        // and to another machine
enum { GPUS_A_MACHINE = 8 };

typedef struct {
  double micro, update, exchange, step;  // seconds; micro: of one micro-batch
  double tokens_per_s;                   // of all ranks
} StepTime;

// Over a link go, of two ranks, the halves that the other owns; of more, in a ring, nearly all.
static inline double gpu_exchange_time(double parameters, int ranks, int nodes) {
  return 6 * parameters * (ranks - 1) / ranks / (nodes > 1 ? GPU_LINK_BETWEEN : GPU_LINK_INSIDE);
}

// A step of `rows` rows of T tokens over `ranks` GPUs, in micro-batches of `batch` rows. matmul, attention: FLOPs of a
// token, forward and backward. kept: bytes that the layers of a micro-batch keep where nothing is computed again.
static inline StepTime gpu_step_time(const Config *c, const ParamTable *t, double matmul, double attention, double kept,
                                     double rows, int64_t T, int batch, int recompute, int ranks, int nodes) {
  StepTime s;
  double tokens = (double)batch * (double)T, channels = 0, P = (double)t->total;
  for (int i = 0; i < c->layers; i++)
    if (mixer_channel_decay(t->layers[i].mixer)) channels += (double)c->v_heads * c->head_k;
  s.micro = tokens * (matmul / GPU_MATMUL_RATE + attention / GPU_ATTENTION_RATE + channels * GPU_CHANNEL_SECONDS) +
            kept / GPU_KEPT_RATE;
  // measured on fla-gdn-1b: 503 to 511, 507 to 516 and 620 to 630 ms
  s.micro *= recompute == RECOMPUTE_ALL ? 1.25 : recompute == RECOMPUTE_NORMS ? 1.01 : 1;
  s.update = GPU_UPDATE_SECONDS * P * (0.1 + 0.9 / ranks);
  s.exchange = gpu_exchange_time(P, ranks, nodes);
  s.step = s.micro * rows / ((double)batch * ranks) + s.update + s.exchange;
  s.tokens_per_s = rows * (double)T / s.step;
  return s;
}

// The seconds that one rank takes for a row, exchange left out, where each of `ranks` does `speed` tokens/s together
// with the others. What a step has beside its micro-batches is in it. 0 or less: so fast that no time is left.
static inline double gpu_row_from_speed(double parameters, double speed, double rows, int64_t T, int ranks, int nodes) {
  return (double)T / speed - gpu_exchange_time(parameters, ranks, nodes) * ranks / rows;
}

// The same step on other numbers of GPUs, 8 in a machine: a table, and where more of them stop paying. per_row: seconds
// from gpu_row_from_speed, 0 to estimate them.
static inline void gpu_scaling_print(FILE *out, const Config *c, const ParamTable *t, double matmul, double attention,
                                     double kept, int64_t rows, int64_t T, int batch, int recompute, double per_row) {
  double one = 0;
  int pays = 1, most = 1;
  fprintf(out, "  %6s %14s %10s %12s %14s %11s\n", "GPUs", "rows on each", "step", "exchange", "tokens/s",
          "efficiency");
  for (int n = 1; n <= 256 && n <= rows; n *= 2) {
    if (rows % n) continue;
    int b = (int)(rows / n < batch ? rows / n : batch);
    while (rows / n % b) b--;
    double part = kept * b / batch;
    StepTime s = gpu_step_time(c, t, matmul, attention, part, (double)rows, T, b, recompute, n,
                               (n + GPUS_A_MACHINE - 1) / GPUS_A_MACHINE);
    if (per_row > 0) {
      s.step = per_row * (double)rows / n + s.exchange;
      s.tokens_per_s = (double)(rows * T) / s.step;
    }
    if (n == 1) one = s.tokens_per_s;
    double efficiency = one > 0 ? s.tokens_per_s / (n * one) : 1;
    char split[32];
    snprintf(split, sizeof split, "%lld x %d", (long long)(rows / n / b), b);
    fprintf(out, "  %6d %14s %8.2f s %9.0f ms %14.0f %10.0f%%\n", n, split, s.step, 1e3 * s.exchange, s.tokens_per_s,
            100 * efficiency);
    most = n;
    if (efficiency >= 0.75) pays = n;
  }
  if (pays < most)
    fprintf(out, "  beyond %d GPUs more than a quarter of their time is lost: use a larger --total-batch there\n",
            pays);
  else
    fprintf(out, "  a step has %lld rows: more GPUs need a larger --total-batch\n", (long long)rows);
}

#endif  // GDN_GPU_SPEED_H
