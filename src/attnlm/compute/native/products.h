/* Matmuls of few or many rows by a weight matrix. */

#define PANEL 32
#define PARTS (PANEL / LANES)
#if LANES == 16
#define TILE 8 /* rows */
#define WIDE 4 /* panels */
#define ROWS 6 /* rows of x per tile with OUTPUTS rows of a matrix */
#elif LANES == 8
#define TILE 3
#define WIDE 2
#define ROWS 2
#else
#define TILE 2
#define WIDE 1
#define ROWS 2
#endif
#define OUTPUTS 4
#define MOST_SUMS 16 /* vectors: TILE rows and one panel, or one row and WIDE panels */
#define NEAR 65536   /* elements of a matrix that stay in the cache for all rows of x */

/* A projection. Its matrix has one of two layouts. Panels: the weights of 32 outputs for the first
   input, then for the second input, and so on. Rows: pointers to the rows of the model's own matrix,
   one row for each output. `outputs` is padded with zeros to whole panels. */
struct map {
    int64_t inputs, outputs;
    const float *panels, *const *rows; /* one is NULL; both are NULL if the model lacks this projection */
    const float *bias;
};

INLINE int there_is(const struct map *map)
{
    return map->panels || map->rows;
}

/* A few rows of x times a few panels. Both numbers are constants at each call, so that the sums stay
   in registers. Each sum adds in the same order for any number of rows and panels. */
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

/* Compute the outputs whose weights are in `panels`. */
static void by_panels(const struct map *map, const float *panels, struct range outputs, int64_t rows,
                      const float *x, int64_t x_stride, float *y, int64_t y_stride, int add)
{
#define PRODUCT(few, wide) \
    tile(few, wide, map->inputs, x + r * x_stride, x_stride, panels + (o - outputs.begin) * map->inputs, \
         map->bias + o, y + r * y_stride + o, y_stride, add)
    for (int64_t o = outputs.begin, r = 0; o < outputs.end; o += PANEL, r = 0) {
        if (rows == 1 && o + WIDE * PANEL <= outputs.end) {
            PRODUCT(1, WIDE); /* a single row has too few sums to keep the processor busy */
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

/* Return the sum of a vector's elements, added by quarters. */
INLINE float folded(vector x)
{
    four sums = *(four *)&x;
    for (int l = 4; l < LANES; l += 4)
        sums += *(four *)((float *)&x + l);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* A few rows of x times OUTPUTS rows of a matrix: `tile` for the other layout. */
INLINE void rows_tile(const int rows, int64_t inputs, const float *x, int64_t x_stride,
                      const float *const *matrix, const float *bias, float *y, int64_t y_stride,
                      int add)
{
    const float *weights[OUTPUTS];
    vector sums[ROWS * OUTPUTS] = {{0}};
    for (int o = 0; o < OUTPUTS; o++)
        weights[o] = matrix[o];
    for (int64_t i = 0; i < inputs; i += LANES) {
        vector parts[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++)
            parts[o] = load(weights[o] + i);
        for (int r = 0; r < rows; r++) {
            vector read = load(x + r * x_stride + i);
            for (int o = 0; o < OUTPUTS; o++)
                sums[r * OUTPUTS + o] += read * parts[o];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < OUTPUTS; o++) {
            float *to = y + r * y_stride + o;
            *to = folded(sums[r * OUTPUTS + o]) + bias[o] + (add ? *to : 0);
        }
}

static void by_rows(const struct map *map, struct range outputs, int64_t rows, const float *x,
                    int64_t x_stride, float *y, int64_t y_stride, int add)
{
#define PRODUCT(few) \
    for (int64_t o = first; o < end; o += OUTPUTS) \
        rows_tile(few, map->inputs, x + r * x_stride, x_stride, map->rows + o, map->bias + o, \
                  y + r * y_stride + o, y_stride, add)
    const int64_t few = NEAR / map->inputs / OUTPUTS * OUTPUTS, most = few > OUTPUTS ? few : OUTPUTS;
    for (int64_t first = outputs.begin; first < outputs.end; first += most) {
        int64_t r = 0, end = first + most < outputs.end ? first + most : outputs.end;
        for (; r + ROWS <= rows; r += ROWS)
            PRODUCT(ROWS);
        for (; ROWS > 2 && r + 2 <= rows; r += 2)
            PRODUCT(2);
        for (; r < rows; r++)
            PRODUCT(1);
    }
#undef PRODUCT
}

/* Copy 32 rows of a matrix to a panel, in blocks of 4 × 4. */
static void pack(const struct map *map, int64_t output, float *panel)
{
    const float *const *rows = map->rows + output;
    for (int64_t i = 0; i < map->inputs; i += 4)
        for (int o = 0; o < PANEL; o += 4) {
            four a = *(four *)(rows[o] + i), b = *(four *)(rows[o + 1] + i);
            four c = *(four *)(rows[o + 2] + i), d = *(four *)(rows[o + 3] + i);
            for (int l = 0; l < 4; l++)
                *(four *)(panel + (i + l) * PANEL + o) = (four){a[l], b[l], c[l], d[l]};
        }
}

/* Compute y = map(x), or y += map(x), for a member's part of the outputs, in whole panels. `panel` is
   scratch of 32 · `inputs` numbers. With it, rows of a matrix are first copied to panels, which is
   faster if x has many rows. The two ways add in different orders, so the choice between them must not
   depend on other samples. */
static void product(struct member who, const struct map *map, float *panel, int64_t rows,
                    const float *x, int64_t x_stride, float *y, int64_t y_stride, int add)
{
    struct range panels = share(who, map->outputs / PANEL);
    struct range outputs = {panels.begin * PANEL, panels.end * PANEL};
    if (!map->rows)
        by_panels(map, map->panels + outputs.begin * map->inputs, outputs, rows, x, x_stride, y,
                  y_stride, add);
    else if (!panel)
        by_rows(map, outputs, rows, x, x_stride, y, y_stride, add);
    else
        for (int64_t o = outputs.begin; o < outputs.end; o += PANEL) {
            pack(map, o, panel);
            by_panels(map, panel, (struct range){o, o + PANEL}, rows, x, x_stride, y, y_stride, add);
        }
}
