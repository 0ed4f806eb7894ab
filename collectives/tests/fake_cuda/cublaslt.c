/* Products by their definition: D = alpha op(A) op(B) + beta C, all of them stored by columns. */
#include "check.h"

enum { HANDLE = 0x1a, PRODUCT = 0x1b, LAYOUT = 0x1c, PREFERENCE = 0x1d, F32 = 0, F16 = 2, BF16 = 14 };
typedef struct {
    int kind;
    int transposed[2], rounded;           /* of a product */
    int type;                             /* of a layout, as the rest */
    uint64_t rows, columns;
    int64_t step;
    uint64_t workspace;                   /* of a preference, as the rest */
    uint32_t reductions, alignment[4];
} Thing;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; } Choice;

static Thing *live(void *t, int kind) {
    CHECK(t && ((Thing *)t)->kind == kind);
    return t;
}
static int make(void **t, int kind) {
    *t = calloc(1, sizeof(Thing));
    ((Thing *)*t)->kind = kind;
    return 0;
}
static int unmake(void *t, int kind) { live(t, kind)->kind = 0; free(t); return 0; }

static float power(int exponent) { return exponent < 0 ? 1.f / (float)(1u << -exponent) : (float)(1u << exponent); }
static float read(int type, const void *at, size_t i) {
    if (type == F32) return ((const float *)at)[i];
    uint32_t bits = ((const uint16_t *)at)[i];
    union { uint32_t bits; float value; } word = {bits << 16};
    if (type == BF16) return word.value;
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return (word.bits = 0x7fc00000, word.value);
    float size = exponent ? (float)(1024 + fraction) * power(exponent - 25) : (float)fraction * power(-24);
    return bits >> 15 ? -size : size;
}
/* Rounds down, which is enough for what is compared to a tolerance. */
static void write(int type, void *at, size_t i, float x) {
    union { float value; uint32_t bits; } word = {x};
    int exponent = (int)(word.bits >> 23 & 255) - 112;
    if (type == F32) ((float *)at)[i] = x;
    else if (type == BF16) ((uint16_t *)at)[i] = (uint16_t)(word.bits >> 16);
    else if (exponent <= 0) ((uint16_t *)at)[i] = 0;
    else {
        CHECK(exponent < 31);
        ((uint16_t *)at)[i] = (uint16_t)(word.bits >> 16 & 0x8000) | (uint16_t)(exponent << 10) | (uint16_t)(word.bits >> 13 & 1023);
    }
}

static uint64_t bits(float x) { uint32_t word; memcpy(&word, &x, sizeof word); return word; }
static float number(uint64_t word) { uint32_t low = (uint32_t)word; float x; memcpy(&x, &low, sizeof x); return x; }

/* The upper 11 bits of 24, rounded down as above. */
static float tf32(float x) { return number(bits(x) & ~0x1fffull); }

static void multiply(const uint64_t *v) {
    uint64_t m = v[0], n = v[1], k = v[2], a_step = v[7], b_step = v[8], c_step = v[9], d_step = v[10];
    int input = (int)v[5], output = (int)v[6];
    float alpha = number(v[11]), beta = number(v[12]);
    const void *a = (void *)v[13], *b = (void *)v[14], *c = (void *)v[15];
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = 0; i < m; i++) {
            double sum = 0;
            for (uint64_t l = 0; l < k; l++) {
                float x = read(input, a, v[3] ? i * a_step + l : l * a_step + i);
                float y = read(input, b, v[4] ? l * b_step + j : j * b_step + l);
                sum += v[18] ? (double)tf32(x) * tf32(y) : (double)x * y;
            }
            sum = alpha * sum + (beta ? beta * (double)read(output, c, j * c_step + i) : 0);
            write(output, (void *)v[16], j * d_step + i, (float)sum);
        }
}

/* Gives the stream its work, as the driver beside this library does it. */
static int give(void *stream, const char *name, void (*run)(const uint64_t *), int count, const uint64_t *values) {
    static int (*driver)(void *, const char *, void (*)(const uint64_t *), int, const uint64_t *);
    if (!driver) *(void **)&driver = of_driver("fakeGive");
    return driver(stream, name, run, count, values);
}

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void **t) { return make(t, HANDLE); }
int cublasLtDestroy(void *t) { return unmake(t, HANDLE); }
/* In f32, or of numbers rounded to TF32 before. */
int cublasLtMatmulDescCreate(void **t, int compute, int scale) {
    CHECK((compute == 68 || compute == 77) && scale == F32);
    make(t, PRODUCT);
    ((Thing *)*t)->rounded = compute == 77;
    return 0;
}
int cublasLtMatmulDescDestroy(void *t) { return unmake(t, PRODUCT); }
int cublasLtMatmulDescSetAttribute(void *t, int which, const void *value, size_t bytes) {
    CHECK((which == 3 || which == 4) && bytes == 4 && *(const int *)value <= 1);
    live(t, PRODUCT)->transposed[which - 3] = *(const int *)value;
    return 0;
}
int cublasLtMatrixLayoutCreate(void **t, int type, uint64_t rows, uint64_t columns, int64_t step) {
    CHECK((type == F32 || type == F16 || type == BF16) && rows && columns && step >= (int64_t)rows);
    make(t, LAYOUT);
    Thing *layout = *t;
    layout->type = type, layout->rows = rows, layout->columns = columns, layout->step = step;
    return 0;
}
int cublasLtMatrixLayoutDestroy(void *t) { return unmake(t, LAYOUT); }
int cublasLtMatmulPreferenceCreate(void **t) {
    make(t, PREFERENCE);
    Thing *preference = *t;
    preference->reductions = 7;
    for (int i = 0; i < 4; i++) preference->alignment[i] = 256;
    return 0;
}
int cublasLtMatmulPreferenceDestroy(void *t) { return unmake(t, PREFERENCE); }
int cublasLtMatmulPreferenceSetAttribute(void *t, int which, const void *value, size_t bytes) {
    Thing *preference = live(t, PREFERENCE);
    CHECK(bytes == (which == 1 ? 8 : 4) && (which == 1 || which == 3 || (which >= 5 && which <= 8)));
    if (which == 1) preference->workspace = *(const uint64_t *)value;
    else if (which == 3) preference->reductions = *(const uint32_t *)value;
    else preference->alignment[which - 5] = *(const uint32_t *)value;
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *p, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   Choice *choices, int *found) {
    Thing *wish = live(preference, PREFERENCE);
    live(handle, HANDLE), live(p, PRODUCT), live(a, LAYOUT), live(b, LAYOUT), live(c, LAYOUT), live(d, LAYOUT);
    static void (*note)(const char *);
    if (!note) *(void **)&note = of_driver("fakeNote");
    note("- chosen\n");
    /* Parts of a sum meet unrounded. */
    CHECK(wanted >= 1 && wish->reductions == 2 && wish->workspace > 0);
    /* Three ways at most, and fewer than may be asked for. */
    *found = wanted < 3 ? wanted : 3;
    memset(choices, 0, *found * sizeof *choices);
    for (int way = 0; way < *found; way++) {
        choices[way].algorithm.data[0] = choices[way].workspace = wish->workspace;
        for (int i = 0; i < 4; i++) choices[way].algorithm.data[1 + i] = wish->alignment[i];
    }
    return 0;
}
int cublasLtMatmul(void *handle, void *p, const float *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                   const float *beta, const void *c, void *c_layout, void *d, void *d_layout, const Algorithm *algorithm,
                   void *workspace, size_t bytes, void *stream) {
    Thing *left = live(a_layout, LAYOUT), *right = live(b_layout, LAYOUT), *out = live(d_layout, LAYOUT);
    int *transposed = live(p, PRODUCT)->transposed, rounded = live(p, PRODUCT)->rounded;
    const void *places[] = {a, b, c, d};
    live(handle, HANDLE);
    CHECK(!rounded || left->type == F32);
    CHECK(stream && live(c_layout, LAYOUT)->type == out->type && (c == d) == (c_layout == d_layout) && left->type == right->type);
    for (int i = 0; i < 4; i++) {
        uint64_t alignment = algorithm->data[1 + i];
        CHECK(alignment && alignment <= 256 && (uintptr_t)places[i] % alignment == 0);
    }
    CHECK((uintptr_t)workspace % 256 == 0 && workspace && bytes >= algorithm->data[0]);
    uint64_t m = transposed[0] ? left->columns : left->rows, k = transposed[0] ? left->rows : left->columns;
    uint64_t n = transposed[1] ? right->rows : right->columns;
    CHECK(out->rows == m && out->columns == n && (transposed[1] ? right->columns : right->rows) == k);
    uint64_t values[] = {m, n, k, transposed[0], transposed[1], left->type, out->type, left->step, right->step,
                         ((Thing *)c_layout)->step, out->step, bits(*alpha), bits(*beta), (uint64_t)a, (uint64_t)b, (uint64_t)c,
                         (uint64_t)d, (uint64_t)workspace, rounded};
    return give(stream, rounded ? "product_of_tf32" : "product", multiply, sizeof values / sizeof *values, values);
}
