// Vectors of floats for one instruction set.
//
// Include once per instruction set, inside a namespace, with LANES (floats per vector) and TARGET (the attribute of every
// function) defined. The compiler lowers these GCC and Clang vector types to the instructions of the target.

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

TARGET static inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }

TARGET static inline Vector load(const BFloat16* x) {
  const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(x), Words) << 16;
  return reinterpret_cast<const Vector&>(words);
}

TARGET static inline Vector load(const int8_t* x) {
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(x), Vector);
}

TARGET static inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

// Rounds to nearest, ties to even. NaN stays NaN.
TARGET static inline void store(BFloat16* to, Vector x) {
  const Words bits = reinterpret_cast<const Words&>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words kept = x == x ? rounded : (Words{} + 0x7fc0);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept, Halves);
}

TARGET static inline float sum(Vector x) {
#if LANES == 16
  const Eight half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Eight half = x;
#endif
  const Four quarter = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

TARGET static inline Vector largest(Vector a, Vector b) { return a > b ? a : b; }

// Compares halves, because a chain of LANES comparisons would take as long as the products of a row of scores.
TARGET static inline float largest(Vector x) {
#if LANES == 16
  const Eight low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
  const Eight high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  const Eight half = low > high ? low : high;
#else
  const Eight half = x;
#endif
  const Four left = __builtin_shufflevector(half, half, 0, 1, 2, 3), right = __builtin_shufflevector(half, half, 4, 5, 6, 7);
  const Four quarter = left > right ? left : right;
  const float even = quarter[0] > quarter[2] ? quarter[0] : quarter[2];
  const float odd = quarter[1] > quarter[3] ? quarter[1] : quarter[3];
  return even > odd ? even : odd;
}

// e^x for x <= 88; 0 below -87, where float32 has no normal numbers left.
TARGET static inline Vector exponential(Vector x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the lowest bits
  const Vector shifted = x * 1.44269504f + magic;
  const Vector whole = shifted - magic;
  const Vector rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // log 2 in two parts (Cody & Waite, 1980)
  Vector series = rest * 1.98756915e-4f + 1.39819995e-3f;  // coefficients of Cephes' expf (Moshier, 1989)
  series = series * rest + 8.33345194e-3f;
  series = series * rest + 4.16657958e-2f;
  series = series * rest + 1.66666655e-1f;
  series = series * rest + 5.00000012e-1f;
  series = series * rest * rest + rest + 1.0f;
  const Integers bits = reinterpret_cast<const Integers&>(series) + (reinterpret_cast<const Integers&>(shifted) << 23);
  const Vector result = reinterpret_cast<const Vector&>(bits);
  return x < -87.0f ? Vector{} : (x == x ? result : x);
}

// cap * tanh(x / cap)
TARGET static inline Vector capped(Vector x, float cap) {
  const Vector ratio = x / cap;
  const Vector size = ratio < 0.0f ? -ratio : ratio;
  const Vector power = exponential(-2.0f * size);
  const Vector tanh = (1.0f - power) / (1.0f + power);
  return cap * (ratio < 0.0f ? -tanh : tanh);
}

// Takes from two vectors the elements whose indices have the bit BIT cleared (low) or set (high): those of `a` at the indices of
// the result with the bit cleared, those of `b` at the others.
#define LOW_HALF(j) ((j & BIT) ? LANES + j - BIT : j)
#define HIGH_HALF(j) ((j & BIT) ? LANES + j : j + BIT)
#if LANES == 16
#define EACH(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#else
#define EACH(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#endif
template <int BIT>
TARGET static inline Vector low_half(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, EACH(LOW_HALF));
}

template <int BIT>
TARGET static inline Vector high_half(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, EACH(HIGH_HALF));
}
#undef EACH
#undef LOW_HALF
#undef HIGH_HALF

// One step of a transposition: rows whose indices differ in the bit BIT exchange halves of blocks of that size.
template <int BIT>
TARGET static inline void exchange(Vector* rows) {
  for (int i = 0; i < LANES; ++i) {
    if (i & BIT) continue;
    const Vector a = rows[i], b = rows[i + BIT];
    rows[i] = low_half<BIT>(a, b);
    rows[i + BIT] = high_half<BIT>(a, b);
  }
}

TARGET static inline void transpose(Vector* rows) {
  exchange<1>(rows);
  exchange<2>(rows);
  exchange<4>(rows);
#if LANES == 16
  exchange<8>(rows);
#endif
}

template <int BIT>
TARGET static inline void add_halves(Vector* rows) {
  for (int i = 0; i < BIT; ++i) rows[i] = low_half<BIT>(rows[i], rows[i + BIT]) + high_half<BIT>(rows[i], rows[i + BIT]);
}

template <int BIT>
TARGET static inline void compare_halves(Vector* rows) {
  for (int i = 0; i < BIT; ++i)
    rows[i] = largest(low_half<BIT>(rows[i], rows[i + BIT]), high_half<BIT>(rows[i], rows[i + BIT]));
}

// Returns the sums of LANES rows, each bitwise equal to `sum` of the row. Changes the rows.
TARGET static inline Vector sums(Vector* rows) {
#if LANES == 16
  add_halves<8>(rows);
#endif
  add_halves<4>(rows);
  add_halves<2>(rows);
  add_halves<1>(rows);
  return rows[0];
}

// Returns the largest elements of LANES rows. Changes the rows.
TARGET static inline Vector largest_of_rows(Vector* rows) {
#if LANES == 16
  compare_halves<8>(rows);
#endif
  compare_halves<4>(rows);
  compare_halves<2>(rows);
  compare_halves<1>(rows);
  return rows[0];
}
