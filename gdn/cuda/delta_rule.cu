// delta_rule.cu: checks, workspaces and launches of the delta rule's kernels (delta_rule.h).
#include "delta_rule.h"
#include "delta_rule_channel.cuh"
#include "delta_rule_gradients.cuh"
#include "delta_rule_prepare.cuh"
#include "delta_rule_scan.cuh"

static int64_t shape_chunks(const DeltaRuleShape *s) {
  return ((int64_t)s->tokens + DELTA_RULE_CHUNK - 1) / DELTA_RULE_CHUNK;
}
// Decay, erase gate or both per key channel: the kernels of delta_rule_channel.cuh.
static bool shape_channel(const DeltaRuleShape *s) { return s->gate == GATE_CHANNEL || s->erase == ERASE_CHANNEL; }
static int64_t shape_units(const DeltaRuleShape *s) { return s->batch * shape_chunks(s) * s->value_heads; }
static int shape_key_part(const DeltaRuleShape *s) {
  if (s->key_part) return s->key_part;
  return s->key_dim % 128 == 0 ? 128 : 64;
}
static int shape_slice(const DeltaRuleShape *s) {
  if (s->value_slice) return s->value_slice;
  return s->value_dim % 128 == 0 ? 128 : 64;
}

int delta_rule_check(const DeltaRuleShape *s, Error *error) {
  if (s->batch < 1 || s->tokens < 1 || s->key_heads < 1 || s->value_heads < 1)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: batch %d, tokens %d, key heads %d, value heads %d: each must be at least 1", s->batch,
                     s->tokens, s->key_heads, s->value_heads);
  if (s->batch > 65535 || s->key_heads > 65535 || s->value_heads > 65535)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: batch %d, key heads %d, value heads %d: each may be at most 65535", s->batch,
                     s->key_heads, s->value_heads);
  if (s->value_heads % s->key_heads)
    return error_set(error, EXIT_CONFIG, "delta rule: %d value heads are not a multiple of %d key heads",
                     s->value_heads, s->key_heads);
  if (s->key_dim != 64 && s->key_dim != 128 && s->key_dim != 192 && s->key_dim != 256)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: key dimension %d is not covered on CUDA; allowed: 64, 128, 192, 256", s->key_dim);
  if (s->value_dim < 64 || s->value_dim > 512 || s->value_dim % 64)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: value dimension %d is not covered on CUDA; allowed: multiples of 64 up to 512",
                     s->value_dim);
  if (s->erase == ERASE_NONE && s->gate != GATE_SCALAR)
    return error_set(error, EXIT_CONFIG, "delta rule: without erasure the gate must be scalar");
  if (shape_channel(s) && s->key_dim > 128)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: a gate per key channel needs a key dimension of 64 or 128 on CUDA; found %d",
                     s->key_dim);
  if (s->erase == ERASE_CHANNEL && s->gate == GATE_SCALAR)
    return error_set(error, EXIT_CONFIG, "delta rule: an erase gate per key channel needs a decay per key channel");
  if ((s->erase_mean || s->write_mean) && s->erase != ERASE_CHANNEL)
    return error_set(error, EXIT_CONFIG, "delta rule: a mean of gates needs gates per channel");
  if (s->lower_bound != 0 && (s->gate != GATE_CHANNEL || !(s->lower_bound >= -5 && s->lower_bound < 0)))
    return error_set(
        error, EXIT_CONFIG,
        "delta rule: a lower bound of %g of the log decay: needed -5 to below 0, and a gate per key channel",
        s->lower_bound);
  if (s->value_slice && ((s->value_slice != 64 && s->value_slice != 128) || s->value_dim % s->value_slice))
    return error_set(error, EXIT_CONFIG, "delta rule: value slice %d must be 64 or 128 and divide %d", s->value_slice,
                     s->value_dim);
  if (s->key_part && ((s->key_part != 64 && s->key_part != 128) || s->key_dim % s->key_part))
    return error_set(error, EXIT_CONFIG, "delta rule: key part %d must be 64 or 128 and divide %d", s->key_part,
                     s->key_dim);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Workspaces

static char *carve(char **at, int64_t bytes) {
  char *p = *at;
  *at += (bytes + 255) / 256 * 256;
  return p;
}
static size_t carve_saved(DeltaRuleArgs *p, const DeltaRuleShape *s, char *start) {
  int64_t units = shape_units(s);
  char *at = start;
  p->A = (bf16 *)carve(&at, units * 64 * 64 * 2);
  p->P = (bf16 *)carve(&at, units * 64 * 64 * 2);
  p->vectors = (float *)carve(&at, units * VEC_COUNT * 4);
  p->U = (bf16 *)carve(&at, units * 64 * s->value_dim * 2);
  p->Ht = (bf16 *)carve(&at, units * s->value_dim * s->key_dim * 2);
  if (shape_channel(s)) p->operands = (bf16 *)carve(&at, units * 3 * 64 * s->key_dim * 2);
  return (size_t)(at - start);
}
static size_t carve_scratch(DeltaRuleArgs *p, const DeltaRuleShape *s, char *start) {
  int64_t units = shape_units(s);
  char *at = start;
  p->dX = (bf16 *)carve(&at, units * 64 * s->value_dim * 2);
  p->dHt = (bf16 *)carve(&at, units * s->value_dim * s->key_dim * 2);
  p->row_sums = (float *)carve(&at, s->key_dim / shape_key_part(s) * 2 * units * 64 * 4);
  p->gate_sums = (float *)carve(&at, (int64_t)2 * s->batch * s->value_heads * 4);
  if (shape_channel(s)) {
    p->raw = (float *)carve(&at, units * 3 * 64 * s->key_dim * 4);
    p->raw_score = (float *)carve(&at, units * 2 * 64 * 64 * 4);
    p->raw_state = (float *)carve(&at, units * s->key_dim * 4);
    p->bias_sums = (float *)carve(&at, units * (s->key_dim + 1) * 4);
    const int64_t groups = units / s->value_heads * s->key_heads;
    if (groups < units) {
      p->group_sums = (float *)carve(&at, groups * 4 * 64 * s->key_dim * 4);
      p->group_rows = (float *)carve(&at, groups * 64 * 4);
    }
  }
  return (size_t)(at - start);
}
size_t delta_rule_saved_bytes(const DeltaRuleShape *shape) {
  DeltaRuleArgs p;
  return carve_saved(&p, shape, NULL);
}
size_t delta_rule_scratch_bytes(const DeltaRuleShape *shape) {
  DeltaRuleArgs p;
  return carve_scratch(&p, shape, NULL);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arguments

static int check_rows(const char *name, const void *data, int64_t stride, int multiple, Error *error) {
  if (!data) return error_set(error, EXIT_INTERNAL, "delta rule: %s is NULL", name);
  if ((uintptr_t)data % (multiple * 2) || stride % multiple)
    return error_set(error, EXIT_INTERNAL,
                     "delta rule: %s needs %d-byte alignment and a stride that is a multiple of %d; stride %lld", name,
                     multiple * 2, multiple, (long long)stride);
  return 0;
}
static int64_t dense(int64_t stride, int64_t width) { return stride ? stride : width; }
static int64_t a_width(const DeltaRuleArgs *p) {
  return p->gate == GATE_CHANNEL ? (int64_t)p->gate_heads * p->K : p->HV;
}
static int64_t beta_width(const DeltaRuleArgs *p) { return p->erase == ERASE_CHANNEL ? (int64_t)p->H * p->K : p->HV; }
static int make_args(DeltaRuleArgs *p, const DeltaRuleInputs *in, const DeltaRuleShape *s, const void *saved,
                     Error *error) {
  int code = delta_rule_check(s, error);
  if (code) return code;
  memset(p, 0, sizeof *p);
  p->B = s->batch, p->T = s->tokens, p->chunks = (int)shape_chunks(s), p->H = s->key_heads, p->HV = s->value_heads;
  p->group = p->HV / p->H, p->K = s->key_dim, p->V = s->value_dim, p->gate = s->gate, p->erase = s->erase;
  p->scale = s->scale, p->beta_scale = s->beta_scale;
  p->channel = shape_channel(s), p->gate_heads = s->erase == ERASE_CHANNEL ? p->H : p->HV;
  p->erase_mean = s->erase_mean, p->write_mean = s->write_mean, p->lower_bound = s->lower_bound;
  p->write_columns = s->erase == ERASE_CHANNEL && !s->write_mean;
  p->general =
      p->channel && (p->group > 1 || p->erase_mean || p->write_mean || p->lower_bound != 0 || p->gate == GATE_NONE);
  p->q = in->q.data, p->q_stride = dense(in->q.stride, (int64_t)p->H * p->K);
  p->k = in->k.data, p->k_stride = dense(in->k.stride, (int64_t)p->H * p->K);
  p->v = in->v.data, p->v_stride = dense(in->v.stride, (int64_t)p->HV * p->V);
  p->a = in->a.data, p->a_stride = dense(in->a.stride, a_width(p));
  p->beta = in->beta.data, p->beta_stride = dense(in->beta.stride, beta_width(p));
  p->w = in->w.data, p->w_stride = dense(in->w.stride, (int64_t)p->HV * p->V);
  p->A_log = in->A_log, p->dt_bias = in->dt_bias, p->doc_start = in->doc_start;
  if ((code = check_rows("q", p->q, p->q_stride, 8, error))) return code;
  if ((code = check_rows("k", p->k, p->k_stride, 8, error))) return code;
  if ((code = check_rows("v", p->v, p->v_stride, 8, error))) return code;
  if (s->gate != GATE_NONE && (!p->a || !p->A_log || !p->dt_bias))
    return error_set(error, EXIT_INTERNAL, "delta rule: a gate needs a, A_log and dt_bias");
  if (s->erase != ERASE_NONE && !p->beta) return error_set(error, EXIT_INTERNAL, "delta rule: erasure needs beta");
  if (s->gate == GATE_CHANNEL && (code = check_rows("a", p->a, p->a_stride, 8, error))) return code;
  if (s->erase == ERASE_CHANNEL && ((code = check_rows("beta", p->beta, p->beta_stride, 8, error)) ||
                                    (code = check_rows("w", p->w, p->w_stride, 8, error))))
    return code;
  carve_saved(p, s, (char *)saved);
  return 0;
}

template <class Kernel, class... More>
static int launch(const char *name, Kernel kernel, dim3 grid, int threads, int smem, cudaStream_t stream, Error *error,
                  const DeltaRuleArgs &p, More... more) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (e == cudaSuccess) {
    kernel<<<grid, threads, smem, stream>>>(p, more...);
    e = cudaGetLastError();
  }
  if (e != cudaSuccess)
    return error_set(error, EXIT_INTERNAL, "%s: %s (K %d, V %d, %d KiB of shared memory)", name, cudaGetErrorString(e),
                     p.K, p.V, smem / 1024);
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

template <int K>
static int launch_prepare(const DeltaRuleArgs &p, cudaStream_t stream, Error *error) {
  return launch("delta_rule_prepare", delta_rule_prepare_kernel<K>, dim3(p.chunks, p.H, p.B), 128,
                PrepareLayout<K>::BYTES, stream, error, p);
}
template <int K, bool GENERAL>
static int launch_prepare_channel(const DeltaRuleArgs &p, cudaStream_t stream, Error *error) {
  return launch("delta_rule_prepare_channel", delta_rule_prepare_channel_kernel<K, GENERAL>, dim3(p.chunks, p.HV, p.B),
                256, PrepareChannelLayout<K>::BYTES, stream, error, p);
}
template <int K>
static int prepare_channel(const DeltaRuleArgs &p, cudaStream_t stream, Error *error) {
  return p.general ? launch_prepare_channel<K, true>(p, stream, error)
                   : launch_prepare_channel<K, false>(p, stream, error);
}
template <int K, int WARPS, int MODE>
static int launch_scan(const DeltaRuleArgs &p, bool reverse, cudaStream_t stream, Error *error) {
  typedef ScanLayout<K, WARPS, MODE> L;
  dim3 grid(p.V / L::SLICE, p.HV, p.B);
  if (reverse)
    return launch("delta_rule_reverse_scan", delta_rule_reverse_scan_kernel<K, WARPS, MODE>, grid, L::THREADS, L::BYTES,
                  stream, error, p);
  return launch("delta_rule_scan", delta_rule_scan_kernel<K, WARPS, MODE>, grid, L::THREADS, L::BYTES, stream, error,
                p);
}
template <int K, int MODE>
static int choose_slice(const DeltaRuleArgs &p, int slice, bool reverse, cudaStream_t stream, Error *error) {
  return slice == 128 ? launch_scan<K, 8, MODE>(p, reverse, stream, error)
                      : launch_scan<K, 4, MODE>(p, reverse, stream, error);
}
template <int K>
static int choose_scalar(const DeltaRuleArgs &p, int slice, bool reverse, cudaStream_t stream, Error *error) {
  return p.erase == ERASE_NONE ? choose_slice<K, SCAN_SSD>(p, slice, reverse, stream, error)
                               : choose_slice<K, SCAN_SCALAR>(p, slice, reverse, stream, error);
}
template <int K>
static int choose_channel(const DeltaRuleArgs &p, int slice, bool reverse, cudaStream_t stream, Error *error) {
  return p.write_columns ? choose_slice<K, SCAN_GDN2>(p, slice, reverse, stream, error)
                         : choose_slice<K, SCAN_KDA>(p, slice, reverse, stream, error);
}
static int choose_scan(const DeltaRuleArgs &p, int slice, bool reverse, cudaStream_t stream, Error *error) {
  if (p.channel)
    return p.K == 64 ? choose_channel<64>(p, slice, reverse, stream, error)
                     : choose_channel<128>(p, slice, reverse, stream, error);
  switch (p.K) {
    case 64:
      return choose_scalar<64>(p, slice, reverse, stream, error);
    case 128:
      return choose_scalar<128>(p, slice, reverse, stream, error);
    case 192:
      return choose_scalar<192>(p, slice, reverse, stream, error);
    default:
      return choose_scalar<256>(p, slice, reverse, stream, error);
  }
}
template <int PART, bool GROUPED, bool ERASE, bool CHANNEL = false>
static int launch_gradients(const DeltaRuleArgs &p, cudaStream_t stream, Error *error) {
  typedef GradientsLayout<PART, GROUPED> L;
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || sms < 1)
    return error_set(error, EXIT_INTERNAL,
                     "delta_rule_gradients: the device does not tell its number of multiprocessors");
  int64_t items = (int64_t)p.B * p.chunks * p.H * (p.K / PART);
  if (items > INT32_MAX)
    return error_set(error, EXIT_CONFIG,
                     "delta rule: %lld chunks and heads are more than one launch covers; use a smaller batch",
                     (long long)items);
  int64_t blocks = sms * (PART == 64 && !GROUPED ? 2 : 1);
  return launch("delta_rule_gradients", delta_rule_gradients_kernel<PART, GROUPED, ERASE, CHANNEL>,
                dim3((unsigned)(items < blocks ? items : blocks)), L::THREADS, L::BYTES, stream, error, p);
}

template <int K, int FORM>
static int launch_channel_gradients(const DeltaRuleArgs &p, int parts, cudaStream_t stream, Error *error) {
  return launch("delta_rule_channel_gradients", delta_rule_channel_gradients_kernel<K, FORM>, dim3(p.chunks, p.H, p.B),
                2 * K, ChannelGradientsLayout<K>::BYTES, stream, error, p, parts);
}
// What value heads share is summed over launches, a member of each group at a time.
template <int K>
static int channel_gradients(DeltaRuleArgs p, int parts, cudaStream_t stream, Error *error) {
  if (!p.general)
    return p.erase == ERASE_CHANNEL ? launch_channel_gradients<K, CHANNEL_GDN2>(p, parts, stream, error)
                                    : launch_channel_gradients<K, CHANNEL_KDA>(p, parts, stream, error);
  int code = 0;
  for (p.member = 0; p.member < p.group && !code; p.member++)
    code = launch_channel_gradients<K, CHANNEL_GENERAL>(p, parts, stream, error);
  return code;
}
template <int PART>
static int choose_gradients(const DeltaRuleArgs &p, cudaStream_t stream, Error *error) {
  if (p.channel) {  // nothing here is shared by value heads: each is an item
    DeltaRuleArgs heads = p;
    heads.H = p.HV, heads.group = 1;
    return launch_gradients<PART, false, true, true>(heads, stream, error);
  }
  if (p.erase == ERASE_NONE)
    return p.group > 1 ? launch_gradients<PART, true, false>(p, stream, error)
                       : launch_gradients<PART, false, false>(p, stream, error);
  return p.group > 1 ? launch_gradients<PART, true, true>(p, stream, error)
                     : launch_gradients<PART, false, true>(p, stream, error);
}

int delta_rule_prepare(void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream,
                       Error *error) {
  DeltaRuleArgs p;
  int code = make_args(&p, in, shape, saved, error);
  if (code) return code;
  if (p.channel) return p.K == 64 ? prepare_channel<64>(p, stream, error) : prepare_channel<128>(p, stream, error);
  switch (p.K) {
    case 64:
      return launch_prepare<64>(p, stream, error);
    case 128:
      return launch_prepare<128>(p, stream, error);
    case 192:
      return launch_prepare<192>(p, stream, error);
    default:
      return launch_prepare<256>(p, stream, error);
  }
}

int delta_rule_scan(BF16RowsOut o, void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape,
                    cudaStream_t stream, Error *error) {
  DeltaRuleArgs p;
  int code = make_args(&p, in, shape, saved, error);
  if (code) return code;
  p.o = o.data, p.o_stride = dense(o.stride, (int64_t)p.HV * p.V);
  if ((code = check_rows("o", p.o, p.o_stride, 8, error))) return code;
  return choose_scan(p, shape_slice(shape), false, stream, error);
}

int delta_rule_forward(BF16RowsOut o, void *saved, const DeltaRuleInputs *in, const DeltaRuleShape *shape,
                       cudaStream_t stream, Error *error) {
  int code = delta_rule_prepare(saved, in, shape, stream, error);
  return code ? code : delta_rule_scan(o, saved, in, shape, stream, error);
}

static int make_backward_args(DeltaRuleArgs *p, void *scratch, BF16Rows d_o, const void *saved,
                              const DeltaRuleInputs *in, const DeltaRuleShape *shape, Error *error) {
  int code = make_args(p, in, shape, saved, error);
  if (code) return code;
  carve_scratch(p, shape, (char *)scratch);
  p->d_o = d_o.data, p->d_o_stride = dense(d_o.stride, (int64_t)p->HV * p->V);
  return check_rows("d_o", p->d_o, p->d_o_stride, 8, error);
}

int delta_rule_reverse_scan(void *scratch, BF16Rows d_o, const void *saved, const DeltaRuleInputs *in,
                            const DeltaRuleShape *shape, cudaStream_t stream, Error *error) {
  DeltaRuleArgs p;
  int code = make_backward_args(&p, scratch, d_o, saved, in, shape, error);
  return code ? code : choose_scan(p, shape_slice(shape), true, stream, error);
}

int delta_rule_gradients(const DeltaRuleGradients *grad, void *scratch, BF16Rows d_o, const void *saved,
                         const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream, Error *error) {
  DeltaRuleArgs p;
  int code = make_backward_args(&p, scratch, d_o, saved, in, shape, error);
  if (code) return code;
  p.dq = grad->dq.data, p.dq_stride = dense(grad->dq.stride, (int64_t)p.H * p.K);
  p.dk = grad->dk.data, p.dk_stride = dense(grad->dk.stride, (int64_t)p.H * p.K);
  p.dv = grad->dv.data, p.dv_stride = dense(grad->dv.stride, (int64_t)p.HV * p.V);
  p.da = grad->da.data, p.da_stride = dense(grad->da.stride, a_width(&p));
  p.dbeta = grad->dbeta.data, p.dbeta_stride = dense(grad->dbeta.stride, beta_width(&p));
  p.dw = grad->dw.data, p.dw_stride = dense(grad->dw.stride, (int64_t)p.HV * p.V);
  p.dA_log = grad->dA_log, p.ddt_bias = grad->ddt_bias;
  if ((code = check_rows("dq", p.dq, p.dq_stride, 8, error))) return code;
  if ((code = check_rows("dk", p.dk, p.dk_stride, 8, error))) return code;
  if ((code = check_rows("dv", p.dv, p.dv_stride, 8, error))) return code;
  if (p.gate != GATE_NONE && (!p.da || !p.dA_log || !p.ddt_bias))
    return error_set(error, EXIT_INTERNAL, "delta rule: a gate needs da, dA_log and ddt_bias");
  if (p.erase != ERASE_NONE && !p.dbeta) return error_set(error, EXIT_INTERNAL, "delta rule: erasure needs dbeta");
  if (p.gate == GATE_CHANNEL && (code = check_rows("da", p.da, p.da_stride, 2, error))) return code;
  if (p.erase == ERASE_CHANNEL && ((code = check_rows("dbeta", p.dbeta, p.dbeta_stride, 2, error)) ||
                                   (code = check_rows("dw", p.dw, p.dw_stride, 8, error))))
    return code;

  const int part = shape_key_part(shape);
  code = part == 128 ? choose_gradients<128>(p, stream, error) : choose_gradients<64>(p, stream, error);
  if (code) return code;
  if (p.channel) {
    code = p.K == 64 ? channel_gradients<64>(p, p.K / part, stream, error)
                     : channel_gradients<128>(p, p.K / part, stream, error);
    if (code) return code;
    if (p.gate != GATE_NONE) delta_rule_channel_parameters_kernel<<<p.gate_heads, 1024, 0, stream>>>(p);
  } else {
    delta_rule_gates_kernel<<<dim3(p.HV, p.B), 256, 0, stream>>>(p, p.K / part);
  }
  if (p.gate == GATE_SCALAR) delta_rule_gate_parameters_kernel<<<(p.HV + 63) / 64, 64, 0, stream>>>(p);
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) return error_set(error, EXIT_INTERNAL, "delta_rule_gates: %s", cudaGetErrorString(e));
  return 0;
}

int delta_rule_backward(const DeltaRuleGradients *grad, void *scratch, BF16Rows d_o, const void *saved,
                        const DeltaRuleInputs *in, const DeltaRuleShape *shape, cudaStream_t stream, Error *error) {
  int code = delta_rule_reverse_scan(scratch, d_o, saved, in, shape, stream, error);
  return code ? code : delta_rule_gradients(grad, scratch, d_o, saved, in, shape, stream, error);
}
