/* Unmasking and the weighed sums of its check in one pass: what field.c's combine gives as floats, and what residues.c's
 * weigh would make of the integers, which are never written.
 *
 * A tile is a few channels of a few positions, of one group. Its answers are read once, each of its results is made in
 * the first cache or in registers, converted, written, and added to the sums of its example. Sums are exact, and reduced as often as the
 * caller says, so neither order nor vector width changes a bit. Nothing is checked here: compiled_unmasking.py does that.
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
    int64_t alone[ANSWERS]; /* by source: the one result that it is in, less another; or -1 */
    int32_t fetched[ANSWERS][TILE], made[RESULTS][TILE];
    double sums[RESULTS][2][POSITIONS];           /* over channels, since the last reduction */
    double total[RESULTS][MODULI][2][POSITIONS];  /* over channels */
    double whole[MODULI][2][POSITIONS];           /* over rows */
} bench;

/* What is where: `some` channels from `channel` on, `width` positions from `start` on, a run for each channel. */
typedef struct {
    int64_t group, line, channel, some, start, width;
} tile_of;

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

#if defined(__x86_64__)
/* The same for x - y, straight from where the answer x is, which is read once; floats go to runs that are so far apart.
 * Whether x has numbers that are no residues: then the integers are zeros. */
WIDE static int wide_runs(int32_t *made, float *to, int64_t apart, const unmasking *s, const int32_t *x, const int32_t *y,
                          const field *f, const tile_of *t, int past) {
    finish end = {s->scale, -0.0f, 1.0f, -0.0f, s->limited ? s->low : -INFINITY, s->limited ? s->high : INFINITY};
    __m512i most = _mm512_setzero_si512();
    for (int64_t c = 0; c < t->some; c++) {
        if (s->bias) end.bias = s->bias[t->channel + c];
        if (s->factor) end.factor = s->factor[t->channel + c], end.shift = s->shift[t->channel + c];
        most = wide_unmask(to + c * apart, made + c * t->width, x + c * s->positions, y + c * t->width, t->width, f, &end,
                           t->some * s->positions, past, most);
    }
    if (_mm512_reduce_max_epu32(most) < (uint32_t)s->what.prime) return 0;
    memset(made, 0, (size_t)(t->some * t->width) * sizeof *made);
    return 1;
}
#endif

/* Unmasks a tile and writes it as floats; its integers stay in made. */
INLINE void unmask_tile(const unmasking *s, const field *f, const recipe *how, const tile_of *t, int64_t results, int past,
                        int wide, bench *b) {
    const int64_t n = t->some * t->width, line = s->channels * s->positions;
    const int64_t place = t->line * line + t->channel * s->positions + t->start;
    const int32_t *here[ANSWERS], *there[ANSWERS];
    const int direct = wide && t->width >= 2 * LINE;
    float converted[TILE];
    for (int64_t i = 0; i < s->what.sources; i++) {
        there[i] = s->sources[i] + t->group * s->source_strides[i] + place;
        here[i] = b->fetched[i];
        if (direct && b->alone[i] >= 0 && b->alone[i] < results) continue;
        s->outside[i] |= fetch_runs(b->fetched[i], there[i], s, t, past, wide);
    }
    for (int64_t k = 0; k < results; k++) {
        float *to = s->floats + (t->group * s->what.rows + k) * s->lines * line + place;
#if defined(__x86_64__)
        const int64_t x = how[k].first, y = how[k].last;
        if (direct && b->alone[x] == k) {
            const int whole = !past || (s->positions % LINE == 0 && before_a_line(to, 1) == 0);
            s->outside[x] |= wide_runs(b->made[k], whole ? to : converted, whole ? s->positions : t->width, s, there[x],
                                       here[y], f, t, whole && past);
            if (whole) continue;
        } else
#endif
            make_runs(b->made[k], converted, s, how + k, here, f, t);
        if (t->width == s->positions)
            put_tile(to, converted, n, past, wide);
        else
            for (int64_t c = 0; c < t->some; c++)
                put_tile(to + c * s->positions, converted + c * t->width, t->width, past, wide);
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
    const int single = s->channels <= s->longest;
    int64_t since = 0; /* channels in sums */
    int reduced = 0;
    for (t.channel = 0; t.channel < s->channels; t.channel += t.some) {
        const int64_t left = s->channels - t.channel, room = s->longest - since;
        t.some = left < step ? left : step;
        t.some = t.some < room ? t.some : room;
        unmask_tile(s, f, how, &t, results, past, wide, b);
        weigh_tile(s, &t, results, twice, since == 0, b);
        since += t.some;
        if (single || (since < s->longest && t.channel + t.some < s->channels)) continue;
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

/* How many positions a tile has: all of them, or about equal parts that are whole vectors. */
INLINE int64_t part_of(int64_t positions) {
    const int64_t parts = (positions + POSITIONS - 1) / POSITIONS, width = (positions + parts - 1) / parts;
    return parts == 1 ? positions : (width + 15) / 16 * 16;
}

/* Which result is all that a source is for, less another source: then it need not be fetched. */
INLINE int64_t alone_in(const unmasking *s, const recipe *how, int64_t source) {
    int64_t found = -1, uses = 0;
    for (int64_t k = 0; k < s->what.rows; k++) {
        if (!how[k].c[source]) continue;
        uses++;
        if (how[k].kind == OF_TWO && how[k].first == source && how[k].c[how[k].last] < 0) found = k;
    }
    return uses == 1 ? found : -1;
}

INLINE void unmask(const unmasking *s, int twice, int wide) {
    bench b;
    const field f = field_of(&s->what);
    recipe how[RESULTS];
    for (int64_t k = 0; k < s->what.rows; k++) how[k] = recipe_of(&s->what, k);
    for (int64_t i = 0; i < s->what.sources; i++) b.alone[i] = alone_in(s, how, i);
    const int past = many(s->examples * s->lines * s->channels * s->positions);
    const int64_t part = part_of(s->positions);
    const int64_t most = TILE / part, step = part < s->positions ? TOGETHER : most < TOGETHER ? most : most / 4 * 4;
    for (int64_t start = 0; start < s->positions; start += part) {
        const int64_t left = s->positions - start, width = left < part ? left : part;
        int64_t rows = 0;
        memset(b.whole, 0, sizeof b.whole);
        for (int64_t group = 0; group < s->groups; group++) {
            const int64_t there = s->examples - group * s->what.rows;
            for (int64_t line = 0; line < s->lines; line++) {
                const tile_of t = {group, line, 0, 0, start, width};
                unmask_line(s, &f, how, t, there < s->what.rows ? there : s->what.rows, step, twice, past, wide,
                            &rows, &b);
            }
        }
        for (int64_t m = 0; m < s->moduli; m++)
            for (int r = 0; r <= twice; r++)
                store(b.whole[m][r], width, s->primes[m], s->out + (m * s->reps + r) * s->positions + start);
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
