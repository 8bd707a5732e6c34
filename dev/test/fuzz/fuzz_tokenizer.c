// fuzz_tokenizer.c: a SentencePiece model. What is accepted encodes and decodes a text.
#include "fuzz.h"
#include "gdn/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char text[] = "the cat  sat on <s> \xe2\x96\x81 a mat\n\x00\xff\xc3\xa9 1234 <0x41>";
  Tokenizer t;
  Error err = {0, ""};
  memset(&t, 0, sizeof t);
  int code = tokenizer_parse(&t, data, size, "tokenizer.model", &err);
  fuzz_check_error(code, &err);
  if (code) return 0;
  int32_t *ids = NULL;
  int64_t n = tokenizer_encode(&t, text, sizeof text - 1, t.bos >= 0, &ids);
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= t.vocab) abort();
  size_t bytes = 0;
  free(tokenizer_decode(&t, ids, n, &bytes));
  for (int32_t id = 0; id < t.vocab && id < 300; id++) tokenizer_piece(&t, id, &bytes);
  free(ids);
  tokenizer_free(&t);
  return 0;
}
