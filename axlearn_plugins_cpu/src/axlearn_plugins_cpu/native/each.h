// The kernels for one instruction set. Include once per instruction set, with LANES and TARGET defined.
#include "lanes.h"
#include "pages.h"
#include "decode.h"
#include "chunk.h"

// Processes one key-value head of a request with a single token.
template <class Q, class T>
TARGET void attend_token(const Paged<Q, T>& call, int64_t request, int64_t group) {
  if (!call.invariant) return decode(call, request, group);
  const Chunk<Paged<Q, T>, Pages<Q, T>> work{call, {call, request, group}, group};
  work.run(request, 1, call.lengths[request] - 1, call.most_pages * call.page_size);
}

// Processes item `number` of a call: one key-value head of a single-token request, or of a tile of a segment.
template <class Q, class T>
TARGET void attend(const Paged<Q, T>& call, int64_t number) {
  if (number < call.groups * call.singles) return attend_token(call, number / call.groups, number % call.groups);
  number -= call.groups * call.singles;
  auto segment = call.segments.begin();
  for (; number >= call.groups * segment->tiles; ++segment) number -= call.groups * segment->tiles;
  // The tiles of a group follow each other, so that they find its keys in the processor's cache.
  const int64_t group = number / segment->tiles, from = number % segment->tiles * segment->tile;
  const Chunk<Paged<Q, T>, Pages<Q, T>> work{call, {call, segment->request, group}, group};
  const int64_t tokens = std::min(segment->tile, segment->tokens - from);
  work.run(segment->token + from, tokens, segment->position + from, call.most_pages * call.page_size);
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
