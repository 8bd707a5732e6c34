// common.cuh: what every CUDA kernel file shares: checked calls, bf16 in groups of eight, sums in a fixed order.
//
// Activations are bf16 and travel as 16-byte groups of 8 (Vec8); arithmetic is fp32. No kernel of this project adds
// floats with atomics: sums over rows go through partial results in a scratch buffer, which partial_reduce adds up in
// a fixed order, so that the same command gives the same bits.
//
// defines: bf16, CUDA_CHECK, KERNEL_CHECK, device_alloc, device_free, Vec8, load8, load8_once, store8, unpack8, pack8,
//          load_floats8, copy16_async, copy_commit, copy_wait, warp_sum, warp_max, exp2_fast, sigmoid_fast, ceil_div,
//          grid_size, partial_reduce, require_multiple
#ifndef GDN_CUDA_COMMON_CUH
#define GDN_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../check.h"

typedef __nv_bfloat16 bf16;

// ---------------------------------------------------------------------------------------------------------------------
// Checked calls: a failed one ends the program with one line and exit code 6 (memory), 3 (the machine) or 70.

static inline int cuda_exit_code(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return EXIT_MEMORY;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorInitializationError:
      return EXIT_CONFIG;
    default:
      return EXIT_INTERNAL;
  }
}

static MAYBE_UNUSED void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
  if (error == cudaSuccess) return;
  int code = cuda_exit_code(error);
  const char *hint = code == EXIT_MEMORY   ? "; needed: less GPU memory: a smaller --batch, or --recompute"
                     : code == EXIT_CONFIG ? "; see nvidia-smi, choose another GPU with --device"
                                           : "";
  fail(code, "CUDA: %s (%s) at %s:%d in %s%s", cudaGetErrorString(error), cudaGetErrorName(error), file, line, call,
       hint);
}

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
// After a launch: reports a launch that could not start. A fault inside a kernel shows at the next checked call.
#define KERNEL_CHECK(name) cuda_check(cudaGetLastError(), name, __FILE__, __LINE__)

// GPU memory or exit 6. `what` names the use in the message.
static MAYBE_UNUSED void *device_alloc(int64_t count, size_t size, const char *what) {
  if (count < 0 || (size && (uint64_t)count > (uint64_t)INT64_MAX / size))
    fail(EXIT_MEMORY, "%s: %lld elements of %zu bytes do not fit into GPU memory", what, (long long)count, size);
  void *p = NULL;
  size_t bytes = (size_t)count * size, free_bytes = 0, total_bytes = 0;
  cudaError_t error = cudaMalloc(&p, bytes ? bytes : 16);
  if (error == cudaErrorMemoryAllocation) {
    cudaMemGetInfo(&free_bytes, &total_bytes);
    fail(EXIT_MEMORY, "%s: needs %.1f MiB of GPU memory, %.1f of %.1f MiB are free; use a GPU that nothing else uses, "
         "a smaller --batch or --model, or --recompute", what,
         (double)bytes / 1048576.0, (double)free_bytes / 1048576.0, (double)total_bytes / 1048576.0);
  }
  cuda_check(error, what, __FILE__, __LINE__);
  return p;
}

static MAYBE_UNUSED void device_free(void *p) { CUDA_CHECK(cudaFree(p)); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks of a one-dimensional grid; a launch that would not fit is a fault, never a wrong answer.
static inline unsigned grid_size(int64_t blocks, const char *what) {
  if (blocks < 0 || blocks > INT32_MAX)
    fail(EXIT_CONFIG, "%s: %lld blocks exceed a CUDA grid; use a smaller --batch or --seq-len", what,
         (long long)blocks);
  return (unsigned)blocks;
}

// ---------------------------------------------------------------------------------------------------------------------
// Eight bf16 in one 16-byte access. Addresses must be multiples of 16 bytes: columns and strides multiples of 8.

struct alignas(16) Vec8 {
  uint32_t w[4];
};

__device__ __forceinline__ Vec8 vec8_zero() { return Vec8{{0, 0, 0, 0}}; }

__device__ __forceinline__ Vec8 load8(const bf16 *p) {
  uint4 u = *reinterpret_cast<const uint4 *>(p);
  return Vec8{{u.x, u.y, u.z, u.w}};
}

// For data that this kernel reads once: it leaves the caches first.
__device__ __forceinline__ Vec8 load8_once(const bf16 *p) {
  uint4 u = __ldcs(reinterpret_cast<const uint4 *>(p));
  return Vec8{{u.x, u.y, u.z, u.w}};
}

__device__ __forceinline__ void store8(bf16 *p, Vec8 v) {
  *reinterpret_cast<uint4 *>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}

__device__ __forceinline__ void unpack8(float f[8], Vec8 v) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = __uint_as_float(v.w[i] << 16);
    f[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ Vec8 pack8(const float f[8]) {  // rounds to nearest even
  Vec8 v;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    v.w[i] = *reinterpret_cast<uint32_t *>(&pair);
  }
  return v;
}

__device__ __forceinline__ void load_floats8(float f[8], const float *p) {
  float4 a = __ldg(reinterpret_cast<const float4 *>(p)), b = __ldg(reinterpret_cast<const float4 *>(p) + 1);
  f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w, f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
}

// Asynchronous copies of 16 bytes into shared memory (`to` is a 32-bit shared address); off: 16 zeros, nothing is read.
__device__ __forceinline__ void copy16_async(uint32_t to, const void *from, bool on) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(on ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {  // until at most PENDING commits of this thread are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums. A butterfly over LANES neighbouring lanes: every lane ends with the same bits.

template <int LANES = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

template <int LANES = 32>
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}

// 2^x to about 2 units in the last place, results below 2^-126 are 0: one instruction.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + e^-x), relative error about 1e-6; 0 (not NaN) for x below -88.
__device__ __forceinline__ float sigmoid_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_fast(-1.4426950408889634f * x)));
  return y;
}

// out[c] (+)= sum over r of partial[r][c], rows in a fixed order: COLUMNS x 1024 / COLUMNS threads a block, each adding
// rows r, r + 1024 / COLUMNS, ..., then a tree over the threads of a column. rows x columns fp32, 4 bytes an element.
template <int COLUMNS>
__global__ void __launch_bounds__(1024)
    partial_reduce_kernel(float *out, const float *partial, int64_t rows, int64_t columns, int accumulate) {
  const int LINES = 1024 / COLUMNS;
  __shared__ float sums[LINES][COLUMNS + 1];
  int x = threadIdx.x % COLUMNS, y = threadIdx.x / COLUMNS;
  int64_t c = (int64_t)blockIdx.x * COLUMNS + x;
  float sum = 0;
  if (c < columns) {
#pragma unroll 8
    for (int64_t r = y; r < rows; r += LINES) sum += partial[r * columns + c];
  }
  sums[y][x] = sum;
  for (int half = LINES / 2; half > 0; half >>= 1) {
    __syncthreads();
    if (y < half) sums[y][x] += sums[y + half][x];
  }
  if (y == 0 && c < columns) out[c] = accumulate ? out[c] + sums[0][x] : sums[0][x];
}

static MAYBE_UNUSED void partial_reduce(float *out, const float *partial, int64_t rows, int64_t columns, int accumulate,
                                        cudaStream_t stream) {
  if (columns <= 1024)  // few columns, many rows: 32 bytes of a row a block
    partial_reduce_kernel<8><<<grid_size(ceil_div(columns, 8), "partial_reduce"), 1024, 0, stream>>>(
        out, partial, rows, columns, accumulate);
  else
    partial_reduce_kernel<32><<<grid_size(ceil_div(columns, 32), "partial_reduce"), 1024, 0, stream>>>(
        out, partial, rows, columns, accumulate);
  KERNEL_CHECK("partial_reduce");
}

// Refuses a shape that a kernel does not take: the model's options are checked before, so this names the kernel too.
static MAYBE_UNUSED void require_multiple(const char *kernel, const char *name, int64_t value, int64_t of) {
  if (value < 0 || value % of != 0)
    fail(EXIT_CONFIG, "%s: %s is %lld, needed: a multiple of %lld; change the model's widths", kernel, name,
         (long long)value, (long long)of);
}

#endif  // GDN_CUDA_COMMON_CUH
