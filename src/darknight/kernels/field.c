/* Masking in the field, tile by tile: the compiled twin of reference.combine, quantise and the passes made of them.
 *
 * Every loop runs over a few thousand numbers that stay in the first cache: what is quantised there is masked at once,
 * and what is unmasked is converted at once, so that each tensor is read and written once. Rows that are a multiple of
 * 4 KiB apart do not collide, because a loop over a tile touches three of them at most.
 *
 * A processor reads and writes memory at the same time if what it reads next stands within some hundred instructions of
 * what it writes. Where a tensor is larger than the cache that decides how long a pass takes, so tiles are short there
 * (PART), and what a systematic code asks for is unmasked line by line.
 *
 * No Python.h: plain loops, which gcc and clang turn into vector instructions, once for any processor, once for AVX2 and
 * once for AVX-512, where wide.h has some that go straight to memory. All results are integers, or one rounding of one, so
 * all give the same bits. Nothing is checked here: compiled_field.py does that.
 */
#include "field.h"
#include "wide.h"

#define PART 128  /* numbers of a tile that goes past the cache */
#define SOON 512  /* numbers: so much further each row of such a tile is fetched */
#define RESULTS 8 /* that are unmasked in registers, at most */
#define USUAL 4   /* results, of the usual scheme */
#define BLOCK 128 /* numbers whose squares are summed in 32 bits */

/* --- whole tensors -------------------------------------------------------------------------------------------------
 *
 * A tensor is `blocks` runs of n numbers, a stride apart: (group, feature) of one input among several, say. */

#if defined(__x86_64__)
/* Results of a systematic code as integers and as floats, of n numbers in whole lines: in registers. The lines of all
 * answers at one place are read before the next ones, and what is made of them is written meanwhile. rows: known when this
 * is compiled, or any. */
WIDE INLINE void wide_results(const recipe *how, const int32_t *const *answers, int32_t *const *outs, float *const *floats,
                              float scale, int64_t n, int64_t rows, const field *f, int past, int32_t *outside) {
    const unmasker code = unmasker_of(how, f);
    const __m512 by = _mm512_set1_ps(scale);
    const int32_t *y = answers[how->last], *x[RESULTS];
    int32_t *to[RESULTS];
    float *converted[RESULTS];
    __m512i most[RESULTS], greatest = _mm512_setzero_si512(); /* of each x, and of y */
    for (int64_t r = 0; r < rows; r++)
        x[r] = answers[how[r].first], to[r] = outs[r], converted[r] = floats[r], most[r] = greatest;
    for (int64_t i = 0; i < n; i += LINE) {
        const __m512i last = answered(y + i, 0xFFFF, 0), added = added_of(last, &code);
        greatest = _mm512_max_epu32(greatest, last);
#pragma GCC unroll 4
        for (int64_t r = 0; r < rows; r++) {
            const __m512i answer = answered(x[r] + i, 0xFFFF, 0), value = unmasked(answer, added, &code);
            most[r] = _mm512_max_epu32(most[r], answer);
            put_line(to[r] + i, value, past);
            put_line(converted[r] + i, _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(value), by)), past);
        }
    }
    outside[how->last] |= _mm512_reduce_max_epu32(greatest) >= (uint32_t)f->prime;
    for (int64_t r = 0; r < rows; r++)
        outside[how[r].first] |= _mm512_reduce_max_epu32(most[r]) >= (uint32_t)f->prime;
}

WIDE static void wide_unmask(const recipe *how, const int32_t *const *answers, int32_t *const *outs, float *const *floats,
                             float scale, int64_t n, int64_t rows, const field *f, int past, int32_t *outside) {
    if (rows == USUAL)
        wide_results(how, answers, outs, floats, scale, n, USUAL, f, past, outside);
    else
        wide_results(how, answers, outs, floats, scale, n, rows, f, past, outside);
}

/* Whether that is what is asked for. Past the cache go only lines that begin where they do in memory. */
INLINE int in_lines(const combination *what, const recipe *how, int32_t *const *outs, float *const *floats, int past) {
    int fits = what->rows <= RESULTS && systematic(what, how);
    for (int64_t r = 0; fits && r < what->rows; r++)
        fits = floats[r] && (!past || ((uintptr_t)outs[r] % 64 == 0 && (uintptr_t)floats[r] % 64 == 0));
    return fits;
}
#endif

/* outs[row] = sum over source of matrix[row][source] * sources[source]; with floats, also as that times `scale`. With
 * outside (source), sources are fetched, and it is set for those that are not made of residues. */
INLINE void combine(const combination *what, const int32_t *const *sources, const int64_t *source_strides,
                    int32_t *const *outs, const int64_t *out_strides, float *const *floats, const int64_t *float_strides,
                    float scale, int64_t blocks, int64_t n, int32_t *outside, int wide) {
    const field f = field_of(what);
    recipe how[MOST_ROWS];
    for (int64_t r = 0; r < what->rows; r++) how[r] = recipe_of(what, r);
    const int past = many(what->rows * blocks * n);
    const int32_t *from[MOST_INPUTS + MOST_INPUTS], *here[MOST_INPUTS + MOST_INPUTS];
    int32_t fetched[MOST_INPUTS + MOST_INPUTS][TILE], made[TILE], *to[MOST_ROWS];
    float converted[TILE], *values[MOST_ROWS];
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t s = 0; s < what->sources; s++) from[s] = sources[s] + block * source_strides[s];
        for (int64_t r = 0; r < what->rows; r++) {
            to[r] = outs[r] + block * out_strides[r];
            values[r] = floats ? floats[r] + block * float_strides[r] : 0;
        }
        int64_t start = 0;
#if defined(__x86_64__)
        if (wide && outside && in_lines(what, how, to, values, past)) {
            start = n / LINE * LINE;
            wide_unmask(how, from, to, values, scale, start, what->rows, &f, past, outside);
        }
#endif
        for (; start < n; start += TILE) {
            const int64_t some = n - start < TILE ? n - start : TILE;
            for (int64_t s = 0; s < what->sources; s++) {
                here[s] = from[s] + start;
                if (past) ahead(here[s]);
                if (!outside) continue;
                outside[s] |= fetch(fetched[s], here[s], some, what->prime);
                here[s] = fetched[s];
            }
            for (int64_t r = 0; r < what->rows; r++) {
                if (!floats) {
                    put_row(to[r] + start, how + r, here, some, &f, past, wide);
                    continue;
                }
                row(made, how + r, here, 0, some, &f);
                put_tile(to[r] + start, made, some, past, wide);
                to_float(converted, made, some, scale);
                put_tile(values[r] + start, converted, some, past, wide);
            }
        }
    }
    settled(past);
}

/* As nearest; returns the sum of weight * q, modulo 2^32: what `checksum` makes of a tile. */
INLINE uint32_t nearest_weighed(int32_t *restrict q, const float *restrict x, const uint32_t *restrict weights, int64_t n,
                                float scale) {
    uint32_t sum = 0;
    nearest(q, x, n, scale);
    for (int64_t i = 0; i < n; i++) sum += (uint32_t)q[i] * weights[i];
    return sum;
}

/* What the sum of a tile counts in a checksum. */
INLINE uint64_t counted(uint32_t sum, int64_t row, int64_t start) {
    return (uint64_t)(2 * row + 1) * (uint64_t)(2 * (start / TILE) + 1) * sum;
}

/* Which words are used for stochastic rounding: those of `rounding` from `first` on. */
typedef struct {
    uint32_t key, other, first;
} rounding_keys;

/* Words for stochastic rounding: what a bijection, which two keys choose, makes of the numbers from `first` on, modulo
 * 2^32. */
INLINE void rounding(uint32_t *restrict out, uint32_t first, int64_t n, uint32_t key, uint32_t other) {
    uint32_t place = first * 0x9E3779B9u + key;
    for (int64_t i = 0; i < n; i++, place += 0x9E3779B9u) {
        uint32_t h = place;
        h = (h ^ (h >> 16)) * 0x21F0AAADu;
        h ^= other;
        h = (h ^ (h >> 15)) * 0xD35A2D97u;
        out[i] = h ^ (h >> 15);
    }
}

/* Whether tiles of an encode are short: where they go past the cache, and each begins a line of it. Elsewhere a line would
 * be written in two parts wherever a tile ends. */
INLINE int in_parts(const combination *what, const int32_t *q, int32_t *const *outs, int64_t groups, int64_t n) {
    int aligned = n % 16 == 0 && (uintptr_t)q % 64 == 0;
    for (int64_t r = 0; r < what->rows; r++) aligned = aligned && (uintptr_t)outs[r] % 64 == 0;
    return aligned && many(what->rows * groups * n);
}

/* Fetches what comes after a part of a row meanwhile. A processor that does so by itself for rows 8 MiB apart or more took
 * twice as long for others (docs/adr/0049). */
INLINE void next_part(const void *from, int64_t part) {
    if (part == TILE) {
        ahead(from);
        return;
    }
    for (int64_t i = 0; i < part; i += 16) __builtin_prefetch((const int32_t *)from + SOON + i, 0, 3);
}

/* x (example, n), quantised and kept in q (example, n), if there is a q; then masked with noise (noise row, group, n),
 * which need not be among the rows. Without q there are at most MOST_KEPT inputs. Examples beyond the last are zeros. keys:
 * of the words of the rounding, those from keys->first on; without them, to nearest. Returns the checksum of what is
 * quantised to nearest, if there are weights for it; the examples are rows of it from `first` on. */
INLINE uint64_t encode(const combination *what, const float *x, const rounding_keys *keys, int64_t examples, int64_t inputs,
                       float scale, int32_t *q, const int32_t *noise, int32_t *const *outs, int64_t groups, int64_t n,
                       const uint32_t *weights, int64_t first, int64_t part, int wide) {
    static const int32_t zeros[TILE];
    const field f = field_of(what);
    const int64_t noises = what->sources - inputs;
    const int past = many(what->rows * groups * n);
    const int32_t *here[MOST_INPUTS + MOST_INPUTS];
    int32_t kept[MOST_KEPT * TILE] __attribute__((aligned(64)));
    uint32_t words[TILE], sums[MOST_INPUTS + MOST_INPUTS] = {0};
    uint64_t total = 0;
    recipe how[MOST_ROWS];
    for (int64_t r = 0; r < what->rows; r++) how[r] = recipe_of(what, r);
    for (int64_t group = 0; group < groups; group++)
        for (int64_t start = 0; start < n; start += part) {
            const int64_t some = n - start < part ? n - start : part, end = start + some;
            for (int64_t k = 0; k < inputs; k++) {
                const int64_t example = group * inputs + k, place = example * n + start;
                if (example >= examples) {
                    here[k] = zeros;
                    continue;
                }
                int32_t *tile = k < MOST_KEPT ? kept + k * part : q + place;
                if (past) next_part(x + place, part);
                if (keys) {
                    rounding(words, keys->first + (uint32_t)place, some, keys->key, keys->other);
                    stochastic(tile, x + place, words, some, scale);
                } else if (weights) {
                    sums[k] += nearest_weighed(tile, x + place, weights + start % TILE, some, scale);
                    if (end == n || end % TILE == 0) {
                        total += counted(sums[k], first + example, start);
                        sums[k] = 0;
                    }
                } else
                    nearest(tile, x + place, some, scale);
                if (q && k < MOST_KEPT) put_tile(q + place, tile, some, past, wide);
                here[k] = tile;
            }
            for (int64_t m = 0; m < noises; m++) {
                here[inputs + m] = noise + (m * groups + group) * n + start;
                if (past) next_part(here[inputs + m], part);
            }
            for (int64_t r = 0; r < what->rows; r++)
                if (outs[r]) put_row(outs[r] + group * n + start, how + r, here, some, &f, past, wide);
        }
    settled(past);
    return total;
}

/* The largest bits of |x|: the largest magnitude, and beyond those of any number if there is a NaN or an infinity. */
INLINE int32_t largest(const float *x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i += TILE) {
        const int64_t some = n - i < TILE ? n - i : TILE;
        int32_t bits[TILE];
        memcpy(bits, x + i, (size_t)some * sizeof *x);
        for (int64_t j = 0; j < some; j++) {
            const int32_t magnitude = bits[j] & 0x7FFFFFFF;
            most = magnitude > most ? magnitude : most;
        }
    }
    return most;
}

INLINE void quantise(const float *x, const uint32_t *words, int64_t n, float scale, int32_t *q) {
    if (words)
        stochastic(q, x, words, n, scale);
    else
        nearest(q, x, n, scale);
}

/* Whether x would be quantised to q, and what darknight_largest says of it; -1 if not, from the first tile that differs.
 * Nobody has looked at x before: what is no int32, or no number, differs. */
INLINE int32_t unchanged(const float *x, int64_t n, float scale, const int32_t *restrict q) {
    int32_t tile[TILE], most = 0;
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t some = n - start < TILE ? n - start : TILE;
        const int32_t found = largest(x + start, some);
        int32_t differ = 0;
        float magnitude;
        memcpy(&magnitude, &found, sizeof magnitude);
        if (!(magnitude * scale < 0x1p31f)) return -1;
        nearest(tile, x + start, some, scale);
        for (int64_t i = 0; i < some; i++) differ |= tile[i] ^ q[start + i];
        if (differ) return -1;
        most = found > most ? found : most;
    }
    return most;
}

/* Cuts words to the bits of `mask`, and writes down the places of those above `last`, as far as there is room for them.
 * Returns how many they are. */
INLINE int64_t below(int32_t *words, int64_t n, int32_t mask, int32_t last, int64_t *places, int64_t room) {
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t some = n - start < TILE ? n - start : TILE;
        int32_t *restrict here = words + start, most = 0;
        for (int64_t i = 0; i < some; i++) {
            here[i] &= mask;
            most = here[i] > most ? here[i] : most;
        }
        if (most <= last) continue;
        for (int64_t i = 0; i < some; i++)
            if (here[i] > last) {
                if (found < room) places[found] = start + i;
                found++;
            }
    }
    return found;
}

/* Sums and sums of squares of a run, of magnitudes up to 2^12: a block's squares fit 32 bits. */
INLINE void moments_of(const int32_t *restrict q, int64_t n, int64_t *sum, int64_t *squares) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = n - start < BLOCK ? n : start + BLOCK;
        int32_t first = 0;
        uint32_t second = 0;
        for (int64_t i = start; i < end; i++) {
            first += q[i];
            second += (uint32_t)(q[i] * q[i]);
        }
        *sum += first;
        *squares += second;
    }
}

/* As nearest; but what is beyond 2^12 then, or no number, becomes that. Returns the larger of `most` and of `largest`. */
INLINE int32_t nearest_within(int32_t *restrict q, const float *restrict x, int64_t n, float scale, int32_t most) {
    for (int64_t i = 0; i < n; i++) {
        const float scaled = x[i] * scale, above = scaled > -0x1p12f ? scaled : -0x1p12f;
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
        q[i] = (int32_t)rintf(above < 0x1p12f ? above : 0x1p12f);
    }
    return most;
}

/* moments_of a run of any length, floats or integers: (sum, sum of squares). most: raised to the floats' largest, which is
 * that of all of them. */
INLINE void moments_of_run(const float *x, const int32_t *integers, int64_t n, float scale, int64_t *sums, int32_t *most) {
    int32_t tile[TILE];
    sums[0] = sums[1] = 0;
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t some = n - start < TILE ? n - start : TILE;
        if (x) *most = nearest_within(tile, x + start, some, scale, *most);
        moments_of(x ? tile : integers + start, some, sums, sums + 1);
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

/* Eight floats, rounded to nearest, or integers: all of them, or the first few; of floats also the largest. */
AVX2 INLINE __m256i vector_of(const float *x, const int32_t *integers, int64_t at, int64_t left, __m256 scale,
                              __m256i *most) {
    const __m256i some = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    if (!x && left < 8) return _mm256_maskload_epi32(integers + at, some);
    if (!x) return _mm256_loadu_si256((const __m256i *)(integers + at));
    const __m256 values = left < 8 ? _mm256_maskload_ps(x + at, some) : _mm256_loadu_ps(x + at);
    const __m256i magnitudes = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7FFFFFFF));
    *most = _mm256_max_epi32(*most, magnitudes);
    return _mm256_cvtps_epi32(_mm256_mul_ps(values, scale));
}

/* As moments_of_run: magnitudes fit 16 bits, and those 128 squares of a tile that meet in one place fit 32. What does not
 * fit is cut to some number or other: nobody looks at the sums then. */
AVX2 static void moments_of_run_avx2(const float *x, const int32_t *integers, int64_t n, float scale, int64_t *sums,
                                     int32_t *most) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1), lower = _mm256_set1_epi64x(UINT32_MAX);
    const __m256 by = _mm256_set1_ps(scale);
    __m256i found = _mm256_loadu_si256((const __m256i *)most), first = zero, second = zero;
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t end = n - start < TILE ? n : start + TILE;
        __m256i sum = zero, square = zero, both;
        int64_t i = start;
        for (; i + 16 <= end; i += 16) {
            both = _mm256_packs_epi32(vector_of(x, integers, i, 8, by, &found), vector_of(x, integers, i + 8, 8, by, &found));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, ones));
            square = _mm256_add_epi32(square, _mm256_madd_epi16(both, both));
        }
        for (; i < end; i += 8) {
            both = _mm256_packs_epi32(vector_of(x, integers, i, end - i, by, &found), zero);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, ones));
            square = _mm256_add_epi32(square, _mm256_madd_epi16(both, both));
        }
        first = _mm256_add_epi64(first, _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sum)));
        first = _mm256_add_epi64(first, _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sum, 1)));
        second = _mm256_add_epi64(second, _mm256_and_si256(square, lower));
        second = _mm256_add_epi64(second, _mm256_srli_epi64(square, 32));
    }
    _mm256_storeu_si256((__m256i *)most, found);
    const __m256i pairs = _mm256_add_epi64(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
    _mm_storeu_si128((__m128i *)sums, _mm_add_epi64(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
#endif

/* Of (outer, channels, inner), floats that are quantised or integers: by outer and by channel, (sum, sum of squares).
 * Returns what darknight_largest says of floats, which are read once: if one is beyond 2^12 at this scale, or no number,
 * the sums mean nothing. */
INLINE int32_t moments(const float *x, const int32_t *integers, int64_t outer, int64_t channels, int64_t inner,
                       float scale, int64_t *restrict rows, int64_t *restrict columns, int avx2) {
    const int64_t length = channels * inner;
    int32_t tile[TILE], most[8] = {0};
    for (int64_t o = 0; o < outer; o++)
        for (int64_t c = 0; inner > 1 && c < channels; c++) {
            const int64_t place = o * length + c * inner;
            const float *floats = x ? x + place : 0;
            const int32_t *others = x ? 0 : integers + place;
            int64_t sums[2];
#if defined(__x86_64__)
            if (avx2)
                moments_of_run_avx2(floats, others, inner, scale, sums, most);
            else
#endif
                moments_of_run(floats, others, inner, scale, sums, most);
            rows[2 * o] += sums[0], rows[2 * o + 1] += sums[1];
            columns[2 * c] += sums[0], columns[2 * c + 1] += sums[1];
        }
    for (int64_t o = 0; inner == 1 && o < outer; o++)
        for (int64_t start = 0; start < channels; start += TILE) {
            const int64_t some = channels - start < TILE ? channels - start : TILE, place = o * length + start;
            const int32_t *q = x ? tile : integers + place;
            if (x) *most = nearest_within(tile, x + place, some, scale, *most);
            moments_of(q, some, rows + 2 * o, rows + 2 * o + 1);
            for (int64_t i = 0; i < some; i++) {
                columns[2 * (start + i)] += q[i];
                columns[2 * (start + i) + 1] += (int64_t)q[i] * q[i];
            }
        }
    for (int i = 1; i < 8; i++) *most = most[i] > *most ? most[i] : *most;
    (void)avx2;
    return *most;
}

/* Sum over rows, tiles and places of (2 row + 1) (2 tile + 1) (weight * q modulo 2^32), modulo 2^64; with x, of what it is
 * quantised to. */
INLINE uint64_t checksum(const int32_t *q, const float *x, float scale, int64_t rows, int64_t n, const uint32_t *weights) {
    uint64_t total = 0;
    int32_t tile[TILE];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < n; start += TILE) {
            const int64_t some = n - start < TILE ? n - start : TILE, place = row * n + start;
            uint32_t sum = 0;
            if (x)
                sum = nearest_weighed(tile, x + place, weights, some, scale);
            else
                for (int64_t i = 0; i < some; i++) sum += (uint32_t)q[place + i] * weights[i];
            total += counted(sum, row, start);
        }
    return total;
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define COMBINE                                                                                                       \
    const combination *what, const int32_t *const *sources, const int64_t *source_strides, int32_t *const *outs,      \
        const int64_t *out_strides, float *const *floats, const int64_t *float_strides, float scale, int64_t blocks,  \
        int64_t n, int32_t *outside
#define ENCODE                                                                                                        \
    const combination *what, const float *x, const rounding_keys *keys, int64_t examples, int64_t inputs, float scale, \
        int32_t *q, const int32_t *noise, int32_t *const *outs, int64_t groups, int64_t n, const uint32_t *weights,   \
        int64_t first
#define LARGEST const float *x, int64_t n
#define QUANTISE const float *x, const uint32_t *words, int64_t n, float scale, int32_t *q
#define UNCHANGED const float *x, int64_t n, float scale, const int32_t *q
#define BELOW int32_t *words, int64_t n, int32_t mask, int32_t last, int64_t *places, int64_t room
#define MOMENTS                                                                                                       \
    const float *x, const int32_t *integers, int64_t outer, int64_t channels, int64_t inner, float scale,             \
        int64_t *rows, int64_t *columns
#define CHECKSUM const int32_t *q, const float *x, float scale, int64_t rows, int64_t n, const uint32_t *weights

#define ROUNDING uint32_t *out, uint32_t first, int64_t n, uint32_t key, uint32_t other

#define MASKING(name, wide, attribute)                                                                                \
    attribute static void combine_##name(COMBINE) {                                                                   \
        combine(what, sources, source_strides, outs, out_strides, floats, float_strides, scale, blocks, n, outside,   \
                wide);                                                                                                \
    }                                                                                                                 \
    attribute static uint64_t encode_##name(ENCODE) {                                                                 \
        return in_parts(what, q, outs, groups, n)                                                                     \
                   ? encode(what, x, keys, examples, inputs, scale, q, noise, outs, groups, n, weights, first, PART, wide) \
                   : encode(what, x, keys, examples, inputs, scale, q, noise, outs, groups, n, weights, first, TILE, wide); \
    }
#define VARIANT(name, avx2, attribute)                                                                                \
    MASKING(name, 0, attribute)                                                                                       \
    attribute static int32_t largest_##name(LARGEST) { return largest(x, n); }                                        \
    attribute static void quantise_##name(QUANTISE) { quantise(x, words, n, scale, q); }                              \
    attribute static int32_t unchanged_##name(UNCHANGED) { return unchanged(x, n, scale, q); }                        \
    attribute static int64_t below_##name(BELOW) { return below(words, n, mask, last, places, room); }                \
    attribute static int32_t moments_##name(MOMENTS) {                                                                \
        return moments(x, integers, outer, channels, inner, scale, rows, columns, avx2);                              \
    }                                                                                                                 \
    attribute static uint64_t checksum_##name(CHECKSUM) { return checksum(q, x, scale, rows, n, weights); }           \
    attribute static void rounding_##name(ROUNDING) { rounding(out, first, n, key, other); }

VARIANT(plain, 0, )
#if defined(__x86_64__)
VARIANT(avx2, 1, __attribute__((target("avx2"))))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")))
MASKING(avx512, 1, AVX512)
AVX512 static void rounding_avx512(ROUNDING) { rounding(out, first, n, key, other); }
#endif

static void (*combine_chosen)(COMBINE) = combine_plain;
static uint64_t (*encode_chosen)(ENCODE) = encode_plain;
static int32_t (*largest_chosen)(LARGEST) = largest_plain;
static void (*quantise_chosen)(QUANTISE) = quantise_plain;
static int32_t (*unchanged_chosen)(UNCHANGED) = unchanged_plain;
static int64_t (*below_chosen)(BELOW) = below_plain;
static int32_t (*moments_chosen)(MOMENTS) = moments_plain;
static uint64_t (*checksum_chosen)(CHECKSUM) = checksum_plain;
static void (*rounding_chosen)(ROUNDING) = rounding_plain;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        combine_chosen = combine_avx2;
        encode_chosen = encode_avx2;
        largest_chosen = largest_avx2;
        quantise_chosen = quantise_avx2;
        unchanged_chosen = unchanged_avx2;
        below_chosen = below_avx2;
        moments_chosen = moments_avx2;
        checksum_chosen = checksum_avx2;
        rounding_chosen = rounding_avx2;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        combine_chosen = combine_avx512; /* the others gain little or nothing */
        encode_chosen = encode_avx512;
        rounding_chosen = rounding_avx512;
    }
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others are for tests: without vector instructions of this processor, and with those of AVX2. */
#define NAMED(kind, name)                                                                                             \
    void darknight_combine_##kind##2(COMBINE) {                                                                       \
        combine_##name(what, sources, source_strides, outs, out_strides, floats, float_strides, scale, blocks, n,     \
                       outside);                                                                                      \
    }                                                                                                                 \
    uint64_t darknight_encode_##kind##4(ENCODE) {                                                                     \
        return encode_##name(what, x, keys, examples, inputs, scale, q, noise, outs, groups, n, weights, first);      \
    }                                                                                                                 \
    int32_t darknight_largest_##kind##1(LARGEST) { return largest_##name(x, n); }                                     \
    void darknight_quantise_##kind##1(QUANTISE) { quantise_##name(x, words, n, scale, q); }                           \
    int32_t darknight_unchanged_##kind##1(UNCHANGED) { return unchanged_##name(x, n, scale, q); }                     \
    int64_t darknight_below_##kind##1(BELOW) { return below_##name(words, n, mask, last, places, room); }             \
    int32_t darknight_moments_##kind##2(MOMENTS) {                                                                    \
        return moments_##name(x, integers, outer, channels, inner, scale, rows, columns);                             \
    }                                                                                                                 \
    uint64_t darknight_checksum_##kind##2(CHECKSUM) { return checksum_##name(q, x, scale, rows, n, weights); }        \
    void darknight_rounding_##kind##1(ROUNDING) { rounding_##name(out, first, n, key, other); }

NAMED(, chosen)
NAMED(plain_, plain)
#if defined(__x86_64__)
NAMED(avx2_, avx2)
#endif
