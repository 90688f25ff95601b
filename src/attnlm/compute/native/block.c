/* A transformer block, x + attention(norm(x)) and then x + mlp(norm(x)), forward and backward, by a team
   of threads. Its reference implementation is Block in model/language_model.py. model/ops/block.py
   allocates the memory.

   Axes: B windows, T tokens, C width, H heads, K key and value heads, D head size, F hidden units, R = B·T
   rows, N = (H + 2K)·D features of queries, keys and values. The backward pass adds to the gradients of
   weights. Sums do not depend on the number of threads. */

#include "simd.h"

#include "arena.h"
#include "layout.h"
#include "thread_team.h"
#include "attention.h"
#include "matmul.h"
#include "pointwise.h"

#define CHUNK 64 /* rows whose gradients of query and key gains are summed together */

/* Weights in the layout of nn.Linear, (outputs, inputs), or their gradients. NULL if absent. */
struct weights {
    float *attention_gain, *attention_shift, *mlp_gain, *mlp_shift; /* (C) */
    float *query_gain, *key_gain;                                   /* (D) */
    float *query, *key, *value, *projection, *gate, *up, *down;
    float *query_bias, *key_bias, *value_bias, *projection_bias, *gate_bias, *up_bias, *down_bias;
};

struct pass {
    int64_t windows, length, width, heads, kv_heads, size, hidden, norm, mlp;
    float epsilon, qk_epsilon;
    struct weights weights, gradients;
    const float *cosines, *sines;               /* (T, D), or NULL */
    const float *attention_factors, *mlp_factors; /* of dropout, (R, C), or NULL */
    const float *x;                             /* (R, C) */
    float *out;                                 /* (R, C) */
    float *saved, *scratch;
    const float *d_out; /* (R, C) */
    float *d_x;
};

/* Activations that the forward pass saves for the backward pass. */
struct saved {
    float *attention_mean, *attention_inverse, *mlp_mean, *mlp_inverse; /* (R) */
    float *attention_input, *mlp_input, *after_attention, *mixed; /* (R, C), but `mixed` (R, H·D) */
    float *packed, *rotated, *head_inverses;                      /* (R, N), (R, (H + K)·D), (R, H + K) */
    float *log_sums;                                              /* (B, H, T) */
    float *up, *hidden; /* (R, F or 2F), derivatives of the activation; (R, F) */
};

/* A linear layer: y (R, outputs) = x (R, inputs) Wᵀ + b. Absent matrices and biases are NULL. */
struct map {
    int64_t inputs, outputs;
    const float *weight, *bias;
    float *d_weight, *d_bias;
};

struct maps {
    struct map query, key, value, projection, gate, up, down;
};

/* Scratch memory of a pass. */
struct buffers {
    float *first, *second, *third; /* (R, C) */
    float *d_up, *d_hidden;        /* (R, F or 2F), (R, F) */
    float *d_packed, *d_rotated;   /* (R, N), (R, (H + K)·D) */
    float *d_mixed;                /* (R, H·D) */
    float *d_gains;                /* (chunks, 2, D) */
    float *attention;              /* per member */
    float *matmul;                 /* per member */
};

struct job {
    const struct pass *pass;
    struct maps maps;
    struct saved saved;
    struct buffers buffers;
};

static int64_t num_rows(const struct pass *p) { return p->windows * p->length; }
static int64_t packed_width(const struct pass *p) { return (p->heads + 2 * p->kv_heads) * p->size; }
static int64_t rotated_width(const struct pass *p) { return (p->heads + p->kv_heads) * p->size; }
static int64_t up_width(const struct pass *p) { return p->mlp == SWIGLU ? 2 * p->hidden : p->hidden; }
static int64_t num_chunks(const struct pass *p) { return (num_rows(p) + CHUNK - 1) / CHUNK; }
static int has_qk_norm_rope(const struct pass *p) { return p->weights.query_gain || p->cosines; }

static void assign_saved(const struct pass *p, struct arena *arena, struct saved *saved)
{
    const int64_t rows = num_rows(p), width = p->width;
    saved->attention_mean = take(arena, rows);
    saved->attention_inverse = take(arena, rows);
    saved->mlp_mean = take(arena, rows);
    saved->mlp_inverse = take(arena, rows);
    saved->attention_input = take(arena, rows * width);
    saved->mlp_input = take(arena, rows * width);
    saved->after_attention = take(arena, rows * width);
    saved->mixed = take(arena, rows * p->heads * p->size);
    saved->packed = take(arena, rows * packed_width(p));
    if (has_qk_norm_rope(p)) {
        saved->rotated = take(arena, rows * rotated_width(p));
        saved->head_inverses = take(arena, rows * (p->heads + p->kv_heads));
    }
    saved->log_sums = take(arena, rows * p->heads);
    saved->up = take(arena, rows * up_width(p));
    saved->hidden = take(arena, rows * p->hidden);
}

static void assign_scratch(const struct pass *p, int64_t members, struct arena *arena,
                           struct buffers *buffers)
{
    const int64_t rows = num_rows(p), width = p->width;
    buffers->first = take(arena, rows * width);
    if (p->d_out) {
        buffers->second = take(arena, rows * width);
        buffers->third = take(arena, rows * width);
        buffers->d_up = take(arena, rows * up_width(p));
        buffers->d_hidden = take(arena, rows * p->hidden);
        buffers->d_packed = take(arena, rows * packed_width(p));
        buffers->d_rotated = take(arena, rows * rotated_width(p));
        buffers->d_mixed = take(arena, rows * p->heads * p->size);
        buffers->d_gains = take(arena, num_chunks(p) * 2 * p->size);
    }
    buffers->attention = take(arena, members * attention_scratch(p->length, p->size));
    buffers->matmul = take(arena, members * MATMUL_SCRATCH);
}

/* Return the number of floats of `saved`. */
int64_t block_saved(const struct pass *p)
{
    struct arena arena = {0};
    struct saved saved;
    assign_saved(p, &arena, &saved);
    return arena.used;
}

/* Return the number of floats of `scratch`. */
int64_t block_scratch(int64_t members, const struct pass *p)
{
    struct arena arena = {0};
    struct buffers buffers;
    assign_scratch(p, members, &arena, &buffers);
    return arena.used;
}

/* --- Norms ------------------------------------------------------------------------------------- */

static void norm_row(const struct pass *p, const float *x, const float *gain, const float *shift,
                     float *mean, float *inverse, float *out)
{
    const int64_t width = p->width;
    if (p->norm == NO_NORM) {
        memcpy(out, x, width * sizeof(float));
        return;
    }
    if (p->norm == RMS_NORM) {
        *mean = 0;
        rms_norm(1, width, p->epsilon, x, gain, out, inverse);
        return;
    }
    vector sum = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += LANES)
        sum += load_partial(x + i, width - i);
    *mean = sum_lanes(sum) / width;
    for (int64_t i = 0; i < width; i += LANES) {
        vector centred = load_partial(x + i, width - i) - *mean;
        if (width - i < LANES)
            centred = blend(mask_before(i, width), centred, (vector){0});
        squares += centred * centred;
    }
    *inverse = 1 / sqrtf(sum_lanes(squares) / width + p->epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        vector y =
            (load_partial(x + i, width - i) - *mean) * *inverse * load_partial(gain + i, width - i);
        if (shift)
            y += load_partial(shift + i, width - i);
        store_partial(out + i, y, width - i);
    }
}

/* Compute d_x = d_more + the gradient of the norm's input. */
static void norm_row_backward(const struct pass *p, const float *x, const float *gain, float mean,
                              float inverse, const float *grad, const float *d_more, float *d_x)
{
    const int64_t width = p->width;
    vector sum = {0}, dot = {0};
    if (p->norm != NO_NORM)
        for (int64_t i = 0; i < width; i += LANES) {
            const vector d = load_partial(grad + i, width - i) * load_partial(gain + i, width - i);
            sum += d;
            dot += d * (load_partial(x + i, width - i) - mean);
        }
    const float coefficient = sum_lanes(dot) / width * inverse * inverse;
    const float mean_grad = p->norm == LAYER_NORM ? sum_lanes(sum) / width : 0;
    for (int64_t i = 0; i < width; i += LANES) {
        vector d = load_partial(grad + i, width - i);
        if (p->norm != NO_NORM) {
            const vector centred = load_partial(x + i, width - i) - mean;
            d = (d * load_partial(gain + i, width - i) - mean_grad - centred * coefficient) * inverse;
        }
        store_partial(d_x + i, load_partial(d_more + i, width - i) + d, width - i);
    }
}

/* Add to the gradients of gains and shifts, if any, for a member's range of columns. */
static void gains_backward(struct member self, const struct pass *p, const float *x, const float *mean,
                           const float *inverse, const float *grad, float *d_gain, float *d_shift)
{
    if (!d_gain)
        return;
    struct range own = own_range(self, round_up(p->width) / LANES);
    for (int64_t i = own.begin * LANES; i < own.end * LANES; i += LANES) {
        const int64_t left = p->width - i;
        vector gain = load_partial(d_gain + i, left), shift = {0};
        for (int64_t r = 0; r < num_rows(p); r++) {
            const vector d = load_partial(grad + r * p->width + i, left);
            gain += d * (load_partial(x + r * p->width + i, left) - mean[r]) * inverse[r];
            shift += d;
        }
        store_partial(d_gain + i, gain, left);
        if (d_shift)
            store_partial(d_shift + i, load_partial(d_shift + i, left) + shift, left);
    }
}

/* --- Linear layers ------------------------------------------------------------------------------ */

/* Compute y = x Wᵀ + b. Rows of y are `stride` apart. */
static void linear(struct member self, const struct job *job, const struct map *map, const float *x,
                   float *y, int64_t stride)
{
    matmul(self, num_rows(job->pass), map->outputs, map->inputs, (struct matrix){x, map->inputs, 1},
           (struct matrix){map->weight, 1, map->inputs}, y, stride, map->bias, 0,
           job->buffers.matmul + self.number * MATMUL_SCRATCH);
}

/* Compute d_x = d_y W, or += with `add`. Add to the gradients of weights and bias. Rows of d_y are
   `stride` apart. */
static void linear_backward(struct member self, const struct job *job, const struct map *map,
                            const float *x, const float *d_y, int64_t stride, float *d_x, int add)
{
    const int64_t rows = num_rows(job->pass), inputs = map->inputs, outputs = map->outputs;
    float *scratch = job->buffers.matmul + self.number * MATMUL_SCRATCH;
    matmul(self, rows, inputs, outputs, (struct matrix){d_y, stride, 1},
           (struct matrix){map->weight, inputs, 1}, d_x, inputs, NULL, add, scratch);
    matmul(self, outputs, inputs, rows, (struct matrix){d_y, 1, stride},
           (struct matrix){x, inputs, 1}, map->d_weight, inputs, NULL, 1, scratch);
    if (!map->d_bias)
        return;
    struct range own = own_range(self, round_up(outputs) / LANES);
    for (int64_t i = own.begin * LANES; i < own.end * LANES; i += LANES) {
        vector sum = load_partial(map->d_bias + i, outputs - i);
        for (int64_t r = 0; r < rows; r++)
            sum += load_partial(d_y + r * stride + i, outputs - i);
        store_partial(map->d_bias + i, sum, outputs - i);
    }
}

/* --- Attention ---------------------------------------------------------------------------------- */

/* Return the queries of a row or, with `is_key`, its keys, to be normalised and rotated. */
static struct qk row_heads(const struct job *job, int64_t row, int is_key)
{
    const struct pass *p = job->pass;
    const struct saved *saved = &job->saved;
    const struct buffers *buffers = &job->buffers;
    const int64_t first = is_key ? p->heads : 0, offset = first * p->size;
    const int64_t angles = row % p->length * p->size;
    struct qk qk = {
        .windows = 1,
        .length = 1,
        .heads = is_key ? p->kv_heads : p->heads,
        .size = p->size,
        .epsilon = p->qk_epsilon,
        .x = saved->packed + row * packed_width(p) + offset,
        .gain = is_key ? p->weights.key_gain : p->weights.query_gain,
        .cosines = p->cosines ? p->cosines + angles : NULL,
        .sines = p->cosines ? p->sines + angles : NULL,
        .inverse = saved->head_inverses + row * (p->heads + p->kv_heads) + first,
        .out = saved->rotated + row * rotated_width(p) + offset,
    };
    if (p->d_out) {
        qk.grad = buffers->d_rotated + row * rotated_width(p) + offset;
        qk.d_x = buffers->d_packed + row * packed_width(p) + offset;
        qk.d_gain = buffers->d_gains + (2 * (row / CHUNK) + is_key) * p->size;
    }
    return qk;
}

static void norm_rotate(const struct job *job, struct range rows)
{
    for (int64_t r = rows.begin; r < rows.end; r++)
        for (int is_key = 0; is_key < 2; is_key++) {
            const struct qk qk = row_heads(job, r, is_key);
            qk_norm_rope(&qk);
        }
}

/* Write the gradients of queries and keys to d_packed, and the gradients of gains to d_gains. */
static void norm_rotate_backward(struct member self, const struct job *job)
{
    const struct pass *p = job->pass;
    struct range own = own_range(self, num_chunks(p));
    for (int64_t chunk = own.begin; chunk < own.end; chunk++) {
        memset(job->buffers.d_gains + chunk * 2 * p->size, 0, 2 * p->size * sizeof(float));
        const int64_t end = smaller(num_rows(p), (chunk + 1) * CHUNK);
        for (int64_t r = chunk * CHUNK; r < end; r++)
            for (int is_key = 0; is_key < 2; is_key++) {
                const struct qk qk = row_heads(job, r, is_key);
                qk_norm_rope_backward(&qk);
            }
    }
}

/* Add the sums of all chunks to the gradients of query and key gains. */
static void add_gains(const struct pass *p, const struct buffers *buffers)
{
    const struct weights *d = &p->gradients;
    for (int64_t chunk = 0; chunk < num_chunks(p); chunk++) {
        const float *gains = buffers->d_gains + chunk * 2 * p->size;
        for (int64_t i = 0; i < p->size; i++) {
            d->query_gain[i] += gains[i];
            d->key_gain[i] += gains[p->size + i];
        }
    }
}

static struct heads head_view(const struct pass *p, float *data, int64_t token)
{
    return (struct heads){data, p->length * token, p->size, token};
}

static void attend_heads(struct member self, const struct job *job)
{
    const struct pass *p = job->pass;
    const struct saved *saved = &job->saved;
    const struct buffers *buffers = &job->buffers;
    const int64_t heads = p->heads * p->size, kv = p->kv_heads * p->size;
    const int has_copy = has_qk_norm_rope(p);
    const int64_t packed = packed_width(p), stride = has_copy ? rotated_width(p) : packed;
    float *from = has_copy ? saved->rotated : saved->packed;
    float *d_from = has_copy ? buffers->d_rotated : buffers->d_packed;
    struct attention attention = {
        .windows = p->windows,
        .heads = p->heads,
        .kv_heads = p->kv_heads,
        .length = p->length,
        .size = p->size,
        .scale = 1 / sqrtf((float)p->size),
        .query = head_view(p, from, stride),
        .key = head_view(p, from + heads, stride),
        .value = head_view(p, saved->packed + heads + kv, packed),
        .out = head_view(p, saved->mixed, heads),
        .log_sums = saved->log_sums,
        .scratch = buffers->attention,
    };
    if (p->d_out) {
        attention.d_query = head_view(p, d_from, stride);
        attention.d_key = head_view(p, d_from + heads, stride);
        attention.d_value = head_view(p, buffers->d_packed + heads + kv, packed);
        attention.d_out = head_view(p, buffers->d_mixed, heads);
    }
    attend_groups(self, &attention);
}

/* --- The block ---------------------------------------------------------------------------------- */

/* Compute out = x + factors · y for some rows; `factors` may be NULL for 1. */
static void add_rows(const struct pass *p, struct range rows, const float *x, const float *factors,
                     const float *y, float *out)
{
    for (int64_t i = rows.begin * p->width; i < rows.end * p->width; i++)
        out[i] = x[i] + (factors ? factors[i] * y[i] : y[i]);
}

/* Compute the hidden units of some rows. Overwrite `up` with derivatives of the activation. */
static void activate(const struct pass *p, const struct saved *saved, struct range rows)
{
    const int64_t count = rows.end - rows.begin, width = p->hidden;
    float *up = saved->up + rows.begin * up_width(p), *hidden = saved->hidden + rows.begin * width;
    if (p->mlp == SWIGLU)
        swiglu_and_slopes(count, width, up, hidden);
    else if (p->mlp == GELU)
        gelu_and_slope(count * width, up, hidden);
    else
        for (int64_t i = 0; i < count * width; i++) {
            const float positive = up[i] > 0 ? up[i] : 0;
            hidden[i] = positive * positive;
            up[i] = 2 * positive;
        }
}

static void activate_backward(const struct pass *p, const struct saved *saved, const struct buffers *buffers,
                              struct range rows)
{
    const int64_t width = p->hidden, up = up_width(p);
    for (int64_t r = rows.begin; r < rows.end; r++)
        for (int64_t from = 0; from < up; from += width)
            for (int64_t i = 0; i < width; i++)
                buffers->d_up[r * up + from + i] =
                    saved->up[r * up + from + i] * buffers->d_hidden[r * width + i];
}

static void forward(struct member self, const void *argument)
{
    const struct job *job = argument;
    const struct pass *p = job->pass;
    const struct saved *saved = &job->saved;
    const struct buffers *buffers = &job->buffers;
    const struct weights *w = &p->weights;
    const struct maps *maps = &job->maps;
    const int64_t width = p->width, packed = packed_width(p), up = up_width(p);
    const int64_t heads = maps->query.outputs, kv = maps->key.outputs;
    struct range own = own_range(self, num_rows(p));
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row(p, p->x + r * width, w->attention_gain, w->attention_shift, saved->attention_mean + r,
                 saved->attention_inverse + r, saved->attention_input + r * width);
    barrier(self);
    linear(self, job, &maps->query, saved->attention_input, saved->packed, packed);
    linear(self, job, &maps->key, saved->attention_input, saved->packed + heads, packed);
    linear(self, job, &maps->value, saved->attention_input, saved->packed + heads + kv, packed);
    barrier(self);
    if (has_qk_norm_rope(p)) {
        norm_rotate(job, own);
        barrier(self);
    }
    attend_heads(self, job);
    barrier(self);
    linear(self, job, &maps->projection, saved->mixed, buffers->first, width);
    barrier(self);
    float *after_attention = p->mlp == NO_MLP ? p->out : saved->after_attention;
    add_rows(p, own, p->x, p->attention_factors, buffers->first, after_attention);
    if (p->mlp == NO_MLP)
        return;
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row(p, after_attention + r * width, w->mlp_gain, w->mlp_shift, saved->mlp_mean + r,
                 saved->mlp_inverse + r, saved->mlp_input + r * width);
    barrier(self);
    if (p->mlp == SWIGLU)
        linear(self, job, &maps->gate, saved->mlp_input, saved->up, up);
    linear(self, job, &maps->up, saved->mlp_input, saved->up + up - p->hidden, up);
    barrier(self);
    activate(p, saved, own);
    barrier(self);
    linear(self, job, &maps->down, saved->hidden, buffers->first, width);
    barrier(self);
    add_rows(p, own, after_attention, p->mlp_factors, buffers->first, p->out);
}

/* Return the gradient of dropout's input: d, or d · factors, written to `to`. */
static const float *before_dropout(struct member self, const struct pass *p, const float *factors,
                                   const float *d, float *to)
{
    if (!factors)
        return d;
    struct range own = own_range(self, num_rows(p));
    for (int64_t i = own.begin * p->width; i < own.end * p->width; i++)
        to[i] = factors[i] * d[i];
    barrier(self);
    return to;
}

static void backward(struct member self, const void *argument)
{
    const struct job *job = argument;
    const struct pass *p = job->pass;
    const struct saved *saved = &job->saved;
    const struct buffers *buffers = &job->buffers;
    const struct weights *w = &p->weights, *d = &p->gradients;
    const struct maps *maps = &job->maps;
    const int64_t width = p->width, packed = packed_width(p), up = up_width(p);
    const int64_t heads = maps->query.outputs, kv = maps->key.outputs;
    struct range own = own_range(self, num_rows(p));
    const float *d_after_attention = p->d_out;
    if (p->mlp != NO_MLP) {
        const float *grad = before_dropout(self, p, p->mlp_factors, p->d_out, buffers->first);
        linear_backward(self, job, &maps->down, saved->hidden, grad, width, buffers->d_hidden, 0);
        barrier(self);
        activate_backward(p, saved, buffers, own);
        barrier(self);
        float *d_input = buffers->second;
        if (p->mlp == SWIGLU)
            linear_backward(self, job, &maps->gate, saved->mlp_input, buffers->d_up, up, d_input, 0);
        linear_backward(self, job, &maps->up, saved->mlp_input, buffers->d_up + up - p->hidden, up, d_input,
                        p->mlp == SWIGLU);
        barrier(self);
        for (int64_t r = own.begin; r < own.end; r++)
            norm_row_backward(p, saved->after_attention + r * width, w->mlp_gain, saved->mlp_mean[r],
                              saved->mlp_inverse[r], d_input + r * width, p->d_out + r * width,
                              buffers->third + r * width);
        gains_backward(self, p, saved->after_attention, saved->mlp_mean, saved->mlp_inverse, d_input, d->mlp_gain,
                       d->mlp_shift);
        barrier(self);
        d_after_attention = buffers->third;
    }
    const float *grad = before_dropout(self, p, p->attention_factors, d_after_attention, buffers->first);
    linear_backward(self, job, &maps->projection, saved->mixed, grad, width, buffers->d_mixed, 0);
    barrier(self);
    attend_heads(self, job);
    barrier(self);
    if (has_qk_norm_rope(p)) {
        norm_rotate_backward(self, job);
        barrier(self);
        if (self.number == 0 && d->query_gain)
            add_gains(p, buffers);
    }
    float *d_input = buffers->second;
    const float *input = saved->attention_input;
    const float *d_packed = buffers->d_packed;
    linear_backward(self, job, &maps->query, input, d_packed, packed, d_input, 0);
    linear_backward(self, job, &maps->key, input, d_packed + heads, packed, d_input, 1);
    linear_backward(self, job, &maps->value, input, d_packed + heads + kv, packed, d_input, 1);
    barrier(self);
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row_backward(p, p->x + r * width, w->attention_gain, saved->attention_mean[r],
                          saved->attention_inverse[r], d_input + r * width, d_after_attention + r * width,
                          p->d_x + r * width);
    gains_backward(self, p, p->x, saved->attention_mean, saved->attention_inverse, d_input, d->attention_gain,
                   d->attention_shift);
}

static struct maps maps_of(const struct pass *p)
{
    const struct weights *w = &p->weights, *d = &p->gradients;
    const int64_t width = p->width, heads = p->heads * p->size, kv = p->kv_heads * p->size;
#define MAP(name, inputs, outputs) \
    .name = {inputs, outputs, w->name, w->name##_bias, d->name, d->name##_bias}
    return (struct maps){
        MAP(query, width, heads),
        MAP(key, width, kv),
        MAP(value, width, kv),
        MAP(projection, heads, width),
        MAP(gate, width, p->hidden),
        MAP(up, width, p->hidden),
        MAP(down, p->hidden, width),
    };
#undef MAP
}

/* Compute `out`, or the gradients if `d_out` is not NULL, by `members` threads. */
void run_block_pass(int64_t members, const struct pass *p)
{
    struct job job = {.pass = p, .maps = maps_of(p)};
    assign_saved(p, &(struct arena){.base = p->saved}, &job.saved);
    assign_scratch(p, members, &(struct arena){.base = p->scratch}, &job.buffers);
    run_team(members, p->d_out ? backward : forward, &job);
}

const struct layout block_layouts[] = {
#define WEIGHT(name) FIELD(weights, name),
    STRUCT(weights),
    WEIGHT(attention_gain) WEIGHT(attention_shift) WEIGHT(mlp_gain) WEIGHT(mlp_shift)
    WEIGHT(query_gain) WEIGHT(key_gain) WEIGHT(query) WEIGHT(key) WEIGHT(value) WEIGHT(projection)
    WEIGHT(gate) WEIGHT(up) WEIGHT(down) WEIGHT(query_bias) WEIGHT(key_bias) WEIGHT(value_bias)
    WEIGHT(projection_bias) WEIGHT(gate_bias) WEIGHT(up_bias) WEIGHT(down_bias)
    STRUCT(pass),
    FIELD(pass, windows), FIELD(pass, length), FIELD(pass, width), FIELD(pass, heads),
    FIELD(pass, kv_heads), FIELD(pass, size), FIELD(pass, hidden), FIELD(pass, norm), FIELD(pass, mlp),
    FIELD(pass, epsilon), FIELD(pass, qk_epsilon), FIELD(pass, weights), FIELD(pass, gradients),
    FIELD(pass, cosines), FIELD(pass, sines), FIELD(pass, attention_factors), FIELD(pass, mlp_factors),
    FIELD(pass, x), FIELD(pass, out), FIELD(pass, saved), FIELD(pass, scratch), FIELD(pass, d_out),
    FIELD(pass, d_x),
    {NULL, 0, 0},
};
