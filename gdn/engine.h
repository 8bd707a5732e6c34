// engine.h: what an engine offers. Two programs train the same model: train_gdn.c on CPUs and train_gdn.cu on GPUs.
// Everything else (the training loop, checkpoints, tests) reaches the model only through this table of functions, so
// one loop serves both, and test_gdn can hold one engine against another, tensor by tensor.
//
// Sizes: B rows (sequences) and T tokens a row in one micro-batch; N = B T. The arena is the flat array of all
// parameters in the order of the parameter table (config.h); gradients and AdamW moments lie in arenas of the same
// layout. Values cross this interface as float, or as double for the tests.
//
// defines: Engine, EngineSettings, EngineTraffic, EngineApi, Arena, AdamW, Recompute, recompute_names, MemoryKind,
//          memory_names, ENGINE_CARRY, engine_cpu_f32, engine_cpu_f64, engine_cuda
#ifndef GDN_ENGINE_H
#define GDN_ENGINE_H

#include <stdint.h>
#include "check.h"
#include "config.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Engine Engine;

// What the backward pass computes again instead of finding it kept; the gradients have the same bits at every level.
typedef enum {
  RECOMPUTE_NONE,   // as little as costs nothing
  RECOMPUTE_NORMS,  // the outputs of the RMSNorms and of a mixer's output norm and gate
  RECOMPUTE_ALL,    // the whole layer, from the residual that enters it
  RECOMPUTE_COUNT
} Recompute;
static const char *const recompute_names[RECOMPUTE_COUNT] MAYBE_UNUSED = {"none", "norms", "all"};

// What device memory is for.
typedef enum {
  MEMORY_WEIGHTS,
  MEMORY_GRADIENTS,
  MEMORY_MOMENTS,
  MEMORY_RESIDUAL,     // kept by layers: residual stream and its norms
  MEMORY_PROJECTIONS,  // the mixer's input products, convolved and gated
  MEMORY_MIXER,        // the mixer's states and outputs
  MEMORY_MLP,
  MEMORY_SHARED,  // not kept: one set of buffers for all layers
  MEMORY_LOGITS,
  MEMORY_WORKSPACE,  // gradients of activations, partial sums, tokens
  MEMORY_KINDS
} MemoryKind;
static const char *const memory_names[MEMORY_KINDS] MAYBE_UNUSED = {
    "weights", "gradients", "moments", "residual", "projections", "mixers", "MLP", "shared", "logits", "workspace"};

typedef struct {
  int max_rows;                      // largest B
  int max_len;                       // largest T of one forward
  int batch_len;                     // tokens a row of the training batches where max_len is larger; 0: max_len
  int max_state;                     // longest carried sequence (attn keeps all its keys), 0: no carried state wanted
  int train;                         // 0: no gradients, no moments, nothing saved for a backward pass
  int64_t shard_first, shard_count;  // ZeRO-1: the range of the arena whose moments this rank holds; count 0: all of it
  int recompute;                     // Recompute
  const char *cache_dir;             // where an engine may keep tuned choices, NULL: nowhere
  int device;                        // GPU number, -1: the first, or that of the rank
  struct Comm *comm;                 // the ranks that train this model together (comm.h); NULL: one process
} EngineSettings;

typedef struct {                // what a step exchanged with the GPUs of other ranks
  double bytes;                 // sent by this one
  double reduce_ms, gather_ms;  // time in which the GPU waited for it and did nothing else
} EngineTraffic;

typedef enum {
  ARENA_PARAM,
  ARENA_GRAD,
  ARENA_M,
  ARENA_V
} Arena;  // M and V, on a device PARAM too: only elements of the own shard

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;  // gradients are multiplied by this first (clipping)
  int64_t step;       // 1 for the first update: bias correction
  int decay_all;      // 1: weight decay on every parameter (the papers' code), else where ParamSpec.decays says
} AdamW;

enum {
  ENGINE_CARRY = 1  // start from the carried state of the previous forward, and carry on from this one
};

typedef struct {
  const char *name;  // "cpu-f32", "cpu-f64", "cuda"
  int real_bytes;    // of arena elements: 4 or 8
  int on_device;     // 1: arena pointers are GPU memory

  // 0, or an exit code and one line: what this engine cannot do, found before anything is allocated.
  int (*check)(const Config *c, const EngineSettings *s, Error *err);
  // The table must outlive the engine. Parameters are undefined until written. NULL with err set when memory is short.
  Engine *(*create)(const Config *c, const ParamTable *t, const EngineSettings *s, Error *err);
  void (*destroy)(Engine *e);

  void (*read)(Engine *e, Arena a, int64_t first, int64_t count, float *dst);
  void (*write)(Engine *e, Arena a, int64_t first, int64_t count, const float *src);
  void (*read64)(Engine *e, Arena a, int64_t first, int64_t count, double *dst);
  void (*write64)(Engine *e, Arena a, int64_t first, int64_t count, const double *src);
  void *(*arena)(Engine *e, Arena a);  // the array itself, for collectives

  // Runs the model on tokens [B,T]. targets [B,T]: next tokens, -1 where none is counted; NULL: no loss wanted.
  // Returns the sum (not mean) of the losses, in nats, over the counted targets, accumulated in double.
  double (*forward)(Engine *e, const int32_t *tokens, const int32_t *targets, int B, int T, int flags);
  // Loss of each token [B*T] of the last forward (0 where not counted).
  void (*losses)(Engine *e, float *dst);
  // Logits [rows, vocab] of tokens first_row .. first_row+rows-1 (0 .. B*T-1) of the last forward.
  void (*logits)(Engine *e, int64_t first_row, int64_t rows, float *dst);
  // Adds to the gradients those of scale * (sum of losses) of the last forward.
  void (*backward)(Engine *e, double scale);
  void (*zero_grad)(Engine *e);
  // Sum of squared gradients over a range of the arena, in double, in a fixed order; not finite if any of them is not.
  double (*grad_sumsq)(Engine *e, int64_t first, int64_t count);
  // One AdamW step on the own shard (arXiv 1711.05101): decay first, then the step, moments with bias correction.
  void (*update)(Engine *e, const AdamW *a);
  // Forgets the carried state (recurrent state, conv inputs, keys and values).
  void (*reset_state)(Engine *e);
  // An activation of the last forward by name ("layers.3.attn.o", see the engine), as double; the number of its
  // elements, at most `max` written; -1: no such name.
  int64_t (*activation)(Engine *e, const char *name, double *dst, int64_t max);
  void (*synchronize)(Engine *e);
  int64_t (*memory_bytes)(const Engine *e);  // allocated by create
  // NULL, or: tells the scale that backward will be called with, before the forward (0: not known). An engine that
  // knows it computes the head's gradient while the logits exist, adding to the gradients in the forward already.
  void (*loss_scale)(Engine *e, double scale);

  // Several ranks of an engine on a device; NULL where the arenas lie in the host's memory (comm.h moves those). Each
  // is a collective: all ranks call it in the same order.
  // The next backward completes the gradients: they are added up over the ranks while it runs.
  void (*reduce_begin)(Engine *e);
  // From here on the own shard of the gradients is the sum over all ranks (also where no backward came in between).
  void (*reduce_end)(Engine *e);
  // Everyone gets the weights of all shards, while the next forward already runs.
  void (*gather)(Engine *e);
  void (*traffic)(Engine *e, EngineTraffic *t);  // since it was asked last
  // NULL: read may be called so. read for the thread of a save, while forward and backward run in another: ARENA_PARAM,
  // ARENA_M and ARENA_V of the own shard, one thread at a time. The caller has synchronized since the last update, and
  // makes none until it has read everything.
  void (*read_behind)(Engine *e, Arena a, int64_t first, int64_t count, float *dst);
  // NULL, or: the bytes that create would allocate on the device, by MemoryKind; needs neither the memory nor a device.
  void (*memory_plan)(const Config *c, const ParamTable *t, const EngineSettings *s, int64_t bytes[MEMORY_KINDS]);
} EngineApi;

extern const EngineApi engine_cpu_f32;  // train_gdn.c
extern const EngineApi engine_cpu_f64;  // the same file with real = double
extern const EngineApi
    engine_cpu_bf16;                 // the same file, rounding what the GPU keeps in bf16: the CUDA engine's yardstick
extern const EngineApi engine_cuda;  // train_gdn.cu

#ifdef __cplusplus
}
#endif

#endif  // GDN_ENGINE_H
