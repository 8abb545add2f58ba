/* What field.c and unmasking.c are made of: combinations modulo a prime, fixed point, and memory, a tile at a time.
 *
 * No Python.h: plain loops, which gcc and clang turn into vector instructions. Results are integers, or one rounding of
 * one, so they are the same with any of these.
 */
#ifndef DARKNIGHT_FIELD_H
#define DARKNIGHT_FIELD_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define TILE 1024
#define MOST_INPUTS 64
#define MOST_ROWS 128
#define MOST_KEPT 8    /* quantised tiles that stay in the first cache */
#define LARGE (1 << 18) /* numbers: a megabyte, about what a second-level cache has room for besides operands */
#define FOLD 32 /* products below 2^57 between two reductions */
#define INLINE static inline __attribute__((always_inline))

/* p = 2^bits - less, and what the loops need of it. */
typedef struct {
    int32_t prime, half, bits, less;
    float inverse;
} field;

typedef struct {
    const int32_t *matrix;     /* (row, source) */
    const int32_t *low, *high; /* (source): what its numbers are between */
    int64_t rows, sources;
    int32_t prime, bits, less, centred;
} combination;

INLINE field field_of(const combination *what) {
    const field f = {what->prime, what->prime / 2, what->bits, what->less, 1.0f / (float)what->prime};
    return f;
}

/* --- one row of a combination ----------------------------------------------------------------------------------- */

/* Any int32 that is at least a prime away from the ends of their range. The quotient is off by at most one half and a
 * little, which the comparisons mend. */
INLINE void reduce(int32_t *restrict out, const int32_t *restrict sum, int64_t n, const field *f, int centred) {
    const int32_t prime = f->prime, half = f->half;
    const float inverse = f->inverse;
    for (int64_t i = 0; i < n; i++) {
        int32_t value = sum[i] - (int32_t)rintf((float)sum[i] * inverse) * prime;
        if (centred) {
            value -= value > half ? prime : 0;
            value += value < -half ? prime : 0;
        } else {
            value += value < 0 ? prime : 0;
        }
        out[i] = value;
    }
}

/* Below 2^63 -> [0, prime), twice folded. */
INLINE uint64_t folded(uint64_t value, uint64_t mask, int bits, uint64_t less) {
    value = (value & mask) + (value >> bits) * less;
    return (value & mask) + (value >> bits) * less;
}

INLINE void reduce_wide(int32_t *restrict out, const uint64_t *restrict sum, int64_t n, const field *f, int centred) {
    const uint64_t mask = ((uint64_t)1 << f->bits) - 1, less = (uint64_t)f->less;
    const int32_t prime = f->prime, half = f->half;
    const int bits = f->bits;
    for (int64_t i = 0; i < n; i++) {
        int32_t value = (int32_t)folded(sum[i], mask, bits, less);
        value -= value >= prime ? prime : 0;
        if (centred) value -= value > half ? prime : 0;
        out[i] = value;
    }
}

INLINE void add(int32_t *restrict sum, const int32_t *restrict x, int64_t n, int32_t c, int fresh) {
    if (fresh && c == 1) {
        memcpy(sum, x, (size_t)n * sizeof *x);
    } else if (fresh) {
        for (int64_t i = 0; i < n; i++) sum[i] = c * x[i];
    } else if (c == 1) {
        for (int64_t i = 0; i < n; i++) sum[i] += x[i];
    } else if (c == -1) {
        for (int64_t i = 0; i < n; i++) sum[i] -= x[i];
    } else {
        for (int64_t i = 0; i < n; i++) sum[i] += c * x[i];
    }
}

INLINE void add_three(int32_t *restrict sum, const int32_t *restrict x, const int32_t *restrict y,
                      const int32_t *restrict z, int64_t n, int fresh) {
    if (fresh)
        for (int64_t i = 0; i < n; i++) sum[i] = x[i] + y[i] + z[i];
    else
        for (int64_t i = 0; i < n; i++) sum[i] += x[i] + y[i] + z[i];
}

/* [-prime, 2 prime) -> [0, prime): as unsigned, a negative number is larger than any other. */
INLINE uint32_t below_prime(uint32_t value, uint32_t prime) {
    value = value < value + prime ? value : value + prime;
    return value < value - prime ? value : value - prime;
}

/* Two terms without an intermediate sum: what a data worker's share and its decoding are. turn: a multiple of the prime,
 * which brings the sum to where below_prime takes it. */
INLINE void add_two(int32_t *restrict out, const int32_t *restrict x, const int32_t *restrict y, int64_t n, int minus,
                    int32_t turn, const field *f, int centred) {
    const uint32_t prime = (uint32_t)f->prime, half = centred ? (uint32_t)f->half : 0, more = half + (uint32_t)turn;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t value = minus ? (uint32_t)x[i] - (uint32_t)y[i] : (uint32_t)x[i] + (uint32_t)y[i];
        out[i] = (int32_t)(below_prime(value + more, prime) - half);
    }
}

/* How a row is made, which is found out once for all tiles. */
enum { ZEROS, COPIED, OF_TWO, SHORT, LONG };

typedef struct {
    const int32_t *c; /* by source */
    int64_t sources, first, last; /* the first and the last that has a coefficient */
    int kind, centred;
    int32_t turn; /* of two terms: as add_two says */
} recipe;

INLINE recipe recipe_of(const combination *what, int64_t r) {
    recipe how = {what->matrix + r * what->sources, what->sources, 0, 0, LONG, what->centred, 0};
    int64_t least = 0, most = 0, terms = 0;
    for (int64_t s = 0; s < what->sources; s++) {
        const int64_t c = how.c[s];
        if (!c) continue;
        least += c * (c > 0 ? what->low[s] : what->high[s]);
        most += c * (c > 0 ? what->high[s] : what->low[s]);
        how.first = terms++ ? how.first : s;
        how.last = s;
    }
    const int64_t prime = what->prime, room = INT32_MAX - prime, shift = what->centred ? prime / 2 : 0;
    const int32_t one = how.c[how.first], other = how.c[how.last];
    const int two = terms == 2 && one == 1 && (other == 1 || other == -1);
    how.turn = (int32_t)(least + shift < -prime ? prime : most + shift >= 2 * prime ? -prime : 0);
    if (terms == 0)
        how.kind = ZEROS;
    else if (terms == 1 && one == 1 && least + shift >= 0 && most + shift < prime)
        how.kind = COPIED;
    else if (two && least + shift + how.turn >= -prime && most + shift + how.turn < 2 * prime)
        how.kind = OF_TWO;
    else if (least >= -room && most <= room)
        how.kind = SHORT;
    return how;
}

/* Whether each row is a source of its own, and one that is the same for all is subtracted from it, as from inputs in a
 * systematic code, or added to it, as to gradients. */
INLINE int systematic(const combination *what, const recipe *how) {
    int alike = what->sources == what->rows + 1;
    for (int64_t k = 0; k < what->rows; k++)
        alike = alike && how[k].kind == OF_TWO && how[k].last == how->last && how[k].c[how->last] == how->c[how->last] &&
                (k == 0 || how[k].first > how[k - 1].first);
    return alike;
}

INLINE void short_row(int32_t *restrict out, const recipe *how, const int32_t *const *x, int64_t from, int64_t n,
                      const field *f) {
    int32_t sum[TILE];
    int fresh = 1;
    for (int64_t s = how->first; s <= how->last; s++) {
        if (!how->c[s]) continue;
        if (s + 2 <= how->last && how->c[s] == 1 && how->c[s + 1] == 1 && how->c[s + 2] == 1) {
            add_three(sum, x[s] + from, x[s + 1] + from, x[s + 2] + from, n, fresh); /* a weight gradient is a plain sum */
            s += 2;
        } else {
            add(sum, x[s] + from, n, how->c[s], fresh);
        }
        fresh = 0;
    }
    reduce(out, sum, n, f, how->centred);
}

INLINE void long_row(int32_t *restrict out, const recipe *how, const int32_t *const *x, int64_t from, int64_t n,
                     const field *f) {
    const uint64_t mask = ((uint64_t)1 << f->bits) - 1, less = (uint64_t)f->less;
    uint64_t wide[TILE];
    int64_t terms = 0;
    memset(wide, 0, (size_t)n * sizeof *wide);
    for (int64_t s = how->first; s <= how->last; s++) {
        const int32_t c = how->c[s];
        if (!c) continue;
        if (terms++ == FOLD) {
            for (int64_t i = 0; i < n; i++) wide[i] = folded(wide[i], mask, f->bits, less);
            terms = 1;
        }
        const uint32_t factor = (uint32_t)(c < 0 ? c + f->prime : c), shift = (uint32_t)f->prime;
        const int32_t *restrict here = x[s] + from;
        for (int64_t i = 0; i < n; i++) wide[i] += (uint64_t)factor * (uint32_t)(here[i] + (int32_t)shift);
    }
    reduce_wide(out, wide, n, f, how->centred);
}

/* out = sum of c[s] * x[s] modulo the prime, over at most a tile, of numbers from `from` on. */
INLINE void row(int32_t *restrict out, const recipe *how, const int32_t *const *x, int64_t from, int64_t n,
                const field *f) {
    const int32_t *one = x[how->first] + from, *other = x[how->last] + from;
    if (how->kind == ZEROS)
        memset(out, 0, (size_t)n * sizeof *out);
    else if (how->kind == COPIED)
        memcpy(out, one, (size_t)n * sizeof *out);
    else if (how->kind == OF_TWO && how->c[how->last] < 0)
        add_two(out, one, other, n, 1, how->turn, f, how->centred);
    else if (how->kind == OF_TWO)
        add_two(out, one, other, n, 0, how->turn, f, how->centred);
    else if (how->kind == SHORT)
        short_row(out, how, x, from, n, f);
    else
        long_row(out, how, x, from, n, f);
}

/* --- fixed point -------------------------------------------------------------------------------------------------- */

INLINE void nearest(int32_t *restrict q, const float *restrict x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) q[i] = (int32_t)rintf(x[i] * scale);
}

/* Up where a uniform of 24 bits is below the fraction. */
INLINE void stochastic(int32_t *restrict q, const float *restrict x, const uint32_t *restrict words, int64_t n,
                       float scale) {
    for (int64_t i = 0; i < n; i++) {
        const float scaled = x[i] * scale, lower = floorf(scaled);
        const float uniform = (float)(int32_t)(words[i] & 0xFFFFFF) * 0x1p-24f;
        q[i] = (int32_t)lower + (uniform < scaled - lower ? 1 : 0);
    }
}

INLINE void to_float(float *restrict y, const int32_t *restrict q, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) y[i] = (float)q[i] * scale;
}

/* --- to memory -----------------------------------------------------------------------------------------------------
 *
 * What is written and not read soon goes past the cache: a line need not be fetched before it is written. Results that
 * fit the cache stay there. */

INLINE void put(void *to, const void *from, int64_t n, int past) {
#if defined(__x86_64__)
    if (past) {
        char *out = to;
        const char *in = from;
        int64_t left = 4 * n;
        while (left && ((uintptr_t)out & 15)) {
            memcpy(out, in, 4);
            out += 4, in += 4, left -= 4;
        }
        for (; left >= 16; out += 16, in += 16, left -= 16)
            _mm_stream_si128((__m128i *)out, _mm_loadu_si128((const __m128i *)in));
        memcpy(out, in, (size_t)left);
        return;
    }
#endif
    (void)past;
    memcpy(to, from, (size_t)n * 4);
}

/* Fetches the tile after this one meanwhile. Beyond the end it does nothing: a prefetch never faults. */
INLINE void ahead(const void *from) {
    for (int64_t i = 0; i < TILE; i += 16) __builtin_prefetch((const int32_t *)from + TILE + i, 0, 2);
}

/* Whether results of so many numbers are too many for the cache. */
INLINE int many(int64_t numbers) { return numbers > LARGE; }

INLINE void settled(int past) {
#if defined(__x86_64__)
    if (past) _mm_sfence(); /* another process reads it next */
#endif
    (void)past;
}

/* Looks at a tile that was copied from memory that somebody else may write to at any moment: what was read is what is
 * looked at. Numbers that are no residues make it zeros, so that no sum overflows. Returns whether there were any. */
INLINE int looked_at(int32_t *restrict tile, int64_t n, int32_t prime) {
    __asm__ volatile("" : : "r"(tile) : "memory"); /* from here on nothing may be taken from there instead */
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = (uint32_t)tile[i] > most ? (uint32_t)tile[i] : most;
    if (most < (uint32_t)prime) return 0;
    memset(tile, 0, (size_t)n * sizeof *tile);
    return 1;
}

/* A tile of an answer, read once. */
INLINE int fetch(int32_t *restrict tile, const int32_t *from, int64_t n, int32_t prime) {
    memcpy(tile, from, (size_t)n * sizeof *tile);
    return looked_at(tile, n, prime);
}

#endif
