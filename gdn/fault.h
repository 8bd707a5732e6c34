// fault.h: faults that happen on purpose, for tests. GDN_FAULT in the environment names them: "nan@3,stop@7:1" puts a
// NaN into the gradient of step 3 (the first is 1) on every rank, and asks rank 1 alone for a stop in step 7. train.h
// says what there is.
//
// defines: fault_is_due
#ifndef GDN_FAULT_H
#define GDN_FAULT_H

#include "check.h"

// 1 when GDN_FAULT names this kind at this step for this rank.
static inline int fault_is_due(const char *kind, int64_t step) {
  const char *s = getenv("GDN_FAULT");
  char want[64];
  if (!s) return 0;
  snprintf(want, sizeof want, "%s@%lld", kind, (long long)step);
  size_t n = strlen(want);
  while (s && *s) {
    if (!strncmp(s, want, n) && (!s[n] || s[n] == ',')) return 1;
    if (!strncmp(s, want, n) && s[n] == ':' && atoi(s + n + 1) == program_rank) return 1;
    s = strchr(s, ',');
    if (s) s++;
  }
  return 0;
}

#endif  // GDN_FAULT_H
