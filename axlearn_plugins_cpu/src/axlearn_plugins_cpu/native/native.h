// Interface between the kernels and the Python module.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace axlearn {

namespace ffi = xla::ffi;

enum Instructions : int64_t { BASELINE = 1, AVX2 = 2, AVX512 = 3 };

int64_t best_instructions();

extern "C" XLA_FFI_Error* attention(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* paged_attention(XLA_FFI_CallFrame*);

}  // namespace axlearn
