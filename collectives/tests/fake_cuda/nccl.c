/* NCCL between ranks that are threads of one process. FAKE_NCCL_WAITS is as a file of settings with NCCL_COMM_BLOCKING=1, which the
 * environment goes before. */
#include "check.h"
#include <pthread.h>
#include <time.h>

enum { RANKS = 16, COMM = 0xcc, PROGRESS = 7, INVALID = 4 };
typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min, max; const char *net; int split; } Config;
/* What the ranks of a group share. */
typedef struct {
    Id id;
    int size, joined, used, broken, turn, finalized, connected;
    const void *from[RANKS];
    void *to[RANKS];
    int colors[RANKS], keys[RANKS];
    void *born[RANKS];
    struct { const void *from; size_t bytes; int full; } letters[RANKS][RANKS];
} Group;
typedef struct Comm {
    int kind, rank, aborted;
    _Atomic int under_way; /* looks until the last call is done */
    int connects;          /* the turn of the group until which it does, if it has to wait for other ranks */
    Group *group;
    struct Comm *other; /* which its rank made before or after it */
} Comm;
typedef struct { Comm *comm; const void *from; void *to; size_t bytes; int peer; } Part;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Group *groups[4096];
static int group_count, ids;
static __thread int depth, parts;
static __thread Part list[4 * RANKS];
static __thread Comm *alone; /* the last that this rank has made, if it made another before it for each */

static Comm *live(void *c) {
    CHECK(c && ((Comm *)c)->kind == COMM);
    return c;
}
/* For who asks which streams work is given to. */
static void used(void *stream, const char *name) {
    static void (*driver)(void *, const char *);
    if (!driver) *(void **)&driver = of_driver("fakeUsed");
    CHECK(stream);
    driver(stream, name);
}
/* A communicator takes a call only once it has said that the last one is done. */
static Comm *ready(void *comm) {
    Comm *c = live(comm);
    CHECK(c->group->broken || (!c->under_way && c->group->joined == c->group->size));
    return c;
}
static int begun(Comm *c) {
    c->under_way = 3;
    return PROGRESS;
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
/* Ranks make communicators in pairs. */
static void pair(Comm *c) {
    if (c && alone) c->other = alone, alone->other = c, alone = NULL;
    else if (c) alone = c;
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
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    CHECK(blocking ? !strcmp(blocking, "0") : !getenv("FAKE_NCCL_WAITS"));
    pthread_mutex_lock(&lock);
    Group *g = group_of(id, size);
    CHECK(g->size == size);
    g->joined++;
    *comm = comm_of(g, rank);
    pair(*comm);
    pthread_mutex_unlock(&lock);
    return begun(*comm);
}
int ncclCommGetAsyncError(void *comm, int *state) {
    Comm *c = live(comm);
    CHECK(!c->aborted);
    pthread_mutex_lock(&lock);
    /* Under way until all have come, and then for a few more looks. */
    int come = c->group->joined == c->group->size && c->group->turn >= c->connects, looks = c->under_way;
    *state = c->group->broken ? 6 : come && !looks ? 0 : PROGRESS;
    if (come && looks) c->under_way = looks - 1;
    pthread_mutex_unlock(&lock);
    return 0;
}
int ncclCommSplit(void *comm, int color, int key, void **born, Config *config) {
    Comm *c = ready(comm);
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
    pair(*born);
    meet(c);
    pthread_mutex_unlock(&lock);
    return begun(c);
}
int ncclCommFinalize(void *comm) {
    Comm *c = ready(comm);
    /* Before 2.27 what a thread has begun is one list, which the next would begin again. */
    CHECK(!c->other || c->other->group->broken || !c->other->under_way);
    pthread_mutex_lock(&lock);
    c->group->finalized++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return begun(c);
}
/* As the real one, whose thread serves the other ranks of the host until they have come to the end of theirs. */
int ncclCommDestroy(void *comm) {
    Comm *c = ready(comm);
    pthread_mutex_lock(&lock);
    while (c->group->finalized < c->group->size && !c->group->broken) pthread_cond_wait(&changed, &lock);
    c->kind = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}
int ncclCommAbort(void *comm) {
    Comm *c = live(comm);
    pthread_mutex_lock(&lock);
    CHECK(!c->aborted);
    c->aborted = 1, c->group->broken = 1;
    pthread_cond_broadcast(&changed);
    /* As the real one, it waits for what was queued, which may stand behind a call of the rank's other communicator. */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    for (int late = 0; c->other && !c->other->aborted;) {
        CHECK(!late);
        late = pthread_cond_timedwait(&changed, &lock, &until);
    }
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
    return broken ? 6 : begun(c);
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *s) {
    CHECK(s);
    return reduced(ready(comm), to, from, 0, n, type, op, 1);
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, void *comm, void *s) {
    CHECK(s);
    return reduced(ready(comm), to, from, n * live(comm)->rank, n, type, op, 1);
}
int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, void *comm, void *s) {
    CHECK(s && root < live(comm)->group->size);
    return reduced(ready(comm), to, from, 0, n, type, op, live(comm)->rank == root);
}
/* Of this thread: the first all_gather of a group connects its ranks, as the real one's does, and is under way until all have
 * come to it. */
static __thread int lazy;
void fake_connect_late(void) { lazy = 1; }
static void connect_ranks(Comm *c, const void *from, void *to, size_t bytes) {
    Group *g = c->group;
    g->from[c->rank] = from, g->to[c->rank] = to;
    c->connects = g->turn + 1;
    if (++g->used < g->size) return;
    /* Who comes last does everybody's work. */
    for (int r = 0; r < g->size; r++)
        for (int p = 0; p < g->size; p++) memmove((char *)g->to[r] + p * bytes, g->from[p], bytes);
    g->used = 0, g->connected = 1;
    g->turn++;
}
int ncclAllGather(const void *from, void *to, size_t n, int type, void *comm, void *s) {
    Comm *c = ready(comm);
    size_t bytes = n * bytes_of(type);
    used(s, "ncclAllGather");
    pthread_mutex_lock(&lock);
    if (lazy && !c->group->connected) {
        int broken = c->group->broken;
        if (!broken) connect_ranks(c, from, to, bytes);
        pthread_mutex_unlock(&lock);
        return broken ? 6 : begun(c);
    }
    c->group->from[c->rank] = from;
    int broken = meet(c);
    for (int r = 0; r < c->group->size && !broken; r++) memmove((char *)to + r * bytes, c->group->from[r], bytes);
    if (!broken) meet(c);
    pthread_mutex_unlock(&lock);
    return broken ? 6 : begun(c);
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *comm, void *s) {
    Comm *c = ready(comm);
    CHECK(s && root < c->group->size);
    pthread_mutex_lock(&lock);
    c->group->from[c->rank] = from;
    int broken = meet(c);
    if (!broken) memmove(to, c->group->from[root], n * bytes_of(type));
    if (!broken) meet(c);
    pthread_mutex_unlock(&lock);
    return broken ? 6 : begun(c);
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclSend(const void *from, size_t n, int type, int peer, void *comm, void *s) {
    CHECK(s && depth == 1 && peer < live(comm)->group->size && peer != live(comm)->rank && parts < 4 * RANKS);
    used(s, "ncclSend");
    list[parts++] = (Part){ready(comm), from, NULL, n * bytes_of(type), peer};
    return 0;
}
int ncclRecv(void *to, size_t n, int type, int peer, void *comm, void *s) {
    CHECK(s && depth == 1 && peer < live(comm)->group->size && peer != live(comm)->rank && parts < 4 * RANKS);
    list[parts++] = (Part){ready(comm), NULL, to, n * bytes_of(type), peer};
    return 0;
}
int ncclGroupEnd(void) {
    CHECK(--depth == 0);
    int left = parts, broken = 0, count = parts;
    parts = 0;
    for (int i = 0; i < count; i++) begun(list[i].comm);
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
