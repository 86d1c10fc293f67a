# pyops: `make` builds the CPU library, which requires only a C compiler with OpenMP, not Python.  If nvcc and a GPU are found,
# it also builds the CUDA library.
.DEFAULT_GOAL := all
.PHONY: all cpu bytecode aarch64 aarch64-test valgrind conda cuda cuda-wheel emulated exercise lowered emulator conformance test-emulated lint format soak rewind-questions endurance faults mutants source-mutants buggify schedules schedules-library coverage fuzz emulated-asan emulated-tsan ladder venv demo site wheel test test-all asan bench floor quality gpu-check clean help

ifeq ($(origin CC),default)
CC := $(if $(shell command -v gcc),gcc,$(if $(shell command -v clang),clang,cc))
endif
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# Use all cores unless -j is given.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(CORES)
endif
# V=1 prints the compiler commands.
ifneq ($(V),1)
Q = $(info   $(notdir $(firstword $(1))) $@)@
endif
PYTHON ?= python3
NVCC ?= nvcc
# Each variant (see asan) has its own objects and library.
BUILD ?= build/c
LIBRARY ?= pyops/libpyops.so
EXTRA_CFLAGS ?=
AVX512 ?= -mavx512f -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512
AVX512_BF16 ?= $(AVX512) -mavx512bw -mavx512bf16

CFLAGS := -std=gnu11 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math \
          -Wall -Wextra -Wno-unknown-pragmas -Icsrc -MMD -MP $(EXTRA_CFLAGS)
# PROBE exists once this compiler is known to work.
PROBE := $(BUILD)/compiler-works-$(notdir $(firstword $(CC)))
OBJ := $(patsubst csrc/%.c,$(BUILD)/%.o,$(wildcard csrc/*.c) $(wildcard csrc/kernels/*.c))

# Only these files are compiled for an instruction set; the rest is baseline code, so that the library runs anywhere.
X86 := $(filter x86_64 amd64 i386 i686,$(shell uname -m))
ifneq ($(X86),)
$(BUILD)/kernels/avx2.o:   CFLAGS += -mavx2 -mfma
$(BUILD)/kernels/avx512.o: CFLAGS += $(AVX512)
# Kernels with the same bits on every instruction set.
$(BUILD)/kernels/exact_avx2.o:   CFLAGS += -mavx2 -ffp-contract=off
$(BUILD)/kernels/exact_avx512.o: CFLAGS += $(filter-out -mfma,$(AVX512)) -ffp-contract=off
$(BUILD)/kernels/generic.o:      CFLAGS += -ffp-contract=off
$(BUILD)/kernels/avx512_bf16.o: CFLAGS += $(AVX512_BF16)
$(BUILD)/kernels/avx512_vnni.o: CFLAGS += $(AVX512) $(if $(findstring avx512f,$(AVX512)),-mavx512bw -mavx512vnni)
# The flag of AVX-VNNI, if the compiler has it; then an object without it is not used.
$(BUILD)/kernels/avx2_vnni.o: CFLAGS += -mavx2 -mfma $(shell echo | $(CC) -mavxvnni -E - >/dev/null 2>&1 && echo -mavxvnni)
# The flags of AMX, if the compiler has them; then an object without AMX is not used.
AMX = $(shell echo | $(CC) -mamx-tile -mamx-$(1) -E - >/dev/null 2>&1 && echo -mamx-tile -mamx-$(1))
$(BUILD)/kernels/amx_bf16.o: CFLAGS += $(if $(findstring avx512f,$(AVX512)),$(AVX512_BF16) $(call AMX,bf16),$(AVX512))
$(BUILD)/kernels/amx_int8.o: CFLAGS += $(AVX512) $(if $(findstring avx512f,$(AVX512)),-mavx512bw -mavx512vnni $(call AMX,int8))
endif

# The compute capabilities of all GPUs here, from 8.0 on: CUDA may number the GPUs in another order.  The awk pattern also drops
# error messages, which nvidia-smi prints to stdout if the driver does not work.
GPUS := $(if $(shell command -v $(NVCC)),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
            awk '/^[0-9]+[.][0-9]+ *$$/ && $$1 >= 8 {sub("[.]", "", $$1); print $$1 == "90" ? "90a" : $$1}' | sort -u))
all: cpu $(if $(GPUS),cuda) ## build what this machine can use: a bare `make` does this

cpu: $(LIBRARY) pyops/pyops.h bytecode ## build the CPU library, pyops/libpyops.so

# If Python does not write bytecode (PYTHONDONTWRITEBYTECODE, as in containers), every start compiles all modules; otherwise
# the first one does.  Failure is ignored: the library does not require Python.
bytecode: ## compile the modules of Python, so that no start has to
	@$(PYTHON) -m compileall -q $(sort $(dir $(wildcard */__init__.py))) >/dev/null 2>&1 || true

# OpenMP's threads outlive the last call: unloading the library would unmap the code they run.
NODELETE := $(if $(filter Darwin,$(shell uname -s)),,-Wl,-z,nodelete)

# RUNTIME: an object that replaces OpenMP's runtime (see schedules)
$(LIBRARY): $(OBJ) $(RUNTIME)
	$(call Q,$(CC))$(CC) -shared $(if $(RUNTIME),,-fopenmp) $(EXTRA_CFLAGS) $(NODELETE) -o $@ $^ -lm

pyops/pyops.h: csrc/pyops.h
	cp $< $@

pyops/device.h: cuda/device.h
	cp $< $@

# gcc lists the loops that it vectorises, for tests/project/test_build.py.  It appends to a list.
VECTORISED := $(if $(findstring Free Software,$(shell $(CC) --version 2>/dev/null)),-fopt-info-vec-optimized)
$(BUILD)/kernels/avx2.o $(BUILD)/kernels/avx512.o: REPORT = $(VECTORISED:%=%=$(@:.o=.vectorised))
$(BUILD)/%.o: csrc/%.c Makefile | $(PROBE)
	@mkdir -p $(dir $@) && rm -f $(@:.o=.vectorised)
	$(call Q,$(CC))$(CC) $(CFLAGS) $(REPORT) -c -o $@ $<

# NOT_SANITIZED: instruction sets whose kernels are compiled without the sanitizers in EXTRA_CFLAGS
$(NOT_SANITIZED:%=$(BUILD)/kernels/%.o): CFLAGS += -fno-sanitize=all
$(BUILD)/replay.o: CFLAGS += -I$(BUILD)
$(BUILD)/replay.o: $(BUILD)/replay_calls.inc
$(BUILD)/replay_calls.inc: csrc/replay.awk csrc/pyops.h | $(PROBE)
	awk -f $^ > $@.new && mv $@.new $@

# Print one line instead of a screen of errors.
$(PROBE):
	@mkdir -p $(BUILD)
	@command -v $(firstword $(CC)) >/dev/null || \
	    { echo "make: error: no C compiler '$(CC)': install gcc, or clang with libomp, or name one with make CC=..." >&2; exit 2; }
	@echo 'int main(void) { return 0; }' | $(CC) -fopenmp -x c - -o $@ 2>/dev/null || \
	    { echo "make: error: '$(CC)' cannot build an OpenMP program: install its OpenMP library (gcc: libgomp, clang: libomp)" >&2; exit 2; }

# On an aarch64 machine plain `make` builds this library; elsewhere this checks that the code compiles, and aarch64-test its results.
aarch64: ## cross-compile the CPU library for aarch64, build/aarch64/libpyops.so (needs gcc-aarch64-linux-gnu)
	$(MAKE) build/aarch64/libpyops.so CC=aarch64-linux-gnu-gcc X86= BUILD=build/aarch64 LIBRARY=build/aarch64/libpyops.so

# Two threads in both runs: the sizes of workspaces depend on their number.
QEMU ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
aarch64-test: cpu aarch64 .venv/test-ready build/aarch64/run_calls ## run the kernels of the op table on that library (needs qemu-user)
	PYOPS_ISA=generic OMP_NUM_THREADS=2 .venv/bin/python tests/helpers/recorded_calls.py build/aarch64/calls
	OMP_NUM_THREADS=2 $(QEMU) build/aarch64/run_calls build/aarch64/libpyops.so build/aarch64/calls

# With AVX2: valgrind has no AVX-512, and generic kernels branch on numbers that they discard.  A result that depends on memory
# which no kernel wrote is an error, and so is a read more than 64 bytes outside the arrays of a call.
valgrind: cpu .venv/test-ready build/valgrind/run_calls ## run the kernels of the op table under valgrind (x86): nothing undefined is used
	PYOPS_ISA=avx2 OMP_NUM_THREADS=2 .venv/bin/python tests/helpers/recorded_calls.py build/valgrind/calls
	PYOPS_ISA=avx2 OMP_NUM_THREADS=2 valgrind -q --error-exitcode=1 --track-origins=yes \
	    build/valgrind/run_calls ./$(LIBRARY) build/valgrind/calls

build/valgrind/run_calls: tests/backend/run_calls.c csrc/pyops.h Makefile
	@mkdir -p $(dir $@)
	$(CC) -std=gnu11 -O1 -g -Wall -Wextra -DUNDEFINED -Icsrc -o $@ $< -ldl -lm

build/aarch64/run_calls: tests/backend/run_calls.c csrc/pyops.h Makefile
	@mkdir -p $(dir $@)
	aarch64-linux-gnu-gcc -std=gnu11 -O1 -Wall -Wextra -Icsrc -o $@ $< -ldl -lm

# ---- CUDA: the real library by nvcc, and the same files by g++ on an emulator (cuda/emu), which requires no GPU ----
CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
# native: the GPUs of this machine; all: every architecture from 80; else numbers separated by semicolons
CUDA_ARCH ?= $(if $(GPUS),native,80;90a)
CUDA_BUILD ?= build/cuda
NVCC_EXTRA ?=
comma := ,
GENCODE := $(if $(filter native,$(CUDA_ARCH)),$(or $(GPUS),$(error CUDA_ARCH=native: no nvcc, or no GPU of compute capability 8.0 or later; give CUDA_ARCH='80;90a')),\
             $(if $(filter all,$(CUDA_ARCH)),80 86 89 90a 100 120,$(subst ;, ,$(CUDA_ARCH))))
CUDA_INCLUDES := -Icuda/common -Icuda -Icsrc -I$(BUILD)
NVCCFLAGS := -std=c++17 -O3 $(NVCC_EXTRA) -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(CUDA_INCLUDES) -lineinfo \
             $(foreach a,$(GENCODE),-gencode arch=compute_$(a),code=sm_$(a)) \
             $(if $(filter 90a,$(GENCODE)),-DPYOPS_FOR_90A) $(if $(filter 80,$(GENCODE)),-gencode arch=compute_80$(comma)code=compute_80)
# Objects for other GPUs are out of date: all objects depend on an empty file, the only one of its kind, that names the GPUs.
CUDA_FOR := $(CUDA_BUILD)/for-$(subst $(subst ,, ),-,$(strip $(GENCODE)))
CU := $(wildcard cuda/*.cu cuda/common/*.cu)
CUDA_LIBRARY ?= pyops/libpyops_cuda.so
EMULATED ?= pyops/libpyops_emulated.so
EMULATED_BUILD ?= build/emulated
# The tests take as long as with -O2, and the build less.
EMULATED_FLAGS ?= -O1

cuda: $(CUDA_LIBRARY) pyops/device.h ## build the CUDA library, pyops/libpyops_cuda.so (CUDA_ARCH=native|all|80;90a)

$(CUDA_LIBRARY): $(CU:cuda/%.cu=$(CUDA_BUILD)/%.o)
	$(call Q,$(NVCC))$(NVCC) -shared -o $@ $^ -Xlinker -Bsymbolic -Xlinker -z,defs

$(CUDA_BUILD)/common/replay.o $(EMULATED_BUILD)/common/replay.o: $(BUILD)/replay_calls.inc
$(CUDA_FOR):
	@mkdir -p $(dir $@) && rm -f $(CUDA_BUILD)/for-* && touch $@
$(CUDA_BUILD)/%.o: cuda/%.cu Makefile $(CUDA_FOR)
	@mkdir -p $(dir $@)
	$(call Q,$(NVCC))$(NVCC) $(NVCCFLAGS) -MD -MP -MF $(@:.o=.d) -c -o $@ $<

emulated: $(EMULATED) $(EMULATED_BUILD)/ladder pyops/device.h ## build the same kernels for an emulator on the CPU, for tests without a GPU

# The emulator is never instrumented: libraries with and without sanitizers share it.
EMULATOR := $(patsubst cuda/emu/%.cpp,build/emulator/%.o,$(wildcard cuda/emu/*.cpp))
EMULATED_CXX := $(CXX) -std=c++17 -fPIC -fvisibility=hidden -Wall -Wno-unknown-pragmas -Icuda/emu/include $(CUDA_INCLUDES) -MMD -MP
EMULATED_LIBS := -Wl,-Bsymbolic -Wl,-z,defs -lpthread -ldl

$(EMULATED): $(CU:cuda/%.cu=$(EMULATED_BUILD)/%.o) $(EMULATOR)
	$(call Q,$(CXX))$(CXX) -shared $(filter -fsanitize%,$(EMULATED_FLAGS)) -o $@ $^ $(EMULATED_LIBS)

$(EMULATED_BUILD)/%.o: cuda/%.cu Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(EMULATED_CXX))$(EMULATED_CXX) $(EMULATED_FLAGS) -x c++ -c -o $@ $<

build/emulator/%.o: cuda/emu/%.cpp Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(EMULATED_CXX))$(EMULATED_CXX) -Wextra -O2 -c -o $@ $<

# Without prerequisites: it links the objects of `make emulated`, whatever their age.
exercise: ## for `pyops exercises`: the emulated library with FILE in place of cuda/NAME.cu, as OUT/exercise.so
	@$(EMULATED_CXX) -O1 -x c++ -c -o $(OUT)/exercise.o $(FILE)
	@$(CXX) -shared -o $(OUT)/exercise.so $(filter-out $(EMULATED_BUILD)/$(NAME).o,$(CU:cuda/%.cu=$(EMULATED_BUILD)/%.o)) $(OUT)/exercise.o \
	    $(EMULATOR) $(EMULATED_LIBS)

# Steps of optimising a matrix product: timed on a GPU, checked on the emulator.
LADDER_SIZE ?= 8192 8192 8192
ladder: $(CUDA_BUILD)/ladder $(CUDA_LIBRARY) ## time the steps of cuda/dev/ladder.cu on this GPU (LADDER_SIZE="M N K")
	$< $(LADDER_SIZE) ./$(CUDA_LIBRARY)

$(CUDA_BUILD)/ladder: cuda/dev/ladder.cu Makefile $(CUDA_FOR)
	@mkdir -p $(dir $@)
	$(call Q,$(NVCC))$(NVCC) $(NVCCFLAGS) -MD -MP -MF $@.d -o $@ $< -ldl

$(EMULATED_BUILD)/ladder: cuda/dev/ladder.cu $(EMULATOR) Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(EMULATED_CXX))$(EMULATED_CXX) $(EMULATED_FLAGS) -o $@ -x c++ $< -x none $(EMULATOR) $(EMULATED_LIBS)

# For tests/cuda/test_emulator.py: correct kernels and kernels with bugs, each without and with every sanitizer; and one kernel
# per wrapper, whose results tests/cuda/conformance.py compares with a GPU's.
PLAIN := -O2
ASAN := -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
TSAN := -g -O1 -fsanitize=thread
PROGRAMS := $(foreach v,plain asan tsan,build/emulator/$v/good build/emulator/$v/bugs)
emulator: $(PROGRAMS) build/conformance/emulated.so ## build what proves the emulator: kernels with bugs, and one for each instruction
conformance: build/conformance/emulated.so build/conformance/cuda.so ## build what compares a GPU with the emulator

build/emulator/plain/%: SANITIZE := $(PLAIN)
build/emulator/asan/%: SANITIZE := $(ASAN)
build/emulator/tsan/%: SANITIZE := $(TSAN)
$(filter %/good,$(PROGRAMS)): tests/cuda/good.cu
$(filter %/bugs,$(PROGRAMS)): tests/cuda/bugs.cu
$(PROGRAMS): build/emulator/%: $(EMULATOR) tests/cuda/common.h Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(EMULATED_CXX))$(EMULATED_CXX) $(SANITIZE) -x c++ -c -o $@.o tests/cuda/$(notdir $@).cu
	$(call Q,$(CXX))$(CXX) $(SANITIZE) -o $@ $@.o $(EMULATOR) $(EMULATED_LIBS)

build/conformance/emulated.so: cuda/test/conformance.cu $(EMULATOR) Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(EMULATED_CXX))$(EMULATED_CXX) $(PLAIN) -x c++ -c -o $@.o $<
	$(call Q,$(CXX))$(CXX) -shared -o $@ $@.o $(EMULATOR) $(EMULATED_LIBS)

build/conformance/cuda.so: cuda/test/conformance.cu cuda/common/gpu.cuh cuda/common/hopper.cuh Makefile $(CUDA_FOR)
	@mkdir -p $(dir $@)
	$(call Q,$(NVCC))$(NVCC) $(NVCCFLAGS) -shared -o $@ $<

# The op table on the emulator under a sanitizer (gcc's).  Python is not instrumented, so the sanitizer is preloaded.
EMULATED_TABLE ?= $(TABLE)
OF_THE_CPU := requested_kernels or PYOPS_ISA or only_the_abi
emulated-asan: .venv/test-ready ## the op table on the emulator under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE) build/emulated-asan/libpyops.so EMULATED_BUILD=build/emulated-asan EMULATED=build/emulated-asan/libpyops.so EMULATED_FLAGS='$(ASAN)'
	PYOPS_SYNC=1 PYOPS_LIBRARY=build/emulated-asan/libpyops.so ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$($(CXX) -print-file-name=libasan.so) \
	    .venv/bin/python -m pytest -q -p no:cacheprovider $(EMULATED_TABLE) -k 'not (torch or $(OF_THE_CPU))'

# setarch -R: ThreadSanitizer fails if address randomisation places mappings in its own address ranges.
emulated-tsan: .venv/test-ready ## the op table on the emulator under ThreadSanitizer
	$(MAKE) build/emulated-tsan/libpyops.so EMULATED_BUILD=build/emulated-tsan EMULATED=build/emulated-tsan/libpyops.so EMULATED_FLAGS='$(TSAN)'
	PYOPS_SYNC=1 PYOPS_LIBRARY=build/emulated-tsan/libpyops.so OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	    TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0 LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so) setarch -R \
	    .venv/bin/python -m pytest -q -p no:cacheprovider $(EMULATED_TABLE) -k 'not (torch or $(OF_THE_CPU))'

venv: .venv/test-ready ## make .venv and install the package there, editable, with the packages that the tests use

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: error: $(PYTHON) is too old or missing: expected Python 3.11 or later; name one with make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv .venv

# pip builds the package by a make of its own in this folder: the library must be complete before, or both write the same files.
.venv/ready: pyproject.toml | cpu .venv/bin/python
	.venv/bin/python -m pip install -q --disable-pip-version-check -e .
	touch $@

.venv/test-ready: .venv/ready
	.venv/bin/python -m pip install -q --disable-pip-version-check -e '.[test]'
	touch $@

DEMO_EPOCHS ?= 6
demo: cpu .venv/ready ## train on the embedded corpus for about a minute, then translate ten unseen sentences
	.venv/bin/python -m seq2seq.train -f embedded -e $(DEMO_EPOCHS) -c demo
	.venv/bin/python -m seq2seq.translate -f embedded -c demo --test 10

.venv/site-ready: .venv/ready
	.venv/bin/python -m pip install -q --disable-pip-version-check -e '.[site]'
	touch $@

site: .venv/site-ready ## build a web site of docs/ with an API reference, in build/site; it needs no network and no server
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict -q

.venv/wheel-ready: .venv/ready
	.venv/bin/python -m pip install -q --disable-pip-version-check -e '.[wheel]'
	touch $@

# The wheel is built from the source archive, so it contains nothing of this folder but its sources.  Without nvcc: a CUDA library
# is for the GPUs of this machine.  auditwheel adds libgomp and names the oldest glibc that the wheel runs with.
wheel: .venv/wheel-ready ## build dist/: a source archive, and a wheel for the CPU that needs no compiler
	rm -rf build/wheel && mkdir -p dist
	env -u MAKEFLAGS -u MAKELEVEL NVCC=none .venv/bin/python -m build --no-isolation -o build/wheel
	$(if $(filter Linux,$(shell uname -s)),PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair -w dist build/wheel/*.whl,cp build/wheel/*.whl dist)
	cp build/wheel/*.tar.gz dist

.venv/conda-ready: .venv/ready
	.venv/bin/python -m pip install -q --disable-pip-version-check -e '.[conda]'
	touch $@

conda: .venv/conda-ready ## build a conda package of the CPU library in dist/conda and test it (needs the channel conda-forge)
	.venv/bin/python -m scripts.conda_package dist/conda

# The whole range of GPUs, unless CUDA_ARCH is given.
cuda-wheel: cpu .venv/wheel-ready ## build dist/pyops_cuda-*.whl, the CUDA library for use with the CPU wheel (needs nvcc; CUDA_ARCH=all)
	$(MAKE) cuda CUDA_ARCH='$(if $(filter file,$(origin CUDA_ARCH)),all,$(CUDA_ARCH))' CUDA_BUILD=build/cuda-wheel \
	    CUDA_LIBRARY=build/cuda-wheel/libpyops_cuda.so
	rm -f build/cuda-wheel/*.whl && mkdir -p dist
	.venv/bin/python -m scripts.cuda_wheel build/cuda-wheel/libpyops_cuda.so build/cuda-wheel
	PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel repair -w dist build/cuda-wheel/*.whl

# Tests run in three processes for two cores, since many wait for a process of their own.  WORKERS=0 runs them in a single one, for
# debuggers.
WORKERS ?= $(shell echo $$(($(CORES) * 3 / 2)))
PYTEST := .venv/bin/python -m pytest -q -rs -n $(WORKERS) --dist worksteal
TABLE := $(patsubst %,tests/ops/test_%.py,table ops cpu_bf16 compact) $(patsubst %,tests/backend/test_%.py,kernels strided formats)

# The tests of ops and kernels on the CPU, without those that train models.
COVERED := $(filter-out %mutants.py %quantization.py,$(wildcard tests/ops/test_*.py)) tests/training/test_optim.py \
           tests/autograd/test_double.py \
           $(patsubst %,tests/backend/test_%.py,arguments kernels strided formats scaled_formats hadamard narrow_sums fp8 ndarray recorded)

C_FILES = $(shell find csrc cuda bench -name '*.[ch]' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp')
lint: .venv/test-ready ## check the Python code with ruff and its types with mypy, the C and CUDA code with clang-format
	.venv/bin/python -m ruff check
	.venv/bin/python -m mypy
	.venv/bin/clang-format --dry-run -Werror $(C_FILES)

format: .venv/test-ready ## format the C and CUDA code
	.venv/bin/clang-format -i $(C_FILES)

test: cpu .venv/test-ready lint ## run the tests: a few minutes; `make test-all` runs them on all instruction sets and on the emulator
	$(PYTEST) $(if $(WRITE_PASSED),--write-passed=$(WRITE_PASSED)) tests

# The AVX-512 tiles use the compiler's vector types, so a CPU without AVX-512 runs the same code, compiled for AVX2.  The
# instructions of AMX are emulated in C.
lowered: ## build the library for CPUs without AVX-512 or AMX: AVX-512 compiled for AVX2, AMX emulated; pytest --on avx512, amx_bf16
	$(MAKE) cpu BUILD=build/lowered LIBRARY=build/lowered/libpyops.so EXTRA_CFLAGS='-O1 -DPYOPS_LOWERED=1 -DPYOPS_WITHOUT_EXACT=1 -Wno-psabi' AVX512='-mavx2 -mfma'

# The op table on each instruction set but the best of this CPU, which the last command uses: all tests, the slow ones too, and
# PyTorch's results, which check definitions; the numbers of the others are compared with references in float64.  AMX
# has kernels for products only, and a CPU with AVX512_BF16 uses AVX-512 kernels for all else, so these two need their tests.
# Exact kernels have the bits of generic (tests/backend/test_exact.py), so they need the table of ops alone.
# SKIP_PASSED=FILE leaves out of it the tests that passed in `make test WRITE_PASSED=FILE`.
HAS = $(if $(X86),$(shell grep -ls $(1) /proc/cpuinfo))
OTHER_TABLES = generic $(if $(X86),$(if $(call HAS,avx512dq),avx2,avx512))
OTHER_ISAS = $(OTHER_TABLES) $(if $(X86),$(if $(call HAS,amx_bf16),avx512))
WITHOUT_AMX = $(if $(X86),$(if $(call HAS,amx_bf16),,yes))
OF_AMX = bf16 or int8 or gemm or product or linear or gru or lstm or compact
test-all: cpu .venv/test-ready lint $(if $(X86),lowered) ## run the op table on each instruction set and on the emulated CUDA library, then all tests
	for isa in $(OTHER_ISAS); do $(PYTEST) --on $$isa $(TABLE) -k 'not torch' || exit 1; done
	$(if $(WITHOUT_AMX),$(PYTEST) --on amx_bf16 $(TABLE) -k '($(OF_AMX)) and not torch')
	$(if $(WITHOUT_AMX),$(if $(call HAS,avx512_bf16),$(PYTEST) --on avx512 $(TABLE) -k '(bf16 or int8) and not torch'))
	$(if $(X86),$(PYTEST) --on exact tests/ops/test_table.py tests/backend/test_kernels.py -k 'not (bf16 or torch)')
	$(MAKE) test-emulated
	$(PYTEST) --slow $(if $(SKIP_PASSED),--skip-passed=$(SKIP_PASSED)) tests

# The tests of everything that allocates on the current device, on the emulated CUDA library; then the table again with other
# thread orders.  EMULATED_TESTS=all adds autograd, functions, layers and random chains, which takes minutes.
EVERYWHERE := tests/training/test_plan.py tests/ops/test_mlp_step.py tests/inspect/test_saving.py \
              tests/nn/test_transformer_layers.py \
              $(if $(filter all,$(EMULATED_TESTS)),tests/backend/test_chains.py tests/autograd $(filter-out %/test_transformer_layers.py,$(wildcard tests/nn/test_*.py)))
test-emulated: .venv/test-ready ## run the tests of ops, arrays and plans on the CUDA library, emulated
	$(MAKE) cpu emulated emulator
	$(PYTEST) --on emulated $(TABLE) $(EVERYWHERE) -k 'not seq2seq and not central_differences'
	$(PYTEST) --on emulated tests/backend/test_ndarray.py -k gpu
	$(PYTEST) --on emulated tests/training/test_distributed.py -k 'sums_of or cut_into'
	for order in reverse 7; do EMU_ORDER=$$order $(PYTEST) --on emulated $(TABLE) \
	    -k 'overwrite or large_gemm or grad_norm or argmax' || exit 1; done

# The kernels of the other instruction sets do not run, and sanitizers would make up half of the time to compile them all.
asan: .venv/test-ready ## the op table and arrays under AddressSanitizer and UndefinedBehaviorSanitizer (gcc)
	$(MAKE) cpu BUILD=build/asan LIBRARY=build/asan/libpyops.so NOT_SANITIZED='$(OTHER_TABLES)' \
	    EXTRA_CFLAGS='-g -O1 -DPYOPS_WITHOUT_EXACT=1 -fsanitize=address,undefined -fno-sanitize-recover=undefined'
	PYOPS_LIBRARY=build/asan/libpyops.so ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) \
	    $(PYTEST) -p no:cacheprovider $(TABLE) tests/backend/test_ndarray.py tests/backend/test_chains.py -k 'not torch'

# SAVE=1 writes the figures of these commands to docs/reliability.md.
FIGURES := $(if $(SAVE),--save)

# Constants that are drawn: PYOPS_TUNED in csrc/internal.h.  The same objects serve both targets and scripts/source_mutants.py;
# outside of `schedules` the C library's empty functions take the calls of -finstrument-functions.
SEEDS ?= 0 1 2 3
DRAWN = $(MAKE) $(1) BUILD=build/drawn LIBRARY=$(1) RUNTIME=$(2) \
    EXTRA_CFLAGS='-O1 -DPYOPS_WITHOUT_EXACT=1 -g1 -DPYOPS_BUGGIFY=1 -finstrument-functions'
FOR_SEEDS = .venv/bin/python -m scripts.seeds $(1) $(SEEDS) $(FIGURES) --pytest -q -rs -n $(WORKERS) --dist worksteal \
    $(TABLE) -k '$(2)'
buggify: cpu .venv/test-ready ## the op table with sizes of blocks and bounds of sharing drawn at random, once for each of SEEDS
	+$(call DRAWN,build/drawn/libpyops.so)
	$(call FOR_SEEDS,buggify,not torch)

# All threads of a region run one at a time, with the smallest bounds of sharing: see tests/helpers/schedules.c.
schedules: cpu .venv/test-ready schedules-library ## the op table on threads that run in an order drawn at random, for each of SEEDS
	$(call FOR_SEEDS,schedules,not torch and not only_the_abi)

schedules-library: ## build the library of `schedules`, build/drawn/schedules.so
	+$(call DRAWN,build/drawn/schedules.so,build/drawn/schedules.o)

build/drawn/schedules.o: tests/helpers/schedules.c Makefile
	@mkdir -p $(dir $@)
	$(call Q,$(CC))$(CC) -std=gnu11 -O1 -fPIC -Wall -Wextra -fvisibility=hidden -c -o $@ $<

# -O0: optimised code has no branch of its own for each of the source.  Without always_inline: every copy of an inlined function
# would have its own branches, most of them on constant arguments.
coverage: .venv/test-ready ## count the lines and branches of csrc/ that the tests of ops run, with AVX2 (gcc and gcov)
	rm -f build/coverage/*.gcda build/coverage/kernels/*.gcda
	$(MAKE) cpu BUILD=build/coverage LIBRARY=build/coverage/libpyops.so \
	    EXTRA_CFLAGS='-O0 -Dalways_inline=unused -DPYOPS_WITHOUT_EXACT=1 --coverage -fprofile-update=atomic'
	PYOPS_ISA=avx2 PYOPS_LIBRARY=build/coverage/libpyops.so $(PYTEST) -p no:cacheprovider $(COVERED) \
	    -k '(not torch or test_double) and not only_the_abi'
	.venv/bin/python -m scripts.coverage build/coverage $(if $(filter file,$(origin COVERED)),--check) $(FIGURES)

SECONDS ?= 60
soak: cpu .venv/test-ready ## train random programs for SECONDS, with plans, threads and other memory: the bits must be equal
	.venv/bin/python -m scripts.soak --seconds $(SECONDS) $(FIGURES)

MINUTES ?= 1
fuzz: cpu .venv/test-ready ## give random inputs to all readers for MINUTES: each must be read or refused with one line
	.venv/bin/python -m scripts.fuzz --minutes $(MINUTES) $(FIGURES)

rewind-questions: cpu .venv/test-ready ## ask for random tensors of past steps: they must have the bits that the run saved
	.venv/bin/python -m scripts.rewind_questions $(FIGURES)

endurance: cpu .venv/test-ready ## train, stop, resume, translate and serve in turns for MINUTES: nothing may be left or grow
	.venv/bin/python -m scripts.endurance --minutes $(MINUTES) $(FIGURES)

ROUNDS ?= 20
faults: cpu .venv/test-ready ## kill runs and cut their power ROUNDS times each: the resumed run must equal an undisturbed one
	.venv/bin/python -m scripts.faults --rounds $(ROUNDS) $(FIGURES)

mutants: cpu .venv/test-ready ## replace every kernel of the op table by wrong ones: its tests must fail each time
	.venv/bin/python -m scripts.mutants $(FIGURES)

source-mutants: cpu .venv/test-ready ## change csrc/ at one place at a time for SECONDS: the tests of ops must fail each time
	.venv/bin/python -m scripts.source_mutants --seconds $(SECONDS) $(FIGURES)

BENCH := .venv/bin/python -m bench
# LLMC=DIR: also llm.c, from a checkout.
bench: cpu .venv/ready ## the machine's limits, kernels, training, translation beside peers (needs .venv/bin/pip install torch jax)
	$(BENCH).kernels --save
	$(BENCH).train seq2seq --vs torch jax --save
	$(BENCH).train transformer --vs torch jax --save
	$(BENCH).train mnist --vs torch jax --save
	$(BENCH).train transformer --preset base --recompute --vs torch jax --save
	$(BENCH).train seq2seq --precision bf16 --vs torch --save
	$(BENCH).train transformer --precision bf16 --vs torch --save
	$(BENCH).gpt2 $(if $(LLMC),--llmc $(LLMC)) --save
	$(BENCH).translate seq2seq --save
	$(BENCH).translate transformer --save
	$(BENCH).train seq2seq --scaling --save
	$(BENCH).table

floor: cpu .venv/ready ## large matrix products reach 60 % of the limit of multiply-adds, or exit status 1
	OPENBLAS_NUM_THREADS=1 $(BENCH).floor

# QUALITY: flags of bench.quality, such as "--minutes 10 --eval-every 60"
QUALITY ?= --minutes 30
quality: cpu .venv/test-ready ## train the transformer and its PyTorch twin for the same time: BLEU against seconds (needs torch and fra-eng)
	$(BENCH).quality $(QUALITY)

# FLAGS: --emulated, --limit SECONDS, --report FILE
gpu-check: ## on a machine with a GPU: list the checks; PART=NAME or PART=all runs them
	@$(PYTHON) -m bench.gpu_check $(PART) $(FLAGS)

clean: ## remove what was built
	rm -rf build pyops/libpyops*.so pyops/pyops.h pyops/device.h *.egg-info

help: ## print this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

-include $(OBJ:.o=.d) $(wildcard $(CUDA_BUILD)/*.d $(CUDA_BUILD)/common/*.d $(EMULATED_BUILD)/*.d $(EMULATED_BUILD)/common/*.d \
         build/emulator/*.d build/emulator/*/*.d build/conformance/*.d)
