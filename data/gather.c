// How fast can two threads read runs of bytes at random places of 1 GiB, each run asked for while the one before is summed?
// What LycheeCluster's gather of scattered chunks is held against (NOTES.md).
//   gcc -O3 -march=native -fopenmp data/gather.c -o /tmp/gather && /tmp/gather
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    size_t bytes = (size_t)1 << 30, read = (size_t)256 << 20;
    char *p = malloc(bytes);
    if (!p) { fprintf(stderr, "gather: no memory for %zu bytes\n", bytes); return 4; }
    memset(p, 1, bytes);
    for (size_t run = 1024; run <= 65536; run *= 2) {
        uint64_t total = 0;
        double t = omp_get_wtime();
        #pragma omp parallel num_threads(2) reduction(+:total)
        {
            uint64_t x = 88172645463325252ull + 977 * (uint64_t)omp_get_thread_num();
            const char *now = p;
            for (size_t i = 0; i < read / run / 2; i++) {
                x ^= x << 13; x ^= x >> 7; x ^= x << 17;
                const char *next = p + x % (bytes / run) * run;
                for (size_t b = 0; b < run && b < 4096; b += 64) __builtin_prefetch(next + b);
                for (size_t b = 0; b < run; b += 8) { uint64_t word; memcpy(&word, now + b, 8); total += word; }
                now = next;
            }
        }
        t = omp_get_wtime() - t;
        printf("runs of %5zu bytes: %.1f GB/s (sum %llu)\n", run, (double)read / t * 1e-9, (unsigned long long)total);
    }
    free(p);
    return 0;
}
