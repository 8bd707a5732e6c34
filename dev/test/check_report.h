// check_report.h: what every test program uses to count and to compare. A comparison is a relative error of a whole
// tensor, |x - ref| / |ref| by Euclidean norm, against a limit that the caller justifies; NaN and Inf fail.
//
// defines: check, check_close, check_skip, report_end, relative_error, checks_failed, checks_quiet
#ifndef GDN_CHECK_REPORT_H
#define GDN_CHECK_REPORT_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int checks_passed, checks_failed, checks_skipped;
static int checks_quiet;  // 1: count, do not print (a planted fault is expected to fail)

__attribute__((format(printf, 2, 3), unused)) static int check(int ok, const char *fmt, ...) {
  if (ok) {
    checks_passed++;
    return 1;
  }
  checks_failed++;
  if (!checks_quiet) {
    va_list args;
    va_start(args, fmt);
    printf("FAILED: ");
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
  }
  return 0;
}

__attribute__((unused)) static void check_skip(const char *why) {
  checks_skipped++;
  printf("SKIPPED: %s\n", why);
}

// Infinity when anything is not finite; the norm of x itself when ref is all zeros.
__attribute__((unused)) static double relative_error(const double *x, const double *ref, int64_t n) {
  double diff = 0, norm = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!isfinite(x[i]) || !isfinite(ref[i])) return INFINITY;
    diff += (x[i] - ref[i]) * (x[i] - ref[i]);
    norm += ref[i] * ref[i];
  }
  return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

__attribute__((unused)) static int check_close(const double *x, const double *ref, int64_t n, double limit,
                                               const char *what) {
  double e = relative_error(x, ref, n);
  return check(e <= limit, "%s: relative error %.3g, limit %.3g", what, e, limit);
}

// Prints the last line and returns the exit status.
__attribute__((unused)) static int report_end(void) {
  printf("%d passed, %d failed, %d skipped\n", checks_passed, checks_failed, checks_skipped);
  return checks_failed || !checks_passed ? 1 : 0;
}

#endif  // GDN_CHECK_REPORT_H
