/* Linear layers: matmuls of any number of rows with a weight matrix. */

#define LINEAR_PANEL 32
#define PANEL_VECTORS (LINEAR_PANEL / LANES)
#if LANES == 16
#define LINEAR_TILE_ROWS 8 /* rows */
#define LINEAR_TILE_PANELS 4 /* panels */
#define ROW_TILE_ROWS 6 /* rows of x per tile with ROW_TILE_OUTPUTS rows of a matrix */
#elif LANES == 8
#define LINEAR_TILE_ROWS 3
#define LINEAR_TILE_PANELS 2
#define ROW_TILE_ROWS 2
#else
#define LINEAR_TILE_ROWS 2
#define LINEAR_TILE_PANELS 1
#define ROW_TILE_ROWS 2
#endif
#define ROW_TILE_OUTPUTS 4
#define LINEAR_SUMS 16 /* vectors: LINEAR_TILE_ROWS rows of a panel, or a row of LINEAR_TILE_PANELS panels */
#define MOST_CACHED 65536 /* elements of a matrix that stay in the cache for all rows of x */

/* A linear layer. Its matrix has one of two layouts. Panels: the weights of 32 outputs for the first
   input, then for the second input, and so on. Rows: pointers to the rows of the model's matrix, one
   row per output. `outputs` is padded with zeros to whole panels. */
struct linear {
    int64_t inputs, outputs;
    const float *panels;      /* or NULL; both are NULL if the model lacks this layer */
    const float *const *rows; /* or NULL */
    const float *bias;
};

INLINE int exists(const struct linear *linear)
{
    return linear->panels || linear->rows;
}

/* Multiply a few rows of x by a few panels. Both numbers are constants at each call, so that the sums
   stay in registers. The order of each sum does not depend on the numbers of rows and panels. */
INLINE void panel_tile(const int rows, const int panels, int64_t inputs, const float *x,
                       int64_t x_stride, const float *matrix, const float *bias, float *y,
                       int64_t y_stride, int add)
{
    const int vectors = panels * PANEL_VECTORS;
    vector sums[LINEAR_SUMS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            sums[r * vectors + v] = load(bias + v * LANES);
            if (add)
                sums[r * vectors + v] += load(y + r * y_stride + v * LANES);
        }
    for (int64_t i = 0; i < inputs; i++)
        for (int v = 0; v < vectors; v++) {
            const float *panel = matrix + v / PANEL_VECTORS * inputs * LINEAR_PANEL;
            vector weights = load(panel + i * LINEAR_PANEL + v % PANEL_VECTORS * LANES);
            for (int r = 0; r < rows; r++)
                sums[r * vectors + v] += x[r * x_stride + i] * weights;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(vector *)(y + r * y_stride + v * LANES) = sums[r * vectors + v];
}

/* Compute the outputs whose weights are in `panels`. */
static void multiply_panels(const struct linear *linear, const float *panels, struct range outputs,
                            int64_t rows, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                            int add)
{
#define PRODUCT(tile_rows, tile_panels) \
    panel_tile(tile_rows, tile_panels, linear->inputs, x + r * x_stride, x_stride, \
               panels + (o - outputs.begin) * linear->inputs, linear->bias + o, y + r * y_stride + o, \
               y_stride, add)
    for (int64_t o = outputs.begin, r = 0; o < outputs.end; o += LINEAR_PANEL, r = 0) {
        if (rows == 1 && o + LINEAR_TILE_PANELS * LINEAR_PANEL <= outputs.end) {
            /* A panel of a single row has too few sums to keep the processor busy. */
            PRODUCT(1, LINEAR_TILE_PANELS);
            o += (LINEAR_TILE_PANELS - 1) * LINEAR_PANEL;
            continue;
        }
        for (; r + LINEAR_TILE_ROWS <= rows; r += LINEAR_TILE_ROWS)
            PRODUCT(LINEAR_TILE_ROWS, 1);
        if (LINEAR_TILE_ROWS > 4)
            for (; r + 4 <= rows; r += 4)
                PRODUCT(4, 1);
        for (; r + 2 <= rows; r += 2)
            PRODUCT(2, 1);
        if (r < rows)
            PRODUCT(1, 1);
    }
#undef PRODUCT
}

/* Return the sum of a vector's lanes, in another order than `sum_lanes` (simd.h): by quarters. */
INLINE float sum_lanes_pairwise(vector x)
{
    vector4 sums = *(vector4 *)&x;
    for (int l = 4; l < LANES; l += 4)
        sums += *(vector4 *)((float *)&x + l);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Multiply a few rows of x by ROW_TILE_OUTPUTS rows of a matrix. */
INLINE void row_tile(const int rows, int64_t inputs, const float *x, int64_t x_stride,
                     const float *const *matrix, const float *bias, float *y, int64_t y_stride,
                     int add)
{
    const float *weights[ROW_TILE_OUTPUTS];
    vector sums[ROW_TILE_ROWS * ROW_TILE_OUTPUTS] = {{0}};
    for (int o = 0; o < ROW_TILE_OUTPUTS; o++)
        weights[o] = matrix[o];
    for (int64_t i = 0; i < inputs; i += LANES) {
        vector columns[ROW_TILE_OUTPUTS];
        for (int o = 0; o < ROW_TILE_OUTPUTS; o++)
            columns[o] = load(weights[o] + i);
        for (int r = 0; r < rows; r++) {
            vector input = load(x + r * x_stride + i);
            for (int o = 0; o < ROW_TILE_OUTPUTS; o++)
                sums[r * ROW_TILE_OUTPUTS + o] += input * columns[o];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < ROW_TILE_OUTPUTS; o++) {
            float *target = y + r * y_stride + o;
            *target = sum_lanes_pairwise(sums[r * ROW_TILE_OUTPUTS + o]) + bias[o] + (add ? *target : 0);
        }
}

static void multiply_rows(const struct linear *linear, struct range outputs, int64_t rows,
                          const float *x, int64_t x_stride, float *y, int64_t y_stride, int add)
{
#define PRODUCT(tile_rows) \
    for (int64_t o = first; o < end; o += ROW_TILE_OUTPUTS) \
    row_tile(tile_rows, linear->inputs, x + r * x_stride, x_stride, linear->rows + o, linear->bias + o, \
             y + r * y_stride + o, y_stride, add)
    const int64_t cached = MOST_CACHED / linear->inputs / ROW_TILE_OUTPUTS * ROW_TILE_OUTPUTS;
    const int64_t block = cached > ROW_TILE_OUTPUTS ? cached : ROW_TILE_OUTPUTS;
    for (int64_t first = outputs.begin; first < outputs.end; first += block) {
        const int64_t end = smaller(first + block, outputs.end);
        int64_t r = 0;
        for (; r + ROW_TILE_ROWS <= rows; r += ROW_TILE_ROWS)
            PRODUCT(ROW_TILE_ROWS);
        if (ROW_TILE_ROWS > 2)
            for (; r + 2 <= rows; r += 2)
                PRODUCT(2);
        for (; r < rows; r++)
            PRODUCT(1);
    }
#undef PRODUCT
}

/* Copy 32 rows of a matrix to a panel, in blocks of 4 × 4. */
static void pack_panel(const struct linear *linear, int64_t output, float *panel)
{
    const float *const *rows = linear->rows + output;
    for (int64_t i = 0; i < linear->inputs; i += 4)
        for (int o = 0; o < LINEAR_PANEL; o += 4) {
            vector4 a = *(vector4 *)(rows[o] + i), b = *(vector4 *)(rows[o + 1] + i);
            vector4 c = *(vector4 *)(rows[o + 2] + i), d = *(vector4 *)(rows[o + 3] + i);
            for (int l = 0; l < 4; l++)
                *(vector4 *)(panel + (i + l) * LINEAR_PANEL + o) = (vector4){a[l], b[l], c[l], d[l]};
        }
}

/* Compute y = linear(x), or y += linear(x) with `add`, for a member's range of outputs, in whole panels.
   `panel` is scratch memory for 32 · `inputs` numbers, or NULL. If it is not NULL, the rows of a matrix
   are first copied to panels, which is faster if x has many rows. The two layouts sum in different
   orders, so the choice between them must not depend on other samples. */
static void linear_forward(struct member self, const struct linear *linear, float *panel, int64_t rows,
                           const float *x, int64_t x_stride, float *y, int64_t y_stride, int add)
{
    struct range panels = own_range(self, linear->outputs / LINEAR_PANEL);
    struct range outputs = {panels.begin * LINEAR_PANEL, panels.end * LINEAR_PANEL};
    if (!linear->rows)
        multiply_panels(linear, linear->panels + outputs.begin * linear->inputs, outputs, rows, x,
                        x_stride, y, y_stride, add);
    else if (!panel)
        multiply_rows(linear, outputs, rows, x, x_stride, y, y_stride, add);
    else
        for (int64_t o = outputs.begin; o < outputs.end; o += LINEAR_PANEL) {
            pack_panel(linear, o, panel);
            const struct range own_panel = {o, o + LINEAR_PANEL};
            multiply_panels(linear, panel, own_panel, rows, x, x_stride, y, y_stride, add);
        }
}
