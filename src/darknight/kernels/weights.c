/* New weights of a layer, from floats to what a step needs of them, in one pass.
 *
 * Rounded to integers at a scale that somebody guessed; the largest magnitude, which shows whether the guess was right;
 * sums and squares by row and by channel; and the integers before these once more, in half the room. Every result is an
 * integer, or a float that was read, so every variant gives the same. Nothing is checked here:
 * compiled_weights.py does that.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define AHEAD 128 /* numbers that are fetched before they are needed */
#define TILE 1024 /* a lane has a sixteenth of its squares, up to 2^24 each: their sum fits 32 bits, */
#define ROWS 128  /* and so does that of so many in a column */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *x;       /* (outer, channels, inner) */
    const int32_t *known; /* the integers before these, of the same form and below 2^15; or none */
    int32_t *q;
    int16_t *narrow; /* known, once more; or none */
    int64_t outer, channels, inner;
    float scale, limit;      /* magnitudes times scale are to be below the limit, at most 2^12 */
    int64_t *rows, *columns; /* (outer, 2), (channels, 2): the sum and the sum of squares; zeros before; or none */
    uint32_t *room;          /* (2, channels * inner), zeros before */
} requantisation;

/* --- a run of numbers ---------------------------------------------------------------------------------------------- */

/* By lane: the largest magnitude, whether one was beyond the limit, the sum and the sum of squares. */
typedef struct {
    float most[LANES];
    int32_t beyond[LANES];
    uint32_t sum[LANES], squares[LANES];
} lanes;

/* As many numbers as there are lanes. Those beyond the limit, as every NaN is, are held there: so they are integers. */
INLINE void some(const float *restrict x, const int32_t *restrict known, int32_t *restrict q, int16_t *restrict narrow,
                 uint32_t *restrict sums, uint32_t *restrict squares, float scale, float limit, lanes *restrict all) {
#pragma omp simd
    for (int l = 0; l < LANES; l++) {
        const float magnitude = fabsf(x[l]), scaled = x[l] * scale;
        const float below = scaled < limit ? scaled : limit, held = below > -limit ? below : -limit;
        all->most[l] = magnitude > all->most[l] ? magnitude : all->most[l];
        all->beyond[l] |= !(magnitude * scale < limit);
        q[l] = (int32_t)rintf(held);
    }
    if (sums) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            const uint32_t value = (uint32_t)q[l], square = value * value;
            all->sum[l] += value;
            all->squares[l] += square;
            sums[l] += value;
            squares[l] += square;
        }
    }
    if (known) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) narrow[l] = (int16_t)known[l];
    }
}

/* Up to a tile, at `place`, which is `start` in its row. Returns whether a number is beyond the limit. */
INLINE int32_t run(const requantisation *s, int64_t place, int64_t start, int64_t n, float *most, int64_t *row,
                   int counted, int kept) {
    const float *x = s->x + place;
    const int32_t *known = kept ? s->known + place : 0;
    int32_t *q = s->q + place, beyond = 0;
    int16_t *narrow = kept ? s->narrow + place : 0;
    uint32_t *sums = counted ? s->room + start : 0;
    uint32_t *squares = counted ? s->room + s->channels * s->inner + start : 0;
    lanes all;
    memset(&all, 0, sizeof all);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __builtin_prefetch(x + i + AHEAD); /* beyond the end it does nothing: it never faults */
        if (kept) __builtin_prefetch(known + i + AHEAD);
        some(x + i, kept ? known + i : 0, q + i, kept ? narrow + i : 0, counted ? sums + i : 0,
             counted ? squares + i : 0, s->scale, s->limit, &all);
    }
    if (i < n) { /* the rest, and zeros, elsewhere */
        const size_t left = (size_t)(n - i);
        float floats[LANES] = {0};
        int32_t before[LANES] = {0}, after[LANES];
        int16_t halves[LANES];
        uint32_t sum[LANES], square[LANES];
        memcpy(floats, x + i, left * sizeof *x);
        if (kept) memcpy(before, known + i, left * sizeof *known);
        memset(sum, 0, sizeof sum);
        memset(square, 0, sizeof square);
        some(floats, kept ? before : 0, after, halves, counted ? sum : 0, square, s->scale, s->limit, &all);
        memcpy(q + i, after, left * sizeof *q);
        if (kept) memcpy(narrow + i, halves, left * sizeof *narrow);
        for (size_t l = 0; counted && l < left; l++) {
            sums[i + (int64_t)l] += sum[l];
            squares[i + (int64_t)l] += square[l];
        }
    }
    for (int l = 0; l < LANES; l++) {
        *most = all.most[l] > *most ? all.most[l] : *most;
        beyond |= all.beyond[l];
        if (!counted) continue;
        row[0] += (int32_t)all.sum[l];
        row[1] += all.squares[l];
    }
    return beyond;
}

/* --- the whole ----------------------------------------------------------------------------------------------------- */

/* What was summed by place goes to its channel. */
INLINE void settle(const requantisation *s) {
    const int64_t length = s->channels * s->inner;
    for (int64_t c = 0; c < s->channels; c++)
        for (int64_t i = c * s->inner; i < (c + 1) * s->inner; i++) {
            s->columns[2 * c] += (int32_t)s->room[i];
            s->columns[2 * c + 1] += s->room[length + i];
        }
    memset(s->room, 0, (size_t)length * 2 * sizeof *s->room);
}

/* The largest magnitude; or -1, and results that mean nothing, as soon as one is not below the limit. */
INLINE float requantise_as(const requantisation *s, int counted, int kept) {
    const int64_t length = s->channels * s->inner;
    float most = 0.0f;
    for (int64_t o = 0; o < s->outer; o++) {
        for (int64_t start = 0; start < length; start += TILE) {
            const int64_t n = length - start < TILE ? length - start : TILE, place = o * length + start;
            if (run(s, place, start, n, &most, counted ? s->rows + 2 * o : 0, counted, kept)) return -1.0f;
        }
        if (counted && (o % ROWS == ROWS - 1 || o == s->outer - 1)) settle(s);
    }
    return most;
}

INLINE float requantise(const requantisation *s) {
    if (s->rows) return s->known ? requantise_as(s, 1, 1) : requantise_as(s, 1, 0);
    return s->known ? requantise_as(s, 0, 1) : requantise_as(s, 0, 0);
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
static float requantise_plain(const requantisation *s) { return requantise(s); }
static float (*chosen)(const requantisation *) = requantise_plain;

#if defined(__x86_64__)
__attribute__((target("avx2"))) static float requantise_avx2(const requantisation *s) { return requantise(s); }
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) static float
requantise_avx512(const requantisation *s) {
    return requantise(s);
}
#endif

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) chosen = requantise_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        chosen = requantise_avx512;
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others are for tests: without vector instructions of this processor, and with those of AVX2. */
float darknight_requantise_1(const requantisation *s) { return chosen(s); }
float darknight_requantise_plain_1(const requantisation *s) { return requantise_plain(s); }
#if defined(__x86_64__)
float darknight_requantise_avx2_1(const requantisation *s) { return requantise_avx2(s); }
#endif
