/* Masking with noise on a grid, tile by tile: the compiled twin of reference_real.
 *
 * Every loop runs over a few hundred numbers that stay in the first cache, so that each tensor is read and written once.
 * Sums of floats are in double, in the order of the sources, and no product is fused with a sum; what is on the grid is
 * added as integers. So every variant gives the same bits, and those of the reference; only the Gaussians, whose
 * logarithm, sine and cosine are our own, and sums over many numbers differ in their last bits (see each).
 *
 * No Python.h: plain loops, which gcc and clang turn into vector instructions. Nothing is checked here:
 * compiled_real.py does that.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define TILE 512
#define MOST_INPUTS 64
#define LARGE (1 << 22) /* bytes */
#define LANES 16
#define INLINE static inline __attribute__((always_inline))

/* Adding 1.5 * 2^52 rounds a double below 2^51 to the nearest integer, which is then in its low bits. */
#define ROUNDING 0x1.8p52
#define ROUNDING_BITS 0x4338000000000000u

INLINE uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Two's complement, as an unsigned number: sums of them never overflow. */
INLINE uint64_t integer_of(double value) { return bits_of(value + ROUNDING) - ROUNDING_BITS; }

/* The nearest double of an int64: both halves are exact, and their sum is rounded once. */
INLINE double nearest(uint64_t value) {
    const double high = double_of((value >> 32 ^ 0x80000000u) | 0x4530000000000000u); /* 2^84 + 2^63 + its half */
    const double low = double_of((value & 0xFFFFFFFFu) | 0x4330000000000000u);        /* 2^52 + its half */
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}

/* --- to memory: as in field.c -------------------------------------------------------------------------------------- */
INLINE void put(void *to, const void *from, int64_t bytes, int past) {
#if defined(__x86_64__)
    if (past) {
        char *out = to;
        const char *in = from;
        for (; bytes && ((uintptr_t)out & 15); out += 4, in += 4, bytes -= 4) memcpy(out, in, 4);
        for (; bytes >= 16; out += 16, in += 16, bytes -= 16)
            _mm_stream_si128((__m128i *)out, _mm_loadu_si128((const __m128i *)in));
        memcpy(out, in, (size_t)bytes);
        return;
    }
#endif
    (void)past;
    memcpy(to, from, (size_t)bytes);
}

INLINE void settled(int past) {
#if defined(__x86_64__)
    if (past) _mm_sfence(); /* another process reads it next */
#endif
    (void)past;
}

INLINE int64_t size_of(int wide) { return wide ? 8 : 4; }

INLINE const void *at(const void *from, int64_t place, int wide) { return (const char *)from + place * size_of(wide); }

/* A tile of doubles as it goes out. */
INLINE void put_floats(void *to, int64_t place, const double *restrict from, int64_t n, int wide, int past) {
    char *out = (char *)to + place * size_of(wide);
    if (wide) {
        put(out, from, 8 * n, past);
        return;
    }
    float narrow[TILE];
    for (int64_t i = 0; i < n; i++) narrow[i] = (float)from[i];
    put(out, narrow, 4 * n, past);
}

/* --- sums of floats ------------------------------------------------------------------------------------------------ */
/* sum += c[0] x[0] + ... of one to four sources, from left to right. */
#define ADD(name, type)                                                                                               \
    INLINE void name(double *restrict sum, const double *c, const void *const *x, int64_t count, int64_t n) {         \
        const type *restrict x0 = x[0], *restrict x1 = x[count > 1], *restrict x2 = x[count > 2 ? 2 : 0];             \
        const type *restrict x3 = x[count > 3 ? 3 : 0];                                                               \
        const double c0 = c[0], c1 = c[count > 1], c2 = c[count > 2 ? 2 : 0], c3 = c[count > 3 ? 3 : 0];              \
        if (count == 1)                                                                                               \
            for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + c0 * x0[i];                                             \
        else if (count == 2)                                                                                          \
            for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + c0 * x0[i] + c1 * x1[i];                                \
        else if (count == 3)                                                                                          \
            for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + c0 * x0[i] + c1 * x1[i] + c2 * x2[i];                   \
        else                                                                                                          \
            for (int64_t i = 0; i < n; i++) sum[i] = sum[i] + c0 * x0[i] + c1 * x1[i] + c2 * x2[i] + c3 * x3[i];      \
    }
ADD(add_floats, float)
ADD(add_doubles, double)

/* sum = that of all sources whose coefficient is not zero, from `place` on. */
INLINE void combined(double *restrict sum, const double *c, const void *const *sources, int64_t count, int64_t place,
                     int64_t n, int wide) {
    const void *some[4];
    double factors[4];
    int64_t met = 0;
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int64_t s = 0; s < count; s++) {
        if (c[s] != 0.0) {
            some[met] = at(sources[s], place, wide);
            factors[met++] = c[s];
        }
        if (met == 4 || (met && s == count - 1)) {
            if (wide)
                add_doubles(sum, factors, some, met, n);
            else
                add_floats(sum, factors, some, met, n);
            met = 0;
        }
    }
}

/* --- masking ------------------------------------------------------------------------------------------------------- */
typedef struct {
    const void *x;            /* (example, n) */
    void *grid;               /* the same, on its grid */
    const double *data;       /* (row, input) */
    const int64_t *carriers;  /* (row, noise row) */
    const int64_t *noise;     /* (noise row, group, n) */
    const int32_t *fractions; /* the same, in [0, divisor); or none */
    void *const *outs;        /* (row): (group, n) */
    int64_t examples, inputs, noises, rows, groups, n, divisor;
    double scale, step, bound;
    int32_t wide, wide_outs; /* float64 instead of float32 */
    int32_t within;          /* whether all of x are: else nothing that was made means anything */
    int64_t first, last;     /* features that are done here: other threads do others */
} masking;

/* x as a number of steps. False if one of them is beyond the bound, or is no number. */
INLINE int steps_of(double *restrict steps, const void *x, int64_t n, int wide, double scale, double bound) {
    const double *restrict doubles = x;
    const float *restrict floats = x;
    int beyond = 0;
    if (wide)
        for (int64_t i = 0; i < n; i++) {
            beyond |= !(fabs(doubles[i]) <= bound);
            steps[i] = (doubles[i] * scale + ROUNDING) - ROUNDING;
        }
    else
        for (int64_t i = 0; i < n; i++) {
            const double value = floats[i];
            beyond |= !(fabs(value) <= bound);
            steps[i] = (value * scale + ROUNDING) - ROUNDING;
        }
    return !beyond;
}

INLINE void carry(uint64_t *restrict total, const int64_t *restrict noise, int64_t n, int64_t c) {
    if (c == 1)
        for (int64_t i = 0; i < n; i++) total[i] += (uint64_t)noise[i];
    else if (c == -1)
        for (int64_t i = 0; i < n; i++) total[i] -= (uint64_t)noise[i];
    else if (c)
        for (int64_t i = 0; i < n; i++) total[i] += (uint64_t)c * (uint64_t)noise[i];
}

/* total += round(sum of c (fraction - divisor / 2) / divisor), half up: exact, as all of it is far below 2^52. */
INLINE void carry_fractions(uint64_t *restrict total, const masking *s, const int64_t *c, int64_t place, int64_t n) {
    const double divisor = (double)s->divisor, middle = (double)(s->divisor / 2);
    double sum[TILE];
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int64_t m = 0; m < s->noises; m++) {
        const int32_t *restrict from = s->fractions + m * s->groups * s->n + place;
        const double factor = (double)c[m];
        for (int64_t i = 0; i < n; i++) sum[i] += factor * ((double)from[i] - middle);
    }
    for (int64_t i = 0; i < n; i++) total[i] += integer_of(floor((2.0 * sum[i] + divisor) / (2.0 * divisor)));
}

INLINE void encode(masking *s) {
    static const double zeros[TILE];
    const int past = s->rows * s->groups * s->n * size_of(s->wide_outs) > LARGE;
    double steps[MOST_INPUTS][TILE], made[TILE];
    uint64_t total[TILE];
    const void *here[MOST_INPUTS];
    s->within = 0;
    for (int64_t group = 0; group < s->groups; group++)
        for (int64_t start = s->first; start < s->last; start += TILE) {
            const int64_t some = s->last - start < TILE ? s->last - start : TILE, place = group * s->n + start;
            for (int64_t k = 0; k < s->inputs; k++) {
                const int64_t example = group * s->inputs + k, from = example * s->n + start;
                here[k] = example < s->examples ? steps[k] : zeros;
                if (example >= s->examples) continue;
                if (!steps_of(steps[k], at(s->x, from, s->wide), some, s->wide, s->scale, s->bound)) return;
                for (int64_t i = 0; i < some; i++) made[i] = steps[k][i] * s->step;
                put_floats(s->grid, from, made, some, s->wide, 0);
            }
            for (int64_t r = 0; r < s->rows; r++) {
                const int64_t *carriers = s->carriers + r * s->noises;
                combined(made, s->data + r * s->inputs, here, s->inputs, 0, some, 1);
                for (int64_t i = 0; i < some; i++) total[i] = integer_of(made[i]);
                for (int64_t m = 0; m < s->noises; m++)
                    carry(total, s->noise + m * s->groups * s->n + place, some, carriers[m]);
                if (s->fractions) carry_fractions(total, s, carriers, place, some);
                for (int64_t i = 0; i < some; i++) made[i] = nearest(total[i]) * s->step;
                put_floats(s->outs[r], place, made, some, s->wide_outs, past);
            }
        }
    settled(past);
    s->within = 1;
}

/* --- unmasking ----------------------------------------------------------------------------------------------------- */
typedef struct {
    const void *const *sources; /* (group, n) */
    const double *matrix;       /* (row, source) */
    void *out;                  /* (group * row, n), of which the first `examples` */
    int64_t count, rows, groups, n, examples;
    int32_t wide, wide_out;
    int64_t first, last; /* features that are done here */
} unmasking;

INLINE void decode(unmasking *s) {
    const int past = s->examples * s->n * size_of(s->wide_out) > LARGE;
    double sum[TILE];
    for (int64_t group = 0; group < s->groups; group++)
        for (int64_t start = s->first; start < s->last; start += TILE) {
            const int64_t some = s->last - start < TILE ? s->last - start : TILE;
            for (int64_t r = 0; r < s->rows && group * s->rows + r < s->examples; r++) {
                combined(sum, s->matrix + r * s->count, s->sources, s->count, group * s->n + start, some, s->wide);
                put_floats(s->out, (group * s->rows + r) * s->n + start, sum, some, s->wide_out, past);
            }
        }
    settled(past);
}

/* --- parity -------------------------------------------------------------------------------------------------------- */
typedef struct {
    const void *const *sources; /* (n) */
    const double *weights;      /* (source) */
    int64_t count, n;
    double tolerance;
    int32_t wide;
    int32_t within; /* whether every sum is; what is no number is not */
} parity;

INLINE void compare(parity *s) {
    double sum[TILE];
    int beyond = 0;
    for (int64_t start = 0; start < s->n && !beyond; start += TILE) {
        const int64_t some = s->n - start < TILE ? s->n - start : TILE;
        combined(sum, s->weights, s->sources, s->count, start, some, s->wide);
        for (int64_t i = 0; i < some; i++) beyond |= !(fabs(sum[i]) <= s->tolerance);
    }
    s->within = !beyond;
}

/* --- sizes ---------------------------------------------------------------------------------------------------------
 *
 * Sums in lanes: the last bits are not those of the reference, which sums in another order. */
typedef struct {
    const void *x;  /* (outer, channel, inner) */
    double *sums;   /* (channel), of squares: zeros at first */
    double largest; /* magnitude; what is no number is not seen here, but in the sums */
    int64_t outer, channels, inner;
    int32_t wide;
    int64_t first, last; /* channels that are done here */
} measure;

#define SQUARES(name, type)                                                                                           \
    INLINE double name(const type *restrict x, int64_t n, double *restrict most) {                                    \
        double lanes[LANES] = {0.0}, total = 0.0;                                                                     \
        int64_t i = 0;                                                                                                \
        for (; i + LANES <= n; i += LANES)                                                                            \
            for (int l = 0; l < LANES; l++) {                                                                         \
                const double value = x[i + l], size = fabs(value);                                                    \
                lanes[l] += value * value;                                                                            \
                most[l] = size > most[l] ? size : most[l];                                                            \
            }                                                                                                         \
        for (int l = 0; l < LANES; l++) total += lanes[l];                                                            \
        for (; i < n; i++) {                                                                                          \
            const double value = x[i], size = fabs(value);                                                            \
            total += value * value;                                                                                   \
            most[0] = size > most[0] ? size : most[0];                                                                \
        }                                                                                                             \
        return total;                                                                                                 \
    }
SQUARES(squares_of_floats, float)
SQUARES(squares_of_doubles, double)

INLINE void squares(measure *s) {
    double most[LANES] = {0.0};
    for (int64_t outer = 0; outer < s->outer; outer++)
        for (int64_t channel = s->first; channel < s->last; channel++) {
            const void *from = at(s->x, (outer * s->channels + channel) * s->inner, s->wide);
            s->sums[channel] += s->wide ? squares_of_doubles(from, s->inner, most)
                                        : squares_of_floats(from, s->inner, most);
        }
    for (int l = 0; l < LANES; l++) s->largest = most[l] > s->largest ? most[l] : s->largest;
}

/* --- Gaussians -----------------------------------------------------------------------------------------------------
 *
 * Box and Muller's, from pairs of uniform numbers of 53 bits. The logarithm is 2 artanh((m - 1) / (m + 1)) of the
 * mantissa m and the exponent times log 2; the angle is a part of a turn, whose quarter is taken off exactly. Taylor's
 * series are cut where they no longer matter: every Gaussian is within 2^-45 of the reference's. */
typedef struct {
    const uint64_t *words;    /* (2 * pairs): of the radius, and of the angle */
    const uint64_t *uniforms; /* (count): of the lower bits */
    int64_t *out;             /* (count): first the cosines, then the sines */
    int64_t count, pairs, mean;
    double scale;             /* of the upper bits */
    int32_t lower;            /* how many lower bits */
    int64_t first, last;      /* pairs that are done here */
} drawing;

/* -2 log((word + 1) / 2^53) of 53 bits. */
INLINE double minus_two_log(uint64_t word) {
    const double value = nearest(word + 1) * 0x1p-53;
    /* m in [sqrt(1/2), sqrt(2)): what is added moves the exponent up by one exactly from sqrt(1/2) on */
    const uint64_t moved = bits_of(value) + (0x3FF0000000000000u - 0x3FE6A09E667F3BCDu);
    const double exponent = double_of((moved >> 52) | 0x4330000000000000u) - (0x1p52 + 1023.0);
    const double m = double_of((moved & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu);
    const double f = m - 1.0, s = f / (m + 1.0), z = s * s;
    double series = 1.0 / 23;
    series = series * z + 1.0 / 21;
    series = series * z + 1.0 / 19;
    series = series * z + 1.0 / 17;
    series = series * z + 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    const double log_m = 2.0 * s + 2.0 * s * z * series;
    return -2.0 * (exponent * 0.69314718055994530942 + log_m);
}

/* Cosine and sine of word / 2^53 turns. */
INLINE void turned(uint64_t word, double *restrict cosine, double *restrict sine) {
    const uint64_t quarter = (word + ((uint64_t)1 << 50)) >> 51; /* the nearest: 0 to 4 */
    const double rest = double_of(bits_of(ROUNDING) + (word - (quarter << 51))) - ROUNDING;
    const double a = rest * (0x1p-51 * 1.57079632679489661923), z = a * a;
    double c = 1.0 / 20922789888000, s = -1.0 / 1307674368000;
    c = c * z - 1.0 / 87178291200;
    s = s * z + 1.0 / 6227020800;
    c = c * z + 1.0 / 479001600;
    s = s * z - 1.0 / 39916800;
    c = c * z - 1.0 / 3628800;
    s = s * z + 1.0 / 362880;
    c = c * z + 1.0 / 40320;
    s = s * z - 1.0 / 5040;
    c = c * z - 1.0 / 720;
    s = s * z + 1.0 / 120;
    c = c * z + 1.0 / 24;
    s = s * z - 1.0 / 6;
    c = c * z - 0.5;
    c = c * z + 1.0;
    s = s * z * a + a;
    /* A quarter further, the cosine is minus the sine, and the sine the cosine. Signs are the highest bit. */
    const uint64_t odd = 0 - (quarter & 1), c_bits = bits_of(c), s_bits = bits_of(s);
    const uint64_t c_sign = ((quarter + 1) & 2) << 62, s_sign = (quarter & 2) << 62;
    *cosine = double_of(((c_bits & ~odd) | (s_bits & odd)) ^ c_sign);
    *sine = double_of(((s_bits & ~odd) | (c_bits & odd)) ^ s_sign);
}

INLINE void place(int64_t *restrict out, const double *restrict upper, const drawing *s, int64_t start, int64_t n) {
    if (!s->lower) {
        for (int64_t i = 0; i < n; i++) out[i] = (int64_t)(integer_of(upper[i]) + (uint64_t)s->mean);
        return;
    }
    const uint64_t *restrict uniforms = s->uniforms + start;
    const uint64_t mask = ((uint64_t)1 << s->lower) - 1, less = (uint64_t)1 << (s->lower - 1);
    const int lower = s->lower;
    for (int64_t i = 0; i < n; i++)
        out[i] = (int64_t)((integer_of(upper[i]) << lower) + (uniforms[i] & mask) - less + (uint64_t)s->mean);
}

INLINE void gaussian(drawing *s) {
    const uint64_t mask = ((uint64_t)1 << 53) - 1;
    double cosines[TILE], sines[TILE];
    for (int64_t start = s->first; start < s->last; start += TILE) {
        const int64_t some = s->last - start < TILE ? s->last - start : TILE, second = s->pairs + start;
        const uint64_t *restrict radii = s->words + start, *restrict angles = s->words + second;
        for (int64_t i = 0; i < some; i++) {
            const double radius = sqrt(minus_two_log(radii[i] & mask));
            double cosine, sine;
            turned(angles[i] & mask, &cosine, &sine);
            cosines[i] = radius * cosine * s->scale;
            sines[i] = radius * sine * s->scale;
        }
        place(s->out + start, cosines, s, start, some);
        place(s->out + second, sines, s, second, second + some > s->count ? s->count - second : some);
    }
}

/* --- weighed sums --------------------------------------------------------------------------------------------------
 *
 * Of both sides of Freivalds' check. The last bits depend on the order, and so on the variant. */
#define MOST_REPS 32
#define COLUMNS 128

typedef struct {
    const void *x;         /* (outer, group * channel, inner) */
    const double *vectors; /* (rep, group * channel) */
    double *out;           /* (outer, group * rep, inner) */
    int64_t outer, groups, channels, inner, reps; /* channels: of a group */
    int32_t wide;
    int64_t first, last; /* of the outer ones: that are done here */
} folding;

/* Tiles of one to four channels, as doubles. */
INLINE void widened(double (*restrict tiles)[COLUMNS], const void *x, int64_t place, int64_t stride, int64_t count,
                    int64_t n, int wide) {
    for (int64_t c = 0; c < count; c++) {
        const void *from = at(x, place + c * stride, wide);
        if (wide) {
            memcpy(tiles[c], from, (size_t)n * sizeof(double));
        } else {
            const float *restrict floats = from;
            for (int64_t i = 0; i < n; i++) tiles[c][i] = (double)floats[i];
        }
    }
}

INLINE void fold(folding *s) {
    double sums[MOST_REPS][COLUMNS], tiles[4][COLUMNS];
    const int64_t every = s->groups * s->channels;
    for (int64_t outer = s->first; outer < s->last; outer++)
        for (int64_t group = 0; group < s->groups; group++)
            for (int64_t start = 0; start < s->inner; start += COLUMNS) {
                const int64_t some = s->inner - start < COLUMNS ? s->inner - start : COLUMNS;
                for (int64_t r = 0; r < s->reps; r++) memset(sums[r], 0, (size_t)some * sizeof(double));
                for (int64_t c = 0; c < s->channels; c += 4) {
                    const int64_t count = s->channels - c < 4 ? s->channels - c : 4, channel = group * s->channels + c;
                    widened(tiles, s->x, (outer * every + channel) * s->inner + start, s->inner, count, some, s->wide);
                    const void *met[4] = {tiles[0], tiles[1], tiles[2], tiles[3]};
                    for (int64_t r = 0; r < s->reps; r++)
                        add_doubles(sums[r], s->vectors + r * every + channel, met, count, some);
                }
                for (int64_t r = 0; r < s->reps; r++)
                    memcpy(s->out + ((outer * s->groups + group) * s->reps + r) * s->inner + start, sums[r],
                           (size_t)some * sizeof(double));
            }
}

typedef struct {
    const void *x;        /* (outer, group * channel, inner) */
    const double *folded; /* (outer, group * rep, inner) */
    double *out;          /* (group, rep, channel): zeros at first */
    int64_t outer, groups, channels, inner, reps;
    int32_t wide;
    int64_t first, last; /* channels of a group that are done here */
} meeting;

INLINE void meet(meeting *s) {
    double tile[1][COLUMNS];
    for (int64_t outer = 0; outer < s->outer; outer++)
        for (int64_t group = 0; group < s->groups; group++)
            for (int64_t start = 0; start < s->inner; start += COLUMNS) {
                const int64_t some = s->inner - start < COLUMNS ? s->inner - start : COLUMNS;
                for (int64_t c = s->first; c < s->last; c++) {
                    const int64_t place = ((outer * s->groups + group) * s->channels + c) * s->inner + start;
                    widened(tile, s->x, place, 0, 1, some, s->wide);
                    const double *restrict x = tile[0];
                    double *out = s->out + group * s->reps * s->channels + c;
                    for (int64_t r = 0; r < s->reps; r += 5) { /* five sums at a time: none waits for the one before */
                        const double *restrict f =
                            s->folded + ((outer * s->groups + group) * s->reps + r) * s->inner + start;
                        const int64_t n = s->inner, count = s->reps - r;
                        const double *restrict f1 = f + (count > 1) * n, *restrict f2 = f + (count > 2) * 2 * n;
                        const double *restrict f3 = f + (count > 3) * 3 * n, *restrict f4 = f + (count > 4) * 4 * n;
                        double a = 0.0, b = 0.0, d = 0.0, e = 0.0, g = 0.0;
#pragma omp simd reduction(+ : a, b, d, e, g)
                        for (int64_t i = 0; i < some; i++) {
                            a += x[i] * f[i];
                            b += x[i] * f1[i];
                            d += x[i] * f2[i];
                            e += x[i] * f3[i];
                            g += x[i] * f4[i];
                        }
                        const double found[5] = {a, b, d, e, g};
                        for (int64_t k = 0; k < 5 && k < count; k++) out[(r + k) * s->channels] += found[k];
                    }
                }
            }
}

/* --- once for any processor, once for AVX2, once for AVX-512 -------------------------------------------------------- */
#define EVERY(apply, more)                                                                                            \
    apply(encode, masking, more) apply(decode, unmasking, more) apply(compare, parity, more)                          \
        apply(squares, measure, more) apply(gaussian, drawing, more) apply(fold, folding, more)                       \
        apply(meet, meeting, more)
#define PLAIN(name, kind, _) static void name##_plain(kind *s) { name(s); }
#define AVX2(name, kind, _) __attribute__((target("avx2"))) static void name##_avx2(kind *s) { name(s); }
#define AVX512(name, kind, _)                                                                                         \
    __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) static void name##_avx512(  \
        kind *s) {                                                                                                    \
        name(s);                                                                                                      \
    }
#define HELD(name, kind, _) static void (*chosen_##name)(kind *) = name##_plain;
#define CHOSEN(name, kind, variant) chosen_##name = name##_##variant;

EVERY(PLAIN, )
#if defined(__x86_64__)
EVERY(AVX2, )
EVERY(AVX512, )
#endif
EVERY(HELD, )

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        EVERY(CHOSEN, avx2)
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        EVERY(CHOSEN, avx512)
    }
#endif
}

/* The number in the names is that of this interface, so that a library with another one is not mistaken for this. The
 * others of each are for tests: without vector instructions of this processor, and with those of AVX2. */
#define SHOWN(name, kind, _)                                                                                          \
    void darknight_real_##name##_2(kind *s) { chosen_##name(s); }                                                     \
    void darknight_real_##name##_plain_2(kind *s) { name##_plain(s); }
#define SHOWN_AVX2(name, kind, _)                                                                                     \
    void darknight_real_##name##_avx2_2(kind *s) { name##_avx2(s); }
EVERY(SHOWN, )
#if defined(__x86_64__)
EVERY(SHOWN_AVX2, )
#endif
