/* The loops of field.h that gain from registers of 64 bytes: what they make goes from there to memory at once, a line of
 * the cache at a time. The same numbers as those of the plain loops, to the last bit.
 *
 * `wide` says whether there is AVX-512, and is known when this is compiled; without, the plain loops do everything.
 */
#ifndef DARKNIGHT_WIDE_H
#define DARKNIGHT_WIDE_H
#include "field.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))
#define LINE 16 /* numbers of a line */

WIDE INLINE __m512i line_of(const int32_t *from) { return _mm512_loadu_si512(from); }

/* past: past the cache, and `to` begins a line. */
WIDE INLINE void put_line(void *to, __m512i line, int past) {
    if (past)
        _mm512_stream_si512(to, line);
    else
        _mm512_storeu_si512(to, line);
}

WIDE INLINE __m512i wide_below(__m512i value, __m512i prime) {
    value = _mm512_min_epu32(value, _mm512_add_epi32(value, prime));
    return _mm512_min_epu32(value, _mm512_sub_epi32(value, prime));
}

WIDE INLINE __m512i wide_centred(__m512i value, __m512i prime, __m512i half) {
    return _mm512_sub_epi32(wide_below(_mm512_add_epi32(value, half), prime), half);
}

/* How many of n numbers stand before the first line that is theirs alone. */
INLINE int64_t before_a_line(const void *to, int64_t n) {
    const int64_t numbers = (int64_t)(-(uintptr_t)to % 64 / sizeof(int32_t));
    return numbers < n ? numbers : n;
}

/* --- rows: n is of whole lines, and so is what is written ------------------------------------------------------------- */

WIDE static void wide_copy(void *to, const void *from, int64_t n, int past) {
    for (int64_t i = 0; i < n; i += LINE) put_line((int32_t *)to + i, line_of((const int32_t *)from + i), past);
}

/* As add_two. */
WIDE INLINE void wide_two(int32_t *to, const int32_t *x, const int32_t *y, int64_t n, int minus, int32_t turn,
                          int32_t half, const field *f, int past) {
    const __m512i prime = _mm512_set1_epi32(f->prime), less = _mm512_set1_epi32(half);
    const __m512i more = _mm512_set1_epi32(half + turn);
    for (int64_t i = 0; i < n; i += LINE) {
        const __m512i one = line_of(x + i), other = line_of(y + i);
        const __m512i value = minus ? _mm512_sub_epi32(one, other) : _mm512_add_epi32(one, other);
        put_line(to + i, _mm512_sub_epi32(wide_below(_mm512_add_epi32(value, more), prime), less), past);
    }
}

/* As reduce. */
WIDE INLINE __m512i wide_reduced(__m512i sum, int centred, const field *f) {
    const __m512i prime = _mm512_set1_epi32(f->prime), half = _mm512_set1_epi32(f->half);
    const __m512 quotient = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(f->inverse));
    const __m512i value = _mm512_sub_epi32(sum, _mm512_mullo_epi32(_mm512_cvtps_epi32(quotient), prime));
    return centred ? wide_centred(value, prime, half) : _mm512_min_epu32(value, _mm512_add_epi32(value, prime));
}

/* As short_row, without an intermediate sum; of one line or four, known when this is compiled. */
WIDE INLINE void wide_sums(int32_t *to, const recipe *how, const int32_t *const *x, int64_t from, int lines, int centred,
                           const field *f, int past) {
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t s = how->first; s <= how->last; s++) {
        const __m512i c = _mm512_set1_epi32(how->c[s]);
        for (int l = 0; l < lines; l++) {
            const __m512i number = line_of(x[s] + from + l * LINE);
            const __m512i more = _mm512_add_epi32(sums[l], number), less = _mm512_sub_epi32(sums[l], number);
            sums[l] = how->c[s] == 1 ? more : how->c[s] == -1 ? less : _mm512_add_epi32(sums[l], _mm512_mullo_epi32(number, c));
        }
    }
    for (int l = 0; l < lines; l++) put_line(to + l * LINE, wide_reduced(sums[l], centred, f), past);
}

WIDE INLINE void wide_short(int32_t *to, const recipe *how, const int32_t *const *x, int64_t from, int64_t n, int centred,
                            const field *f, int past) {
    int64_t i = 0;
    for (; i + 4 * LINE <= n; i += 4 * LINE) wide_sums(to + i, how, x, from + i, 4, centred, f, past);
    for (; i < n; i += LINE) wide_sums(to + i, how, x, from + i, 1, centred, f, past);
}

/* As row; but neither of no terms nor of long ones. */
WIDE static void wide_row(int32_t *to, const recipe *how, const int32_t *const *x, int64_t from, int64_t n, const field *f,
                          int past) {
    const int32_t *one = x[how->first] + from, *other = x[how->last] + from;
    const int minus = how->c[how->last] < 0, centred = how->centred;
    if (how->kind == COPIED)
        wide_copy(to, one, n, past);
    else if (how->kind == OF_TWO)
        wide_two(to, one, other, n, minus, how->turn, centred ? f->half : 0, f, past);
    else if (centred)
        wide_short(to, how, x, from, n, 1, f, past);
    else
        wide_short(to, how, x, from, n, 0, f, past);
}

/* --- runs: they begin anywhere, and end anywhere ---------------------------------------------------------------------- */

WIDE INLINE __mmask16 first_of(int64_t numbers) { return (__mmask16)(numbers < LINE ? (1u << numbers) - 1 : 0xFFFF); }

/* A line, or the first few of its numbers, of an answer. It is read once: nothing may be taken from there again. What
 * stands `next` further, unless that is nothing, is fetched meanwhile; beyond the end that does nothing. */
WIDE INLINE __m512i answered(const int32_t *from, __mmask16 some, int64_t next) {
    __m512i line = _mm512_maskz_loadu_epi32(some, from);
    __asm__ volatile("" : "+v"(line));
    if (next) __builtin_prefetch(from + next, 0, 2);
    return line;
}

/* As fetch, of runs that are a stride apart; the next ones are so much further. */
WIDE static inline int wide_fetch(int32_t *restrict tile, const int32_t *from, int64_t runs, int64_t n,
                                  int64_t stride, int64_t next, int32_t prime) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t r = 0; r < runs; r++) {
        const int32_t *here = from + r * stride;
        int32_t *to = tile + r * n;
        int64_t i = 0;
        for (; i + LINE <= n; i += LINE) {
            const __m512i line = answered(here + i, 0xFFFF, next);
            most = _mm512_max_epu32(most, line);
            _mm512_storeu_si512(to + i, line);
        }
        const __m512i rest = answered(here + i, first_of(n - i), next);
        most = _mm512_max_epu32(most, rest);
        _mm512_mask_storeu_epi32(to + i, first_of(n - i), rest);
    }
    if (_mm512_reduce_max_epu32(most) < (uint32_t)prime) return 0;
    memset(tile, 0, (size_t)(runs * n) * sizeof *tile);
    return 1;
}

/* Of a systematic code (field.h): the answer that is the same for all results, made to what is added to the others. */
typedef struct {
    __m512i flip, shift, prime, half;
} unmasker;

WIDE INLINE unmasker unmasker_of(const recipe *how, const field *f) {
    const int32_t minus = how->c[how->last] < 0, more = f->half + how->turn;
    const unmasker u = {_mm512_set1_epi32(-minus), _mm512_set1_epi32(more + minus), _mm512_set1_epi32(f->prime),
                        _mm512_set1_epi32(f->half)};
    return u;
}

WIDE INLINE __m512i added_of(__m512i answer, const unmasker *u) {
    return _mm512_add_epi32(_mm512_xor_si512(answer, u->flip), u->shift);
}

WIDE INLINE __m512i unmasked(__m512i answer, __m512i added, const unmasker *u) {
    return _mm512_sub_epi32(wide_below(_mm512_add_epi32(answer, added), u->prime), u->half);
}

/* What becomes of the floats of a run: each is rounded as if nothing else were done. A factor of 1 and a bias or shift of
 * -0 change nothing, not even the sign of a zero. */
typedef struct {
    float bias, factor, shift, low, high;
} finish;

/* normal: whether there are a factor and a shift, known when this is compiled. */
WIDE INLINE __m512 finished(__m512 product, const finish *end, int normal) {
    __asm__("" : "+v"(product)); /* is not fused with the sum that follows */
    __m512 sum = _mm512_add_ps(product, _mm512_set1_ps(end->bias));
    if (normal) {
        __m512 scaled = _mm512_mul_ps(sum, _mm512_set1_ps(end->factor));
        __asm__("" : "+v"(scaled));
        sum = _mm512_add_ps(scaled, _mm512_set1_ps(end->shift));
    }
    return _mm512_min_ps(_mm512_set1_ps(end->high), _mm512_max_ps(_mm512_set1_ps(end->low), sum));
}
#endif

/* --- what begins anywhere ------------------------------------------------------------------------------------------- */

/* n numbers, at most a tile, where they belong. */
INLINE void put_tile(void *to, const void *from, int64_t n, int past, int wide) {
#if defined(__x86_64__)
    if (past && wide) {
        const int64_t before = before_a_line(to, n), lines = (n - before) / LINE * LINE, rest = n - before - lines;
        int32_t *out = to;
        const int32_t *in = from;
        if (before) memcpy(out, in, (size_t)before * sizeof *out);
        wide_copy(out + before, in + before, lines, 1);
        if (rest) memcpy(out + n - rest, in + n - rest, (size_t)rest * sizeof *out);
        return;
    }
#endif
    (void)wide;
    put(to, from, n, past);
}

/* A row of a tile, where it belongs. */
INLINE void put_row(int32_t *to, const recipe *how, const int32_t *const *x, int64_t n, const field *f, int past, int wide) {
    int32_t made[TILE];
    int64_t start = 0;
#if defined(__x86_64__)
    if (wide && how->kind != ZEROS && how->kind != LONG) {
        const int64_t before = past ? before_a_line(to, n) : 0, lines = (n - before) / LINE * LINE;
        if (before) {
            row(made, how, x, 0, before, f);
            memcpy(to, made, (size_t)before * sizeof *to);
        }
        wide_row(to + before, how, x, before, lines, f, past);
        start = before + lines;
        if (start == n) return;
    }
#endif
    (void)wide;
    row(made, how, x, start, n - start, f);
    put(to + start, made, n - start, past);
}

#endif
