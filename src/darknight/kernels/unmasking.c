/* Unmasking and the weighed sums of its check in one pass: what field.c's combine gives as floats, and what residues.c's
 * weigh would make of the integers, which are never written.
 *
 * A tile is a few channels of a few positions, of one group. Its answers are read once, each of its results is made in
 * the first cache or in registers, converted, written, and added to the sums of its example. Sums are exact, and reduced
 * before they do not fit, so neither order nor vector width changes a bit. Nothing is checked here: compiled_unmasking.py
 * does that.
 */
#include "field.h"
#include "residues.h"
#include "wide.h"

#define RESULTS 8   /* inputs of a group, at most */
#define ANSWERS 16  /* that decode, at most */
#define POSITIONS 256 /* of a tile, at most: their sums stay in cache */
#define TOGETHER 4  /* channels whose products are summed before a sum is touched */

typedef struct {
    combination what;
    const int32_t *const *sources; /* (group, line, channel, position), by source */
    const int64_t *source_strides; /* of a group */
    float *floats;                 /* (example, line, channel, position) */
    float scale;
    const float *bias; /* by channel: added to the floats; or none */
    const float *factor, *shift; /* by channel: what a normalisation makes of them then; or none */
    float low, high;
    int64_t limited; /* whether they are then cut to [low, high] */
    int32_t *outside; /* by source: whether it has numbers that are no residues */
    int64_t examples, groups, lines, channels, positions;
    const double *u; /* (rep, channel) */
    const double *v; /* (rep, example * line) */
    int64_t reps, longest, often; /* one or two; channels, and rows, between two reductions */
    const double *primes;
    int64_t moduli;
    int32_t *out; /* (modulus, rep, position) */
} unmasking;

typedef struct {
    int32_t fetched[ANSWERS][TILE], made[RESULTS][TILE];
    double sums[RESULTS][2][POSITIONS];           /* over channels, since the last reduction */
    double total[RESULTS][MODULI][2][POSITIONS];  /* over channels */
    double whole[MODULI][2][POSITIONS];           /* over rows */
    int64_t longer[RESULTS][2][POSITIONS] __attribute__((aligned(64))); /* in 64 bits, over channels */
    int64_t low[2][POSITIONS], high[2][POSITIONS];                      /* over rows */
} bench;

/* What is where: `some` channels from `channel` on, `width` positions from `start` on, a run for each channel. */
typedef struct {
    int64_t group, line, channel, some, start, width;
} tile_of;

/* How many positions a tile has: all of them, or about equal parts that are whole vectors, of `most` at most. */
INLINE int64_t part_of(int64_t positions, int64_t most) {
    const int64_t parts = (positions + most - 1) / most, width = (positions + parts - 1) / parts;
    return parts == 1 ? positions : (width + 15) / 16 * 16;
}

/* Fetches what comes next: the same positions of the next channels. Beyond the end it does nothing. */
INLINE void ahead_of_runs(const int32_t *from, const unmasking *s, const tile_of *t) {
    const int64_t runs = t->width == s->positions ? 1 : t->some, length = t->some * t->width / runs;
    for (int64_t c = 0; c < runs; c++)
        for (int64_t i = 0; i < length; i += 16)
            __builtin_prefetch(from + (t->some + c) * s->positions + i, 0, 2);
}

/* A tile of an answer, read once. Whether it has numbers that are no residues. */
INLINE int fetch_runs(int32_t *restrict to, const int32_t *from, const unmasking *s, const tile_of *t, int past, int wide) {
    const int64_t runs = t->width == s->positions ? 1 : t->some, length = t->some * t->width / runs;
#if defined(__x86_64__)
    if (wide) return wide_fetch(to, from, runs, length, s->positions, t->some * s->positions, s->what.prime);
#endif
    (void)wide;
    if (past) ahead_of_runs(from, s, t);
    for (int64_t c = 0; c < runs; c++) memcpy(to + c * length, from + c * s->positions, (size_t)length * sizeof *to);
    return looked_at(to, runs * length, s->what.prime);
}

/* What is done to the results of a layer before anybody sees them: bias, normalisation and activation, each rounded as
 * if alone. */
INLINE void finish_runs(float *y, const unmasking *s, const tile_of *t) {
    const float low = s->limited ? s->low : -INFINITY, high = s->limited ? s->high : INFINITY;
#define NOT_FUSED __asm__ volatile("" : : "r"(y) : "memory") /* a product with the sum that follows */
    NOT_FUSED;
    for (int64_t c = 0; c < t->some; c++) {
        float *run = y + c * t->width;
        float more = s->bias ? s->bias[t->channel + c] : -0.0f; /* adding this changes nothing, not even a zero */
        if (s->factor) {
            const float factor = s->factor[t->channel + c];
            for (int64_t i = 0; i < t->width; i++) run[i] = (run[i] + more) * factor;
            NOT_FUSED;
            more = s->shift[t->channel + c];
        }
        for (int64_t i = 0; i < t->width; i++) {
            const float sum = run[i] + more, above = sum < low ? low : sum;
            run[i] = above > high ? high : above;
        }
    }
#undef NOT_FUSED
}

/* Its integers to `made`, its floats to `converted`, finished. */
INLINE void make_runs(int32_t *restrict made, float *restrict converted, const unmasking *s, const recipe *how,
                      const int32_t *const *here, const field *f, const tile_of *t) {
    const int64_t n = t->some * t->width;
    row(made, how, here, 0, n, f);
    to_float(converted, made, n, s->scale);
    if (s->bias || s->factor || s->limited) finish_runs(converted, s, t);
}

/* The floats of a tile, where they belong. */
INLINE void put_runs(float *to, const float *converted, const unmasking *s, const tile_of *t, int past, int wide) {
    const int64_t runs = t->width == s->positions ? 1 : t->some, length = t->some * t->width / runs;
    for (int64_t c = 0; c < runs; c++) put_tile(to + c * s->positions, converted + c * length, length, past, wide);
}

#if defined(__x86_64__)
INLINE finish end_of(const unmasking *s, int64_t channel) {
    const finish end = {s->bias ? s->bias[channel] : -0.0f, s->factor ? s->factor[channel] : 1.0f,
                        s->factor ? s->shift[channel] : -0.0f, s->limited ? s->low : -INFINITY,
                        s->limited ? s->high : INFINITY};
    return end;
}

/* --- with AVX-512, what a systematic code asks for: everything in registers, and sums in 64 bits --------------------------
 *
 * Numbers that stand side by side in 32 bits are weighed as those at even places and those at odd ones, so the sums of 16
 * positions are those of eight even ones and then of eight odd ones. */
#define LOWER 30 /* bits of a sum over channels that are weighed apart from those above */
#define PAIR 2   /* channels whose products are summed before a sum is touched */
#define LONGER 8 /* bits: so many more channels than `longest` can be summed */

/* A pair of channels of a tile: answers that are results, the one that is the same for all, floats, and weights. */
typedef struct {
    const int32_t *x[RESULTS][PAIR], *y[PAIR];
    float *to[RESULTS][PAIR];
    finish end[PAIR];
    __m512i u[PAIR], w[PAIR];
    unmasker code;
    __m512i most[RESULTS], greatest; /* of each x, and of y, up to now */
    __m512 scale;
    int64_t next; /* where the next answers are */
    int past;
} channels;

WIDE INLINE __m512i plus_product(__m512i sum, __m512i x, __m512i y) { return _mm512_add_epi64(sum, _mm512_mul_epi32(x, y)); }

/* What becomes of floats: nothing, or a bias and limits, or a normalisation too. */
enum { BARE, ENDED, NORMAL };

/* Sums of 16 positions, for both repetitions. */
typedef struct {
    __m512i even, odd, also, last;
} sums_of_line;

WIDE INLINE sums_of_line sums_at(const int64_t *first, const int64_t *second, int64_t i) {
    const sums_of_line sums = {_mm512_load_si512(first + i), _mm512_load_si512(first + i + 8),
                               _mm512_load_si512(second + i), _mm512_load_si512(second + i + 8)};
    return sums;
}

WIDE INLINE void put_sums(const sums_of_line *sums, int64_t *first, int64_t *second, int64_t i) {
    _mm512_store_si512(first + i, sums->even), _mm512_store_si512(first + i + 8, sums->odd);
    _mm512_store_si512(second + i, sums->also), _mm512_store_si512(second + i + 8, sums->last);
}

WIDE INLINE void weigh_line(sums_of_line *sums, __m512i value, __m512i u, __m512i w) {
    const __m512i other = _mm512_srli_epi64(value, 32);
    sums->even = plus_product(sums->even, value, u), sums->odd = plus_product(sums->odd, other, u);
    sums->also = plus_product(sums->also, value, w), sums->last = plus_product(sums->last, other, w);
}

/* past: past the cache, if the line is whole. */
WIDE INLINE void put_floats(float *to, __m512 floats, __mmask16 some, int past) {
    if (past && some == 0xFFFF)
        put_line(to, _mm512_castps_si512(floats), 1);
    else
        _mm512_mask_storeu_ps(to, some, floats);
}

/* A line, or the first few of its numbers, of `count` channels: results as floats, and sums += the integers, weighed. What
 * is read at one place is written before the next is read, so that memory is read and written at the same time. results:
 * known when this is compiled, or any, which takes longer. */
WIDE INLINE void wide_line(channels *b, int64_t (*sums)[2][POSITIONS], int64_t i, __mmask16 some, int64_t results, int count,
                           int ended) {
    __m512i y[PAIR];
    for (int c = 0; c < count; c++) {
        const __m512i answer = answered(b->y[c] + i, some, b->next);
        b->greatest = _mm512_max_epu32(b->greatest, answer);
        y[c] = added_of(answer, &b->code);
    }
#pragma GCC unroll 8
    for (int64_t k = 0; k < results; k++) {
        sums_of_line here = sums_at(sums[k][0], sums[k][1], i);
#pragma GCC unroll 2
        for (int c = 0; c < count; c++) {
            const __m512i answer = answered(b->x[k][c] + i, some, b->next);
            const __m512i value = unmasked(answer, y[c], &b->code);
            __m512 result = _mm512_mul_ps(_mm512_cvtepi32_ps(value), b->scale);
            b->most[k] = _mm512_max_epu32(b->most[k], answer);
            if (ended) result = finished(result, b->end + c, ended == NORMAL);
            put_floats(b->to[k][c] + i, result, some, b->past);
            weigh_line(&here, value, b->u[c], b->w[c]);
        }
        put_sums(&here, sums[k][0], sums[k][1], i);
    }
}

/* Where a tile of a result goes: floats to runs that are so far apart. */
typedef struct {
    float *to[RESULTS];
    int64_t apart;
    int past;
} room;

/* `count` channels of a tile from c on: floats, and sums += the integers, weighed. */
WIDE INLINE void wide_channels(const unmasking *s, const recipe *how, const field *f, const tile_of *t, int64_t c,
                               const room *to, int64_t results, int count, int ended, bench *d) {
    const int64_t line = s->channels * s->positions, there = how->last;
    const int64_t place = t->line * line + (t->channel + c) * s->positions + t->start;
    channels b = {.code = unmasker_of(how, f), .greatest = _mm512_setzero_si512(), .scale = _mm512_set1_ps(s->scale),
                  .next = count * s->positions, .past = to->past};
    const double *u = s->u + t->channel + c;
    for (int j = 0; j < count; j++) {
        b.y[j] = s->sources[there] + t->group * s->source_strides[there] + place + j * s->positions;
        b.u[j] = _mm512_set1_epi64((int64_t)u[j]), b.w[j] = _mm512_set1_epi64((int64_t)u[s->channels + j]);
        if (ended) b.end[j] = end_of(s, t->channel + c + j);
    }
    for (int64_t k = 0; k < results; k++) {
        const int64_t x = how[k].first;
        b.most[k] = _mm512_setzero_si512();
        for (int j = 0; j < count; j++) {
            b.x[k][j] = s->sources[x] + t->group * s->source_strides[x] + place + j * s->positions;
            b.to[k][j] = to->to[k] + (c + j) * to->apart;
        }
    }
    for (int64_t i = 0; i < t->width; i += LINE) wide_line(&b, d->longer, i, first_of(t->width - i), results, count, ended);
    s->outside[there] |= _mm512_reduce_max_epu32(b.greatest) >= (uint32_t)f->prime;
    for (int64_t k = 0; k < results; k++)
        s->outside[how[k].first] |= _mm512_reduce_max_epu32(b.most[k]) >= (uint32_t)f->prime;
}

/* A tile of a systematic code. Answers outside the field are named, and the sums mean nothing then. */
WIDE static void wide_tile(const unmasking *s, const field *f, const recipe *how, const tile_of *t, int64_t results,
                           int past, bench *b) {
    const int ended = s->factor ? NORMAL : s->bias || s->limited ? ENDED : BARE;
    const int64_t line = s->channels * s->positions, place = t->line * line + t->channel * s->positions + t->start;
    float *to[RESULTS], converted[RESULTS][TILE];
    for (int64_t k = 0; k < results; k++) to[k] = s->floats + (t->group * s->what.rows + k) * s->lines * line + place;
    const int whole = !past || (s->positions % LINE == 0 && before_a_line(s->floats, 1) == 0);
    room where = {.apart = whole ? s->positions : t->width, .past = whole && past};
    for (int64_t k = 0; k < results; k++) where.to[k] = whole ? to[k] : converted[k];
#define CHANNELS(count, results, ended) wide_channels(s, how, f, t, c, &where, results, count, ended, b)
#define OF_ENDS(count, results)                                                                                       \
    ended == BARE    ? CHANNELS(count, results, BARE)                                                                 \
    : ended == ENDED ? CHANNELS(count, results, ENDED)                                                                \
                     : CHANNELS(count, results, NORMAL)
#define PAIRS(results)                                                                                                \
    case results:                                                                                                     \
        for (; c + PAIR <= t->some; c += PAIR) OF_ENDS(PAIR, results);                                                \
        break
    int64_t c = 0;
    switch (results) {
        PAIRS(1);
        PAIRS(2);
        PAIRS(3);
        PAIRS(4);
        PAIRS(5);
        PAIRS(6);
        PAIRS(7);
        PAIRS(8);
    }
    for (; c < t->some; c++) OF_ENDS(1, results);
#undef PAIRS
#undef OF_ENDS
#undef CHANNELS
    for (int64_t k = 0; !whole && k < results; k++) put_runs(to[k], converted[k], s, t, past, 1);
    for (int64_t k = results; k < s->what.rows; k++) { /* of no example: it is looked at */
        const int64_t x = how[k].first;
        s->outside[x] |= fetch_runs(b->fetched[x], s->sources[x] + t->group * s->source_strides[x] + place, s, t, past, 1);
    }
}

/* low, high += weight * sums: the lower bits of these, and those above. Of whole lines. */
WIDE INLINE void add_rows(const int64_t *sums, int64_t n, double weight, int64_t *low, int64_t *high) {
    const __m512i by = _mm512_set1_epi64((int64_t)weight), mask = _mm512_set1_epi64(((int64_t)1 << LOWER) - 1);
    for (int64_t i = 0; i < (n + LINE - 1) / LINE * LINE; i += 8) {
        const __m512i sum = _mm512_load_si512(sums + i);
        const __m512i lower = _mm512_and_si512(sum, mask), upper = _mm512_srai_epi64(sum, LOWER);
        _mm512_store_si512(low + i, plus_product(_mm512_load_si512(low + i), lower, by));
        _mm512_store_si512(high + i, plus_product(_mm512_load_si512(high + i), upper, by));
    }
}

/* As unmask_line. */
WIDE static void wide_unmask_line(const unmasking *s, const field *f, const recipe *how, tile_of t, int64_t results,
                                  int64_t step, int past, bench *b) {
    memset(b->longer, 0, (size_t)results * sizeof b->longer[0]);
    for (t.channel = 0; t.channel < s->channels; t.channel += t.some) {
        const int64_t left = s->channels - t.channel;
        t.some = left < step ? left : step;
        wide_tile(s, f, how, &t, results, past, b);
    }
    for (int64_t k = 0; k < results; k++) {
        const int64_t row = (t.group * s->what.rows + k) * s->lines + t.line;
        for (int r = 0; r < 2; r++)
            add_rows(b->longer[k][r], t.width, s->v[r * s->examples * s->lines + row], b->low[r], b->high[r]);
    }
}

/* Congruent to x, and next to zero: 24 bits are left to be multiplied with. */
INLINE double near_zero(int64_t x, double prime, double inverse) {
    const double upper = centred((double)(x >> 24), prime, inverse);
    return centred(upper * 0x1p24 + (double)(x & 0xFFFFFF), prime, inverse);
}

/* As store, of sums whose positions are in order of even and odd ones. */
INLINE void store_longer(const int64_t *restrict low, const int64_t *restrict high, int64_t n, double prime,
                         int32_t *restrict out) {
    const double inverse = 1.0 / prime;
    int32_t found[POSITIONS];
    for (int64_t i = 0; i < (n + LINE - 1) / LINE * LINE; i++) {
        const double upper = centred(near_zero(high[i], prime, inverse) * (double)(1 << (LOWER / 2)), prime, inverse);
        found[i] = residue(upper * (double)(1 << (LOWER / 2)) + near_zero(low[i], prime, inverse), prime, inverse);
    }
    for (int64_t i = 0; i < n; i++) out[i] = found[i / LINE * LINE + i % 2 * 8 + i % LINE / 2];
}

/* --- with AVX-512, the sum of all answers, which a weight gradient is --------------------------------------------------
 *
 * A pair of channels at a time, and of these as many positions side by side as have sums that stay in the first cache. The
 * same positions of the next pair are fetched meanwhile. */
#define STRIP 512 /* positions: b.longer as (rep, STRIP) */
#define SUMMED 15 /* answers, at most: so many residues, and half a prime, fit 32 bits */
#define USUAL 6   /* answers, of the usual scheme */
_Static_assert(2 * STRIP <= RESULTS * 2 * POSITIONS, "b.longer has room for a strip of both repetitions");
_Static_assert(STRIP % LINE == 0, "a part of a strip is whole vectors");

typedef struct {
    const int32_t *x[ANSWERS][PAIR];
    float *to[PAIR];
    __m512i u[PAIR], w[PAIR], prime, half;
    __m512i most[ANSWERS]; /* of each answer up to now */
    __m512 scale;
    int64_t next; /* where the next answers are */
} summands;

/* [0, 16 primes) -> [0, prime) */
WIDE INLINE __m512i wide_modulo(__m512i value, __m512i prime) {
    for (int times = 3; times >= 0; times--)
        value = _mm512_min_epu32(value, _mm512_sub_epi32(value, _mm512_slli_epi32(prime, (unsigned)times)));
    return value;
}

/* As wide_line, of `answers` answers each. */
WIDE INLINE void wide_sum(summands *b, int64_t *first, int64_t *second, int64_t i, __mmask16 some, int64_t answers,
                          int count, int past) {
    sums_of_line sums = sums_at(first, second, i);
    for (int c = 0; c < count; c++) {
        __m512i value = b->half;
        for (int64_t j = 0; j < answers; j++) {
            const __m512i answer = answered(b->x[j][c] + i, some, b->next);
            b->most[j] = _mm512_max_epu32(b->most[j], answer);
            value = _mm512_add_epi32(value, answer);
        }
        value = _mm512_sub_epi32(wide_modulo(value, b->prime), b->half);
        put_floats(b->to[c] + i, _mm512_mul_ps(_mm512_cvtepi32_ps(value), b->scale), some, past);
        weigh_line(&sums, value, b->u[c], b->w[c]);
    }
    put_sums(&sums, first, second, i);
}

/* `count` channels from t->channel on: floats, and sums += the integers, weighed. */
WIDE INLINE void wide_sums_of(const unmasking *s, const field *f, const tile_of *t, int64_t answers, int count, int past,
                              int64_t *first, int64_t *second) {
    const int64_t place = t->channel * s->positions + t->start;
    const double *u = s->u + t->channel;
    summands b = {.prime = _mm512_set1_epi32(f->prime), .half = _mm512_set1_epi32(f->half), .scale = _mm512_set1_ps(s->scale),
                  .next = count * s->positions};
    for (int64_t j = 0; j < answers; j++) b.most[j] = _mm512_setzero_si512();
    for (int c = 0; c < count; c++) {
        for (int64_t j = 0; j < answers; j++) b.x[j][c] = s->sources[j] + place + c * s->positions;
        b.to[c] = s->floats + place + c * s->positions;
        b.u[c] = _mm512_set1_epi64((int64_t)u[c]), b.w[c] = _mm512_set1_epi64((int64_t)u[s->channels + c]);
    }
    int64_t i = 0;
    if (past)
        for (; i + LINE <= t->width; i += LINE) wide_sum(&b, first, second, i, 0xFFFF, answers, count, 1);
    else
        for (; i + LINE <= t->width; i += LINE) wide_sum(&b, first, second, i, 0xFFFF, answers, count, 0);
    if (i < t->width) wide_sum(&b, first, second, i, first_of(t->width - i), answers, count, 0);
    for (int64_t j = 0; j < answers; j++)
        s->outside[j] |= _mm512_reduce_max_epu32(b.most[j]) >= (uint32_t)s->what.prime;
}

WIDE INLINE void wide_strip(const unmasking *s, const field *f, tile_of t, int64_t answers, int past, int64_t *first,
                            int64_t *second) {
    for (; t.channel + PAIR <= s->channels; t.channel += PAIR) wide_sums_of(s, f, &t, answers, PAIR, past, first, second);
    if (t.channel < s->channels) wide_sums_of(s, f, &t, answers, 1, past, first, second);
}

WIDE static void wide_total(const unmasking *s, const field *f, int past, bench *b) {
    const int64_t answers = s->what.sources;
    const int whole = past && s->positions % LINE == 0 && before_a_line(s->floats, 1) == 0;
    const int64_t part = part_of(s->positions, STRIP);
    int64_t *sums = b->longer[0][0];
    for (int64_t start = 0; start < s->positions; start += part) {
        const int64_t left = s->positions - start;
        const tile_of t = {0, 0, 0, 0, start, left < part ? left : part};
        memset(sums, 0, 2 * STRIP * sizeof *sums);
        if (answers == USUAL)
            wide_strip(s, f, t, USUAL, whole, sums, sums + STRIP);
        else
            wide_strip(s, f, t, answers, whole, sums, sums + STRIP);
        for (int64_t at = 0; at < t.width; at += POSITIONS)
            for (int r = 0; r < 2; r++) {
                const int64_t some = t.width - at < POSITIONS ? t.width - at : POSITIONS;
                memset(b->low[r], 0, sizeof b->low[r]);
                memset(b->high[r], 0, sizeof b->high[r]);
                add_rows(sums + r * STRIP + at, some, s->v[r], b->low[r], b->high[r]);
                for (int64_t m = 0; m < s->moduli; m++)
                    store_longer(b->low[r], b->high[r], some, s->primes[m],
                                 s->out + (m * s->reps + r) * s->positions + start + at);
            }
    }
}

/* Whether sums in 64 bits fit. `longest` products fit 53 bits, so 2^LONGER times as many fit 61, of which 31 are above
 * LOWER; and the weight of a row has less than 54 bits without those of often * half, so that so many rows fit 63. Weights
 * fit 32. */
INLINE int fits_longer(const unmasking *s) {
    const int64_t half = s->what.prime / 2, least = 1 << 22;
    return s->channels <= s->longest << LONGER && s->examples * s->lines <= s->often * half >> 21 &&
           s->longest * half > least && s->often * half > least;
}

/* Whether the one result is the sum of all answers, as it is, of one group and one line. */
INLINE int total(const unmasking *s) {
    int plain = s->what.rows == 1 && s->what.sources <= SUMMED && s->examples == 1 && s->lines == 1;
    for (int64_t j = 0; plain && j < s->what.sources; j++) plain = s->what.matrix[j] == 1;
    return plain && !s->bias && !s->factor && !s->limited;
}
#endif

/* Unmasks a tile and writes it as floats; its integers stay in made. */
INLINE void unmask_tile(const unmasking *s, const field *f, const recipe *how, const tile_of *t, int64_t results, int past,
                        int wide, bench *b) {
    const int64_t line = s->channels * s->positions;
    const int64_t place = t->line * line + t->channel * s->positions + t->start;
    const int32_t *here[ANSWERS];
    float converted[TILE];
    for (int64_t i = 0; i < s->what.sources; i++) {
        const int32_t *there = s->sources[i] + t->group * s->source_strides[i] + place;
        here[i] = b->fetched[i];
        s->outside[i] |= fetch_runs(b->fetched[i], there, s, t, past, wide);
    }
    for (int64_t k = 0; k < results; k++) {
        float *to = s->floats + (t->group * s->what.rows + k) * s->lines * line + place;
        make_runs(b->made[k], converted, s, how + k, here, f, t);
        put_runs(to, converted, s, t, past, wide);
    }
}

/* sums (+)= the tile's channels, weighed. */
INLINE void weigh_tile(const unmasking *s, const tile_of *t, int64_t results, int twice, int fresh, bench *b) {
    const double *u = s->u + t->channel, *w = twice ? u + s->channels : u;
    for (int64_t k = 0; k < results; k++) {
        const numbers x = of_integers(b->made[k]);
        double *first = b->sums[k][0], *second = b->sums[k][1];
        if (s->positions == 1) { /* channels side by side */
            double one, two = 0.0;
            one_column(x, 0, t->some, u, w, twice, &one, &two);
            *first = one + (fresh ? 0.0 : *first);
            *second = two + (fresh ? 0.0 : *second);
            continue;
        }
        int64_t c = 0;
        int from_zero = fresh;
        for (; c + TOGETHER <= t->some; c += TOGETHER, from_zero = 0)
            if (from_zero)
                some_rows(from_here(x, c * t->width), 0, t->width, t->width, u + c, w + c, TOGETHER, twice, 1, first, second);
            else
                some_rows(from_here(x, c * t->width), 0, t->width, t->width, u + c, w + c, TOGETHER, twice, 0, first, second);
        for (; c < t->some; c++, from_zero = 0)
            if (from_zero)
                some_rows(from_here(x, c * t->width), 0, t->width, t->width, u + c, w + c, 1, twice, 1, first, second);
            else
                some_rows(from_here(x, c * t->width), 0, t->width, t->width, u + c, w + c, 1, twice, 0, first, second);
    }
}

/* One line of a group's examples, of some positions: unmasked, and added to the sums over rows. */
INLINE void unmask_line(const unmasking *s, const field *f, const recipe *how, tile_of t, int64_t results, int64_t step,
                        int twice, int past, int wide, int64_t *rows, bench *b) {
    const int64_t longest = s->longest < TOGETHER ? s->longest : s->longest / TOGETHER * TOGETHER;
    const int single = s->channels <= longest;
    int64_t since = 0; /* channels in sums */
    int reduced = 0;
    for (t.channel = 0; t.channel < s->channels; t.channel += t.some) {
        const int64_t left = s->channels - t.channel, room = longest - since;
        t.some = left < step ? left : step;
        t.some = t.some < room ? t.some : room;
        unmask_tile(s, f, how, &t, results, past, wide, b);
        weigh_tile(s, &t, results, twice, since == 0, b);
        since += t.some;
        if (single || (since < longest && t.channel + t.some < s->channels)) continue;
        for (int64_t k = 0; k < results; k++)
            for (int64_t m = 0; m < s->moduli; m++)
                for (int r = 0; r <= twice; r++)
                    add_centred(b->sums[k][r], t.width, s->primes[m], !reduced, b->total[k][m][r]);
        since = 0, reduced = 1;
    }
    for (int64_t k = 0; k < results; k++) {
        const int64_t row = (t.group * s->what.rows + k) * s->lines + t.line;
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++) {
                const double *found = single ? b->sums[k][r] : b->total[k][m][r];
                add_weighed(found, t.width, s->v[r * s->examples * s->lines + row], s->primes[m], b->whole[m][r]);
            }
        if (++*rows % s->often) continue;
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++) centre(b->whole[m][r], t.width, s->primes[m]);
    }
}

INLINE void unmask(const unmasking *s, int twice, int wide) {
    bench b;
    const field f = field_of(&s->what);
    recipe how[RESULTS];
    for (int64_t k = 0; k < s->what.rows; k++) how[k] = recipe_of(&s->what, k);
#if defined(__x86_64__)
    const int longer = wide && twice && s->positions >= 2 * LINE && fits_longer(s) && systematic(&s->what, how);
#endif
    const int past = many(s->examples * s->lines * s->channels * s->positions);
#if defined(__x86_64__)
    if (wide && twice && fits_longer(s) && total(s)) {
        wide_total(s, &f, past, &b);
        settled(past);
        return;
    }
#endif
    const int64_t part = part_of(s->positions, POSITIONS);
    const int64_t most = TILE / part, step = part < s->positions ? TOGETHER : most < TOGETHER ? most : most / 4 * 4;
    for (int64_t start = 0; start < s->positions; start += part) {
        const int64_t left = s->positions - start, width = left < part ? left : part;
        int64_t rows = 0;
        memset(b.whole, 0, sizeof b.whole);
        memset(b.low, 0, sizeof b.low);
        memset(b.high, 0, sizeof b.high);
        for (int64_t group = 0; group < s->groups; group++) {
            const int64_t there = s->examples - group * s->what.rows, results = there < s->what.rows ? there : s->what.rows;
            for (int64_t line = 0; line < s->lines; line++) {
                const tile_of t = {group, line, 0, 0, start, width};
#if defined(__x86_64__)
                if (longer)
                    wide_unmask_line(s, &f, how, t, results, step, past, &b);
                else
#endif
                    unmask_line(s, &f, how, t, results, step, twice, past, wide, &rows, &b);
            }
        }
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++) {
                int32_t *out = s->out + (m * s->reps + r) * s->positions + start;
#if defined(__x86_64__)
                if (longer)
                    store_longer(b.low[r], b.high[r], width, s->primes[m], out);
                else
#endif
                    store(b.whole[m][r], width, s->primes[m], out);
            }
    }
    settled(past);
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define VARIANT(name, wide, attribute)                                                                                \
    attribute static void unmask_##name(const unmasking *s) {                                                         \
        if (s->reps > 1)                                                                                              \
            unmask(s, 1, wide);                                                                                       \
        else                                                                                                          \
            unmask(s, 0, wide);                                                                                       \
    }

VARIANT(plain, 0, )
#if defined(__x86_64__)
VARIANT(avx2, 0, __attribute__((target("avx2,fma"))))
VARIANT(avx512, 1, __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))))
#endif

static void (*chosen)(const unmasking *) = unmask_plain;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) chosen = unmask_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        chosen = unmask_avx512;
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others are for tests: without vector instructions of this processor, and with those of AVX2. */
void darknight_unmask_3(const unmasking *s) { chosen(s); }
void darknight_unmask_plain_3(const unmasking *s) { unmask_plain(s); }
#if defined(__x86_64__)
void darknight_unmask_avx2_3(const unmasking *s) { unmask_avx2(s); }
#endif

/* Whether sums of all answers are made in strips. */
int64_t darknight_unmask_totals_3(void) {
#if defined(__x86_64__)
    return chosen == unmask_avx512;
#else
    return 0;
#endif
}
