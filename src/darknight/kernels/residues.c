/* Sums weighed with random vectors, modulo one or two primes: the compiled twin of reference_residues.py.
 *
 * Numbers of at most 2^27 or so are weighed with entries of at most 24 bits and summed in double. Every sum stays within
 * 2^53, because it is reduced as often as the caller says, so neither the order of the additions nor fused
 * multiplication changes what it is. With AVX-512 many are made in 64 bits instead, and reduced when they are complete.
 * Results are residues next to zero. Nothing is checked here: compiled_residues.py does that.
 *
 * No Python.h: plain loops, which gcc and clang turn into vector instructions, and some that are written for AVX-512. What
 * the processor has is asked once, when the library is loaded.
 */
#include "residues.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 8
#define NARROW 16
#define PRODUCTS 256 /* of two residues, which an int64 can sum */

typedef struct {
    const int32_t *x; /* (outer, group * length, columns), its last axis without gaps */
    const float *values; /* instead of x: floats that are rounded, times the factor */
    double factor;
    int64_t outer, outer_stride, groups, length, stride, columns;
    const double *v; /* (rep, outer / period * group * length): `period` outer ones share their weights */
    int64_t reps, period, longest;
    const double *primes;
    int64_t moduli;
    const double *rows; /* (rep, outer) */
    int64_t often; /* 0: not summed over `outer` */
    int32_t *out;  /* (modulus, outer, group, rep, columns); summed over `outer`, (modulus, rep, columns) */
} weighing;

#if defined(__x86_64__)
/* --- with AVX-512: sums in 64 bits ----------------------------------------------------------------------------------------
 *
 * Numbers that stand side by side in 32 bits are weighed apart, those at even places and those at odd ones. Sums are not
 * reduced before they are complete. */
#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))
#define LINE 16  /* numbers of a vector */
#define SOON 512 /* numbers of a row, after which one is read that is fetched now */
#define LOWER 25 /* bits of a sum that are reduced, or weighed, apart from those above */

WIDE INLINE __mmask16 first_of(int64_t left) { return (__mmask16)(left < LINE ? (1 << left) - 1 : 0xFFFF); }

/* What will be read in a moment. Beyond the end it does nothing: a prefetch never faults. */
WIDE INLINE void fetch_soon(numbers x, int rounded) {
    __builtin_prefetch(rounded ? (const void *)x.values : (const void *)x.integers, 0, 3);
}

/* As number. The factor is a power of two, so it is the same in single precision, but for what is rounded to zero. */
WIDE INLINE __m512i wide_number(numbers x, int64_t place, __mmask16 some, int rounded) {
    if (!rounded) return _mm512_maskz_loadu_epi32(some, x.integers + place);
    const __m512 values = _mm512_maskz_loadu_ps(some, x.values + place);
    return _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps((float)x.factor)));
}

WIDE INLINE __m512i plus_product(__m512i sum, __m512i x, __m512i y) { return _mm512_add_epi64(sum, _mm512_mul_epi32(x, y)); }

WIDE INLINE void put_in_order(int64_t *to, __m512i even, __m512i odd) {
    const __m512i lower = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), upper = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(even, lower, odd));
    _mm512_storeu_si512(to + 8, _mm512_permutex2var_epi64(even, upper, odd));
}

WIDE INLINE __m512d wide_centred(__m512d x, double prime) {
    const __m512d round = _mm512_set1_pd(ROUND);
    const __m512d nearest = _mm512_sub_pd(_mm512_fmadd_pd(x, _mm512_set1_pd(1.0 / prime), round), round);
    return _mm512_fnmadd_pd(nearest, _mm512_set1_pd(prime), x);
}
#endif

/* Sums over one group's rows, of one or two repetitions; where they are, by modulus. */
typedef struct {
    double sums[2][TILE], total[MODULI][2][TILE];
    const double *found[MODULI][2];
} desk;

INLINE void of_a_group(const weighing *s, int rounded, int64_t o, int64_t g, int64_t rep, int twice, int64_t start,
                       int64_t width, desk *d) {
    const int64_t entries = s->outer / s->period * s->groups * s->length;
    const int64_t from = ((o / s->period) * s->groups + g) * s->length;
    const double *v = s->v + rep * entries + from, *w = twice ? v + entries : v;
    const numbers all = {s->x, s->values, s->factor};
    const numbers x = from_here(all, o * s->outer_stride + g * s->length * s->stride + start);
    const int single = s->length <= s->longest;
    int64_t first = 0;
    do { /* once at least: no rows are zeros */
        const int64_t rows = s->length - first < s->longest ? s->length - first : s->longest;
        block(from_here(x, first * s->stride), rounded, s->stride, rows, width, v + first, w + first, twice, d->sums[0],
              d->sums[1]);
        for (int64_t m = 0; m < s->moduli && !single; m++)
            for (int r = 0; r <= twice; r++) add_centred(d->sums[r], width, s->primes[m], first == 0, d->total[m][r]);
        first += s->longest;
    } while (first < s->length);
    for (int m = 0; m < MODULI; m++)
        for (int r = 0; r <= twice; r++) d->found[m][r] = single ? d->sums[r] : d->total[m][r];
}

INLINE void each_apart(const weighing *s, int rounded, int64_t rep, int twice) {
    desk d;
    for (int64_t o = 0; o < s->outer; o++)
        for (int64_t g = 0; g < s->groups; g++)
            for (int64_t start = 0; start < s->columns; start += TILE) {
                const int64_t width = s->columns - start < TILE ? s->columns - start : TILE;
                of_a_group(s, rounded, o, g, rep, twice, start, width, &d);
                for (int64_t m = 0; m < s->moduli; m++)
                    for (int r = 0; r <= twice; r++)
                        store(d.found[m][r], width, s->primes[m],
                              s->out + (((m * s->outer + o) * s->groups + g) * s->reps + rep + r) * s->columns + start);
            }
}

#if defined(__x86_64__)
#define LONGER 8    /* bits: so many more rows than `longest` can be summed */
#define TOGETHER 8  /* rows that are summed before a sum is touched */
#define ROWS 4      /* of a matrix, at a time */
#define INPUTS 8192 /* of a matrix, at most */

/* Whether all sums fit: `longest` products fit 53 bits, and weights fit 32. */
INLINE int wide_sums(const weighing *s) {
    const double prime = s->moduli > 1 && s->primes[1] < s->primes[0] ? s->primes[1] : s->primes[0];
    return !s->often && s->length && s->length <= s->longest << LONGER && s->longest * ((int64_t)prime / 2) > 1 << 22;
}

/* sums (+)= `count` rows, weighed, in order of even and odd places. What stands as many rows further is fetched meanwhile. */
WIDE INLINE void wide_some_rows(numbers x, int rounded, int64_t stride, int64_t columns, const double *v, const double *w,
                                int count, int fresh, int64_t *first, int64_t *second) {
    __m512i p[TOGETHER], q[TOGETHER];
    for (int r = 0; r < count; r++) p[r] = _mm512_set1_epi64((int64_t)v[r]), q[r] = _mm512_set1_epi64((int64_t)w[r]);
    for (int64_t c = 0; c < columns; c += LINE) {
        const __m512i zero = _mm512_setzero_si512();
        __m512i even = fresh ? zero : _mm512_loadu_si512(first + c), odd = fresh ? zero : _mm512_loadu_si512(first + c + 8);
        __m512i also = fresh ? zero : _mm512_loadu_si512(second + c), last = fresh ? zero : _mm512_loadu_si512(second + c + 8);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const numbers here = from_here(x, r * stride + c);
            const __m512i line = wide_number(here, 0, first_of(columns - c), rounded), other = _mm512_srli_epi64(line, 32);
            fetch_soon(from_here(here, count * stride), rounded);
            even = plus_product(even, line, p[r]), odd = plus_product(odd, other, p[r]);
            also = plus_product(also, line, q[r]), last = plus_product(last, other, q[r]);
        }
        _mm512_storeu_si512(first + c, even), _mm512_storeu_si512(first + c + 8, odd);
        _mm512_storeu_si512(second + c, also), _mm512_storeu_si512(second + c + 8, last);
    }
}

/* What is left of 64 bits, next to zero. */
WIDE INLINE void wide_residues(__m512i sum, __mmask8 some, double prime, int32_t *out) {
    const __m512d half = _mm512_set1_pd(0.5 * prime), whole = _mm512_set1_pd(prime);
    const __m512d upper = _mm512_cvtepi64_pd(_mm512_srai_epi64(sum, LOWER));
    const __m512d lower = _mm512_cvtepi64_pd(_mm512_and_si512(sum, _mm512_set1_epi64((1 << LOWER) - 1)));
    const __m512d both = _mm512_fmadd_pd(wide_centred(upper, prime), _mm512_set1_pd(1 << LOWER), lower);
    __m512d near = wide_centred(both, prime);
    near = _mm512_mask_sub_pd(near, _mm512_cmp_pd_mask(near, half, _CMP_GT_OQ), near, whole);
    near = _mm512_mask_add_pd(near, _mm512_cmp_pd_mask(near, _mm512_sub_pd(half, whole), _CMP_LT_OQ), near, whole);
    _mm256_mask_storeu_epi32(out, some, _mm512_cvtpd_epi32(near));
}

/* As store, of sums in order of even and odd places. */
WIDE INLINE void wide_store(const int64_t *sums, int64_t columns, double prime, int32_t *out) {
    for (int64_t c = 0; c < columns; c += LINE) {
        int64_t ordered[LINE];
        put_in_order(ordered, _mm512_loadu_si512(sums + c), _mm512_loadu_si512(sums + c + 8));
        for (int64_t i = 0; i < LINE && c + i < columns; i += LANES)
            wide_residues(_mm512_loadu_si512(ordered + i), (__mmask8)first_of(columns - c - i), prime, out + c + i);
    }
}

/* As each_apart, of two repetitions. */
WIDE INLINE void wide_each_apart(const weighing *s, int rounded, int64_t rep) {
    const int64_t entries = s->outer / s->period * s->groups * s->length;
    const numbers all = {s->x, s->values, s->factor};
    int64_t sums[2][TILE];
    for (int64_t o = 0; o < s->outer; o++)
        for (int64_t g = 0; g < s->groups; g++)
            for (int64_t start = 0; start < s->columns; start += TILE) {
                const int64_t width = s->columns - start < TILE ? s->columns - start : TILE;
                const double *v = s->v + rep * entries + ((o / s->period) * s->groups + g) * s->length, *w = v + entries;
                const numbers x = from_here(all, o * s->outer_stride + g * s->length * s->stride + start);
                int64_t row = 0;
#define SOME(count, fresh)                                                                                            \
    wide_some_rows(from_here(x, row * s->stride), rounded, s->stride, width, v + row, w + row, count, fresh, sums[0], sums[1])
                for (; row + TOGETHER <= s->length; row += TOGETHER)
                    if (row)
                        SOME(TOGETHER, 0);
                    else
                        SOME(TOGETHER, 1);
                for (; row < s->length; row++)
                    if (row)
                        SOME(1, 0);
                    else
                        SOME(1, 1);
#undef SOME
                for (int64_t m = 0; m < s->moduli; m++)
                    for (int r = 0; r < 2; r++)
                        wide_store(sums[r], width, s->primes[m],
                                   s->out + (((m * s->outer + o) * s->groups + g) * s->reps + rep + r) * s->columns + start);
            }
}

/* Whether outer ones are rows of a matrix, without gaps, that are weighed with the same: its sums over inputs. */
INLINE int rows_of_a_matrix(const weighing *s) {
    return !s->values && !s->often && s->columns == 1 && s->stride == 1 && s->groups == 1 && s->period == s->outer &&
           s->length <= INPUTS;
}

/* `count` such rows, each summed in 64 bits. */
WIDE INLINE void wide_matrix_rows(const int32_t *x, int64_t stride, int64_t n, const int32_t *v, const int32_t *w, int count,
                                  int64_t *first, int64_t *second) {
    __m512i a[ROWS], b[ROWS];
    for (int r = 0; r < count; r++) a[r] = b[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += LINE) {
        const __m512i p = _mm512_loadu_si512(v + i), also = _mm512_srli_epi64(p, 32);
        const __m512i q = _mm512_loadu_si512(w + i), last = _mm512_srli_epi64(q, 32);
        for (int r = 0; r < count; r++) {
            const __m512i line = _mm512_maskz_loadu_epi32(first_of(n - i), x + r * stride + i);
            const __m512i other = _mm512_srli_epi64(line, 32);
            a[r] = plus_product(plus_product(a[r], line, p), other, also);
            b[r] = plus_product(plus_product(b[r], line, q), other, last);
        }
    }
    for (int r = 0; r < count; r++) first[r] = _mm512_reduce_add_epi64(a[r]), second[r] = _mm512_reduce_add_epi64(b[r]);
}

/* As each_apart, of two repetitions: some rows share what they are weighed with, and all are reduced together. */
WIDE static void wide_weigh_matrix(const weighing *s, int64_t rep) {
    int32_t weights[2][INPUTS + LINE], found[TILE];
    int64_t sums[2][TILE];
    for (int r = 0; r < 2; r++)
        for (int64_t i = 0; i < s->length + LINE; i++)
            weights[r][i] = i < s->length ? (int32_t)s->v[(rep + r) * s->length + i] : 0;
    for (int64_t start = 0; start < s->outer; start += TILE) {
        const int64_t width = s->outer - start < TILE ? s->outer - start : TILE;
        const int32_t *x = s->x + start * s->outer_stride;
        int64_t o = 0;
        for (; o + ROWS <= width; o += ROWS)
            wide_matrix_rows(x + o * s->outer_stride, s->outer_stride, s->length, weights[0], weights[1], ROWS, sums[0] + o,
                             sums[1] + o);
        for (; o < width; o++)
            wide_matrix_rows(x + o * s->outer_stride, s->outer_stride, s->length, weights[0], weights[1], 1, sums[0] + o,
                             sums[1] + o);
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r < 2; r++) {
                for (o = 0; o < width; o += LANES)
                    wide_residues(_mm512_loadu_si512(sums[r] + o), (__mmask8)first_of(width - o), s->primes[m], found + o);
                for (o = 0; o < width; o++) s->out[(m * s->outer + start + o) * s->reps + rep + r] = found[o];
            }
    }
}

WIDE static void wide_weigh_floats(const weighing *s, int64_t rep) { wide_each_apart(s, 1, rep); }
WIDE static void wide_weigh_integers(const weighing *s, int64_t rep) { wide_each_apart(s, 0, rep); }
#endif

INLINE void all_together(const weighing *s, int rounded, int64_t rep, int twice) {
    desk d;
    double whole[MODULI][2][TILE];
    for (int64_t start = 0; start < s->columns; start += TILE) {
        const int64_t width = s->columns - start < TILE ? s->columns - start : TILE;
        memset(whole, 0, sizeof whole);
        for (int64_t o = 0; o < s->outer; o++) {
            of_a_group(s, rounded, o, 0, rep, twice, start, width, &d);
            for (int64_t m = 0; m < s->moduli; m++)
                for (int r = 0; r <= twice; r++) {
                    add_weighed(d.found[m][r], width, s->rows[(rep + r) * s->outer + o], s->primes[m], whole[m][r]);
                    if ((o + 1) % s->often == 0) centre(whole[m][r], width, s->primes[m]);
                }
        }
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++)
                store(whole[m][r], width, s->primes[m], s->out + (m * s->reps + rep + r) * s->columns + start);
    }
}

INLINE void weigh_two(const weighing *s, int rounded, int64_t rep, int twice) {
    if (s->often)
        all_together(s, rounded, rep, twice);
    else
        each_apart(s, rounded, rep, twice);
}

INLINE void weigh(const weighing *s, int wide) {
#if defined(__x86_64__)
    const int sums = wide && wide_sums(s), wider = sums && s->columns >= 4 * LINE, matrix = sums && rows_of_a_matrix(s);
#endif
    for (int64_t rep = 0; rep < s->reps; rep += 2) {
        const int two = rep + 1 < s->reps;
#if defined(__x86_64__)
        if (matrix && two) {
            wide_weigh_matrix(s, rep);
            continue;
        }
        if (wider && two) {
            if (s->values)
                wide_weigh_floats(s, rep);
            else
                wide_weigh_integers(s, rep);
            continue;
        }
#endif
        if (s->values && two)
            weigh_two(s, 1, rep, 1);
        else if (s->values)
            weigh_two(s, 1, rep, 0);
        else if (two)
            weigh_two(s, 0, rep, 1);
        else
            weigh_two(s, 0, rep, 0);
    }
    (void)wide;
}

/* --- sums of residues ---------------------------------------------------------------------------------------------- */
typedef struct {
    const int32_t *x; /* (modulus, rep, outer, n, inner) */
    int64_t moduli, reps, outer, n, inner;
    const double *matrix; /* (rep, m, n) */
    int64_t m, often;
    const double *primes;
    int32_t *out; /* (modulus, rep, outer, m, inner) */
} folding;

/* Numbers that lie side by side, in lanes that are reduced one by one. */
INLINE int32_t line(const int32_t *restrict x, const double *restrict weights, int64_t n, int64_t often, double prime) {
    const double inverse = 1.0 / prime;
    double lanes[LANES] = {0.0}, total = 0.0, rest = 0.0;
    int64_t i = 0, terms = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) lanes[l] += weights[i + l] * (double)x[i + l];
        if (++terms == often) {
            terms = 0;
#pragma omp simd
            for (int l = 0; l < LANES; l++) lanes[l] = centred(lanes[l], prime, inverse);
        }
    }
    for (terms = 0; i < n; i++) {
        rest += weights[i] * (double)x[i];
        if (++terms == often) {
            terms = 0;
            rest = centred(rest, prime, inverse);
        }
    }
    for (int l = 0; l < LANES; l++) total += centred(lanes[l], prime, inverse);
    return residue(total + centred(rest, prime, inverse), prime, inverse);
}

/* Few numbers side by side: as many as a vector holds are summed, and what is too much is the next row's. */
INLINE void narrow(const double *restrict x, const double *restrict weights, int64_t n, int64_t inner, int64_t often,
                   double prime, int wide, int32_t *restrict out) {
    double total[NARROW] = {0.0};
    int32_t found[NARROW];
    for (int64_t i = 0, terms = 0; i < n; i++) {
#pragma omp simd
        for (int c = 0; c < wide; c++) total[c] += weights[i] * x[i * inner + c];
        if (++terms == often) {
            terms = 0;
            centre(total, wide, prime);
        }
    }
    store(total, wide, prime, found);
    for (int64_t c = 0; c < inner; c++) out[c] = found[c];
}

INLINE void wide(const int32_t *x, const double *weights, int64_t n, int64_t inner, int64_t often, double prime,
                 int32_t *out) {
    double total[TILE];
    for (int64_t start = 0; start < inner; start += TILE) {
        const int64_t width = inner - start < TILE ? inner - start : TILE;
        for (int64_t c = 0; c < width; c++) total[c] = 0.0;
        for (int64_t i = 0, terms = 0; i < n; i++) {
            const double weight = weights[i];
            const int32_t *restrict row = x + i * inner + start;
            if (weight == 0.0) continue; /* of a position that this tap does not meet */
            for (int64_t c = 0; c < width; c++) total[c] += weight * (double)row[c];
            if (++terms == often) {
                terms = 0;
                centre(total, width, prime);
            }
        }
        store(total, width, prime, out + start);
    }
}

INLINE void plane(const int32_t *x, const double *matrix, int64_t m, int64_t n, int64_t inner, int64_t often,
                  double prime, int32_t *out) {
    double few[TILE + NARROW];
    const int small = inner > 1 && inner <= NARROW && n * inner <= TILE;
    if (small) {
        for (int64_t i = 0; i < n * inner; i++) few[i] = (double)x[i];
        for (int64_t i = 0; i < NARROW; i++) few[n * inner + i] = 0.0;
    }
    for (int64_t row = 0; row < m; row++, matrix += n, out += inner) {
        if (inner == 1)
            *out = line(x, matrix, n, often, prime);
        else if (small && 2 * inner <= NARROW)
            narrow(few, matrix, n, inner, often, prime, NARROW / 2, out);
        else if (small)
            narrow(few, matrix, n, inner, often, prime, NARROW, out);
        else
            wide(x, matrix, n, inner, often, prime, out);
    }
}

INLINE void fold(const folding *s) {
    const int32_t *x = s->x;
    int32_t *out = s->out;
    for (int64_t modulus = 0; modulus < s->moduli; modulus++)
        for (int64_t rep = 0; rep < s->reps; rep++)
            for (int64_t o = 0; o < s->outer; o++, x += s->n * s->inner, out += s->m * s->inner)
                plane(x, s->matrix + rep * s->m * s->n, s->m, s->n, s->inner, s->often, s->primes[modulus], out);
}

typedef struct {
    const int32_t *x; /* (modulus, row, channel, before, size, inner) */
    int64_t moduli, rows, channels, before, size, inner;
    const double *weights; /* (channel, tap) */
    int64_t taps, step, hole, skipped, count, often;
    const double *primes;
    int32_t *out; /* (modulus, row, channel, before, count, inner) */
} sliding;

/* out[p] = sum over taps t of weight[t] * x[p * step + t * hole - skipped], where there is such an x. */
INLINE void slide(const sliding *s) {
    double total[TILE];
    for (int64_t lead = 0; lead < s->moduli * s->rows * s->channels * s->before; lead++) {
        const double prime = s->primes[lead / (s->rows * s->channels * s->before)];
        const double *weights = s->weights + lead / s->before % s->channels * s->taps;
        const int32_t *x = s->x + lead * s->size * s->inner;
        int32_t *out = s->out + lead * s->count * s->inner;
        if (s->inner == 1) {
            for (int64_t start = 0; start < s->count; start += TILE) {
                const int64_t width = s->count - start < TILE ? s->count - start : TILE;
                for (int64_t c = 0; c < width; c++) total[c] = 0.0;
                for (int64_t t = 0, terms = 0; t < s->taps; t++) {
                    const int64_t shift = start * s->step + t * s->hole - s->skipped, left = s->size - 1 - shift;
                    const int64_t first = shift < 0 ? (-shift + s->step - 1) / s->step : 0;
                    const int64_t behind = left < 0 ? 0 : left / s->step + 1, end = behind < width ? behind : width;
                    const double weight = weights[t];
                    const int32_t *from = x + shift;
                    if (s->step == 1)
                        for (int64_t c = first; c < end; c++) total[c] += weight * (double)from[c];
                    else if (s->step == 2)
                        for (int64_t c = first; c < end; c++) total[c] += weight * (double)from[2 * c];
                    else
                        for (int64_t c = first; c < end; c++) total[c] += weight * (double)from[s->step * c];
                    if (++terms == s->often) {
                        terms = 0;
                        centre(total, width, prime);
                    }
                }
                store(total, width, prime, out + start);
            }
            continue;
        }
        for (int64_t p = 0; p < s->count; p++)
            for (int64_t start = 0; start < s->inner; start += TILE) {
                const int64_t width = s->inner - start < TILE ? s->inner - start : TILE;
                for (int64_t c = 0; c < width; c++) total[c] = 0.0;
                for (int64_t t = 0, terms = 0; t < s->taps; t++) {
                    const int64_t at = p * s->step + t * s->hole - s->skipped;
                    if (at < 0 || at >= s->size) continue;
                    const double weight = weights[t];
                    const int32_t *restrict row = x + at * s->inner + start;
                    for (int64_t c = 0; c < width; c++) total[c] += weight * (double)row[c];
                    if (++terms == s->often) {
                        terms = 0;
                        centre(total, width, prime);
                    }
                }
                store(total, width, prime, out + p * s->inner + start);
            }
    }
}

typedef struct {
    const int32_t *left, *right; /* (modulus, row, channel, n) */
    int64_t moduli, rows, channels, n;
    const double *primes;
    int32_t *out; /* (modulus, channel) */
} product;

INLINE void dot(const product *s) {
    for (int64_t m = 0; m < s->moduli; m++) {
        const int64_t prime = (int64_t)s->primes[m];
        for (int64_t channel = 0; channel < s->channels; channel++) {
            int64_t total = 0;
            for (int64_t row = 0; row < s->rows; row++) {
                const int64_t at = ((m * s->rows + row) * s->channels + channel) * s->n;
                for (int64_t start = 0; start < s->n; start += PRODUCTS) {
                    const int64_t width = s->n - start < PRODUCTS ? s->n - start : PRODUCTS;
                    const int32_t *restrict a = s->left + at + start, *restrict b = s->right + at + start;
                    int64_t sum = 0;
                    for (int64_t i = 0; i < width; i++) sum += (int64_t)a[i] * (int64_t)b[i];
                    total += sum % prime;
                }
            }
            s->out[m * s->channels + channel] = residue((double)(total % prime), (double)prime, 1.0 / (double)prime);
        }
    }
}

/* --- sums over rows and both axes of positions --------------------------------------------------------------------- */
#define TAPS 8 /* along the height, at most */

typedef struct {
    const int32_t *x; /* (row, channel, height, width), without gaps but between rows */
    const float *values; /* instead of x: floats that are rounded, times the factor */
    double factor;
    int64_t rows, row_stride, channels, height, width; /* the width at most a tile */
    const double *v; /* (rep, row) */
    int64_t reps, longest; /* rows between two reductions */
    const double *down;   /* (rep, tall, height) */
    const double *across; /* (rep, wide, width) */
    int64_t tall, wide, often; /* often: positions between two reductions */
    const double *primes;
    int64_t moduli;
    int32_t *out; /* (modulus, rep, channel, tall, wide) */
} projecting;

/* Vectors are whole: what they have beyond the end of a line is summed too, and not looked at. */
typedef struct {
    double sums[2][TILE], rest[MODULI][2][TILE + LANES], total[MODULI][2][TAPS][TILE + LANES];
    int32_t ended[TILE];
} folio;

/* n numbers of each row from `place` on, summed over rows: rest, by modulus. */
INLINE void over_rows(const projecting *s, int rounded, int64_t rep, int twice, int64_t place, int64_t n, folio *d) {
    const numbers all = {s->x, s->values, s->factor};
    const double *v = s->v + rep * s->rows, *w = twice ? v + s->rows : v;
    for (int64_t first = 0; first < s->rows; first += s->longest) {
        const int64_t rows = s->rows - first < s->longest ? s->rows - first : s->longest;
        tile(from_here(all, place + first * s->row_stride), rounded, s->row_stride, rows, n, v + first, w + first, twice,
             d->sums[0], d->sums[1]);
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++) add_centred(d->sums[r], n, s->primes[m], first == 0, d->rest[m][r]);
    }
    for (int64_t m = 0; m < s->moduli && s->rows > s->longest; m++)
        for (int r = 0; r <= twice; r++) centre(d->rest[m][r], n, s->primes[m]);
}

/* total[tap] += weight of each line at that tap * the line: some lines from h on, which begin at `start` of rest. */
INLINE void add_lines(const projecting *s, int64_t rep, int twice, int64_t h, int64_t lines, int64_t start, folio *d) {
    const int64_t padded = (s->width + LANES - 1) / LANES * LANES;
    for (int64_t m = 0; m < s->moduli; m++)
        for (int r = 0; r <= twice; r++)
            for (int64_t t = 0; t < s->tall; t++) {
                const double *down = s->down + ((rep + r) * s->tall + t) * s->height + h;
                const double *from = d->rest[m][r] + start;
                double *restrict total = d->total[m][r][t];
                for (int64_t l = 0; l < lines; l++, from += s->width) {
                    const double weight = down[l];
                    if (weight != 0.0) /* else this tap does not meet it */
                        for (int64_t i = 0; i < padded; i += LANES)
#pragma omp simd
                            for (int lane = 0; lane < LANES; lane++) total[i + lane] += weight * from[i + lane];
                    if ((h + l + 1) % s->often == 0) centre(total, padded, s->primes[m]);
                }
            }
}

INLINE void begin_channel(const projecting *s, int twice, folio *d) {
    for (int64_t m = 0; m < s->moduli; m++)
        for (int r = 0; r <= twice; r++)
            for (int64_t t = 0; t < s->tall; t++)
                memset(d->total[m][r][t], 0, (size_t)(s->width + LANES) * sizeof(double));
}

INLINE void end_channel(const projecting *s, int64_t rep, int twice, int64_t c, folio *d) {
    for (int64_t m = 0; m < s->moduli; m++)
        for (int r = 0; r <= twice; r++) {
            const double *across = s->across + (rep + r) * s->wide * s->width;
            int32_t *out = s->out + ((m * s->reps + rep + r) * s->channels + c) * s->tall * s->wide;
            for (int64_t t = 0; t < s->tall; t++) {
                store(d->total[m][r][t], s->width, s->primes[m], d->ended);
                for (int64_t u = 0; u < s->wide; u++)
                    *out++ = line(d->ended, across + u * s->width, s->width, s->often, s->primes[m]);
            }
        }
}

INLINE void project_two(const projecting *s, int rounded, int64_t rep, int twice) {
    folio d;
    const int64_t plane = s->height * s->width, several = TILE / plane, lines = TILE / s->width;
    memset(d.rest, 0, sizeof d.rest);
    for (int64_t first = 0; several && first < s->channels; first += several) { /* small planes: some at once */
        const int64_t some = s->channels - first < several ? s->channels - first : several;
        over_rows(s, rounded, rep, twice, first * plane, some * plane, &d);
        for (int64_t c = 0; c < some; c++) {
            begin_channel(s, twice, &d);
            add_lines(s, rep, twice, 0, s->height, c * plane, &d);
            end_channel(s, rep, twice, first + c, &d);
        }
    }
    for (int64_t c = 0; !several && c < s->channels; c++) {
        begin_channel(s, twice, &d);
        for (int64_t h = 0; h < s->height; h += lines) {
            const int64_t some = s->height - h < lines ? s->height - h : lines;
            over_rows(s, rounded, rep, twice, c * plane + h * s->width, some * s->width, &d);
            add_lines(s, rep, twice, h, some, 0, &d);
        }
        end_channel(s, rep, twice, c, &d);
    }
}

#if defined(__x86_64__)
/* --- the same with AVX-512, reduced once for a channel ----------------------------------------------------------------- */
#define ENTRIES 512 /* rows, and lines, at most */

typedef struct {
    int64_t rows[2][ENTRIES], down[2][TAPS][ENTRIES];                        /* weights */
    int64_t sums[2][TILE + 2 * LINE];                                        /* over rows */
    int64_t low[2][TAPS][TILE + LANES], high[2][TAPS][TILE + LANES]; /* over rows and lines: lower bits of sums, and above */
    double ended[MODULI][TILE + LANES], found[MODULI][2][TAPS * TAPS];
} wide_folio;

/* Whether all sums fit 64 bits. `longest` products fit 53 bits, so four times as many fit 55, of which 30 are above LOWER;
 * and the weight of a line has less than 54 bits without those of often * half, so that so many lines fit 62. Weights fit
 * 32. */
INLINE int wide_enough(const projecting *s) {
    const double prime = s->moduli > 1 && s->primes[1] < s->primes[0] ? s->primes[1] : s->primes[0];
    const int64_t half = (int64_t)prime / 2, least = 1 << 22;
    return s->rows <= 4 * s->longest && s->rows <= ENTRIES && s->height <= s->often * half >> 21 && s->height <= ENTRIES &&
           s->wide <= TAPS && s->longest * half > least && s->often * half > least;
}

/* As over_rows: `lines` vectors from i on, of which the last may not be whole, to sums. lines: 1 or 2. */
WIDE INLINE void wide_rows(const projecting *s, int rounded, int64_t place, int64_t i, int lines, __mmask16 last,
                           wide_folio *d) {
    const numbers all = from_here((numbers){s->x, s->values, s->factor}, place + i);
    __m512i even[2][2], odd[2][2]; /* (rep, line): numbers that stand side by side are weighed apart */
    for (int r = 0; r < 2; r++)
        for (int l = 0; l < 2; l++) even[r][l] = odd[r][l] = _mm512_setzero_si512();
    for (int64_t row = 0; row < s->rows; row++) {
        const numbers x = from_here(all, row * s->row_stride);
        const __m512i v = _mm512_set1_epi64(d->rows[0][row]), w = _mm512_set1_epi64(d->rows[1][row]);
        for (int l = 0; l < lines; l++) {
            const __mmask16 some = l + 1 < lines ? 0xFFFF : last;
            const __m512i line = wide_number(x, l * LINE, some, rounded);
            const __m512i other = _mm512_srli_epi64(line, 32);
            fetch_soon(from_here(x, l * LINE + SOON), rounded);
            even[0][l] = plus_product(even[0][l], line, v), odd[0][l] = plus_product(odd[0][l], other, v);
            even[1][l] = plus_product(even[1][l], line, w), odd[1][l] = plus_product(odd[1][l], other, w);
        }
    }
    for (int r = 0; r < 2; r++)
        for (int l = 0; l < lines; l++) put_in_order(d->sums[r] + i + l * LINE, even[r][l], odd[r][l]);
}

WIDE INLINE void wide_over_rows(const projecting *s, int rounded, int64_t place, int64_t n, wide_folio *d) {
    int64_t i = 0;
    for (; i + 2 * LINE <= n; i += 2 * LINE) wide_rows(s, rounded, place, i, 2, 0xFFFF, d);
    for (; i < n; i += LINE) wide_rows(s, rounded, place, i, 1, first_of(n - i), d);
}

/* As add_lines, for `count` taps from t on: 1 or 3. What stands beyond the end of a line is summed too. */
WIDE INLINE void wide_add(const projecting *s, int64_t t, int count, int64_t h, int64_t lines, int64_t start, wide_folio *d) {
    const __m512i mask = _mm512_set1_epi64((1 << LOWER) - 1);
    for (int r = 0; r < 2; r++)
        for (int64_t i = 0; i < s->width; i += LANES) {
            const int64_t *from = d->sums[r] + start + i;
            __m512i low[3], high[3];
            for (int c = 0; c < count; c++) {
                low[c] = h ? _mm512_loadu_si512(d->low[r][t + c] + i) : _mm512_setzero_si512();
                high[c] = h ? _mm512_loadu_si512(d->high[r][t + c] + i) : _mm512_setzero_si512();
            }
            for (int64_t l = 0; l < lines; l++, from += s->width) {
                const __m512i sum = _mm512_loadu_si512(from);
                const __m512i lower = _mm512_and_si512(sum, mask), upper = _mm512_srai_epi64(sum, LOWER);
                for (int c = 0; c < count; c++) {
                    const __m512i weight = _mm512_set1_epi64(d->down[r][t + c][h + l]);
                    low[c] = plus_product(low[c], lower, weight);
                    high[c] = plus_product(high[c], upper, weight);
                }
            }
            for (int c = 0; c < count; c++) {
                _mm512_storeu_si512(d->low[r][t + c] + i, low[c]);
                _mm512_storeu_si512(d->high[r][t + c] + i, high[c]);
            }
        }
}

WIDE INLINE void wide_add_lines(const projecting *s, int64_t h, int64_t lines, int64_t start, wide_folio *d) {
    int64_t t = 0;
    for (; t + 3 <= s->tall; t += 3) wide_add(s, t, 3, h, lines, start, d);
    for (; t < s->tall; t++) wide_add(s, t, 1, h, lines, start, d);
}

/* low + high * 2^LOWER, centred by modulus: ended. */
WIDE INLINE void wide_end(const projecting *s, const int64_t *low, const int64_t *high, wide_folio *d) {
    const __m512i mask = _mm512_set1_epi64((1 << LOWER) - 1);
    const __m512d by = _mm512_set1_pd(1 << LOWER);
    for (int64_t i = 0; i < s->width; i += LANES) {
        const __m512i lower = _mm512_loadu_si512(low + i);
        const __m512i upper = _mm512_add_epi64(_mm512_loadu_si512(high + i), _mm512_srai_epi64(lower, LOWER));
        const __m512d first = _mm512_cvtepi64_pd(_mm512_srai_epi64(upper, LOWER));
        const __m512d second = _mm512_cvtepi64_pd(_mm512_and_si512(upper, mask));
        const __m512d third = _mm512_cvtepi64_pd(_mm512_and_si512(lower, mask));
        for (int64_t m = 0; m < s->moduli; m++) {
            const __m512d one = _mm512_fmadd_pd(wide_centred(first, s->primes[m]), by, second);
            const __m512d two = _mm512_fmadd_pd(wide_centred(one, s->primes[m]), by, third);
            _mm512_storeu_pd(d->ended[m] + i, wide_centred(two, s->primes[m]));
        }
    }
}

/* The sum of x * weights over n of them, which is within half of 2^31. */
WIDE INLINE double wide_sum(const double *x, const double *weights, int64_t n, int64_t often, double prime) {
    __m512d sum = _mm512_setzero_pd();
    for (int64_t i = 0, terms = 0; i < n; i += LANES) {
        const __mmask8 some = (__mmask8)(n - i < LANES ? (1 << (n - i)) - 1 : 0xFF);
        sum = _mm512_fmadd_pd(_mm512_loadu_pd(x + i), _mm512_maskz_loadu_pd(some, weights + i), sum);
        if (++terms == often) terms = 0, sum = wide_centred(sum, prime);
    }
    return _mm512_reduce_add_pd(wide_centred(sum, prime));
}

WIDE INLINE void wide_end_channel(const projecting *s, int64_t rep, int64_t c, wide_folio *d) {
    const int64_t taps = s->tall * s->wide;
    for (int r = 0; r < 2; r++)
        for (int64_t t = 0; t < s->tall; t++) {
            wide_end(s, d->low[r][t], d->high[r][t], d);
            for (int64_t m = 0; m < s->moduli; m++)
                for (int64_t u = 0; u < s->wide; u++)
                    d->found[m][r][t * s->wide + u] = wide_sum(d->ended[m], s->across + ((rep + r) * s->wide + u) * s->width,
                                                               s->width, s->often, s->primes[m]);
        }
    for (int64_t m = 0; m < s->moduli; m++)
        for (int r = 0; r < 2; r++)
            store(d->found[m][r], taps, s->primes[m], s->out + ((m * s->reps + rep + r) * s->channels + c) * taps);
}

/* As project_two, of two repetitions. */
WIDE INLINE void wide_project(const projecting *s, int rounded, int64_t rep) {
    wide_folio d;
    const int64_t plane = s->height * s->width, several = TILE / plane, lines = TILE / s->width;
    for (int r = 0; r < 2; r++) {
        for (int64_t row = 0; row < s->rows; row++) d.rows[r][row] = (int64_t)s->v[(rep + r) * s->rows + row];
        for (int64_t t = 0; t < s->tall; t++)
            for (int64_t h = 0; h < s->height; h++)
                d.down[r][t][h] = (int64_t)s->down[((rep + r) * s->tall + t) * s->height + h];
    }
    for (int64_t first = 0; several && first < s->channels; first += several) { /* small planes: some at once */
        const int64_t some = s->channels - first < several ? s->channels - first : several;
        wide_over_rows(s, rounded, first * plane, some * plane, &d);
        for (int64_t c = 0; c < some; c++) {
            wide_add_lines(s, 0, s->height, c * plane, &d);
            wide_end_channel(s, rep, first + c, &d);
        }
    }
    for (int64_t c = 0; !several && c < s->channels; c++) {
        for (int64_t h = 0; h < s->height; h += lines) {
            const int64_t some = s->height - h < lines ? s->height - h : lines;
            wide_over_rows(s, rounded, c * plane + h * s->width, some * s->width, &d);
            wide_add_lines(s, h, some, 0, &d);
        }
        wide_end_channel(s, rep, c, &d);
    }
}

WIDE static void wide_project_floats(const projecting *s, int64_t rep) { wide_project(s, 1, rep); }
WIDE static void wide_project_integers(const projecting *s, int64_t rep) { wide_project(s, 0, rep); }
#endif

INLINE void project(const projecting *s, int wide) {
#if defined(__x86_64__)
    const int wider = wide && wide_enough(s);
#endif
    for (int64_t rep = 0; rep < s->reps; rep += 2) {
        const int two = rep + 1 < s->reps;
#if defined(__x86_64__)
        if (wider && two) {
            if (s->values)
                wide_project_floats(s, rep);
            else
                wide_project_integers(s, rep);
            continue;
        }
#endif
        if (s->values && two)
            project_two(s, 1, rep, 1);
        else if (s->values)
            project_two(s, 1, rep, 0);
        else if (two)
            project_two(s, 0, rep, 1);
        else
            project_two(s, 0, rep, 0);
    }
    (void)wide;
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define VARIANT(name, wide, attribute)                                                                                \
    attribute static void weigh_##name(const weighing *s) { weigh(s, wide); }                                             \
    attribute static void fold_##name(const folding *s) { fold(s); }                                                  \
    attribute static void slide_##name(const sliding *s) { slide(s); }                                                \
    attribute static void dot_##name(const product *s) { dot(s); }                                                    \
    attribute static void project_##name(const projecting *s) { project(s, wide); }

VARIANT(plain, 0, )
#if defined(__x86_64__)
VARIANT(avx2, 0, __attribute__((target("avx2,fma"))))
VARIANT(avx512, 1, __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma,prefer-vector-width=512"))))
#endif

static void (*chosen_weigh)(const weighing *) = weigh_plain;
static void (*chosen_fold)(const folding *) = fold_plain;
static void (*chosen_slide)(const sliding *) = slide_plain;
static void (*chosen_dot)(const product *) = dot_plain;
static void (*chosen_project)(const projecting *) = project_plain;

#define CHOOSE(name)                                                                                                  \
    chosen_weigh = weigh_##name;                                                                                      \
    chosen_fold = fold_##name;                                                                                        \
    chosen_slide = slide_##name;                                                                                      \
    chosen_dot = dot_##name;                                                                                          \
    chosen_project = project_##name;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        CHOOSE(avx2)
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        CHOOSE(avx512)
    }
#endif
}

/* --- vectors -------------------------------------------------------------------------------------------------------- */
/* From uniform words the entries of several vectors, one behind the other, each (rep, length): of `widest` bits around
 * zero, of which those with fewer keep the upper ones. Words are (rep, all lengths). */
void darknight_entries_1(const int32_t *words, int64_t reps, int64_t vectors, const int64_t *lengths, const int64_t *bits,
                         int64_t widest, double *out) {
    const int32_t mask = (int32_t)((1u << widest) - 1), half = (int32_t)(1u << (widest - 1));
    int64_t all = 0, before = 0;
    for (int64_t k = 0; k < vectors; k++) all += lengths[k];
    for (int64_t k = 0; k < vectors; before += lengths[k++])
        for (int64_t rep = 0; rep < reps; rep++, out += lengths[k])
            for (int64_t i = 0; i < lengths[k]; i++)
                out[i] = (double)(((words[rep * all + before + i] & mask) - half) >> (widest - bits[k]));
}

#include "sides.h"

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others of each are for tests: without vector instructions of this processor, and with those of AVX2. */
#define NAMED(kind, name)                                                                                             \
    void darknight_weigh_##kind(const weighing *s) { weigh_##name(s); }                                               \
    void darknight_fold_##kind(const folding *s) { fold_##name(s); }                                                  \
    void darknight_slide_##kind(const sliding *s) { slide_##name(s); }                                                \
    void darknight_dot_##kind(const product *s) { dot_##name(s); }                                                    \
    void darknight_project_##kind(const projecting *s) { project_##name(s); }

NAMED(plain_3, plain)
#if defined(__x86_64__)
NAMED(avx2_3, avx2)
#endif
void darknight_weigh_3(const weighing *s) { chosen_weigh(s); }
void darknight_fold_3(const folding *s) { chosen_fold(s); }
void darknight_slide_3(const sliding *s) { chosen_slide(s); }
void darknight_dot_3(const product *s) { chosen_dot(s); }
void darknight_project_3(const projecting *s) { chosen_project(s); }
