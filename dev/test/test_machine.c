// test_machine.c: gdn/cuda/machine.h: what is said of GPUs and drivers that cannot be used, without any.
// Build: cc -std=c11 -D_GNU_SOURCE -I. dev/test/test_machine.c -lm
#include "../../gdn/cuda/machine.h"
#include "check_report.h"

static GpuFacts usable(void) {
  GpuFacts f = {13000, 13000, 1, NULL, 0, NULL, 0, "NVIDIA H200", 9, 0, NULL};
  return f;
}

// The facts are refused with exit code 3 and one line that holds all words of `needed` (a list that ends with NULL).
static void refused(const char *name, GpuFacts f, const char *const *needed) {
  Error err;
  memset(&err, 0, sizeof err);
  int code = gpu_check(&f, &err);
  check(code == EXIT_CONFIG && err.code == EXIT_CONFIG, "%s: code %d, needed %d", name, code, EXIT_CONFIG);
  check(!strchr(err.text, '\n') && strlen(err.text) < 400, "%s: not one short line: %s", name, err.text);
  for (; *needed; needed++) check(strstr(err.text, *needed) != NULL, "%s: no '%s' in: %s", name, *needed, err.text);
}

static void accepted(const char *name, GpuFacts f) {
  Error err;
  memset(&err, 0, sizeof err);
  check(gpu_check(&f, &err) == 0, "%s: refused: %s", name, err.text);
}

int main(void) {
  GpuFacts f = usable();
  accepted("an H200", f);
  f.major = 8, accepted("compute capability 8.0", f);
  f.major = 12, f.minor = 1, accepted("a newer card", f);
  f = usable(), f.runtime = 13020, accepted("an older minor version of the driver", f);
  f = usable(), f.driver = 14000, accepted("a newer driver", f);
  f = usable(), f.gpus = 8, f.device = 7, accepted("the last of eight", f);

  const char *const no_driver[] = {"no NVIDIA driver", "13.0", "train_gdn trains on CPUs", NULL};
  f = usable(), f.driver = 0, f.gpus = 0, refused("no driver", f, no_driver);
  const char *const old_driver[] = {"driver is for CUDA 12.8", "built with CUDA 13.0", "needed a driver", NULL};
  f = usable(), f.driver = 12080, refused("an old driver", f, old_driver);
  const char *const no_gpu[] = {"no NVIDIA GPU", "no CUDA-capable device is detected", NULL};
  f = usable(), f.gpus = 0, f.trouble = "no CUDA-capable device is detected", refused("no GPU", f, no_gpu);
  const char *const hidden[] = {"CUDA_VISIBLE_DEVICES='9'", "unset it", NULL};
  f.visible_set = 1, f.visible = "9", refused("hidden by the environment", f, hidden);
  const char *const empty[] = {"CUDA_VISIBLE_DEVICES=''", NULL};
  f.visible = "", refused("an empty list", f, empty);
  const char *const beyond[] = {"GPU 7 asked for", "found 1", "--device", NULL};
  f = usable(), f.device = 7, refused("a number too high", f, beyond);
  const char *const old_card[] = {"GPU 0 (Tesla V100)", "7.0", "needed 8.0", "--device", NULL};
  f = usable(), f.name = "Tesla V100", f.major = 7, refused("an old card", f, old_card);
  const char *const other_card[] = {"no code for GPU 0 (NVIDIA A100", "8.0", "GPU_ARCH=80", NULL};
  f = usable(), f.name = "NVIDIA A100", f.major = 8, f.code_trouble = "no kernel image is available";
  refused("a build for another card", f, other_card);
  const char *const hopper[] = {"GPU_ARCH=90a", NULL};
  f = usable(), f.code_trouble = "no kernel image is available", refused("a build without Hopper", f, hopper);
  return report_end();
}
