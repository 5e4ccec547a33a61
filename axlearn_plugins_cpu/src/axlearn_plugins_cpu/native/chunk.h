// Attention for several tokens of one request, for one instruction set. Include after lanes.h and pages.h.
//
// The rows are the queries of a tile of tokens, for all query heads of one key-value head. KEYS keys at a time are
// transposed and multiplied with all rows, with an online softmax.
//
// The result of a row is bitwise independent of the other rows and of how tokens are divided into tiles: every sum runs
// over slots in order, in blocks that begin at multiples of KEYS, and hidden finite values add 0. The `invariant` kernels
// rely on this.

// `Call` has the head sizes, the score parameters, the queries and the result, both [tokens, groups * heads, size].
// `Source` locates the key and the value of a slot, and their scales.
template <class Call, class Source>
struct Chunk {
  static constexpr int64_t KEYS = 64;
  static constexpr int64_t BLOCK_ROWS = LANES == 16 ? 8 : 4;  // rows whose products fit in registers

  const Call& call;
  const Source source;
  const int64_t group;

  // Copies the keys (transposed) and values of slots [begin, begin + KEYS) as float32; slots from `end` on are zero.
  TARGET void copy(int64_t begin, int64_t end, float* keys, float* values) const {
    const int64_t size = call.size;
    for (int64_t first = 0; first < KEYS; first += LANES) {
      const int64_t count = std::min<int64_t>(LANES, std::max<int64_t>(0, end - begin - first));
      decltype(source.key(0)) rows[LANES] = {};
      float scales[LANES] = {};
      for (int i = 0; i < LANES; ++i) {
        float* to = values + (first + i) * size;
        if (i >= count) {
          for (int64_t h = 0; h < size; h += LANES) store(to + h, Vector{});
          continue;
        }
        const int64_t slot = begin + first + i;
        rows[i] = source.key(slot);
        scales[i] = source.key_scale(slot);
        const auto* value = source.value(slot);
        const float scale = source.value_scale(slot);
        for (int64_t h = 0; h < size; h += LANES) store(to + h, load(value + h) * scale);
      }
      for (int64_t h = 0; h < size; h += LANES) {
        Vector square[LANES];
        for (int i = 0; i < LANES; ++i) square[i] = i < count ? load(rows[i] + h) * scales[i] : Vector{};
        transpose(square);
        for (int i = 0; i < LANES; ++i) store(keys + (h + i) * KEYS + first, square[i]);
      }
    }
  }

  // Multiplies [rows, size] queries with [size, KEYS] keys.
  TARGET void multiply(const float* query, const float* keys, int64_t rows, float* scores) const {
    const int64_t size = call.size;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
      for (int64_t key = 0; key < KEYS; key += 2 * LANES) {
        Vector sums[BLOCK_ROWS][2] = {};
        for (int64_t h = 0; h < size; ++h) {
          const Vector left = load(keys + h * KEYS + key), right = load(keys + h * KEYS + key + LANES);
          for (int i = 0; i < BLOCK_ROWS; ++i) {
            const float factor = query[(row + i) * size + h];
            sums[i][0] += factor * left;
            sums[i][1] += factor * right;
          }
        }
        for (int i = 0; i < BLOCK_ROWS; ++i) {
          store(scores + (row + i) * KEYS + key, sums[i][0]);
          store(scores + (row + i) * KEYS + key + LANES, sums[i][1]);
        }
      }
  }

  // Scales the result by `shrinks`, then adds the product of [rows, KEYS] weights and the first `count` of [KEYS, size]
  // values, for WIDTH vectors from offset `at` on.
  template <int WIDTH>
  TARGET void add(const float* weights, const float* values, const float* shrinks, int64_t rows, int64_t count, int64_t at,
                  float* result) const {
    const int64_t size = call.size;
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
      Vector sums[BLOCK_ROWS][WIDTH];
      for (int i = 0; i < BLOCK_ROWS; ++i)
        for (int w = 0; w < WIDTH; ++w) sums[i][w] = load(result + (row + i) * size + at + w * LANES) * shrinks[row + i];
      for (int64_t key = 0; key < count; ++key) {
        Vector parts[WIDTH];
        for (int w = 0; w < WIDTH; ++w) parts[w] = load(values + key * size + at + w * LANES);
        for (int i = 0; i < BLOCK_ROWS; ++i)
          for (int w = 0; w < WIDTH; ++w) sums[i][w] += weights[(row + i) * KEYS + key] * parts[w];
      }
      for (int i = 0; i < BLOCK_ROWS; ++i)
        for (int w = 0; w < WIDTH; ++w) store(result + (row + i) * size + at + w * LANES, sums[i][w]);
    }
  }

  // Updates the softmax of one row with the scores of KEYS keys from `begin` on. The row sees keys up to `position`, in its
  // window.
  TARGET float weigh(float* scores, int64_t begin, int64_t position, float& peak, float& total) const {
    const int64_t count = std::min<int64_t>(KEYS, std::max<int64_t>(0, position - begin + 1));
    const int64_t outside = call.window > 0 ? std::max<int64_t>(0, position - call.window + 1 - begin) : 0;
    const int64_t hidden = std::min(count, outside);
    cap(scores, KEYS, call.softcap);
    for (int64_t i = 0; i < hidden; ++i) scores[i] = HIDDEN;
    for (int64_t i = count; i < KEYS; ++i) scores[i] = HIDDEN;
    if (hidden < count) return softmax(scores, KEYS, peak, total);
    for (int64_t i = 0; i < KEYS; i += LANES) store(scores + i, Vector{});
    return 1.0f;
  }

  // Computes tokens [first, first + tokens) of the call. The first token is at `position`. Slots before `end` have keys.
  TARGET void run(int64_t first, int64_t tokens, int64_t position, int64_t end) const {
    const int64_t size = call.size, heads = call.heads;
    const int64_t used = tokens * heads, rows = (used + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
    float* query = scratch_memory(2 * rows * size + rows * KEYS + 2 * KEYS * size + 3 * rows);
    float *result = query + rows * size, *scores = result + rows * size, *keys = scores + rows * KEYS;
    float *values = keys + KEYS * size, *peaks = values + KEYS * size, *totals = peaks + rows, *shrinks = totals + rows;
    auto at = [&](int64_t row) { return (((first + row / heads) * call.groups + group) * heads + row % heads) * size; };
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t h = 0; h < size; h += LANES) {
        store(query + row * size + h, row < used ? load(call.query + at(row) + h) * call.scale : Vector{});
        store(result + row * size + h, Vector{});
      }
      start(row < used ? call.sinks : nullptr, group * heads + row % heads, peaks[row], totals[row]);
      shrinks[row] = 1;
    }
    const int64_t last = std::min(end, position + tokens);
    const int64_t visible = call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0;
    for (int64_t begin = visible / KEYS * KEYS; begin < last; begin += KEYS) {
      copy(begin, last, keys, values);
      multiply(query, keys, rows, scores);
      for (int64_t row = 0; row < used; ++row)
        shrinks[row] = weigh(scores + row * KEYS, begin, position + row / heads, peaks[row], totals[row]);
      const int64_t count = std::min(KEYS, last - begin);
      int64_t h = 0;
      for (; h + 2 * LANES <= size; h += 2 * LANES) add<2>(scores, values, shrinks, rows, count, h, result);
      for (; h < size; h += LANES) add<1>(scores, values, shrinks, rows, count, h, result);
    }
    for (int64_t row = 0; row < used; ++row)
      for (int64_t h = 0; h < size; h += LANES)
        store(call.result + at(row) + h, load(result + row * size + h) / divisor(totals[row]));
  }
};
