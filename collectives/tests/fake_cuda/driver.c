/* A driver: streams do everything at once unless it is captured, kernels do nothing. Device memory is of addresses that are
 * never used again, so that work on memory that was freed is found. The file FAKE_CUDA_LOG gets a line for all that is done,
 * with addresses as numbers of allocations; lines with a dash are about graphs, memory and choices of products. The file
 * FAKE_CUDA_PRIORITIES gets one for all that a stream is given, the stream's priority before it. FAKE_CUDA_REFUSE=KERNEL:N refuses
 * the N-th launch of a kernel. FAKE_CUDA_FAULT=KERNEL lets it read what is not there: from its first launch on nothing works
 * any more, which whoever waits hears, and with CUDA_LAUNCH_BLOCKING whoever launched it. FAKE_CUDA_HANG=KERNEL lets it run for ever.
 * FAKE_CUDA_GRAPHS=N has memory to make so many graphs ready, FAKE_CUDA_LAUNCHES=N for so many launches of them. FAKE_CUDA_HIDDEN
 * shows no GPU.
 * With FAKE_CUDA_PREPARED no kernel may be loaded once any was launched.
 * FAKE_CUDA_PAGES=N refuses to page-lock more bytes than that at once. FAKE_CUDA_CAPABILITY=89 is the GPUs' instead of 90, and
 * says how much shared memory a block has; FAKE_CUDA_LAST=70 is that of the last alone. */
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { CONTEXT = 0xc0, STREAM = 0x57, EVENT = 0xe7, MODULE = 0x30, FUNCTION = 0xf0, GRAPH = 0x6a, READY = 0x6e };
enum { OUT_OF_MEMORY = 2, NO_DEVICE = 100, NO_BINARY = 209, NOT_READY = 600, ILLEGAL = 700, UNSUPPORTED = 900, INVALIDATED = 901, ISOLATION = 905, CAPTURED = 907 };
/* Something for a stream to do, with all its values as they were when it was given. */
typedef struct Work {
    struct Work *next;
    void (*run)(const uint64_t *values);
    char name[64];
    int count;
    uint64_t values[40];
} Work;
typedef struct {
    int kind, recorded, dynamic, priority;
    int capturing, broken, captured;      /* of a stream, and of an event in it */
    struct timespec at;
    long serial;                          /* of an event: when it was recorded */
    char *text;
    Work *first, **last;                  /* of a stream that is captured, and of graphs */
} Thing;
static Thing context = {.kind = CONTEXT};
static __thread Thing *current;
/* The stream that this thread captures: what could wait, or take or free memory, is then not permitted to it. */
static __thread Thing *capturing;

static Thing *thing(int kind) {
    Thing *t = calloc(1, sizeof *t);
    t->kind = kind;
    return t;
}
static int is(void *t, int kind) { return t && ((Thing *)t)->kind == kind; }
static int not_permitted(int status) { capturing->broken = 1; return status; }
#define OUTSIDE_OF_CAPTURE if (capturing) return not_permitted(UNSUPPORTED)

static void append(const char *file, const char *format, va_list rest) {
    if (!file) return;
    char line[2048];
    int length = vsnprintf(line, sizeof line, format, rest);
    int to = open(file, O_WRONLY | O_CREAT | O_APPEND, 0600);
    CHECK(to >= 0 && length < (int)sizeof line && write(to, line, length) == length);
    close(to);
}
static void note(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    append(getenv("FAKE_CUDA_LOG"), format, rest);
    va_end(rest);
}
static void note_priority(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    append(getenv("FAKE_CUDA_PRIORITIES"), format, rest);
    va_end(rest);
}
/* For the libraries beside this one: a line, and what a stream is used for. */
void fakeNote(const char *line) { note("%s", line); }
void fakeUsed(void *s, const char *name) {
    CHECK(is(s, STREAM));
    note_priority("%d %s\n", ((Thing *)s)->priority, name);
}

/* What a kernel has done to the context: nothing works any more, or waiting has no end. */
static int lost, hangs;
#define ALIVE if (lost) return ILLEGAL
static int chosen(const char *variable, const char *kernel) {
    const char *named = getenv(variable);
    return named && !strcmp(named, kernel);
}

enum { GPUS = 8 };
static int capability(int gpu) {
    const char *all = getenv("FAKE_CUDA_CAPABILITY"), *last = getenv("FAKE_CUDA_LAST");
    const char *chosen = gpu == GPUS - 1 && last ? last : all;
    return chosen ? atoi(chosen) : 90;
}
static int shared_bytes(int gpu) { return (capability(gpu) == 90 ? 227 : 99) << 10; }

static int too_many(size_t bytes) {
    const char *most = getenv("FAKE_CUDA_PAGES");
    return most && bytes > (size_t)atol(most);
}

/* Device memory: one range of addresses, handed out from its start to its end. */
static struct { uint64_t start, bytes; int live; } pieces[1 << 17];
static int piece_count;
static uint64_t range, range_used;
static const uint64_t RANGE = (uint64_t)1 << 38;
static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER;
static uint64_t whole_pages(uint64_t n) { return (n + 4095) / 4096 * 4096; }

/* The number of the piece that an address is in; -1 where it is none of the device's. */
static int piece(uint64_t p) {
    int found = -1;
    pthread_mutex_lock(&memory);
    if (range && p >= range && p < range + RANGE) {
        /* The last one that starts there or before: addresses only grow. */
        int first = 0, after = piece_count;
        while (first < after) {
            int middle = (first + after) / 2;
            if (pieces[middle].start <= p) first = middle + 1;
            else after = middle;
        }
        if (first > 0 && p <= pieces[first - 1].start + pieces[first - 1].bytes) found = first - 1;
        CHECK(found >= 0 && pieces[found].live); /* or it is used after it was freed */
    }
    pthread_mutex_unlock(&memory);
    return found;
}
static void perform(const Work *work) {
    char text[1600] = "";
    for (int i = 0, at = 0; i < work->count; i++) {
        uint64_t value = work->values[i];
        int in = piece(value);
        if (in >= 0) at += sprintf(text + at, " #%d+%lu", in, value - pieces[in].start);
        else if (value >> 40) at += sprintf(text + at, " host");
        else at += sprintf(text + at, " %lu", value);
    }
    if (work->run) work->run(work->values);
    note("%s%s\n", work->name, text);
}
/* Also for libraries that give streams work. */
int fakeGive(void *s, const char *name, void (*run)(const uint64_t *), int count, const uint64_t *values) {
    CHECK(current && (!s || is(s, STREAM)) && count <= 40);
    Thing *stream = s;
    CHECK(s || !capturing);
    if (s) fakeUsed(s, name);
    Work work = {.run = run, .count = count};
    snprintf(work.name, sizeof work.name, "%s", name);
    memcpy(work.values, values, count * sizeof *values);
    if (!s || !stream->capturing) return perform(&work), 0;
    CHECK(stream == capturing);
    *stream->last = malloc(sizeof work);
    **stream->last = work;
    stream->last = &(*stream->last)->next;
    return 0;
}
#define GIVE(stream, name, run, ...) \
    fakeGive(stream, name, run, sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), (uint64_t[]){__VA_ARGS__})

int cuInit(unsigned flags) { CHECK(flags == 0); return getenv("FAKE_CUDA_HIDDEN") ? NO_DEVICE : 0; }
int cuDriverGetVersion(int *v) {
    const char *version = getenv("FAKE_CUDA_VERSION");
    *v = version ? atoi(version) : 13010;
    return 0;
}
int cuDeviceGetCount(int *n) { *n = GPUS; return 0; }
int cuDeviceGet(int *d, int ordinal) { CHECK(ordinal < GPUS); *d = ordinal; return 0; }
int cuDeviceGetName(char *name, int length, int d) { snprintf(name, length, "Fake GPU %d", d); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { CHECK(d < GPUS); *bytes = (size_t)4 << 30; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { memset(uuid, d + 1, 16); return 0; }
int cuDeviceGetAttribute(int *value, int which, int d) {
    CHECK(d < GPUS);
    *value = which == 75 ? capability(d) / 10 : which == 76 ? capability(d) % 10 : which == 97 ? shared_bytes(d) : which == 16 ? 132 : 1 << 25;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { CHECK(d < GPUS); *c = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { CHECK(d < GPUS); return 0; }
int cuCtxSetCurrent(void *c) { CHECK(is(c, CONTEXT)); current = c; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { CHECK(current); *least = 0; *greatest = -5; return 0; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) { CHECK(current); *free_ = (size_t)3 << 30; *total = (size_t)4 << 30; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) {
    OUTSIDE_OF_CAPTURE;
    ALIVE;
    CHECK(current && n > 0);
    pthread_mutex_lock(&memory);
    if (!range) {
        void *found = mmap(NULL, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(found != MAP_FAILED);
        range = (uint64_t)found;
    }
    CHECK(piece_count < (int)(sizeof pieces / sizeof *pieces) && range_used + n < RANGE);
    *p = range + range_used;
    CHECK(mprotect((void *)*p, whole_pages(n), PROT_READ | PROT_WRITE) == 0);
    pieces[piece_count].start = *p, pieces[piece_count].bytes = n, pieces[piece_count].live = 1;
    piece_count++;
    range_used += whole_pages(n) + 4096;
    pthread_mutex_unlock(&memory);
    return 0;
}
int cuMemFree_v2(uint64_t p) {
    OUTSIDE_OF_CAPTURE;
    int freed = piece(p);
    CHECK(current && freed >= 0 && pieces[freed].start == p);
    pthread_mutex_lock(&memory);
    pieces[freed].live = 0;
    uint64_t bytes = whole_pages(pieces[freed].bytes);
    CHECK(!madvise((void *)p, bytes, MADV_DONTNEED) && !mprotect((void *)p, bytes, PROT_NONE));
    pthread_mutex_unlock(&memory);
    note("- freed #%d\n", freed);
    return 0;
}
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { OUTSIDE_OF_CAPTURE; ALIVE; CHECK(current && flags == 1 && n > 0); if (too_many(n)) return OUT_OF_MEMORY; *p = malloc(n); return 0; }
int cuMemFreeHost(void *p) { OUTSIDE_OF_CAPTURE; CHECK(current); free(p); return 0; }
int cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) { OUTSIDE_OF_CAPTURE; CHECK(current && p && bytes && flags == 1); return too_many(bytes) ? OUT_OF_MEMORY : 0; }
int cuMemHostUnregister(void *p) { OUTSIDE_OF_CAPTURE; CHECK(current && p); return 0; }
static void copy(const uint64_t *v) { memcpy((void *)v[0], (void *)v[1], v[2]); }
static void fill(const uint64_t *v) { memset((void *)v[0], (int)v[1], v[2]); }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void *s) { ALIVE; CHECK(is(s, STREAM)); return GIVE(s, "copy", copy, to, from, n); }
int cuMemsetD8Async(uint64_t p, unsigned char x, size_t n, void *s) { ALIVE; return GIVE(s, "fill", fill, p, x, n); }
int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    CHECK(current && flags == 1 && priority <= 0 && priority >= -5);
    *s = thing(STREAM);
    ((Thing *)*s)->priority = priority;
    return 0;
}
int cuStreamDestroy_v2(void *s) { CHECK(current && is(s, STREAM) && !((Thing *)s)->capturing); free(s); return 0; }
int cuStreamSynchronize(void *s) {
    OUTSIDE_OF_CAPTURE;
    CHECK(current && (!s || is(s, STREAM)));
    while (hangs) pause();
    ALIVE;
    return 0;
}
int cuStreamQuery(void *s) { OUTSIDE_OF_CAPTURE; CHECK(current && is(s, STREAM)); return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) {
    CHECK(current && is(s, STREAM) && is(e, EVENT) && flags == 0);
    /* What is captured cannot wait for what is not. */
    return ((Thing *)s)->capturing && !((Thing *)e)->captured ? not_permitted(ISOLATION) : 0;
}
int cuEventCreate(void **e, unsigned flags) { CHECK(current && (flags == 0 || flags == 2)); *e = thing(EVENT); return 0; }
int cuEventDestroy_v2(void *e) { CHECK(current && is(e, EVENT)); free(e); return 0; }
/* Of this thread: events are late, the last was this one, they happened up to this one, and see fake_late_events. */
static __thread long late, recorded, happened, behind = -1;
int cuEventRecord(void *e, void *s) {
    ALIVE;
    CHECK(current && is(e, EVENT) && is(s, STREAM));
    ((Thing *)e)->recorded = 1;
    ((Thing *)e)->serial = ++recorded;
    ((Thing *)e)->captured = ((Thing *)s)->capturing;
    clock_gettime(CLOCK_MONOTONIC, &((Thing *)e)->at);
    return 0;
}
/* A moment of a graph happens at no time, and one of a thread that asked for late events when it is waited for. */
int cuEventQuery(void *e) {
    OUTSIDE_OF_CAPTURE;
    CHECK(current && is(e, EVENT));
    return ((Thing *)e)->captured ? CAPTURED : late && ((Thing *)e)->serial > happened ? NOT_READY : 0;
}
int cuEventSynchronize(void *e) {
    if (late && is(e, EVENT) && ((Thing *)e)->serial > happened) {
        happened = ((Thing *)e)->serial;
        behind = recorded - happened;
    }
    return cuEventQuery(e);
}
/* Turns late events on; how many had been recorded after the one that was last waited for, or -1. */
long fake_late_events(void) { late = 1; return behind; }
int cuEventElapsedTime(float *ms, void *a, void *b) {
    CHECK(current && is(a, EVENT) && is(b, EVENT) && ((Thing *)a)->recorded && ((Thing *)b)->recorded);
    struct timespec from = ((Thing *)a)->at, to = ((Thing *)b)->at;
    *ms = (float)((to.tv_sec - from.tv_sec) * 1e3 + (to.tv_nsec - from.tv_nsec) / 1e6);
    return 0;
}
/* Kernels are found by their names in what the fake compiler made, and launched within the device's limits. */
int cuModuleLoadData(void **m, const void *image) {
    OUTSIDE_OF_CAPTURE;
    CHECK(current);
    if (strncmp(image, FAKE_CODE, strlen(FAKE_CODE))) return NO_BINARY;
    Thing *module = thing(MODULE);
    module->text = strdup(image);
    *m = module;
    return 0;
}
int cuModuleUnload(void *m) { OUTSIDE_OF_CAPTURE; CHECK(current && is(m, MODULE)); free(((Thing *)m)->text); free(m); return 0; }
static volatile int launched; /* whether any kernel was */
int cuModuleGetFunction(void **f, void *m, const char *name) {
    char entry[64];
    if (launched && getenv("FAKE_CUDA_PREPARED")) {
        fprintf(stderr, "fake: %s is loaded late\n", name);
        abort();
    }
    OUTSIDE_OF_CAPTURE;
    CHECK(current && is(m, MODULE));
    snprintf(entry, sizeof entry, ", %s, ", name); /* as in KERNEL(threads, blocks, name, ...) */
    CHECK(strstr(((Thing *)m)->text, entry));
    *f = thing(FUNCTION);
    ((Thing *)*f)->text = strdup(name);
    return 0;
}
int cuFuncGetAttribute(int *value, int which, void *f) { CHECK(current && is(f, FUNCTION) && which == 1); *value = 512; return 0; }
int cuFuncSetAttribute(void *f, int which, int value) {
    CHECK(current && is(f, FUNCTION) && which == 8 && value <= shared_bytes(0) - 512);
    ((Thing *)f)->dynamic = value;
    return 0;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s,
                   void **arguments, void **extra) {
    CHECK(current && is(f, FUNCTION) && is(s, STREAM) && arguments && arguments[0] && !extra);
    CHECK(x > 0 && x < 1u << 31 && y > 0 && y < 1 << 16 && z > 0 && z < 1 << 16);
    CHECK(bx > 0 && bx <= 1024 && by == 1 && bz == 1 && (int)shared <= ((Thing *)f)->dynamic);
    const char *name = ((Thing *)f)->text, *refuse = getenv("FAKE_CUDA_REFUSE");
    static int asked;
    size_t length = strlen(name);
    launched = 1;
    if (refuse && !strncmp(refuse, name, length) && refuse[length] == ':' &&
        __atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED) == atoi(refuse + length + 1))
        return ILLEGAL;
    ALIVE;
    lost |= chosen("FAKE_CUDA_FAULT", name), hangs |= chosen("FAKE_CUDA_HANG", name);
    if (getenv("CUDA_LAUNCH_BLOCKING")) ALIVE;
    /* Every argument is in a word of its own. */
    uint64_t values[40] = {x, y, z, bx, shared};
    int count = 5;
    for (int i = 0; i < 20 && arguments[i]; i++) values[count++] = *(uint64_t *)arguments[i];
    return fakeGive(s, name, NULL, count, values);
}

int cuStreamBeginCapture_v2(void *s, int mode) {
    Thing *stream = s;
    CHECK(current && is(s, STREAM) && mode == 1 && !stream->capturing && !capturing);
    stream->capturing = 1, stream->broken = 0, stream->first = NULL, stream->last = &stream->first;
    capturing = stream;
    return 0;
}
int cuStreamEndCapture(void *s, void **g) {
    Thing *stream = s, *graph = thing(GRAPH);
    CHECK(current && is(s, STREAM) && stream->capturing && stream == capturing);
    graph->first = stream->first;
    stream->capturing = 0, capturing = NULL;
    *g = graph;
    note("- captured\n");
    if (!stream->broken) return 0;
    int cuGraphDestroy(void *);
    cuGraphDestroy(graph);
    *g = NULL;
    return INVALIDATED;
}
int cuGraphInstantiateWithFlags(void **x, void *g, uint64_t flags) {
    CHECK(current && is(g, GRAPH) && flags == 0 && !capturing);
    const char *most = getenv("FAKE_CUDA_GRAPHS");
    static int made;
    if (most && __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED) > atoi(most)) return OUT_OF_MEMORY;
    Thing *ready = thing(READY);
    ready->last = &ready->first;
    for (Work *work = ((Thing *)g)->first; work; work = work->next, ready->last = &(*ready->last)->next) {
        *ready->last = malloc(sizeof *work);
        **ready->last = *work;
        (*ready->last)->next = NULL;
    }
    *x = ready;
    note("- made ready\n");
    return 0;
}
int cuGraphLaunch(void *x, void *s) {
    CHECK(current && is(x, READY) && is(s, STREAM) && !capturing && !((Thing *)s)->capturing);
    const char *most = getenv("FAKE_CUDA_LAUNCHES");
    static int launches;
    if (most && __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED) > atoi(most)) return OUT_OF_MEMORY;
    note("- launched\n");
    for (Work *work = ((Thing *)x)->first; work; work = work->next) perform(work);
    return 0;
}
static void destroy(Thing *t) {
    for (Work *work = t->first, *next; work; work = next) next = work->next, free(work);
    t->kind = 0;
    free(t);
}
int cuGraphDestroy(void *g) { CHECK(current && is(g, GRAPH)); destroy(g); note("- graph destroyed\n"); return 0; }
int cuGraphExecDestroy(void *x) { CHECK(current && is(x, READY)); destroy(x); note("- ready one destroyed\n"); return 0; }
int cuGetErrorName(int status, const char **text) {
    *text = status == NO_BINARY ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return 0;
}
int cuGetErrorString(int status, const char **text) { *text = status == NO_BINARY ? "the fake driver has no such kernels" : "a fake error"; return 0; }
