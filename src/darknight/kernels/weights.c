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
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define TILE 1024
#define LANES 16
#define ROWS 128        /* so many squares, of up to 2^24 each, fit 32 bits */
#define LARGE (1 << 20) /* numbers that are too many for the cache */
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

/* --- to memory ----------------------------------------------------------------------------------------------------- */

/* Past the cache, for what is not read soon: a line need not be fetched before it is written. */
INLINE void put(void *to, const void *from, int64_t size) {
#if defined(__x86_64__)
    char *out = to;
    const char *in = from;
    int64_t before = (int64_t)(-(uintptr_t)out & 15);
    before = before < size ? before : size;
    memcpy(out, in, (size_t)before);
    for (out += before, in += before, size -= before; size >= 16; out += 16, in += 16, size -= 16)
        _mm_stream_si128((__m128i *)out, _mm_loadu_si128((const __m128i *)in));
    memcpy(out, in, (size_t)size);
#else
    memcpy(to, from, (size_t)size);
#endif
}

INLINE void settled(void) {
#if defined(__x86_64__)
    _mm_sfence(); /* another thread reads it next */
#endif
}

/* Fetches the tile after this one meanwhile. Beyond the end it does nothing: a prefetch never faults. */
INLINE void ahead(const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch((const int32_t *)from + TILE + i, 0, 2);
}

/* --- a tile -------------------------------------------------------------------------------------------------------- */

/* Rounded; and the largest magnitude so far. Returns whether one is not below the limit, as no NaN is: they are held at
 * the limit, so that they are integers at all. */
INLINE int32_t rounded(const float *restrict x, int32_t *restrict q, int64_t n, float scale, float limit,
                       float *restrict largest) {
    float most = *largest;
    int32_t beyond = 0;
#pragma omp simd reduction(max : most) reduction(| : beyond)
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(x[i]), scaled = x[i] * scale;
        const float below = scaled < limit ? scaled : limit, held = below > -limit ? below : -limit;
        most = magnitude > most ? magnitude : most;
        beyond |= !(magnitude * scale < limit);
        q[i] = (int32_t)rintf(held);
    }
    *largest = most;
    return beyond;
}

INLINE void narrowed(int16_t *restrict to, const int32_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = (int16_t)from[i];
}

/* Adds to the sums by place, and the tile's own to those of its row. A lane has a sixteenth of a tile, which fits. */
INLINE void counted(const int32_t *restrict q, int64_t n, uint32_t *restrict sums, uint32_t *restrict squares,
                    int64_t *restrict row) {
    uint32_t first[LANES] = {0}, second[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
            const uint32_t value = (uint32_t)q[i + l], square = value * value;
            first[l] += value;
            second[l] += square;
            sums[i + l] += value;
            squares[i + l] += square;
        }
    }
    for (int l = 0; i < n; i++, l++) {
        const uint32_t value = (uint32_t)q[i], square = value * value;
        first[l] += value;
        second[l] += square;
        sums[i] += value;
        squares[i] += square;
    }
    for (int l = 0; l < LANES; l++) {
        row[0] += (int32_t)first[l];
        row[1] += second[l];
    }
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
INLINE float requantise(const requantisation *s) {
    const int64_t length = s->channels * s->inner;
    const int past = s->outer * length > LARGE;
    int32_t tile[TILE];
    int16_t half[TILE];
    float most = 0.0f;
    for (int64_t o = 0; o < s->outer; o++) {
        for (int64_t start = 0; start < length; start += TILE) {
            const int64_t some = length - start < TILE ? length - start : TILE, place = o * length + start;
            int32_t *whole = past ? tile : s->q + place;
            ahead(s->x + place, some);
            if (rounded(s->x + place, whole, some, s->scale, s->limit, &most)) return -1.0f;
            if (s->rows) counted(whole, some, s->room + start, s->room + length + start, s->rows + 2 * o);
            if (past) put(s->q + place, tile, some * (int64_t)sizeof *tile);
            if (!s->known) continue;
            ahead(s->known + place, some);
            narrowed(past ? half : s->narrow + place, s->known + place, some);
            if (past) put(s->narrow + place, half, some * (int64_t)sizeof *half);
        }
        if (s->rows && (o % ROWS == ROWS - 1 || o == s->outer - 1)) settle(s);
    }
    if (past) settled();
    return most;
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
