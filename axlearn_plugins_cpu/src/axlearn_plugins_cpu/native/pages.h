// Code shared by attention for one token and for chunks, for one instruction set. Include after lanes.h.

// The pages of one request, for one key-value head.
template <class Q, class T>
struct Pages {
  const Paged<Q, T>& call;
  const int64_t request, group;

  // Out-of-range page numbers are clamped, because unused table entries are unspecified.
  TARGET int64_t offset(int64_t number, int64_t kind) const {
    const int64_t listed = call.table[request * call.most_pages + number];
    const int64_t page = std::min(std::max<int64_t>(listed, 0), call.pages_count - 1);
    return ((page * 2 + kind) * call.groups + group) * call.page_size;
  }

  TARGET const T* keys(int64_t number) const { return call.pages + offset(number, 0) * call.size; }
  TARGET const T* values(int64_t number) const { return call.pages + offset(number, 1) * call.size; }
  TARGET const float* key_scales(int64_t number) const { return call.scales ? call.scales + offset(number, 0) : nullptr; }
  TARGET const float* value_scales(int64_t number) const { return call.scales ? call.scales + offset(number, 1) : nullptr; }

  TARGET const T* key(int64_t slot) const { return at(slot, 0) * call.size + call.pages; }
  TARGET const T* value(int64_t slot) const { return at(slot, 1) * call.size + call.pages; }
  TARGET float key_scale(int64_t slot) const { return call.scales ? call.scales[at(slot, 0)] : 1.0f; }
  TARGET float value_scale(int64_t slot) const { return call.scales ? call.scales[at(slot, 1)] : 1.0f; }

  TARGET int64_t at(int64_t slot, int64_t kind) const {
    const int64_t number = slot / call.page_size;
    return offset(number, kind) + slot - number * call.page_size;
  }
};

// The keys and values of one row of a batch, for one key-value head.
struct Rows {
  const float *keys, *values;
  const int64_t stride;

  TARGET const float* key(int64_t slot) const { return keys + slot * stride; }
  TARGET const float* value(int64_t slot) const { return values + slot * stride; }
  TARGET float key_scale(int64_t) const { return 1.0f; }
  TARGET float value_scale(int64_t) const { return 1.0f; }
};

// Prefetches a token's vector.
template <class T>
TARGET static inline void fetch(const T* x, int64_t size) {
  for (int64_t at = 0; at < size; at += 64 / sizeof(T)) __builtin_prefetch(x + at);
}

TARGET static inline void cap(float* scores, int64_t count, float softcap) {
  if (softcap <= 0) return;
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, capped(load(scores + i), softcap));
}

// Sets the largest score and the sum of weights before the first key. A sink acts as a first key without a value. The largest
// score is finite, because blocks of hidden keys subtract it from itself.
TARGET static inline void start(const float* sinks, int64_t head, float& peak, float& total) {
  peak = sinks ? std::max(sinks[head], LOW) : LOW;
  total = sinks ? 1.0f : 0.0f;
}

// Turns `count` scores into weights and zero-pads them to a whole vector. Updates `peak`, the largest score so far, and
// `total`, the sum of weights so far. Returns the factor by which to scale older sums.
TARGET static inline float softmax(float* scores, int64_t count, float& peak, float& total) {
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; ++i) scores[i] = HIDDEN;
  Vector most = Vector{} + peak;
  for (int64_t i = 0; i < padded; i += LANES) most = largest(most, load(scores + i));
  const float highest = largest(most);
  const float shrink = exponential(Vector{} + (peak - highest))[0];
  Vector sums = {};
  for (int64_t i = 0; i < padded; i += LANES) {
    const Vector weights = exponential(load(scores + i) - highest);
    store(scores + i, weights);
    sums += weights;
  }
  peak = highest;
  total = total * shrink + sum(sums);
  return shrink;
}

// Returns the divisor of a sum of weighted values. A token that sees no key has the sum 0, and its result is 0.
TARGET static inline float divisor(float total) { return total == 0 ? 1.0f : total; }

// Returns the logarithm of the softmax's denominator, or LOW if no key is visible.
TARGET static inline float log_sum(float peak, float total) { return total == 0 ? LOW : peak + std::log(total); }
