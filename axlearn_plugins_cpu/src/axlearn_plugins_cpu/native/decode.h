// Attention for requests with one token, for one instruction set. Include after lanes.h and pages.h.
//
// All query heads of a key-value head use a key while it is in registers. Scores are computed for BLOCK keys at a time,
// with an online softmax over the blocks (Milakov & Gimelshein, 2018). The code prefetches the next page, because pages are
// not contiguous and the hardware prefetcher cannot predict them.

template <class Q, class T>
struct Decode {
  static constexpr int64_t BLOCK = 512;
  static constexpr int64_t MOST_HEADS = 4;

  const Paged<Q, T>& call;
  const Pages<Q, T> pages;
  const int64_t request, group;

  // Computes the scores of keys [begin, end) for HEADS heads, into rows of BLOCK.
  template <int HEADS>
  TARGET void scores(const float* query, int64_t begin, int64_t end, float* to) const {
    const int64_t size = call.size;
    for (int64_t key = begin; key < end;) {
      const int64_t number = key / call.page_size, first = key - number * call.page_size;
      const int64_t stop = std::min(call.page_size, end - number * call.page_size);
      const bool last = (number + 1) * call.page_size >= end;
      const T* ahead = last ? pages.values(begin / call.page_size) : pages.keys(number + 1);
      const T* row = pages.keys(number) + first * size;
      const float* scales = pages.key_scales(number);
      for (int64_t slot = first; slot < stop; ++slot, ++key, row += size) {
        fetch(ahead + slot * size, size);
        Vector products[HEADS] = {};
        for (int64_t at = 0; at < size; at += LANES) {
          const Vector part = load(row + at);
          for (int head = 0; head < HEADS; ++head) products[head] += load(query + head * size + at) * part;
        }
        const float scale = scales ? scales[slot] : 1.0f;
        for (int head = 0; head < HEADS; ++head) to[head * BLOCK + key - begin] = sum(products[head]) * scale;
      }
    }
  }

  // Adds the weighted values of keys [begin, end), for WIDTH vectors from offset `at` on.
  template <int HEADS, int WIDTH>
  TARGET void values(const float* weights, int64_t begin, int64_t end, int64_t at, float* result) const {
    const int64_t size = call.size;
    Vector sums[HEADS][WIDTH];
    for (int head = 0; head < HEADS; ++head)
      for (int i = 0; i < WIDTH; ++i) sums[head][i] = load(result + head * size + at + i * LANES);
    for (int64_t key = begin; key < end;) {
      const int64_t number = key / call.page_size, first = key - number * call.page_size;
      const int64_t stop = std::min(call.page_size, end - number * call.page_size);
      const bool last = (number + 1) * call.page_size >= end;
      const T* row = pages.values(number) + first * size;
      const T* ahead = last ? row : pages.values(number + 1);
      const float* scales = pages.value_scales(number);
      for (int64_t slot = first; slot < stop; ++slot, ++key, row += size) {
        fetch(ahead + slot * size, size);
        const float scale = scales ? scales[slot] : 1.0f;
        Vector parts[WIDTH];
        for (int i = 0; i < WIDTH; ++i) parts[i] = load(row + at + i * LANES) * scale;
        for (int head = 0; head < HEADS; ++head)
          for (int i = 0; i < WIDTH; ++i) sums[head][i] += weights[head * BLOCK + key - begin] * parts[i];
      }
    }
    for (int head = 0; head < HEADS; ++head)
      for (int i = 0; i < WIDTH; ++i) store(result + head * size + at + i * LANES, sums[head][i]);
  }

  template <int HEADS>
  TARGET void heads(int64_t head, float* scratch) const {
    const int64_t size = call.size, length = std::min<int64_t>(call.lengths[request], call.most_pages * call.page_size);
    const int64_t visible = call.window > 0 ? std::max<int64_t>(0, length - call.window) : 0;
    float *query = scratch, *result = query + HEADS * size, *weights = result + HEADS * size;
    const int64_t row = (request * call.groups + group) * call.heads + head;
    for (int64_t at = 0; at < HEADS * size; at += LANES) {
      store(query + at, load(call.query + row * size + at) * call.scale);
      store(result + at, Vector{});
    }
    float peaks[HEADS], totals[HEADS] = {};
    for (int i = 0; i < HEADS; ++i) start(call.sinks, group * call.heads + head + i, peaks[i], totals[i]);
    for (int64_t begin = visible; begin < length; begin += BLOCK) {
      const int64_t end = std::min<int64_t>(length, begin + BLOCK);
      scores<HEADS>(query, begin, end, weights);
      for (int i = 0; i < HEADS; ++i) {
        float* head_weights = weights + i * BLOCK;
        cap(head_weights, end - begin, call.softcap);
        const float shrink = softmax(head_weights, end - begin, peaks[i], totals[i]);
        for (int64_t at = 0; at < size; at += LANES) store(result + i * size + at, load(result + i * size + at) * shrink);
      }
      int64_t at = 0;
      for (; at + 4 * LANES <= size; at += 4 * LANES) values<HEADS, 4>(weights, begin, end, at, result);
      for (; at < size; at += LANES) values<HEADS, 1>(weights, begin, end, at, result);
    }
    for (int i = 0; i < HEADS; ++i)
      for (int64_t at = 0; at < size; at += LANES)
        store(call.result + (row + i) * size + at, load(result + i * size + at) / divisor(totals[i]));
    for (int i = 0; call.log_sums && i < HEADS; ++i) call.log_sums[row + i] = log_sum(peaks[i], totals[i]);
  }
};

template <class Q, class T>
TARGET void decode(const Paged<Q, T>& call, int64_t request, int64_t group) {
  using Work = Decode<Q, T>;
  float* scratch = scratch_memory(Work::MOST_HEADS * (2 * call.size + Work::BLOCK));
  const Work work{call, {call, request, group}, request, group};
  int64_t head = 0;
  for (; head + 4 <= call.heads; head += 4) work.template heads<4>(head, scratch);
  if (call.heads - head == 3) work.template heads<3>(head, scratch);
  if (call.heads - head == 2) work.template heads<2>(head, scratch);
  if (call.heads - head == 1) work.template heads<1>(head, scratch);
}
