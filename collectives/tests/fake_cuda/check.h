/* Libraries of CUDA's that run on the processor, to walk our bindings and the order of our calls where there is no GPU.
 * Every handle and argument is checked, so that one in a wrong place ends the process with a sentence. */
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libgen.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "fake: %s: %s does not hold\n", __func__, #condition);            \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

/* What the driver beside this library offers to the others of them. */
static inline void *of_driver(const char *name) {
    char file[4096];
    Dl_info own;
    CHECK(dladdr((void *)of_driver, &own));
    snprintf(file, sizeof file, "%s", own.dli_fname);
    strcat(dirname(file), "/libcuda.so.1");
    void *library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    CHECK(library);
    void *found = dlsym(library, name);
    CHECK(found);
    return found;
}

/* What the compiler makes and the driver loads starts like this; the kernels' text follows. */
#define FAKE_CODE "\x7f" "ELF fake"
