// CPU attention as XLA FFI handlers: over pages, and over rows of a batch.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "native.h"

namespace axlearn {
namespace {

struct BFloat16 {
  uint16_t bits;
};

constexpr float LOW = -1e30f;  // lower scores count as hidden, as in the other kernels
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
constexpr int64_t FEWEST_ROWS = 128;  // per tile; each tile copies all keys and values, which should take little of its time
constexpr int64_t TILE_BYTES = 1 << 18;  // the queries, scores and results of a tile stay in the second-level cache
constexpr int64_t TILES_PER_THREAD = 2;
constexpr int64_t BYTES_PER_THREAD = 1 << 17, FLOPS_PER_THREAD = 1 << 19;  // 10 microseconds, the cost of waking a thread

// Consecutive chunks of one request. They share its keys and are divided into tiles of tokens.
struct Segment {
  int64_t request;   // the last chunk, whose table lists all pages
  int64_t token;     // index of the first query
  int64_t tokens;    // number of queries
  int64_t position;  // of the first token in the request
  int64_t tile;      // tokens per tile
  int64_t tiles;
};

// One device's operands of a call; the letters are those of `PagedAttentionOp`. Shapes: queries and the result
// [T, groups * heads, size], pages [P, 2, groups, page_size, size] (keys, then values), optional scales
// [P, 2, groups, page_size], the table [R, most_pages], lengths [R], optional sinks [groups * heads], optional logarithms of the
// softmax's denominators [T, groups * heads]. The first `singles` requests have one token each, the others have `chunk` tokens.
// `invariant` makes single tokens use the code for chunks.
template <class Q, class T>
struct Paged {
  const Q* query;
  const T* pages;
  const float* scales;
  const int32_t *table, *lengths;
  const float* sinks;
  Q* result;
  float* log_sums;
  int64_t groups, heads, size, page_size, most_pages, pages_count, singles, chunks, chunk, window;
  float scale, softcap;
  bool invariant;

  std::vector<Segment> segments = {};
  int64_t tiles = 0;  // of all segments

  int64_t items() const { return groups * (singles + tiles); }

  // Returns whether chunk `next` continues the request of chunk `next - 1`.
  bool continues(int64_t next) const {
    const int64_t length = lengths[next - 1];
    if (lengths[next] != length + chunk) return false;
    const int64_t used = std::min(most_pages, (length + page_size - 1) / page_size);
    const int32_t* row = table + (next - 1) * most_pages;
    return std::equal(row, row + used, row + most_pages);
  }

  // Finds the segments and divides them into tiles: few large ones, but enough for all threads.
  void divide(int64_t processors) {
    const int64_t fewest = std::max<int64_t>(1, FEWEST_ROWS / heads);
    const int64_t most = std::max(fewest, TILE_BYTES / static_cast<int64_t>(sizeof(float)) / (2 * size + 64) / heads);
    const int64_t wanted = groups * chunks * chunk / (TILES_PER_THREAD * processors);
    const int64_t largest = std::min(most, std::max(fewest, wanted));
    for (int64_t request = singles; request < singles + chunks; ++request) {
      if (request > singles && continues(request)) {
        segments.back().request = request;
        segments.back().tokens += chunk;
      } else {
        segments.push_back({request, singles + (request - singles) * chunk, chunk, lengths[request] - chunk, 0, 0});
      }
    }
    for (Segment& segment : segments) {
      segment.tiles = (segment.tokens + largest - 1) / largest;
      segment.tile = (segment.tokens + segment.tiles - 1) / segment.tiles;
      tiles += segment.tiles;
    }
  }

  // The number of threads with enough work. Single tokens are limited by memory bandwidth, chunks by arithmetic.
  int64_t threads() const {
    int64_t bytes = 0, flops = 0;
    for (int64_t i = 0; i < singles; ++i) bytes += std::max(0, lengths[i]) * 2 * groups * size * sizeof(T);
    for (int64_t i = singles; i < singles + chunks; ++i) flops += std::max(0, lengths[i]) * 4 * groups * size * heads * chunk;
    return std::min(items(), 1 + bytes / BYTES_PER_THREAD + flops / FLOPS_PER_THREAD);
  }
};

// Causal attention over the rows of a batch. Shapes: queries and the result [batch, length, groups * heads, size], keys and
// values [batch, length, groups, size], optional sinks [groups * heads].
struct Dense {
  const float *query, *key, *value, *sinks;
  float* result;
  static constexpr float* log_sums = nullptr;
  int64_t batch, length, groups, heads, size, window;
  float scale, softcap;

  int64_t tile() const { return std::max<int64_t>(1, FEWEST_ROWS / heads); }
  int64_t tiles() const { return (length + tile() - 1) / tile(); }
  int64_t items() const { return batch * groups * tiles(); }
  int64_t threads() const { return std::min(items(), 1 + items() * tile() * length * heads * size * 2 / FLOPS_PER_THREAD); }
};

// Returns scratch memory for `count` floats, aligned to a cache line. The next call in the same thread reuses it.
float* scratch_memory(size_t count) {
  static thread_local std::vector<float> memory;
  if (memory.size() < count + 16) memory.resize(count + 16);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

#if defined(__x86_64__)
namespace avx512 {
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include "each.h"
}  // namespace avx512
namespace avx2 {
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "each.h"
}  // namespace avx2
#endif
namespace baseline {
#define LANES 8
#define TARGET
#include "each.h"
}  // namespace baseline

// Processes items in the calling thread and in `helpers` threads of XLA's pool. The caller does not wait for helpers that
// have not started, since the pool may be busy.
template <class Function>
void for_each(ffi::ThreadPool& pool, int64_t helpers, int64_t items, const Function& function) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto take = [shared, items, &function] {  // a helper that starts late finds no item and does not touch `function`
    for (int64_t item; (item = shared->next.fetch_add(1)) < items;) {
      function(item);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([take] { take(); });
  take();
  while (shared->done.load(std::memory_order_acquire) < items) std::this_thread::yield();
}

// Returns the number of threads that one of several devices may use.
int64_t most_threads(ffi::ThreadPool& pool, int64_t devices) {
  static const int64_t processors = std::thread::hardware_concurrency();
  return std::max<int64_t>(1, std::min(pool.num_threads(), processors / devices));
}

template <class Call>
ffi::Error run(ffi::ThreadPool& pool, const Call& call, int64_t devices, int64_t instructions) {
  if (instructions > best_instructions()) return ffi::Error::InvalidArgument("the processor lacks these instructions");
  const int64_t chosen = instructions ? instructions : best_instructions();
  const int64_t threads = std::min(most_threads(pool, devices), call.threads());
  // noexcept: running out of scratch memory ends the process, because an exception would leave helpers running.
  for_each(pool, std::max<int64_t>(0, threads - 1), call.items(), [&](int64_t item) noexcept {
    switch (chosen) {
#if defined(__x86_64__)
      case AVX512: return avx512::attend(call, item);
      case AVX2: return avx2::attend(call, item);
#endif
      default: return baseline::attend(call, item);
    }
  });
  return ffi::Error::Success();
}

ffi::Error paged(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> scales,
                 ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> sinks,
                 ffi::Result<ffi::AnyBuffer> result, ffi::Result<ffi::Buffer<ffi::F32>> log_sums, float scale, int64_t window,
                 float softcap, int64_t singles, int64_t chunk, bool invariant, int64_t devices, int64_t instructions) {
  const auto q = query.dimensions(), p = pages.dimensions(), t = table.dimensions();
  const bool ranks = q.size() == 3 && p.size() == 5 && t.size() == 2 && lengths.dimensions().size() == 1;
  const bool sizes = ranks && p[1] == 2 && p[4] == q[2] && q[2] % 16 == 0 && p[2] > 0 && q[1] > 0 && q[1] % p[2] == 0;
  const bool requests = sizes && singles >= 0 && singles <= t[0] && chunk > 0 && lengths.dimensions()[0] == t[0] &&
                        q[0] >= singles + (t[0] - singles) * chunk;
  const bool same = result->element_type() == query.element_type() && result->element_count() == query.element_count();
  const bool shapes = requests && same && devices > 0 && p[0] > 0 &&
                      (scales.element_count() == 0 || scales.element_count() * p[4] == pages.element_count()) &&
                      (sinks.element_count() == 0 || sinks.element_count() == q[1]) &&
                      (log_sums->element_count() == 0 || log_sums->element_count() == q[0] * q[1]);
  if (!shapes) return ffi::Error::InvalidArgument("axlearn_paged_attention: the shapes of the operands do not match");
  auto with = [&](auto of_queries, auto of_pages) {
    using Q = decltype(of_queries);
    using T = decltype(of_pages);
    Paged<Q, T> call{static_cast<const Q*>(query.untyped_data()), static_cast<const T*>(pages.untyped_data()),
                           scales.element_count() ? scales.typed_data() : nullptr, table.typed_data(), lengths.typed_data(),
                           sinks.element_count() ? sinks.typed_data() : nullptr,
                           static_cast<Q*>(result->untyped_data()),
                           log_sums->element_count() ? log_sums->typed_data() : nullptr, p[2], q[1] / p[2], q[2], p[3], t[1], p[0], singles,
                           t[0] - singles, chunk, window, scale, softcap, invariant};
    call.divide(most_threads(pool, devices));
    return run(pool, call, devices, instructions);
  };
  auto with_queries = [&](auto of_queries) {
    switch (pages.element_type()) {
      case ffi::F32: return with(of_queries, float{});
      case ffi::BF16: return with(of_queries, BFloat16{});
      case ffi::S8: return with(of_queries, int8_t{});
      default: return ffi::Error::InvalidArgument("axlearn_paged_attention: pages must be float32, bfloat16 or int8");
    }
  };
  switch (query.element_type()) {
    case ffi::F32: return with_queries(float{});
    case ffi::BF16: return with_queries(BFloat16{});
    default: return ffi::Error::InvalidArgument("axlearn_paged_attention: queries must be float32 or bfloat16");
  }
}

ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> key, ffi::Buffer<ffi::F32> value,
                 ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> result, float scale, int64_t window,
                 float softcap, int64_t devices, int64_t instructions) {
  const auto q = query.dimensions(), k = key.dimensions();
  const bool sizes = q.size() == 4 && k.size() == 4 && q[0] == k[0] && q[1] == k[1] && q[3] == k[3] && q[3] % 16 == 0 &&
                     k[2] > 0 && q[2] > 0 && q[2] % k[2] == 0;
  const auto v = value.dimensions();
  const bool alike = std::equal(k.begin(), k.end(), v.begin(), v.end()) && result->element_count() == query.element_count();
  const bool shapes = sizes && alike && devices > 0 && (sinks.element_count() == 0 || sinks.element_count() == q[2]);
  if (!shapes) return ffi::Error::InvalidArgument("axlearn_attention: the shapes of the operands do not match");
  const Dense call{query.typed_data(), key.typed_data(), value.typed_data(),
                   sinks.element_count() ? sinks.typed_data() : nullptr, result->typed_data(),
                   q[0], q[1], k[2], q[2] / k[2], q[3], window, scale, softcap};
  return run(pool, call, devices, instructions);
}

}  // namespace

int64_t best_instructions() {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
  return BASELINE;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("devices")
                                  .Attr<int64_t>("instructions"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, paged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("singles")
                                  .Attr<int64_t>("chunk")
                                  .Attr<bool>("invariant")
                                  .Attr<int64_t>("devices")
                                  .Attr<int64_t>("instructions"));

}  // namespace axlearn
