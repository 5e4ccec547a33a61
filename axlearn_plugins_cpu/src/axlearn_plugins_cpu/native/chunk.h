// Attention for several tokens of one request, for one instruction set. Include after lanes.h and pages.h.
//
// The rows are the queries of a tile of tokens, for all query heads of one key-value head. KEYS keys at a time are
// transposed and multiplied with all rows, with an online softmax. The softmax handles LANES rows together, because most of
// its cost for one row would be the reduction of a vector to its sum and its maximum.
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

  // Hides the keys of [begin, begin + KEYS) that a row at `position` does not see: later ones, and those before its window.
  TARGET void hide(float* scores, int64_t begin, int64_t position) const {
    const int64_t count = std::min<int64_t>(KEYS, std::max<int64_t>(0, position - begin + 1));
    const int64_t outside = call.window > 0 ? std::max<int64_t>(0, position - call.window + 1 - begin) : 0;
    for (int64_t i = 0; i < std::min(count, outside); ++i) scores[i] = HIDDEN;
    for (int64_t i = count; i < KEYS; ++i) scores[i] = HIDDEN;
  }

  // Turns the scores of LANES rows, [LANES, KEYS], into weights. Updates the rows' largest scores and sums of weights so far, and
  // sets the factors by which to scale older sums.
  TARGET void weigh(float* scores, float* peaks, float* totals, float* shrinks) const {
    Vector parts[LANES];
    for (int i = 0; i < LANES; ++i) {
      parts[i] = load(scores + i * KEYS);
      for (int64_t key = LANES; key < KEYS; key += LANES) parts[i] = largest(parts[i], load(scores + i * KEYS + key));
    }
    const Vector peak = load(peaks);
    store(peaks, largest(peak, largest_of_rows(parts)));
    const Vector shrink = exponential(peak - load(peaks));
    store(shrinks, shrink);
    for (int i = 0; i < LANES; ++i) {
      parts[i] = Vector{};
      for (int64_t key = 0; key < KEYS; key += LANES) {
        const Vector weights = exponential(load(scores + i * KEYS + key) - peaks[i]);
        store(scores + i * KEYS + key, weights);
        parts[i] += weights;
      }
    }
    store(totals, load(totals) * shrink + sums(parts));
  }

  // Computes tokens [first, first + tokens) of the call. The first token is at `position`. Slots before `end` have keys.
  TARGET void run(int64_t first, int64_t tokens, int64_t position, int64_t end) const {
    const int64_t size = call.size, heads = call.heads;
    const int64_t used = tokens * heads, rows = (used + LANES - 1) / LANES * LANES;
    float* query = scratch_memory(2 * rows * size + LANES * KEYS + 2 * KEYS * size + 3 * rows);
    float *result = query + rows * size, *scores = result + rows * size, *keys = scores + LANES * KEYS;
    float *values = keys + KEYS * size, *peaks = values + KEYS * size, *totals = peaks + rows, *shrinks = totals + rows;
    auto at = [&](int64_t row) { return (((first + row / heads) * call.groups + group) * heads + row % heads) * size; };
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t h = 0; h < size; h += LANES) {
        store(query + row * size + h, row < used ? load(call.query + at(row) + h) * call.scale : Vector{});
        store(result + row * size + h, Vector{});
      }
      start(row < used ? call.sinks : nullptr, group * heads + row % heads, peaks[row], totals[row]);
    }
    for (int64_t i = 0; i < LANES * KEYS; i += LANES) store(scores + i, Vector{});
    const int64_t last = std::min(end, position + tokens);
    const int64_t visible = call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0;
    const int64_t ahead = (KEYS * LANES + rows - 1) / rows;  // slots to prefetch per LANES rows, for the next KEYS keys
    for (int64_t begin = visible / KEYS * KEYS; begin < last; begin += KEYS) {
      copy(begin, last, keys, values);
      const int64_t count = std::min(KEYS, last - begin);
      for (int64_t row = 0, next = begin + KEYS; row < rows; row += LANES, next += ahead) {
        for (int64_t slot = next; slot < std::min({next + ahead, begin + 2 * KEYS, last}); ++slot) {
          fetch(source.key(slot), size);
          fetch(source.value(slot), size);
        }
        const int64_t block = std::min<int64_t>(LANES, (used - row + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS);
        multiply(query + row * size, keys, block, scores);
        cap(scores, LANES * KEYS, call.softcap);
        const bool all_visible = call.window <= 0 && position + row / heads >= begin + KEYS - 1;
        if (!all_visible)
          for (int i = 0; i < LANES; ++i) hide(scores + i * KEYS, begin, position + (row + i) / heads);
        weigh(scores, peaks + row, totals + row, shrinks + row);
        int64_t h = 0;
        for (; h + 2 * LANES <= size; h += 2 * LANES)
          add<2>(scores, values, shrinks + row, block, count, h, result + row * size);
        for (; h < size; h += LANES) add<1>(scores, values, shrinks + row, block, count, h, result + row * size);
      }
    }
    for (int64_t row = 0; row < used; ++row)
      for (int64_t h = 0; h < size; h += LANES)
        store(call.result + at(row) + h, load(result + row * size + h) / divisor(totals[row]));
    for (int64_t row = 0; call.log_sums && row < used; ++row) call.log_sums[at(row) / size] = log_sum(peaks[row], totals[row]);
  }
};
