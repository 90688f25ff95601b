/* Causal attention, softmax(scale · q kᵀ) v, forward and backward, for one block of queries and one
   block of keys at a time: scores stay in the cache, and are never in memory all at once. The backward
   pass computes them again (Dao et al., 2022). In a block of scores, keys are rows and queries are
   columns. One thread computes one key/value head with all of its query heads. */

#include "vectors.h"

#include "layout.h"
#include "team.h"
#include "attention.h"

#define BLOCK 64 /* number of queries, and of keys */
#define ACROSS (BLOCK / LANES)
#define SIDE 2 /* vectors of a tile */
#if LANES == 16
#define DOWN 8 /* rows of a tile */
#else
#define DOWN 4
#endif

int64_t attention_lanes(void) { return LANES; }

/* Return the scratch numbers that each thread needs: for all keys and values and their gradients; for
   a block of queries and the gradients of its outputs, both by rows and by columns, and its sums; and
   for two blocks of scores. */
int64_t attention_scratch(int64_t length, int64_t size)
{
    return filled(size) * (4 * length + 5 * BLOCK) + 2 * BLOCK * BLOCK;
}

/* out (rows, parts · LANES) = a (rows, steps) · b (steps, parts · LANES), or += with `add`. `rows` and
   `parts` are constants at each call, so that sums stay in registers. */
INLINE void multiply_tile(const int rows, const int parts, int64_t steps, const float *a,
                          int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *out,
                          int64_t out_row, int add)
{
    vector sums[DOWN * SIDE] = {{0}};
    for (int64_t i = 0; i < steps; i++)
        for (int p = 0; p < parts; p++) {
            vector side = load(b + i * b_step + p * LANES);
            for (int r = 0; r < rows; r++)
                sums[r * parts + p] += a[r * a_row + i * a_step] * side;
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) {
            vector *place = (vector *)(out + r * out_row + p * LANES);
            if (add)
                sums[r * parts + p] += *place;
            *place = sums[r * parts + p];
        }
}

/* In a block of scores whose keys and queries are the same tokens, half of the scores are masked. Which
   products are needed then: of all, of columns from the row's own on, or only some of the steps. */
enum needed { ALL, LATER_COLUMNS, STEPS_TO_ROW, STEPS_FROM_ROW };

/* `multiply_tile` for any number of rows, and any number of whole vectors of columns. Elements that are
   not needed keep any value. */
static void multiply(enum needed needed, int64_t rows, int64_t columns, int64_t steps, const float *a,
                     int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *out,
                     int64_t out_row, int add)
{
#define TILES(down, side) \
    for (; r + down <= rows; r += down) { \
        const int64_t from = needed == STEPS_FROM_ROW ? r : 0; \
        const int64_t to = needed == STEPS_TO_ROW && r + down < steps ? r + down : steps; \
        if (needed != LATER_COLUMNS || c + side * LANES > r) \
            multiply_tile(down, side, to - from, a + r * a_row + from * a_step, a_row, a_step, \
                          b + c + from * b_step, b_step, out + r * out_row + c, out_row, add); \
    }
    for (int64_t c = 0, r = 0; c < columns; r = 0)
        if (c + SIDE * LANES <= columns) {
            TILES(DOWN, SIDE);
            TILES(1, SIDE);
            c += SIDE * LANES;
        } else {
            TILES(DOWN, 1);
            TILES(1, 1);
            c += LANES;
        }
#undef TILES
}

INLINE float *place_of(const struct heads *x, int64_t window, int64_t head, int64_t token)
{
    return x->at + window * x->window + head * x->head + token * x->token;
}

/* Copy rows of a head, times a factor, padded with zeros to whole vectors. */
static void gather(float *to, const float *from, int64_t stride, int64_t count, int64_t size,
                   float factor)
{
    for (int64_t r = 0; r < count; r++, to += filled(size), from += stride) {
        for (int64_t i = 0; i < size; i++)
            to[i] = from[i] * factor;
        for (int64_t i = size; i < filled(size); i++)
            to[i] = 0;
    }
}

/* Copy the rows back, times a factor, without the padding. */
static void scatter(const float *from, float *to, int64_t stride, int64_t count, int64_t size,
                    float factor)
{
    for (int64_t r = 0; r < count; r++, from += filled(size), to += stride)
        for (int64_t i = 0; i < size; i++)
            to[i] = from[i] * factor;
}

/* Transpose the rows of a block to (D, BLOCK), padded with zeros. */
static void transpose(float *columns, const float *rows, int64_t count, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        for (int64_t t = 0; t < BLOCK; t++)
            columns[i * BLOCK + t] = t < count ? rows[t * filled(size) + i] : 0;
}

/* Replace scores (keys, BLOCK) by exp(score − the largest score of the query so far), and add them to
   `sums`. Sums of earlier blocks must be multiplied by `factors`. */
INLINE void exponentials(const int masked, int64_t keys, float *scores, vector *largest,
                         vector *sums, vector *factors)
{
    for (int64_t c = 0; c < ACROSS; c++) {
        const float *end = scores + keys * BLOCK;
        vector most = largest[c], sum = {0};
        int64_t s = 0;
        for (const float *at = scores + c * LANES; at < end; at += BLOCK, s++) {
            vector score = load(at);
            if (masked)
                score = either(before(c * LANES, s), most, score);
            most = either(score > most, score, most);
        }
        s = 0;
        for (float *at = scores + c * LANES; at < end; at += BLOCK, s++) {
            vector weight = exp_of(load(at) - most);
            if (masked)
                weight = either(before(c * LANES, s), (vector){0}, weight);
            *(vector *)at = weight;
            sum += weight;
        }
        factors[c] = exp_of(largest[c] - most);
        sums[c] = sums[c] * factors[c] + sum;
        largest[c] = most;
    }
}

static void attend_piece(const struct attention *about, int64_t window, int64_t kv_head,
                         float *scratch)
{
    const int64_t length = about->length, size = about->size, width = filled(size);
    const int64_t group = about->heads / about->kv_heads;
    const struct heads *q = about->query, *k = about->key, *v = about->value, *o = about->out;
    float *keys = scratch, *values = keys + length * width, *queries = values + length * width;
    float *columns = queries + BLOCK * width, *mixed = columns + BLOCK * width;
    float *scores = mixed + BLOCK * width;
    gather(keys, place_of(k, window, kv_head, 0), k->token, length, size, 1);
    gather(values, place_of(v, window, kv_head, 0), v->token, length, size, 1);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t t = 0; t < length; t += BLOCK) {
            const int64_t count = length - t < BLOCK ? length - t : BLOCK;
            float *log_sums = about->log_sums + (window * about->heads + head) * length + t;
            float *out = place_of(o, window, head, t);
            vector largest[ACROSS], sums[ACROSS] = {{0}}, factors[ACROSS];
            for (int c = 0; c < ACROSS; c++)
                largest[c] = (vector){0} - INFINITY;
            gather(queries, place_of(q, window, head, t), q->token, count, size, about->scale);
            transpose(columns, queries, count, size);
            for (int64_t s = 0; s <= t; s += BLOCK) {
                const int64_t there = s < t ? BLOCK : count;
                const int own = s == t;
                multiply(own ? LATER_COLUMNS : ALL, there, BLOCK, size, keys + s * width, width, 1,
                         columns, BLOCK, scores, BLOCK, 0);
                if (!own)
                    exponentials(0, there, scores, largest, sums, factors);
                else
                    exponentials(1, there, scores, largest, sums, factors);
                for (int64_t i = 0; s && i < count; i++)
                    for (int64_t d = 0; d < width; d++)
                        mixed[i * width + d] *= factors[i / LANES][i % LANES];
                multiply(own ? STEPS_TO_ROW : ALL, count, width, there, scores, 1, BLOCK,
                         values + s * width, width, mixed, width, s > 0);
            }
            for (int64_t i = 0; i < count; i++) {
                const float sum = sums[i / LANES][i % LANES];
                log_sums[i] = largest[i / LANES][i % LANES] + logf(sum);
                scatter(mixed + i * width, out + i * o->token, 0, 1, size, 1 / sum);
            }
        }
}

/* Replace scores (keys, BLOCK) by attention weights, and gradients of weights by gradients of scores:
   weight · (its gradient − the sum of weight · gradient over the keys, `shared`). */
INLINE void weights_backward(const int masked, int64_t keys, float *scores, float *d_weights,
                             const float *log_sums, const float *shared)
{
    for (int64_t s = 0; s < keys; s++)
        for (int64_t t = 0; t < BLOCK; t += LANES) {
            float *at = scores + s * BLOCK + t, *d_at = d_weights + s * BLOCK + t;
            vector weight = exp_of(load(at) - load(log_sums + t));
            if (masked)
                weight = either(before(t, s), (vector){0}, weight);
            vector d_score = weight * (load(d_at) - load(shared + t));
            if (masked)
                d_score = either(before(t, s), (vector){0}, d_score);
            *(vector *)at = weight;
            *(vector *)d_at = d_score;
        }
}

static void attend_piece_backward(const struct attention *about, int64_t window, int64_t kv_head,
                                  float *scratch)
{
    const int64_t length = about->length, size = about->size, width = filled(size);
    const int64_t group = about->heads / about->kv_heads, all = length * width;
    const int64_t some = BLOCK * width;
    const struct heads *q = about->query, *k = about->key, *v = about->value, *o = about->out;
    const struct heads *d_q = about->d_query, *d_k = about->d_key, *d_v = about->d_value;
    const struct heads *d_o = about->d_out;
    float *keys = scratch, *values = keys + all, *d_keys = values + all, *d_values = d_keys + all;
    float *queries = d_values + all, *columns = queries + some, *grads = columns + some;
    float *grad_columns = grads + some, *d_queries = grad_columns + some;
    float *scores = d_queries + some, *d_scores = scores + BLOCK * BLOCK;
    gather(keys, place_of(k, window, kv_head, 0), k->token, length, size, 1);
    gather(values, place_of(v, window, kv_head, 0), v->token, length, size, 1);
    memset(d_keys, 0, 2 * all * sizeof(float));
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t t = 0; t < length; t += BLOCK) {
            const int64_t count = length - t < BLOCK ? length - t : BLOCK;
            const float *out = place_of(o, window, head, t);
            float shared[BLOCK] = {0}, log_sums[BLOCK] = {0};
            memcpy(log_sums, about->log_sums + (window * about->heads + head) * length + t,
                   count * sizeof(float));
            gather(queries, place_of(q, window, head, t), q->token, count, size, about->scale);
            transpose(columns, queries, count, size);
            gather(grads, place_of(d_o, window, head, t), d_o->token, count, size, 1);
            transpose(grad_columns, grads, count, size);
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < size; d++)
                    shared[i] += grads[i * width + d] * out[i * o->token + d];
            for (int64_t s = 0; s <= t; s += BLOCK) {
                const int64_t there = s < t ? BLOCK : count;
                const int own = s == t;
                multiply(own ? LATER_COLUMNS : ALL, there, BLOCK, size, keys + s * width, width, 1,
                         columns, BLOCK, scores, BLOCK, 0);
                multiply(own ? LATER_COLUMNS : ALL, there, BLOCK, size, values + s * width, width, 1,
                         grad_columns, BLOCK, d_scores, BLOCK, 0);
                if (!own)
                    weights_backward(0, there, scores, d_scores, log_sums, shared);
                else
                    weights_backward(1, there, scores, d_scores, log_sums, shared);
                multiply(own ? STEPS_FROM_ROW : ALL, there, width, count, scores, BLOCK, 1, grads,
                         width, d_values + s * width, width, 1);
                multiply(own ? STEPS_FROM_ROW : ALL, there, width, count, d_scores, BLOCK, 1, queries,
                         width, d_keys + s * width, width, 1);
                multiply(own ? STEPS_TO_ROW : ALL, count, width, there, d_scores, 1, BLOCK,
                         keys + s * width, width, d_queries, width, s > 0);
            }
            scatter(d_queries, place_of(d_q, window, head, t), d_q->token, count, size,
                    about->scale);
        }
    scatter(d_keys, place_of(d_k, window, kv_head, 0), d_k->token, length, size, 1);
    scatter(d_values, place_of(d_v, window, kv_head, 0), d_v->token, length, size, 1);
}

void attend_pieces(struct member who, const void *given)
{
    const struct attention *about = given;
    const int64_t heads = about->kv_heads;
    float *scratch = about->scratch + who.number * attention_scratch(about->length, about->size);
    struct range own = share(who, about->windows * heads);
    for (int64_t i = own.begin; i < own.end; i++)
        (about->d_out ? attend_piece_backward : attend_piece)(about, i / heads, i % heads, scratch);
}

/* `scratch` has room for `threads` threads. */
void attend(int64_t threads, int64_t windows, int64_t heads, int64_t kv_heads, int64_t length,
            int64_t size, float scale, const struct heads *query, const struct heads *key,
            const struct heads *value, const struct heads *out, float *log_sums, float *scratch)
{
    struct attention about = {windows, heads, kv_heads, length, size, scale, query, key, value, out,
                              log_sums, .scratch = scratch};
    together(threads, attend_pieces, &about);
}

void attend_backward(int64_t threads, int64_t windows, int64_t heads, int64_t kv_heads,
                     int64_t length, int64_t size, float scale, const struct heads *query,
                     const struct heads *key, const struct heads *value, const struct heads *out,
                     float *log_sums, const struct heads *d_out, const struct heads *d_query,
                     const struct heads *d_key, const struct heads *d_value, float *scratch)
{
    struct attention about = {windows, heads, kv_heads, length, size, scale, query, key, value, out,
                              log_sums, d_query, d_key, d_value, d_out, scratch};
    together(threads, attend_pieces, &about);
}

const struct layout attention_layouts[] = {
    STRUCT(heads),
    FIELD(heads, at), FIELD(heads, window), FIELD(heads, head), FIELD(heads, token),
    {NULL, 0, 0},
};
