# test/tests.mk - how the tests are built and run; Makefile includes it.
#
#   test, test-says every check that this machine can make; what that takes and leaves out
#   mutants         faults planted in a copy: do the tests see them? WHICH= names some
#   asan            the tests under sanitizers;  fuzz: strange files, with clang, FUZZ_SECONDS each
#   race            the kernels at length, with every access watched
#   web-test        the page beside ./kvcomp, in node and in headless Chromium
#   cuda-check      what the compiler made of each kernel
#   gpu-test, gpu-bench     on a machine with a GPU
#   vectors         traces of every paper, for ports;  ports-test: the ports for Python beside ./kvcomp
.PHONY: test test-says mutants asan race fuzz vectors ports-test web-test cuda-check \
        gpu-test gpu-bench

# ---- the test programs
# Each includes the parts whose static functions it tries, and is linked with the others. kvcomp.cu's kernels
# are tested without a GPU: g++ compiles them against test/cuda_emu.h. Without g++ they are left out.
TEST_FLAGS = -Werror -O1 -g1 -Wno-unused-function -DKVCOMP_NO_MAIN
SANITIZE_C = address,undefined -fno-sanitize-recover=undefined
$(eval $(call flavour,test,$(TEST_FLAGS) $(if $(CXX_OK),-DKVCOMP_CUDA)))
$(eval $(call flavour,asan,-Werror -O1 -g1 -Wno-unused-function -DKVCOMP_NO_MAIN -fsanitize=$(SANITIZE_C)))

# The objects of the parts $(1). Those of lib/ are the program's own, because no flag of a test changes them.
tested = $(call objects,$(if $(CUDA),cuda,cpu),$(filter lib/%,$(1))) $(call objects,test,$(filter-out lib/%,$(1)))

# $(1): a program; $(2): its source; $(3): parts that it is linked with; $(4): and the emulated device
define test_program
TESTS += $(1)
$(1): build/test/$(2).o $(call tested,$(3)) $(if $(CXX_OK),$(4))
	$$(CC) $$(OPENMP) -o $$@ $$^ $$(READLINE) -lm -lpthread
$(1)_asan: build/asan/$(2).o $(call objects,asan,$(3))
	$$(CC) $$(OPENMP) -fsanitize=$$(SANITIZE_C) -o $$@ $$^ -lm
endef
EMULATED = build/kvcomp_emu.o
TESTS_WITH = lib/base lib/kernels lib/tokenizer lib/template app/terminal app/trace app/page app/main
$(eval $(call test_program,tests,tests,$(TESTS_WITH),$(EMULATED)))
$(eval $(call test_program,tests_kernels,test/test_kernels,lib/base lib/kernels))
$(eval $(call test_program,tests_lib,test/test_lib,lib/kernels lib/tokenizer lib/template $(APP),$(EMULATED)))
$(eval $(call test_program,tests_tokenizer,test/test_tokenizer,lib/base))
$(eval $(call test_program,tests_template,test/test_template,$(filter-out lib/tokenizer,$(PARTS)),$(EMULATED)))
$(eval $(call test_program,tests_app,test/test_app,lib/kernels lib/tokenizer lib/template,$(EMULATED)))

# kvcomp.cu by g++: as it is; and in the emulator's harder modes (cuda_emu.h: arithmetic as a GPU rounds it, accesses
# of threads and blocks watched, memory that is used again poisoned), where -fsanitize=thread makes the compiler
# report every access to cuda_emu.h, fused multiply-add is what nvcc makes of a product and a sum, and an access
# that is not aligned to its type ends the program (SIGILL).
EMU_SET  = $(shell grep -w fma /proc/cpuinfo 2>/dev/null | grep -qw avx2 && echo -mavx2 -mfma)
EMU_emu  = -O2 $(EMU_SET) -ffp-contract=off
EMU_hard = -O1 -DEMU_HARD=1 -fsanitize=thread,alignment -fsanitize-undefined-trap-on-error -Wno-tsan \
           $(EMU_SET) -ffp-contract=fast
KERNEL_FILES = kvcomp.cu kvcomp.h $(wildcard lib/*.h)
build/kvcomp_emu.o build/kvcomp_hard.o: build/kvcomp_%.o: $(KERNEL_FILES) test/cuda_emu.h test/cuda_doors.h Makefile test/tests.mk
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu for the emulator: about a minute"
	g++ -x c++ -std=c++17 -g1 -Wall -Wextra -Werror -Wno-unused-function -fno-exceptions -fno-rtti -DKVCOMP_TEST \
	  -include test/cuda_emu.h $(EMU_$*) -c -o $@ kvcomp.cu

# The program with the emulated device as its GPU: test/reference.sh records and compares it.
kvcomp_emulated: $(call objects,cuda,$(PARTS)) build/kvcomp_emu.o
	$(LINK) -o $@ $^ $(READLINE) -lm -lpthread

tests_hard: build/test/tests.o $(call tested,$(TESTS_WITH)) build/kvcomp_hard.o
	$(CC) $(OPENMP) -o $@ $^ -lm -lpthread

# So that it cannot rot where no GPU is: does nvcc take it?
build/kvcomp_nvcc.o: $(KERNEL_FILES)
	@mkdir -p $(@D)
	@echo "compiling kvcomp.cu by nvcc: about a minute"
	$(NVCC) -std=c++17 -O3 -Werror all-warnings -DKVCOMP_CUDA $(filter -I%,$(CUDA)) -arch=sm_90 -Xptxas -O0 -c -o $@ kvcomp.cu

# ---- make test
# What is coming, before it comes: the time, and what this machine leaves out.
test-says:
	@echo "make test: 180 to 290 CPU seconds of tests, behind two minutes of compiling"
	@$(if $(CXX_OK),,echo "left out: the GPU kernels under the emulator; g++ brings them back";) \
	$(if $(NVCC),,echo "left out: kvcomp.cu compiled by nvcc; the CUDA toolkit brings it back";) \
	python3 -c 'import numpy' 2>/dev/null || echo "left out: the checkers in NumPy; python3-numpy brings them back"; \
	[ -f models/smollm2-135m/model.safetensors ] || echo "left out: a real chat model; make smollm2 brings it back"

# Each runs, whether one before it failed or not. The emulated device needs g++: where there is none it is
# installed first, or left out.
HARD_TESTS = cuda_math cuda_one_product cuda_halved cuda_prefill_error cuda_rows cuda_attention cuda_tensor \
             cuda_select cuda_lines cuda_table cuda_index cuda_dialogues cuda_emulator cuda_columns
ifeq ($(CXX_OK)$(CXX_TRIED),)
test: deps
	@$(SHELL) data/install.sh g++ || true
	@$(MAKE) --no-print-directory CXX_TRIED=1 test
else
test: test-says kvcomp $(TESTS) $(if $(CXX_OK),tests_hard) $(if $(NVCC),build/kvcomp_nvcc.o)
	bad=0; for t in $(TESTS); do echo "$$t"; $(if $(CXX_OK),KVCOMP_HARDER=1) ./$$t || bad=1; done; exit $$bad
	$(if $(CXX_OK),./tests_hard $(HARD_TESTS))
endif

# Faults planted one by one: which of them do the tests see?
mutants:
	sh test/mutants.sh $(WHICH)

# data/vectors: made anew only when what a method decides has changed on purpose.
vectors: kvcomp
	while read -r name args; do \
	  ./kvcomp $$args --trace data/vectors/$$name.safetensors || exit 1; \
	done <data/vectors/commands

# What cannot be installed for these two is left out, and counted.
ports-test: kvcomp
	@sh data/ports/test.sh

web-test: kvcomp
	@MAKE="$(MAKE)" sh data/web.sh test

# ---- sanitizers and strange files
# Every kernel in the harder emulator, and in three orders of threads: ten minutes of two cores.
race: tests_hard tests
	KVCOMP_ORDERS=3 ./tests_hard cuda
	KVCOMP_ORDERS=3 ./tests cuda

ASAN = $(TESTS:=_asan)
asan: kvcomp $(ASAN)
	for t in $(ASAN); do ./$$t || exit 1; done

# Fuzz targets need clang with its runtime (Debian: clang libclang-rt-dev); FUZZ_SECONDS each, one after the
# other. What they learn stays in fuzz_corpus/. The strings of stb_ds.h lie in arrays that are declared too
# short on purpose.
FUZZ_SECONDS ?= 60
FUZZ = json safetensors config tokenizer session adapter scores ids dialogues answers batch template chat
fuzz_targets: test/fuzz.c build/page_html.h $(wildcard kvcomp.[ch] lib/*.[ch] app/*.[ch]) | deps
	printf '[bounds]\nsrc:*/stb_ds.h\n' >fuzz_ignored
	clang -std=c11 -O1 -g -fsanitize=fuzzer,$(SANITIZE_C) -fsanitize-ignorelist=fuzz_ignored -Ibuild -o $@ test/fuzz.c -lm

fuzz: fuzz_targets
	for t in $(FUZZ); do \
	  echo "fuzz $$t"; \
	  mkdir -p fuzz_corpus/$$t; \
	  FUZZ_TARGET=$$t ./fuzz_targets -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=20 \
	    -rss_limit_mb=4096 -artifact_prefix=fuzz_found_ fuzz_corpus/$$t || exit 1; \
	done

# ---- with nvcc, and on a GPU (without them Makefile has a line for these goals)
ifneq ($(CUDA),)
# A tool of the toolkit: on PATH, or beside nvcc.
toolkit = $(firstword $(shell command -v $(1) 2>/dev/null) $(wildcard $(dir $(NVCC))$(1) $(dir $(NVCC))../compute-sanitizer/$(1)))
CUOBJDUMP = $(call toolkit,cuobjdump)
SANITIZER = $(call toolkit,compute-sanitizer)

# A table of all kernels: instructions and bytes of their main loops, registers, shared memory, spills.
# data/cuda_loops.awk says what the columns are, and what is a failure. CHECK_ARCHS=90 is the quick one.
CHECK_ARCHS = 80 90 100 120
cuda-check: $(KERNEL_FILES)
	@mkdir -p build
	@$(NVCC) $(NVFLAGS) -Werror all-warnings --threads 4 $(call machine_code,$(CHECK_ARCHS)) -Xptxas -v -c -o build/check.o \
	  kvcomp.cu 2>build/check.txt || { cat build/check.txt; exit 1; }
	@{ cat lib/cuda_kernels.h kvcomp.cu build/check.txt; $(if $(CUOBJDUMP),$(CUOBJDUMP) -sass build/check.o;) } \
	  | c++filt | awk -v sass="$(CUOBJDUMP)" -f data/cuda_loops.awk

# The CUDA tests on a real device, and the smaller ones under compute-sanitizer where it is installed.
SANITIZE  = memcheck racecheck synccheck
SANITIZED = cuda_math cuda_rows cuda_attention cuda_table cuda_steps
gpu-test: tests.c kvcomp.cu test/cuda_doors.h $(call tested,$(TESTS_WITH)) | deps
	$(NVCC) $(NVFLAGS) -arch=native -lineinfo -DKVCOMP_TEST -c -o tests_gpu_cuda.o kvcomp.cu
	$(CC) $(WARN) -Wno-unused-function -O2 -g $(OPENMP) -DKVCOMP_CUDA -c -o tests_gpu.o tests.c
	$(NVCC) -o tests_gpu tests_gpu.o tests_gpu_cuda.o $(call tested,$(TESTS_WITH)) $(NVLINK)
	./tests_gpu cuda
	@s="$(SANITIZER)"; if [ -z "$$s" ]; then echo "compute-sanitizer is not installed: its checks are left out"; \
	else for t in $(SANITIZE); do "$$s" --tool $$t --error-exitcode 1 ./tests_gpu $(SANITIZED) || exit 1; done; fi

# Speed on a real device: the papers' methods on random weights of a real shape, one table a method.
gpu-bench: kvcomp
	for m in full streaming snapkv quest lychee pats loopserve-d; do ./kvcomp --bench -d cuda --method $$m -b 2048 -r 3 \
	  --synthetic llama-3.1-8b --bench-prompts 2048,8192,32768 --bench-depths 0,8192,32768,65536,131072 || exit 1; done
endif
