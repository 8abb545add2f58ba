/* Both sides of Freivalds' check, in one call: what residues.c sums, put together as integrity/freivalds.py says.
 *
 * For convolutions of planes, not in groups and with zeros around them, and for linear maps, which are such convolutions
 * of planes of one position. A layer has three checks, each of six to ten sums, and a wrapper for every one of these cost
 * several times what the smaller ones take. A part of residues.c.
 */
#ifndef DARKNIGHT_SIDES_H
#define DARKNIGHT_SIDES_H
#include <stdlib.h>

typedef struct {
    const int32_t *x; /* (row, channel, height, width), without gaps but between rows: x; of grad_input, delta */
    const float *values; /* instead of x: floats that are rounded, times the factor */
    double factor;
    int64_t rows, row_stride, channels, height, width;
    const int32_t *delta; /* grad_weight: (row, output, ended height, ended width), the same */
    int64_t delta_stride;
    int64_t outputs, inputs, tall, wide; /* of the weights (output, input, tall, wide) */
    const int32_t *weights;              /* not of grad_weight */
    int64_t step_down, step_across, hole_down, hole_across, zeros_above, zeros_left;
    const int32_t *sums; /* the result over channels and rows, (modulus, rep, ended height, ended width); of grad_weight
                            over output channels, (modulus, rep, input, tall, wide) */
    int64_t ended_height, ended_width; /* positions of the result; of grad_weight, of delta */
    const double *u, *v, *down, *across; /* (rep, channel), (rep, row or input), and one over each axis of positions or taps */
    int64_t reps, longest, often, along; /* numbers that can be weighed with u, v and these, between two reductions */
    const double *primes;
    int64_t moduli, at_once; /* at_once: rows of grad_weight that are looked at together */
} sides;

/* Sums of a result, (modulus, rep, channel, height, width), over all its axes: (modulus, rep). In the first of `sums`. */
static void over_result(const sides *s, int32_t *sums, int64_t channels, int64_t height, int64_t width, const double *first,
                        const double *second, const double *third, int64_t often) {
    const int64_t sizes[] = {channels, height, width}, counts[] = {often, s->along, s->along};
    const double *const vectors[] = {first, second, third};
    int64_t inner = channels * height * width;
    for (int axis = 0; axis < 3; axis++) {
        inner /= sizes[axis];
        if (!vectors[axis]) continue;
        /* In place: a sum is written where the first of its numbers was, or before, and those are read by then. */
        const folding f = {sums, s->moduli, s->reps, 1, sizes[axis], inner, vectors[axis], 1, counts[axis], s->primes, sums};
        chosen_fold(&f);
    }
}

/* At each tap the entries of the positions of the other end that it meets, for every position of this one: (rep, tap,
 * size). y position p meets x position p * step + tap * hole - zeros; forward: `entries` are of y, and size is x's. */
static void met_along(const double *entries, int64_t reps, int64_t length, int64_t taps, int64_t size, int64_t step,
                      int64_t hole, int64_t zeros, int forward, double *out) {
    memset(out, 0, (size_t)(reps * taps * size) * sizeof *out);
    for (int64_t rep = 0; rep < reps; rep++)
        for (int64_t tap = 0; tap < taps; tap++, out += size)
            for (int64_t p = 0; p < (forward ? length : size); p++) {
                const int64_t place = p * step + tap * hole - zeros;
                if (place < 0 || place >= (forward ? size : length)) continue;
                if (forward)
                    out[place] = entries[rep * length + p];
                else
                    out[p] = entries[rep * length + place];
            }
}

static int64_t unequal(const sides *s, const int32_t *found, const int32_t *expected) {
    int64_t differ = 0;
    for (int64_t m = 0; m < s->moduli; m++)
        for (int64_t rep = 0; rep < s->reps; rep++)
            if (found[m * s->reps + rep] != expected[m * s->reps + rep]) differ |= 1 << m;
    return differ;
}

/* Forward and grad_input: the weights summed over the result's channels, and the operand over rows and positions. */
static int64_t of_planes(const sides *s, int forward) {
    const int64_t taps = s->tall * s->wide, many = s->moduli * s->reps, sums = many * s->ended_height * s->ended_width;
    const int64_t side = many * s->channels * taps, downs = s->reps * s->tall * s->height;
    double *const positions = malloc((size_t)(downs + s->reps * s->wide * s->width) * sizeof(double));
    int32_t *const result = malloc((size_t)(sums + 3 * side + many) * sizeof(int32_t));
    int32_t *const left = result + sums, *const turned = left + side, *const right = turned + side, *const met = right + side;
    if (!positions || !result) {
        free(positions);
        free(result);
        return -1;
    }
    memcpy(result, s->sums, (size_t)sums * sizeof *result);
    over_result(s, result, 1, s->ended_height, s->ended_width, NULL, s->down, s->across, s->along);

    const int64_t outer = forward ? 1 : s->outputs, summed = forward ? s->outputs : s->inputs;
    const int64_t columns = forward ? s->inputs * taps : taps;
    const weighing w = {s->weights, NULL, 1.0, outer, s->inputs * taps, 1, summed, columns, columns, s->u, s->reps, outer,
                        s->longest, s->primes, s->moduli, NULL, 0, left};
    chosen_weigh(&w);
    if (!forward) { /* (modulus, output, rep, tap) -> (modulus, rep, output, tap) */
        for (int64_t m = 0; m < s->moduli; m++)
            for (int64_t o = 0; o < outer; o++)
                for (int64_t rep = 0; rep < s->reps; rep++)
                    memcpy(turned + ((m * s->reps + rep) * outer + o) * taps, left + ((m * outer + o) * s->reps + rep) * taps,
                           (size_t)taps * sizeof *turned);
    }
    if (s->height * s->width * s->ended_height * s->ended_width * taps == 1) { /* no positions at either end */
        const weighing rows = {s->x, s->values, s->factor, 1, 0, 1, s->rows, s->row_stride, s->channels, s->v, s->reps, 1,
                               s->often, s->primes, s->moduli, NULL, 0, right};
        chosen_weigh(&rows);
    } else {
        met_along(s->down, s->reps, s->ended_height, s->tall, s->height, s->step_down, s->hole_down, s->zeros_above, forward,
                  positions);
        met_along(s->across, s->reps, s->ended_width, s->wide, s->width, s->step_across, s->hole_across, s->zeros_left,
                  forward, positions + downs);
        const projecting p = {s->x, s->values, s->factor, s->rows, s->row_stride, s->channels, s->height, s->width, s->v,
                              s->reps, s->often, positions, positions + downs, s->tall, s->wide, s->along, s->primes,
                              s->moduli, right};
        chosen_project(&p);
    }
    const product both = {forward ? left : turned, right, s->moduli, 1, s->reps, s->channels * taps, s->primes, met};
    chosen_dot(&both);
    const int64_t differ = unequal(s, result, met);
    free(positions);
    free(result);
    return differ;
}

/* Grad_weight: both operands summed over channels, row by row, and taps slid over the first of them. */
static int64_t of_kernels(const sides *s) {
    const int64_t taps = s->tall * s->wide, many = s->moduli * s->reps, sums = many * s->inputs * taps;
    const int64_t plane = s->height * s->width, ended = s->ended_height * s->ended_width;
    const int64_t slid = s->ended_height * s->width, line = many * (plane + slid + 2 * ended);
    int32_t *const result = malloc((size_t)(sums + 2 * many + s->at_once * line) * sizeof(int32_t));
    if (!result) return -1;
    int32_t *const met = result + sums, *const part = met + many;
    int32_t *const left = part + many, *const lower = left + s->at_once * many * plane;
    int32_t *const lines = lower + s->at_once * many * slid, *const right = lines + s->at_once * many * ended;
    memcpy(result, s->sums, (size_t)sums * sizeof *result);
    over_result(s, result, s->inputs, s->tall, s->wide, s->v, s->down, s->across, s->often);
    memset(met, 0, (size_t)many * sizeof *met);
    for (int64_t first = 0; first < s->rows; first += s->at_once) {
        const int64_t rows = s->rows - first < s->at_once ? s->rows - first : s->at_once;
        const weighing of_x = {s->x ? s->x + first * s->row_stride : NULL, s->values ? s->values + first * s->row_stride : NULL,
                               s->factor, rows, s->row_stride, 1, s->inputs, plane, plane, s->v, s->reps, rows, s->often,
                               s->primes, s->moduli, NULL, 0, left};
        const weighing of_delta = {s->delta + first * s->delta_stride, NULL, 1.0, rows, s->delta_stride, 1, s->outputs, ended,
                                   ended, s->u, s->reps, rows, s->longest, s->primes, s->moduli, NULL, 0, right};
        chosen_weigh(&of_x);
        chosen_weigh(&of_delta);
        const sliding down = {left, s->moduli, rows, s->reps, 1, s->height, s->width, s->down, s->tall, s->step_down,
                              s->hole_down, s->zeros_above, s->ended_height, s->along, s->primes, lower};
        chosen_slide(&down);
        const sliding across = {lower, s->moduli, rows, s->reps, s->ended_height, s->width, 1, s->across, s->wide,
                                s->step_across, s->hole_across, s->zeros_left, s->ended_width, s->along, s->primes, lines};
        chosen_slide(&across);
        const product both = {lines, right, s->moduli, rows, s->reps, ended, s->primes, part};
        chosen_dot(&both);
        for (int64_t i = 0; i < many; i++) {
            const double prime = s->primes[i / s->reps];
            met[i] = residue((double)met[i] + (double)part[i], prime, 1.0 / prime);
        }
    }
    const int64_t differ = unequal(s, result, met);
    free(result);
    return differ;
}

/* Bit m of what is returned: the sides differ modulo prime m. Below zero: there was no memory. */
int64_t darknight_forward_sides_1(const sides *s) { return of_planes(s, 1); }
int64_t darknight_grad_input_sides_1(const sides *s) { return of_planes(s, 0); }
int64_t darknight_grad_weight_sides_1(const sides *s) { return of_kernels(s); }

#endif
