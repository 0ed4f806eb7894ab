// Products of warpgroups: those under way, and how they are made of what is in shared memory and in registers.
#include "emulation.h"
#include "warpgroup.h"

#include <cstring>
#include <vector>

namespace emulation {

namespace {

constexpr int THREADS = 128, ROWS = 64, COLUMNS = 64, DEPTH = 16, RESULTS = ROWS * COLUMNS / THREADS;

// A product under way.
struct Flight {
    WarpgroupProduct of[THREADS];
    u32 a[THREADS][4];
    // The results before it.
    float kept[THREADS][RESULTS];
    int group;
};

struct Warpgroup {
    std::vector<Flight> flights;
    int group = 0;
    bool fenced = false;
};

std::vector<Warpgroup> &warpgroups() {
    static thread_local std::vector<Warpgroup> all;
    return all;
}

Warpgroup &mine() {
    size_t index = place.thread / THREADS;
    if (index >= warpgroups().size()) warpgroups().resize(index + 1);
    return warpgroups()[index];
}

// Where 128-byte swizzle puts what would lie at this address: bits 4 to 6 are permuted by bits 7 to 9.
u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

// A matrix descriptor.
struct Matrix {
    u32 start, beside, below;
    explicit Matrix(u64 bits)
        : start((u32)bits << 4 & 0x3fff0), beside((u32)(bits >> 16) << 4 & 0x3fff0), below((u32)(bits >> 32) << 4 & 0x3fff0) {
        if (bits >> 62 != 1) fail("multiplies a matrix without the 128-byte swizzle");
        if (bits >> 49 & 7) fail("multiplies a matrix with a base offset");
    }
    // Of an element in a row of at most 64, before swizzling: rows lie 128 bytes apart, and groups of eight `below`.
    u32 at(int row, int column) const { return start + column / 64 * beside + column % 64 * 2 + row % 8 * 128 + row / 8 * below; }
    // Reads rows x columns of it, of which the first `rows`.
    void read(int rows, int columns, float *to, float (*widen)(u16)) const {
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < columns; column++) {
                const u8 *from = shared_pointer(swizzled(at(row, column)));
                if (column % 8 == 0) shared_read_by_products(from, 16);
                u16 bits;
                memcpy(&bits, from, 2);
                to[row * columns + column] = widen(bits);
            }
    }
};

// The operands: a (64 x 16) and b (64 x 16, transposed).
struct Operands {
    float a[ROWS][DEPTH], b[COLUMNS][DEPTH];
    explicit Operands(const Flight &flight) {
        const WarpgroupProduct &p = flight.of[0];
        if (p.across) {
            float rows[DEPTH][COLUMNS];
            Matrix(p.b_matrix).read(DEPTH, COLUMNS, &rows[0][0], p.widen);
            for (int k = 0; k < DEPTH; k++)
                for (int n = 0; n < COLUMNS; n++) b[n][k] = rows[k][n];
        } else {
            Matrix(p.b_matrix).read(COLUMNS, DEPTH, &b[0][0], p.widen);
        }
        if (!p.a) Matrix(p.a_matrix).read(ROWS, DEPTH, &a[0][0], p.widen);
        for (int thread = 0; p.a && thread < THREADS; thread++)
            for (int i = 0; i < 8; i++) {
                int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = thread % 4 * 2 + i / 4 * 8 + i % 2;
                a[row][column] = p.widen((u16)(flight.a[thread][i / 2] >> i % 2 * 16));
            }
    }
};

// Where result i of a thread is in c.
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// Makes the oldest product.
void make(Warpgroup &group) {
    Flight &flight = group.flights.front();
    Operands operands(flight);
    for (int thread = 0; thread < THREADS; thread++) {
        float results[RESULTS], *c = flight.of[thread].c;
        for (int i = 0; i < RESULTS; i++) {
            int row = row_of(thread, i), column = column_of(thread, i);
            float sum = 0;
            for (int k = 0; k < DEPTH; k++) sum += operands.a[row][k] * operands.b[column][k];
            results[i] = flight.kept[thread][i] + sum;
        }
        // Whoever adds to the same results next has them first.
        Flight *next = nullptr;
        for (size_t i = 1; i < group.flights.size() && !next; i++)
            if (group.flights[i].of[thread].c == c) next = &group.flights[i];
        if (!next) memcpy(c, results, sizeof results);
        else if (next->of[thread].keep) memcpy(next->kept[thread], results, sizeof results);
    }
    group.flights.erase(group.flights.begin());
}

void begin(void *operands[]) {
    Warpgroup &group = mine();
    if (!group.fenced) fail("multiplies without a fence of the warpgroup before");
    group.flights.emplace_back();
    Flight &flight = group.flights.back();
    flight.group = group.group;
    for (int thread = 0; thread < THREADS; thread++) {
        WarpgroupProduct &p = flight.of[thread] = *static_cast<WarpgroupProduct *>(operands[thread]);
        const WarpgroupProduct &first = flight.of[0];
        if (p.a_matrix != first.a_matrix || p.b_matrix != first.b_matrix || !p.a != !first.a || p.across != first.across ||
            p.keep != first.keep)
            fail("multiplies other matrices than thread %d of its warpgroup", thread);
        if (p.a) memcpy(flight.a[thread], p.a, sizeof flight.a[thread]);
        for (int i = 0; i < RESULTS; i++) {
            flight.kept[thread][i] = p.keep ? p.c[i] : 0;
            p.c[i] = __builtin_nanf("");
        }
    }
    // Operands must be there from the start.
    Operands{flight};
}

// Waits for the whole warpgroup, of which one thread then does `operation`.
void together(WarpOperation operation, void *operand) { group_operation(THREADS, operation, operand, false); }

} // namespace

void forget_products() { warpgroups().clear(); }

bool products_under_way() { return !mine().flights.empty(); }

void warpgroup_fence() {
    together([](void **) { mine().fenced = true; }, nullptr);
}

void warpgroup_multiply(WarpgroupProduct product) { together(begin, &product); }

void warpgroup_commit() {
    together([](void **) { mine().group++; }, nullptr);
}

void warpgroup_wait(int groups) {
    together(
        [](void **operands) {
            Warpgroup &group = mine();
            int youngest = group.group - *static_cast<int *>(operands[0]);
            while (!group.flights.empty() && group.flights.front().group < youngest) make(group);
            // What was waited for will be touched.
            group.fenced = false;
        },
        &groups);
}

} // namespace emulation
