/* A training step's pass through one block of a transformer, x + attention(norm(x)) and then
   x + mlp(norm(x)), forward and backward, by a team of threads. Its reference implementation is Block in
   model/language_model.py; model/ops/block.py prepares the memory.

   Axes: B windows, T tokens, C width, H heads, K key and value heads, D head size, F hidden units, R = B·T
   rows, N = (H + 2K)·D features of queries, keys and values. The backward pass adds to the gradients of
   weights. Sums do not depend on the number of threads. */

#include "vectors.h"

#include "layout.h"
#include "team.h"
#include "attention.h"
#include "matmul.h"
#include "pointwise.h"

#define CHUNK 64 /* rows whose gradients of head gains are summed together */

/* Weights in the layout of nn.Linear, (outputs, inputs), or their gradients. NULL if absent. */
struct weights {
    float *attention_gain, *attention_shift, *mlp_gain, *mlp_shift; /* (C) */
    float *query_gain, *key_gain;                                   /* (D) */
    float *query, *key, *value, *projection, *gate, *up, *down;
    float *query_bias, *key_bias, *value_bias, *projection_bias, *gate_bias, *up_bias, *down_bias;
};

struct pass {
    int64_t windows, length, width, heads, kv_heads, size, hidden, norm, mlp;
    float epsilon, head_epsilon;
    struct weights weights, gradients;
    const float *cosines, *sines;               /* (T, D), or NULL */
    const float *attention_factors, *mlp_factors; /* of dropout, (R, C), or NULL */
    const float *x;                             /* (R, C) */
    float *out;                                 /* (R, C) */
    float *kept, *scratch;
    const float *d_out; /* (R, C) */
    float *d_x;
};

/* Results of the forward pass that the backward pass needs. */
struct kept {
    float *attention_middle, *attention_inverse, *mlp_middle, *mlp_inverse; /* (R) */
    float *attention_read, *mlp_read, *between, *mixed; /* (R, C), but `mixed` (R, H·D) */
    float *packed, *placed, *head_inverses;             /* (R, N), (R, (H + K)·D), (R, H + K) */
    float *log_sums;                                    /* (B, H, T) */
    float *up, *hidden; /* (R, F or 2F), the slopes of the activation; (R, F) */
};

/* Memory for one pass. */
struct room {
    float *first, *second, *third; /* (R, C) */
    float *d_up, *d_hidden;        /* (R, F or 2F), (R, F) */
    float *d_packed, *d_placed;    /* (R, N), (R, (H + K)·D) */
    float *d_mixed;                /* (R, H·D) */
    float *d_gains;                /* (chunks, 2, D) */
    float *attention;              /* of each member */
    float *matmul;                 /* of each member */
};

INLINE float *taken(float **from, int64_t count)
{
    float *here = *from;
    *from += filled(count);
    return here;
}

static int64_t rows_of(const struct pass *p) { return p->windows * p->length; }
static int64_t packed_of(const struct pass *p) { return (p->heads + 2 * p->kv_heads) * p->size; }
static int64_t placed_of(const struct pass *p) { return (p->heads + p->kv_heads) * p->size; }
static int64_t up_of(const struct pass *p) { return p->mlp == SWIGLU ? 2 * p->hidden : p->hidden; }
static int places(const struct pass *p) { return p->weights.query_gain || p->cosines; }

/* Divide memory, and return its end. */
static float *divide_kept(const struct pass *p, float *from, struct kept *k)
{
    const int64_t rows = rows_of(p), width = p->width, inside = p->heads * p->size;
    k->attention_middle = taken(&from, rows), k->attention_inverse = taken(&from, rows);
    k->mlp_middle = taken(&from, rows), k->mlp_inverse = taken(&from, rows);
    k->attention_read = taken(&from, rows * width), k->mlp_read = taken(&from, rows * width);
    k->between = taken(&from, rows * width), k->mixed = taken(&from, rows * inside);
    k->packed = taken(&from, rows * packed_of(p));
    k->placed = taken(&from, places(p) ? rows * placed_of(p) : 0);
    k->head_inverses = taken(&from, places(p) ? rows * (p->heads + p->kv_heads) : 0);
    k->log_sums = taken(&from, rows * p->heads);
    k->up = taken(&from, rows * up_of(p)), k->hidden = taken(&from, rows * p->hidden);
    return from;
}

static float *divide_room(const struct pass *p, int64_t members, float *from, struct room *r)
{
    const int64_t rows = rows_of(p), width = p->width, backward = p->d_out != NULL;
    r->first = taken(&from, rows * width);
    r->second = taken(&from, backward * rows * width), r->third = taken(&from, backward * rows * width);
    r->d_up = taken(&from, backward * rows * up_of(p));
    r->d_hidden = taken(&from, backward * rows * p->hidden);
    r->d_packed = taken(&from, backward * rows * packed_of(p));
    r->d_placed = taken(&from, backward * rows * placed_of(p));
    r->d_mixed = taken(&from, backward * rows * p->heads * p->size);
    r->d_gains = taken(&from, backward * (rows + CHUNK - 1) / CHUNK * 2 * p->size);
    r->attention = taken(&from, members * attention_scratch(p->length, p->size));
    r->matmul = taken(&from, members * MATMUL_SCRATCH);
    return from;
}

/* Return the numbers that `kept` and `scratch` need. */
int64_t block_kept(const struct pass *p)
{
    struct kept k;
    return divide_kept(p, (float *)0 + LANES, &k) - ((float *)0 + LANES);
}

int64_t block_scratch(int64_t members, const struct pass *p)
{
    struct room r;
    return divide_room(p, members, (float *)0 + LANES, &r) - ((float *)0 + LANES);
}

/* --- Norms ------------------------------------------------------------------------------------- */

static void norm_row(const struct pass *p, const float *x, const float *gain, const float *shift,
                     float *middle, float *inverse, float *out)
{
    const int64_t width = p->width;
    if (p->norm == NO_NORM) {
        memcpy(out, x, width * sizeof(float));
        return;
    }
    if (p->norm == RMS_NORM) {
        *middle = 0;
        rms_norm(1, width, p->epsilon, x, gain, out, inverse);
        return;
    }
    vector sum = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += LANES)
        sum += some_of(x + i, width - i);
    *middle = total(sum) / width;
    for (int64_t i = 0; i < width; i += LANES) {
        vector some = some_of(x + i, width - i) - *middle;
        if (width - i < LANES)
            some = either(before(i, width), some, (vector){0});
        squares += some * some;
    }
    *inverse = 1 / sqrtf(total(squares) / width + p->epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        vector y = (some_of(x + i, width - i) - *middle) * *inverse * some_of(gain + i, width - i);
        if (shift)
            y += some_of(shift + i, width - i);
        store_some(out + i, y, width - i);
    }
}

/* d_x = d_more + the gradient that comes through the norm. */
static void norm_row_backward(const struct pass *p, const float *x, const float *gain, float middle,
                              float inverse, const float *grad, const float *d_more, float *d_x)
{
    const int64_t width = p->width;
    vector sum = {0}, along = {0};
    for (int64_t i = 0; p->norm != NO_NORM && i < width; i += LANES) {
        const vector d = some_of(grad + i, width - i) * some_of(gain + i, width - i);
        sum += d;
        along += d * (some_of(x + i, width - i) - middle);
    }
    const float share = total(along) / width * inverse * inverse;
    const float mean = p->norm == LAYER_NORM ? total(sum) / width : 0;
    for (int64_t i = 0; i < width; i += LANES) {
        vector d = some_of(grad + i, width - i);
        if (p->norm != NO_NORM) {
            const vector a = some_of(x + i, width - i) - middle;
            d = (d * some_of(gain + i, width - i) - mean - a * share) * inverse;
        }
        store_some(d_x + i, some_of(d_more + i, width - i) + d, width - i);
    }
}

/* Add to the gradients of gains and shifts: a member computes some of the columns. */
static void gains_backward(struct member who, const struct pass *p, const float *x, const float *middle,
                           const float *inverse, const float *grad, float *d_gain, float *d_shift)
{
    struct range own = share(who, filled(p->width) / LANES);
    for (int64_t i = own.begin * LANES; d_gain && i < own.end * LANES; i += LANES) {
        const int64_t left = p->width - i;
        vector gain = some_of(d_gain + i, left), shift = {0};
        for (int64_t r = 0; r < rows_of(p); r++) {
            const vector d = some_of(grad + r * p->width + i, left);
            gain += d * (some_of(x + r * p->width + i, left) - middle[r]) * inverse[r];
            shift += d;
        }
        store_some(d_gain + i, gain, left);
        if (d_shift)
            store_some(d_shift + i, some_of(d_shift + i, left) + shift, left);
    }
}

/* --- Linear maps -------------------------------------------------------------------------------- */

/* y (R, outputs) = x (R, inputs) Wᵀ + b. Rows of y are `stride` apart. */
static void linear(struct member who, const struct room *room, int64_t rows, int64_t inputs,
                   int64_t outputs, const float *x, const float *weight, const float *bias, float *y,
                   int64_t stride)
{
    matmul(who, rows, outputs, inputs, (struct matrix){x, inputs, 1},
           (struct matrix){weight, 1, inputs}, y, stride, bias, 0,
           room->matmul + who.number * MATMUL_SCRATCH);
}

/* d_x = d_y W, or += with `add`; add d_yᵀ x to d_weight, and the sums of d_y to d_bias. */
static void linear_backward(struct member who, const struct room *room, int64_t rows, int64_t inputs,
                            int64_t outputs, const float *x, const float *weight, const float *d_y,
                            int64_t stride, float *d_x, int add, float *d_weight, float *d_bias)
{
    float *scratch = room->matmul + who.number * MATMUL_SCRATCH;
    matmul(who, rows, inputs, outputs, (struct matrix){d_y, stride, 1},
           (struct matrix){weight, inputs, 1}, d_x, inputs, NULL, add, scratch);
    matmul(who, outputs, inputs, rows, (struct matrix){d_y, 1, stride},
           (struct matrix){x, inputs, 1}, d_weight, inputs, NULL, 1, scratch);
    struct range own = share(who, filled(outputs) / LANES);
    for (int64_t i = own.begin * LANES; d_bias && i < own.end * LANES; i += LANES) {
        vector sum = some_of(d_bias + i, outputs - i);
        for (int64_t r = 0; r < rows; r++)
            sum += some_of(d_y + r * stride + i, outputs - i);
        store_some(d_bias + i, sum, outputs - i);
    }
}

/* --- Attention ---------------------------------------------------------------------------------- */

/* Normalise and rotate the queries and keys of some rows. */
static void place(const struct pass *p, const struct kept *k, struct range rows)
{
    const int64_t size = p->size, heads = p->heads, both = heads + p->kv_heads;
    for (int64_t r = rows.begin; r < rows.end; r++) {
        const float *from = k->packed + r * packed_of(p);
        float *to = k->placed + r * placed_of(p), *inverse = k->head_inverses + r * both;
        const int64_t at = r % p->length * size;
        const float *cosines = p->cosines ? p->cosines + at : NULL;
        const float *sines = p->cosines ? p->sines + at : NULL;
        place_heads(1, 1, heads, size, 0, p->head_epsilon, from, p->weights.query_gain, cosines, sines,
                    to, inverse);
        place_heads(1, 1, p->kv_heads, size, 0, p->head_epsilon, from + heads * size,
                    p->weights.key_gain, cosines, sines, to + heads * size, inverse + heads);
    }
}

/* Write the gradients of queries and keys to d_packed, and of the gains to d_gains. */
static void place_backward(struct member who, const struct pass *p, const struct kept *k,
                           const struct room *room)
{
    const int64_t size = p->size, heads = p->heads, both = heads + p->kv_heads, rows = rows_of(p);
    struct range own = share(who, (rows + CHUNK - 1) / CHUNK);
    for (int64_t chunk = own.begin; chunk < own.end; chunk++) {
        float *gains = room->d_gains + chunk * 2 * size;
        memset(gains, 0, 2 * size * sizeof(float));
        for (int64_t r = chunk * CHUNK; r < rows && r < (chunk + 1) * CHUNK; r++) {
            const float *from = k->packed + r * packed_of(p), *grad = room->d_placed + r * placed_of(p);
            const float *inverse = k->head_inverses + r * both;
            float *to = room->d_packed + r * packed_of(p);
            const int64_t at = r % p->length * size;
            const float *cosines = p->cosines ? p->cosines + at : NULL;
            const float *sines = p->cosines ? p->sines + at : NULL;
            place_heads_backward(1, 1, heads, size, 0, inverse, from, p->weights.query_gain, cosines,
                                 sines, grad, to, gains);
            place_heads_backward(1, 1, p->kv_heads, size, 0, inverse + heads, from + heads * size,
                                 p->weights.key_gain, cosines, sines, grad + heads * size,
                                 to + heads * size, gains + size);
        }
    }
}

struct places {
    struct heads query, key, value, out, d_query, d_key, d_value, d_out;
};

static struct heads lay(const struct pass *p, float *at, int64_t token)
{
    return (struct heads){at, p->length * token, p->size, token};
}

static void attend_all(struct member who, const struct pass *p, const struct kept *k,
                       const struct room *room)
{
    const int64_t heads = p->heads * p->size, kv = p->kv_heads * p->size;
    const int64_t packed = packed_of(p), placed = placed_of(p), apart = places(p) ? placed : packed;
    float *from = places(p) ? k->placed : k->packed, *d_from = places(p) ? room->d_placed : room->d_packed;
    struct places at = {.query = lay(p, from, apart), .key = lay(p, from + heads, apart),
                        .value = lay(p, k->packed + heads + kv, packed),
                        .out = lay(p, k->mixed, heads)};
    struct attention about = {p->windows, p->heads, p->kv_heads, p->length, p->size,
                              1 / sqrtf((float)p->size), &at.query, &at.key, &at.value, &at.out,
                              k->log_sums, .scratch = room->attention};
    if (p->d_out) {
        at.d_query = lay(p, d_from, apart), at.d_key = lay(p, d_from + heads, apart);
        at.d_value = lay(p, room->d_packed + heads + kv, packed);
        at.d_out = lay(p, room->d_mixed, heads);
        about.d_query = &at.d_query, about.d_key = &at.d_key, about.d_value = &at.d_value;
        about.d_out = &at.d_out;
    }
    attend_pieces(who, &about);
}

/* --- The block ---------------------------------------------------------------------------------- */

/* out = x + factors · y, for some rows; without `factors`, they are 1. */
static void add_rows(const struct pass *p, struct range rows, const float *x, const float *factors,
                     const float *y, float *out)
{
    for (int64_t i = rows.begin * p->width; i < rows.end * p->width; i++)
        out[i] = x[i] + (factors ? factors[i] * y[i] : y[i]);
}

/* Compute the hidden units of some rows. The slopes of the activation replace its input. */
static void activate(const struct pass *p, const struct kept *k, struct range rows)
{
    const int64_t count = rows.end - rows.begin, width = p->hidden;
    float *up = k->up + rows.begin * up_of(p), *hidden = k->hidden + rows.begin * width;
    if (p->mlp == SWIGLU)
        swiglu_and_slopes(count, width, up, hidden);
    else if (p->mlp == GELU)
        gelu_and_slope(count * width, up, hidden);
    else
        for (int64_t i = 0; i < count * width; i++) {
            const float positive = up[i] > 0 ? up[i] : 0;
            hidden[i] = positive * positive, up[i] = 2 * positive;
        }
}

static void activate_backward(const struct pass *p, const struct kept *k, const struct room *room,
                              struct range rows)
{
    const int64_t width = p->hidden, up = up_of(p);
    for (int64_t r = rows.begin; r < rows.end; r++)
        for (int64_t from = 0; from < up; from += width)
            for (int64_t i = 0; i < width; i++)
                room->d_up[r * up + from + i] = k->up[r * up + from + i] * room->d_hidden[r * width + i];
}

struct work {
    const struct pass *pass;
    struct kept kept;
    struct room room;
};

static void go_forward(struct member who, const void *given)
{
    const struct work *work = given;
    const struct pass *p = work->pass;
    const struct kept *k = &work->kept;
    const struct room *room = &work->room;
    const struct weights *w = &p->weights;
    const int64_t rows = rows_of(p), width = p->width, packed = packed_of(p);
    const int64_t heads = p->heads * p->size, kv = p->kv_heads * p->size;
    struct range own = share(who, rows);
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row(p, p->x + r * width, w->attention_gain, w->attention_shift, k->attention_middle + r,
                 k->attention_inverse + r, k->attention_read + r * width);
    barrier(who);
    linear(who, room, rows, width, heads, k->attention_read, w->query, w->query_bias, k->packed, packed);
    linear(who, room, rows, width, kv, k->attention_read, w->key, w->key_bias, k->packed + heads, packed);
    linear(who, room, rows, width, kv, k->attention_read, w->value, w->value_bias,
           k->packed + heads + kv, packed);
    barrier(who);
    if (places(p)) {
        place(p, k, own);
        barrier(who);
    }
    attend_all(who, p, k, room);
    barrier(who);
    linear(who, room, rows, heads, width, k->mixed, w->projection, w->projection_bias, room->first, width);
    barrier(who);
    float *between = p->mlp == NO_MLP ? p->out : k->between;
    add_rows(p, own, p->x, p->attention_factors, room->first, between);
    if (p->mlp == NO_MLP)
        return;
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row(p, between + r * width, w->mlp_gain, w->mlp_shift, k->mlp_middle + r,
                 k->mlp_inverse + r, k->mlp_read + r * width);
    barrier(who);
    const int64_t hidden = p->hidden, up = up_of(p);
    if (p->mlp == SWIGLU)
        linear(who, room, rows, width, hidden, k->mlp_read, w->gate, w->gate_bias, k->up, up);
    linear(who, room, rows, width, hidden, k->mlp_read, w->up, w->up_bias, k->up + up - hidden, up);
    barrier(who);
    activate(p, k, own);
    barrier(who);
    linear(who, room, rows, hidden, width, k->hidden, w->down, w->down_bias, room->first, width);
    barrier(who);
    add_rows(p, own, between, p->mlp_factors, room->first, p->out);
}

/* Return the gradient before dropout: d, or d times the factors, written to `to`. */
static const float *before_dropout(struct member who, const struct pass *p, const float *factors,
                                   const float *d, float *to)
{
    struct range own = share(who, rows_of(p));
    for (int64_t i = own.begin * p->width; factors && i < own.end * p->width; i++)
        to[i] = factors[i] * d[i];
    if (factors)
        barrier(who);
    return factors ? to : d;
}

static void go_backward(struct member who, const void *given)
{
    const struct work *work = given;
    const struct pass *p = work->pass;
    const struct kept *k = &work->kept;
    const struct room *room = &work->room;
    const struct weights *w = &p->weights, *d = &p->gradients;
    const int64_t rows = rows_of(p), width = p->width, packed = packed_of(p), hidden = p->hidden;
    const int64_t heads = p->heads * p->size, kv = p->kv_heads * p->size, up = up_of(p);
    struct range own = share(who, rows);
    const float *d_between = p->d_out;
    if (p->mlp != NO_MLP) {
        const float *grad = before_dropout(who, p, p->mlp_factors, p->d_out, room->first);
        linear_backward(who, room, rows, hidden, width, k->hidden, w->down, grad, width, room->d_hidden, 0,
                        d->down, d->down_bias);
        barrier(who);
        activate_backward(p, k, room, own);
        barrier(who);
        float *d_read = room->second;
        if (p->mlp == SWIGLU)
            linear_backward(who, room, rows, width, hidden, k->mlp_read, w->gate, room->d_up, up, d_read,
                            0, d->gate, d->gate_bias);
        linear_backward(who, room, rows, width, hidden, k->mlp_read, w->up, room->d_up + up - hidden, up,
                        d_read, p->mlp == SWIGLU, d->up, d->up_bias);
        barrier(who);
        for (int64_t r = own.begin; r < own.end; r++)
            norm_row_backward(p, k->between + r * width, w->mlp_gain, k->mlp_middle[r],
                              k->mlp_inverse[r], d_read + r * width, p->d_out + r * width,
                              room->third + r * width);
        gains_backward(who, p, k->between, k->mlp_middle, k->mlp_inverse, d_read, d->mlp_gain,
                       d->mlp_shift);
        barrier(who);
        d_between = room->third;
    }
    const float *grad = before_dropout(who, p, p->attention_factors, d_between, room->first);
    linear_backward(who, room, rows, heads, width, k->mixed, w->projection, grad, width, room->d_mixed, 0,
                    d->projection, d->projection_bias);
    barrier(who);
    attend_all(who, p, k, room);
    barrier(who);
    if (places(p)) {
        place_backward(who, p, k, room);
        barrier(who);
        const int64_t chunks = (rows + CHUNK - 1) / CHUNK;
        for (int64_t c = 0; who.number == 0 && d->query_gain && c < chunks; c++)
            for (int64_t i = 0; i < p->size; i++) {
                d->query_gain[i] += room->d_gains[2 * c * p->size + i];
                d->key_gain[i] += room->d_gains[(2 * c + 1) * p->size + i];
            }
    }
    float *d_read = room->second;
    const float *read = k->attention_read;
    linear_backward(who, room, rows, width, heads, read, w->query, room->d_packed, packed, d_read, 0,
                    d->query, d->query_bias);
    linear_backward(who, room, rows, width, kv, read, w->key, room->d_packed + heads, packed, d_read, 1,
                    d->key, d->key_bias);
    linear_backward(who, room, rows, width, kv, read, w->value, room->d_packed + heads + kv, packed,
                    d_read, 1, d->value, d->value_bias);
    barrier(who);
    for (int64_t r = own.begin; r < own.end; r++)
        norm_row_backward(p, p->x + r * width, w->attention_gain, k->attention_middle[r],
                          k->attention_inverse[r], d_read + r * width, d_between + r * width,
                          p->d_x + r * width);
    gains_backward(who, p, p->x, k->attention_middle, k->attention_inverse, d_read, d->attention_gain,
                   d->attention_shift);
}

/* Compute `out`, or the gradients if `d_out` is not NULL, by `members` threads. */
void pass_through_block(int64_t members, const struct pass *p)
{
    struct work work = {.pass = p};
    divide_kept(p, p->kept, &work.kept);
    divide_room(p, members, p->scratch, &work.room);
    together(members, p->d_out ? go_backward : go_forward, &work);
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
    FIELD(pass, epsilon), FIELD(pass, head_epsilon), FIELD(pass, weights), FIELD(pass, gradients),
    FIELD(pass, cosines), FIELD(pass, sines), FIELD(pass, attention_factors), FIELD(pass, mlp_factors),
    FIELD(pass, x), FIELD(pass, out), FIELD(pass, kept), FIELD(pass, scratch), FIELD(pass, d_out),
    FIELD(pass, d_x),
    {NULL, 0, 0},
};
