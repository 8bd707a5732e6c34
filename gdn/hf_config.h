// hf_config.h: Config to config.json of a Hugging Face folder and back.
//
// Models that fla has a class for are written in fla's keys (flash-linear-attention 0.6: gated_deltanet, kda,
// delta_net, transformer; hybrids through "attn"), so that from_pretrained builds them; all others get model_type
// "train_gdn" with the same tensor names, and "auto_map", by which from_pretrained(..., trust_remote_code=True) finds
// the classes of modeling_train_gdn.py, which a checkpoint has beside it (hf_modeling.h). Either way the file holds our
// complete Config under "train_gdn" (config_json.h), from which it is read back exactly. A config.json without that key
// is fla's own (fla_config.h).
//
// defines: HF_MODELING_FILE, hf_model_type, hf_needs_modeling, hf_config_make, hf_config_parse, hf_config_read
#ifndef GDN_HF_CONFIG_H
#define GDN_HF_CONFIG_H

#include "config_json.h"
#include "fla_config.h"
// ----------------------------------------------------------------------------
// Config to fla's keys

// The delta-rule mixer that a stack of one kind and attention is made of; MIX_COUNT: attention alone; -1: other stacks.
static inline int hf_base_mixer(const Config *c) {
  int base = MIX_COUNT;
  for (int i = 0; i < c->layers; i++) {
    Mixer m = config_layer_mixer(c, i);
    if (mixer_is_attention(m) || (int)m == base) continue;
    if (base != MIX_COUNT || (m != MIX_GDN && m != MIX_KDA && m != MIX_DELTANET)) return -1;
    base = m;
  }
  return base;
}

// fla's model_type, or "train_gdn" when fla has no class for this model.
static inline const char *hf_model_type(const Config *c) {
  int base = hf_base_mixer(c), swa = config_has_mixer(c, MIX_SWA), attn = config_has_mixer(c, MIX_ATTN);
  if (base < 0 || c->ff == 0) return "train_gdn";
  if ((swa || attn) && c->attn_head_dim * c->attn_heads != c->width) return "train_gdn";  // fla derives the head dim
  if (base == MIX_COUNT) return swa && attn ? "train_gdn" : "transformer";
  OutputGate gate = config_output_gate(c, (Mixer)base);
  if (!c->output_norm || c->qk_norm != NORM_L2 || c->l2_eps != 1e-6) return "train_gdn";
  if (base == MIX_DELTANET) return c->v_heads == c->heads && gate != OUTPUT_GATE_SIGMOID ? "delta_net" : "train_gdn";
  if (!c->decay) return "train_gdn";
  if (base == MIX_KDA) return gate == OUTPUT_GATE_SIGMOID ? "kda" : "train_gdn";
  return "gated_deltanet";
}

#define HF_MODELING_FILE "modeling_train_gdn.py"

// 1 when from_pretrained needs the classes of HF_MODELING_FILE.
static inline int hf_needs_modeling(const Config *c) { return !strcmp(hf_model_type(c), "train_gdn"); }

static inline json_t *json_id(int id) { return id >= 0 ? json_integer(id) : json_null(); }

// a / b such that fla, which computes (int)(b * ratio), gets a back.
static inline double hf_ratio(int a, int b) {
  double r = (double)a / b;
  while ((int)(b * r) < a) r = nextafter(r, 1e300);
  return r;
}

// One entry of "attn": the layers of one attention mixer.
static inline json_t *hf_attention(const Config *c, Mixer m) {
  json_t *layers = json_array();
  for (int i = 0; i < c->layers; i++)
    if (config_layer_mixer(c, i) == m) json_array_append_new(layers, json_integer(i));
  return json_pack("{s:o, s:i, s:i, s:b, s:o, s:f}", "layers", layers, "num_heads", c->attn_heads, "num_kv_heads",
                   c->attn_kv_heads, "qkv_bias", 0, "window_size", m == MIX_SWA ? json_integer(c->window) : json_null(),
                   "rope_theta", c->rope_theta);
}

// config.json as a new object. seq_len: max_position_embeddings; eos, pad: token ids, -1: null.
static inline json_t *hf_config_make(const Config *c, int seq_len, int eos, int pad) {
  static const struct {
    const char *type, *architecture;
  } classes[] = {{"gated_deltanet", "GatedDeltaNetForCausalLM"},
                 {"kda", "KDAForCausalLM"},
                 {"delta_net", "DeltaNetForCausalLM"},
                 {"transformer", "TransformerForCausalLM"},
                 {"train_gdn", "TrainGdnForCausalLM"}};
  const char *type = hf_model_type(c), *architecture = "";
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
    if (!strcmp(type, classes[i].type)) architecture = classes[i].architecture;
  int base = hf_base_mixer(c);
  json_t *j =
      json_pack("{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:b, s:b, s:f, s:i, s:o, s:o, s:o}",
                "architectures", architecture, "model_type", type, "torch_dtype", "float32", "vocab_size", c->vocab,
                "hidden_size", c->width, "num_hidden_layers", c->layers, "hidden_ratio", 4, "intermediate_size", c->ff,
                "hidden_act", "swish", "norm_eps", c->norm_eps, "tie_word_embeddings", c->tied, "use_cache",
                !hf_needs_modeling(c), "initializer_range", 0.02, "max_position_embeddings", seq_len, "bos_token_id",
                json_id(c->bos), "eos_token_id", json_id(eos), "pad_token_id", json_id(pad));
  json_t *ours = config_to_json(c);
  if (hf_needs_modeling(c)) {
    json_object_set_new(j, "auto_map",
                        json_pack("{s:s, s:s}", "AutoConfig", "modeling_train_gdn.TrainGdnConfig",
                                  "AutoModelForCausalLM", "modeling_train_gdn.TrainGdnForCausalLM"));
  } else {
    json_object_set_new(j, "fuse_norm", json_true());
    json_object_set_new(j, "fuse_swiglu", json_true());
    json_object_set_new(j, "fuse_cross_entropy", json_true());
    json_object_set_new(j, "use_l2warp", json_false());
    if (base != MIX_KDA) json_object_set_new(j, "fuse_linear_cross_entropy", json_false());
    if (base == MIX_COUNT) {  // transformer
      json_t *a = hf_attention(c, config_layer_mixer(c, 0));
      json_object_del(a, "layers");
      json_object_update_missing(j, a);
      json_decref(a);
      json_object_set_new(j, "qk_norm", json_false());
      json_object_set_new(j, "elementwise_affine", json_true());
    } else {
      OutputGate gate = config_output_gate(c, (Mixer)base);
      json_object_set_new(j, "attn_mode", json_string("chunk"));
      json_object_set_new(j, "num_heads", json_integer(c->heads));
      json_object_set_new(j, "use_short_conv", json_boolean(c->conv_size > 0));
      json_object_set_new(j, "conv_size", json_integer(c->conv_size ? c->conv_size : 4));
      json_object_set_new(j, "allow_neg_eigval", json_boolean(c->beta_max == 2));
      if (base != MIX_KDA) json_object_set_new(j, "use_gate", json_boolean(gate != OUTPUT_GATE_NONE));
      if (base == MIX_DELTANET) {
        json_object_set_new(j, "expand_k", json_real((double)c->heads * c->head_k / c->width));
        json_object_set_new(j, "expand_v", json_real((double)c->heads * c->head_v / c->width));
        json_object_set_new(j, "use_beta", json_true());
        json_object_set_new(j, "use_output_norm", json_true());
        json_object_set_new(j, "qk_norm", json_string("l2"));
        json_object_set_new(j, "qk_activation", json_string("silu"));
      } else {
        json_object_set_new(j, "head_dim", json_integer(c->head_k));
        json_object_set_new(j, "num_v_heads", c->v_heads != c->heads ? json_integer(c->v_heads) : json_null());
        json_object_set_new(j, "expand_v", json_real(hf_ratio(c->head_v, c->head_k)));
      }
      if (base == MIX_GDN)
        json_object_set_new(j, "output_gate_activation",
                            json_string(gate == OUTPUT_GATE_SIGMOID ? "sigmoid" : "swish"));
      if (base == MIX_KDA) {
        json_object_set_new(j, "safe_gate", json_false());
        json_object_set_new(j, "lower_bound", c->kda_lower_bound ? json_real(c->kda_lower_bound) : json_null());
      }
      int swa = config_has_mixer(c, MIX_SWA), attn = config_has_mixer(c, MIX_ATTN);
      json_t *a = swa && attn ? json_pack("[o, o]", hf_attention(c, MIX_SWA), hf_attention(c, MIX_ATTN))
                  : swa       ? hf_attention(c, MIX_SWA)
                  : attn      ? hf_attention(c, MIX_ATTN)
                              : json_null();
      json_object_set_new(j, "attn", a);
    }
  }
  if (!j || !ours || json_object_set_new(j, "train_gdn", ours)) fail(EXIT_MEMORY, "config.json: out of memory");
  return j;
}

// ----------------------------------------------------------------------------
// a folder

// Reads the text of a config.json: our Config as it was written, or fla's settings. Accepts any bytes without harm.
static inline int hf_config_parse(const char *text, size_t size, const char *path, Config *c, Error *err) {
  json_t *j = json_parse(text, size, path, EXIT_CHECKPOINT, err);
  if (!j) return EXIT_CHECKPOINT;
  const json_t *ours = json_object_get(j, "train_gdn");
  int rc = ours ? config_from_json(ours, c, path, err) : hf_config_from_fla(j, c, path, err);
  json_decref(j);
  Error why;
  if (!rc && config_check(c, &why)) rc = error_set(err, EXIT_CHECKPOINT, "%s: %.900s", path, why.text);
  return rc;
}

// The Config of the model in a folder (DIR/config.json). 0, or EXIT_CHECKPOINT with one line.
static inline int hf_config_read(const char *dir, Config *c, Error *err) {
  char path[PATH_SIZE];
  size_t size = 0;
  if (path_join(path, dir, "config.json", err)) return EXIT_CHECKPOINT;
  char *text = file_read(path, 16 << 20, &size, EXIT_CHECKPOINT, err);
  int rc = text ? hf_config_parse(text, size, path, c, err) : EXIT_CHECKPOINT;
  free(text);
  return rc;
}

#endif  // GDN_HF_CONFIG_H
