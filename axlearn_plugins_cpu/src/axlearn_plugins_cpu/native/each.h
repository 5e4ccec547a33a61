// The kernels for one set of instructions: included once for each, with LANES and TARGET defined.
#include "lanes.h"
#include "pages.h"
#include "decode.h"
#include "chunk.h"

// The item `number` of a call: a key-value head of a request of one token, or of a tile of a chunk.
template <class Q, class T>
TARGET void attend(const Call<Q, T>& call, int64_t number) {
  const int64_t group = number % call.groups, row = number / call.groups;
  if (row < call.singles) return decode(call, row, group);
  const int64_t tiles = call.tiles();
  chunk(call, (row - call.singles) / tiles, (row - call.singles) % tiles, group);
}

#undef LANES
#undef TARGET
