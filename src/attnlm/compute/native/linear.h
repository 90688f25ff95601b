/* Linear layers: matmuls of any number of rows with a weight matrix. */

#define LINEAR_PANEL 32
#define PANEL_VECTORS (LINEAR_PANEL / LANES)
#if LANES == 16
#define LINEAR_TILE_ROWS 8 /* rows */
#define LINEAR_TILE_PANELS 4 /* panels */
#elif LANES == 8
#define LINEAR_TILE_ROWS 3
#define LINEAR_TILE_PANELS 2
#else
#define LINEAR_TILE_ROWS 2
#define LINEAR_TILE_PANELS 1
#endif
#define LINEAR_SUMS 16 /* vectors: LINEAR_TILE_ROWS rows of a panel, or a row of LINEAR_TILE_PANELS panels */

/* A linear layer. A panel has the weights of 32 outputs for the first input, then for the second input,
   and so on. `outputs` is padded with zeros to whole panels. */
struct linear {
    int64_t inputs, outputs;
    const float *panels; /* or NULL if the model lacks this layer */
    const float *bias;
};

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

static void multiply_panels(const struct linear *linear, struct range outputs, int64_t rows,
                            const float *x, int64_t x_stride, float *y, int64_t y_stride, int add)
{
#define PRODUCT(tile_rows, tile_panels) \
    panel_tile(tile_rows, tile_panels, linear->inputs, x + r * x_stride, x_stride, \
               linear->panels + o * linear->inputs, linear->bias + o, y + r * y_stride + o, \
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

/* Compute y = linear(x), or y += linear(x) with `add`, for a member's range of outputs, in whole panels.
   A sum does not depend on the number of rows. */
static void linear_forward(struct member self, const struct linear *linear, int64_t rows, const float *x,
                           int64_t x_stride, float *y, int64_t y_stride, int add)
{
    struct range panels = own_range(self, linear->outputs / LINEAR_PANEL);
    struct range outputs = {panels.begin * LINEAR_PANEL, panels.end * LINEAR_PANEL};
    multiply_panels(linear, outputs, rows, x, x_stride, y, y_stride, add);
}
