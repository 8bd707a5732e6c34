// checkpoint.h: saving and loading checkpoints: what one is, and all of the headers that deal with it.
//
// A checkpoint is a folder OUT/step-00012000/:
//   config.json                the model, in the keys of Hugging Face and fla where these can say it (hf_config.h)
//   modeling_train_gdn.py      only where fla has no class for the model: from_pretrained's, which config.json names
//   model.safetensors          all parameters, fp32, Hugging Face names; padding and a tied head are not stored
//   trainer_state.safetensors  exp_avg.NAME and exp_avg_sq.NAME, fp32
//   tokenizer.*                a copy of the tokenizer file, when the run knows one
//   manifest.json              step, counters, data fingerprint, options, size and block hashes of every file above
// It is written under a temporary name, synced and renamed, so that it is complete or invisible; it is found by its
// manifest. Nothing in it depends on the number of ranks: tensors are stored whole, under global names.
//
// Values are fetched and delivered through callbacks in pieces of some MiB, by ranges of the arena (ParamTable), so no
// second copy of the model is needed to write or read one.
//
//   manifest.h           finding, verifying and reading what a checkpoint says
//   checkpoint_plan.h    its files and where in them each tensor lies
//   checkpoint_write.h   writing, by one process or by several ranks; what killed processes left
//   snapshot.h           a copy of weights and moments, taken behind the training
//   checkpoint_writer.h  saves behind the training
//   checkpoint_read.h    loading
//   init_from.h          loading a Hugging Face folder
//
// defines: nothing of its own
#ifndef GDN_CHECKPOINT_H
#define GDN_CHECKPOINT_H

#include "checkpoint_read.h"
#include "checkpoint_writer.h"
#include "init_from.h"

#endif  // GDN_CHECKPOINT_H
