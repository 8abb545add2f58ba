/* What residues.c and unmasking.c are made of: sums of integers, weighed in double, and their residues.
 *
 * Every sum stays within 2^53, because it is reduced as often as the caller says, so neither the order of the additions
 * nor fused multiplication changes what it is.
 */
#ifndef DARKNIGHT_RESIDUES_H
#define DARKNIGHT_RESIDUES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TILE 1024 /* columns at a time: their sums stay in cache, and a row is long enough to be fetched ahead */
#define FEW 512   /* below this many columns the processor does not see by itself what comes next */
#define MODULI 2
#define INLINE static inline __attribute__((always_inline))

/* --- modulo a prime ------------------------------------------------------------------------------------------------ */
#define ROUND 6755399441055744.0 /* 1.5 * 2^52: adding it rounds to an integer, subtracting it gives that */

/* Congruent to x, and of magnitude prime / 2 or a few more. */
INLINE double centred(double x, double prime, double inverse) {
    const double nearest = (x * inverse + ROUND) - ROUND;
    return x - nearest * prime;
}

/* The one residue of magnitude (prime - 1) / 2 or less, of what was centred. */
INLINE int32_t residue(double x, double prime, double inverse) {
    const double near = centred(x, prime, inverse), half = 0.5 * prime;
    return (int32_t)(near > half ? near - prime : near < -half ? near + prime : near);
}

/* --- numbers -------------------------------------------------------------------------------------------------------- */
/* What is weighed: integers, or, with `values`, floats that are rounded to integers here: to nearest, ties to even. A
 * factor is a power of two, so that nothing but the rounding is inexact. */
typedef struct {
    const int32_t *integers;
    const float *values;
    double factor;
} numbers;

INLINE numbers from_here(numbers x, int64_t places) {
    if (x.values)
        x.values += places;
    else
        x.integers += places;
    return x;
}

INLINE numbers of_integers(const int32_t *integers) {
    const numbers x = {integers, NULL, 1.0};
    return x;
}

/* rounded: whether there are values, known when this is compiled. */
INLINE double number(numbers x, int64_t place, int rounded) {
    return rounded ? ((double)x.values[place] * x.factor + ROUND) - ROUND : (double)x.integers[place];
}

/* --- sums over rows ------------------------------------------------------------------------------------------------ */
/* out[column] (+)= sum of `count` rows of x, weighed; `count`, `twice` and `rounded` are constants at every call. */
INLINE void some_rows(numbers x, int rounded, int64_t stride, int64_t columns, const double *v, const double *w,
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
            const double value = number(x, i * stride + c, rounded);
            first += p[i] * value;
            if (twice) second += q[i] * value;
        }
        a[c] = first;
        if (twice) b[c] = second;
    }
}

/* Fetches the next four rows. Beyond the end it does nothing: a prefetch never faults. */
INLINE void ahead_of_rows(numbers x, int rounded, int64_t stride, int64_t columns) {
    for (int i = 0; i < 4; i++)
        for (int64_t c = 0; c < columns; c += 16) {
            const int64_t place = i * stride + c;
            __builtin_prefetch(rounded ? (const void *)(x.values + place) : (const void *)(x.integers + place), 0, 3);
        };
}

/* One or two repetitions over all rows of a tile. */
INLINE void tile(numbers x, int rounded, int64_t stride, int64_t rows, int64_t columns, const double *v, const double *w,
                 int twice, double *a, double *b) {
    int64_t row = 0;
    if (rows >= 4) {
        if (columns < FEW) ahead_of_rows(from_here(x, 4 * stride), rounded, stride, columns);
        some_rows(x, rounded, stride, columns, v, w, 4, twice, 1, a, b);
        for (row = 4; row + 4 <= rows; row += 4) {
            if (columns < FEW) ahead_of_rows(from_here(x, (row + 4) * stride), rounded, stride, columns);
            some_rows(from_here(x, row * stride), rounded, stride, columns, v + row, twice ? w + row : w, 4, twice, 0, a, b);
        }
    } else if (rows > 0) {
        some_rows(x, rounded, stride, columns, v, w, 1, twice, 1, a, b);
        row = 1;
    } else {
        for (int64_t c = 0; c < columns; c++) {
            a[c] = 0.0;
            if (twice) b[c] = 0.0;
        }
    }
    for (; row < rows; row++)
        some_rows(from_here(x, row * stride), rounded, stride, columns, v + row, twice ? w + row : w, 1, twice, 0, a, b);
}

/* A single column, without gaps: the rows are what is long. */
INLINE void one_column(numbers x, int rounded, int64_t rows, const double *restrict v, const double *restrict w,
                       int twice, double *a, double *b) {
    double first = 0.0, second = 0.0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t row = 0; row < rows; row++) {
        const double value = number(x, row, rounded);
        first += v[row] * value;
        if (twice) second += w[row] * value;
    }
    *a = first;
    if (twice) *b = second;
}

/* Nine columns, a kernel of 3x3: too few for the loops above, and their sums fit in registers. */
INLINE void nine_columns(numbers x, int rounded, int64_t stride, int64_t rows, const double *restrict v,
                         const double *restrict w, int twice, double *a, double *b) {
    double p[8] = {0.0}, q[8] = {0.0}, first = 0.0, second = 0.0;
    for (int64_t row = 0; row < rows; row++, x = from_here(x, stride)) {
        const double y = v[row], z = twice ? w[row] : 0.0, last = number(x, 8, rounded);
#pragma omp simd
        for (int c = 0; c < 8; c++) {
            const double value = number(x, c, rounded);
            p[c] += y * value;
            if (twice) q[c] += z * value;
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
INLINE void block(numbers x, int rounded, int64_t stride, int64_t rows, int64_t columns, const double *v, const double *w,
                  int twice, double *a, double *b) {
    if (columns == 1 && stride == 1)
        one_column(x, rounded, rows, v, w, twice, a, b);
    else if (columns == 9)
        nine_columns(x, rounded, stride, rows, v, w, twice, a, b);
    else
        tile(x, rounded, stride, rows, columns, v, w, twice, a, b);
}

/* total (+)= sums, centred; or, with a weight, total += weight * sums, centred. */
INLINE void add_centred(const double *restrict sums, int64_t columns, double prime, int fresh, double *restrict total) {
    const double inverse = 1.0 / prime;
    for (int64_t c = 0; c < columns; c++) total[c] = (fresh ? 0.0 : total[c]) + centred(sums[c], prime, inverse);
}

INLINE void add_weighed(const double *restrict sums, int64_t columns, double weight, double prime,
                        double *restrict total) {
    const double inverse = 1.0 / prime;
    for (int64_t c = 0; c < columns; c++) total[c] += weight * centred(sums[c], prime, inverse);
}

INLINE void centre(double *restrict total, int64_t columns, double prime) {
    const double inverse = 1.0 / prime;
    for (int64_t c = 0; c < columns; c++) total[c] = centred(total[c], prime, inverse);
}

INLINE void store(const double *restrict total, int64_t columns, double prime, int32_t *restrict out) {
    const double inverse = 1.0 / prime;
    for (int64_t c = 0; c < columns; c++) out[c] = residue(total[c], prime, inverse);
}

#endif
