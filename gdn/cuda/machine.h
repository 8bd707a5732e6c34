// machine.h: can this program run on this GPU with this driver? The facts are asked for in cuda_create; the judgement
// is a function of them alone, so that machines that nobody has at hand (an old card, an old driver) can be tested.
//
// defines: GpuFacts, gpu_check
#ifndef GDN_CUDA_MACHINE_H
#define GDN_CUDA_MACHINE_H

#include "../check.h"

typedef struct {
  int driver,
      runtime;  // CUDA version that the driver supports (0: there is none), that the program is built with: 13000
  int gpus;     // that the program may use
  const char *trouble;  // why they could not be counted, NULL: they could
  int visible_set;      // CUDA_VISIBLE_DEVICES is set
  const char *visible;  // to this
  int device;           // the one asked for, from 0
  // of that one, when it exists
  const char *name;
  int major, minor;          // compute capability
  const char *code_trouble;  // why its kernels cannot be loaded, NULL: they can
} GpuFacts;

enum { GPU_MAJOR_NEEDED = 8 };  // bf16 matrix instructions and asynchronous copies

// 0, or EXIT_CONFIG and one line.
static MAYBE_UNUSED int gpu_check(const GpuFacts *f, Error *err) {
  if (f->driver <= 0)
    return error_set(err, EXIT_CONFIG,
                     "no NVIDIA driver on this machine: needed one for CUDA %d.%d or newer; train_gdn trains on CPUs",
                     f->runtime / 1000, f->runtime % 1000 / 10);
  if (f->driver / 1000 < f->runtime / 1000)  // within a major version older drivers run newer programs
    return error_set(err, EXIT_CONFIG,
                     "the NVIDIA driver is for CUDA %d.%d, this program is built with CUDA %d.%d: needed a driver for "
                     "CUDA %d.0 or newer, or a build with an older nvcc (make train_gdncu)",
                     f->driver / 1000, f->driver % 1000 / 10, f->runtime / 1000, f->runtime % 1000 / 10,
                     f->runtime / 1000);
  if (f->gpus < 1 && f->visible_set)
    return error_set(err, EXIT_CONFIG,
                     "no NVIDIA GPU to be found with CUDA_VISIBLE_DEVICES='%.60s' (%s): needed numbers that nvidia-smi "
                     "-L lists, or unset it; train_gdn trains on CPUs",
                     f->visible ? f->visible : "", f->trouble ? f->trouble : "none counted");
  if (f->gpus < 1)
    return error_set(err, EXIT_CONFIG, "no NVIDIA GPU to be found (%s); train_gdn trains on CPUs",
                     f->trouble ? f->trouble : "none counted");
  if (f->device < 0 || f->device >= f->gpus)
    return error_set(err, EXIT_CONFIG, "GPU %d asked for, found %d, counted from 0; change --device", f->device,
                     f->gpus);
  if (f->major < GPU_MAJOR_NEEDED)
    return error_set(err, EXIT_CONFIG,
                     "GPU %d (%s) has compute capability %d.%d: needed %d.0 or newer; choose another with --device, or "
                     "train on CPUs with train_gdn",
                     f->device, f->name, f->major, f->minor, GPU_MAJOR_NEEDED);
  if (f->code_trouble)
    return error_set(err, EXIT_CONFIG,
                     "this program has no code for GPU %d (%s, compute capability %d.%d) (%s): build it with make "
                     "train_gdncu GPU_ARCH=%d%d%s",
                     f->device, f->name, f->major, f->minor, f->code_trouble, f->major, f->minor,
                     f->major == 9 && f->minor == 0 ? "a" : "");
  return 0;
}

#endif  // GDN_CUDA_MACHINE_H
