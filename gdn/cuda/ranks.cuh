// ranks.cuh: several GPUs that train one model, by NCCL: which GPU a rank takes, sums of gradients, exchange of weights.
//
// ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section 5.1): a rank owns the range of the arena that comm_shard deals it,
// and alone holds the masters and moments of that range. The arena is cut into buckets: the embedding, each layer, the
// final norm with the head. As soon as the backward pass of the step's last micro-batch has finished with a bucket, its
// gradients are summed on the ranks that own its parts; new weights are sent around bucket by bucket before the next
// forward pass reaches them. Both on a stream of their own. Sums are fp32, in the order of NCCL's rings: the same for the
// same GPUs. A shard is one contiguous range, so a bucket has one owner or a few, and what a reduce-scatter and an
// all-gather of equal parts would move over each link is moved by reductions to the owners and broadcasts from them: 4
// bytes an element of gradients, 2 of weights.
//
// Built with -DGDN_NCCL (and MPI, which tells the ranks of each other); without it more than one rank are refused.
//
// defines: GpuRanks, gpu_ranks_choose_device, gpu_ranks_open, gpu_ranks_close, gpu_ranks_group,
//          gpu_ranks_part, gpu_ranks_reduce, gpu_ranks_broadcast, gpu_ranks_share
#ifndef GDN_CUDA_RANKS_CUH
#define GDN_CUDA_RANKS_CUH

#include "../comm.h"
#include "common.cuh"

#ifdef GDN_NCCL
#include <nccl.h>
#define NCCL_CHECK(call) nccl_check((call), #call, __FILE__, __LINE__)
#endif

typedef struct {
  Comm *ranks;
  int64_t total;        // elements of the arena
  cudaStream_t stream;  // of all exchanges
  double bytes;         // sent by this rank, about
#ifdef GDN_NCCL
  ncclComm_t comm;
#endif
} GpuRanks;

// The GPU of a rank: of several on a machine each takes the one of its number, or the only one that its launcher shows
// it; --device (asked, -1: not given) only where it is alone there. 0, or EXIT_CONFIG.
static MAYBE_UNUSED int gpu_ranks_choose_device(const Comm *c, int asked, int gpus, int *device, Error *err) {
  int here = c->local_size;
  *device = asked < 0 ? 0 : asked;
  if (here == 1) return 0;
  if (asked >= 0)
    return error_set(err, EXIT_CONFIG, "--device %d with %d ranks on this machine: each needs a GPU of its own; leave "
                     "--device out (CUDA_VISIBLE_DEVICES chooses which GPUs are taken)", asked, here);
  if (gpus != 1 && gpus < here)
    return error_set(err, EXIT_CONFIG, "%d ranks on this machine, %d GPUs: needed one each; start fewer ranks, or show "
                     "more GPUs (CUDA_VISIBLE_DEVICES)", here, gpus);
  *device = gpus == 1 ? 0 : c->local_rank;
  return 0;
}

#ifdef GDN_NCCL
static MAYBE_UNUSED void nccl_check(ncclResult_t result, const char *call, const char *file, int line) {
  if (result == ncclSuccess) return;
  int outside = result == ncclSystemError || result == ncclRemoteError;  // of the machine or the network
  fail(outside ? EXIT_CONFIG : EXIT_INTERNAL, "NCCL: %s at %s:%d in %s (%s); NCCL_DEBUG=INFO shows more%s",
       ncclGetErrorString(result), file, line, call, ncclGetLastError(NULL),
       outside ? "; NCCL_SOCKET_IFNAME names the network to use, containers need a large /dev/shm (--shm-size)" : "");
}

// Ranks that share a GPU would wait for each other for ever. 0, or EXIT_CONFIG.
static inline int gpu_ranks_check_distinct(Comm *c, int device, Error *err) {
  enum { NAME = 160 };
  cudaDeviceProp p;
  char mine[NAME] = "", host[80] = "";
  CUDA_CHECK(cudaGetDeviceProperties(&p, device));
  gethostname(host, sizeof host - 1);
  snprintf(mine, NAME, "%s, GPU %04x:%02x:%02x", host, p.pciDomainID, p.pciBusID, p.pciDeviceID);
  char *all = (char *)alloc_array((int64_t)c->size * NAME, 1, "list of ranks");
  comm_exchange(c, "which GPU each rank has", mine, NAME, all);
  int code = 0;
  for (int r = 1; r < c->size && !code; r++)
    for (int s = 0; s < r && !code; s++)
      if (!strcmp(all + (int64_t)r * NAME, all + (int64_t)s * NAME))
        code = error_set(err, EXIT_CONFIG, "ranks %d and %d both have %s: needed one GPU each; start fewer ranks, or show "
                         "each its own (CUDA_VISIBLE_DEVICES)", s, r, mine);
  free(all);
  return code;
}
#endif

// Joins the ranks of c on the chosen GPU, which is current. All ranks call it. 0, or EXIT_CONFIG.
static MAYBE_UNUSED int gpu_ranks_open(GpuRanks *g, Comm *c, int device, int64_t total, Error *err) {
  memset(g, 0, sizeof *g);
  g->ranks = c, g->total = total;
#ifdef GDN_NCCL
  int code = gpu_ranks_check_distinct(c, device, err);
  if (code) return code;
  int low, high;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  CUDA_CHECK(cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, high));
  ncclUniqueId id;
  memset(&id, 0, sizeof id);
  if (c->rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
  comm_broadcast(c, "the name of the NCCL group", &id, sizeof id, 0);
  NCCL_CHECK(ncclCommInitRank(&g->comm, c->size, id, c->rank));
  return 0;
#else
  (void)device;
  return error_set(err, EXIT_CONFIG, "%d ranks: this program was built without NCCL; install it (libnccl2, libnccl-dev) and "
                   "run make again, or start one rank", c->size);
#endif
}

static MAYBE_UNUSED void gpu_ranks_close(GpuRanks *g) {
#ifdef GDN_NCCL
  if (g->comm) ncclCommDestroy(g->comm);
  if (g->stream) cudaStreamDestroy(g->stream);
#endif
  memset(g, 0, sizeof *g);
}

// The part of elements first .. first+count-1 that rank r owns: its first element and its size (0: none).
static inline int64_t gpu_ranks_part(const GpuRanks *g, int r, int64_t first, int64_t count, int64_t *at) {
  int64_t begin, n;
  comm_shard(g->total, g->ranks->size, r, &begin, &n);
  int64_t end = begin + n < first + count ? begin + n : first + count;
  *at = begin > first ? begin : first;
  return end > *at ? end - *at : 0;
}

// What is asked for between 1 and 0 travels at the same time.
static MAYBE_UNUSED void gpu_ranks_group(int begin) {
#ifdef GDN_NCCL
  NCCL_CHECK(begin ? ncclGroupStart() : ncclGroupEnd());
#else
  (void)begin;
#endif
}

// grads: the arena. Elements first .. first+count-1 become, on the rank that owns them, the sum over all ranks.
static MAYBE_UNUSED void gpu_ranks_reduce(GpuRanks *g, float *grads, int64_t first, int64_t count) {
#ifdef GDN_NCCL
  gpu_ranks_group(1);
  for (int r = 0; r < g->ranks->size; r++) {
    int64_t at, n = gpu_ranks_part(g, r, first, count, &at);
    if (!n) continue;
    NCCL_CHECK(ncclReduce(grads + at, grads + at, (size_t)n, ncclFloat, ncclSum, r, g->comm, g->stream));
    if (r != g->ranks->rank) g->bytes += 4.0 * (double)n;
  }
  gpu_ranks_group(0);
#else
  (void)g, (void)grads, (void)first, (void)count;
#endif
}

// Everyone gets `bytes` (may be 0) at data from rank `root`.
static MAYBE_UNUSED void gpu_ranks_broadcast(GpuRanks *g, void *data, int64_t bytes, int root) {
#ifdef GDN_NCCL
  if (!bytes) return;
  NCCL_CHECK(ncclBroadcast(data, data, (size_t)bytes, ncclChar, root, g->comm, g->stream));
  g->bytes += (double)bytes * (g->ranks->size - 1) / g->ranks->size;  // in a ring all but the last pass it on
#else
  (void)g, (void)data, (void)bytes, (void)root;
#endif
}

// weights: the arena in bf16. Everyone gets elements first .. first+count-1 from the ranks that own them.
static MAYBE_UNUSED void gpu_ranks_share(GpuRanks *g, bf16 *weights, int64_t first, int64_t count) {
  gpu_ranks_group(1);
  for (int r = 0; r < g->ranks->size; r++) {
    int64_t at, n = gpu_ranks_part(g, r, first, count, &at);
    gpu_ranks_broadcast(g, weights + at, n * (int64_t)sizeof(bf16), r);
  }
  gpu_ranks_group(0);
}

#endif  // GDN_CUDA_RANKS_CUH
