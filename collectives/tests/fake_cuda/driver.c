/* A driver: device memory is malloc'ed, streams do everything at once, kernels do nothing. */
#include "check.h"
#include <time.h>

enum { CONTEXT = 0xc0, STREAM = 0x57, EVENT = 0xe7, MODULE = 0x30, FUNCTION = 0xf0, NO_BINARY = 209, SHARED = 227 << 10 };
typedef struct {
    int kind, recorded, dynamic;
    struct timespec at;
    char *text;
} Thing;
static Thing context = {.kind = CONTEXT};
static __thread Thing *current;

static Thing *thing(int kind) {
    Thing *t = calloc(1, sizeof *t);
    t->kind = kind;
    return t;
}
static int is(void *t, int kind) { return t && ((Thing *)t)->kind == kind; }

int cuInit(unsigned flags) { CHECK(flags == 0); return 0; }
int cuDriverGetVersion(int *v) {
    const char *version = getenv("FAKE_CUDA_VERSION");
    *v = version ? atoi(version) : 13010;
    return 0;
}
int cuDeviceGetCount(int *n) { *n = 8; return 0; }
int cuDeviceGet(int *d, int ordinal) { CHECK(ordinal < 8); *d = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int d) { snprintf(name, length, "Fake GPU %d", d); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { CHECK(d < 8); *bytes = (size_t)4 << 30; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { memset(uuid, d + 1, 16); return 0; }
int cuDeviceGetAttribute(int *value, int which, int d) {
    CHECK(d < 8);
    *value = which == 75 ? 9 : which == 76 ? 0 : which == 97 ? SHARED : which == 16 ? 132 : 1 << 25;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { CHECK(d < 8); *c = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { CHECK(d < 8); return 0; }
int cuCtxSetCurrent(void *c) { CHECK(is(c, CONTEXT)); current = c; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { CHECK(current); *least = 0; *greatest = -5; return 0; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) { CHECK(current); *free_ = (size_t)3 << 30; *total = (size_t)4 << 30; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) { CHECK(current && n > 0); *p = (uint64_t)aligned_alloc(256, (n + 255) / 256 * 256); return 0; }
int cuMemFree_v2(uint64_t p) { CHECK(current); free((void *)p); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { CHECK(current && flags == 1 && n > 0); *p = malloc(n); return 0; }
int cuMemFreeHost(void *p) { CHECK(current); free(p); return 0; }
int cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) { CHECK(current && p && bytes && flags == 1); return 0; }
int cuMemHostUnregister(void *p) { CHECK(current && p); return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void *s) { CHECK(current && is(s, STREAM)); memcpy((void *)to, (void *)from, n); return 0; }
int cuMemsetD8Async(uint64_t p, unsigned char x, size_t n, void *s) { CHECK(current && (!s || is(s, STREAM))); memset((void *)p, x, n); return 0; }
int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    CHECK(current && flags == 1 && priority <= 0 && priority >= -5);
    *s = thing(STREAM);
    return 0;
}
int cuStreamDestroy_v2(void *s) { CHECK(current && is(s, STREAM)); free(s); return 0; }
int cuStreamSynchronize(void *s) { CHECK(current && (!s || is(s, STREAM))); return 0; }
int cuStreamQuery(void *s) { CHECK(current && is(s, STREAM)); return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) { CHECK(current && is(s, STREAM) && is(e, EVENT) && flags == 0); return 0; }
int cuEventCreate(void **e, unsigned flags) { CHECK(current && (flags == 0 || flags == 2)); *e = thing(EVENT); return 0; }
int cuEventDestroy_v2(void *e) { CHECK(current && is(e, EVENT)); free(e); return 0; }
int cuEventRecord(void *e, void *s) {
    CHECK(current && is(e, EVENT) && is(s, STREAM));
    ((Thing *)e)->recorded = 1;
    clock_gettime(CLOCK_MONOTONIC, &((Thing *)e)->at);
    return 0;
}
int cuEventQuery(void *e) { CHECK(current && is(e, EVENT)); return 0; }
int cuEventSynchronize(void *e) { CHECK(current && is(e, EVENT)); return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) {
    CHECK(current && is(a, EVENT) && is(b, EVENT) && ((Thing *)a)->recorded && ((Thing *)b)->recorded);
    struct timespec from = ((Thing *)a)->at, to = ((Thing *)b)->at;
    *ms = (float)((to.tv_sec - from.tv_sec) * 1e3 + (to.tv_nsec - from.tv_nsec) / 1e6);
    return 0;
}
/* Kernels are found by their names in what the fake compiler made, and launched within the device's limits. */
int cuModuleLoadData(void **m, const void *image) {
    CHECK(current);
    if (strncmp(image, FAKE_CODE, strlen(FAKE_CODE))) return NO_BINARY;
    Thing *module = thing(MODULE);
    module->text = strdup(image);
    *m = module;
    return 0;
}
int cuModuleUnload(void *m) { CHECK(current && is(m, MODULE)); free(((Thing *)m)->text); free(m); return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) {
    char entry[64];
    CHECK(current && is(m, MODULE));
    snprintf(entry, sizeof entry, ", %s, ", name); /* as in KERNEL(threads, blocks, name, ...) */
    CHECK(strstr(((Thing *)m)->text, entry));
    *f = thing(FUNCTION);
    return 0;
}
int cuFuncGetAttribute(int *value, int which, void *f) { CHECK(current && is(f, FUNCTION) && which == 1); *value = 512; return 0; }
int cuFuncSetAttribute(void *f, int which, int value) {
    CHECK(current && is(f, FUNCTION) && which == 8 && value <= SHARED - 512);
    ((Thing *)f)->dynamic = value;
    return 0;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s,
                   void **arguments, void **extra) {
    CHECK(current && is(f, FUNCTION) && is(s, STREAM) && arguments && arguments[0] && !extra);
    CHECK(x > 0 && x < 1u << 31 && y > 0 && y < 1 << 16 && z > 0 && z < 1 << 16);
    CHECK(bx > 0 && bx <= 1024 && by == 1 && bz == 1 && (int)shared <= ((Thing *)f)->dynamic);
    return 0;
}
/* There are no graphs here. */
int cuStreamBeginCapture_v2(void *s, int mode) { (void)s; (void)mode; return 209; }
int cuStreamEndCapture(void *s, void **g) { (void)s; (void)g; return 209; }
int cuGraphInstantiateWithFlags(void **x, void *g, uint64_t flags) { (void)x; (void)g; (void)flags; return 209; }
int cuGraphLaunch(void *x, void *s) { (void)x; (void)s; return 209; }
int cuGraphDestroy(void *g) { (void)g; return 209; }
int cuGraphExecDestroy(void *x) { (void)x; return 209; }
int cuGetErrorName(int status, const char **text) { *text = status == NO_BINARY ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == NO_BINARY ? "the fake driver has no such kernels" : "a fake error"; return 0; }
