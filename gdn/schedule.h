// schedule.h: the learning rate of every step.
//
// Linear warm-up over the first `warmup` steps (step 0 already has lr / warmup, the last of them lr), then one of
//   cosine    from lr to min_lr along half a cosine; the last step has min_lr (Loshchilov and Hutter 2017, 1608.03983)
//   wsd       warm-up, stable, decay: lr, then a straight line over the last `decay_fraction` of the run; the last step
//             has min_lr (Hu et al. 2024, MiniCPM, 2404.06395)
//   constant  lr
// A function of the step alone: nothing to save, and a resumed run has the same rates.
//
// defines: Schedule, ScheduleConfig, schedule_names, schedule_lr
#ifndef GDN_SCHEDULE_H
#define GDN_SCHEDULE_H

#include <math.h>
#include <stdint.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_CONSTANT } Schedule;

#define schedule_names "cosine|wsd|constant"

typedef struct {
  Schedule kind;
  double lr, min_lr;
  int64_t steps, warmup;  // of the whole run; of the warm-up
  double decay_fraction;  // wsd: of steps
} ScheduleConfig;

// Learning rate of the update with number `step`, counted from 0. From `steps` on: the last value.
static inline double schedule_lr(const ScheduleConfig *s, int64_t step) {
  if (step < 0) step = 0;
  if (step < s->warmup) return s->lr * (double)(step + 1) / (double)s->warmup;
  int64_t first = s->warmup;  // first step of the decay, still lr
  if (s->kind == SCHEDULE_CONSTANT) return s->lr;
  if (s->kind == SCHEDULE_WSD) {
    first = s->steps - (int64_t)llround(s->decay_fraction * (double)s->steps) - 1;
    if (first < s->warmup) first = s->warmup;
    if (step <= first && step < s->steps - 1) return s->lr;
    if (s->decay_fraction <= 0) return s->lr;
  }
  if (step >= s->steps - 1) return s->steps - 1 > first || s->kind == SCHEDULE_COSINE ? s->min_lr : s->lr;
  double x = (double)(step - first) / (double)(s->steps - 1 - first);
  if (s->kind == SCHEDULE_WSD) return s->lr + (s->min_lr - s->lr) * x;
  return s->min_lr + 0.5 * (s->lr - s->min_lr) * (1 + cos(3.14159265358979323846 * x));
}

#endif  // GDN_SCHEDULE_H
