// sliding_attention.cu: checks and launches of sliding_attention.h.
//
// defines: the functions of sliding_attention.h
#include "sliding_attention.h"
#include "sliding_attention_sm80.cuh"
#include "sliding_attention_sm90_backward.cuh"

using namespace attention;

// ---- checks ---------------------------------------------------------------------------------------------------

#define ATTENTION_CUDA(call)                                                                                  \
  do {                                                                                                        \
    cudaError_t status_ = (call);                                                                             \
    if (status_ != cudaSuccess) fail(EXIT_INTERNAL, "attention: %s: %s", #call, cudaGetErrorString(status_)); \
  } while (0)

static int device_capability(void) {  // 10 * major + minor of the current device
  int device, major, minor;
  ATTENTION_CUDA(cudaGetDevice(&device));
  ATTENTION_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  ATTENTION_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

static bool takes_wgmma(const AttentionSize *n) {
  return n->path == ATTENTION_WGMMA || (n->path == ATTENTION_AUTO && device_capability() == 90);
}

int sliding_attention_check(const AttentionSize *n, Error *err) {
  if (n->B < 1 || n->T < 1 || n->Hq < 1 || n->Hkv < 1)
    return error_set(err, EXIT_CONFIG,
                     "attention: batch %d, tokens %d, heads %d, kv heads %d: each must be at least 1 (--batch, "
                     "--seq-len, --heads)",
                     n->B, n->T, n->Hq, n->Hkv);
  if (n->D != 64 && n->D != 128)
    return error_set(err, EXIT_CONFIG, "attention: head dim %d on CUDA; 64 and 128 are built (--heads)", n->D);
  if (n->Hq % n->Hkv)
    return error_set(err, EXIT_CONFIG, "attention: %d query heads are not a multiple of %d kv heads (--heads)", n->Hq,
                     n->Hkv);
  if (n->qkv_stride % 8 || n->dqkv_stride % 8 || n->qkv_stride < (int64_t)n->D * n->Hkv ||
      n->dqkv_stride < (int64_t)n->D * n->Hkv)
    return error_set(err, EXIT_INTERNAL,
                     "attention: token strides %lld and %lld must be multiples of 8 and hold %d kv "
                     "heads of %d",
                     (long long)n->qkv_stride, (long long)n->dqkv_stride, n->Hkv, n->D);
  if ((int64_t)n->B * n->Hq * ((n->T + 63) / 64) > 2147483647)
    return error_set(err, EXIT_CONFIG,
                     "attention: batch %d x heads %d x tokens %d need more than 2^31 tiles; use a "
                     "smaller --batch",
                     n->B, n->Hq, n->T);
  if (n->path != ATTENTION_WGMMA) return 0;  // nothing that needs a GPU to say: it may be a forecast without one
  const int capability = device_capability();
  if (capability != 90)
    return error_set(err, EXIT_CONFIG, "attention: the wgmma kernels need compute capability 9.0, the GPU has %d.%d",
                     capability / 10, capability % 10);
  return 0;
}

static AttentionArgs arguments_of(const AttentionSize *n, const int32_t *doc_start) {
  Error err = {};
  if (sliding_attention_check(n, &err)) fail_error(&err);
  AttentionArgs a = {};
  a.B = n->B, a.T = n->T, a.Hq = n->Hq, a.Hkv = n->Hkv;
  a.W = n->window > 0 && n->window < n->T ? n->window : n->T;
  a.T_pad = (n->T + 127) / 128 * 128;
  // Heads whose K and V (or Q and dO) stay in about a quarter of the L2 cache together (2 to 15 heads of T = 4096, D =
  // 128 are alike on an H200, 30 are 4% slower, 128 are 25% slower).
  int device, l2;
  ATTENTION_CUDA(cudaGetDevice(&device));
  ATTENTION_CUDA(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
  const int64_t fit = l2 / 4 / ((int64_t)n->T * n->D * 4);
  a.section = (int)(fit < 1 ? 1 : fit > (int64_t)n->B * n->Hq ? (int64_t)n->B * n->Hq : fit);
  a.qkv_stride = n->qkv_stride, a.dqkv_stride = n->dqkv_stride;
  a.scale = (float)(1.0 / sqrt((double)n->D));
  a.scale_log2 = (float)(1.4426950408889634 / sqrt((double)n->D));
  a.doc_start = doc_start;
  return a;
}

// Rows are read 16 bytes at a time.
static void require_aligned(const void *p, const char *what) {
  if ((uintptr_t)p % 16) fail(EXIT_INTERNAL, "attention: %s at %p must be aligned to 16 bytes", what, p);
}

static unsigned grid_of(const AttentionSize *n, int rows, int heads) {
  return (unsigned)((int64_t)n->B * heads * ((n->T + rows - 1) / rows));
}

// The wgmma kernels: one CTA a multiprocessor.
static unsigned grid_of_queue(const AttentionSize *n, int heads) {
  const unsigned tiles = grid_of(n, SM90_ROWS, heads);
  int device, processors;
  ATTENTION_CUDA(cudaGetDevice(&device));
  ATTENTION_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return tiles < (unsigned)processors ? tiles : (unsigned)processors;
}

// scratch: 4 counters, lse2 [B,Hq,T_pad], delta [B,Hq,T_pad].
static int *counters_of(float *scratch) { return (int *)scratch; }
static float *lse2_of(float *scratch) { return scratch + 4; }
static float *delta_of(float *scratch, const AttentionArgs &a) {
  return lse2_of(scratch) + (int64_t)a.B * a.Hq * a.T_pad;
}

template <typename Kernel>
static void allow_shared(Kernel kernel, int bytes) {
  ATTENTION_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// ---- tensor maps ----------------------------------------------------------------------------------------------

// [B][T][heads][D] with `stride` elements a token, a box of `rows` tokens by 64 columns, 128-byte swizzle.
static CUtensorMap tensor_map(const bf16 *p, const AttentionSize *n, int heads, int64_t stride, int rows) {
  typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                             const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = NULL;
  if (!encode) {
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    ATTENTION_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || !entry)
      fail(EXIT_CONFIG, "attention: the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is needed");
    encode = (Encode)entry;
  }
  CUtensorMap map;
  const cuuint64_t dims[4] = {(cuuint64_t)n->D, (cuuint64_t)heads, (cuuint64_t)n->T, (cuuint64_t)n->B};
  const cuuint64_t strides[3] = {(cuuint64_t)n->D * 2, (cuuint64_t)stride * 2, (cuuint64_t)stride * n->T * 2};
  const cuuint32_t box[4] = {64, 1, (cuuint32_t)rows, 1}, step[4] = {1, 1, 1, 1};
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)p, dims, strides, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(EXIT_INTERNAL, "attention: cuTensorMapEncodeTiled refuses %p, %d heads of %d, stride %lld (error %d)",
         (void *)p, heads, n->D, (long long)stride, (int)status);
  return map;
}

// ---- launches -------------------------------------------------------------------------------------------------

void rope_table_fill(float2 *table, int T, int D, double base, cudaStream_t stream) {
  const int64_t n = (int64_t)T * (D / 2), grid = (n + 255) / 256;
  rope_table_kernel<<<(unsigned)(grid < 65536 ? grid : 65536), 256, 0, stream>>>(table, T, D / 2, base);
  ATTENTION_CUDA(cudaGetLastError());
}

template <int D>
static void rope_launch(bf16 *q, bf16 *k, const float2 *table, const AttentionArgs &a, cudaStream_t stream) {
  const dim3 block(D / 16, 4, 256 / (D / 16 * 4));
  const int64_t tokens = (int64_t)a.B * a.T;
  rope_kernel<D><<<(unsigned)((tokens + block.z - 1) / block.z), block, 0, stream>>>(q, k, table, a);
  ATTENTION_CUDA(cudaGetLastError());
}

void rope_forward(bf16 *q, bf16 *k, const float2 *table, const AttentionSize *n, cudaStream_t stream) {
  const AttentionArgs a = arguments_of(n, NULL);
  require_aligned(q, "q"), require_aligned(k, "k"), require_aligned(table, "the RoPE table");
  n->D == 64 ? rope_launch<64>(q, k, table, a, stream) : rope_launch<128>(q, k, table, a, stream);
}

template <int D>
static void forward_launch(bf16 *o, float *lse, float *scratch, const bf16 *q, const bf16 *k, const bf16 *v,
                           const AttentionSize *n, const AttentionArgs &a, cudaStream_t stream) {
  if (takes_wgmma(n)) {
    constexpr int bytes = forward_sm90_bytes<D>();
    allow_shared(attention_forward_sm90_kernel<D>, bytes);
    ATTENTION_CUDA(cudaMemsetAsync(counters_of(scratch), 0, 4, stream));
    attention_forward_sm90_kernel<D><<<grid_of_queue(n, a.Hq), SM90_THREADS, bytes, stream>>>(
        o, lse, counters_of(scratch), tensor_map(q, n, a.Hq, a.qkv_stride, SM90_ROWS),
        tensor_map(k, n, a.Hkv, a.qkv_stride, SM90_ROWS), tensor_map(v, n, a.Hkv, a.qkv_stride, SM90_ROWS), a);
  } else {
    constexpr int bytes = 5 * WARP_TILE * D * 2;
    allow_shared(attention_forward_kernel<D>, bytes);
    attention_forward_kernel<D><<<grid_of(n, WARP_TILE, a.Hq), 128, bytes, stream>>>(o, lse, q, k, v, a);
  }
  ATTENTION_CUDA(cudaGetLastError());
}

void sliding_attention_forward(bf16 *o, float *lse, float *scratch, const bf16 *q, const bf16 *k, const bf16 *v,
                               const int32_t *doc_start, const AttentionSize *n, cudaStream_t stream) {
  const AttentionArgs a = arguments_of(n, doc_start);
  require_aligned(o, "o"), require_aligned(scratch, "scratch");
  require_aligned(q, "q"), require_aligned(k, "k"), require_aligned(v, "v");
  n->D == 64 ? forward_launch<64>(o, lse, scratch, q, k, v, n, a, stream)
             : forward_launch<128>(o, lse, scratch, q, k, v, n, a, stream);
}

int64_t sliding_attention_scratch_floats(const AttentionSize *n) {
  return 4 + 2 * (int64_t)n->B * n->Hq * ((n->T + 127) / 128 * 128);
}

template <int D>
static void delta_launch(float *scratch, const bf16 *dout, const bf16 *o, const float *lse, const AttentionArgs &a,
                         cudaStream_t stream) {
  const int64_t threads = (int64_t)a.B * a.Hq * a.T_pad * (D / 8);
  attention_delta_kernel<D><<<(unsigned)((threads + 255) / 256), 256, 0, stream>>>(
      delta_of(scratch, a), lse2_of(scratch), counters_of(scratch), dout, o, lse, a);
  ATTENTION_CUDA(cudaGetLastError());
}

template <int D>
static void backward_kv_launch(bf16 *dk, bf16 *dv, float *scratch, const bf16 *dout, const bf16 *q, const bf16 *k,
                               const bf16 *v, const float2 *table, const AttentionSize *n, const AttentionArgs &a,
                               cudaStream_t stream) {
  if (takes_wgmma(n)) {
    constexpr int bytes = backward_kv_sm90_bytes<D>();
    allow_shared(attention_backward_kv_sm90_kernel<D>, bytes);
    attention_backward_kv_sm90_kernel<D><<<grid_of_queue(n, a.Hkv), SM90_THREADS, bytes, stream>>>(
        dk, dv, counters_of(scratch) + 1, tensor_map(dout, n, a.Hq, (int64_t)a.Hq * D, SM90_KV_QUERIES),
        tensor_map(q, n, a.Hq, a.qkv_stride, SM90_KV_QUERIES), tensor_map(k, n, a.Hkv, a.qkv_stride, SM90_ROWS),
        tensor_map(v, n, a.Hkv, a.qkv_stride, SM90_ROWS), lse2_of(scratch), delta_of(scratch, a), table, a);
  } else {
    constexpr int bytes = (2 * WARP_TILE + 4 * WARP_TILE_KV_Q) * D * 2;
    allow_shared(attention_backward_kv_kernel<D>, bytes);
    attention_backward_kv_kernel<D><<<grid_of(n, WARP_TILE, a.Hkv), 128, bytes, stream>>>(
        dk, dv, dout, q, k, v, lse2_of(scratch), delta_of(scratch, a), table, a);
  }
  ATTENTION_CUDA(cudaGetLastError());
}

template <int D>
static void backward_q_launch(bf16 *dq, float *scratch, const bf16 *dout, const bf16 *q, const bf16 *k, const bf16 *v,
                              const float2 *table, const AttentionSize *n, const AttentionArgs &a,
                              cudaStream_t stream) {
  if (takes_wgmma(n)) {
    constexpr int bytes = backward_q_sm90_bytes<D>();
    allow_shared(attention_backward_q_sm90_kernel<D>, bytes);
    attention_backward_q_sm90_kernel<D><<<grid_of_queue(n, a.Hq), SM90_THREADS, bytes, stream>>>(
        dq, counters_of(scratch) + 2, tensor_map(dout, n, a.Hq, (int64_t)a.Hq * D, SM90_ROWS),
        tensor_map(q, n, a.Hq, a.qkv_stride, SM90_ROWS), tensor_map(k, n, a.Hkv, a.qkv_stride, SM90_Q_KEYS),
        tensor_map(v, n, a.Hkv, a.qkv_stride, SM90_Q_KEYS), lse2_of(scratch), delta_of(scratch, a), table, a);
  } else {
    constexpr int bytes = 6 * WARP_TILE * D * 2;
    allow_shared(attention_backward_q_kernel<D>, bytes);
    attention_backward_q_kernel<D><<<grid_of(n, WARP_TILE, a.Hq), 128, bytes, stream>>>(
        dq, dout, q, k, v, lse2_of(scratch), delta_of(scratch, a), table, a);
  }
  ATTENTION_CUDA(cudaGetLastError());
}

template <int D>
static void backward_launch(bf16 *dq, bf16 *dk, bf16 *dv, float *scratch, const bf16 *dout, const bf16 *o,
                            const float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const float2 *table,
                            const AttentionSize *n, const AttentionArgs &a, cudaStream_t stream) {
  delta_launch<D>(scratch, dout, o, lse, a, stream);
  backward_kv_launch<D>(dk, dv, scratch, dout, q, k, v, table, n, a, stream);
  backward_q_launch<D>(dq, scratch, dout, q, k, v, table, n, a, stream);
}

void sliding_attention_backward(bf16 *dq, bf16 *dk, bf16 *dv, float *scratch, const bf16 *dout, const bf16 *o,
                                const float *lse, const bf16 *q, const bf16 *k, const bf16 *v, const float2 *table,
                                const int32_t *doc_start, const AttentionSize *n, cudaStream_t stream) {
  const AttentionArgs a = arguments_of(n, doc_start);
  require_aligned(dq, "dq"), require_aligned(dk, "dk"), require_aligned(dv, "dv"), require_aligned(scratch, "scratch");
  require_aligned(dout, "do"), require_aligned(o, "o"), require_aligned(table, "the RoPE table");
  require_aligned(q, "q"), require_aligned(k, "k"), require_aligned(v, "v");
  n->D == 64 ? backward_launch<64>(dq, dk, dv, scratch, dout, o, lse, q, k, v, table, n, a, stream)
             : backward_launch<128>(dq, dk, dv, scratch, dout, o, lse, q, k, v, table, n, a, stream);
}
