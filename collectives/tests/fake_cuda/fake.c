/* A driver and an NCCL that run on the processor, to walk our bindings and the order of our calls where there is no GPU:
 * device memory is malloc'ed, streams do everything at once, ranks are threads of one process. Every handle is checked, so
 * that arguments in a wrong order end the process with a sentence. Built once with FAKE_DRIVER, once with FAKE_NCCL. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "fake: %s: %s does not hold\n", __func__, #condition);            \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

#ifdef FAKE_DRIVER
enum { CONTEXT = 0xc0, STREAM = 0x57, EVENT = 0xe7 };
typedef struct { int kind, recorded; struct timespec at; } Thing;
static Thing context = {CONTEXT, 0, {0, 0}};
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
int cuDeviceTotalMem_v2(size_t *bytes, int d) { CHECK(d < 8); *bytes = 1u << 30; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int d) { memset(uuid, d + 1, 16); return 0; }
int cuDeviceGetAttribute(int *value, int which, int d) {
    CHECK(d < 8);
    *value = which == 75 ? 9 : which == 76 ? 0 : 1 << 16;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { CHECK(d < 8); *c = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { CHECK(d < 8); return 0; }
int cuCtxSetCurrent(void *c) { CHECK(is(c, CONTEXT)); current = c; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) { *free_ = 1u << 29; *total = 1u << 30; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) { CHECK(current && n > 0); *p = (uint64_t)aligned_alloc(256, (n + 255) / 256 * 256); return 0; }
int cuMemFree_v2(uint64_t p) { CHECK(current); free((void *)p); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { CHECK(flags <= 7 && n > 0); *p = malloc(n); return 0; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) { CHECK(p && bytes && flags == 1); return 0; }
int cuMemHostUnregister(void *p) { CHECK(p); return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, void *s) { CHECK(current && is(s, STREAM)); memcpy((void *)to, (void *)from, n); return 0; }
int cuMemsetD8Async(uint64_t p, unsigned char x, size_t n, void *s) { CHECK(current && (!s || is(s, STREAM))); memset((void *)p, x, n); return 0; }
int cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    CHECK(current && flags == 1 && priority <= 0 && priority >= -5);
    *s = thing(STREAM);
    return 0;
}
int cuStreamDestroy_v2(void *s) { CHECK(is(s, STREAM)); free(s); return 0; }
int cuStreamSynchronize(void *s) { CHECK(current && (!s || is(s, STREAM))); return 0; }
int cuStreamQuery(void *s) { CHECK(is(s, STREAM)); return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) { CHECK(current && is(s, STREAM) && is(e, EVENT) && flags == 0); return 0; }
int cuEventCreate(void **e, unsigned flags) { CHECK(current && (flags == 0 || flags == 2)); *e = thing(EVENT); return 0; }
int cuEventDestroy_v2(void *e) { CHECK(is(e, EVENT)); free(e); return 0; }
int cuEventRecord(void *e, void *s) {
    CHECK(current && is(e, EVENT) && is(s, STREAM));
    ((Thing *)e)->recorded = 1;
    clock_gettime(CLOCK_MONOTONIC, &((Thing *)e)->at);
    return 0;
}
int cuEventQuery(void *e) { CHECK(current && is(e, EVENT)); return 0; }
int cuEventSynchronize(void *e) { CHECK(is(e, EVENT)); return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) {
    CHECK(is(a, EVENT) && is(b, EVENT) && ((Thing *)a)->recorded && ((Thing *)b)->recorded);
    struct timespec from = ((Thing *)a)->at, to = ((Thing *)b)->at;
    *ms = (float)((to.tv_sec - from.tv_sec) * 1e3 + (to.tv_nsec - from.tv_nsec) / 1e6);
    return 0;
}
/* There are no kernels here. */
int cuModuleLoadData(void **m, const void *image) { (void)m; (void)image; return 209; }
int cuModuleUnload(void *m) { (void)m; return 209; }
int cuModuleGetFunction(void **f, void *m, const char *name) { (void)f; (void)m; (void)name; return 209; }
int cuFuncSetAttribute(void *f, int which, int value) { (void)f; (void)which; (void)value; return 209; }
int cuFuncGetAttribute(int *value, int which, void *f) { (void)value; (void)which; (void)f; return 209; }
int cuLaunchKernel(void) { return 209; }
int cuStreamBeginCapture_v2(void *s, int mode) { (void)s; (void)mode; return 209; }
int cuStreamEndCapture(void *s, void **g) { (void)s; (void)g; return 209; }
int cuGraphInstantiateWithFlags(void **x, void *g, uint64_t flags) { (void)x; (void)g; (void)flags; return 209; }
int cuGraphLaunch(void *x, void *s) { (void)x; (void)s; return 209; }
int cuGraphDestroy(void *g) { (void)g; return 209; }
int cuGraphExecDestroy(void *x) { (void)x; return 209; }
int cuGetErrorName(int status, const char **text) { *text = status == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = status == 209 ? "the fake driver has no kernels" : "a fake error"; return 0; }
#endif

#ifdef FAKE_NCCL
enum { RANKS = 16, COMM = 0xcc, PROGRESS = 7, INVALID = 4 };
typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min, max; const char *net; int split; } Config;
/* What the ranks of a group share. */
typedef struct {
    Id id;
    int size, joined, used, broken, turn;
    const void *from[RANKS];
    int colors[RANKS], keys[RANKS];
    void *born[RANKS];
    struct { const void *from; size_t bytes; int full; } letters[RANKS][RANKS];
} Group;
typedef struct { int kind, rank, looks, aborted; Group *group; } Comm;
typedef struct { Comm *comm; const void *from; void *to; size_t bytes; int peer; } Part;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Group *groups[4096];
static int group_count, ids;
static __thread int depth, parts;
static __thread Part list[4 * RANKS];

static Comm *live(void *c) {
    CHECK(c && ((Comm *)c)->kind == COMM);
    return c;
}
/* All ranks of the group come here; 0 unless it was given up meanwhile. */
static int meet(Comm *c) {
    Group *g = c->group;
    int turn = g->turn;
    if (++g->used == g->size) {
        g->used = 0;
        g->turn++;
        pthread_cond_broadcast(&changed);
    }
    while (g->turn == turn && !g->broken) pthread_cond_wait(&changed, &lock);
    return g->turn == turn;
}
static Group *group_of(Id id, int size) {
    for (int i = 0; i < group_count; i++)
        if (!memcmp(&groups[i]->id, &id, sizeof id)) return groups[i];
    Group *g = groups[group_count++] = calloc(1, sizeof *g);
    g->id = id;
    g->size = size;
    return g;
}
static size_t bytes_of(int type) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    CHECK(type >= 0 && type < 10);
    return bytes[type];
}
static void *comm_of(Group *g, int rank) {
    Comm *c = calloc(1, sizeof *c);
    c->kind = COMM, c->rank = rank, c->group = g;
    return c;
}

int ncclGetVersion(int *v) {
    const char *chosen = getenv("FAKE_NCCL_VERSION");
    *v = chosen ? atoi(chosen) : 23004;
    return 0;
}
int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    pthread_mutex_lock(&lock);
    snprintf(id->bytes, sizeof id->bytes, "fake-%d", ++ids);
    pthread_mutex_unlock(&lock);
    return 0;
}
int ncclCommInitRankConfig(void **comm, int size, Id id, int rank, Config *config) {
    CHECK(size <= RANKS && rank >= 0 && rank < size && !strncmp(id.bytes, "fake-", 5));
    CHECK(config->magic == 0xcafebeef && config->size >= 48 && config->version == 21800 && config->blocking == 0);
    CHECK(config->cga == INT32_MIN && config->net == NULL && config->split == INT32_MIN);
    pthread_mutex_lock(&lock);
    Group *g = group_of(id, size);
    CHECK(g->size == size);
    g->joined++;
    *comm = comm_of(g, rank);
    pthread_mutex_unlock(&lock);
    return PROGRESS;
}
int ncclCommGetAsyncError(void *comm, int *state) {
    Comm *c = live(comm);
    CHECK(!c->aborted);
    pthread_mutex_lock(&lock);
    /* Under way until all have come, and then for a few more looks. */
    *state = c->group->broken ? 6 : c->group->joined < c->group->size || c->looks++ % 4 != 3 ? PROGRESS : 0;
    pthread_mutex_unlock(&lock);
    return 0;
}
int ncclCommSplit(void *comm, int color, int key, void **born, Config *config) {
    Comm *c = live(comm);
    CHECK(config->magic == 0xcafebeef && config->blocking == 0);
    pthread_mutex_lock(&lock);
    Group *g = c->group;
    g->colors[c->rank] = color, g->keys[c->rank] = key;
    meet(c);
    if (c->rank == 0)
        for (int r = 0; r < g->size; r++) {
            g->born[r] = NULL;
            if (g->colors[r] < 0) continue;
            int first = r, size = 0, rank = 0;
            for (int p = g->size - 1; p >= 0; p--) {
                if (g->colors[p] != g->colors[r]) continue;
                first = p, size++;
                rank += g->keys[p] < g->keys[r];
            }
            Id id = {{0}};
            snprintf(id.bytes, sizeof id.bytes, "split-%d-of-%.60s-%d", g->turn, g->id.bytes, first);
            Group *part = group_of(id, size);
            part->joined++;
            g->born[r] = comm_of(part, rank);
        }
    meet(c);
    *born = g->born[c->rank];
    meet(c);
    pthread_mutex_unlock(&lock);
    return PROGRESS;
}
int ncclCommFinalize(void *comm) { live(comm); return PROGRESS; }
int ncclCommDestroy(void *comm) { live(comm)->kind = 0; return 0; }
int ncclCommAbort(void *comm) {
    Comm *c = live(comm);
    pthread_mutex_lock(&lock);
    CHECK(!c->aborted);
    c->aborted = 1, c->group->broken = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Sums, least and greatest of i32 and f32 are all that tests need. */
static int reduced(Comm *c, void *to, const void *from, size_t first, size_t count, int type, int op, int wanted) {
    CHECK((type == 2 || type == 7) && (op == 0 || op == 2 || op == 3));
    pthread_mutex_lock(&lock);
    Group *g = c->group;
    g->from[c->rank] = from;
    int broken = meet(c);
    size_t bytes = count * bytes_of(type);
    char *sum = malloc(bytes + 1);
    for (int r = 0; r < g->size && wanted && !broken; r++) {
        const char *part = (const char *)g->from[r] + first * bytes_of(type);
        for (size_t i = 0; i < count; i++) {
#define JOIN(T)                                                                                           \
    {                                                                                                     \
        T x, y;                                                                                           \
        memcpy(&x, part + i * sizeof x, sizeof x);                                                        \
        memcpy(&y, sum + i * sizeof y, sizeof y);                                                         \
        T z = r == 0 ? x : op == 0 ? x + y : op == 2 ? (x > y ? x : y) : (x < y ? x : y);                 \
        memcpy(sum + i * sizeof z, &z, sizeof z);                                                         \
    }
            if (type == 2) JOIN(int32_t) else JOIN(float)
        }
    }
    if (!broken) meet(c);
    if (wanted && !broken) memcpy(to, sum, bytes);
    free(sum);
    pthread_mutex_unlock(&lock);
    return broken ? 6 : PROGRESS;
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *s) {
    CHECK(s);
    return reduced(live(comm), to, from, 0, n, type, op, 1);
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, void *comm, void *s) {
    CHECK(s);
    return reduced(live(comm), to, from, n * live(comm)->rank, n, type, op, 1);
}
int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, void *comm, void *s) {
    CHECK(s && root < live(comm)->group->size);
    return reduced(live(comm), to, from, 0, n, type, op, live(comm)->rank == root);
}
int ncclAllGather(const void *from, void *to, size_t n, int type, void *comm, void *s) {
    Comm *c = live(comm);
    size_t bytes = n * bytes_of(type);
    CHECK(s);
    pthread_mutex_lock(&lock);
    c->group->from[c->rank] = from;
    int broken = meet(c);
    for (int r = 0; r < c->group->size && !broken; r++) memmove((char *)to + r * bytes, c->group->from[r], bytes);
    if (!broken) meet(c);
    pthread_mutex_unlock(&lock);
    return broken ? 6 : PROGRESS;
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *comm, void *s) {
    Comm *c = live(comm);
    CHECK(s && root < c->group->size);
    pthread_mutex_lock(&lock);
    c->group->from[c->rank] = from;
    int broken = meet(c);
    if (!broken) memmove(to, c->group->from[root], n * bytes_of(type));
    if (!broken) meet(c);
    pthread_mutex_unlock(&lock);
    return broken ? 6 : PROGRESS;
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclSend(const void *from, size_t n, int type, int peer, void *comm, void *s) {
    CHECK(s && depth == 1 && peer < live(comm)->group->size && peer != live(comm)->rank && parts < 4 * RANKS);
    list[parts++] = (Part){live(comm), from, NULL, n * bytes_of(type), peer};
    return 0;
}
int ncclRecv(void *to, size_t n, int type, int peer, void *comm, void *s) {
    CHECK(s && depth == 1 && peer < live(comm)->group->size && peer != live(comm)->rank && parts < 4 * RANKS);
    list[parts++] = (Part){live(comm), NULL, to, n * bytes_of(type), peer};
    return 0;
}
int ncclGroupEnd(void) {
    CHECK(--depth == 0);
    int left = parts, broken = 0, count = parts;
    parts = 0;
    pthread_mutex_lock(&lock);
    /* Sends are put down as soon as there is room, receives take what is there; sends are over when taken. */
    static __thread int put[4 * RANKS];
    memset(put, 0, sizeof put);
    while (left > 0 && !broken) {
        int moved = 0;
        for (int i = 0; i < count; i++) {
            Part *p = &list[i];
            if (!p->comm) continue;
            Group *g = p->comm->group;
            int me = p->comm->rank;
            broken |= g->broken;
            if (p->from && !put[i] && !g->letters[me][p->peer].full) {
                g->letters[me][p->peer].from = p->from;
                g->letters[me][p->peer].bytes = p->bytes;
                g->letters[me][p->peer].full = 1;
                put[i] = moved = 1;
            } else if (p->from && put[i] && g->letters[me][p->peer].full == 2) {
                g->letters[me][p->peer].full = 0;
                p->comm = NULL, left--, moved = 1;
            } else if (p->to && g->letters[p->peer][me].full == 1) {
                CHECK(g->letters[p->peer][me].bytes == p->bytes);
                memcpy(p->to, g->letters[p->peer][me].from, p->bytes);
                g->letters[p->peer][me].full = 2;
                p->comm = NULL, left--, moved = 1;
            }
        }
        if (moved) pthread_cond_broadcast(&changed);
        else if (left > 0 && !broken) pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return broken ? 6 : PROGRESS;
}
const char *ncclGetErrorString(int status) { return status == 6 ? "remote process exited or there was a network error" : "a fake error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return "from the fake NCCL"; }
#endif
