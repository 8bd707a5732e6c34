// parse.h: numbers, times and choices from text, strictly: the whole text or nothing, so that "3x", "0x10", "nan", " 1"
// and "1e999" are refused. Every function returns 1 and sets *out, or 0 when the text is not of its form.
//
// defines: parse_int64, parse_tokens, parse_real, parse_duration, choice_find, choice_name, real_print
#ifndef GDN_PARSE_H
#define GDN_PARSE_H

#include <float.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// [-]digits, nothing else. 0 when it is not that or does not fit.
static inline int parse_int64(const char *s, int64_t *out) {
  uint64_t v = 0;
  int negative = *s == '-';
  if (negative) s++;
  if (!*s) return 0;
  for (; *s; s++) {
    if (*s < '0' || *s > '9') return 0;
    if (v > (uint64_t)(INT64_MAX - (*s - '0')) / 10) return 0;
    v = v * 10 + (uint64_t)(*s - '0');
  }
  *out = negative ? -(int64_t)v : (int64_t)v;
  return 1;
}

// A whole number, or a decimal with suffix K M B T (powers of 1000) that comes to a whole number.
static inline int parse_tokens(const char *s, int64_t *out) {
  static const char suffixes[] = "KMBT";
  size_t n = strlen(s);
  if (!n) return 0;
  char last = s[n - 1], upper = (char)(last >= 'a' && last <= 'z' ? last - 'a' + 'A' : last);
  const char *at = strchr(suffixes, upper);
  if (!at) return parse_int64(s, out);
  int zeros = 3 * (int)(at - suffixes + 1), point = 0, digits = 0;
  uint64_t v = 0;
  for (size_t i = 0; i + 1 < n; i++) {
    if (s[i] == '.' && !point && digits) {
      point = 1;
    } else if (s[i] >= '0' && s[i] <= '9') {
      if (point && zeros-- == 0) return 0;
      if (v > (uint64_t)(INT64_MAX - 9) / 10) return 0;
      v = v * 10 + (uint64_t)(s[i] - '0');
      digits++;
    } else {
      return 0;
    }
  }
  if (!digits || s[n - 2] == '.') return 0;
  for (; zeros > 0; zeros--) {
    if (v > (uint64_t)INT64_MAX / 10) return 0;
    v *= 10;
  }
  *out = (int64_t)v;
  return 1;
}

// A decimal number such as 3e-4; no hex, no inf, no nan, no blanks.
static inline int parse_real(const char *s, double *out) {
  if (!*s || s[strspn(s, "0123456789+-.eE")]) return 0;
  char *end;
  double v = strtod(s, &end);
  if (end == s || *end || !(v >= -DBL_MAX && v <= DBL_MAX)) return 0;
  *out = v;
  return 1;
}

// 1d2h30m15s, any of them left out, in this order; 0 alone.
static inline int parse_duration(const char *s, double *out) {
  static const char units[] = "dhms";
  static const double seconds[] = {86400, 3600, 60, 1};
  int next = 0;
  double sum = 0;
  *out = 0;
  if (!strcmp(s, "0")) return 1;
  if (!*s) return 0;
  while (*s) {
    char number[32];
    size_t n = strspn(s, "0123456789.");
    if (!n || n >= sizeof number) return 0;
    memcpy(number, s, n), number[n] = 0;
    const char *at = s[n] ? strchr(units + next, s[n]) : NULL;
    double v;
    if (!at || !parse_real(number, &v)) return 0;
    sum += v * seconds[at - units];
    next = (int)(at - units) + 1;
    s += n + 1;
  }
  *out = sum;
  return 1;
}

// Index of a word in "a|b|c", -1 when it is none of them.
static inline int choice_find(const char *choices, const char *word) {
  size_t n = strlen(word);
  for (int i = 0; n; i++) {
    size_t len = strcspn(choices, "|");
    if (len == n && !strncmp(choices, word, n)) return i;
    if (!choices[len]) break;
    choices += len + 1;
  }
  return -1;
}

static inline void choice_name(char *text, size_t size, const char *choices, int index) {
  for (; index > 0; index--) choices += strcspn(choices, "|") + 1;
  snprintf(text, size, "%.*s", (int)strcspn(choices, "|"), choices);
}

// The fewest digits that read back as the same number; whole numbers without an exponent.
static inline void real_print(char *text, size_t size, double v) {
  if (v > -1e15 && v < 1e15 && v == (double)(int64_t)v) {
    snprintf(text, size, "%lld", (long long)v);
    return;
  }
  for (int digits = 1; digits <= 17; digits++) {
    snprintf(text, size, "%.*g", digits, v);
    if (strtod(text, NULL) == v) return;
  }
}

#endif  // GDN_PARSE_H
