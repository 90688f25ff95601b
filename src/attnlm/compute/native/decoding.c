/* Logits of the next token, for every architecture that embeds its tokens: which parts a model has
   is data. generation/native_decoder.py lays weights and memory out for this; tests hold it to the
   textbook pass.

   Axes: B windows, S tokens of a window, T new ones among them, C embed_dim, H heads, K key and value
   heads, D head size, F hidden units, V vocabulary, L layers. */

#include "vectors.h"

#define PANEL 32
#define PARTS (PANEL / LANES)
#if LANES == 16
#define TILE 8 /* rows */
#define WIDE 4 /* panels */
#elif LANES == 8
#define TILE 3
#define WIDE 2
#else
#define TILE 2
#define WIDE 1
#endif
#define MOST_SUMS 16 /* of TILE rows and a panel, or of a row and WIDE panels */

enum { NO_NORM, RMS_NORM, LAYER_NORM };
enum { NO_MLP, SWIGLU, GELU, RELU2 };

/* A linear map. Its matrix comes as panels: 32 outputs side by side for the first input, then for the
   second, and so on. `outputs` are filled up with zeros to whole panels. */
struct map {
    int64_t inputs, outputs;
    const float *matrix, *bias; /* NULL: there is no map */
};

struct block {
    const float *attention_norm, *mlp_norm; /* (2, C): gains and biases */
    const float *query_gains, *key_gains;   /* (D), the scale in the former; NULL: keys as they are */
    struct map qkv, projection, up, down;   /* `up` of SwiGLU: gate and up, each in whole panels */
};

struct model {
    int64_t layers, width, vocab_size, heads, kv_heads, size;
    int64_t key_at, value_at; /* in a row that holds queries, keys and values */
    int64_t norm, normed_heads, residual, mlp;
    float epsilon;
    const float *tokens, *positions;           /* (V, C), (S, C) or NULL */
    const float *token_maps, *position_maps;   /* the first layer's `qkv` of either, or NULL */
    const float *cosines, *sines;              /* (S, D/2), or NULL */
    const struct block *blocks;
    const float *last_norm;
    struct map head;
};

/* What a decoder writes to: the keys and values that it remembers, and scratch for `rows` tokens that
   go through the layers together. All rows are whole panels. */
struct memory {
    int64_t rows, capacity, stride, mixed_stride; /* tokens of a window, numbers of a row */
    float *keys, *values;                         /* (L, B, K, S/LANES, D, LANES), (L, B, K, S, D) */
    float *x, *read, *packed, *mixed, *hidden;    /* the stream, and what its parts make of it */
    float *query, *scores;                        /* (D), (S) */
};

/* The new tokens that go through the layers together: some of those of all windows in a row. */
struct tokens {
    const int64_t *ids;
    int64_t samples, count, known, begin, rows;
};

/* Where a token stands: its window, and its place among the new ones there. */
struct place {
    int64_t sample, at;
};

static struct place first_of(const struct tokens *t)
{
    return (struct place){t->begin / t->count, t->begin % t->count};
}

static void move_on(struct place *p, const struct tokens *t)
{
    if (++p->at == t->count)
        p->at = 0, p->sample++;
}

/* A few rows of x times a few panels: both numbers are constant where this is expanded, so that the
   sums stay in registers. Each sum adds the same numbers in the same order however many there are. */
INLINE void tile(const int rows, const int panels, int64_t inputs, const float *x, int64_t x_stride,
                 const float *matrix, const float *bias, float *y, int64_t y_stride, int add)
{
    const int parts = panels * PARTS;
    vector sums[MOST_SUMS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) {
            sums[r * parts + p] = load(bias + p * LANES);
            if (add)
                sums[r * parts + p] += load(y + r * y_stride + p * LANES);
        }
    for (int64_t i = 0; i < inputs; i++)
        for (int p = 0; p < parts; p++) {
            vector weights = load(matrix + (p / PARTS * inputs + i) * PANEL + p % PARTS * LANES);
            for (int r = 0; r < rows; r++)
                sums[r * parts + p] += x[r * x_stride + i] * weights;
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++)
            *(vector *)(y + r * y_stride + p * LANES) = sums[r * parts + p];
}

/* y = map(x), or y += it. */
static void product(const struct map *map, int64_t rows, const float *x, int64_t x_stride, float *y,
                    int64_t y_stride, int add)
{
#define PRODUCT(rows, panels) \
    tile(rows, panels, map->inputs, x + r * x_stride, x_stride, map->matrix + o * map->inputs, \
         map->bias + o, y + r * y_stride + o, y_stride, add)
    for (int64_t o = 0, r = 0; o < map->outputs; o += PANEL, r = 0) {
        if (rows == 1 && o + WIDE * PANEL <= map->outputs) {
            PRODUCT(1, WIDE); /* one row alone has too few sums to keep the processor busy */
            o += (WIDE - 1) * PANEL;
            continue;
        }
        for (; r + TILE <= rows; r += TILE)
            PRODUCT(TILE, 1);
        for (; TILE > 4 && r + 4 <= rows; r += 4)
            PRODUCT(4, 1);
        for (; r + 2 <= rows; r += 2)
            PRODUCT(2, 1);
        if (r < rows)
            PRODUCT(1, 1);
    }
#undef PRODUCT
}

static float total(vector x)
{
    float sum = 0;
    for (int l = 0; l < LANES; l++)
        sum += x[l];
    return sum;
}

/* Of numbers, or of their squares. */
INLINE float mean(int64_t size, const float *x, const int squared)
{
    vector sums = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vector part = load(x + i);
        if (squared)
            part *= part;
        sums += part;
    }
    for (; i < size; i++)
        sum += squared ? x[i] * x[i] : x[i];
    return (sum + total(sums)) / size;
}

/* Rows as the next part reads them: normalised into `read`, or as they are. */
static const float *normed(const struct model *m, const struct memory *to, int64_t rows,
                           int64_t size, const float *gains)
{
    if (m->norm == NO_NORM)
        return to->x;
    for (int64_t r = 0; r < rows; r++) {
        const float *x = to->x + r * to->stride;
        float *y = to->read + r * to->stride, middle = m->norm == LAYER_NORM ? mean(size, x, 0) : 0;
        for (int64_t i = 0; i < size; i++)
            y[i] = x[i] - middle;
        float scale = 1 / sqrtf(mean(size, y, 1) + m->epsilon);
        for (int64_t i = 0; i < size; i++)
            y[i] = y[i] * scale * gains[i] + gains[size + i];
    }
    return to->read;
}

/* A head's query or key as it is compared: normalised and turned to its position, where the model
   does that. The halves of a head hold the pairs that are turned. */
static const float *turned(const struct model *m, const float *restrict x,
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

/* What a query gathers from the first `visible` tokens: softmax(keysᵀ query) · values. */
static void gather(int64_t size, int64_t visible, const float *query, const float *keys,
                   const float *values, float *scores, float *mixed)
{
    for (int64_t s = 0; s < visible; s += LANES) {
        vector score = {0};
        for (int64_t i = 0; i < size; i++)
            score += query[i] * load(keys + s * size + i * LANES);
        *(vector *)(scores + s) = score;
    }
    for (int64_t s = visible; s % LANES; s++)
        scores[s] = -INFINITY;
    vector top = load(scores), sum = {0};
    for (int64_t s = LANES; s < visible; s += LANES)
        top = either(load(scores + s) > top, load(scores + s), top);
    float largest = top[0];
    for (int l = 1; l < LANES; l++)
        largest = top[l] > largest ? top[l] : largest;
    for (int64_t s = 0; s < visible; s += LANES) {
        vector weight = exp_of(load(scores + s) - largest);
        *(vector *)(scores + s) = weight;
        sum += weight;
    }
    float share = 1 / total(sum);
    for (int64_t i = 0; i < size; i += LANES) { /* there is room for whole vectors */
        vector sums[4] = {{0}};
        int64_t s = 0;
        for (; s + 4 <= visible; s += 4)
            for (int j = 0; j < 4; j++)
                sums[j] += scores[s + j] * load(values + (s + j) * size + i);
        for (; s < visible; s++)
            sums[0] += scores[s] * load(values + s * size + i);
        *(vector *)(mixed + i) = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * share;
    }
}

/* Remembers the keys and values of tokens, and writes to `mixed` what each gathers; in the last layer
   each window's last, since no other is wanted. */
static void attend(const struct model *m, const struct memory *to, int64_t layer,
                   const struct tokens *t)
{
    const struct block *b = m->blocks + layer;
    const int looked_up = layer == 0 && m->token_maps;
    const int64_t size = m->size, group = m->heads / m->kv_heads, packed_size = b->qkv.outputs;
    int64_t stride = 0, kept = 0;
    const float *packed = to->packed;
    if (!looked_up) {
        packed = normed(m, to, t->rows, m->width, b->attention_norm);
        stride = to->stride;
    }
    if (!looked_up && b->qkv.matrix) {
        product(&b->qkv, t->rows, packed, stride, to->packed, packed_size, 0);
        packed = to->packed, stride = packed_size;
    }
    struct place p = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, packed += stride, move_on(&p, t)) {
        int64_t position = t->known + p.at, part = position % LANES;
        int wanted = layer < m->layers - 1 || p.at == t->count - 1;
        if (looked_up) {
            const float *token = m->token_maps + t->ids[t->begin + r] * packed_size;
            const float *added = m->position_maps + position * packed_size;
            for (int64_t i = wanted ? 0 : m->key_at; i < packed_size; i += LANES)
                *(vector *)(to->packed + i) = load(token + i) + load(added + i);
        }
        int64_t cached = (layer * t->samples + p.sample) * m->kv_heads * to->capacity * size;
        float *keys = to->keys + cached, *values = to->values + cached;
        for (int64_t k = 0; k < m->kv_heads; k++) {
            int64_t of_head = k * to->capacity * size;
            const float *key = turned(m, packed + m->key_at + k * size, b->key_gains, position,
                                      to->query);
            for (int64_t i = 0; i < size; i++)
                keys[of_head + (position - part) * size + i * LANES + part] = key[i];
            memcpy(values + of_head + position * size, packed + m->value_at + k * size,
                   size * sizeof(float));
        }
        for (int64_t h = 0; wanted && h < m->heads; h++) {
            int64_t of_head = h / group * to->capacity * size;
            gather(size, position + 1,
                   turned(m, packed + h * size, b->query_gains, position, to->query),
                   keys + of_head, values + of_head, to->scores,
                   to->mixed + kept * to->mixed_stride + h * size);
        }
        kept += wanted;
    }
}

/* Moves the stream of the windows' last tokens to the front; returns how many they are. */
static int64_t keep_last(const struct memory *to, const struct tokens *t)
{
    int64_t kept = 0;
    struct place p = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, move_on(&p, t))
        if (p.at == t->count - 1)
            memmove(to->x + kept++ * to->stride, to->x + r * to->stride,
                    to->stride * sizeof(float));
    return kept;
}

/* What the heads gathered, mapped or as it is, joins the stream or becomes it. */
static void pass_on(const struct model *m, const struct memory *to, const struct map *projection,
                    int64_t rows)
{
    if (projection->matrix) {
        product(projection, rows, to->mixed, to->mixed_stride, to->x, to->stride, m->residual);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        float *x = to->x + r * to->stride;
        const float *mixed = to->mixed + r * to->mixed_stride;
        for (int64_t i = 0; i < m->heads * m->size; i++)
            x[i] = m->residual ? x[i] + mixed[i] : mixed[i];
    }
}

/* 1 / (1 + e^−x), without overflow. */
INLINE vector sigmoid(vector x)
{
    vector e = exp_of(either(x < 0, x, -x));
    return either(x < 0, e, (vector){0} + 1) / (1 + e);
}

INLINE vector activation(int64_t kind, vector x)
{
    if (kind == SWIGLU)
        return x * sigmoid(x);
    if (kind == GELU) /* (1 + tanh(u)) / 2 is sigmoid(2u) */
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return either(x < 0, (vector){0}, x * x);
}

static void feed_forward(const struct model *m, const struct memory *to, const struct block *b,
                         int64_t rows)
{
    const float *read = normed(m, to, rows, m->width, b->mlp_norm);
    const int64_t stride = b->up.outputs, hidden = m->mlp == SWIGLU ? stride / 2 : stride;
    product(&b->up, rows, read, to->stride, to->hidden, stride, 0);
    for (int64_t r = 0; r < rows; r++)
        for (float *x = to->hidden + r * stride, *end = x + hidden; x < end; x += LANES) {
            vector y = activation(m->mlp, load(x));
            if (m->mlp == SWIGLU)
                y *= load(x + hidden);
            *(vector *)x = y;
        }
    product(&b->down, rows, to->hidden, stride, to->x, to->stride, m->residual);
}

static void embed(const struct model *m, const struct memory *to, const struct tokens *t)
{
    struct place p = first_of(t);
    for (int64_t r = 0; r < t->rows; r++, move_on(&p, t)) {
        const float *token = m->tokens + t->ids[t->begin + r] * m->width;
        float *x = to->x + r * to->stride;
        memcpy(x, token, m->width * sizeof(float));
        if (m->positions) {
            const float *position = m->positions + (t->known + p.at) * m->width;
            for (int64_t i = 0; i < m->width; i++)
                x[i] += position[i];
        }
    }
}

/* Logits (B, V) after the last of `count` new tokens in each of B windows, of which `known` tokens
   are remembered: ids (B, count). Returns 0, and does nothing, where an id is none of V. */
int next_logits(const struct model *m, const struct memory *to, int64_t samples, int64_t count,
                int64_t known, const int64_t *ids, float *logits)
{
    for (int64_t i = 0; i < samples * count; i++)
        if (ids[i] < 0 || ids[i] >= m->vocab_size)
            return 0;
    struct tokens t = {ids, samples, count, known, 0, 0};
    for (; t.begin < samples * count; t.begin += t.rows) {
        int64_t left = samples * count - t.begin, rows = t.rows = left < to->rows ? left : to->rows;
        if (!m->token_maps || m->residual)
            embed(m, to, &t);
        for (int64_t layer = 0; layer < m->layers; layer++) {
            const struct block *b = m->blocks + layer;
            if (m->heads)
                attend(m, to, layer, &t);
            if (layer == m->layers - 1)
                rows = keep_last(to, &t);
            if (m->heads)
                pass_on(m, to, &b->projection, rows);
            if (m->mlp != NO_MLP)
                feed_forward(m, to, b, rows);
        }
        const float *read = normed(m, to, rows, m->head.inputs, m->last_norm);
        product(&m->head, rows, read, to->stride, logits, m->head.outputs, 0);
        logits += rows * m->head.outputs;
    }
    return 1;
}
