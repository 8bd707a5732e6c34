// fuzz_config.c: config.json, our own and fla's. What is accepted is written again, and must be read as the same model.
#include "fuzz.h"
#include "gdn/hf_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Config c, again;
  Error err = {0, ""};
  char line[256];
  int code = hf_config_parse((const char *)data, size, "config.json", &c, &err);
  fuzz_check_error(code, &err);
  if (code) return 0;
  json_t *j = hf_config_make(&c, 64, -1, -1);
  char *text = json_dumps(j, JSON_INDENT(2));
  json_decref(j);
  if (!text || hf_config_parse(text, strlen(text), "config.json", &again, &err)) {
    fprintf(stderr, "%s\n%s\n", err.text, text ? text : "");
    abort();
  }
  if (config_diff(&c, &again, line, sizeof line)) {
    fprintf(stderr, "%s\n%s\n", line, text);
    abort();
  }
  free(text);
  return 0;
}
