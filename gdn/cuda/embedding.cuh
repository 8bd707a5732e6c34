// embedding.cuh: token embedding, forward (gather) and backward (scatter-add without atomics on floats).
//
//   forward   x[n] = table[id[n]]
//   backward  dtable[v] += sum over the tokens n with id[n] = v of dx[n], in the order of n
//
// Shapes: x, dx [N, D] bf16, table [V, D] bf16, dtable [V, D] fp32, ids [N] int32 in 0 .. V-1 (the loader has checked
// them). D a multiple of 8. The backward pass first sorts the tokens by id with a stable counting sort on the GPU
// (embedding_sort, once a micro-batch); then one block a used row adds them up (frequent ids in windows first).
// Bytes a token: forward 4 D, backward 2 D, and 8 D a used row.
//
// defines: embedding_forward, embedding_sort, embedding_sort_scratch, embedding_backward,
//          embedding_backward_scratch
#ifndef GDN_CUDA_EMBEDDING_CUH
#define GDN_CUDA_EMBEDDING_CUH

#include "common.cuh"

enum {
  EMBEDDING_SORT_IDS = 256,
  EMBEDDING_SORT_WARPS = 32,
  EMBEDDING_THREADS = 256,
  EMBEDDING_WINDOW = 64  // sorted tokens one block adds up; an id with more of them is frequent
};

static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(bf16 *x, const bf16 *table, const int32_t *ids, int64_t N, int D) {
  int64_t n = (int64_t)blockIdx.x * (EMBEDDING_THREADS / 32) + threadIdx.x / 32;  // a warp a token
  if (n >= N) return;
  const bf16 *from = table + (int64_t)ids[n] * D;
  x += n * D;
  int c = threadIdx.x % 32 * 8;
  for (; c + 3 * 256 < D; c += 4 * 256) {
    Vec8 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = load8(from + c + i * 256);
#pragma unroll
    for (int i = 0; i < 4; i++) store8(x + c + i * 256, v[i]);
  }
  for (; c < D; c += 256) store8(x + c, load8(from + c));
}

// x [N, D] <- table [V, D], ids [N].
static MAYBE_UNUSED void embedding_forward(bf16 *x, const bf16 *table, const int32_t *ids, int64_t N, int D,
                                           cudaStream_t stream) {
  require_multiple("embedding_forward", "the width", D, 8);
  if (N == 0) return;
  unsigned blocks = grid_size(ceil_div(N, EMBEDDING_THREADS / 32), "embedding_forward");
  embedding_forward_kernel<<<blocks, EMBEDDING_THREADS, 0, stream>>>(x, table, ids, N, D);
  KERNEL_CHECK("embedding_forward");
}

// A block sorts the tokens of EMBEDDING_SORT_IDS ids. Each of its 32 warps owns a stretch of the tokens: it counts them
// per id, the counts become start positions (ids outer, warps inner, so earlier stretches come first), and it writes
// its tokens in order. Counts are integers: their atomics do not depend on the order.
static __global__ void __launch_bounds__(32 * EMBEDDING_SORT_WARPS)
    embedding_sort_kernel(int32_t *order, int32_t *starts, const int32_t *ids, int64_t N, int V) {
  __shared__ int cursor[EMBEDDING_SORT_WARPS][EMBEDDING_SORT_IDS];
  __shared__ int id_total[EMBEDDING_SORT_IDS], warp_total[EMBEDDING_SORT_WARPS], below;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * EMBEDDING_SORT_IDS;
  int64_t stretch = (N + EMBEDDING_SORT_WARPS - 1) / EMBEDDING_SORT_WARPS;
  int64_t begin = warp * stretch, end = begin + stretch < N ? begin + stretch : N;
  for (int i = threadIdx.x; i < EMBEDDING_SORT_WARPS * EMBEDDING_SORT_IDS; i += blockDim.x) (&cursor[0][0])[i] = 0;
  if (threadIdx.x == 0) below = 0;
  __syncthreads();
  int smaller = 0;
  for (int64_t n = begin + lane; n < end; n += 32) {
    int id = ids[n] - first;
    smaller += id < 0;
    if (id >= 0 && id < EMBEDDING_SORT_IDS) atomicAdd(&cursor[warp][id], 1);
  }
  for (int step = 16; step > 0; step >>= 1) smaller += __shfl_xor_sync(0xffffffffu, smaller, step);
  if (lane == 0) atomicAdd(&below, smaller);
  __syncthreads();
  if (threadIdx.x < EMBEDDING_SORT_IDS) {
    int total = 0;
    for (int i = 0; i < EMBEDDING_SORT_WARPS; i++) total += cursor[i][threadIdx.x];
    id_total[threadIdx.x] = total;
    int scan = total;  // inclusive over the warp's 32 ids
    for (int step = 1; step < 32; step <<= 1) {
      int other = __shfl_up_sync(0xffffffffu, scan, step);
      if (lane >= step) scan += other;
    }
    if (lane == 31) warp_total[warp] = scan;
    id_total[threadIdx.x] = scan - total;
  }
  __syncthreads();
  if (threadIdx.x < EMBEDDING_SORT_IDS) {
    int at = below + id_total[threadIdx.x];
    for (int i = 0; i < warp; i++) at += warp_total[i];
    if (first + (int)threadIdx.x < V) starts[first + threadIdx.x] = at;
    for (int i = 0; i < EMBEDDING_SORT_WARPS; i++) {
      int count = cursor[i][threadIdx.x];
      cursor[i][threadIdx.x] = at;
      at += count;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) starts[V] = (int32_t)N;
  __syncthreads();
  for (int64_t base = begin; base < end; base += 32) {
    int64_t n = base + lane;
    int id = n < end ? ids[n] - first : -1;
    bool here = id >= 0 && id < EMBEDDING_SORT_IDS;
    if (!__any_sync(0xffffffffu, here)) continue;
    unsigned same = __match_any_sync(0xffffffffu, here ? id : -1);
    int rank = __popc(same & ((1u << lane) - 1)), at = here ? cursor[warp][id] : 0;
    __syncwarp();
    if (here) order[at + rank] = (int32_t)n;
    if (here && rank == 0) cursor[warp][id] = at + __popc(same);
    __syncwarp();
  }
}

// sum[8] += dx of the sorted tokens begin .. end-1, columns c .. c+7, in order.
__device__ __forceinline__ void embedding_add(float sum[8], const bf16 *dx, const int32_t *order, int begin, int end,
                                              int D, int c) {
  float f[8];
  int i = begin;
  for (; i + 8 <= end; i += 8) {
    Vec8 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = load8_once(dx + (int64_t)order[i + k] * D + c);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      unpack8(f, v[k]);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] += f[j];
    }
  }
  for (; i < end; i++) {
    unpack8(f, load8_once(dx + (int64_t)order[i] * D + c));
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += f[j];
  }
}

// The sorted tokens are cut into windows of EMBEDDING_WINDOW. A frequent id has more tokens than a window, so a window
// meets at most two of them: one that reaches in from the left (partial[window][0]) and one that starts inside
// (partial[window][1]). One block a window.
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_frequent_kernel(float *partial, const bf16 *dx, const int32_t *order, const int32_t *starts,
                              const int32_t *ids, int64_t N, int D) {
  int begin = blockIdx.x * EMBEDDING_WINDOW, end = begin + EMBEDDING_WINDOW < N ? begin + EMBEDDING_WINDOW : (int)N;
  for (int side = 0; side < 2; side++) {
    int id = ids[order[side == 0 ? begin : end - 1]], first = starts[id], last = starts[id + 1];
    if (last - first <= EMBEDDING_WINDOW || (side == 0) != (first <= begin)) continue;
    float *to = partial + ((int64_t)blockIdx.x * 2 + side) * D;
    for (int c = threadIdx.x * 8; c < D; c += EMBEDDING_THREADS * 8) {
      float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      embedding_add(sum, dx, order, max(first, begin), min(last, end), D, c);
      reinterpret_cast<float4 *>(to + c)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      reinterpret_cast<float4 *>(to + c)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }
}

// One block a table row: its threads share the columns and walk the row's tokens in order, or, for a frequent id, the
// sums of its windows.
static __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_backward_kernel(float *dtable, const float *partial, const bf16 *dx, const int32_t *order,
                              const int32_t *starts, int D) {
  int begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
  if (begin == end) return;
  dtable += (int64_t)blockIdx.x * D;
  for (int c = threadIdx.x * 8; c < D; c += EMBEDDING_THREADS * 8) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    float4 *to = reinterpret_cast<float4 *>(dtable + c), a = to[0], b = to[1];
    if (end - begin <= EMBEDDING_WINDOW) {
      embedding_add(sum, dx, order, begin, end, D, c);
    } else {
      int window = begin / EMBEDDING_WINDOW, last = (end - 1) / EMBEDDING_WINDOW;
      int side = begin % EMBEDDING_WINDOW != 0;  // it starts inside its first window
#pragma unroll 4
      for (; window <= last; window++) {
        float f[8];
        load_floats8(f, partial + ((int64_t)window * 2 + side) * D + c);
        side = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += f[j];
      }
    }
    to[0] = make_float4(a.x + sum[0], a.y + sum[1], a.z + sum[2], a.w + sum[3]);
    to[1] = make_float4(b.x + sum[4], b.y + sum[5], b.z + sum[6], b.w + sum[7]);
  }
}

// int32 elements that embedding_sort writes: order [N] and starts [V + 1].
static inline int64_t embedding_sort_scratch(int64_t N, int V) { return N + V + 1; }

// scratch <- the tokens' positions sorted by id (stable), and where each id's stretch starts. N below 2^31.
static MAYBE_UNUSED void embedding_sort(int32_t *scratch, const int32_t *ids, int64_t N, int V, cudaStream_t stream) {
  if (N > INT32_MAX)
    fail(EXIT_CONFIG, "embedding_sort: %lld tokens in a micro-batch; use a smaller --batch", (long long)N);
  unsigned blocks = grid_size(ceil_div(V, EMBEDDING_SORT_IDS), "embedding_sort");
  embedding_sort_kernel<<<blocks, 32 * EMBEDDING_SORT_WARPS, 0, stream>>>(scratch, scratch + N, ids, N, V);
  KERNEL_CHECK("embedding_sort");
}

// Floats of scratch that embedding_backward needs.
static inline int64_t embedding_backward_scratch(int64_t N, int D) { return ceil_div(N, EMBEDDING_WINDOW) * 2 * D; }

// dtable [V, D] += <- dx [N, D], ids [N] and `sorted`, what embedding_sort left.
static MAYBE_UNUSED void embedding_backward(float *dtable, float *scratch, const bf16 *dx, const int32_t *ids,
                                            const int32_t *sorted, int64_t N, int D, int V, cudaStream_t stream) {
  require_multiple("embedding_backward", "the width", D, 8);
  if (N == 0) return;
  embedding_frequent_kernel<<<grid_size(ceil_div(N, EMBEDDING_WINDOW), "embedding_backward"), EMBEDDING_THREADS, 0,
                              stream>>>(scratch, dx, sorted, sorted + N, ids, N, D);
  KERNEL_CHECK("embedding_backward");
  embedding_backward_kernel<<<grid_size(V, "embedding_backward"), EMBEDDING_THREADS, 0, stream>>>(
      dtable, scratch, dx, sorted, sorted + N, D);
  KERNEL_CHECK("embedding_backward");
}

#endif  // GDN_CUDA_EMBEDDING_CUH
