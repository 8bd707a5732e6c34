// vectors.cuh: the parameters that kernels read in fp32 (norms, convolutions, gate parameters: all that is no matrix),
// gathered from the arena of masters, of which a rank holds only its shard, into one small array that is whole everywhere.
//
// defines: Vectors, vectors_plan, vectors_bytes, vectors_open, vectors_close, vectors_at, vectors_before, vectors_fill
#ifndef GDN_CUDA_VECTORS_CUH
#define GDN_CUDA_VECTORS_CUH

#include "../config.h"
#include "common.cuh"

typedef struct {
  int64_t offset, count, at;  // elements of the arena; first element here
} VectorRange;

typedef struct {
  VectorRange *ranges, *device_ranges;  // in the arena's order
  int n;
  int64_t total;
  float *data;  // [total]
} Vectors;

// Where t's vectors lie, without any room on the GPU; `ranges` is the caller's to free.
static MAYBE_UNUSED void vectors_plan(Vectors *v, const ParamTable *t) {
  memset(v, 0, sizeof *v);
  v->ranges = (VectorRange *)alloc_zeroed(t->n, sizeof(VectorRange), "list of vectors");
  for (int i = 0; i < t->n; i++) {
    const ParamSpec *s = &t->specs[i];
    if (s->ndim == 2) continue;
    VectorRange *last = v->n ? &v->ranges[v->n - 1] : NULL;
    if (last && last->offset + last->count == s->offset) {
      last->count += s->count;
    } else {
      v->total = (v->total + 7) / 8 * 8;  // tensors start at multiples of 8, as in the arena
      v->ranges[v->n++] = {s->offset, s->count, v->total};
    }
    v->total += s->count;
  }
}

static MAYBE_UNUSED int64_t vectors_bytes(const Vectors *v) {
  return v->total * (int64_t)sizeof(float) + v->n * (int64_t)sizeof(VectorRange);
}

// Room for t's vectors, zeros. Returns the bytes taken on the GPU.
static MAYBE_UNUSED int64_t vectors_open(Vectors *v, const ParamTable *t) {
  vectors_plan(v, t);
  v->data = (float *)device_alloc(v->total, sizeof(float), "vectors");
  CUDA_CHECK(cudaMemset(v->data, 0, (size_t)v->total * sizeof(float)));
  size_t bytes = (size_t)v->n * sizeof(VectorRange);
  v->device_ranges = (VectorRange *)device_alloc(v->n, sizeof(VectorRange), "list of vectors");
  CUDA_CHECK(cudaMemcpy(v->device_ranges, v->ranges, bytes, cudaMemcpyHostToDevice));
  return vectors_bytes(v);
}

static MAYBE_UNUSED void vectors_close(Vectors *v) {
  cudaFree(v->data), cudaFree(v->device_ranges);
  free(v->ranges);
  memset(v, 0, sizeof *v);
}

// How many elements here come before a place of the arena.
static MAYBE_UNUSED int64_t vectors_before(const Vectors *v, int64_t place) {
  int low = 0, high = v->n;  // the first range that begins behind the place
  while (low < high) {
    int middle = (low + high) / 2;
    if (v->ranges[middle].offset > place)
      high = middle;
    else
      low = middle + 1;
  }
  if (!low) return 0;
  const VectorRange *r = &v->ranges[low - 1];
  if (place < r->offset + r->count) return r->at + place - r->offset;
  return low < v->n ? v->ranges[low].at : v->total;
}

// The vector at this offset of the arena.
static MAYBE_UNUSED const float *vectors_at(const Vectors *v, int64_t offset) {
  return v->data + vectors_before(v, offset);
}

static __global__ void vectors_fill_kernel(float *data, const VectorRange *ranges, const float *master, int64_t first,
                                           int64_t count) {
  VectorRange r = ranges[blockIdx.y];
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < r.count; i += (int64_t)gridDim.x * blockDim.x) {
    int64_t place = r.offset + i - first;
    if (place >= 0 && place < count) data[r.at + i] = master[place];
  }
}

// Takes the vectors that lie in elements first .. first+count-1 of the arena, which `master` [count] holds.
static MAYBE_UNUSED void vectors_fill(Vectors *v, const float *master, int64_t first, int64_t count, cudaStream_t stream) {
  vectors_fill_kernel<<<dim3(8, (unsigned)v->n), 256, 0, stream>>>(v->data, v->device_ranges, master, first, count);
  KERNEL_CHECK("vectors_fill");
}

#endif  // GDN_CUDA_VECTORS_CUH
