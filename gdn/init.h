// init.h: the first values of every parameter, from counters: they depend on the seed and on the
// tensor's name alone, so any rank can fill any range of the arena and get the same bytes.
//
// --init paper (default): embedding N(0, 0.02); untied head and linears U(+-1/sqrt(fan_in)), GDN-2's mixer
// Xavier-uniform with gain 2^-2.5; MLP down, attention out and Mamba2 out divided by sqrt(2 L); conv and its bias
// U(+-0.5). --init fla: linears, conv, embedding, head N(0, 0.02), biases 0. Both: norms and D ones, A_log = log
// U(0,16) (GDN) or log U(1,16) (KDA, GDN-2, Mamba2), dt_bias = inverse softplus of dt, log-uniform in [1e-3, 1e-1].
//
// defines: InitRule, init_value, init_tensor
#ifndef GDN_INIT_H
#define GDN_INIT_H

#include "config.h"
#include "philox.h"

typedef enum { INIT_RULE_PAPER, INIT_RULE_FLA } InitRule;

// Element `index` of tensor s.
static inline double init_value(const ParamSpec *s, InitRule rule, int layers, uint64_t seed, uint64_t stream,
                                int64_t index) {
  double fan_in = s->fan_in, fan_out = (double)s->shape[0], bound;
  if (rule == INIT_RULE_FLA) switch (s->init) {
      case INIT_EMBEDDING:
      case INIT_LINEAR:
      case INIT_LINEAR_SCALED:
      case INIT_XAVIER:
      case INIT_CONV:
        return 0.02 * random_normal(seed, stream, (uint64_t)index);
      case INIT_CONV_BIAS:
        return 0;
      default:
        break;
    }
  double u = random_uniform(seed, stream, (uint64_t)index);
  switch (s->init) {
    case INIT_EMBEDDING:
      return 0.02 * random_normal(seed, stream, (uint64_t)index);
    case INIT_LINEAR:
      bound = 1 / sqrt(fan_in);
      break;
    case INIT_LINEAR_SCALED:
      bound = 1 / sqrt(fan_in) / sqrt(2.0 * layers);
      break;
    case INIT_XAVIER:
      bound = 0.17677669529663687 * sqrt(6 / (fan_in + fan_out));
      break;
    case INIT_CONV:
    case INIT_CONV_BIAS:
      bound = 0.5;
      break;
    case INIT_ONES:
      return 1;
    case INIT_A_LOG_0_16:
      return log(16 * u);
    case INIT_A_LOG_1_16:
      return log(1 + 15 * u);
    case INIT_DT_BIAS: {
      double dt = exp(log(1e-3) + u * (log(1e-1) - log(1e-3)));
      if (dt < 1e-4) dt = 1e-4;
      return dt + log(-expm1(-dt));
    }
    default:
      return 0;  // INIT_ZEROS, INIT_PAD
  }
  return bound * (2 * u - 1);
}

// Fills dst with elements [first, first + count) of tensor s.
static inline void init_tensor(float *dst, const ParamSpec *s, InitRule rule, int layers, uint64_t seed, int64_t first,
                               int64_t count) {
  uint64_t stream = hash_name(s->name);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i++) dst[i] = (float)init_value(s, rule, layers, seed, stream, first + i);
}

#endif  // GDN_INIT_H
