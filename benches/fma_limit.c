// The most that f32 products can reach: fused multiply-adds on registers alone, one thread per rank, all at once, on the
// processors that this may use in turn.
//
//     cc -O3 -march=native -ffp-contract=fast -o fma_limit fma_limit.c && ./fma_limit 2
//
// prints the FLOP/s of the slowest rank, the best of some tries.
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
// Enough independent sums to hide the latency of an addition (of four cycles, in four pipes at once, 16), few enough for the
// registers: 32 here, 16 there.
#if defined(__AVX512F__) || defined(__aarch64__)
#define SUMS 24
#else
#define SUMS 12
#endif
#define LANES (BYTES / 4)
typedef float vector __attribute__((vector_size(BYTES)));

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double flops(void) {
    const long rounds = 240 * 1000 * 1000 / SUMS;
    vector sums[SUMS], x, y;
    for (int i = 0; i < LANES; i++) x[i] = 0.999f, y[i] = 1e-3f;
    for (int s = 0; s < SUMS; s++) sums[s] = x * (float)(s + 1);
    // The compiler may not know them, or it would compute less.
    __asm__ volatile("" : "+m"(x), "+m"(y));
    double start = seconds();
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * x + y;
    }
    double took = seconds() - start;
    __asm__ volatile("" : : "m"(sums));
    return 2.0 * LANES * SUMS * rounds / took;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 1;
    int ends[2], cpu = -1;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return perror("sched_getaffinity"), 1;
    if (pipe(ends)) return perror("pipe"), 1;
    for (int r = 0; r < ranks; r++) {
        // The next one; after the last comes the first.
        do cpu = (cpu + 1) % CPU_SETSIZE;
        while (!CPU_ISSET(cpu, &allowed));
        pid_t child = fork();
        if (child < 0) perror("fork");
        if (child) continue;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        if (sched_setaffinity(0, sizeof set, &set)) return perror("sched_setaffinity"), 1;
        double best = 0;
        for (int i = 0; i < 5; i++) {
            double now = flops();
            best = now > best ? now : best;
        }
        return write(ends[1], &best, sizeof best) == sizeof best ? 0 : 1;
    }
    close(ends[1]);
    double slowest = 0, one;
    int heard = 0;
    for (; read(ends[0], &one, sizeof one) == sizeof one; heard++)
        slowest = heard && slowest < one ? slowest : one;
    while (wait(NULL) > 0) {}
    if (heard < ranks) return fprintf(stderr, "of %d ranks %d measured\n", ranks, heard), 1;
    printf("%.4e\n", slowest);
    return 0;
}
