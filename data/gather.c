// How fast can two threads read runs of bytes at random places of 1 GiB, each run asked for while the
// one before is summed? What LycheeCluster's gather of scattered chunks is held against (NOTES.md).
//
//     gcc -O3 -march=native -fopenmp data/gather.c -o /tmp/gather && /tmp/gather
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    THREADS = 2,
    LINE = 64,              // bytes that one request brings
    ASKED = 4096,           // bytes of a run that are asked for: the hardware goes on by itself
};
static const size_t ROOM = (size_t)1 << 30, READ = (size_t)256 << 20;

// The next number of a thread's sequence (xorshift64).
static uint64_t random_next(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

// The sum of the words of `count` runs of `run` bytes at random places of p.
static uint64_t read_runs(const char *p, size_t run, size_t count, uint64_t seed) {
    const char *now = p;
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        const char *next = p + random_next(&seed) % (ROOM / run) * run;
        for (size_t b = 0; b < run && b < ASKED; b += LINE) __builtin_prefetch(next + b);
        for (size_t b = 0; b < run; b += sizeof(uint64_t)) {
            uint64_t word;
            memcpy(&word, now + b, sizeof word);
            total += word;
        }
        now = next;
    }
    return total;
}

int main(void) {
    char *p = malloc(ROOM);
    if (!p) {
        fprintf(stderr, "gather: no memory for %zu bytes\n", ROOM);
        return 4;
    }
    memset(p, 1, ROOM);
    for (size_t run = 1024; run <= 65536; run *= 2) {
        uint64_t total = 0;
        double t = omp_get_wtime();
        #pragma omp parallel num_threads(THREADS) reduction(+:total)
        total += read_runs(p, run, READ / run / THREADS, 88172645463325252u + 977u * omp_get_thread_num());
        t = omp_get_wtime() - t;
        printf("runs of %5zu bytes: %.1f GB/s (sum %llu)\n", run, (double)READ / t * 1e-9,
               (unsigned long long)total);
    }
    free(p);
    return 0;
}
