// recurrence.h: the delta rule token by token in double, with its own back-propagation through time. It is the truth
// that every chunk form, on CPUs and on GPUs, is compared with, so it is written the slow way, one token after the
// other:
//
//   S' = Diag(exp g_t) S_{t-1}     u_t = w_t o v_t - S'^T (b_t o k_t)     S_t = S' + k_t u_t^T     o_t = s S_t^T q_t
//
// A token that starts a document finds S_{t-1} = 0. Sizes: B rows, T tokens a row, N = B T, H key heads, HV value heads
// (value head h reads key head h / (HV / H)), K key dim, V value dim. All arrays are dense, tokens first.
//
// defines: RecurrenceShape, RecurrenceTensors, recurrence_forward, recurrence_backward
#ifndef GDN_RECURRENCE_H
#define GDN_RECURRENCE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gdn/check.h"  // alloc_array, alloc_zeroed

typedef struct {
  int B, T, H, HV, K, V;
  int decay_heads, decay_width;  // g [N,decay_heads,decay_width]: heads 0 (no decay), H or HV; width 1 or K
  int erase_heads, erase_width;  // b [N,erase_heads,erase_width]: heads 0 (no erase), H or HV; width 1 or K
  int write_width;               // w [N,HV,write_width]: 1 or V
  double scale;                  // s
} RecurrenceShape;

typedef struct {         // inputs, or their gradients
  double *q, *k;         // [N,H,K]
  double *v;             // [N,HV,V]
  double *g, *b;         // see the shape; NULL with 0 heads
  double *w;             // [N,HV,write_width]
  double *h0;            // [B,HV,K,V] starting state
  const int32_t *start;  // [N] index within the row of the document's first token (negative: before the row), or NULL
} RecurrenceTensors;

static inline int64_t recurrence_gate_at(const RecurrenceShape *s, int heads, int width, int64_t n, int hv, int d) {
  int head = heads == s->HV ? hv : hv / (s->HV / s->H);
  return (n * heads + head) * width + (width == 1 ? 0 : d);
}

typedef struct {              // one head's tokens as the forward pass met them
  double *state;              // [T,K,V] S' of each token: after decay, before its write
  double *u;                  // [T,V]
  double *decay, *erase, *S;  // [K] exp g and b o k of the current token; [K,V] S
} RecurrenceTape;

static inline RecurrenceTape recurrence_tape(const RecurrenceShape *s) {
  int64_t KV = (int64_t)s->K * s->V;
  RecurrenceTape t;
  t.state = (double *)alloc_array(s->T * KV, sizeof(double), "recurrence");
  t.u = (double *)alloc_array((int64_t)s->T * s->V, sizeof(double), "recurrence");
  t.decay = (double *)alloc_array(s->K, sizeof(double), "recurrence");
  t.erase = (double *)alloc_array(s->K, sizeof(double), "recurrence");
  t.S = (double *)alloc_array(KV, sizeof(double), "recurrence");
  return t;
}
static inline void recurrence_tape_free(RecurrenceTape *t) {
  free(t->state), free(t->u), free(t->decay), free(t->erase), free(t->S);
}

static inline void recurrence_token_gates(RecurrenceTape *tape, const RecurrenceTensors *in, const RecurrenceShape *s,
                                          int64_t n, int hv) {
  const double *k = in->k + (n * s->H + hv / (s->HV / s->H)) * s->K;
  for (int d = 0; d < s->K; d++) {
    tape->decay[d] = s->decay_heads ? exp(in->g[recurrence_gate_at(s, s->decay_heads, s->decay_width, n, hv, d)]) : 1;
    tape->erase[d] = s->erase_heads ? in->b[recurrence_gate_at(s, s->erase_heads, s->erase_width, n, hv, d)] * k[d] : 0;
  }
}

// One value head of one row: o where not NULL, the tape where keep; tape->S is the last state.
static inline void recurrence_head(double *o, RecurrenceTape *tape, int keep, const RecurrenceTensors *in,
                                   const RecurrenceShape *s, int row, int hv) {
  int K = s->K, V = s->V;
  double *S = tape->S;
  memcpy(S, in->h0 + ((int64_t)row * s->HV + hv) * K * V, (size_t)K * V * sizeof(double));
  for (int t = 0; t < s->T; t++) {
    int64_t n = (int64_t)row * s->T + t, key = (n * s->H + hv / (s->HV / s->H)) * K;
    const double *k = in->k + key, *q = in->q + key, *v = in->v + (n * s->HV + hv) * V;
    double *u = tape->u + (keep ? (int64_t)t * V : 0);
    int starts = in->start && in->start[n] == t;
    recurrence_token_gates(tape, in, s, n, hv);
    for (int j = 0; j < V; j++) u[j] = in->w[s->write_width == 1 ? n * s->HV + hv : (n * s->HV + hv) * V + j] * v[j];
    for (int d = 0; d < K; d++)
      for (int j = 0; j < V; j++) {
        S[d * V + j] = starts ? 0 : S[d * V + j] * tape->decay[d];
        u[j] -= tape->erase[d] * S[d * V + j];
      }
    if (keep) memcpy(tape->state + (int64_t)t * K * V, S, (size_t)K * V * sizeof(double));
    double *ot = o ? o + (n * s->HV + hv) * V : NULL;
    for (int j = 0; ot && j < V; j++) ot[j] = 0;
    for (int d = 0; d < K; d++)
      for (int j = 0; j < V; j++) {
        S[d * V + j] += k[d] * u[j];
        if (ot) ot[j] += s->scale * q[d] * S[d * V + j];
      }
  }
}

// o [N,HV,V], h_end [B,HV,K,V] (NULL: not wanted).
static inline void recurrence_forward(double *o, double *h_end, const RecurrenceTensors *in, const RecurrenceShape *s) {
  RecurrenceTape tape = recurrence_tape(s);
  for (int b = 0; b < s->B; b++)
    for (int hv = 0; hv < s->HV; hv++) {
      recurrence_head(o, &tape, 0, in, s, b, hv);
      int64_t KV = (int64_t)s->K * s->V;
      if (h_end) memcpy(h_end + ((int64_t)b * s->HV + hv) * KV, tape.S, (size_t)KV * sizeof(double));
    }
  recurrence_tape_free(&tape);
}

// Gradients of sum(o o d_o) + sum(h_end o dh_end); all arrays of grad are overwritten (g, b: where the shape has them).
static inline void recurrence_backward(RecurrenceTensors *grad, const double *d_o, const double *dh_end,
                                       const RecurrenceTensors *in, const RecurrenceShape *s) {
  int K = s->K, V = s->V, group = s->HV / s->H;
  int64_t N = (int64_t)s->B * s->T;
  RecurrenceTape tape = recurrence_tape(s);
  double *du = (double *)alloc_array(V, sizeof(double), "recurrence");
  memset(grad->q, 0, (size_t)(N * s->H * K) * sizeof(double));
  memset(grad->k, 0, (size_t)(N * s->H * K) * sizeof(double));
  memset(grad->w, 0, (size_t)(N * s->HV * s->write_width) * sizeof(double));
  if (s->decay_heads) memset(grad->g, 0, (size_t)(N * s->decay_heads * s->decay_width) * sizeof(double));
  if (s->erase_heads) memset(grad->b, 0, (size_t)(N * s->erase_heads * s->erase_width) * sizeof(double));
  for (int row = 0; row < s->B; row++)
    for (int hv = 0; hv < s->HV; hv++) {
      int64_t head = ((int64_t)row * s->HV + hv) * K * V;
      double *dS = grad->h0 + head;
      recurrence_head(NULL, &tape, 1, in, s, row, hv);
      memcpy(dS, dh_end + head, (size_t)K * V * sizeof(double));
      for (int t = s->T - 1; t >= 0; t--) {
        int64_t n = (int64_t)row * s->T + t, key = (n * s->H + hv / group) * K, val = (n * s->HV + hv) * V;
        const double *k = in->k + key, *q = in->q + key, *g = d_o + val, *u = tape.u + (int64_t)t * V;
        const double *before = tape.state + (int64_t)t * K * V;  // S'
        int starts = in->start && in->start[n] == t;
        double u_dot_g = 0;
        recurrence_token_gates(&tape, in, s, n, hv);
        for (int j = 0; j < V; j++) du[j] = 0, u_dot_g += u[j] * g[j];
        for (int d = 0; d < K; d++) {  // read, o = s (S' + k u^T)^T q; write
          double read = 0, write = 0;
          for (int j = 0; j < V; j++) {
            read += before[d * V + j] * g[j];
            dS[d * V + j] += s->scale * q[d] * g[j];
            write += dS[d * V + j] * u[j];
            du[j] += dS[d * V + j] * k[d];
          }
          grad->q[key + d] += s->scale * (read + k[d] * u_dot_g);
          grad->k[key + d] += write;
        }
        for (int d = 0; d < K; d++) {  // erase, then decay
          double erased = 0, decayed = 0;
          for (int j = 0; j < V; j++) {
            erased -= before[d * V + j] * du[j];
            dS[d * V + j] -= tape.erase[d] * du[j];
            decayed += dS[d * V + j] * before[d * V + j];
            dS[d * V + j] = starts ? 0 : dS[d * V + j] * tape.decay[d];
          }
          if (s->decay_heads) grad->g[recurrence_gate_at(s, s->decay_heads, s->decay_width, n, hv, d)] += decayed;
          if (!s->erase_heads) continue;
          int64_t b = recurrence_gate_at(s, s->erase_heads, s->erase_width, n, hv, d);
          grad->b[b] += k[d] * erased;
          grad->k[key + d] += in->b[b] * erased;
        }
        for (int j = 0; j < V; j++) {
          int64_t w = s->write_width == 1 ? n * s->HV + hv : val + j;
          grad->v[val + j] = in->w[w] * du[j];
          grad->w[w] += in->v[val + j] * du[j];
        }
      }
    }
  free(du);
  recurrence_tape_free(&tape);
}

#endif  // GDN_RECURRENCE_H
