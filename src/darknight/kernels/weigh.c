/* Weighed sums of int32 in double, the compiled twin of reference.weigh.
 *
 * Every sum that is asked for stays within 2^53 (the caller cuts it into blocks that do), so neither the order of the
 * additions nor fused multiplication changes a bit of the result. Nothing is checked here: compiled.py does that.
 *
 * No Python.h and no intrinsics: plain loops, which gcc and clang turn into vector instructions. What the processor has
 * is asked once, when the library is loaded.
 */
#include <stddef.h>
#include <stdint.h>

#define TILE 4096 /* columns at a time: their sums stay in cache, and a row is long enough to be fetched ahead */
#define FEW 512   /* below this many columns the processor does not see by itself what comes next */
#define INLINE static inline __attribute__((always_inline))

/* out[column] (+)= sum of `count` rows of x, weighed; `count` and `twice` are constants at every call. */
INLINE void some_rows(const int32_t *restrict x, int64_t stride, int64_t columns, const double *v, const double *w,
                      int count, int twice, int fresh, double *restrict a, double *restrict b) {
    double p[8], q[8];
    for (int i = 0; i < count; i++) {
        p[i] = v[i];
        q[i] = twice ? w[i] : 0.0;
    }
    for (int64_t c = 0; c < columns; c++) {
        double first = fresh ? 0.0 : a[c], second = 0.0;
        if (twice) second = fresh ? 0.0 : b[c];
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const double value = (double)x[i * stride + c];
            first += p[i] * value;
            if (twice) second += q[i] * value;
        }
        a[c] = first;
        if (twice) b[c] = second;
    }
}

/* Fetches the next four rows. Beyond the end it does nothing: a prefetch never faults. */
INLINE void ahead(const int32_t *x, int64_t stride, int64_t columns) {
    for (int i = 0; i < 4; i++)
        for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(x + i * stride + c, 0, 3);
}

/* One or two repetitions over all rows of a tile. */
INLINE void tile(const int32_t *x, int64_t stride, int64_t rows, int64_t columns, const double *v, const double *w,
                 int twice, double *a, double *b) {
    int64_t row = 0;
    if (rows >= 4) {
        if (columns < FEW) ahead(x + 4 * stride, stride, columns);
        some_rows(x, stride, columns, v, w, 4, twice, 1, a, b);
        for (row = 4; row + 4 <= rows; row += 4) {
            if (columns < FEW) ahead(x + (row + 4) * stride, stride, columns);
            some_rows(x + row * stride, stride, columns, v + row, twice ? w + row : w, 4, twice, 0, a, b);
        }
    } else if (rows > 0) {
        some_rows(x, stride, columns, v, w, 1, twice, 1, a, b);
        row = 1;
    } else {
        for (int64_t c = 0; c < columns; c++) {
            a[c] = 0.0;
            if (twice) b[c] = 0.0;
        }
    }
    for (; row < rows; row++)
        some_rows(x + row * stride, stride, columns, v + row, twice ? w + row : w, 1, twice, 0, a, b);
}

/* A single column, without gaps: the rows are what is long. Exact sums may be made in any order. */
INLINE void one_column(const int32_t *restrict x, int64_t rows, const double *restrict v, const double *restrict w,
                       int twice, double *a, double *b) {
    double first = 0.0, second = 0.0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t row = 0; row < rows; row++) {
        const double value = (double)x[row];
        first += v[row] * value;
        if (twice) second += w[row] * value;
    }
    *a = first;
    if (twice) *b = second;
}

/* Nine columns, a kernel of 3x3: too few for the loops above, and their sums fit in registers. */
INLINE void nine_columns(const int32_t *restrict x, int64_t stride, int64_t rows, const double *restrict v,
                         const double *restrict w, int twice, double *a, double *b) {
    double p[8] = {0.0}, q[8] = {0.0}, first = 0.0, second = 0.0;
    for (int64_t row = 0; row < rows; row++, x += stride) {
        const double y = v[row], z = twice ? w[row] : 0.0, last = (double)x[8];
#pragma omp simd
        for (int c = 0; c < 8; c++) {
            p[c] += y * (double)x[c];
            if (twice) q[c] += z * (double)x[c];
        }
        first += y * last;
        if (twice) second += z * last;
    }
    for (int c = 0; c < 8; c++) {
        a[c] = p[c];
        if (twice) b[c] = q[c];
    }
    a[8] = first;
    if (twice) b[8] = second;
}

/* One or two repetitions of a block. */
INLINE void repetitions(const int32_t *x, int64_t stride, int64_t rows, int64_t columns, const double *v,
                        const double *w, int twice, double *a, double *b) {
    if (columns == 1 && stride == 1) {
        one_column(x, rows, v, w, twice, a, b);
        return;
    }
    if (columns == 9) {
        nine_columns(x, stride, rows, v, w, twice, a, b);
        return;
    }
    for (int64_t start = 0; start < columns; start += TILE) {
        const int64_t width = columns - start < TILE ? columns - start : TILE;
        tile(x + start, stride, rows, width, v, w, twice, a + start, twice ? b + start : b);
    }
}

INLINE void block(const int32_t *x, int64_t stride, int64_t rows, int64_t columns, const double *v, int64_t reps,
                  int64_t v_stride, double *out) {
    for (; reps >= 2; reps -= 2, v += 2 * v_stride, out += 2 * columns)
        repetitions(x, stride, rows, columns, v, v + v_stride, 1, out, out + columns);
    if (reps) repetitions(x, stride, rows, columns, v, NULL, 0, out, NULL);
}

INLINE void every_block(const int32_t *x, int64_t outer, int64_t outer_stride, int64_t groups, int64_t length,
                        int64_t stride, int64_t columns, const double *v, int64_t reps, int64_t longest, double *out) {
    const int64_t size = reps * columns, blocks = length > longest ? (length + longest - 1) / longest : 1;
    for (int64_t o = 0; o < outer; o++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t k = 0; k < blocks; k++) { /* innermost, so that x is read from front to back */
                const int64_t first = k * longest, row = g * length + first;
                const int64_t rows = length - first < longest ? length - first : longest;
                block(x + o * outer_stride + row * stride, stride, rows, columns, v + row, reps, groups * length,
                      out + ((k * outer + o) * groups + g) * size);
            }
}

#define ARGUMENTS                                                                                                     \
    const int32_t *x, int64_t outer, int64_t outer_stride, int64_t groups, int64_t length, int64_t stride,            \
        int64_t columns, const double *v, int64_t reps, int64_t longest, double *out
#define PASSED x, outer, outer_stride, groups, length, stride, columns, v, reps, longest, out

typedef void (*function)(ARGUMENTS);

static void plain(ARGUMENTS) { every_block(PASSED); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void avx2(ARGUMENTS) { every_block(PASSED); }
#endif

static function chosen = plain;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) chosen = avx2;
#endif
}

/* x (outer, group * length, columns), its last axis without gaps; v (rep, group * length);
 * out (block, outer, group, rep, columns): blocks of at most `longest` of each group's rows. The number in the names is
 * that of this interface, so that a library with another one is not mistaken for this. */
void darknight_weigh_1(ARGUMENTS) { chosen(PASSED); }

/* The same without vector instructions of this processor, for tests. */
void darknight_weigh_plain_1(ARGUMENTS) { plain(PASSED); }
