// sample.h: text from a model. The prompt goes through the model once, then one token a forward with the state carried
// along (ENGINE_CARRY): memory and time of a token do not grow with the text, but for attention's keys.
//
// defines: SampleJob, sample_prompt, sample_generate, sample_print
#ifndef GDN_SAMPLE_H
#define GDN_SAMPLE_H

#include "model.h"
#include "options.h"
#include "sampler.h"
#include "signals.h"
#include "tokenizer.h"
#include "watchdog.h"

#define SAMPLE_PIECE ((int64_t)256)  // tokens of the prompt in one forward

typedef struct {
  const Tokenizer *tokenizer;  // NULL: ids are shown
  int32_t *prompt;             // [n_prompt]
  int64_t n_prompt;
  int num_tokens;
  Sampler sampler;
} SampleJob;

static inline void sample_free(SampleJob *job) {
  free(job->prompt);
  memset(job, 0, sizeof *job);
}

// Token ids of --prompt: text when there is a tokenizer (its BOS first), else ids with blanks or commas between them;
// nothing is BOS. 0, EXIT_USAGE or EXIT_DATA.
static inline int sample_prompt(SampleJob *job, const Options *o, const Config *c, const Tokenizer *tokenizer,
                                Error *err) {
  memset(job, 0, sizeof *job);
  job->tokenizer = tokenizer;
  job->num_tokens = o->num_tokens;
  job->sampler.temperature = o->temperature, job->sampler.top_k = o->top_k, job->sampler.top_p = o->top_p;
  job->sampler.seed = (uint64_t)o->seed;
  if (tokenizer && (o->prompt[0] || tokenizer->bos >= 0)) {
    job->n_prompt = tokenizer_encode(tokenizer, o->prompt, strlen(o->prompt), tokenizer->bos >= 0, &job->prompt);
  } else {
    size_t room = strlen(o->prompt) / 2 + 2;
    job->prompt = (int32_t *)alloc_array((int64_t)room, sizeof(int32_t), "prompt");
    for (const char *s = o->prompt; *(s += strspn(s, " ,\t\n"));) {
      char *end;
      long long id = strtoll(s, &end, 10);
      if (end == s || (*end && !strchr(" ,\t\n", *end)))
        return error_set(err, EXIT_USAGE,
                         "--prompt '%.60s': without a tokenizer needed token ids such as '1 2 3'; name a --tokenizer",
                         o->prompt);
      job->prompt[job->n_prompt++] = id < 0 || id > INT32_MAX ? -1 : (int32_t)id;
      s = end;
    }
    if (!job->n_prompt && c->bos >= 0) job->prompt[job->n_prompt++] = c->bos;
  }
  if (!job->n_prompt) return error_set(err, EXIT_USAGE, "--prompt is empty and the model has no BOS: give a prompt");
  for (int64_t i = 0; i < job->n_prompt; i++)
    if (job->prompt[i] < 0 || job->prompt[i] >= c->vocab)
      return error_set(err, EXIT_USAGE, "--prompt: token %lld has the id %d, the model's vocabulary is 0 to %d",
                       (long long)i, job->prompt[i], c->vocab - 1);
  return 0;
}

// Engine settings that a job needs.
static inline void sample_settings(EngineSettings *s, int64_t n_prompt, int num_tokens) {
  int64_t piece = n_prompt < SAMPLE_PIECE ? n_prompt : SAMPLE_PIECE, all = n_prompt + num_tokens;
  if (s->max_rows < 1) s->max_rows = 1;
  if (s->max_len < piece) s->max_len = (int)piece;
  if (s->max_state < all) s->max_state = all > INT32_MAX ? INT32_MAX : (int)all;
}

// Generates sample number `number`: ids[num_tokens], *n of them (fewer when EOS or BOS comes, which is not put there).
// Each one is written to f as it comes, NULL: not. Returns 0, EXIT_STOPPED, or EXIT_DIVERGED when logits are not
// finite.
static inline int sample_generate(Model *m, const SampleJob *job, int64_t number, int32_t *ids, int64_t *n, FILE *f,
                                  StopWatch *stop, Error *err) {
  const Tokenizer *t = job->tokenizer;
  int V = m->config.vocab, code = 0, last = 0;
  int64_t piece = m->settings.max_len < SAMPLE_PIECE ? m->settings.max_len : SAMPLE_PIECE;
  float *logits = (float *)alloc_array(V, sizeof(float), "logits");
  SamplerEntry *scratch = (SamplerEntry *)alloc_array(V, sizeof *scratch, "sampling");
  TokenStream stream;
  size_t bytes;
  if (t) token_stream_begin(&stream, t);
  // the text goes on from the prompt's: a first word keeps the space before it
  for (int64_t i = 0; t && i < job->n_prompt; i++) token_stream_push(&stream, job->prompt[i], &bytes);
  *n = 0;
  m->api->reset_state(m->engine);
  for (int64_t at = 0; at < job->n_prompt && !code; at += last) {
    last = job->n_prompt - at < piece ? (int)(job->n_prompt - at) : piece;
    if (stop && stop_requested(stop)) code = EXIT_STOPPED;
    if (!code) m->api->forward(m->engine, job->prompt + at, NULL, 1, last, ENGINE_CARRY);
  }
  while (!code && *n < job->num_tokens) {
    m->api->logits(m->engine, last - 1, 1, logits);
    int32_t id = sampler_pick(&job->sampler, logits, V, scratch, (uint64_t)number, (uint64_t)(job->n_prompt + *n));
    if (id < 0) {
      code = error_set(err, EXIT_DIVERGED, "sampling: the logits after %lld tokens are not finite: the model is broken",
                       (long long)(job->n_prompt + *n));
      break;
    }
    if (t && (id == t->eos || id == t->bos)) break;
    ids[(*n)++] = id;
    if (f) {
      if (t) {
        const char *text = token_stream_push(&stream, id, &bytes);
        fwrite(text, 1, bytes, f);
      } else {
        fprintf(f, "%s%d", *n > 1 ? " " : "", id);
      }
      fflush(f);
    }
    watchdog_progress();
    if (stop && stop_requested(stop)) code = EXIT_STOPPED;
    if (*n < job->num_tokens && !code) {
      m->api->forward(m->engine, &id, NULL, 1, 1, ENGINE_CARRY);
      last = 1;
    }
  }
  if (t) {
    const char *text = token_stream_end(&stream, &bytes);
    if (f) fwrite(text, 1, bytes, f);
    token_stream_free(&stream);
  }
  m->api->reset_state(m->engine);
  free(logits);
  free(scratch);
  return code;
}

#endif  // GDN_SAMPLE_H
