// test_sampler.c: gdn/sampler.h. Greedy choice, ties, top-k, top-p, frequencies against probabilities, logits that are
// not finite, and that a draw depends on (seed, sample, position) alone.
// Build: cc -std=c11 -D_GNU_SOURCE -I. dev/test/test_sampler.c -lm
#include "../../gdn/sampler.h"
#include "check_report.h"

enum { V = 6, DRAWS = 60000 };

static SamplerEntry scratch[V];

static Sampler sampler(double temperature, int top_k, double top_p) {
  Sampler s = {temperature, top_k, top_p, 7};
  return s;
}

// Draws many times and compares with the probabilities [V]. Limit: 5 standard deviations of a binomial count.
static void test_frequencies(const char *name, Sampler s, const float *logits, const double *want) {
  int count[V] = {0};
  for (int i = 0; i < DRAWS; i++) {
    int id = sampler_pick(&s, logits, V, scratch, 3, (uint64_t)i);
    if (id < 0 || id >= V) {
      check(0, "%s: draw %d gave %d", name, i, id);
      return;
    }
    count[id]++;
  }
  for (int v = 0; v < V; v++) {
    double p = want[v], limit = 5 * sqrt(DRAWS * p * (1 - p));
    check(fabs(count[v] - DRAWS * p) <= limit, "%s: token %d came %d times of %d, needed %.1f +- %.1f", name, v,
          count[v], (int)DRAWS, DRAWS * p, limit);
  }
}

static void softmax(double *p, const float *logits, double temperature, int n_kept, const int *kept) {
  double sum = 0;
  for (int v = 0; v < V; v++) p[v] = 0;
  for (int i = 0; i < n_kept; i++) sum += p[kept[i]] = exp(logits[kept[i]] / temperature);
  for (int v = 0; v < V; v++) p[v] /= sum;
}

int main(void) {
  float logits[V] = {1.0f, 3.0f, 2.0f, -1.0f, 3.0f, 0.5f};
  int all[V] = {0, 1, 2, 3, 4, 5}, best3[3] = {1, 4, 2};
  double p[V];

  Sampler s = sampler(0, 0, 1);
  check(sampler_pick(&s, logits, V, scratch, 0, 0) == 1, "greedy: the first of two equal logits");
  s = sampler(5, 1, 1);
  check(sampler_pick(&s, logits, V, scratch, 0, 0) == 1, "top-k 1 is greedy");
  s = sampler(1, 0, 1e-9);
  for (int i = 0; i < 100; i++)
    check(sampler_pick(&s, logits, V, scratch, 0, (uint64_t)i) == 1, "tiny top-p is greedy");

  softmax(p, logits, 1, V, all);
  test_frequencies("all", sampler(1, 0, 1), logits, p);
  test_frequencies("top-k of all", sampler(1, V, 1), logits, p);
  softmax(p, logits, 0.5, V, all);
  test_frequencies("temperature 0.5", sampler(0.5, 0, 1), logits, p);
  softmax(p, logits, 3, V, all);
  test_frequencies("temperature 3", sampler(3, 0, 1), logits, p);
  softmax(p, logits, 1, 3, best3);
  test_frequencies("top-k 3", sampler(1, 3, 1), logits, p);
  // sorted masses: 0.367 0.367 0.135 0.050 ...: 0.8 needs three tokens, 0.7 two
  test_frequencies("top-p 0.8", sampler(1, 0, 0.8), logits, p);
  softmax(p, logits, 1, 2, best3);
  test_frequencies("top-p 0.7", sampler(1, 0, 0.7), logits, p);
  test_frequencies("top-k 3 then top-p 0.7", sampler(1, 3, 0.7), logits, p);  // of the mass that top-k left: 0.42 0.42

  float never[V] = {0, -INFINITY, 0, -INFINITY, -INFINITY, -INFINITY};
  double half[V] = {0.5, 0, 0.5, 0, 0, 0};
  test_frequencies("-inf never comes", sampler(1, 0, 1), never, half);
  test_frequencies("-inf never comes, sorted", sampler(1, 5, 0.999), never, half);

  float bad[V] = {0, 1, 2, NAN, 4, 5}, huge[V] = {0, INFINITY, 0, 0, 0, 0}, none[V];
  for (int v = 0; v < V; v++) none[v] = -INFINITY;
  for (double t = 0; t <= 1; t++) {
    s = sampler(t, 0, 1);
    check(sampler_pick(&s, bad, V, scratch, 0, 0) == -1, "NaN is reported");
    check(sampler_pick(&s, huge, V, scratch, 0, 0) == -1, "infinity is reported");
    check(sampler_pick(&s, none, V, scratch, 0, 0) == -1, "no possible token is reported");
  }
  float large[V] = {3e38f, -3e38f, 3e38f, 0, 0, 0};
  test_frequencies("large logits", sampler(1, 0, 1), large, half);

  int differs_seed = 0, differs_sample = 0, differs_position = 0;
  for (int i = 0; i < 200; i++) {
    Sampler a = sampler(1, 0, 1), b = sampler(1, 0, 1);
    b.seed = 8;
    int x = sampler_pick(&a, logits, V, scratch, 1, (uint64_t)i);
    check(x == sampler_pick(&a, logits, V, scratch, 1, (uint64_t)i), "the same draw twice");
    differs_seed += x != sampler_pick(&b, logits, V, scratch, 1, (uint64_t)i);
    differs_sample += x != sampler_pick(&a, logits, V, scratch, 2, (uint64_t)i);
    differs_position += x != sampler_pick(&a, logits, V, scratch, 1, (uint64_t)i + 1000);
  }
  check(differs_seed > 50 && differs_sample > 50 && differs_position > 50,
        "draws do not depend on seed, sample, position");
  return report_end();
}
