/* Next-token logits of every architecture that has a token embedding. generation/native_decoder.py lays
   out the weights and allocates the memory. Its reference implementation is model/textbook.py.

   Axes: B windows, S tokens of a window, T new tokens of a window, C embed_dim, H heads, K key and value
   heads, D head size, F hidden units, V vocabulary, L layers. */

#include "simd.h"

#include "layout.h"
#include "thread_crew.h"
#include "linear.h"


struct block {
    const float *attention_norm, *mlp_norm; /* (2, C): gains and biases */
    const float *query_gains, *key_gains;   /* (D), query gains times the scale; or NULL */
    struct linear qkv, projection, up, down; /* `up` of SwiGLU: gate and up, each in whole panels */
};

struct model {
    int64_t layers, width, vocab_size, heads, kv_heads, size;
    int64_t key_at, value_at; /* offsets in a row of queries, keys and values */
    int64_t norm, normed_heads, residual, mlp;
    float epsilon;
    const float *tokens, *positions; /* (V, C), (S, C) or NULL */
    const float *cosines, *sines;    /* (S, D/2), or NULL */
    const struct block *blocks;
    const float *last_norm;
    struct linear lm_head;
};

/* The memory of a decoder: the key/value cache, and scratch for `rows` tokens that are computed
   together. All rows are padded to whole panels. Each thread has its own query and scores. If each
   thread computes windows of its own, it has scratch of its own. */
struct memory {
    int64_t rows, capacity, stride, mixed_stride; /* tokens of a window; strides of rows */
    float *keys, *values;                         /* (L, B, K, S/LANES, D, LANES), (L, B, K, S, D) */
    float *x, *normed, *packed, *mixed, *hidden;  /* the residual stream and activations */
    float *query, *scores;                        /* (members, D + a panel), (members, S) */
};

/* New tokens that are computed together: `rows` tokens from `begin` on, of `count` per window. The windows
   are `samples` of all that the cache has, from `first` on. */
struct tokens {
    const int64_t *ids;
    int64_t all_samples, first, samples, count, known, begin, rows;
};

/* A new token: its window, and its index among the window's new tokens. */
struct token {
    int64_t window, index;
};

/* Return nonzero if the layer's output is needed for a token. */
INLINE int is_needed(const struct model *m, int64_t layer, const struct tokens *t, struct token at)
{
    return layer < m->layers - 1 || at.index == t->count - 1;
}

static struct token first_of(const struct tokens *t)
{
    return (struct token){t->begin / t->count, t->begin % t->count};
}

static void advance(struct token *at, const struct tokens *t)
{
    if (++at->index == t->count) {
        at->index = 0;
        at->window++;
    }
}

/* Return the mean of x, or of x². */
INLINE float mean(int64_t size, const float *x, const int squared)
{
    vector sums = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vector value = load(x + i);
        if (squared)
            value *= value;
        sums += value;
    }
    for (; i < size; i++)
        sum += squared ? x[i] * x[i] : x[i];
    return (sum + sum_lanes(sums)) / size;
}

/* Return the input of attention, MLP or LM head: the normalised stream, or the stream without a norm. */
static const float *norm(struct member self, const struct model *m, const struct memory *memory,
                         int64_t rows, int64_t size, const float *gains)
{
    if (m->norm == NO_NORM)
        return memory->x;
    struct range own = own_range(self, rows);
    for (int64_t r = own.begin; r < own.end; r++) {
        const float *x = memory->x + r * memory->stride;
        float *y = memory->normed + r * memory->stride;
        const float average = m->norm == LAYER_NORM ? mean(size, x, 0) : 0;
        for (int64_t i = 0; i < size; i++)
            y[i] = x[i] - average;
        float scale = 1 / sqrtf(mean(size, y, 1) + m->epsilon);
        for (int64_t i = 0; i < size; i++)
            y[i] = y[i] * scale * gains[i] + gains[size + i];
    }
    barrier(self);
    return memory->normed;
}

/* Return a head's query or key with the norm and rotation of the model, if any. Element i of the first
   half and element i of the second half are rotated as a pair. */
static const float *norm_rotate(const struct model *m, const float *restrict x,
                                const float *restrict gains, int64_t position, float *restrict y)
{
    if (!gains)
        return x;
    const int64_t half = m->size / 2;
    float scale = m->normed_heads ? 1 / sqrtf(mean(m->size, x, 1) + m->epsilon) : 1;
    for (int64_t i = 0; i < m->size; i++)
        y[i] = x[i] * scale * gains[i];
    if (!m->cosines)
        return y;
    const float *cosines = m->cosines + position * half, *sines = m->sines + position * half;
    for (int64_t i = 0; i < half; i++) {
        float first = y[i], second = y[half + i];
        y[i] = first * cosines[i] - second * sines[i];
        y[half + i] = second * cosines[i] + first * sines[i];
    }
    return y;
}

/* Return the vector at `x`, and prefetch x[ahead] unless `ahead` is 0. */
INLINE vector load_ahead(const float *x, int64_t ahead)
{
    if (ahead)
        __builtin_prefetch(x + ahead, 0, 2);
    return load(x);
}

/* Compute the scores of `vectors` · LANES tokens. */
INLINE void score(const int vectors, int64_t size, const float *query, const float *keys,
                  int64_t ahead, float *scores)
{
    vector sums[4] = {{0}};
    for (int64_t i = 0; i < size; i++)
        for (int v = 0; v < vectors; v++)
            sums[v] += query[i] * load_ahead(keys + v * size * LANES + i * LANES, ahead);
    for (int v = 0; v < vectors; v++)
        *(vector *)(scores + v * LANES) = sums[v];
}

/* Write `room` numbers of Σ exponential · value · inverse_sum over the visible tokens. */
INLINE void mix(const int vectors, int64_t size, int64_t visible, const float *exponentials,
                const float *values, int64_t ahead, float inverse_sum, float *mixed, int64_t room)
{
    vector sums[4][4] = {{{0}}}; /* one sum for every fourth token */
    int64_t s = 0;
    for (; s + 4 <= visible; s += 4)
        for (int j = 0; j < 4; j++)
            for (int v = 0; v < vectors; v++)
                sums[j][v] +=
                    exponentials[s + j] * load_ahead(values + (s + j) * size + v * LANES, ahead);
    for (; s < visible; s++)
        for (int v = 0; v < vectors; v++)
            sums[0][v] += exponentials[s] * load(values + s * size + v * LANES);
    for (int v = 0; v < vectors; v++) {
        vector sum = ((sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v])) * inverse_sum;
        if (room >= LANES * (v + 1))
            *(vector *)(mixed + v * LANES) = sum;
        else
            for (int64_t i = v * LANES; i < room; i++)
                mixed[i] = sum[i - v * LANES];
    }
}

/* Compute softmax(keysᵀ query) · values over the first `visible` tokens. Keys are
   (S/LANES, D, LANES), values (S, D). The next head's keys and values are `ahead` numbers behind these. */
static void attend_query(int64_t size, int64_t visible, const float *query, const float *keys,
                         const float *values, int64_t ahead, float *scores, float *mixed)
{
    int64_t s = 0;
    for (; s + 4 * LANES <= visible; s += 4 * LANES)
        score(4, size, query, keys + s * size, ahead, scores + s);
    for (; s < visible; s += LANES)
        score(1, size, query, keys + s * size, ahead, scores + s);
    for (s = visible; s % LANES; s++)
        scores[s] = -INFINITY;
    vector largest_lanes = load(scores), sum = {0};
    for (s = LANES; s < visible; s += LANES)
        largest_lanes = blend(load(scores + s) > largest_lanes, load(scores + s), largest_lanes);
    float largest = largest_lanes[0];
    for (int l = 1; l < LANES; l++)
        largest = largest_lanes[l] > largest ? largest_lanes[l] : largest;
    for (s = 0; s < visible; s += LANES) {
        vector exponential = vector_exp(load(scores + s) - largest);
        *(vector *)(scores + s) = exponential;
        sum += exponential;
    }
    float inverse_sum = 1 / sum_lanes(sum);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        mix(4, size, visible, scores, values + i, ahead, inverse_sum, mixed + i, 4 * LANES);
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        mix(2, size, visible, scores, values + i, ahead, inverse_sum, mixed + i, 2 * LANES);
    for (; i < size; i += LANES) /* whole vectors can be read */
        mix(1, size, visible, scores, values + i, ahead, inverse_sum, mixed + i, size - i);
}

/* Compute `attend` for key/value head k and its query heads. Rows of `packed` have queries, keys and
   values. */
static void attend_head(struct member self, const struct model *m, const struct memory *memory,
                        int64_t layer, const struct tokens *t, const float *packed, int64_t stride,
                        int64_t k)
{
    const struct block *b = m->blocks + layer;
    const int64_t size = m->size, group = m->heads / m->kv_heads;
    float *rotated = memory->query + self.number * (size + LINEAR_PANEL);
    float *scores = memory->scores + self.number * memory->capacity, *mixed = memory->mixed;
    /* With one token per window, prefetch the next window's keys and values. */
    const int prefetches = t->count == 1 && t->samples > 1;
    const int64_t ahead = prefetches ? m->kv_heads * memory->capacity * size : 0;
    struct token at = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, packed += stride, advance(&at, t)) {
        int64_t position = t->known + at.index, lane = position % LANES;
        const int64_t window = layer * t->all_samples + t->first + at.window;
        const int64_t cached = (window * m->kv_heads + k) * memory->capacity * size;
        float *keys = memory->keys + cached, *values = memory->values + cached;
        const float *key =
            norm_rotate(m, packed + m->key_at + k * size, b->key_gains, position, rotated);
        for (int64_t i = 0; i < size; i++)
            keys[(position - lane) * size + i * LANES + lane] = key[i];
        memcpy(values + position * size, packed + m->value_at + k * size, size * sizeof(float));
        if (!is_needed(m, layer, t, at))
            continue;
        for (int64_t h = k * group; h < (k + 1) * group; h++)
            attend_query(size, position + 1,
                         norm_rotate(m, packed + h * size, b->query_gains, position, rotated), keys,
                         values, ahead, scores, mixed + h * size);
        mixed += memory->mixed_stride;
    }
}

/* Append the keys and values of the tokens to the cache, and write the heads' outputs to `mixed`. In the
   last layer, only each window's last token has an output. */
static void attend(struct member self, const struct model *m, const struct memory *memory,
                   int64_t layer, const struct tokens *t)
{
    const struct block *b = m->blocks + layer;
    const struct linear *qkv = &b->qkv;
    const float *packed = memory->packed;
    int64_t stride = qkv->outputs;
    const float *normed = norm(self, m, memory, t->rows, m->width, b->attention_norm);
    if (qkv->panels) {
        linear_forward(self, qkv, t->rows, normed, memory->stride, memory->packed, stride, 0);
        barrier(self);
    } else {
        packed = normed;
        stride = memory->stride;
    }
    struct range own = own_range(self, m->kv_heads);
    for (int64_t k = own.begin; k < own.end; k++)
        attend_head(self, m, memory, layer, t, packed, stride, k);
    barrier(self);
}

/* Move the stream of each window's last token to the front. Return the number of rows left. */
static int64_t keep_last(struct member self, const struct memory *memory, const struct tokens *t)
{
    const int64_t stride = memory->stride;
    int64_t kept = 0;
    struct token at = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, advance(&at, t)) {
        if (at.index < t->count - 1)
            continue;
        if (self.number == 0)
            memmove(memory->x + kept * stride, memory->x + r * stride, stride * sizeof(float));
        kept++;
    }
    barrier(self);
    return kept;
}

/* Add the heads' outputs, after the projection if any, to the stream; without `residual`, replace it. */
static void add_attention(struct member self, const struct model *m, const struct memory *memory,
                          const struct linear *projection, int64_t rows)
{
    if (projection->panels) {
        linear_forward(self, projection, rows, memory->mixed, memory->mixed_stride, memory->x,
                       memory->stride, m->residual);
        barrier(self);
        return;
    }
    struct range own = own_range(self, rows);
    for (int64_t r = own.begin; r < own.end; r++) {
        float *x = memory->x + r * memory->stride;
        const float *mixed = memory->mixed + r * memory->mixed_stride;
        for (int64_t i = 0; i < m->heads * m->size; i++)
            x[i] = m->residual ? x[i] + mixed[i] : mixed[i];
    }
    barrier(self);
}

INLINE vector activation(int64_t kind, vector x)
{
    if (kind == SWIGLU)
        return x * sigmoid(x);
    if (kind == GELU) /* (1 + tanh(u)) / 2 is sigmoid(2u) */
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return blend(x < 0, (vector){0}, x * x);
}

static void add_mlp(struct member self, const struct model *m, const struct memory *memory,
                    const struct block *b, int64_t rows)
{
    const float *normed = norm(self, m, memory, rows, m->width, b->mlp_norm);
    const int64_t stride = b->up.outputs, hidden = m->mlp == SWIGLU ? stride / 2 : stride;
    linear_forward(self, &b->up, rows, normed, memory->stride, memory->hidden, stride, 0);
    barrier(self);
    struct range own = own_range(self, hidden / LINEAR_PANEL);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = own.begin * LINEAR_PANEL; i < own.end * LINEAR_PANEL; i += LANES) {
            float *x = memory->hidden + r * stride + i;
            vector y = activation(m->mlp, load(x));
            if (m->mlp == SWIGLU)
                y *= load(x + hidden);
            *(vector *)x = y;
        }
    barrier(self);
    linear_forward(self, &b->down, rows, memory->hidden, stride, memory->x, memory->stride,
                   m->residual);
    barrier(self);
}

static void embed(struct member self, const struct model *m, const struct memory *memory,
                  const struct tokens *t)
{
    if (self.number == 0) {
        struct token at = first_of(t);
        for (int64_t r = 0; r < t->rows; r++, advance(&at, t)) {
            const float *token = m->tokens + t->ids[t->begin + r] * m->width;
            float *x = memory->x + r * memory->stride;
            memcpy(x, token, m->width * sizeof(float));
            if (m->positions) {
                const float *position = m->positions + (t->known + at.index) * m->width;
                for (int64_t i = 0; i < m->width; i++)
                    x[i] += position[i];
            }
        }
    }
    barrier(self);
}

struct task {
    const struct model *model;
    const struct memory *memory;
    int64_t all_samples, first, samples, count, known;
    const int64_t *ids;
    float *logits;
};

static void compute_logits(struct member self, const void *argument)
{
    const struct task *task = argument;
    const struct model *m = task->model;
    const struct memory *memory = task->memory;
    const int64_t all = task->samples * task->count;
    float *logits = task->logits;
    struct tokens t = {
        .ids = task->ids,
        .all_samples = task->all_samples,
        .first = task->first,
        .samples = task->samples,
        .count = task->count,
        .known = task->known,
    };
    for (; t.begin < all; t.begin += t.rows) {
        const int64_t left = all - t.begin;
        int64_t rows = left < memory->rows ? left : memory->rows;
        t.rows = rows;
        embed(self, m, memory, &t);
        for (int64_t layer = 0; layer < m->layers; layer++) {
            const struct block *b = m->blocks + layer;
            if (m->heads)
                attend(self, m, memory, layer, &t);
            if (layer == m->layers - 1)
                rows = keep_last(self, memory, &t);
            if (m->heads)
                add_attention(self, m, memory, &b->projection, rows);
            if (m->mlp != NO_MLP)
                add_mlp(self, m, memory, b, rows);
        }
        const float *normed = norm(self, m, memory, rows, m->lm_head.inputs, m->last_norm);
        linear_forward(self, &m->lm_head, rows, normed, memory->stride, logits, m->lm_head.outputs,
                       0);
        barrier(self);
        logits += rows * m->lm_head.outputs;
    }
}

/* Compute the logits of a member's own windows, without waiting for other members. */
static void compute_own_windows(struct member self, const void *argument)
{
    struct task task = *(const struct task *)argument;
    const struct range own = own_range(self, task.samples);
    const int64_t n = self.number, rows = n * task.memory->rows;
    const struct model *m = task.model;
    struct memory memory = *task.memory;
    memory.x += rows * memory.stride;
    memory.normed += rows * memory.stride;
    memory.packed += rows * m->blocks->qkv.outputs;
    memory.mixed += rows * memory.mixed_stride;
    memory.hidden += rows * m->blocks->up.outputs;
    memory.query += n * (m->size + LINEAR_PANEL);
    memory.scores += n * memory.capacity;
    task.memory = &memory;
    task.first = own.begin;
    task.samples = own.end - own.begin;
    task.ids += own.begin * task.count;
    task.logits += own.begin * m->lm_head.outputs;
    struct team alone = {.members = 1};
    compute_logits((struct member){&alone, 0}, &task);
}

/* Compute the logits (B, V) after `count` new tokens, ids (B, count), in each of B windows with `known`
   tokens in the cache, by a crew: each member computes windows of its own if `divides_windows`, else a
   part of every token. Return 0, and do nothing, if an id is not in the vocabulary. */
int next_logits(void *crew, const struct model *m, const struct memory *memory,
                int divides_windows, int64_t samples, int64_t count, int64_t known,
                const int64_t *ids, float *logits)
{
    for (int64_t i = 0; i < samples * count; i++)
        if (ids[i] < 0 || ids[i] >= m->vocab_size)
            return 0;
    struct task task = {
        .model = m,
        .memory = memory,
        .all_samples = samples,
        .samples = samples,
        .count = count,
        .known = known,
        .ids = ids,
        .logits = logits,
    };
    run_crew(crew, divides_windows ? compute_own_windows : compute_logits, &task);
    return 1;
}

const struct layout decoding_layouts[] = {
    STRUCT(linear),
    FIELD(linear, inputs), FIELD(linear, outputs), FIELD(linear, panels), FIELD(linear, bias),
    STRUCT(block),
    FIELD(block, attention_norm), FIELD(block, mlp_norm), FIELD(block, query_gains),
    FIELD(block, key_gains), FIELD(block, qkv), FIELD(block, projection), FIELD(block, up),
    FIELD(block, down),
    STRUCT(model),
    FIELD(model, layers), FIELD(model, width), FIELD(model, vocab_size), FIELD(model, heads),
    FIELD(model, kv_heads), FIELD(model, size), FIELD(model, key_at), FIELD(model, value_at),
    FIELD(model, norm), FIELD(model, normed_heads), FIELD(model, residual), FIELD(model, mlp),
    FIELD(model, epsilon), FIELD(model, tokens), FIELD(model, positions), FIELD(model, cosines),
    FIELD(model, sines), FIELD(model, blocks), FIELD(model, last_norm), FIELD(model, lm_head),
    STRUCT(memory),
    FIELD(memory, rows), FIELD(memory, capacity), FIELD(memory, stride),
    FIELD(memory, mixed_stride), FIELD(memory, keys), FIELD(memory, values), FIELD(memory, x),
    FIELD(memory, normed), FIELD(memory, packed), FIELD(memory, mixed), FIELD(memory, hidden),
    FIELD(memory, query), FIELD(memory, scores),
    {NULL, 0, 0},
};
