# kvcomp. `make` builds what this machine can; `make run` chats; `make test` proves. On a Debian machine the first two
# lines a newcomer types are enough: what is missing (gcc, libstb-dev) is installed first, and said so.

ifeq ($(origin CC),default)
CC := gcc
endif
CFLAGS ?= -O3
WARN    = -std=c11 -Wall -Wextra -Werror
# OpenMP if the compiler can link it; the program is right without it, only slower. Looked up when a recipe runs, because
# the compiler may have been installed only then
OPENMP  = $(shell d=$$(mktemp -d) && echo 'int main(void){return 0;}' > $$d/a.c && $(CC) -fopenmp -o $$d/a $$d/a.c 2>/dev/null && echo -fopenmp || echo -Wno-unknown-pragmas; rm -rf $$d)

all: kvcomp

# stb_ds.h is the one library; a compiler and it are all that is needed
.PHONY: all deps run test asan race fuzz clean
deps:
	@echo '#include <stb/stb_ds.h>' | $(CC) -E -x c - >/dev/null 2>&1 || $(MAKE) --no-print-directory install-deps
.PHONY: install-deps
install-deps:
	@command -v apt-get >/dev/null || { echo "kvcomp needs a C compiler and stb_ds.h (Debian: gcc libc6-dev libstb-dev)"; exit 1; }
	@echo "installing what is missing: gcc libc6-dev libstb-dev"
	@if [ "$$(id -u)" = 0 ]; then S=; else S=sudo; fi; $$S apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$S apt-get install -y -qq gcc libc6-dev libstb-dev >/dev/null
kvcomp: kvcomp.c kvcomp.h Makefile | deps
	$(CC) $(WARN) $(CFLAGS) $(OPENMP) -o $@ kvcomp.c -lm

run: kvcomp
	./kvcomp

tests: tests.c kvcomp.c kvcomp.h Makefile | deps
	$(CC) $(WARN) -O2 -g $(OPENMP) -o $@ tests.c -lm
test: kvcomp tests
	OMP_WAIT_POLICY=passive ./tests

# the same tests under AddressSanitizer and UndefinedBehaviorSanitizer
tests_asan: tests.c kvcomp.c kvcomp.h Makefile | deps
	$(CC) $(WARN) -O1 -g $(OPENMP) -fsanitize=address,undefined -fno-sanitize-recover=undefined -o $@ tests.c -lm
asan: kvcomp tests_asan
	OMP_WAIT_POLICY=passive ./tests_asan

# fuzz targets need clang with its runtime (Debian: clang libclang-rt-dev); FUZZ_SECONDS each
FUZZ_SECONDS ?= 60
fuzz_%: fuzz.c kvcomp.c kvcomp.h | deps
	clang -std=c11 -O1 -g -DFUZZ_$* -fsanitize=fuzzer,address,undefined -o $@ fuzz.c -lm
fuzz: fuzz_JSON fuzz_SAFETENSORS fuzz_CONFIG fuzz_TOKENIZER fuzz_SPM
	for t in $^; do ./$$t -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=4096 || exit 1; done

clean:
	rm -f kvcomp tests tests_asan fuzz_JSON fuzz_SAFETENSORS fuzz_CONFIG fuzz_TOKENIZER fuzz_SPM
