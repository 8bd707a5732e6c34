// mma.cuh: the tensor-core and asynchronous-copy instructions that the kernels use, and the one shared-memory tile
// layout that they share.
//
// A tile has 64-column blocks of bf16, each row of a block 128 bytes; the eight 16-byte pieces of a row are permuted by
// the row number (piece ^ (row & 7)), so that ldmatrix reads any 8 x 8 block without bank conflicts. Block b of a tile
// of R rows starts at byte b * R * 128. Fragments (m16n8k16): a thread with g = lane / 4 and t = lane % 4 holds, of a
// 16 x 8 accumulator, rows g and g + 8, columns 2t and 2t + 1; packing two neighbouring accumulators gives the A
// operand of a following product.
//
// defines: smem_address, cp_async_16, cp_async_commit, cp_async_wait, TileLane, lane_n, lane_k, tile_at, ldmatrix_x4,
//          ldmatrix_x4_trans, store_matrix_x4, store_matrix_x4_trans, mma_bf16, mma_tf32, round_tf32, pack_bf16,
//          unpack_lo, unpack_hi, load_tile_async, load_stored_async, barrier_init, barrier_expect, barrier_wait,
//          tiles_visible, product_begin, product_end, product_wait, accumulators_ready, product_nk, product_kn,
//          product_tiles
#ifndef GDN_CUDA_MMA_CUH
#define GDN_CUDA_MMA_CUH

#include <cuda_bf16.h>
#include <stdint.h>

#define TILE_BLOCK_BYTES 8192  // a block of 64 rows

__device__ __forceinline__ uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------------------------------------------------------------
// Asynchronous copies, global to shared memory

// Copies 16 bytes, or writes 16 zero bytes when valid is false; src must be readable memory of the tensor either way.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads a 64 x COLS tile from rows of `stride` elements; rows at and beyond `rows` become zero. A thread keeps its
// column and steps down the rows, so that it needs one pointer and not one for each copy.
template <int COLS, int THREADS>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const __nv_bfloat16 *src, int64_t stride, int rows) {
  constexpr int PIECES = COLS / 8, FIT = THREADS / PIECES;
  constexpr int STEP = FIT >= 64 ? 64 : FIT >= 32 ? 32 : FIT >= 16 ? 16 : FIT >= 8 ? 8 : FIT >= 4 ? 4 : 2;
  static_assert(FIT >= 2, "too few threads for a row");
  int row = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES;
  if (STEP * PIECES < THREADS && row >= STEP) return;
  const __nv_bfloat16 *from = src + row * stride + piece * 8;
  tile += (piece >> 3) * TILE_BLOCK_BYTES;
#pragma unroll 2
  for (int i = 0; i < 64 / STEP; i++, row += STEP, from += STEP * stride) {
    bool valid = row < rows;
    cp_async_16(tile + row * 128 + (((piece & 7) ^ (row & 7)) << 4), valid ? from : src, valid);
  }
}

// Stored tiles: intermediates lie in memory exactly as a tile lies in shared memory, so that one bulk copy by one
// thread brings them in on Hopper (completion counted by an mbarrier in shared memory, one per stage); elsewhere
// cp.async.
__device__ __forceinline__ void barrier_init(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
template <int BYTES, int THREADS>
__device__ __forceinline__ void load_stored_async(uint32_t dst, const void *src, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(BYTES), "r"(barrier)
                 : "memory");
#else
#pragma unroll 2
  for (int i = threadIdx.x * 16; i < BYTES; i += THREADS * 16) cp_async_16(dst + i, (const char *)src + i, true);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix fragments

// What a lane adds to a tile address for ldmatrix.x4 on a 16 x 16 block. Two orders of the four 8 x 8 blocks exist.
struct TileLane {
  uint32_t row;    // 128 * row within the block
  uint32_t piece;  // 16 * (piece ^ row), still to be combined by xor
};
// Blocks in the order (0,0) (0,8) (8,0) (8,8) [row, column]. Plain: the B operand of a tile [n][k].
// Transposed: the A operand of a tile [k][m], or the accumulator layout of the transposed tile.
__device__ __forceinline__ TileLane lane_n(int lane) {
  TileLane t;
  int r = lane & 7, m = lane >> 3;
  t.row = ((m >> 1) * 8 + r) * 128;
  t.piece = (uint32_t)((m & 1) ^ r) << 4;
  return t;
}
// Blocks in the order (0,0) (8,0) (0,8) (8,8). Plain: the A operand of a tile [m][k]. Transposed: the B operand of a
// tile [k][n].
__device__ __forceinline__ TileLane lane_k(int lane) {
  TileLane t;
  int r = lane & 7, m = lane >> 3;
  t.row = ((m & 1) * 8 + r) * 128;
  t.piece = (uint32_t)((m >> 1) ^ r) << 4;
  return t;
}
// Address of the 16 x 16 block at (row, col) of a tile of 64 rows; row a multiple of 8, col of 16.
__device__ __forceinline__ uint32_t tile_at(uint32_t tile, TileLane lane, int row, int col) {
  return tile + lane.row + row * 128 + (col >> 6) * TILE_BLOCK_BYTES + ((uint32_t)((col & 63) << 1) ^ lane.piece);
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Stores four 8 x 8 blocks. address_of(block, row) gives the shared address of the 16-byte row of a block.
template <class F>
__device__ __forceinline__ void store_matrix_x4(const uint32_t (&r)[4], int lane, F address_of) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_of(lane >> 3, lane & 7)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_of(i, lane >> 2) + (lane & 3) * 4), "r"(r[i]) : "memory");
#endif
}
// The same with every 8 x 8 block transposed.
template <class F>
__device__ __forceinline__ void store_matrix_x4_trans(const uint32_t (&r)[4], int lane, F address_of) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_of(lane >> 3, lane & 7)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t x;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(r[i]));
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_of(i, lane >> 2) + (lane & 3) * 4), "r"(x) : "memory");
  }
#endif
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of 16 x 8 x 8 in TF32 (fp32 with 10 bits after the point): a holds rows g and g + 8 of column t, then of t +
// 4, b column g of rows t and t + 4. Operands are rounded by round_tf32; what is not is cut off.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// To nearest, ties away from 0; the bits that the product cuts off are not cleared. Infinity stays; the NaN that
// arithmetic makes (0x7fffffff) becomes -0, or what the product takes for it.
__device__ __forceinline__ uint32_t round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// Two fp32 to two bf16 (round to nearest even), the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float unpack_lo(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float unpack_hi(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// ---------------------------------------------------------------------------------------------------------------------
// Products of a register operand with a shared tile: d [16 x 64 a warp] += a [16 x 16] b. On Hopper the four warps of a
// warpgroup work as one (wgmma, asynchronous, the tile read once for all four); elsewhere each warp reads it by itself.
// Between product_begin and product_wait<0> the accumulators, and the fragments of pending groups, must not be written.
// Tiles start at multiples of 1024 bytes; after filling one, every thread calls tiles_visible() before the barrier.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1
#else
#define HAVE_WGMMA 0
#endif

__device__ __forceinline__ void tiles_visible() {
#if HAVE_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void product_begin() {
#if HAVE_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void product_end() {
#if HAVE_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void product_wait() {
#if HAVE_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// After product_wait: keeps the compiler from using accumulators before it.
template <int N>
__device__ __forceinline__ void accumulators_ready(float (&d)[N][4]) {
#if HAVE_WGMMA
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
#endif
}

#if HAVE_WGMMA
// 128-byte swizzle, groups of 8 rows 1024 bytes apart; the distance between 64-column blocks is never used here.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
template <int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64n64k16(float (*d)[4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B));
}
// Both operands from shared memory.
template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64n64k16(float (*d)[4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, %36;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
template <int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_m64n32k16(float (*d)[4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, %19, %20;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));
}
#endif

// b from a tile [64 n][k]: b[k][n] = tile[n][col + k]. Without wgmma only the columns n of FROM to TO (in 16s) are
// computed, for triangular tiles whose other columns are zero. `accumulate` 0 overwrites d.
template <int FROM, int TO>
__device__ __forceinline__ void product_nk(float (*d)[4], const uint32_t (&a)[4], uint32_t tile, int col, TileLane lane,
                                           int accumulate = 1) {
#if HAVE_WGMMA
  wgmma_m64n64k16<0>(d, a, tile_descriptor(tile + (col >> 6) * TILE_BLOCK_BYTES + (col & 63) * 2), accumulate);
#else
  if (!accumulate)
#pragma unroll
    for (int i = 0; i < 8; i++) d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0.0f;
#pragma unroll
  for (int np = FROM; np < TO; np++) {
    uint32_t b[4];
    ldmatrix_x4(b, tile_at(tile, lane, np * 16, col));
    mma_bf16(*(float(*)[4])d[2 * np], a, b[0], b[1]);
    mma_bf16(*(float(*)[4])d[2 * np + 1], a, b[2], b[3]);
  }
#endif
}
// b from a tile [k][64 n of a column block]: b[k][n] = tile[row + k][n].
template <int FROM, int TO>
__device__ __forceinline__ void product_kn(float (*d)[4], const uint32_t (&a)[4], uint32_t block, int row,
                                           TileLane lane, int accumulate = 1) {
#if HAVE_WGMMA
  wgmma_m64n64k16<1>(d, a, tile_descriptor(block + row * 128), accumulate);
#else
  if (!accumulate)
#pragma unroll
    for (int i = 0; i < 8; i++) d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0.0f;
#pragma unroll
  for (int np = FROM; np < TO; np++) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, tile_at(block, lane, row, np * 16));
    mma_bf16(*(float(*)[4])d[2 * np], a, b[0], b[1]);
    mma_bf16(*(float(*)[4])d[2 * np + 1], a, b[2], b[3]);
  }
#endif
}

// Both operands from tiles, one k16 step: d [64 x 8 NT a warpgroup, warp w rows 16 w ..] += a b.
// a[m][k]: a_tile[m][16 ks + k], or with TRANS_A a_tile[16 ks + k][m]. b[k][n]: with TRANS_B b_tile[16 ks + k][col + n]
// of one column block, else b_tile[row + n][16 ks + k]; n0 is that col or row. NT is 8 or 4, m0 the warp's first row.
template <int NT, int TRANS_A, int TRANS_B>
__device__ __forceinline__ void product_tiles(float (*d)[4], uint32_t a_tile, uint32_t b_tile, int n0, int ks,
                                              int accumulate, int m0, TileLane ln, TileLane lk) {
#if HAVE_WGMMA
  uint64_t a = tile_descriptor(a_tile + ks * (TRANS_A ? 2048 : 32));
  uint64_t b = tile_descriptor(b_tile + (TRANS_B ? ks * 2048 + n0 * 2 : ks * 32 + n0 * 128));
  if (NT == 8)
    wgmma_m64n64k16<TRANS_A, TRANS_B>(d, a, b, accumulate);
  else
    wgmma_m64n32k16<TRANS_A, TRANS_B>(d, a, b, accumulate);
#else
  uint32_t a[4];
  if (TRANS_A)
    ldmatrix_x4_trans(a, tile_at(a_tile, ln, ks * 16, m0));
  else
    ldmatrix_x4(a, tile_at(a_tile, lk, m0, ks * 16));
#pragma unroll
  for (int np = 0; np < NT / 2; np++) {
    uint32_t b[4];
    if (TRANS_B)
      ldmatrix_x4_trans(b, tile_at(b_tile, lk, ks * 16, n0 + np * 16));
    else
      ldmatrix_x4(b, tile_at(b_tile, ln, n0 + np * 16, ks * 16));
    if (!accumulate)
#pragma unroll
      for (int e = 0; e < 4; e++) d[2 * np][e] = d[2 * np + 1][e] = 0.0f;
    mma_bf16(*(float(*)[4])d[2 * np], a, b[0], b[1]);
    mma_bf16(*(float(*)[4])d[2 * np + 1], a, b[2], b[3]);
  }
#endif
}

#endif  // GDN_CUDA_MMA_CUH
