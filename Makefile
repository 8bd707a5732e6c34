# make run             build the CPU trainer and train the default: a tiny Gated DeltaNet on associative recall
# make run MODEL=tiny-mamba2 ARGS='--steps 300'     the same with another preset, more options
# make test            build and run every test; the last line counts passed, failed, skipped
# make train_gdncu     the CUDA trainer (needs nvcc; for the GPU that is here, else Hopper: GPU_ARCH=90a)      make test_gdncu   its check
# make bench           speed of the CPU engine's parts, and of the GPU's kernels and models where there is one
# make gpu-check       all that must be seen on a GPU, and dev/gpu_report.md from it; make lab builds the kernel lab
# make gpu-report-check   does that report say that these CUDA sources are right?
# make sanitize        the tests of readers and layers under AddressSanitizer and UBSan
# make faults          kill -9, failing disks, damaged files, signals, planted breaks: the long form (faults-quick: a minute)
# make modeling        gdn/hf_modeling.h again, after a change to gdn/modeling_train_gdn.py
# make fuzz            the readers of files and options under libFuzzer (needs clang); FUZZ_SECONDS=60 for each
# With an MPI (mpicc) the trainer also runs as many ranks: mpirun -np 4 ./train_gdn; scripts/ has examples. Without: MPI=0.
# Debug build: make train_gdn OPT='-O0 -g'. Portable binary: make MARCH=x86-64-v3.

CC      ?= gcc
MARCH   ?= native
OPT     ?= -O3
# -ffp-contract=fast: multiply-adds, which strict C11 forbids gcc; -fno-math-errno: sqrt in vectors
CFLAGS   = -std=c11 -D_GNU_SOURCE -Wall -Wextra $(OPT) -ffp-contract=fast -fno-math-errno -march=$(MARCH) -fopenmp -I.
LDLIBS   = -ljansson -lxxhash -lpthread -lm
BUILD    = build
HEADERS  = $(wildcard gdn/*.h)
MPI     ?= 1
NVCC    ?= nvcc
# not empty: nvcc and a GPU are here
GPU     := $(shell command -v $(NVCC) >/dev/null && nvidia-smi -L >/dev/null 2>&1 && echo yes)
MODEL   ?= $(if $(GPU),tiny-gdn-64,tiny-gdn)
ARGS    ?=

# the machine's libraries, found by compiling against them; scripts/setup.sh installs what is missing
DEPS     = $(BUILD)/deps.ok

all: train_gdn

$(DEPS): scripts/setup.sh
	@mkdir -p $(BUILD)
	@scripts/setup.sh build
	@touch $@

# flags of an MPI that compiles and links, or nothing; only a change rebuilds. Tests install one first.
MPI_FLAGS = $(BUILD)/mpi_flags
$(MPI_FLAGS): ALWAYS $(DEPS) | $(if $(filter test test_programs,$(MAKECMDGOALS)),.venv/ok)
	@CC='$(CC)' MPI=$(MPI) scripts/mpi_flags.sh >$@.new; cmp -s $@.new $@ || cp $@.new $@
ALWAYS:

train_gdn: train_gdn.c $(HEADERS) $(DEPS) $(MPI_FLAGS)
	$(CC) $(CFLAGS) -DGDN_BUILD='"$(shell git describe --always --dirty 2>/dev/null)"' $< -o $@ $(LDLIBS) $$(cat $(MPI_FLAGS))

# the text of the Python file that some checkpoints carry, as a C string; checked in, test_checkpoint compares the two
modeling: gdn/modeling_train_gdn.py
	@{ printf '%s\n' '// hf_modeling.h: the text of gdn/modeling_train_gdn.py, which goes into every checkpoint whose model fla has no class' \
	  '// for. Made from it by `make modeling`.' '//' '// defines: hf_modeling_text' '#ifndef GDN_HF_MODELING_H' '#define GDN_HF_MODELING_H' '' \
	  '// clang-format off' 'static const char hf_modeling_text[] ='; \
	  sed 's/[\\"]/\\&/g; s/.*/    "&\\n"/; $$s/$$/;/' $<; printf '%s\n' '// clang-format on' '' '#endif  // GDN_HF_MODELING_H'; } >gdn/hf_modeling.h

# the GPU trains the models that its kernels take; a line says why others run on the CPU
run: train_gdn $(if $(GPU),train_gdncu)
	@program=./train_gdn; \
	if [ -n "$(GPU)" ] && ./train_gdncu --model $(MODEL) $(ARGS) --dry-run >/dev/null; then program=./train_gdncu; fi; \
	echo "$$program --model $(MODEL) $(ARGS)"; $$program --model $(MODEL) $(ARGS)

# ---------------------------------------------------------------------------- tests

TEST_CFLAGS = $(CFLAGS) -DGDN_PLANT -DGDN_NO_MAIN
FAULT_TOOLS = $(BUILD)/faults/io_faults.so $(BUILD)/faults/engine.o $(BUILD)/faults/damage
KILLS ?= 500
TESTS = test_config test_tokenizer test_sampler test_machine test_shards test_checkpoint test_layers_f32 test_layers_f64

$(BUILD)/engine_f32.o: train_gdn.c $(HEADERS) $(DEPS)
	$(CC) $(TEST_CFLAGS) -c $< -o $@
$(BUILD)/engine_f64.o: train_gdn.c $(HEADERS) $(DEPS)
	$(CC) $(TEST_CFLAGS) -DGDN_REAL_DOUBLE -c $< -o $@
$(BUILD)/test_gdn.o: test_gdn.c dev/test/check_report.h $(HEADERS) $(DEPS)
	$(CC) $(TEST_CFLAGS) -c $< -o $@
test_gdn: $(BUILD)/test_gdn.o $(BUILD)/engine_f32.o $(BUILD)/engine_f64.o
	$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

# the trainer with real = double, and one without MPI: for test_ranks.py
$(BUILD)/train_gdn_f64: train_gdn.c $(HEADERS) $(DEPS) $(MPI_FLAGS)
	$(CC) $(CFLAGS) -DGDN_REAL_DOUBLE $< -o $@ $(LDLIBS) $$(cat $(MPI_FLAGS))
$(BUILD)/train_gdn_alone: train_gdn.c $(HEADERS) $(DEPS)
	$(CC) $(CFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/test_layers_f32: dev/test/test_layers.c train_gdn.c dev/test/check_report.h $(HEADERS) $(DEPS)
	$(CC) $(TEST_CFLAGS) $< -o $@ $(LDLIBS)
$(BUILD)/test_layers_f64: dev/test/test_layers.c train_gdn.c dev/test/check_report.h $(HEADERS) $(DEPS)
	$(CC) $(TEST_CFLAGS) -DGDN_REAL_DOUBLE $< -o $@ $(LDLIBS)
$(BUILD)/test_config: dev/test/test_config.c train_gdn.c $(HEADERS) $(DEPS)
	$(CC) $(CFLAGS) -DGDN_NO_MAIN $< train_gdn.c -o $@ $(LDLIBS)
$(BUILD)/test_%: dev/test/test_%.c $(wildcard dev/test/*.h) $(HEADERS) $(DEPS)
	$(CC) $(CFLAGS) $< -o $@ $(LDLIBS)

.venv/ok: scripts/setup.sh data/requirements.txt
	@scripts/setup.sh test
	@touch $@

test_programs: train_gdn test_gdn $(BUILD)/train_gdn_f64 $(BUILD)/train_gdn_alone $(TESTS:%=$(BUILD)/%) $(FAULT_TOOLS)
test: test_programs .venv/ok $(if $(GPU),test_gdncu)
	@dev/test/run_all.sh

# kill -9, failing and full disks, damaged files, signals, non-finite values, planted breaks: dev/test/faults/
$(BUILD)/faults/io_faults.so: dev/test/faults/io_faults.c
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O1 -Wall -Wextra -fPIC -shared $< -o $@ -ldl
$(BUILD)/faults/engine.o: train_gdn.c $(HEADERS) $(DEPS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DGDN_NO_MAIN -c $< -o $@
$(BUILD)/faults/damage: dev/test/faults/damage.c $(HEADERS) $(DEPS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SAN_FLAGS) $< -o $@ $(LDLIBS)
faults-quick: train_gdn $(FAULT_TOOLS)
	@python3 dev/test/faults/run_faults.py quick
faults: train_gdn $(FAULT_TOOLS)
	@python3 dev/test/faults/run_faults.py long $(KILLS)

# the readers of files and options under libFuzzer: dev/test/fuzz/
FUZZ_TARGETS = shard manifest safetensors config options tokenizer
FUZZ_SECONDS ?= 60
$(BUILD)/fuzz/%: dev/test/fuzz/fuzz_%.c dev/test/fuzz/fuzz.h $(HEADERS) $(DEPS)
	@mkdir -p $(@D)
	clang -std=c11 -D_GNU_SOURCE -Wall -Wextra -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I. $< -o $@ -ljansson -lxxhash -lpthread -lm
fuzz: $(FUZZ_TARGETS:%=$(BUILD)/fuzz/%)
	@dev/test/fuzz/run_fuzz.sh $(BUILD)/fuzz $(FUZZ_SECONDS) $(FUZZ_TARGETS)

SAN_FLAGS = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
sanitize: $(DEPS)
	@mkdir -p $(BUILD)/sanitize
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/sanitize OPT='$(SAN_FLAGS)' $(TESTS:%=$(BUILD)/sanitize/%)
	@dev/test/run_all.sh --programs $(BUILD)/sanitize

# ---------------------------------------------------------------------------- benchmarks, format

$(BUILD)/bench_cpu: dev/bench/bench_cpu.c train_gdn.c $(HEADERS) $(DEPS)
	$(CC) $(CFLAGS) -DGDN_NO_MAIN $< -o $@ $(LDLIBS) -ldl
bench: $(BUILD)/bench_cpu $(if $(GPU),lab)
	$(BUILD)/bench_cpu
	$(if $(GPU),@dev/gpu_check.sh bench)

SOURCES = train_gdn.c test_gdn.c gdn/*.h dev/test/*.c dev/test/*.h dev/test/*/*.c dev/test/*/*.h dev/bench/*.c
format:
	clang-format -i $(SOURCES)
format-check:
	clang-format --dry-run -Werror $(SOURCES)

clean:
	rm -rf $(BUILD) train_gdn train_gdncu test_gdn test_gdncu

.PHONY: ALWAYS all modeling run test test_programs faults faults-quick fuzz sanitize bench format format-check clean lab
.SECONDARY:

# ---------------------------------------------------------------------------- CUDA

# 90a: Hopper with its own instructions; 80, 86, 89 for older cards. One translation unit a heavy operation.
CAPABILITY := $(if $(GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -dc 0-9))
GPU_ARCH ?= $(if $(filter-out 90,$(CAPABILITY)),$(CAPABILITY),90a)
NVFLAGS   = -std=c++17 -O3 -gencode=arch=compute_$(GPU_ARCH),code=sm_$(GPU_ARCH) -D_GNU_SOURCE -I. -Xcompiler -Wall,-Wextra,-fopenmp
CUDA_BUILD = $(BUILD)/cuda
CUDA_OPS   = $(CUDA_BUILD)/delta_rule.o $(CUDA_BUILD)/sliding_attention.o
# binaries that another machine runs: make train_gdncu STATIC=1 takes jansson and xxHash in
CUDA_LIBS  = -lcublasLt $(if $(STATIC),-l:libjansson.a -l:libxxhash.a,-ljansson -lxxhash) -lpthread -lm

have-nvcc:
	@command -v $(NVCC) >/dev/null || { echo "make: no $(NVCC): the GPU programs need the CUDA toolkit. Where it is not in PATH:" \
	  "make NVCC=/usr/local/cuda/bin/nvcc ..." >&2; exit 3; }
$(CUDA_BUILD)/%.o: gdn/cuda/%.cu $(wildcard gdn/cuda/*) gdn/check.h | have-nvcc
	@mkdir -p $(CUDA_BUILD)
	$(NVCC) $(NVFLAGS) -c $< -o $@
# several GPUs where MPI and NCCL are there (MPI=0: never)
NCCL_FLAGS = $(CUDA_BUILD)/nccl_flags
$(NCCL_FLAGS): ALWAYS $(MPI_FLAGS)
	@mkdir -p $(CUDA_BUILD)
	@NVCC='$(NVCC)' scripts/nccl_flags.sh "$$(cat $(MPI_FLAGS))" >$@.new; cmp -s $@.new $@ || cp $@.new $@
$(CUDA_BUILD)/train_gdncu.o: train_gdn.cu $(HEADERS) $(wildcard gdn/cuda/*) $(DEPS) $(NCCL_FLAGS) | have-nvcc
	$(NVCC) $(NVFLAGS) -DGDN_BUILD='"$(shell git describe --always --dirty 2>/dev/null)"' $$(cat $(NCCL_FLAGS)) -c $< -o $@
$(CUDA_BUILD)/engine_cuda.o: train_gdn.cu $(HEADERS) $(wildcard gdn/cuda/*) $(DEPS) | have-nvcc
	@mkdir -p $(CUDA_BUILD)
	$(NVCC) $(NVFLAGS) -DGDN_NO_MAIN -c $< -o $@
train_gdncu: $(CUDA_BUILD)/train_gdncu.o $(CUDA_OPS) $(NCCL_FLAGS)
	$(NVCC) $(NVFLAGS) $(filter %.o,$^) -o $@ $(CUDA_LIBS) $$(cat $(NCCL_FLAGS))

# test_gdn linked with the CUDA engine: every tensor and gradient against the CPU reference
$(CUDA_BUILD)/engine_f64.o: train_gdn.c $(HEADERS) $(DEPS)
	@mkdir -p $(CUDA_BUILD)
	$(CC) $(TEST_CFLAGS) -DGDN_REAL_DOUBLE -c $< -o $@
$(CUDA_BUILD)/engine_bf16.o: train_gdn.c $(HEADERS) $(DEPS)
	@mkdir -p $(CUDA_BUILD)
	$(CC) $(TEST_CFLAGS) -DGDN_EMULATE_BF16 -c $< -o $@
$(CUDA_BUILD)/engine_f32.o: train_gdn.c $(HEADERS) $(DEPS)
	@mkdir -p $(CUDA_BUILD)
	$(CC) $(TEST_CFLAGS) -c $< -o $@
$(CUDA_BUILD)/test_gdncu.o: test_gdn.c dev/test/check_report.h $(HEADERS) $(DEPS)
	@mkdir -p $(CUDA_BUILD)
	$(CC) $(TEST_CFLAGS) -DWITH_CUDA -c $< -o $@
test_gdncu: $(CUDA_BUILD)/test_gdncu.o $(CUDA_BUILD)/engine_cuda.o $(CUDA_OPS) $(CUDA_BUILD)/engine_f32.o $(CUDA_BUILD)/engine_f64.o $(CUDA_BUILD)/engine_bf16.o
	$(NVCC) $(NVFLAGS) $^ -o $@ $(CUDA_LIBS)

# the kernel lab: each operation against loops in double, and its time beside its floor
LABS = rmsnorm swiglu gated_rmsnorm short_conv classifier embedding adamw matmul delta_rule sliding_attention
LAB_DEPS = $(wildcard dev/cuda/*.cuh) $(wildcard gdn/cuda/*) gdn/check.h
$(BUILD)/lab/delta_rule: dev/cuda/delta_rule.cu $(CUDA_BUILD)/delta_rule.o $(LAB_DEPS)
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) $< $(CUDA_BUILD)/delta_rule.o -o $@
$(BUILD)/lab/sliding_attention-racecheck: dev/cuda/sliding_attention.cu $(LAB_DEPS)
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -DATTENTION_RACECHECK $< -o $@
$(BUILD)/lab/rmsnorm-racecheck: dev/cuda/rmsnorm.cu $(LAB_DEPS)
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -DRMSNORM_RACECHECK $< -o $@
$(BUILD)/lab/%: dev/cuda/%.cu $(LAB_DEPS)
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) $< -o $@ -lcublasLt
lab: $(LABS:%=$(BUILD)/lab/%) $(BUILD)/lab/sliding_attention-racecheck $(BUILD)/lab/rmsnorm-racecheck

DATA ?= out/data/fwe_train_*.bin
gpu-check: lab train_gdncu test_gdncu
	@DATA='$(DATA)' dev/gpu_check.sh right lab sanitize bench models input report
gpu-report-check:
	@dev/gpu_check.sh verdict
.PHONY: gpu-check gpu-report-check have-nvcc
