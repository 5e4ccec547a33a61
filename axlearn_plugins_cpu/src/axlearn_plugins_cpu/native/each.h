// The kernels for one instruction set. Include once per instruction set, with LANES and TARGET defined.
#include "lanes.h"
#include "pages.h"
#include "decode.h"
#include "chunk.h"

// Processes item `number` of a call: one key-value head of a single-token request, or of a tile of a chunk.
template <class Q, class T>
TARGET void attend(const Paged<Q, T>& call, int64_t number) {
  const int64_t group = number % call.groups, row = number / call.groups;
  if (row < call.singles && !call.invariant) return decode(call, row, group);
  const int64_t most = call.most_pages * call.page_size;
  if (row < call.singles) {
    const Chunk<Paged<Q, T>, Pages<Q, T>> work{call, {call, row, group}, group};
    return work.run(row, 1, call.lengths[row] - 1, most);
  }
  const int64_t tiles = call.tiles(), chunk = (row - call.singles) / tiles, request = call.singles + chunk;
  const int64_t from = (row - call.singles) % tiles * call.tile();
  const Chunk<Paged<Q, T>, Pages<Q, T>> work{call, {call, request, group}, group};
  const int64_t tokens = std::min(call.tile(), call.chunk - from);
  work.run(call.singles + chunk * call.chunk + from, tokens, call.lengths[request] - call.chunk + from, most);
}

// Processes item `number`: one key-value head of a tile of one row of the batch.
TARGET void attend(const Dense& call, int64_t number) {
  const int64_t group = number % call.groups, tile = number / call.groups;
  const int64_t row = tile / call.tiles(), from = tile % call.tiles() * call.tile();
  const int64_t keys = (row * call.length * call.groups + group) * call.size;
  const Chunk<Dense, Rows> work{call, {call.key + keys, call.value + keys, call.groups * call.size}, group};
  work.run(row * call.length + from, std::min(call.tile(), call.length - from), from, call.length);
}

#undef LANES
#undef TARGET
